/* fake_reader: see the header. One mutex guards everything; it is released around `done`. */
#include "support/fake_reader.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct in_flight {
    ms_read * read;
    uint64_t number;
    uint64_t ready_turn;
    uint64_t ready_ns;
    int attempts;
} in_flight;

typedef struct fake_reader {
    ms_reader reader; /* first: an ms_reader * is a fake_reader * */
    ms_read_done done;
    void * user;
    fake_script script;
    pthread_mutex_t lock;
    in_flight * list; /* oldest first */
    int capacity;
    int n;
    int most;
    uint64_t submitted;
    uint64_t turn;
    uint64_t random;
    uint64_t wakes;
    bool held;
    bool healed;
    uint64_t n_retries;
    atomic_uint_fast64_t completed; /* added to (release) after done, read (acquire) by completed */
} fake_reader;

static uint64_t mix(uint64_t z) { /* splitmix64's finisher */
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* A number that depends on the seed, the read, its attempt and what it is for, not on the order of events. */
static uint64_t fate(const fake_reader * r, uint64_t number, int attempt, uint64_t purpose) {
    return mix(mix(mix(r->script.seed ^ purpose << 56) ^ number) ^ (uint64_t) attempt);
}

static bool within(uint64_t number, uint64_t first, int count) {
    return number >= first && (count == FAKE_FOR_EVER || number - first < (uint64_t) count);
}

/* ---- one attempt at one read ---- */

static int64_t bytes_from_memory(const fake_script * script, const ms_read_part * part, uint32_t want) {
    if (part->offset >= script->n_bytes) {
        return 0;
    }
    uint64_t left = script->n_bytes - part->offset;
    size_t n = want < left ? want : (size_t) left;
    memcpy(part->dst, script->bytes + part->offset, n);
    return (int64_t) n;
}

static int64_t bytes_from_file(const ms_read * read, const ms_read_part * part, uint32_t want) {
    ssize_t n = pread(read->file->fd, part->dst, want, (off_t) part->offset);
    return n >= 0 ? n : -(int64_t) errno;
}

static uint32_t shortened(const fake_reader * r, const in_flight * f, uint32_t bytes) {
    static const uint32_t odd[3] = {1, 511, 4095};
    if (fate(r, f->number, f->attempts, 1) % 100 >= (uint64_t) r->script.short_percent) {
        return bytes;
    }
    uint64_t choice = fate(r, f->number, f->attempts, 2);
    uint32_t n = choice % 4 < 3 ? odd[choice % 4] : (uint32_t) (1 + (choice >> 8) % bytes);
    return n < bytes ? n : bytes;
}

static int64_t attempt(fake_reader * r, in_flight * f) {
    const fake_script * script = &r->script;
    f->attempts++;
    bool fails = !r->healed && script->fail_count != 0 && within(f->number, script->fail_at, script->fail_count) &&
                 (script->fail_attempts == 0 || f->attempts <= script->fail_attempts);
    if (fails) {
        return -(int64_t) script->fail_errno;
    }
    if (fate(r, f->number, f->attempts, 3) % 100 < (uint64_t) script->interrupt_percent) {
        return -EINTR;
    }
    ms_read_part part = ms_read_rest(f->read);
    uint32_t want = shortened(r, f, part.bytes);
    int64_t n = script->bytes != NULL ? bytes_from_memory(script, &part, want) : bytes_from_file(f->read, &part, want);
    bool corrupt = !r->healed && script->corrupt_count != 0 &&
                   within(f->number, script->corrupt_at, script->corrupt_count) && f->read->got == 0;
    if (corrupt && n > 0) {
        uint64_t where = fate(r, f->number, 0, 4);
        uint64_t reach = f->read->need < (uint64_t) n ? f->read->need : (uint64_t) n;
        ((uint8_t *) part.dst)[where % reach] ^= (uint8_t) (1u << (where >> 32) % 8);
    }
    return n;
}

/* ---- turns ---- */

static bool is_ready(const fake_reader * r, const in_flight * f, uint64_t now) {
    return f->ready_turn <= r->turn && f->ready_ns <= now;
}

/* Index of the read that completes next, -1 if none does now. */
static int choose_locked(fake_reader * r, uint64_t now) {
    int n_ready = 0;
    for (int i = 0; i < r->n; i++) {
        n_ready += is_ready(r, &r->list[i], now);
    }
    if (n_ready == 0 || r->held) {
        return -1;
    }
    int skip = 0;
    if (r->script.reorder) {
        r->random = mix(r->random);
        skip = (int) (r->random % (uint64_t) n_ready);
    }
    for (int i = 0;; i++) {
        if (is_ready(r, &r->list[i], now) && skip-- == 0) {
            return i;
        }
    }
}

static int take_turn(fake_reader * r) {
    int n_done = 0;
    pthread_mutex_lock(&r->lock);
    r->turn++;
    uint64_t now = ms_now_ns();
    int limit = r->script.max_deliveries > 0 ? r->script.max_deliveries : r->capacity;
    for (int i; n_done < limit && (i = choose_locked(r, now)) >= 0;) {
        in_flight * f = &r->list[i];
        moestream_status status = MOESTREAM_OK;
        int os_errno = 0;
        if (ms_read_apply(f->read, f->read->file->fd, attempt(r, f), &status, &os_errno) == MS_READ_AGAIN) {
            r->n_retries++;
            continue;
        }
        ms_read * read = f->read;
        memmove(f, f + 1, (size_t) (r->n - i - 1) * sizeof *f);
        r->n--;
        pthread_mutex_unlock(&r->lock);
        r->done(r->user, read, status, os_errno);
        atomic_fetch_add_explicit(&r->completed, 1, memory_order_release);
        n_done++;
        pthread_mutex_lock(&r->lock);
    }
    pthread_mutex_unlock(&r->lock);
    return n_done;
}

/* ---- the seam ---- */

static void fake_submit(ms_reader * reader, ms_read ** reads, int n) {
    fake_reader * r = (fake_reader *) reader;
    uint64_t now = ms_now_ns();
    pthread_mutex_lock(&r->lock);
    MS_ASSERT(n >= 0 && n <= r->capacity - r->n);
    for (int i = 0; i < n; i++) {
        in_flight * f = &r->list[r->n++];
        memset(f, 0, sizeof *f);
        f->read = reads[i];
        f->number = r->submitted++;
        f->ready_turn = r->turn + fate(r, f->number, 0, 5) % ((uint64_t) r->script.delay_turns + 1);
        f->ready_ns = now + fate(r, f->number, 0, 6) % (r->script.delay_ns + 1);
        reads[i]->submitted_ns = now;
        reads[i]->got = 0;
        reads[i]->retries = 0;
        reads[i]->link = 0;
    }
    r->most = r->n > r->most ? r->n : r->most;
    pthread_mutex_unlock(&r->lock);
}

static int fake_poll(ms_reader * reader) {
    return take_turn((fake_reader *) reader);
}

static uint64_t fake_completed(ms_reader * reader) {
    return atomic_load_explicit(&((fake_reader *) reader)->completed, memory_order_acquire);
}

static uint64_t wakes_of(fake_reader * r) {
    pthread_mutex_lock(&r->lock);
    uint64_t wakes = r->wakes;
    pthread_mutex_unlock(&r->lock);
    return wakes;
}

static void fake_wait(ms_reader * reader, uint64_t seen, uint64_t timeout_ns) {
    fake_reader * r = (fake_reader *) reader;
    const struct timespec pause = {0, 20000};
    uint64_t wakes = wakes_of(r);
    uint64_t start = ms_now_ns();
    while (fake_completed(reader) == seen && wakes_of(r) == wakes && ms_now_ns() - start < timeout_ns) {
        if (take_turn(r) == 0) {
            nanosleep(&pause, NULL);
        }
    }
}

static void fake_wake(ms_reader * reader) {
    fake_reader * r = (fake_reader *) reader;
    pthread_mutex_lock(&r->lock);
    r->wakes++;
    pthread_mutex_unlock(&r->lock);
}

static uint64_t fake_retries(ms_reader * reader) {
    fake_reader * r = (fake_reader *) reader;
    pthread_mutex_lock(&r->lock);
    uint64_t n = r->n_retries;
    pthread_mutex_unlock(&r->lock);
    return n;
}

static void fake_close(ms_reader * reader) {
    if (reader == NULL) {
        return;
    }
    fake_reader * r = (fake_reader *) reader;
    fake_reader_hold(reader, false);
    while (fake_reader_in_flight(reader) > 0) {
        take_turn(r);
    }
    pthread_mutex_destroy(&r->lock);
    free(r->list);
    free(r);
}

static const struct ms_reader_ops fake_ops = {
    .name = "fake",
    .engine = MOESTREAM_IO_PREAD,
    .by_poll = true,
    .submit = fake_submit,
    .poll = fake_poll,
    .wait = fake_wait,
    .wake = fake_wake,
    .completed = fake_completed,
    .retries = fake_retries,
    .close = fake_close,
};

moestream_status fake_reader_open(ms_reader ** out, const ms_reader_options * options, const fake_script * script,
                                  moestream_error * err) {
    fake_reader * r = ms_calloc(1, sizeof *r);
    in_flight * list = ms_calloc((size_t) options->depth, sizeof *list);
    if (r == NULL || list == NULL || pthread_mutex_init(&r->lock, NULL) != 0) {
        free(list);
        free(r);
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory was left for the fake reader");
    }
    r->reader.ops = &fake_ops;
    r->done = options->done;
    r->user = options->user;
    r->script = *script;
    r->random = mix(script->seed);
    r->list = list;
    r->capacity = options->depth;
    atomic_init(&r->completed, 0);
    *out = &r->reader;
    return MOESTREAM_OK;
}

/* ---- what tests ask for ---- */

void fake_reader_heal(ms_reader * reader) {
    fake_reader * r = (fake_reader *) reader;
    pthread_mutex_lock(&r->lock);
    r->healed = true;
    pthread_mutex_unlock(&r->lock);
}

void fake_reader_hold(ms_reader * reader, bool held) {
    fake_reader * r = (fake_reader *) reader;
    pthread_mutex_lock(&r->lock);
    r->held = held;
    pthread_mutex_unlock(&r->lock);
}

uint64_t fake_reader_submitted(ms_reader * reader) {
    fake_reader * r = (fake_reader *) reader;
    pthread_mutex_lock(&r->lock);
    uint64_t n = r->submitted;
    pthread_mutex_unlock(&r->lock);
    return n;
}

int fake_reader_in_flight(ms_reader * reader) {
    fake_reader * r = (fake_reader *) reader;
    pthread_mutex_lock(&r->lock);
    int n = r->n;
    pthread_mutex_unlock(&r->lock);
    return n;
}

int fake_reader_most_in_flight(ms_reader * reader) {
    fake_reader * r = (fake_reader *) reader;
    pthread_mutex_lock(&r->lock);
    int n = r->most;
    pthread_mutex_unlock(&r->lock);
    return n;
}
