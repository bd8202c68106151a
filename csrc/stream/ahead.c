/*
 * stream/ahead: reading experts before the router has chosen them, with disk time that nobody needs.
 * Guarantees: a guess is only handed to the reader while no demand waits; a guess that turns out to be needed joins the
 * demand at once; the guesses for a layer that were not started when the layer begins are dropped, and what was read
 * for nothing is the next victim. A wrong guess costs a read, never a bit.
 * All of it under the stream's lock.
 */
#include "stream/internal.h"

enum { MS_GUESSES = 128 /* at once */ };

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

/* Gives up the read of a slice that waited among the guesses: it is no longer counted. */
static void cancel_locked(ms_stream * s, int slot, int slice, moestream_stats * counts) {
    const ms_slot * at = &s->cache.slot[slot];
    const ms_bank * bank = &s->index->bank[s->index->group[at->group].bank[slice]];
    uint64_t window = ms_slice_window(bank, at->expert);
    ms_slot_cancel_read(&s->cache, slot, slice);
    counts->n_reads--;
    counts->slice_bytes -= bank->slice_bytes;
    counts->read_bytes -= window;
    counts->prefetch_bytes -= window;
}

void ms_ahead_settle_locked(ms_stream * s, int group, const moestream_stats * counts, moestream_stats * mine) {
    if (s->ahead_open[group] == 0) {
        return;
    }
    s->ahead_open[group] = 0;
    for (int e = 0; e < s->index->group[group].n_expert; e++) {
        int slot = ms_slot_find(&s->cache, group, e);
        if (slot < 0 || !s->cache.slot[slot].prefetched || s->cache.slot[slot].pins > 0) {
            continue;
        }
        /* `mine` is added to the stream's numbers and to the caller's, who may not have asked for this one */
        moestream_stats * from = s->cache.slot[slot].asked_by == counts ? mine : &s->stats;
        bool any = false;
        for (int k = 0; k < s->index->group[group].n_slices; k++) {
            if (ms_ahead_claim_locked(s, slot, k)) {
                cancel_locked(s, slot, k, from);
            }
            any |= ms_slot_state(&s->cache, slot, k) != MS_EMPTY;
        }
        from->n_prefetch -= !any;
        if (any && (!s->options.cache_none || s->cache.slot[slot].reading > 0)) {
            ms_slot_demote(&s->cache, slot);
        } else {
            ms_slot_forget(&s->cache, slot);
        }
    }
}

/* A slot for a guess, pinned; -1: no room, -2: it has one. */
static int guess_locked(ms_stream * s, int group, int expert, uint64_t spare_after, const moestream_stats * counts) {
    if (expert < 0 || expert >= s->index->group[group].n_expert || ms_slot_find(&s->cache, group, expert) >= 0) {
        return -2;
    }
    int slot = ms_slot_assign(&s->cache, group, expert, spare_after);
    if (slot >= 0) {
        ms_slot_pin(&s->cache, slot);
        s->cache.slot[slot].prefetched = true;
        s->cache.slot[slot].asked_by = counts;
        s->ahead_open[group]++;
    }
    return slot;
}

int ms_stream_prefetch(ms_stream * s, int group, const int32_t * experts, int n, bool whole, uint64_t spare_after,
                       moestream_stats * counts) {
    moestream_stats mine = {0};
    int32_t slots[MS_GUESSES];
    int n_slices = s->index->group[group].n_slices, n_slots = 0;
    int n_read = whole || n_slices == 1 ? n_slices : n_slices - 1;
    pthread_mutex_lock(&s->lock);
    int room = (s->ahead.capacity - s->ahead.count) / n_slices;
    room = room < s->depth - s->n_ahead_waiting ? room : s->depth - s->n_ahead_waiting;
    for (int i = 0; i < n && n_slots < room && n_slots < MS_GUESSES; i++) {
        int slot = guess_locked(s, group, experts[i], spare_after, counts);
        if (slot == -1) {
            break;
        }
        if (slot >= 0) {
            slots[n_slots++] = slot;
        }
    }
    for (int k = 0; k < n_read; k++) {
        for (int i = 0; i < n_slots; i++) {
            int slice = ms_used_locked(s, group, k);
            if (!ms_stream_request_locked(s, slots[i], slice, &s->ahead, &mine)) {
                *waiting_at(s, slots[i], slice) = 1;
                s->n_ahead_waiting++;
            }
        }
    }
    for (int i = 0; i < n_slots; i++) {
        ms_slot_unpin(&s->cache, slots[i]);
    }
    mine.n_prefetch = (uint64_t) n_slots;
    mine.prefetch_bytes = mine.read_bytes;
    ms_stream_add_counts(&s->stats, &mine);
    bool submit = n_slots > 0 && s->demand.count == 0;
    pthread_mutex_unlock(&s->lock);
    ms_stream_add_counts(counts, &mine);
    if (submit) {
        ms_stream_submit_waiting(s);
    }
    return n_slots;
}

uint64_t ms_stream_tick(ms_stream * s) {
    pthread_mutex_lock(&s->lock);
    uint64_t tick = s->cache.tick;
    pthread_mutex_unlock(&s->lock);
    return tick;
}
