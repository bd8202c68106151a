/*
 * stream/warm: what was in the cache, and putting it there again: a list of experts is read into slots that nothing has
 * used yet, in time in which no demand is in flight.
 * Guarantees: never evicts anything, never delays a demand by more than MS_WARM_READS reads; ends by itself and when
 * asked to. A list that is wrong costs idle reads, never a bit.
 */
#include <stdlib.h>
#include <string.h>

#include <signal.h>

#include "stream/internal.h"

enum { MS_WARM_READS = 8, MS_WARM_WAIT_NS = 5 * 1000 * 1000 };

/* ---- what is hot ---- */

static int hotter(const void * a, const void * b) {
    uint64_t x = ((const ms_hot *) a)->used_at, y = ((const ms_hot *) b)->used_at;
    return (x < y) - (x > y);
}

int ms_stream_hot(ms_stream * s, ms_hot * out, int max) {
    int n = 0;
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < s->cache.n_slots && n < max; i++) {
        const ms_slot * slot = &s->cache.slot[i];
        if (slot->group >= 0 && !slot->prefetched && !slot->passing && slot->used_at > 0) {
            out[n++] = (ms_hot) {.group = slot->group, .expert = slot->expert, .used_at = slot->used_at};
        }
    }
    pthread_mutex_unlock(&s->lock);
    qsort(out, (size_t) n, sizeof(*out), hotter);
    return n;
}

/* ---- reading a list ---- */

/* Requests one expert if it has a place. Returns false when the disk is busy: try again later. */
static bool request(ms_stream * s, const ms_hot * hot, moestream_stats * counts) {
    pthread_mutex_lock(&s->lock);
    bool idle = s->n_demand_in_flight == 0 && s->demand.count == 0 && s->ahead.count == 0 &&
                s->n_ahead_in_flight < MS_WARM_READS;
    int slot = -1;
    if (idle && ms_slot_find(&s->cache, hot->group, hot->expert) < 0) {
        slot = ms_slot_assign(&s->cache, hot->group, hot->expert, 1); /* ticks begin at 1: only slots never used */
    }
    for (int k = 0; slot >= 0 && k < s->index->group[hot->group].n_slices; k++) {
        ms_stream_request_locked(s, slot, k, &s->ahead, counts);
        s->ahead_waiting[slot * MS_MAX_SLICES + k] = 1;
        s->n_ahead_waiting++;
    }
    pthread_mutex_unlock(&s->lock);
    if (slot >= 0) {
        ms_stream_submit_waiting(s);
    }
    return idle;
}

static void * warm_thread(void * user) {
    ms_stream * s = user;
    moestream_stats counts = {0};
    /* the coldest first: then the hottest is the last to be evicted */
    for (int i = s->warm.n; i-- > 0;) {
        while (!atomic_load(&s->warm.stop) && !request(s, &s->warm.list[i], &counts)) {
            uint64_t seen = s->reader->ops->completed(s->reader);
            s->reader->ops->wait(s->reader, seen, MS_WARM_WAIT_NS);
        }
    }
    pthread_mutex_lock(&s->lock);
    ms_stream_add_counts(&s->stats, &counts);
    int left = 1;
    while (left > 0 && !atomic_load(&s->warm.stop)) {
        left = s->n_ahead_in_flight;
        pthread_mutex_unlock(&s->lock);
        if (left > 0) { /* somebody has to collect what arrives */
            s->reader->ops->wait(s->reader, s->reader->ops->completed(s->reader), MS_WARM_WAIT_NS);
        }
        pthread_mutex_lock(&s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

moestream_status ms_stream_warm(ms_stream * s, const ms_hot * list, int n, moestream_error * err) {
    ms_stream_warm_stop(s);
    ms_hot * copy = ms_calloc((size_t) n + 1, sizeof(*copy));
    if (copy == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, 0, "no memory for a list of %d experts", n);
    }
    int room[MS_MAX_CLASSES];
    memcpy(room, s->slab.n_slots, sizeof(room));
    s->warm.n = 0;
    for (int i = 0; i < n; i++) {
        int g = list[i].group, cls = g >= 0 && g < s->index->n_groups ? s->group_class[g] : -1;
        if (cls >= 0 && list[i].expert >= 0 && list[i].expert < s->index->group[g].n_expert && room[cls] > 0) {
            room[cls]--;
            copy[s->warm.n++] = list[i];
        }
    }
    s->warm.list = copy;
    atomic_store(&s->warm.stop, false);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the host's handlers run on the host's threads */
    s->warm.running = pthread_create(&s->warm.thread, NULL, warm_thread, s) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!s->warm.running) {
        ms_stream_warm_stop(s);
        return ms_fail(err, MOESTREAM_ERR_NOMEM, 0, "no thread could be started to read a warm start");
    }
    return MOESTREAM_OK;
}

void ms_stream_warm_stop(ms_stream * s) {
    if (s->warm.running) {
        atomic_store(&s->warm.stop, true);
        s->reader->ops->wake(s->reader);
        pthread_join(s->warm.thread, NULL);
        s->warm.running = false;
    }
    free(s->warm.list);
    s->warm.list = NULL;
    s->warm.n = 0;
}
