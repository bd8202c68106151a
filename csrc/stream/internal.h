/* stream/internal: the one struct behind the files of this room. See stream.h for the lock. */
#ifndef MS_STREAM_INTERNAL_H
#define MS_STREAM_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "stream/stream.h"

/* A read of a range for the load or for measuring, split into parts. */
typedef struct ms_range {
    int left; /* parts submitted and not done; under the lock */
    moestream_status status;
    int os_errno;
    uint64_t failed_offset;
} ms_range;

/* What a read in the pool is for. */
typedef struct ms_flight {
    ms_range * range; /* NULL: a slice */
    int32_t slot;
    int32_t slice;
    bool prefetch;
    uint64_t since_ns; /* when it was handed to the engine; 0: not in flight */
} ms_flight;

/* How fast reads come back, to warn of storage that is too slow (pace.c); under the lock. */
typedef struct ms_pace {
    uint64_t busy_ns, busy_bytes; /* time with a demand read in flight, and what arrived meanwhile */
    uint64_t busy_since;          /* 0: none in flight */
    uint64_t fastest_ns;          /* of the reads since the last look */
    int n_reads;                  /* since the last look */
    bool warned;
    uint64_t run_busy_ns, run_busy_bytes; /* where the present run of reads began */
    int n_slow_runs;
} ms_pace;

typedef struct ms_want {
    int32_t slot;
    int32_t slice;
} ms_want;

/* Slices that wait for a free read; a ring that can hold every slice of every slot. */
typedef struct ms_queue {
    ms_want * want;
    int capacity, head, count;
} ms_queue;

typedef struct ms_failure {
    int32_t status;
    int32_t os_errno;
    uint64_t since_ns; /* when that read was handed over */
} ms_failure;

/* The thread that gives a slab its pages (prefault.c). */
typedef struct ms_prefault {
    pthread_t thread;
    bool running;
    uint8_t * base;
    uint64_t bytes;
    atomic_bool stop;
} ms_prefault;

/* The thread that reads a list of experts in idle time (warm.c). */
typedef struct ms_warm {
    pthread_t thread;
    bool running;
    atomic_bool stop;
    ms_hot * list;
    int n;
} ms_warm;

struct ms_stream {
    const ms_index * index;
    ms_stream_options options;
    ms_stream_sizes sizes;
    int * group_class;    /* [n_groups] */
    uint32_t * slice_at;  /* [n_groups * MS_MAX_SLICES] where a slice's window begins in its slot */
    ms_file * file;       /* [n_files] */
    int n_files;
    ms_reader * reader;
    int depth;       /* reads there are */
    int depth_limit; /* slices in flight while few wait: what tune.c chose */
    char why_depth[160], why_io[80];
    uint64_t tuned_bytes; /* read to choose it */
    char describe[512];

    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t freed; /* a slot was released, or a read finished */
    int n_waiting_free;
    ms_slab slab;
    ms_slot_cache cache;
    ms_failure * failure; /* [slots * MS_MAX_SLICES] */
    ms_read * read;       /* [depth] */
    ms_flight * flight;   /* [depth] */
    int * free_read;      /* [depth] */
    int n_free_read;
    ms_queue demand, ahead;
    uint8_t * ahead_waiting; /* [slots * MS_MAX_SLICES] 1: a guess in the queue that still counts */
    int n_ahead_waiting;
    int * ahead_open;     /* [n_groups] guesses since the group was last settled */
    uint8_t * use_order;  /* [n_groups * MS_MAX_SLICES] slices of a group as its operations come, learnt in passing */
    uint8_t * n_used;     /* [n_groups] operations of the running pass so far */
    int n_demand_in_flight;
    int n_ahead_in_flight;
    int n_pinned;
    int n_operations; /* begun and not ended: their threads look at slots without the lock */
    uint64_t * checksum;  /* [n_banks][n_expert] with verify; 0 = not read yet */
    size_t * checksum_at; /* [n_banks] */
    moestream_stats stats;
    ms_pace pace;
    uint64_t busy_ns, busy_since; /* time with any slice in flight; since when there is one, 0: none */

