/*
 * cache/slot_cache: the table from expert to slot, the lists of slots by last use, and the choice of a victim.
 * Guarantees: as slot_cache.h says.
 * Never allocates after open, never reads, never locks.
 *
 * A slot is in one list: that of its group, or the spare one of its class, with demoted slots in front and empty ones at
 * the end. In a group's list `used_at` never grows from head to tail, so a search from the tail may stop at the first slot
 * that is too recent.
 */
#include "cache/slot_cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- open and close ---- */

static bool allocate(ms_slot_cache * cache, size_t n_experts) {
    size_t n_lists = (size_t) (cache->n_classes + cache->n_groups);
    cache->slot = ms_calloc((size_t) cache->n_slots, sizeof *cache->slot);
    cache->head = ms_calloc(n_lists, sizeof *cache->head);
    cache->tail = ms_calloc(n_lists, sizeof *cache->tail);
    cache->first = ms_calloc((size_t) cache->n_groups, sizeof *cache->first);
    cache->cls_of = ms_calloc((size_t) cache->n_groups, sizeof *cache->cls_of);
    cache->n_expert = ms_calloc((size_t) cache->n_groups, sizeof *cache->n_expert);
    cache->position = ms_calloc((size_t) cache->n_groups, sizeof *cache->position);
    cache->visits = ms_calloc((size_t) cache->n_groups, sizeof *cache->visits);
    cache->pass_of = ms_calloc((size_t) cache->n_groups, sizeof *cache->pass_of);
    cache->slot_of = ms_calloc(n_experts, sizeof *cache->slot_of);
    return cache->slot != NULL && cache->head != NULL && cache->tail != NULL && cache->first != NULL &&
           cache->cls_of != NULL && cache->n_expert != NULL && cache->position != NULL && cache->visits != NULL &&
           cache->pass_of != NULL && cache->slot_of != NULL;
}

static void init_slots(ms_slot_cache * cache, const int * n_slots) {
    int slot = 0;
    for (int i = 0; i < cache->n_classes + cache->n_groups; i++) {
        cache->head[i] = -1;
        cache->tail[i] = -1;
    }
    for (int c = 0; c < cache->n_classes; c++) {
        cache->n_free[c] = n_slots[c];
        cache->head[c] = n_slots[c] > 0 ? slot : -1;
        cache->tail[c] = n_slots[c] > 0 ? slot + n_slots[c] - 1 : -1;
        for (int i = 0; i < n_slots[c]; i++, slot++) {
            ms_slot * s = &cache->slot[slot];
            s->group = -1;
            s->expert = -1;
            s->cls = c;
            s->list = c;
            s->prev = i > 0 ? slot - 1 : -1;
            s->next = i + 1 < n_slots[c] ? slot + 1 : -1;
            for (int k = 0; k < MS_SLOT_SLICES; k++) {
                atomic_init(&s->state[k], MS_EMPTY);
            }
        }
    }
}

/* Tensors may come in any order in a file, layers do not. */
static void init_positions(ms_slot_cache * cache, const int * layer) {
    for (int g = 0; g < cache->n_groups; g++) {
        for (int k = 0; k < cache->n_groups; k++) {
            cache->position[g] += layer[k] < layer[g] || (layer[k] == layer[g] && k < g);
        }
    }
}

moestream_status ms_slot_cache_open(ms_slot_cache * cache, int n_groups, const int * group_class,
                                    const int * group_experts, const int * group_layer, int n_classes,
                                    const int * n_slots, moestream_error * err) {
    MS_ASSERT(n_groups >= 0 && n_classes >= 0 && n_classes <= MS_MAX_CLASSES);
    ms_slot_cache fresh;
    memset(&fresh, 0, sizeof fresh);
    fresh.n_groups = n_groups;
    fresh.n_classes = n_classes;
    fresh.tick = 1; /* 0 marks slots that nothing has used */
    int64_t total_slots = 0;
    int64_t total_experts = 0;
    for (int c = 0; c < n_classes; c++) {
        MS_ASSERT(n_slots[c] >= 0);
        total_slots += n_slots[c];
    }
    for (int g = 0; g < n_groups; g++) {
        MS_ASSERT(group_class[g] >= -1 && group_class[g] < n_classes && group_experts[g] >= 0);
        total_experts += group_experts[g];
    }
    if (total_slots > INT32_MAX || total_experts > INT32_MAX) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, 0, "%lld slots and %lld experts were more than can be numbered",
                       (long long) total_slots, (long long) total_experts);
    }
    fresh.n_slots = (int) total_slots;
    if (!allocate(&fresh, (size_t) total_experts)) {
        ms_slot_cache_close(&fresh);
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM,
                       "no memory was left for a table of %lld slots and %lld experts", (long long) total_slots,
                       (long long) total_experts);
    }
    init_slots(&fresh, n_slots);
    init_positions(&fresh, group_layer);
    int32_t first = 0;
    for (int g = 0; g < n_groups; g++) {
        fresh.first[g] = first;
        fresh.cls_of[g] = group_class[g];
        fresh.n_expert[g] = group_experts[g];
        first += group_experts[g];
    }
    for (int32_t i = 0; i < first; i++) {
        fresh.slot_of[i] = -1;
    }
    *cache = fresh;
    return MOESTREAM_OK;
}

