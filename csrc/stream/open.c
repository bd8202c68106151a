/* stream/open: opening, resizing and closing a stream; its files, reader, slab, cache and pool of reads. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stream/internal.h"

/* ---- cache and pool ---- */

void ms_stream_drop_cache(ms_cache_parts * p) {
    ms_slot_cache_close(&p->cache);
    ms_slab_close(&p->slab);
    free(p->failure);
    free(p->demand.want);
    free(p->ahead.want);
    free(p->ahead_waiting);
    *p = (ms_cache_parts) {0};
}

static ms_cache_parts parts_of(const ms_stream * s) {
    return (ms_cache_parts) {.slab = s->slab,
                             .cache = s->cache,
                             .failure = s->failure,
                             .demand = s->demand,
                             .ahead = s->ahead,
                             .ahead_waiting = s->ahead_waiting};
}

static void use_parts(ms_stream * s, const ms_cache_parts * p) {
    s->slab = p->slab;
    s->cache = p->cache;
    s->failure = p->failure;
    s->demand = p->demand;
    s->ahead = p->ahead;
    s->ahead_waiting = p->ahead_waiting;
    s->n_ahead_waiting = 0;
    memset(s->ahead_open, 0, (size_t) s->index->n_groups * sizeof(*s->ahead_open));
}

static bool queue_open(ms_queue * queue, int capacity) {
    *queue = (ms_queue) {.want = ms_calloc((size_t) capacity, sizeof(ms_want)), .capacity = capacity};
    return queue->want != NULL;
}

moestream_status ms_stream_make_cache(const ms_stream * s, uint64_t budget, ms_cache_parts * out,
                                      moestream_error * err) {
    ms_cache_parts p = {0};
    int n_slots[MS_MAX_CLASSES] = {0};
    uint64_t min_bytes = 0;
    const ms_stream_sizes * z = &s->sizes;
    if (!ms_slab_share(budget, z->n_classes, z->slot_bytes, z->n_experts, z->min_slots, n_slots, &min_bytes)) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, 0,
                       "a cache of %" PRIu64 " bytes is too small: this model needs at least %" PRIu64
                       " bytes (two tokens' experts of one layer in each of %d slot sizes)",
                       budget, min_bytes, z->n_classes);
    }
    moestream_status st = ms_slab_open(&p.slab, z->n_classes, z->slot_bytes, n_slots, err);
    if (st != MOESTREAM_OK) {
        return st;
    }
    int * experts = ms_calloc((size_t) s->index->n_groups, 2 * sizeof(int));
    int * layers = experts != NULL ? experts + s->index->n_groups : NULL;
    if (experts == NULL) {
        ms_stream_drop_cache(&p);
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for the cache's tables");
    }
    for (int g = 0; g < s->index->n_groups; g++) {
        experts[g] = s->index->group[g].n_expert;
        layers[g] = s->index->group[g].layer;
    }
    st = ms_slot_cache_open(&p.cache, s->index->n_groups, s->group_class, experts, layers, z->n_classes, n_slots, err);
    free(experts);
    int slices = p.slab.total_slots * MS_MAX_SLICES;
    if (st == MOESTREAM_OK) {
        p.failure = ms_calloc((size_t) slices, sizeof(*p.failure));
        p.ahead_waiting = ms_calloc((size_t) slices, 1);
        if (p.failure == NULL || p.ahead_waiting == NULL || !queue_open(&p.demand, slices) ||
            !queue_open(&p.ahead, slices)) {
            st = ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for the tables of %d slots", p.slab.total_slots);
        }
    }
    if (st != MOESTREAM_OK) {
        ms_stream_drop_cache(&p);
        return st;
    }
    *out = p;
    return MOESTREAM_OK;
}

moestream_status ms_stream_open_reader(ms_stream * s, int io, ms_reader ** out, moestream_error * err) {
    ms_reader_options options = {
        .depth = s->depth, .n_threads = s->options.n_readers, .done = ms_stream_done, .user = s};
    if (s->options.open_reader != NULL) {
        return s->options.open_reader(s->options.open_reader_user, out, &options, err);
    }
    return ms_reader_open(out, io, &options, err);
}

static void describe(ms_stream * s) {
    uint64_t experts = 0, bytes = 0;
    for (int g = 0; g < s->index->n_groups; g++) {
        experts += (uint64_t) s->index->group[g].n_expert;
        for (int k = 0; k < s->index->group[g].n_slices; k++) {
            bytes += s->index->tensor[s->index->bank[s->index->group[g].bank[k]].tensor].bytes;
        }
    }
    int direct = 0;
    for (int i = 0; i < s->n_files; i++) {
        direct += atomic_load(&s->file[i].direct);
    }
    snprintf(
        s->describe, sizeof(s->describe),
        "streaming %" PRIu64
        " experts of %d layers, %.1f MiB, through a cache of %.1f MiB (%d slots, %d slot size(s)%s); %s, depth %d, "
        "%d of %d files read directly%s",
        experts, s->index->n_groups, (double) bytes / (1 << 20), (double) s->slab.bytes / (1 << 20),
        s->slab.total_slots, s->slab.n_classes, s->slab.huge ? ", huge pages" : "", s->reader->ops->name,
        s->depth_limit, direct, s->n_files, s->options.cache_none ? ", nothing kept between operations" : "");
}

