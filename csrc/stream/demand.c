/*
 * stream/demand: acquire, wait, release, read ahead; and what happens when a read completes.
 * Guarantees and locks: see stream.h. No allocation here.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "stream/internal.h"

enum { MS_BATCH = 64, MS_WAIT_NS = 5 * 1000 * 1000, MS_SPIN_NS = 4 * 1000 * 1000 };

/* ---- queues of slices that wait for a free read ---- */

void ms_queue_push(ms_queue * q, int32_t slot, int32_t slice) {
    MS_ASSERT(q->count < q->capacity);
    q->want[(q->head + q->count) % q->capacity] = (ms_want) {slot, slice};
    q->count++;
}

ms_want ms_queue_pop(ms_queue * q) {
    ms_want w = q->want[q->head];
    q->head = (q->head + 1) % q->capacity;
    q->count--;
    return w;
}

static ms_read * prepare_locked(ms_stream * s, ms_want want, bool ahead) {
    int i = s->free_read[--s->n_free_read];
    const ms_slot * slot = &s->cache.slot[want.slot];
    const ms_bank * bank = &s->index->bank[s->index->group[slot->group].bank[want.slice]];
    uint64_t begin = ms_bank_offset(bank, slot->expert);
    uint64_t at = ms_align_down(begin, MS_PAGE);
    uint64_t now = ms_now_ns();
    s->busy_since = s->n_demand_in_flight + s->n_ahead_in_flight == 0 ? now : s->busy_since;
    s->flight[i] = (ms_flight) {.slot = want.slot, .slice = want.slice, .prefetch = ahead, .since_ns = now};
    s->read[i] = (ms_read) {
        .file = &s->file[bank->file],
        .offset = at,
        .bytes = (uint32_t) ms_slice_window(bank, slot->expert),
        .need = (uint32_t) (begin + bank->slice_bytes - at),
        .dst = ms_slab_slot(&s->slab, want.slot) + s->slice_at[slot->group * MS_MAX_SLICES + want.slice],
        .tag = (uint64_t) i,
    };
    if (ahead) {
        s->n_ahead_in_flight++;
    } else {
        ms_pace_begin_locked(s, now);
        s->n_demand_in_flight++;
    }
#ifdef MS_MUTATE_WINDOW_OFF_BY_ONE
    s->read[i].offset += MS_PAGE;
#endif
    return &s->read[i];
}

/* Fills `batch` with reads for what waits; to be submitted after unlocking.
 * A disk works on all it has been given at once: each read that is not needed yet delays those that are. So few are in
 * flight, `limit`, in the order in which their bytes will be used; but of many that wait (a prompt) a quarter, as nobody
 * looks at the disk while experts are computed. Demand first, whatever guesses are in flight; those get what is left. */
static int take_batch_locked(ms_stream * s, ms_read ** batch, int max, int limit) {
    int quarter = s->demand.count / 4;
    limit = quarter > limit ? quarter : limit;
    limit = limit < s->depth ? limit : s->depth;
    int n = 0;
    while (n < max && s->n_free_read > 0 && s->demand.count > 0 && s->n_demand_in_flight < limit) {
        batch[n++] = prepare_locked(s, ms_queue_pop(&s->demand), false);
    }
    ms_want want;
    while (n < max && s->n_free_read > 0 && s->demand.count == 0 &&
           s->n_demand_in_flight + s->n_ahead_in_flight < limit && ms_ahead_take_locked(s, &want)) {
        batch[n++] = prepare_locked(s, want, true);
    }
    return n;
}

/* MS_BATCH at a time; called without the lock. */
static void submit(ms_stream * s, int limit) {
    for (;;) {
        ms_read * batch[MS_BATCH];
        pthread_mutex_lock(&s->lock);
        int n = take_batch_locked(s, batch, MS_BATCH, limit);
        pthread_mutex_unlock(&s->lock);
        if (n == 0) {
            return;
        }
        s->reader->ops->submit(s->reader, batch, n);
        if (n < MS_BATCH) {
            return;
        }
    }
}

void ms_stream_submit_waiting(ms_stream * s) {
    submit(s, s->depth_limit);
}

