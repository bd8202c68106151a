/*
 * stream/tune: how many slices to keep in flight while few wait, and which engine reads them, by a short measurement where
 * nobody has said, and the reasons of all that was chosen. Reads random slices at a few depths and takes the smallest depth
 * that is about as fast as the best: fewer reads beside the one that is needed next. Without a measurement as many slices
 * as make MS_UNTUNED_BYTES. At the depth taken, pread must beat io_uring clearly to be taken: its threads need the cores.
 * Guarantees: takes about MS_TUNE_NS, and reads at most a hundredth of the experts; measures each device once in the life
 * of the process. Never runs for a model below MS_TUNE_FROM, where it would read more than it could save.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "stream/internal.h"

/* A test build sets it to reach this with a small file. */
#ifndef MS_TUNE_FROM
#define MS_TUNE_FROM ((uint64_t) 8 << 30)
#endif

enum { N_DEPTHS = 5, N_MEASUREMENTS = N_DEPTHS + 1, MS_KNOWN = 16, MS_UNTUNED_BYTES = 2 << 20 };
static const int DEPTHS[N_DEPTHS] = {2, 4, 8, 24, 96};
static const uint64_t MS_TUNE_NS = 48 * 1000 * 1000;
static const double ABOUT_AS_FAST = 0.8, CLEARLY_FASTER = 1.25;

/* ---- devices that were measured ---- */

typedef struct known_device {
    uint64_t device;
    int io, n_readers; /* as asked for */
    bool direct;
    int depth;
    int engine;
    double uring, pread; /* bytes per second at that depth; 0: not measured */
} known_device;

static pthread_mutex_t known_lock = PTHREAD_MUTEX_INITIALIZER;
static known_device known[MS_KNOWN];
static int n_known; /* all that ever came; the oldest make room */

/* Its entry, NULL if there is none. Under known_lock. */
static known_device * known_locked(const known_device * d) {
    for (int i = 0; i < n_known && i < MS_KNOWN; i++) {
        if (known[i].device == d->device && known[i].io == d->io && known[i].n_readers == d->n_readers &&
            known[i].direct == d->direct) {
            return &known[i];
        }
    }
    return NULL;
}

static bool recall(known_device * d) {
    pthread_mutex_lock(&known_lock);
    const known_device * found = known_locked(d);
    *d = found != NULL ? *found : *d;
    pthread_mutex_unlock(&known_lock);
    return found != NULL;
}

static void remember(const known_device * d) {
    pthread_mutex_lock(&known_lock);
    known_device * at = known_locked(d);
    if (at == NULL) {
        at = &known[n_known++ % MS_KNOWN];
        n_known = n_known < 2 * MS_KNOWN ? n_known : n_known - MS_KNOWN;
    }
    *at = *d;
    pthread_mutex_unlock(&known_lock);
}

/* ---- the measurement ---- */

static uint64_t expert_bytes(const ms_stream * s, uint64_t * n_slices) {
    uint64_t sum = 0;
    *n_slices = 0;
    for (int g = 0; g < s->index->n_groups; g++) {
        for (int k = 0; k < s->index->group[g].n_slices; k++) {
            sum += s->index->tensor[s->index->bank[s->index->group[g].bank[k]].tensor].bytes;
            *n_slices += (uint64_t) s->index->group[g].n_expert;
        }
    }
    return sum;
}

/* About as many bytes as local storage has to be given at once to be busy. */
static int untuned_depth(const ms_stream * s, uint64_t bytes, uint64_t n_slices) {
    uint64_t n = (uint64_t) MS_UNTUNED_BYTES * n_slices / (bytes > 0 ? bytes : 1);
    n = n > (uint64_t) DEPTHS[0] ? n : (uint64_t) DEPTHS[0];
    return n < (uint64_t) s->depth ? (int) n : s->depth;
}

/* false where a read failed: whoever needs those bytes will be told. */
static bool rate_at(ms_stream * s, int depth, uint64_t bytes, double * rate) {
    return ms_stream_rate(s, depth, MS_TUNE_NS / N_MEASUREMENTS, bytes / 100 / N_MEASUREMENTS, rate);
}

static bool measure_depth(ms_stream * s, uint64_t bytes, known_device * d) {
    double rate[N_DEPTHS] = {0}, best = 0, taken = 0;
    for (int i = 0; i < N_DEPTHS; i++) {
        if (!rate_at(s, DEPTHS[i], bytes, &rate[i])) {
            return false;
        }
        best = rate[i] > best ? rate[i] : best;
    }
    for (int i = N_DEPTHS - 1; i >= 0; i--) {
        if (rate[i] >= ABOUT_AS_FAST * best) {
            d->depth = DEPTHS[i];
            taken = rate[i];
        }
    }
    *(d->engine == MOESTREAM_IO_URING ? &d->uring : &d->pread) = taken;
    int n = snprintf(s->why_depth, sizeof(s->why_depth), "measured at open, MB/s by slices in flight:");
    for (int i = 0; i < N_DEPTHS; i++) {
        n += snprintf(s->why_depth + n, sizeof(s->why_depth) - (size_t) n, " %d: %.0f", DEPTHS[i], rate[i] * 1e-6);
    }
    return true;
}

