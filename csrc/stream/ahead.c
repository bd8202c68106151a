/*
 * stream/ahead: reading experts before the router has chosen them, with disk time that nobody needs.
 * Guarantees: a guess is only handed to the reader while no demand is in flight; a guess that turns out to be needed joins
 * the demand at once; the guesses for a layer that were not started when the layer begins are dropped, and what was read
 * for nothing is the next victim. A wrong guess costs a read, never a bit.
 * All of it under the stream's lock.
 */
#include "stream/internal.h"

/* The queue holds places (slot, slice); this says which of them still count, so that claiming one is O(1). */
static uint8_t * waiting_at(ms_stream * s, int slot, int slice) {
    return &s->ahead_waiting[slot * MS_MAX_SLICES + slice];
}

bool ms_ahead_take_locked(ms_stream * s, ms_want * want) {
    while (s->ahead.count > 0) {
        *want = ms_queue_pop(&s->ahead);
        if (ms_ahead_claim_locked(s, want->slot, want->slice)) {
            return true;
        }
    }
    return false;
}

bool ms_ahead_claim_locked(ms_stream * s, int slot, int slice) {
    uint8_t * waiting = waiting_at(s, slot, slice);
    bool was = *waiting != 0;
    s->n_ahead_waiting -= was;
    *waiting = 0;
    return was;
}

void ms_ahead_settle_locked(ms_stream * s, int group) {
    if (s->ahead_open[group] == 0) {
        return;
    }
    s->ahead_open[group] = 0;
    for (int e = 0; e < s->index->group[group].n_expert; e++) {
        int slot = ms_slot_find(&s->cache, group, e);
        if (slot < 0 || !s->cache.slot[slot].prefetched || s->cache.slot[slot].pins > 0) {
            continue;
        }
        bool any = false;
        for (int k = 0; k < s->index->group[group].n_slices; k++) {
            if (ms_ahead_claim_locked(s, slot, k)) {
                ms_slot_cancel_read(&s->cache, slot, k);
            }
            any |= ms_slot_state(&s->cache, slot, k) != MS_EMPTY;
        }
        if (any) {
            ms_slot_demote(&s->cache, slot);
        } else {
            ms_slot_forget(&s->cache, slot);
        }
    }
}

void ms_ahead_keep_locked(ms_stream * s, int group, const int32_t * experts, int n) {
    for (int i = 0; i < n && s->ahead_open[group] > 0; i++) {
        int slot = ms_slot_find(&s->cache, group, experts[i]);
        if (slot >= 0 && s->cache.slot[slot].prefetched) {
            ms_slot_touch(&s->cache, slot);
        }
    }
}

int ms_stream_prefetch(ms_stream * s, int group, const int32_t * experts, int n, uint64_t spare_after,
                       moestream_stats * counts) {
    moestream_stats mine = {0};
    int slices = s->index->group[group].n_slices;
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < n && s->n_ahead_waiting < s->depth && s->ahead.count + slices <= s->ahead.capacity &&
                    !s->options.cache_none;
         i++) {
        if (experts[i] < 0 || experts[i] >= s->index->group[group].n_expert ||
            ms_slot_find(&s->cache, group, experts[i]) >= 0) {
            continue;
        }
        int slot = ms_slot_assign(&s->cache, group, experts[i], spare_after);
        if (slot < 0) {
            break;
        }
        s->cache.slot[slot].prefetched = true;
        s->ahead_open[group]++;
        mine.n_prefetch++;
        for (int k = 0; k < slices; k++) {
            ms_stream_request_locked(s, slot, k, &s->ahead, &mine);
            *waiting_at(s, slot, k) = 1;
            s->n_ahead_waiting++;
        }
    }
    mine.prefetch_bytes = mine.read_bytes;
    ms_stream_add_counts(&s->stats, &mine);
    bool idle = s->n_demand_in_flight == 0 && s->demand.count == 0 && mine.n_prefetch > 0;
    pthread_mutex_unlock(&s->lock);
    ms_stream_add_counts(counts, &mine);
    if (idle) {
        ms_stream_submit_waiting(s);
    }
    return (int) mine.n_prefetch;
}

uint64_t ms_stream_tick(ms_stream * s) {
    pthread_mutex_lock(&s->lock);
    uint64_t tick = s->cache.tick;
    pthread_mutex_unlock(&s->lock);
    return tick;
}