/* By the rate at which demand has arrived while somebody looked: over these gaps a rate would count the gaps, too. */
void ms_stream_fill(ms_stream * s, uint64_t ns) {
    pthread_mutex_lock(&s->lock);
    const ms_pace * p = &s->pace;
    double bytes = p->busy_ns > 0 ? (double) ns * (double) p->busy_bytes / (double) p->busy_ns : 0;
    double n = bytes > 0 ? bytes * (double) s->stats.n_reads / (double) s->stats.read_bytes : 0;
    bool more = s->demand.count + s->ahead.count > 0;
    pthread_mutex_unlock(&s->lock);
    if (more && s->reader->ops->by_poll) { /* an engine's own threads look after themselves */
        submit(s, s->depth_limit + (int) (n < s->depth ? n : s->depth));
    }
}

/* ---- completion ---- */

static uint64_t * checksum_of(ms_stream * s, const ms_slot * slot, int slice) {
    int b = s->index->group[slot->group].bank[slice];
    return &s->checksum[s->checksum_at[b] + (size_t) slot->expert];
}

static uint64_t slice_checksum(const ms_stream * s, int slot, int slice) {
    const ms_slot * at = &s->cache.slot[slot];
    const ms_bank * bank = &s->index->bank[s->index->group[at->group].bank[slice]];
    return ms_checksum(ms_stream_payload(s, slot, slice), (size_t) bank->slice_bytes);
}

/* Returns with the lock held, and whether a warning about the pace of reads is due. */
static bool slice_done(ms_stream * s, const ms_flight * f, uint32_t bytes, moestream_status status, int os_errno) {
    uint64_t sum = 0;
    bool warn = false;
    bool ok = status == MOESTREAM_OK;
    if (ok && s->options.verify) {
        sum = slice_checksum(s, f->slot, f->slice);
    }
    pthread_mutex_lock(&s->lock);
    if (sum != 0) {
        uint64_t * kept = checksum_of(s, &s->cache.slot[f->slot], f->slice);
        if (*kept == 0) {
            *kept = sum;
        } else if (*kept != sum) {
            ok = false;
            status = MOESTREAM_ERR_CORRUPT;
        }
    }
    s->failure[f->slot * MS_MAX_SLICES + f->slice] = (ms_failure) {status, os_errno, f->since_ns};
#ifndef MS_MUTATE_PUBLISH_EARLY
    ms_slot_publish(&s->cache, f->slot, f->slice, ok);
#endif
    ms_slot_end_read(&s->cache, f->slot);
    uint64_t now = ms_now_ns();
    if (f->prefetch) {
        s->n_ahead_in_flight--;
    } else {
        s->n_demand_in_flight--;
        warn = ms_pace_done_locked(s, now, now - f->since_ns, bytes, s->n_demand_in_flight == 0);
    }
    if (s->n_demand_in_flight + s->n_ahead_in_flight == 0) {
        s->busy_ns += now - s->busy_since;
        s->busy_since = 0;
    }
    return warn;
}

void ms_stream_done(void * user, ms_read * read, moestream_status status, int os_errno) {
    ms_stream * s = user;
    int i = (int) read->tag;
    ms_flight f = s->flight[i];
    bool warn = false;
#ifndef MS_MUTATE_IGNORE_CHANGES
    if (status == MOESTREAM_OK) {
        os_errno = ms_file_changed(read->file); /* one fstat a read: bytes of another version must not be used */
        status = os_errno == 0 ? status : MOESTREAM_ERR_IO;
    }
#endif
    if (f.range != NULL) {
        pthread_mutex_lock(&s->lock);
        if (status != MOESTREAM_OK && f.range->status == MOESTREAM_OK) {
            f.range->status = status;
            f.range->os_errno = os_errno;
            f.range->failed_offset = read->offset;
        }
        f.range->left--;
    } else {
        warn = slice_done(s, &f, read->bytes, status, os_errno);
    }
    s->flight[i].since_ns = 0;
    s->free_read[s->n_free_read++] = i;
    bool more = s->demand.count + s->ahead.count > 0;
    if (s->n_waiting_free > 0) {
        pthread_cond_broadcast(&s->freed);
    }
    pthread_mutex_unlock(&s->lock);
    if (warn) {
        ms_pace_warn(s);
    }
    if (more) {
        ms_stream_submit_waiting(s);
    }
}