/* ---- open ---- */

static moestream_status open_files(ms_stream * s, moestream_error * err) {
    s->file = ms_calloc((size_t) s->index->n_files, sizeof(*s->file));
    if (s->file == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for %d files", s->index->n_files);
    }
    for (int i = 0; i < s->index->n_files; i++) {
        uint64_t probe = 0; /* where direct and buffered reads are compared: the first expert bytes of this file */
        for (int b = s->index->n_banks - 1; b >= 0; b--) {
            probe = s->index->bank[b].file == i ? s->index->bank[b].offset : probe;
        }
        moestream_status st = ms_file_open(&s->file[i], s->index->path[i], s->options.direct, probe, err);
        if (st != MOESTREAM_OK) {
            return st;
        }
        s->n_files = i + 1;
        if (s->file[i].bytes < s->index->file_bytes[i]) {
            return ms_fail(err, MOESTREAM_ERR_EOF, 0,
                           "'%s' shrank from %" PRIu64 " to %" PRIu64 " bytes while it was opened", s->file[i].path,
                           s->index->file_bytes[i], s->file[i].bytes);
        }
        if (s->index->file_id != NULL && !ms_same_file(&s->file[i].id, &s->index->file_id[i])) {
            return ms_fail(err, MOESTREAM_ERR_IO, ESTALE, "'%s' was replaced or written to while it was opened",
                           s->file[i].path);
        }
    }
    return MOESTREAM_OK;
}

static moestream_status alloc_tables(ms_stream * s, moestream_error * err) {
    size_t n = (size_t) s->index->n_groups, d = (size_t) s->depth;
    s->group_class = ms_calloc(n + 1, sizeof(*s->group_class));
    s->ahead_open = ms_calloc(n + 1, sizeof(*s->ahead_open));
    s->use_order = ms_calloc((n + 1) * MS_MAX_SLICES, sizeof(*s->use_order));
    s->n_used = ms_calloc(n + 1, sizeof(*s->n_used));
    s->slice_at = ms_calloc((n + 1) * MS_MAX_SLICES, sizeof(*s->slice_at));
    s->read = ms_calloc(d, sizeof(*s->read));
    s->flight = ms_calloc(d, sizeof(*s->flight));
    s->free_read = ms_calloc(d, sizeof(*s->free_read));
    bool ok = s->group_class && s->ahead_open && s->use_order && s->n_used && s->slice_at && s->read && s->flight &&
              s->free_read;
    if (ok && s->options.verify) {
        size_t total = 0;
        s->checksum_at = ms_calloc((size_t) s->index->n_banks + 1, sizeof(*s->checksum_at));
        for (int b = 0; ok && s->checksum_at != NULL && b < s->index->n_banks; b++) {
            s->checksum_at[b] = total;
            total += (size_t) s->index->bank[b].n_expert;
        }
        s->checksum = ms_calloc(total + 1, sizeof(*s->checksum));
        ok = s->checksum != NULL && s->checksum_at != NULL;
    }
    if (!ok) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for the tables of %zu layers and %zu reads", n, d);
    }
    for (size_t i = 0; i < d; i++) {
        s->free_read[i] = (int) i;
    }
    s->n_free_read = s->depth;
    for (size_t g = 0; g < n; g++) {
        ms_stream_layout(s->index, (int) g, &s->slice_at[g * MS_MAX_SLICES]);
        for (int k = 0; k < MS_MAX_SLICES; k++) {
            s->use_order[g * MS_MAX_SLICES + (size_t) k] = (uint8_t) k;
        }
    }
    return MOESTREAM_OK;
}