/* The other engine in place of the one there is, which is returned: nothing is in flight yet. */
static ms_reader * swap_reader(ms_stream * s, ms_reader * reader) {
    ms_reader * was = s->reader;
    s->reader = reader;
    return was;
}

static void measure_engine(ms_stream * s, uint64_t bytes, known_device * d) {
    moestream_error err = {.struct_size = sizeof(err)};
    ms_reader * other;
    if (ms_stream_open_reader(s, MOESTREAM_IO_PREAD, &other, &err) != MOESTREAM_OK) {
        return;
    }
    other = swap_reader(s, other);
    if (!rate_at(s, d->depth, bytes, &d->pread)) {
        d->pread = 0;
    }
    if (d->pread > CLEARLY_FASTER * d->uring) {
        d->engine = MOESTREAM_IO_PREAD;
    } else {
        other = swap_reader(s, other);
    }
    other->ops->close(other);
}

static bool may_choose_engine(const ms_stream * s) {
    return s->options.io == MOESTREAM_IO_AUTO && s->options.open_reader == NULL &&
           s->reader->ops->engine == MOESTREAM_IO_URING;
}

/* false where the engine that there is now was not measured then: the kernel may grant io_uring at one time and not at
 * another. */
static bool use_known(ms_stream * s, known_device * d) {
    ms_reader * other;
    moestream_error err = {.struct_size = sizeof(err)};
    if (may_choose_engine(s) && d->engine == MOESTREAM_IO_PREAD && d->uring > 0 &&
        ms_stream_open_reader(s, d->engine, &other, &err) == MOESTREAM_OK) {
        other = swap_reader(s, other);
        other->ops->close(other);
    }
    d->engine = s->reader->ops->engine;
    double rate = d->engine == MOESTREAM_IO_URING ? d->uring : d->pread;
    if (rate > 0) {
        snprintf(s->why_depth, sizeof(s->why_depth), "measured before on this device, at %.0f MB/s", rate * 1e-6);
    }
    return rate > 0;
}

void ms_tune(ms_stream * s) {
    uint64_t n_slices, bytes = expert_bytes(s, &n_slices);
    if (!s->options.choose_depth) {
        snprintf(s->why_depth, sizeof(s->why_depth), "asked for");
        return;
    }
    s->depth_limit = untuned_depth(s, bytes, n_slices);
    snprintf(s->why_depth, sizeof(s->why_depth), "about %d MiB of slices; not measured", MS_UNTUNED_BYTES >> 20);
    if (bytes < MS_TUNE_FROM || s->depth < DEPTHS[N_DEPTHS - 1]) {
        return;
    }
    known_device d = {.device = s->file[0].id.device,
                      .io = s->options.io,
                      .n_readers = s->options.n_readers,
                      .direct = atomic_load(&s->file[0].direct),
                      .engine = s->reader->ops->engine};
    if (!recall(&d) || !use_known(s, &d)) {
        d.uring = d.pread = 0;
        if (!measure_depth(s, bytes, &d)) {
            return;
        }
        if (may_choose_engine(s)) {
            measure_engine(s, bytes, &d);
        }
        remember(&d);
    }
    s->depth_limit = d.depth;
    if (d.uring > 0 && d.pread > 0) {
        snprintf(s->why_io, sizeof(s->why_io), "auto: at this depth io_uring %.0f MB/s, pread %.0f", d.uring * 1e-6,
                 d.pread * 1e-6);
    }
}

/* ---- reasons ---- */

size_t ms_stream_choices(ms_stream * s, char * buf, size_t n) {
    const ms_stream_options * o = &s->options;
    int direct = 0;
    for (int i = 0; i < s->n_files; i++) {
        direct += atomic_load(&s->file[i].direct);
    }
    const char * why_io = o->io != MOESTREAM_IO_AUTO ? "asked for"
                          : s->why_io[0] != '\0'     ? s->why_io
                          : s->reader->ops->engine == MOESTREAM_IO_URING
                              ? "auto: the kernel grants it"
                              : "auto: io_uring is not to be had (see the log)";
    const char * why_direct = o->direct == MOESTREAM_DIRECT_OFF || o->direct == MOESTREAM_DIRECT_ON ? "asked for"
                              : direct == s->n_files ? "auto: a probe gave the same bytes as the page cache"
                                                     : "auto: refused by the file system (see the log)";
    int written = snprintf(buf, n, "io=%s: %s\ndirect=%s: %s\nqueue_depth=%d: %s\n", s->reader->ops->name, why_io,
                           direct == s->n_files ? "yes" : (direct > 0 ? "in part" : "no"), why_direct, s->depth_limit,
                           s->why_depth);
    return written > 0 ? (size_t) written : 0;
}