/* ---- demand ---- */

/* Requests one slice if it is neither there nor on its way; returns true if it was. */
bool ms_stream_request_locked(ms_stream * s, int slot, int slice, ms_queue * queue, moestream_stats * counts) {
    ms_slice_state state = ms_slot_state(&s->cache, slot, slice);
    bool again = state == MS_FAILED && s->cache.slot[slot].pins == 1; /* nobody else looks at the failure */
    if (state != MS_EMPTY && !again) {
        if (queue == &s->demand && ms_ahead_claim_locked(s, slot, slice)) {
            ms_queue_push(queue, slot, slice); /* it waited among the guesses; now it is needed */
        }
        return true;
    }
    const ms_bank * bank = &s->index->bank[s->index->group[s->cache.slot[slot].group].bank[slice]];
    counts->n_reads++;
    counts->slice_bytes += bank->slice_bytes;
    counts->read_bytes += ms_slice_window(bank, s->cache.slot[slot].expert);
    ms_slot_begin_read(&s->cache, slot, slice);
#ifdef MS_MUTATE_PUBLISH_EARLY
    ms_slot_publish(&s->cache, slot, slice, true);
#endif
    ms_queue_push(queue, slot, slice);
    return false;
}

void ms_stream_add_counts(moestream_stats * to, const moestream_stats * from) {
    to->n_hits += from->n_hits;
    to->n_misses += from->n_misses;
    to->n_coalesced += from->n_coalesced;
    to->n_reads += from->n_reads;
    to->read_bytes += from->read_bytes;
    to->slice_bytes += from->slice_bytes;
    to->n_prefetch += from->n_prefetch;
    to->n_prefetch_useful += from->n_prefetch_useful;
    to->prefetch_bytes += from->prefetch_bytes;
}

static void count(moestream_stats * counts, ms_slot * slot, bool found, bool in_flight) {
    if (found) {
        counts->n_hits++;
        counts->n_coalesced += in_flight;
    } else {
        counts->n_misses++;
    }
    if (slot->prefetched) {
        slot->prefetched = false;
        counts->n_prefetch_useful++;
    }
}

/* Always a permutation. With several contexts in one layer at once it may be another one for a while. */
static void note_use_locked(ms_stream * s, const ms_demand * d) {
    uint8_t *order = &s->use_order[d->group * MS_MAX_SLICES], *n = &s->n_used[d->group];
    *n = d->leader ? 0 : *n;
    for (int k = *n; k < s->index->group[d->group].n_slices; k++) {
        if (order[k] == d->slice) {
            order[k] = order[*n];
            order[(*n)++] = (uint8_t) d->slice;
            break;
        }
    }
}

/* What is there is touched first, so that it is not the victim of what is missing beside it. */
static void begin_visit_locked(ms_stream * s, const ms_demand * d, const int32_t * experts, int n) {
    ms_slot_visit(&s->cache, d->group, d->n_visits > 0 ? d->n_visits : 1);
    for (int i = 0; i < n; i++) {
        int slot = ms_slot_find(&s->cache, d->group, experts[i]);
        if (slot >= 0) {
            ms_slot_touch(&s->cache, slot, 0);
        }
    }
}

static int scan_slots(const ms_stream * s) {
    return s->index->n_expert_used > 0 ? s->index->n_expert_used : 1;
}