    pthread_mutex_t resize_lock; /* one resize at a time; guards prefault and warm */
    ms_prefault prefault;
    ms_warm warm;
};

/* Where each slice of group g lies in its slot. */
void ms_stream_layout(const ms_index * index, int g, uint32_t * slice_at);

/* What a budget buys; used by open and resize. */
typedef struct ms_cache_parts {
    ms_slab slab;
    ms_slot_cache cache;
    ms_failure * failure;
    ms_queue demand, ahead;
    uint8_t * ahead_waiting;
} ms_cache_parts;
moestream_status ms_stream_make_cache(const ms_stream * stream, uint64_t budget, ms_cache_parts * out,
                                      moestream_error * err);
void ms_stream_drop_cache(ms_cache_parts * parts);

/* open.c: a reader for this stream's slab, depth and completions. */
moestream_status ms_stream_open_reader(ms_stream * stream, int io, ms_reader ** out, moestream_error * err);

/* tune.c: chooses depth_limit and, where it was left to us, the engine; nothing is in flight yet. */
void ms_tune(ms_stream * stream);

/* The slice that is used `k`th in a pass over the group. */
static inline int ms_used_locked(const ms_stream * stream, int group, int k) {
    return stream->use_order[group * MS_MAX_SLICES + k];
}

/* range.c: bytes per second of random slices with `depth` reads in flight, for about `ns` and at most `bytes`, into slots
 * that nothing uses yet. false if a read failed. */
bool ms_stream_rate(ms_stream * stream, int depth, uint64_t ns, uint64_t bytes, double * bytes_per_s);

/* prefault.c: a slab has to be kept until the thread is stopped. */
void ms_prefault_start(ms_prefault * prefault, const ms_slab * slab);
void ms_prefault_stop(ms_prefault * prefault);

/* A demand read of `bytes` was handed over, or ended after `age_ns`. `done` returns true once, when a warning is due:
 * then call ms_pace_warn without the lock. */
void ms_pace_begin_locked(ms_stream * stream, uint64_t now);
bool ms_pace_done_locked(ms_stream * stream, uint64_t now, uint64_t age_ns, uint64_t bytes, bool last);
void ms_pace_warn(ms_stream * stream);

/* A read has ended (the reader's callback). */
void ms_stream_done(void * user, ms_read * read, moestream_status status, int os_errno);

/* The pages that hold a slice are what is read for it. */
static inline uint64_t ms_slice_window(const ms_bank * bank, int expert) {
    uint64_t begin = ms_bank_offset(bank, expert);
    return ms_align_up(begin + bank->slice_bytes, MS_PAGE) - ms_align_down(begin, MS_PAGE);
}

/* demand.c, for ahead.c */
void ms_queue_push(ms_queue * queue, int32_t slot, int32_t slice);
ms_want ms_queue_pop(ms_queue * queue);
bool ms_stream_request_locked(ms_stream * stream, int slot, int slice, ms_queue * queue, moestream_stats * counts);
void ms_stream_add_counts(moestream_stats * to, const moestream_stats * from);
/* Submits what waits, as far as it may be in flight; called without the lock. */
void ms_stream_submit_waiting(ms_stream * stream);

/* ahead.c, for demand.c: the next guess to read; whether a slice waited among the guesses (it then no longer does); and
 * what becomes of a group's guesses when its layer begins: those not handed over yet are given up and taken out of `counts`'
 * own `mine`, where `counts` asked for them. */
bool ms_ahead_take_locked(ms_stream * stream, ms_want * want);
bool ms_ahead_claim_locked(ms_stream * stream, int slot, int slice);
void ms_ahead_settle_locked(ms_stream * stream, int group, const moestream_stats * counts, moestream_stats * mine);

uint64_t ms_checksum(const uint8_t * bytes, size_t n);

#endif
