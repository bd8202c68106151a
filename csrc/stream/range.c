/* stream/range: reading whole ranges (load, fallback) and measuring the disk, through the same reader and pool. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stream/internal.h"

enum { MS_CHUNK = 1 << 20, MS_RATE_SLOTS = 4 };

static void pump(ms_stream * s) {
    uint64_t seen = s->reader->ops->completed(s->reader);
    if (s->reader->ops->poll(s->reader) == 0) {
        s->reader->ops->wait(s->reader, seen, 5 * 1000 * 1000);
    }
}

/* A free read for `range`; waits for one. */
static int take_read(ms_stream * s, ms_range * range) {
    for (;;) {
        pthread_mutex_lock(&s->lock);
        int i = s->n_free_read > 0 ? s->free_read[--s->n_free_read] : -1;
        if (i >= 0) {
            s->flight[i] = (ms_flight) {.range = range};
            range->left++;
        }
        pthread_mutex_unlock(&s->lock);
        if (i >= 0) {
            return i;
        }
        pump(s);
    }
}

/* Cannot give up: the kernel still writes to memory that the caller would free. A wait beyond the deadline is said. */
static void finish(ms_stream * s, ms_range * range) {
    uint64_t begin = ms_now_ns(), limit = s->options.deadline_ns;
    for (;;) {
        pthread_mutex_lock(&s->lock);
        int left = range->left;
        pthread_mutex_unlock(&s->lock);
        if (left == 0) {
            return;
        }
        if (limit > 0 && ms_now_ns() - begin > limit) {
            ms_log(MS_LOG_WARN, "%d reads of '%s' did not end in %.1f s (deadline_ms); still waiting for them", left,
                   s->index->path[0], (double) limit * 1e-9);
            limit = 0;
        }
        pump(s);
    }
}

static void submit_part(ms_stream * s, ms_range * range, int file, uint64_t at, uint64_t bytes, uint64_t need,
                        void * dst) {
    int i = take_read(s, range);
    ms_read * read = &s->read[i];
    *read = (ms_read) {.file = &s->file[file],
                       .offset = at,
                       .bytes = (uint32_t) bytes,
                       .need = (uint32_t) need,
                       .dst = dst,
                       .tag = (uint64_t) i};
    s->reader->ops->submit(s->reader, &read, 1);
}

static moestream_status fail_changed(const ms_stream * s, int file, int os_errno, moestream_error * err) {
    return ms_fail(err, MOESTREAM_ERR_IO, os_errno, "'%s' was written to since it was opened; open the model anew",
                   s->index->path[file]);
}

moestream_status ms_stream_read_range(ms_stream * s, int file, uint64_t offset, uint64_t bytes, void * dst,
                                      bool windowed, moestream_error * err) {
    if (!windowed || bytes == 0) {
        moestream_status st = ms_file_pread(&s->file[file], dst, bytes, offset, err);
        int changed = st == MOESTREAM_OK ? ms_file_changed(&s->file[file]) : 0;
        return changed == 0 ? st : fail_changed(s, file, changed, err);
    }
    uint64_t at = ms_align_down(offset, MS_PAGE), end = offset + bytes;
    uint8_t * to = (uint8_t *) dst - (offset - at);
    MS_ASSERT((uintptr_t) to % MS_PAGE == 0);
    ms_range range = {0};
    while (at < end) {
        uint64_t window = ms_align_up(end, MS_PAGE) - at;
        window = window < MS_CHUNK ? window : MS_CHUNK;
        submit_part(s, &range, file, at, window, window < end - at ? window : end - at, to);
        at += window;
        to += window;
    }
    finish(s, &range);
    if (range.status == MOESTREAM_ERR_EOF) {
        return ms_fail(err, MOESTREAM_ERR_EOF, 0, "'%s' ended before offset %" PRIu64, s->index->path[file], end);
    }
    if (range.status != MOESTREAM_OK && range.os_errno == ESTALE) {
        return fail_changed(s, file, ESTALE, err);
    }
    if (range.status != MOESTREAM_OK) {
        return ms_fail(err, range.status, range.os_errno, "could not read '%s' at offset %" PRIu64 ": %s (errno %d)",
                       s->index->path[file], range.failed_offset, strerror(range.os_errno), range.os_errno);
    }
    return MOESTREAM_OK;
}

moestream_status ms_stream_check_files(const ms_stream * s, moestream_error * err) {
    for (int i = 0; i < s->n_files; i++) {
        int changed = ms_file_changed(&s->file[i]);
        if (changed != 0) {
            return fail_changed(s, i, changed, err);
        }
    }
    return MOESTREAM_OK;
}

/* Submits the read of a random slice into `dst`, of at most `room` bytes; returns the bytes. Several reads may go into one
 * place: nobody looks at it. */