int ms_stream_acquire(ms_stream * s, const ms_demand * d, const int32_t * experts, int n, int32_t * slots,
                      moestream_stats * counts) {
    moestream_stats mine = {0};
    int n_slices = s->index->group[d->group].n_slices, got = 0, n_fresh = 0;
    pthread_mutex_lock(&s->lock);
    s->n_operations += d->begins;
    if (d->begins) {
        note_use_locked(s, d);
    }
    if (d->leader && !d->scan) {
        begin_visit_locked(s, d, experts, n);
    }
    for (; got < n; got++) {
        int slot = ms_slot_find(&s->cache, d->group, experts[got]);
        bool fresh = slot < 0;
        if (fresh) {
            /* a scan takes a few slots at a time and gives the same ones up again */
            slot = d->scan && n_fresh >= scan_slots(s) ? -1 : ms_slot_assign(&s->cache, d->group, experts[got], 0);
            if (slot < 0) {
                break;
            }
            n_fresh++;
            s->cache.slot[slot].passing = d->scan;
        }
#ifndef MS_MUTATE_SKIP_PIN
        ms_slot_pin(&s->cache, slot);
#endif
        if (!d->scan) {
            ms_slot_touch(&s->cache, slot, d->passed != NULL ? d->passed[got] : 0);
        }
        s->n_pinned++;
        bool found = ms_stream_request_locked(s, slot, d->slice, &s->demand, &mine);
        slots[got] = slot;
        if (d->leader) {
            /* the other slices are requested in a second round below, so that what is needed now is read first */
            bool in_flight = ms_slot_state(&s->cache, slot, d->slice) == MS_READING;
            count(&mine, &s->cache.slot[slot], found, in_flight);
        }
    }
    if (d->all_slices) {
        for (int k = 0; k < n_slices; k++) {
            int slice = ms_used_locked(s, d->group, k);
            for (int i = 0; i < got && slice != d->slice; i++) {
                ms_stream_request_locked(s, slots[i], slice, &s->demand, &mine);
            }
        }
    }
    if (d->leader) {
        ms_ahead_settle_locked(s, d->group, counts, &mine);
    }
    bool more = s->demand.count > 0;
    ms_stream_add_counts(&s->stats, &mine);
    pthread_mutex_unlock(&s->lock);
    ms_stream_add_counts(counts, &mine);
    if (more) {
        ms_stream_submit_waiting(s);
    }
    return got;
}

bool ms_stream_retry(ms_stream * s, int slot, int slice, uint64_t before_ns) {
    moestream_stats mine = {0};
    pthread_mutex_lock(&s->lock);
    ms_slice_state state = ms_slot_state(&s->cache, slot, slice);
    const ms_failure * why = &s->failure[slot * MS_MAX_SLICES + slice];
    if (state == MS_FAILED && why->since_ns < before_ns && s->cache.slot[slot].pins == 1) {
        ms_stream_request_locked(s, slot, slice, &s->demand, &mine);
        ms_stream_add_counts(&s->stats, &mine);
        state = MS_READING;
    }
    pthread_mutex_unlock(&s->lock);
    if (mine.n_reads > 0) {
        ms_stream_submit_waiting(s);
    }
    return state != MS_FAILED;
}

bool ms_stream_fits(ms_stream * s, int group, int n) {
    pthread_mutex_lock(&s->lock);
    int cls = s->group_class[group];
    bool fits = cls >= 0 && n <= s->cache.n_slots && n <= s->slab.n_slots[cls] &&
                n <= ms_slot_free_count(&s->cache, cls) +
                         (s->n_ahead_in_flight + s->n_ahead_waiting) / MS_MAX_SLICES; /* guesses give way */
    pthread_mutex_unlock(&s->lock);
    return fits;
}

ms_slice_state ms_stream_state(const ms_stream * s, int slot, int slice) {
    return ms_slot_state(&s->cache, slot, slice);
}

const uint8_t * ms_stream_payload(const ms_stream * s, int slot, int slice) {
    const ms_slot * at = &s->cache.slot[slot];
    const ms_bank * bank = &s->index->bank[s->index->group[at->group].bank[slice]];
    return ms_slab_slot(&s->slab, slot) + s->slice_at[at->group * MS_MAX_SLICES + slice] +
           ms_bank_offset(bank, at->expert) % MS_PAGE;
}

/* Local storage answers sooner than a sleeping thread is woken, and threads that are woken one after the other end one
 * after the other. Threads of an engine of its own need the core instead. */
