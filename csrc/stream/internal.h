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
} ms_flight;

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
} ms_failure;

struct ms_stream {
    const ms_index * index;
    ms_stream_options options;
    ms_stream_sizes sizes;
    int * group_class;    /* [n_groups] */
    uint32_t * slice_at;  /* [n_groups * MS_MAX_SLICES] where a slice's window begins in its slot */
    ms_file * file;       /* [n_files] */
    int n_files;
    ms_reader * reader;
    int depth;
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
    int n_demand_in_flight;
    int n_ahead_in_flight;
    int n_pinned;
    uint64_t * checksum;  /* [n_banks][n_expert] with verify; 0 = not read yet */
    size_t * checksum_at; /* [n_banks] */
    moestream_stats stats;
};

/* Where each slice of group g lies in its slot. */
void ms_stream_layout(const ms_index * index, int g, uint32_t * slice_at);

/* Slab, slot cache and queues for a budget; used by open and resize. */
moestream_status ms_stream_make_cache(ms_stream * stream, uint64_t budget, moestream_error * err);
void ms_stream_drop_cache(ms_stream * stream);

/* Fills `batch` with reads for what waits, as far as there are free ones. Under the lock; submit after unlocking. */
int ms_stream_take_batch_locked(ms_stream * stream, ms_read ** batch, int max);
void ms_stream_done(void * user, ms_read * read, moestream_status status, int os_errno);

uint64_t ms_checksum(const uint8_t * bytes, size_t n);

#endif
