/*
 * cache/slot_cache: which expert is in which slot, and which slot to give up next. Pure bookkeeping.
 * Guarantees: a slot that is pinned or has a read in flight is never evicted; an expert is in at most one slot;
 * every operation is O(1) except a victim search past unevictable slots.
 * Never allocates after init, never reads, never locks: the caller holds the stream's lock around every call; the
 * slice states alone are atomics, read without it.
 *
 * States of a slice in a slot, and who moves them:
 *   EMPTY   -> READING  ms_slot_begin_read, under the lock
 *   FAILED  -> READING  the same, when nobody but the caller has the slot pinned
 *   READING -> READY    ms_slot_publish, by the thread that completed the read, after the bytes are there (release,
 *                       pairs with the acquire in ms_slot_state)
 *   READING -> FAILED   ms_slot_publish
 *   READING -> EMPTY    ms_slot_cancel_read, under the lock, before any reader has seen the read
 *   READY, FAILED -> EMPTY  eviction or ms_slot_clear, under the lock, never while pinned
 */
#ifndef MS_SLOT_CACHE_H
#define MS_SLOT_CACHE_H

#include <stdatomic.h>

#include "base/base.h"
#include "cache/slab.h"

enum { MS_SLOT_SLICES = 4 };

typedef enum ms_slice_state { MS_EMPTY = 0, MS_READING = 1, MS_READY = 2, MS_FAILED = 3 } ms_slice_state;

typedef enum ms_policy { MS_POLICY_LRU = 0, MS_POLICY_DECAY = 1 } ms_policy;

typedef struct ms_slot {
    int32_t group; /* -1: nothing here */
    int32_t expert;
    int32_t cls;
    int32_t pins;
    int32_t reading; /* slices in flight */
    int32_t prev, next; /* LRU list of the class, most recent first; -1 ends */
    uint64_t used_at;   /* tick of the last demand use, or of the assignment; 0: forgotten */
    bool passing; /* taken by a scan (a warm-up selects every expert): goes first once released; touch clears it */
    bool prefetched; /* read ahead and not yet asked for: the caller sets and clears it, eviction clears it */
    atomic_uchar state[MS_SLOT_SLICES];
} ms_slot;

typedef struct ms_slot_cache {
    ms_slot * slot;
    int n_slots;
    int n_classes;
    int head[MS_MAX_CLASSES], tail[MS_MAX_CLASSES];
    int n_free[MS_MAX_CLASSES]; /* slots nobody pins and no read is in flight for */
    int n_groups;
    int32_t * first; /* [n_groups] where the group's row of slot_of begins */
    int32_t * cls_of; /* [n_groups] */
    int32_t * n_expert; /* [n_groups] */
    int32_t * slot_of; /* slot or -1 */
    uint64_t tick; /* counts touches */
    uint64_t n_evictions;
    int used; /* slots that hold an expert */
    ms_policy policy;
    float * score; /* MS_POLICY_DECAY: [experts] decayed frequency */
    uint64_t * score_at;
    float half_life; /* in ticks; open sets a guess, the caller may set the model's own */
} ms_slot_cache;

/* group_class[g], group_experts[g]: size class (-1: never gets a slot) and number of experts of group g. n_slots[c]
 * slots of class c. Errors: NOMEM. */
moestream_status ms_slot_cache_open(ms_slot_cache * cache, int n_groups, const int * group_class,
                                    const int * group_experts, int n_classes, const int * n_slots, ms_policy policy,
                                    moestream_error * err);
void ms_slot_cache_close(ms_slot_cache * cache);

/* Slot that holds the expert, -1 if none. */
int ms_slot_find(const ms_slot_cache * cache, int group, int expert);

/* A slot for an expert that has none: the victim of its class, now empty and assigned. -1 if every slot is pinned or
 * being read. `spare_after`: with it nonzero, slots used at or after that tick are not taken (reading ahead must not
 * evict what was just needed). */
int ms_slot_assign(ms_slot_cache * cache, int group, int expert, uint64_t spare_after);

/* Demand use: most recent in the list, counts for the policy. */
void ms_slot_touch(ms_slot_cache * cache, int slot);

void ms_slot_pin(ms_slot_cache * cache, int slot);
void ms_slot_unpin(ms_slot_cache * cache, int slot);

void ms_slot_begin_read(ms_slot_cache * cache, int slot, int slice);
/* The bytes are there (ok) or will not come. May be called without the lock; follow with ms_slot_end_read under it. */
void ms_slot_publish(ms_slot_cache * cache, int slot, int slice, bool ok);
void ms_slot_end_read(ms_slot_cache * cache, int slot);
/* A read that was begun but never handed to a reader will not be made after all: READING -> EMPTY. */
void ms_slot_cancel_read(ms_slot_cache * cache, int slot, int slice);
/* Forgets one slice that is not being read. */
void ms_slot_clear(ms_slot_cache * cache, int slot, int slice);
/* The next victim of its class, should nobody ask for it before. */
void ms_slot_demote(ms_slot_cache * cache, int slot);
/* Forgets the expert in a slot; the slot must be neither pinned nor in flight. It becomes the next victim. */
void ms_slot_forget(ms_slot_cache * cache, int slot);

static inline ms_slice_state ms_slot_state(const ms_slot_cache * cache, int slot, int slice) {
    return (ms_slice_state) atomic_load_explicit(&cache->slot[slot].state[slice], memory_order_acquire);
}

/* Evictable slots of a class. */
int ms_slot_free_count(const ms_slot_cache * cache, int cls);

/* Asserts every invariant; for tests and debug builds. O(slots + experts). */
void ms_slot_cache_check(const ms_slot_cache * cache);

#endif