void ms_stream_spin(ms_stream * s, int slot, int slice) {
    if (!s->reader->ops->by_poll) {
        return;
    }
    for (uint64_t until = ms_now_ns() + MS_SPIN_NS;
         ms_stream_state(s, slot, slice) == MS_READING && ms_now_ns() < until;) {
        if (ms_stream_poll(s) == 0) {
            ms_relax(0);
        }
    }
}

void ms_stream_wait(ms_stream * s, int slot, int slice) {
    uint64_t seen = s->reader->ops->completed(s->reader);
    if (ms_stream_state(s, slot, slice) == MS_READING) {
        s->reader->ops->wait(s->reader, seen, MS_WAIT_NS);
    }
}

static void timed_wait_locked(ms_stream * s, uint64_t ns) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long) ns;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    s->n_waiting_free++;
    pthread_cond_timedwait(&s->freed, &s->lock, &until);
    s->n_waiting_free--;
}

void ms_stream_wait_free(ms_stream * s) {
    ms_stream_poll(s);
    pthread_mutex_lock(&s->lock);
    timed_wait_locked(s, MS_WAIT_NS / 5);
    pthread_mutex_unlock(&s->lock);
}

int ms_stream_poll(ms_stream * s) {
    return s->reader->ops->poll(s->reader);
}

uint64_t ms_stream_busy_ns(ms_stream * s) {
    pthread_mutex_lock(&s->lock);
    uint64_t busy = s->busy_ns + (s->busy_since > 0 ? ms_now_ns() - s->busy_since : 0);
    pthread_mutex_unlock(&s->lock);
    return busy;
}

static void release_locked(ms_stream * s, int slice, const int32_t * slots, int n) {
    for (int i = 0; i < n; i++) {
#ifndef MS_MUTATE_SKIP_PIN
        ms_slot_unpin(&s->cache, slots[i]);
#endif
        s->n_pinned--;
        if (s->cache.slot[slots[i]].passing && s->cache.slot[slots[i]].pins == 0) {
            ms_slot_demote(&s->cache, slots[i]);
        }
        if (s->options.cache_none && s->cache.slot[slots[i]].pins == 0 &&
            ms_slot_state(&s->cache, slots[i], slice) == MS_READY) {
            ms_slot_clear(&s->cache, slots[i], slice);
        }
    }
    if (s->n_waiting_free > 0) {
        pthread_cond_broadcast(&s->freed);
    }
}

void ms_stream_release(ms_stream * s, int slice, const int32_t * slots, int n) {
    pthread_mutex_lock(&s->lock);
    release_locked(s, slice, slots, n);
    pthread_mutex_unlock(&s->lock);
}

void ms_stream_end(ms_stream * s, int slice, const int32_t * slots, int n) {
    pthread_mutex_lock(&s->lock);
    release_locked(s, slice, slots, n);
    MS_ASSERT(s->n_operations > 0);
    s->n_operations--;
    pthread_mutex_unlock(&s->lock);
}

bool ms_stream_idle(ms_stream * s) {
    pthread_mutex_lock(&s->lock);
    bool idle = s->n_demand_in_flight == 0 && s->demand.count == 0;
    pthread_mutex_unlock(&s->lock);
    return idle;
}

/* ---- why something failed ---- */

moestream_status ms_stream_read_error(ms_stream * s, int slot, int slice, moestream_error * err) {
    pthread_mutex_lock(&s->lock);
    ms_failure why = s->failure[slot * MS_MAX_SLICES + slice];
    ms_slot at = {.group = s->cache.slot[slot].group, .expert = s->cache.slot[slot].expert};
    pthread_mutex_unlock(&s->lock);
    const ms_bank * bank = &s->index->bank[s->index->group[at.group].bank[slice]];
    const char * name = s->index->tensor[bank->tensor].name;
    const char * path = s->index->path[bank->file];
    uint64_t offset = ms_bank_offset(bank, at.expert);
    switch (why.status) {
        case MOESTREAM_ERR_CORRUPT:
            return ms_fail(err, MOESTREAM_ERR_CORRUPT, 0,
                           "expert %d of '%s' (layer %d, slice %d) differs from what was read first, from '%s' at "
                           "offset %" PRIu64,
                           at.expert, name, s->index->group[at.group].layer, slice, path, offset);
        case MOESTREAM_ERR_EOF:
            return ms_fail(err, MOESTREAM_ERR_EOF, 0,
                           "'%s' ended inside expert %d of '%s': %" PRIu64 " bytes at offset %" PRIu64
                           " were asked for",
                           path, at.expert, name, bank->slice_bytes, offset);
        default:
            if (why.os_errno == ESTALE) {
                return ms_fail(err, MOESTREAM_ERR_IO, ESTALE,
                               "'%s' was written to since it was opened, so expert %d of '%s' was not taken from it; "
                               "open the model anew",
                               path, at.expert, name);
            }
            return ms_fail(err, MOESTREAM_ERR_IO, why.os_errno,
                           "could not read expert %d of '%s' from '%s' at offset %" PRIu64 ": %s (errno %d)", at.expert,
                           name, path, offset, strerror(why.os_errno), why.os_errno);
    }
}