void ms_slot_cache_close(ms_slot_cache * cache) {
    if (cache == NULL) {
        return;
    }
    free(cache->slot);
    free(cache->head);
    free(cache->tail);
    free(cache->first);
    free(cache->cls_of);
    free(cache->n_expert);
    free(cache->position);
    free(cache->visits);
    free(cache->pass_of);
    free(cache->slot_of);
    memset(cache, 0, sizeof *cache);
}

/* ---- lists ---- */

static int group_list(const ms_slot_cache * cache, int group) {
    return cache->n_classes + group;
}

static void unlink_slot(ms_slot_cache * cache, int slot) {
    ms_slot * s = &cache->slot[slot];
    if (s->prev >= 0) {
        cache->slot[s->prev].next = s->next;
    } else {
        cache->head[s->list] = s->next;
    }
    if (s->next >= 0) {
        cache->slot[s->next].prev = s->prev;
    } else {
        cache->tail[s->list] = s->prev;
    }
}

/* Behind `prev`, or in front if that is -1. */
static void insert_slot(ms_slot_cache * cache, int slot, int list, int prev) {
    ms_slot * s = &cache->slot[slot];
    int32_t * from_prev = prev >= 0 ? &cache->slot[prev].next : &cache->head[list];
    s->list = list;
    s->prev = prev;
    s->next = *from_prev;
    *from_prev = slot;
    *(s->next >= 0 ? &cache->slot[s->next].prev : &cache->tail[list]) = slot;
}

static void move_to_head(ms_slot_cache * cache, int slot, int list) {
    unlink_slot(cache, slot);
    insert_slot(cache, slot, list, -1);
}

static void move_to_tail(ms_slot_cache * cache, int slot, int list) {
    unlink_slot(cache, slot);
    insert_slot(cache, slot, list, cache->tail[list]);
}

/* ---- experts ---- */

static ms_slot * slot_at(ms_slot_cache * cache, int slot) {
    MS_ASSERT(slot >= 0 && slot < cache->n_slots);
    return &cache->slot[slot];
}

static int expert_at(const ms_slot_cache * cache, int group, int expert) {
    MS_ASSERT(group >= 0 && group < cache->n_groups && expert >= 0 && expert < cache->n_expert[group]);
    return cache->first[group] + expert;
}

int ms_slot_find(const ms_slot_cache * cache, int group, int expert) {
    return cache->slot_of[expert_at(cache, group, expert)];
}

static bool is_free(const ms_slot * s) {
    return s->pins == 0 && s->reading == 0;
}

/* The slot to give up, -1 if none may be. `sparing`: not what the running pass over the layer that is visited has used. */
static int find_victim(const ms_slot_cache * cache, int cls, uint64_t spare_after, bool sparing) {
    for (int slot = cache->tail[cls]; slot >= 0; slot = cache->slot[slot].prev) {
        if (is_free(&cache->slot[slot])) {
            return slot;
        }
    }
    int best = -1, best_until = 0;
    uint32_t best_missed = 0;
    for (int g = 0; g < cache->n_groups; g++) {
        int slot = cache->cls_of[g] == cls ? cache->tail[group_list(cache, g)] : -1;
        while (slot >= 0 && !is_free(&cache->slot[slot])) {
            slot = cache->slot[slot].prev;
        }
        const ms_slot * s = slot >= 0 ? &cache->slot[slot] : NULL;
        if (s == NULL || (spare_after != 0 && s->used_at >= spare_after)) {
            continue;
        }
        uint32_t missed =
            cache->visits[g] - s->visit + (cache->passes - cache->pass_of[g]) / (uint32_t) cache->n_groups;
        int until = cache->position[g] - cache->here; /* visits of layers until it may be needed */
        until += until <= 0 ? cache->n_groups : 0;
        if (sparing && missed == 0 && cache->position[g] == cache->here) {
            continue;
        }
        if (best < 0 || missed > best_missed || (missed == best_missed && until > best_until)) {
            best = slot;
            best_missed = missed;
            best_until = until;
        }
    }
    return best;
}

