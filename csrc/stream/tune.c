/*
 * stream/tune: how many reads to keep in flight, by a short measurement where nobody has said, and the reasons of all that
 * was chosen. Reads random slices at a few depths and takes the smallest depth that is about as fast as the best: fewer
 * reads in front of the one that is needed next.
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

enum { N_DEPTHS = 3, MS_KNOWN = 16 };
static const int DEPTHS[N_DEPTHS] = {16, 48, 128};
static const uint64_t MS_TUNE_NS = 90 * 1000 * 1000;
static const double ABOUT_AS_FAST = 0.95;

/* ---- devices that were measured ---- */

typedef struct known_device {
    uint64_t device;
    int engine;
    bool direct;
    int depth;
    double bytes_per_s;
} known_device;

static pthread_mutex_t known_lock = PTHREAD_MUTEX_INITIALIZER;
static known_device known[MS_KNOWN];
static int n_known; /* all that ever came; the oldest make room */

static known_device describe_device(const ms_stream * s) {
    return (known_device) {
        .device = s->file[0].id.device, .engine = s->reader->ops->engine, .direct = atomic_load(&s->file[0].direct)};
}

static bool recall(known_device * d) {
    bool found = false;
    pthread_mutex_lock(&known_lock);
    for (int i = 0; i < n_known && i < MS_KNOWN; i++) {
        if (known[i].device == d->device && known[i].engine == d->engine && known[i].direct == d->direct) {
            *d = known[i];
            found = true;
        }
    }
    pthread_mutex_unlock(&known_lock);
    return found;
}

static void remember(const known_device * d) {
    pthread_mutex_lock(&known_lock);
    known[n_known++ % MS_KNOWN] = *d;
    n_known = n_known < 2 * MS_KNOWN ? n_known : n_known - MS_KNOWN;
    pthread_mutex_unlock(&known_lock);
}

/* ---- the measurement ---- */

static uint64_t expert_bytes(const ms_stream * s) {
    uint64_t sum = 0;
    for (int g = 0; g < s->index->n_groups; g++) {
        for (int k = 0; k < s->index->group[g].n_slices; k++) {
            sum += s->index->tensor[s->index->bank[s->index->group[g].bank[k]].tensor].bytes;
        }
    }
    return sum;
}

void ms_tune(ms_stream * s) {
    snprintf(s->why_depth, sizeof(s->why_depth), "the default");
    if (!s->options.choose_depth || expert_bytes(s) < MS_TUNE_FROM || s->depth < DEPTHS[N_DEPTHS - 1]) {
        if (!s->options.choose_depth) {
            snprintf(s->why_depth, sizeof(s->why_depth), "asked for");
        }
        return;
    }
    known_device d = describe_device(s);
    bool measured = !recall(&d);
    if (measured) {
        double rate[N_DEPTHS] = {0}, best = 0;
        for (int i = 0; i < N_DEPTHS; i++) {
            uint64_t most = expert_bytes(s) / 100 / N_DEPTHS;
            if (!ms_stream_rate(s, DEPTHS[i], MS_TUNE_NS / N_DEPTHS, most, &rate[i])) {
                return; /* a read failed: whoever needs those bytes will be told */
            }
            best = rate[i] > best ? rate[i] : best;
        }
        for (int i = N_DEPTHS - 1; i >= 0; i--) {
            d.depth = rate[i] >= ABOUT_AS_FAST * best ? DEPTHS[i] : d.depth;
        }
        d.bytes_per_s = best;
        remember(&d);
        snprintf(s->why_depth, sizeof(s->why_depth),
                 "measured at open: %.0f, %.0f, %.0f MB/s with %d, %d, %d in flight", rate[0] * 1e-6, rate[1] * 1e-6,
                 rate[2] * 1e-6, DEPTHS[0], DEPTHS[1], DEPTHS[2]);
    } else {
        snprintf(s->why_depth, sizeof(s->why_depth), "measured before on this device, at %.0f MB/s",
                 d.bytes_per_s * 1e-6);
    }
    s->depth_limit = d.depth;
}

/* ---- reasons ---- */

size_t ms_stream_choices(ms_stream * s, char * buf, size_t n) {
    const ms_stream_options * o = &s->options;
    int direct = 0;
    for (int i = 0; i < s->n_files; i++) {
        direct += atomic_load(&s->file[i].direct);
    }
    const char * why_io = o->io != MOESTREAM_IO_AUTO ? "asked for"
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
