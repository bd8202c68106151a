/*
 * stream: experts in memory on demand. Owns the files, the reader, the slab and the slot cache of one model.
 * Guarantees: a slice handed out by ms_stream_payload holds exactly the bytes of the file until it is released; a read
 * that failed is reported to whoever waits for it and tried again on the next demand; nothing is evicted while leased.
 * Never knows ggml: it deals in groups, experts, slices and bytes.
 *
 * Locks. One mutex, `lock`, guards the slot cache, the pool of reads and the counters; it is held for bookkeeping only,
 * never over a read, a wait or an allocation. Readers take their own locks inside submit/poll/wait; order: `lock` is
 * never held when an engine is called.
 */
#ifndef MS_STREAM_H
#define MS_STREAM_H

#include "base/base.h"
#include "cache/slot_cache.h"
#include "gguf/expert_index.h"
#include "io/reader.h"

typedef struct ms_stream ms_stream;

typedef struct ms_stream_options {
    uint64_t cache_bytes;
    bool cache_none;
    int io;
    int direct;
    int queue_depth;
    bool choose_depth; /* queue_depth is the most; a measurement may choose less */
    int n_readers;
    bool verify;
    uint64_t deadline_ns; /* 0: none */
    /* Opens the reader instead of ms_reader_open: tests put a scripted engine behind the seam. NULL otherwise. */
    moestream_status (*open_reader)(void * user, ms_reader ** out, const ms_reader_options * options,
                                    moestream_error * err);
    void * open_reader_user;
} ms_stream_options;

/* Sizes that follow from the index alone. */
typedef struct ms_stream_sizes {
    int n_classes;
    uint64_t slot_bytes[MS_MAX_CLASSES];
    int n_experts[MS_MAX_CLASSES];
    int n_groups[MS_MAX_CLASSES];
    int min_slots[MS_MAX_CLASSES];
    uint64_t min_bytes, full_bytes, cycle_bytes;
} ms_stream_sizes;

/* Classes and budgets for the groups of an index. `group_class` ([n_groups], may be NULL) receives each group's class. */
void ms_stream_size(const ms_index * index, ms_stream_sizes * sizes, int * group_class);

/* `index` must outlive the stream. */
moestream_status ms_stream_open(ms_stream ** out, const ms_index * index, const ms_stream_options * options,
                                moestream_error * err);
void ms_stream_close(ms_stream * stream);

/* ---- the demand path, called from compute threads ---- */

/* What a demand is for: counted once per expert and pass over a layer. */
typedef struct ms_demand {
    int group;
    int slice;     /* the slice needed now */
    bool leader;   /* first operation of this pass over the group: hits and misses are counted here */
    bool scan;     /* more experts per token than the model uses (a warm-up): must not push out what is in use */
    bool begins;     /* an operation begins: the cache keeps its size until ms_stream_end */
    bool all_slices; /* request the group's other slices too, behind this one */
    int n_visits;           /* that the pass stands for: one for each token of a prompt; 0 counts as 1 */
    const int32_t * passed; /* [n] how many of them came after the last use of each expert, never growing; NULL: none */
} ms_demand;

/* Pins slots for as many of experts[0..n) as there is room for, in order, submitting the reads that are missing in one
 * go, and returns how many; slots[i] is the slot of experts[i]. What was counted is added to `counts` (and to the
 * stream's own). Does not wait. Thread: any. */
int ms_stream_acquire(ms_stream * stream, const ms_demand * demand, const int32_t * experts, int n, int32_t * slots,
                      moestream_stats * counts);

/* Would n experts of this group fit at once? */
bool ms_stream_fits(ms_stream * stream, int group, int n);

/* A read that failed although it was begun before `before_ns`, for a call that is over or as a guess, says nothing about
 * now: reads the slice anew. Returns whether the slice is no longer FAILED. */
bool ms_stream_retry(ms_stream * stream, int slot, int slice, uint64_t before_ns);

/* READY, FAILED or READING. */
ms_slice_state ms_stream_state(const ms_stream * stream, int slot, int slice);

/* Address of the slice's first byte. Valid while pinned and READY. */
const uint8_t * ms_stream_payload(const ms_stream * stream, int slot, int slice);

/* Waits until something changed that may have made `slot`/`slice` ready, at most a few milliseconds; does reads or
 * reaps completions meanwhile. Call it in a loop around ms_stream_state. */