/* Empties a slot; its place in its list stays. */
static void detach(ms_slot_cache * cache, ms_slot * s) {
    if (s->group >= 0) {
#ifndef MS_MUTATE_STALE_SLOT
        cache->slot_of[expert_at(cache, s->group, s->expert)] = -1;
#endif
        cache->used--;
    }
    for (int k = 0; k < MS_SLOT_SLICES; k++) {
        MS_ASSERT(atomic_load_explicit(&s->state[k], memory_order_relaxed) != MS_READING);
        atomic_store_explicit(&s->state[k], MS_EMPTY, memory_order_relaxed);
    }
    s->group = -1;
    s->expert = -1;
    s->prefetched = false;
    s->passing = false;
}

int ms_slot_assign(ms_slot_cache * cache, int group, int expert, uint64_t spare_after) {
    int at = expert_at(cache, group, expert);
    MS_ASSERT(cache->slot_of[at] < 0 && cache->cls_of[group] >= 0);
    int cls = cache->cls_of[group];
    int slot = cache->n_free[cls] > 0 ? find_victim(cache, cls, spare_after, true) : -1;
    slot = slot < 0 && cache->n_free[cls] > 0 ? find_victim(cache, cls, spare_after, false) : slot;
    if (slot < 0) {
        return -1;
    }
    ms_slot * s = &cache->slot[slot];
    cache->n_evictions += s->group >= 0;
    detach(cache, s);
    s->group = group;
    s->expert = expert;
    s->used_at = cache->tick; /* also of what is read ahead: the next read ahead must not evict it */
    s->visit = cache->visits[group];
    cache->slot_of[at] = slot;
    cache->used++;
    move_to_head(cache, slot, group_list(cache, group));
    return slot;
}

void ms_slot_visit(ms_slot_cache * cache, int group, int n) {
    MS_ASSERT(group >= 0 && group < cache->n_groups && n > 0);
    cache->visits[group] += (uint32_t) n;
    cache->pass_of[group] = ++cache->passes;
    cache->here = cache->position[group];
}

void ms_slot_touch(ms_slot_cache * cache, int slot, int passed) {
    ms_slot * s = slot_at(cache, slot);
    MS_ASSERT(s->group >= 0 && passed >= 0);
    cache->tick++;
    s->used_at = cache->tick;
    s->visit = cache->visits[s->group] - (uint32_t) passed;
    s->passing = false;
    move_to_head(cache, slot, group_list(cache, s->group));
}

void ms_slot_forget(ms_slot_cache * cache, int slot) {
    ms_slot * s = slot_at(cache, slot);
    MS_ASSERT(is_free(s));
    detach(cache, s);
    s->used_at = 0;
    move_to_tail(cache, slot, s->cls);
}

/* ---- pins and reads ---- */

void ms_slot_pin(ms_slot_cache * cache, int slot) {
    ms_slot * s = slot_at(cache, slot);
    MS_ASSERT(s->group >= 0 && s->pins < INT32_MAX);
    cache->n_free[s->cls] -= is_free(s);
    s->pins++;
}

void ms_slot_unpin(ms_slot_cache * cache, int slot) {
    ms_slot * s = slot_at(cache, slot);
    MS_ASSERT(s->pins > 0);
    s->pins--;
    cache->n_free[s->cls] += is_free(s);
}

void ms_slot_begin_read(ms_slot_cache * cache, int slot, int slice) {
    ms_slot * s = slot_at(cache, slot);
    MS_ASSERT(s->group >= 0 && slice >= 0 && slice < MS_SLOT_SLICES && s->reading < MS_SLOT_SLICES);
    ms_slice_state state = ms_slot_state(cache, slot, slice);
    /* a failure may be forgotten by the only one who would look at it */
    MS_ASSERT(state == MS_EMPTY || (state == MS_FAILED && s->pins <= 1));
    cache->n_free[s->cls] -= is_free(s);
    s->reading++;
    atomic_store_explicit(&s->state[slice], MS_READING, memory_order_release);
}

void ms_slot_publish(ms_slot_cache * cache, int slot, int slice, bool ok) {
    ms_slot * s = slot_at(cache, slot);
    MS_ASSERT(slice >= 0 && slice < MS_SLOT_SLICES && ms_slot_state(cache, slot, slice) == MS_READING);
    atomic_store_explicit(&s->state[slice], ok ? MS_READY : MS_FAILED, memory_order_release);
}

