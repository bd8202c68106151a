/*
 * ggml/load: opening a store and loading its model, so that no expert byte is read and every tensor lands where the plan
 * says. Guarantees: see moestream_open and moestream_load_model.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml/store.h"

enum { MS_DEFAULT_DEPTH = 128, MS_DEFAULT_READERS = 4, MS_DEFAULT_DEADLINE_MS = 60000 };

/* ---- open ---- */

static moestream_status make_overrides(moestream * ms, moestream_error * err) {
    const moestream_plan * plan = ms->plan;
    if (plan->n_rules == 0) {
        return MOESTREAM_OK;
    }
    ms->overrides = ms_calloc((size_t) plan->n_rules + 1, sizeof(*ms->overrides));
    if (ms->overrides == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for %d overrides", plan->n_rules);
    }
    int n = 0;
    for (int i = 0; i < plan->n_rules; i++) {
        const ms_rule * rule = &plan->rule[i];
        if (rule->kind == MS_PLACE_DEFAULT) {
            continue;
        }
        ms->overrides[n].pattern = rule->emitted;
        ms->overrides[n].buft = rule->kind == MS_PLACE_BUFT     ? rule->buft
                                : rule->kind == MS_PLACE_STREAM ? (ggml_backend_buffer_type_t) &ms->stream_type
                                                                : (ggml_backend_buffer_type_t) &ms->dense_type;
        n++;
    }
    if (n == 0) { /* an empty list is not the same as none: it turns pipeline parallelism off */
        free(ms->overrides);
        ms->overrides = NULL;
    }
    return MOESTREAM_OK;
}

static moestream_status copy_replay(moestream * ms, const moestream_params * p, moestream_error * err) {
    if (p->replay_ids == NULL || p->n_replay_tokens == 0) {
        return MOESTREAM_OK;
    }
    const ms_index * index = &ms->plan->index;
    uint64_t n = 0;
    if (!ms_mul_u64(p->n_replay_tokens, (uint64_t) index->n_layer * (uint64_t) index->n_expert_used, &n) ||
        n > SIZE_MAX / sizeof(int32_t)) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "a recording of %zu tokens is too long", p->n_replay_tokens);
    }
    ms->replay = ms_calloc((size_t) n, sizeof(*ms->replay));
    if (ms->replay == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for a recording of %zu tokens", p->n_replay_tokens);
    }
    memcpy(ms->replay, p->replay_ids, (size_t) n * sizeof(*ms->replay));
    ms->n_replay = p->n_replay_tokens;
    ms->replay_recall = p->replay_recall;
    ms_log(MS_LOG_WARN, "experts are chosen by a recording of %zu tokens, not by the router: results are meaningless",
           ms->n_replay);
    return MOESTREAM_OK;
}

static moestream_status open_stream(moestream * ms, const moestream_params * p, moestream_error * err) {
    const ms_index * index = &ms->plan->index;
    if (index->n_banks == 0) {
        return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0,
                       "'%s' (%s) has no routed experts to stream; load it without streaming", index->path[0],
                       index->arch);
    }
    if (index->n_groups == 0) {
        return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0,
                       "nothing of '%s' is left to stream: the placement rules keep all its experts elsewhere",
                       index->path[0]);
    }
    uint64_t room = ms_memory_room();
    bool chosen = p->cache_bytes == 0 && p->cache_none == 0;
    ms_stream_options o = {
        .cache_bytes = chosen ? ms_budget_auto(ms->plan, room, p->reserve_bytes) : p->cache_bytes,
        .cache_none = p->cache_none != 0,
        .io = p->io,
        .direct = p->direct,
        .queue_depth = p->queue_depth > 0 ? p->queue_depth : MS_DEFAULT_DEPTH,
        .choose_depth = p->queue_depth == 0,
        .n_readers = p->n_readers > 0 ? p->n_readers : MS_DEFAULT_READERS,
        .verify = p->verify != 0,
        .deadline_ns = ms->deadline_ns,
    };
    moestream_status st = chosen || o.cache_none ? MOESTREAM_OK : ms_budget_check(ms->plan, room, o.cache_bytes, err);
    if (st == MOESTREAM_OK) {
        st = ms_stream_open(&ms->stream, index, &o, err);
    }
    if (st == MOESTREAM_ERR_NOMEM && chosen) {
        char context[160];
        snprintf(context, sizeof(context),
                 "cache auto, with %" PRIu64 " bytes of memory free, of which a part stays for other uses", room);
        ms_fail_context(err, context);
    }
    return st;
}