moestream_status ms_stream_open(ms_stream ** out, const ms_index * index, const ms_stream_options * options,
                                moestream_error * err) {
    ms_stream * s = ms_calloc(1, sizeof(*s));
    if (s == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for a stream");
    }
    s->index = index;
    s->options = *options;
    s->depth = options->queue_depth;
    s->depth_limit = s->depth;
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->resize_lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&s->freed, &attr);
    pthread_condattr_destroy(&attr);

    moestream_status st = alloc_tables(s, err);
    if (st == MOESTREAM_OK) {
        ms_stream_size(index, &s->sizes, s->group_class);
        st = open_files(s, err);
    }
    if (st == MOESTREAM_OK) {
        ms_cache_parts parts;
        st = ms_stream_make_cache(s, options->cache_none ? s->sizes.min_bytes : options->cache_bytes, &parts, err);
        if (st == MOESTREAM_OK) {
            use_parts(s, &parts);
        }
    }
    if (st == MOESTREAM_OK) {
        st = ms_stream_open_reader(s, options->io, &s->reader, err);
    }
    if (st != MOESTREAM_OK) {
        ms_stream_close(s);
        return st;
    }
    ms_tune(s);
    describe(s);
    ms_prefault_start(&s->prefault, &s->slab);
    if (!options->cache_none && s->slab.bytes < s->sizes.cycle_bytes) {
        ms_log(
            MS_LOG_WARN,
            "the cache of %.1f MiB is smaller than what one token touches (%.1f MiB): most experts will be read again "
            "for each token",
            (double) s->slab.bytes / (1 << 20), (double) s->sizes.cycle_bytes / (1 << 20));
    }
    *out = s;
    return MOESTREAM_OK;
}

void ms_stream_close(ms_stream * s) {
    if (s == NULL) {
        return;
    }
    ms_stream_warm_stop(s);
    ms_prefault_stop(&s->prefault);
    if (s->reader != NULL) {
        pthread_mutex_lock(&s->lock); /* nobody looks at what has not been read yet: completions submit no more */
        s->demand.count = 0;
        s->ahead.count = 0;
        pthread_mutex_unlock(&s->lock);
        s->reader->ops->close(s->reader); /* waits for what is in flight: the kernel still writes to the slab */
    }
    ms_cache_parts parts = parts_of(s);
    ms_stream_drop_cache(&parts);
    for (int i = 0; i < s->n_files; i++) {
        ms_file_close(&s->file[i]);
    }
    pthread_mutex_destroy(&s->lock);
    pthread_mutex_destroy(&s->resize_lock);
    pthread_cond_destroy(&s->freed);
    free(s->file);
    free(s->group_class);
    free(s->slice_at);
    free(s->ahead_open);
    free(s->use_order);
    free(s->n_used);
    free(s->read);
    free(s->flight);
    free(s->free_read);
    free(s->checksum);
    free(s->checksum_at);
    free(s);
}

/* Nothing may write to the old slab or look at it: no operation, no pins, no read in flight. Called and returns with the
 * lock held; it is given up while waiting. */
static moestream_status quiesce_locked(ms_stream * s, moestream_error * err) {
    uint64_t begin = ms_now_ns(), limit = s->options.deadline_ns;
    while (s->n_pinned + s->n_operations == 0 &&
           s->n_demand_in_flight + s->n_ahead_in_flight + s->demand.count + s->n_ahead_waiting > 0) {
        uint64_t waited = ms_now_ns() - begin;
        if (limit > 0 && waited > limit) {
            return ms_fail(err, MOESTREAM_ERR_BUSY, ETIMEDOUT,
                           "could not resize the cache: %d reads into it did not end in %.1f s (deadline_ms)",
                           s->n_demand_in_flight + s->n_ahead_in_flight, (double) waited * 1e-9);
        }
        pthread_mutex_unlock(&s->lock);
        s->reader->ops->wait(s->reader, s->reader->ops->completed(s->reader), 1000 * 1000);
        pthread_mutex_lock(&s->lock);
    }
    if (s->n_pinned + s->n_operations > 0) {
        return ms_fail(err, MOESTREAM_ERR_BUSY, 0, "could not resize the cache: %d slots are in use by a running call",
                       s->n_pinned);
    }
    return MOESTREAM_OK;
}

moestream_status ms_stream_resize(ms_stream * s, uint64_t cache_bytes, moestream_error * err) {
    ms_cache_parts fresh, old;
    moestream_status st = ms_stream_make_cache(s, cache_bytes, &fresh, err);
    if (st != MOESTREAM_OK) {
        return st;
    }
    pthread_mutex_lock(&s->resize_lock);
    ms_stream_warm_stop(s);
    pthread_mutex_lock(&s->lock);
    st = quiesce_locked(s, err);
    old = fresh;
    if (st == MOESTREAM_OK) {
        fresh.cache.n_evictions = s->cache.n_evictions; /* totals go on */
        old = parts_of(s);
        use_parts(s, &fresh);
        s->options.cache_none = false; /* whoever gives it memory wants it used */
        describe(s);
    }
    pthread_mutex_unlock(&s->lock);
    if (st == MOESTREAM_OK) {
        ms_prefault_stop(&s->prefault); /* it is still at the old slab */
        ms_prefault_start(&s->prefault, &fresh.slab);
    }
    pthread_mutex_unlock(&s->resize_lock);
    ms_stream_drop_cache(&old); /* its memory goes back to the system here */
    return st;
}