uint64_t ms_stream_read_age(ms_stream * s, int slot, int slice) {
    uint64_t age = 0;
    pthread_mutex_lock(&s->lock);
    uint64_t oldest = UINT64_MAX;
    for (int i = 0; i < s->depth; i++) {
        const ms_flight * f = &s->flight[i];
        if (f->range == NULL && f->since_ns != 0) {
            bool mine = f->slot == slot && f->slice == slice;
            age = mine ? ms_now_ns() - f->since_ns : age;
            oldest = f->since_ns < oldest ? f->since_ns : oldest;
        }
    }
    if (age == 0 && oldest != UINT64_MAX && ms_slot_state(&s->cache, slot, slice) == MS_READING) {
        age = ms_now_ns() - oldest; /* it waits for its turn behind that one */
    }
    pthread_mutex_unlock(&s->lock);
    return age;
}

moestream_status ms_stream_deadline_error(ms_stream * s, int slot, int slice, uint64_t waited_ns,
                                          moestream_error * err) {
    const ms_slot * at = &s->cache.slot[slot];
    const ms_bank * bank = &s->index->bank[s->index->group[at->group].bank[slice]];
    return ms_fail(err, MOESTREAM_ERR_IO, ETIMEDOUT,
                   "reading expert %d of '%s' from '%s' at offset %" PRIu64 " did not finish in %.1f s (deadline_ms)",
                   at->expert, s->index->tensor[bank->tensor].name, s->index->path[bank->file],
                   ms_bank_offset(bank, at->expert), (double) waited_ns * 1e-9);
}

moestream_status ms_stream_verify(ms_stream * s, int slot, int slice, moestream_error * err) {
    if (!s->options.verify) {
        return MOESTREAM_OK;
    }
    uint64_t sum = slice_checksum(s, slot, slice);
    pthread_mutex_lock(&s->lock);
    bool same = *checksum_of(s, &s->cache.slot[slot], slice) == sum;
    if (!same) {
        s->failure[slot * MS_MAX_SLICES + slice] = (ms_failure) {MOESTREAM_ERR_CORRUPT, 0, 0};
    }
    pthread_mutex_unlock(&s->lock);
    return same ? MOESTREAM_OK : ms_stream_read_error(s, slot, slice, err);
}

/* Four independent lanes of multiply and rotate: fast enough to check every use, different for any flipped bit. Not
 * meant against an adversary. Never 0, which means "not read yet". */
uint64_t ms_checksum(const uint8_t * bytes, size_t n) {
    const uint64_t k = 0x9e3779b97f4a7c15u;
    uint64_t lane[4] = {k, k ^ 1, k ^ 2, n};
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        uint64_t w[4];
        memcpy(w, bytes + i, sizeof(w));
        for (int j = 0; j < 4; j++) {
            lane[j] = (lane[j] ^ w[j]) * k;
            lane[j] ^= lane[j] >> 29;
        }
    }
    for (; i < n; i++) {
        lane[0] = (lane[0] ^ bytes[i]) * k;
    }
    uint64_t sum = k;
    for (int j = 0; j < 4; j++) {
        sum = (sum ^ lane[j]) * k;
        sum ^= sum >> 32;
    }
    return sum | 1;
}