static moestream_status check_params(const moestream_params * p, moestream_error * err) {
    struct {
        const char * name;
        int64_t value, low, high;
    } ranges[] = {
        {"io", p->io, MOESTREAM_IO_AUTO, MOESTREAM_IO_PREAD},
        {"direct", p->direct, MOESTREAM_DIRECT_AUTO, MOESTREAM_DIRECT_OFF},
        {"dense", p->dense, MOESTREAM_DENSE_ANON, MOESTREAM_DENSE_MMAP},
        {"stream", p->stream, MOESTREAM_STREAM_ON, MOESTREAM_STREAM_OFF},
        {"prefetch", p->prefetch, MOESTREAM_PREFETCH_AUTO, MOESTREAM_PREFETCH_ON},
        {"queue_depth", p->queue_depth, 0, 1024},
        {"n_readers", p->n_readers, 0, 64},
    };
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        if (ranges[i].value < ranges[i].low || ranges[i].value > ranges[i].high) {
            return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "%s is %lld, it must be %lld to %lld", ranges[i].name,
                           (long long) ranges[i].value, (long long) ranges[i].low, (long long) ranges[i].high);
        }
    }
    return MOESTREAM_OK;
}

static void destroy(moestream * ms) {
    ms_stream_close(ms->stream);
    ms_plan_close(ms->plan);
    free(ms->overrides);
    free(ms->replay);
    free(ms->warm_path);
    free(ms->dense_data);
    free(ms->router);
    pthread_mutex_destroy(&ms->totals_lock);
    free(ms);
}

void ms_store_describe(moestream * ms) {
    snprintf(ms->describe, sizeof(ms->describe), "%s; dense weights %s",
             ms->stream != NULL ? ms_stream_describe(ms->stream) : "not streaming",
             ms->stream != NULL && ms->dense_anon ? "in anonymous memory" : "as llama.cpp places them");
}

moestream_status ms_store_open(moestream ** out, const char * path, const moestream_params * p, moestream_error * err) {
    const ms_api * api = NULL;
    moestream_status st = check_params(p, err);
    if (st == MOESTREAM_OK) {
        st = ms_api_bind(&api, p->libllama, err);
    }
    if (st != MOESTREAM_OK) {
        return st;
    }
    moestream * ms = ms_calloc(1, sizeof(*ms));
    if (ms == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for a store");
    }
    ms->api = api;
    ms->deadline_ns = (uint64_t) (p->deadline_ms > 0 ? p->deadline_ms : MS_DEFAULT_DEADLINE_MS) * 1000000u;
    ms->verify = p->verify != 0;
    pthread_mutex_init(&ms->totals_lock, NULL);
    ms_buffer_types_init(ms);
    st = ms_plan_open(&ms->plan, api, path, p, err);
    if (st == MOESTREAM_OK && p->stream == MOESTREAM_STREAM_ON) {
        st = open_stream(ms, p, err);
        if (st == MOESTREAM_OK) {
            st = copy_replay(ms, p, err);
        }
        if (st == MOESTREAM_OK && p->warm_start != NULL && p->cache_none == 0) {
            st = ms_warm_list_use(ms, p->warm_start, err);
        }
        if (st == MOESTREAM_OK) {
            ms->dense_data = ms_calloc((size_t) ms->plan->index.n_tensors + 1, sizeof(*ms->dense_data));
            st = ms->dense_data != NULL ? st
                                        : ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for a table of tensors");
        }
        ms->prefetch_asked = p->prefetch != MOESTREAM_PREFETCH_AUTO;
        ms->prefetch = p->prefetch != MOESTREAM_PREFETCH_OFF && (ms->replay == NULL || ms->replay_recall > 0);
    }
    if (st == MOESTREAM_OK) {
        st = make_overrides(ms, err);
    }
    if (st != MOESTREAM_OK) {
        destroy(ms);
        return st;
    }
    ms->dense_anon = p->dense == MOESTREAM_DENSE_ANON;
    ms_store_describe(ms);
    *out = ms;
    return MOESTREAM_OK;
}

moestream_status ms_store_close(moestream * ms, moestream_error * err) {
    int contexts = atomic_load(&ms->n_contexts), buffers = atomic_load(&ms->n_buffers);
    if (contexts > 0 || buffers > 0) {
        return ms_fail(
            err, MOESTREAM_ERR_BUSY, 0,
            "the store is still in use by %d context(s) and %d buffer(s) of a loaded model; free those first", contexts,
            buffers);
    }
    ms_warm_list_write(ms);
    destroy(ms);
    return MOESTREAM_OK;
}

/* ---- load ---- */

moestream_status ms_load_begin(moestream * ms, moestream_error * err) {
    if (ms->loading || atomic_load(&ms->n_buffers) > 0) {
        return ms_fail(err, MOESTREAM_ERR_BUSY, 0, "this store has loaded a model already, or is loading one");
    }
    ms->loading = true;
    ms->n_streamed_seen = 0;
    ms->load_error = (moestream_error) {.struct_size = sizeof(ms->load_error)};
    ms_log_clear_foreign_error();
    if (ms->stream != NULL && ms->api->load_policy_set != NULL) {
        ms->api->load_policy_set(1);
    }
    return MOESTREAM_OK;
}

/* llama.cpp opens the files by name and by itself: they have to be those whose headers we read. */
static moestream_status check_files(const moestream * ms, moestream_error * err) {
    const ms_index * index = &ms->plan->index;
    for (int i = 0; ms->stream != NULL && i < index->n_files; i++) {
        struct stat st = {0};
        int why = stat(index->path[i], &st) == 0 ? 0 : errno;
        ms_file_id now = ms_file_id_of(&st);
        if (why != 0 || !ms_same_file(&now, &index->file_id[i])) {
            return ms_fail(err, MOESTREAM_ERR_IO, why != 0 ? why : ESTALE,
                           "'%s' was replaced or written to while it was loaded", index->path[i]);
        }
    }
    return MOESTREAM_OK;
}