void ms_slot_end_read(ms_slot_cache * cache, int slot) {
    ms_slot * s = slot_at(cache, slot);
    MS_ASSERT(s->reading > 0);
    s->reading--;
    cache->n_free[s->cls] += is_free(s);
}

void ms_slot_cancel_read(ms_slot_cache * cache, int slot, int slice) {
    ms_slot * s = slot_at(cache, slot);
    MS_ASSERT(slice >= 0 && slice < MS_SLOT_SLICES && ms_slot_state(cache, slot, slice) == MS_READING);
    atomic_store_explicit(&s->state[slice], MS_EMPTY, memory_order_release);
    ms_slot_end_read(cache, slot);
}

void ms_slot_demote(ms_slot_cache * cache, int slot) {
    ms_slot * s = slot_at(cache, slot);
    MS_ASSERT(s->group >= 0);
    s->used_at = 0;
    move_to_head(cache, slot, s->cls);
}

void ms_slot_clear(ms_slot_cache * cache, int slot, int slice) {
    ms_slot * s = slot_at(cache, slot);
    MS_ASSERT(slice >= 0 && slice < MS_SLOT_SLICES);
    ms_slice_state state = ms_slot_state(cache, slot, slice);
    MS_ASSERT(state != MS_READING && s->pins == 0); /* bytes in use stay */
    atomic_store_explicit(&s->state[slice], MS_EMPTY, memory_order_release);
}

int ms_slot_free_count(const ms_slot_cache * cache, int cls) {
    MS_ASSERT(cls >= 0 && cls < cache->n_classes);
    return cache->n_free[cls];
}

/* ---- invariants ---- */

static void check_slot(const ms_slot_cache * cache, int slot) {
    const ms_slot * s = &cache->slot[slot];
    int n_reading = 0;
    int n_not_empty = 0;
    for (int k = 0; k < MS_SLOT_SLICES; k++) {
        ms_slice_state state = ms_slot_state(cache, slot, k);
        n_reading += state == MS_READING;
        n_not_empty += state != MS_EMPTY;
    }
    /* a published slice still counts as in flight until its end_read */
    MS_ASSERT(s->pins >= 0 && s->reading >= n_reading && s->reading <= n_not_empty);
    MS_ASSERT(s->used_at <= cache->tick);
    if (s->group < 0) {
        MS_ASSERT(s->group == -1 && s->expert == -1 && n_not_empty == 0 && is_free(s) && !s->prefetched);
    } else {
        MS_ASSERT(cache->cls_of[s->group] == s->cls);
        MS_ASSERT(cache->slot_of[expert_at(cache, s->group, s->expert)] == slot);
    }
}

void ms_slot_cache_check(const ms_slot_cache * cache) {
    int n_listed = 0;
    int n_holding = 0;
    int n_free[MS_MAX_CLASSES] = {0};
    for (int l = 0; l < cache->n_classes + cache->n_groups; l++) {
        int before = -1;
        for (int slot = cache->head[l]; slot >= 0; slot = cache->slot[slot].next) {
            const ms_slot * s = &cache->slot[slot];
            MS_ASSERT(slot < cache->n_slots && s->list == l && s->prev == before);
            if (l < cache->n_classes) {
                MS_ASSERT(s->cls == l && s->used_at == 0);
                MS_ASSERT(before < 0 || cache->slot[before].group >= 0 || s->group < 0); /* empty ones come last */
            } else {
                MS_ASSERT(s->group == l - cache->n_classes && cache->visits[s->group] - s->visit <= INT32_MAX);
                MS_ASSERT(before < 0 || cache->slot[before].used_at >= s->used_at);
            }
            check_slot(cache, slot);
            n_free[s->cls] += is_free(s);
            n_holding += s->group >= 0;
            n_listed++;
            MS_ASSERT(n_listed <= cache->n_slots); /* no cycle */
            before = slot;
        }
        MS_ASSERT(cache->tail[l] == before);
    }
    for (int c = 0; c < cache->n_classes; c++) {
        MS_ASSERT(cache->n_free[c] == n_free[c]);
    }
    MS_ASSERT(n_listed == cache->n_slots && n_holding == cache->used);
    int n_found = 0;
    for (int g = 0; g < cache->n_groups; g++) {
        for (int e = 0; e < cache->n_expert[g]; e++) {
            int slot = ms_slot_find(cache, g, e);
            if (slot >= 0) {
                MS_ASSERT(slot < cache->n_slots && cache->slot[slot].group == g && cache->slot[slot].expert == e);
                n_found++;
            }
        }
    }
    MS_ASSERT(n_found == cache->used);
}