void ms_stream_wait(ms_stream * stream, int slot, int slice);
/* Looks for that some milliseconds long without sleeping: for a caller that shares the cores with nobody. */
void ms_stream_spin(ms_stream * stream, int slot, int slice);
/* Waits until a slot may have become free (another context released one), at most a few milliseconds. */
void ms_stream_wait_free(ms_stream * stream);
/* Delivers completions without waiting. Returns how many. */
int ms_stream_poll(ms_stream * stream);
/* The only caller there is will not poll or wait for about `ns`: hands over as many of the reads that wait as the disk can
 * do in that time, as far as it is known how fast it is, and as many more as always. */
void ms_stream_fill(ms_stream * stream, uint64_t ns);
/* How long there was a slice in flight, so far. */
uint64_t ms_stream_busy_ns(ms_stream * stream);

void ms_stream_release(ms_stream * stream, int slice, const int32_t * slots, int n);
/* Releases these slots (n may be 0) and ends an operation: none of its threads asks about a slot any more. */
void ms_stream_end(ms_stream * stream, int slice, const int32_t * slots, int n);

/* Fills `err` with why the read of a FAILED slice failed: file, offset, errno. */
moestream_status ms_stream_read_error(ms_stream * stream, int slot, int slice, moestream_error * err);

/* How long the read of a READING slice has been with the engine or, while it waits for its turn, the oldest of the reads it
 * waits behind; 0 when it has ended. */
uint64_t ms_stream_read_age(ms_stream * stream, int slot, int slice);

/* The error for a read that took longer than the deadline. The slot stays taken until the kernel lets go of it. */
moestream_status ms_stream_deadline_error(ms_stream * stream, int slot, int slice, uint64_t waited_ns,
                                          moestream_error * err);

/* With verify: OK, or CORRUPT naming layer, expert and slice. Without: OK. */
moestream_status ms_stream_verify(ms_stream * stream, int slot, int slice, moestream_error * err);

/* ---- the rest ---- */

/* Reads experts ahead, as far as there is room; never waits. First what is used first of each. `whole`: all slices; else
 * not the last one that is used, which has time to come when the guess has proved right. Slots used at or after tick
 * `spare_after` are not evicted for it. Returns how many were accepted. */
int ms_stream_prefetch(ms_stream * stream, int group, const int32_t * experts, int n, bool whole, uint64_t spare_after,
                       moestream_stats * counts);

/* An expert that was in the cache, and when it was last used (a tick). */
typedef struct ms_hot {
    int32_t group, expert;
    uint64_t used_at;
} ms_hot;
/* Up to `max` experts of the cache, the most recently used first; returns how many. */
int ms_stream_hot(ms_stream * stream, ms_hot * out, int max);
/* Starts reading list[0..n), copied, the hottest first, into slots that nothing has used, while no demand is in flight;
 * what is out of range or has no room is passed over. Not beside another of these, a resize or the close. */
moestream_status ms_stream_warm(ms_stream * stream, const ms_hot * list, int n, moestream_error * err);
/* Ends that early; resize and close do so. */
void ms_stream_warm_stop(ms_stream * stream);

/* What was chosen and why, a line each: "io=io_uring: auto: ...". Returns the length, like snprintf. */
size_t ms_stream_choices(ms_stream * stream, char * buf, size_t n);

/* Number of demand uses so far: a clock for spare_after. */
uint64_t ms_stream_tick(ms_stream * stream);
bool ms_stream_idle(ms_stream * stream); /* no demand read is in flight */

/* Reads a range of a file for the load (dense tensors, whole expert tensors) in parallel chunks straight into `dst`,
 * which must be congruent to `offset` modulo MS_PAGE and have the window's slack around it, or buffered otherwise. */
moestream_status ms_stream_read_range(ms_stream * stream, int file, uint64_t offset, uint64_t bytes, void * dst,
                                      bool windowed, moestream_error * err);

/* OK while every file is what was opened, else IO with ESTALE, naming it. For memory that llama.cpp mapped; what the
 * stream reads is checked with each read. */
moestream_status ms_stream_check_files(const ms_stream * stream, moestream_error * err);

/* All or nothing: the new cache exists before the old one goes, so both need address space for a moment; memory only
 * the old one has. Errors: NOMEM, BUSY (slots are in use, or a read did not end within the deadline). */
moestream_status ms_stream_resize(ms_stream * stream, uint64_t cache_bytes, moestream_error * err);

void ms_stream_get_stats(ms_stream * stream, moestream_stats * stats);
const char * ms_stream_describe(ms_stream * stream);
uint64_t ms_stream_in_use(ms_stream * stream); /* pinned slots */

moestream_status ms_stream_measure_disk(ms_stream * stream, uint64_t bytes, double * bytes_per_s,
                                        moestream_error * err);

#endif
