/*
 * cache/slot_cache: which expert is in which slot, and which slot to give up next. Pure bookkeeping.
 * Guarantees: a slot that is pinned or has a read in flight is never evicted; an expert is in at most one slot;
 * every operation is O(1) except a victim search, which looks at each layer once, past unevictable slots.
 *
 * Layers are visited in turn, so the least recently used expert is one that the next layer is about to need: with a cache
 * of fewer experts than a token uses, least-recently-used finds nothing at all. The victim here is the expert that was
 * passed over by most visits of its layer, and of equals the one whose layer comes last (docs/benchmarks.md: never more
 * reads than least-recently-used, a third less where several sequences share a small cache). A pass of many tokens stands
 * for as many visits, so that behind a prompt each layer holds what its last tokens chose; and a layer that is not visited
 * any more ages by one visit each time all others could have been.
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

typedef struct ms_slot {
    int32_t group; /* -1: nothing here */
    int32_t expert;
    int32_t cls;
    int32_t pins;
    int32_t reading; /* slices in flight */
    int32_t list;       /* the list it is in: its class's spare one, or its group's */
    int32_t prev, next; /* most recent first; -1 ends */
    uint32_t visit;     /* of its layer, at the last use or at the assignment */
    uint64_t used_at;   /* tick of the last demand use, or of the assignment; 0: forgotten */
    bool passing; /* taken by a scan (a warm-up selects every expert): goes first once released; touch clears it */
    bool prefetched; /* read ahead and not yet asked for: the caller sets and clears it, eviction clears it */
    const void * asked_by; /* of a guess: the caller's, untouched */
    atomic_uchar state[MS_SLOT_SLICES];
} ms_slot;

typedef struct ms_slot_cache {
    ms_slot * slot;
    int n_slots;
    int n_classes;
    int32_t *head, *tail; /* [n_classes] spare slots: demoted ones, then empty ones; [n_groups] the slots of a group */
    int n_free[MS_MAX_CLASSES]; /* slots nobody pins and no read is in flight for */
    int n_groups;
    int32_t * first; /* [n_groups] where the group's row of slot_of begins */
    int32_t * cls_of; /* [n_groups] */
    int32_t * n_expert; /* [n_groups] */
    int32_t * slot_of; /* slot or -1 */
    int32_t * position; /* [n_groups] in the order in which layers come */
    uint32_t * visits; /* [n_groups] so far; differences count, so it may overflow */
    uint32_t * pass_of; /* [n_groups] value of `passes` at the last one */
    uint32_t passes; /* over any layer */
    int here; /* position of the layer that was visited last */
    uint64_t tick; /* counts touches */
    uint64_t n_evictions;
    int used; /* slots that hold an expert */
} ms_slot_cache;

/* group_class[g], group_experts[g], group_layer[g]: size class (-1: never gets a slot), number of experts and layer of
 * group g. n_slots[c] slots of class c. Errors: NOMEM. */
moestream_status ms_slot_cache_open(ms_slot_cache * cache, int n_groups, const int * group_class,
                                    const int * group_experts, const int * group_layer, int n_classes,
                                    const int * n_slots, moestream_error * err);
void ms_slot_cache_close(ms_slot_cache * cache);

/* Slot that holds the expert, -1 if none. */
int ms_slot_find(const ms_slot_cache * cache, int group, int expert);

/* A slot for an expert that has none: the victim of its class, now empty and assigned. -1 if every slot is pinned or
 * being read. `spare_after`: with it nonzero, slots used at or after that tick are not taken (reading ahead must not
 * evict what was just needed). */
int ms_slot_assign(ms_slot_cache * cache, int group, int expert, uint64_t spare_after);

/* A pass over a layer begins that stands for n visits, one or more: what it does not touch was passed over by all. */
void ms_slot_visit(ms_slot_cache * cache, int group, int n);

/* Demand use, by the visit that `passed` others of the same pass came after. In the order of the last touches in a pass
 * `passed` must not grow; a slot that will be touched again may be touched with 0 before. */
void ms_slot_touch(ms_slot_cache * cache, int slot, int passed);

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
/* Forgets the expert in a slot, which must be neither pinned nor in flight; empty slots are taken first. */
void ms_slot_forget(ms_slot_cache * cache, int slot);

static inline ms_slice_state ms_slot_state(const ms_slot_cache * cache, int slot, int slice) {
    return (ms_slice_state) atomic_load_explicit(&cache->slot[slot].state[slice], memory_order_acquire);
}

/* Evictable slots of a class. */
int ms_slot_free_count(const ms_slot_cache * cache, int cls);

/* Asserts every invariant; for tests and debug builds. O(slots + experts). */
void ms_slot_cache_check(const ms_slot_cache * cache);

#endif