/* Expert tensors that should have come to us. llama.cpp may leave out whole blocks (MTP layers that are not loaded), but
 * what it loads must be where the plan says. */
static moestream_status check_arrived(moestream * ms, moestream_error * err) {
    if (ms->stream != NULL && ms->n_streamed_seen == 0) {
        return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0,
                       "the model was loaded, but none of its experts came to be streamed");
    }
    return MOESTREAM_OK;
}

moestream_status ms_load_end(moestream * ms, const struct llama_model * model, moestream_error * err) {
    if (!ms->loading) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "moestream_load_end without moestream_load_begin");
    }
    if (ms->stream != NULL && ms->api->load_policy_set != NULL) {
        ms->api->load_policy_set(0);
    }
    ms->loading = false;
    ms->hide_host = false;
    if (ms->load_error.status != MOESTREAM_OK) {
        return ms_fail(err, ms->load_error.status, ms->load_error.os_errno, "%s", ms->load_error.message);
    }
    if (model == NULL) {
        const char * why = ms_log_last_foreign_error();
        return ms_fail(err, MOESTREAM_ERR_INTERNAL, 0, "llama.cpp could not load '%s': %s", ms->plan->index.path[0],
                       why[0] != '\0' ? why : "it gave no reason");
    }
    moestream_status st = check_files(ms, err);
    st = st == MOESTREAM_OK ? check_arrived(ms, err) : st;
    st = st == MOESTREAM_OK && ms->stream != NULL ? ms_predict_init(ms, err) : st;
    if (st == MOESTREAM_OK) {
        ms_warm_list_read(ms); /* after the dense weights, which are needed first */
    }
    return st;
}

typedef struct progress_chain {
    llama_progress_callback callback;
    void * user;
    moestream * ms;
    bool stopped;
} progress_chain;

/* A read that failed makes the rest of the load pointless. */
static bool on_progress(float done, void * user) {
    progress_chain * chain = user;
    if (chain->ms->load_error.status != MOESTREAM_OK) {
        return false;
    }
    if (chain->callback != NULL && !chain->callback(done, chain->user)) {
        chain->stopped = true;
        return false;
    }
    return true;
}

static moestream_status prepare_params(moestream * ms, struct llama_model_params * p, moestream_error * err) {
    if (p->tensor_buft_overrides != NULL) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                       "tensor_buft_overrides is set: give such rules to moestream_open, which keeps one list");
    }
    p->tensor_buft_overrides = ms->overrides;
    if (ms->stream == NULL) {
        return MOESTREAM_OK;
    }
    if (p->check_tensors) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                       "check_tensors would read every expert; a streamed model cannot be loaded with it");
    }
#if MS_HAVE_MP_LOAD_MODE
    if (p->load_mode == LLAMA_LOAD_MODE_MLOCK || p->load_mode == LLAMA_LOAD_MODE_MMAP_MLOCK) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                       "mlock would lock every expert in memory; a streamed model cannot be loaded with it");
    }
    p->load_mode = LLAMA_LOAD_MODE_MMAP; /* the loader then hands over pointers, and reads nothing itself */
#else
    if (p->use_mlock) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                       "use_mlock would lock every expert in memory; a streamed model cannot be loaded with it");
    }
    p->use_mmap = true;
#endif
#if MS_HAVE_MP_USE_DIRECT_IO
    p->use_direct_io = false;
#endif
    return MOESTREAM_OK;
}

moestream_status ms_load_model(moestream * ms, struct llama_model ** out, const struct llama_model_params * params,
                               moestream_error * err) {
    if (!ms->api->params_match) {
        return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0, "built for llama.cpp %s, '%s' is %s: %s", MS_LLAMA_COMMIT,
                       ms->api->path, ms->api->commit, ms->api->params_why);
    }
    struct llama_model_params p = *params;
    progress_chain chain = {.callback = p.progress_callback, .user = p.progress_callback_user_data, .ms = ms};
    moestream_status st = prepare_params(ms, &p, err);
    if (st == MOESTREAM_OK) {
        st = ms_load_begin(ms, err);
    }
    if (st != MOESTREAM_OK) {
        return st;
    }
    p.progress_callback = on_progress;
    p.progress_callback_user_data = &chain;
    struct llama_model * model = ms->api->llama_model_load_from_file(ms->plan->index.path[0], p);
    st = ms_load_end(ms, model, err);
    if (chain.stopped && model == NULL) {
        st = ms_fail(err, MOESTREAM_ERR_CLOSED, 0, "loading '%s' was stopped by the progress callback",
                     ms->plan->index.path[0]);
    }
    if (st != MOESTREAM_OK) {
        if (model != NULL) {
            ms->api->llama_model_free(model);
        }
        return st;
    }
    *out = model;
    return MOESTREAM_OK;
}