static uint64_t submit_random(ms_stream * s, ms_range * range, uint64_t * state, void * dst, uint64_t room) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    const ms_group * group = &s->index->group[(*state >> 33) % (uint64_t) s->index->n_groups];
    const ms_bank * bank = &s->index->bank[group->bank[(*state >> 11) % (uint64_t) group->n_slices]];
    uint64_t offset = ms_bank_offset(bank, (int) ((*state >> 17) % (uint64_t) bank->n_expert));
    uint64_t at = ms_align_down(offset, MS_PAGE), window = ms_align_up(offset + bank->slice_bytes, MS_PAGE) - at;
    window = window < room ? window : room;
    uint64_t need = window < offset + bank->slice_bytes - at ? window : offset + bank->slice_bytes - at;
    submit_part(s, range, bank->file, at, window, need, dst);
    return window;
}

bool ms_stream_rate(ms_stream * s, int depth, uint64_t ns, uint64_t bytes, double * bytes_per_s) {
    uint64_t state = ms_now_ns() | 1, done = 0, room = s->slab.slot_bytes[0];
    int n_slots = s->slab.n_slots[0] < MS_RATE_SLOTS ? s->slab.n_slots[0] : MS_RATE_SLOTS, n = 0;
    ms_range range = {0};
    for (int i = 0; i < n_slots; i++) {
        memset(ms_slab_slot(&s->slab, i), 0, room); /* first touches must not be measured */
    }
    uint64_t begin = ms_now_ns();
    while (n_slots > 0 && done < bytes && ms_now_ns() - begin < ns && range.status == MOESTREAM_OK) {
        pthread_mutex_lock(&s->lock);
        int left = range.left;
        pthread_mutex_unlock(&s->lock);
        if (left >= depth) {
            if (!s->reader->ops->by_poll) {
                pump(s);
            } else if (s->reader->ops->poll(s->reader) == 0) {
                ms_relax(0); /* as compute threads do; a sleep would be measured */
            }
            continue;
        }
        done += submit_random(s, &range, &state, ms_slab_slot(&s->slab, n++ % n_slots), room);
    }
    finish(s, &range);
    double seconds = (double) (ms_now_ns() - begin) * 1e-9;
    *bytes_per_s = (double) done / (seconds > 0 ? seconds : 1e-9);
    s->tuned_bytes += done;
    return range.status == MOESTREAM_OK && done > 0;
}

moestream_status ms_stream_measure_disk(ms_stream * s, uint64_t bytes, double * bytes_per_s, moestream_error * err) {
    uint64_t room = 0;
    for (int c = 0; c < s->sizes.n_classes; c++) {
        room = s->sizes.slot_bytes[c] > room ? s->sizes.slot_bytes[c] : room;
    }
    int lanes = s->depth < 64 ? s->depth : 64;
    if (room == 0) {
        return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0, "there are no streamed experts to read");
    }
    ms_slab slab; /* as the cache has it: into huge pages the same disk reads more than twice as fast */
    moestream_status st = ms_slab_open(&slab, 1, &room, &lanes, err);
    if (st != MOESTREAM_OK) {
        return st;
    }
    memset(slab.base, 0, (size_t) slab.bytes); /* first touches must not be measured */
    uint64_t state = ms_now_ns() | 1, done = 0, n = 0, begin = ms_now_ns();
    ms_range range = {0};
    while (done < bytes && range.status == MOESTREAM_OK) {
        done += submit_random(s, &range, &state, ms_slab_slot(&slab, (int) (n++ % (uint64_t) lanes)), room);
    }
    finish(s, &range);
    double seconds = (double) (ms_now_ns() - begin) * 1e-9;
    ms_slab_close(&slab);
    if (range.status != MOESTREAM_OK) {
        return ms_fail(err, range.status, range.os_errno, "reading at offset %" PRIu64 " failed: %s",
                       range.failed_offset, strerror(range.os_errno));
    }
    *bytes_per_s = (double) done / (seconds > 0 ? seconds : 1e-9);
    return MOESTREAM_OK;
}

void ms_stream_get_stats(ms_stream * s, moestream_stats * out) {
    pthread_mutex_lock(&s->lock);
    moestream_stats st = s->stats;
    st.n_evictions = s->cache.n_evictions;
    st.n_slots = (uint64_t) s->cache.n_slots;
    st.cache_bytes = s->slab.bytes;
    for (int i = 0; i < s->cache.n_slots; i++) {
        st.cache_used_bytes += s->cache.slot[i].group >= 0 ? s->slab.slot_bytes[s->cache.slot[i].cls] : 0;
    }
    pthread_mutex_unlock(&s->lock);
    st.n_retries = s->reader->ops->retries(s->reader);
    st.io = s->reader->ops->engine;
    st.queue_depth = s->depth_limit;
    st.load_expert_bytes = s->tuned_bytes;
    st.direct = 1;
    for (int i = 0; i < s->n_files; i++) {
        st.direct &= atomic_load(&s->file[i].direct);
    }
    *out = st;
}

const char * ms_stream_describe(ms_stream * s) {
    return s->describe;
}

uint64_t ms_stream_in_use(ms_stream * s) {
    pthread_mutex_lock(&s->lock);
    uint64_t n = (uint64_t) s->n_pinned;
    pthread_mutex_unlock(&s->lock);
    return n;
}
