/*
 * capi: the functions of moestream.h. Checks what comes from outside, then forwards; keeps nothing of its own.
 * Structs from callers are copied by their struct_size: a shorter one gets zeros behind it, a longer one is accepted if
 * its tail is zero (openat2's rule).
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml/store.h"

/* ---- structs across the boundary ---- */

static moestream_status copy_in(void * to, size_t to_bytes, const void * from, const char * what,
                                moestream_error * err) {
    size_t from_bytes = 0;
    if (from != NULL) {
        memcpy(&from_bytes, from, sizeof(from_bytes));
    }
    if (from == NULL || from_bytes < sizeof(size_t)) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "%s is NULL or has struct_size %zu; set it to sizeof(%s)", what,
                       from_bytes, what);
    }
    for (size_t i = to_bytes; i < from_bytes; i++) {
        if (((const unsigned char *) from)[i] != 0) {
            return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0,
                           "%s of %zu bytes sets a field this library (%zu bytes) does not know", what, from_bytes,
                           to_bytes);
        }
    }
    memset(to, 0, to_bytes);
    memcpy(to, from, from_bytes < to_bytes ? from_bytes : to_bytes);
    return MOESTREAM_OK;
}

/* Writes as much of a result as the caller's struct_size has room for, and leaves struct_size as it was. */
static moestream_status copy_out(void * to, const void * from, size_t from_bytes) {
    size_t to_bytes = 0;
    if (to == NULL) {
        return MOESTREAM_ERR_INVALID;
    }
    memcpy(&to_bytes, to, sizeof(to_bytes));
    if (to_bytes < sizeof(size_t)) {
        return MOESTREAM_ERR_INVALID;
    }
    size_t n = to_bytes < from_bytes ? to_bytes : from_bytes;
    memcpy((char *) to + sizeof(size_t), (const char *) from + sizeof(size_t), n - sizeof(size_t));
    if (to_bytes > from_bytes) {
        memset((char *) to + from_bytes, 0, to_bytes - from_bytes);
    }
    return MOESTREAM_OK;
}

static moestream_status need(bool ok, const char * what, moestream_error * err) {
    return ok ? MOESTREAM_OK : ms_fail(err, MOESTREAM_ERR_INVALID, 0, "%s is NULL", what);
}

/* ---- status, build, binding ---- */

const char * moestream_status_name(int32_t status) {
    static const char * const name[] = {
        "MOESTREAM_OK",         "MOESTREAM_ERR_INVALID", "MOESTREAM_ERR_NOMEM",       "MOESTREAM_ERR_IO",
        "MOESTREAM_ERR_EOF",    "MOESTREAM_ERR_FORMAT",  "MOESTREAM_ERR_UNSUPPORTED", "MOESTREAM_ERR_BUSY",
        "MOESTREAM_ERR_CLOSED", "MOESTREAM_ERR_CORRUPT", "MOESTREAM_ERR_INTERNAL"};
    return status <= 0 && -(int64_t) status < (int64_t) (sizeof(name) / sizeof(name[0])) ? name[-status]
                                                                                         : "unknown status";
}

int32_t moestream_abi_version(void) {
    return MOESTREAM_ABI_VERSION;
}

#if defined(__clang__)
#define MS_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define MS_COMPILER "gcc " __VERSION__
#else
#define MS_COMPILER "unknown"
#endif

const char * moestream_build_info(void) {
    return "{\"version\": \"" MS_VERSION "\", \"llama_commit\": \"" MS_LLAMA_COMMIT
           "\", \"ggml_version\": \"" MS_GGML_VERSION "\", \"compiler\": \"" MS_COMPILER "\", "
#if MS_HAVE_LIBURING
           "\"io_uring\": true, "
#else
           "\"io_uring\": false, "
#endif
           "\"pread\": true}";
}

moestream_status moestream_bind(void * libllama, moestream_error * err) {
    const ms_api * api = NULL;
    return ms_api_bind(&api, libllama, err);
}

void * moestream_bundled_llama(void) {
    const ms_api * api = ms_api_bundled();
    return api != NULL ? api->libllama : NULL;
}

size_t moestream_features(void * libllama, char * buf, size_t n) {
    const ms_api * api = ms_api_find(libllama);
    return api != NULL ? ms_api_features(api, buf, n) : 0;
}

size_t moestream_libraries(char * buf, size_t n) {
    return ms_api_libraries(buf, n);
}

/* ---- log ---- */

int32_t moestream_log_take(moestream_log_line * line) {
    moestream_log_line taken = {.struct_size = sizeof(taken)};
    if (line == NULL || !ms_log_take(&taken)) {
        return 0;
    }
    return copy_out(line, &taken, sizeof(taken)) == MOESTREAM_OK;
}

static void on_llama_log(enum ggml_log_level level, const char * text, void * user) {
    (void) user;
    ms_log_foreign((int) level, text);
}

moestream_status moestream_log_capture(void * libllama, int32_t level, moestream_error * err) {
    const ms_api * api = NULL;
    if (level < MS_LOG_DEBUG || level > MS_LOG_ERROR + 1) { /* one more than any line has: keep none */
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                       "log level is %d, it must be 1 (debug) to 4 (error), or 5 (nothing)", level);
    }
    moestream_status st = ms_api_bind(&api, libllama, err);
    if (st == MOESTREAM_OK) {
        ms_log_set_level(level);
        api->llama_log_set(on_llama_log, NULL);
    }
    return st;
}

/* ---- plan ---- */

moestream_status moestream_plan_open(moestream_plan ** out, const char * path, const moestream_params * params,
                                     moestream_error * err) {
    moestream_params p;
    const ms_api * api = NULL;
    moestream_status st = need(out != NULL && path != NULL, "out or path", err);
    st = st == MOESTREAM_OK ? copy_in(&p, sizeof(p), params, "moestream_params", err) : st;
    st = st == MOESTREAM_OK ? ms_api_bind(&api, p.libllama, err) : st;
    return st == MOESTREAM_OK ? ms_plan_open(out, api, path, &p, err) : st;
}

void moestream_plan_close(moestream_plan * plan) {
    ms_plan_close(plan);
}

moestream_status moestream_plan_get_info(const moestream_plan * plan, moestream_plan_info * info) {
    if (plan == NULL) {
        return MOESTREAM_ERR_INVALID;
    }
    moestream_plan_info i = {
        .n_layer = plan->index.n_layer,
        .n_expert = plan->index.n_expert,
        .n_expert_used = plan->index.n_expert_used,
        .n_tensors = plan->index.n_tensors,
        .n_rules = plan->n_rules,
        .n_warnings = plan->n_warnings,
        .n_files = plan->index.n_files,
        .n_classes = plan->sizes.n_classes,
        .first_moe_layer = plan->first_moe_layer,
        .expert_bytes = plan->expert_bytes,
        .dense_bytes = plan->dense_bytes,
        .stream_bytes = plan->stream_bytes,
        .cycle_bytes = plan->sizes.cycle_bytes,
        .min_cache_bytes = plan->sizes.min_bytes,
        .full_cache_bytes = plan->sizes.full_bytes,
    };
    return copy_out(info, &i, sizeof(i));
}

static const char * place_name(const moestream_plan * plan, int rule) {
    return rule < 0 ? "DEFAULT" : plan->rule[rule].kind == MS_PLACE_DENSE ? "CPU_ANON" : plan->rule[rule].place;
}

moestream_status moestream_plan_get_tensor(const moestream_plan * plan, int32_t i, moestream_plan_tensor * tensor) {
    if (plan == NULL || i < 0 || i >= plan->index.n_tensors) {
        return MOESTREAM_ERR_INVALID;
    }
    const ms_tensor * t = &plan->index.tensor[i];
    int rule = plan->tensor_rule[i];
    moestream_plan_tensor out = {.name = t->name,
                                 .type = t->type_name,
                                 .place = place_name(plan, rule),
                                 .rule = rule,
                                 .layer = t->layer,
                                 .is_expert = t->bank >= 0,
                                 .file = t->file,
                                 .offset = t->offset,
                                 .bytes = t->bytes};
    return copy_out(tensor, &out, sizeof(out));
}

moestream_status moestream_plan_get_rule(const moestream_plan * plan, int32_t i, moestream_plan_rule * rule) {
    if (plan == NULL || i < 0 || i >= plan->n_rules) {
        return MOESTREAM_ERR_INVALID;
    }
    const ms_rule * r = &plan->rule[i];
    moestream_plan_rule out = {.pattern = r->pattern,
                               .place = place_name(plan, i),
                               .origin = r->origin,
                               .n_matched = r->n_matched,
                               .bytes = r->bytes};
    return copy_out(rule, &out, sizeof(out));
}

moestream_status moestream_plan_get_class(const moestream_plan * plan, int32_t i, moestream_plan_class * cls) {
    if (plan == NULL || i < 0 || i >= plan->sizes.n_classes) {
        return MOESTREAM_ERR_INVALID;
    }
    moestream_plan_class out = {.slot_bytes = plan->sizes.slot_bytes[i],
                                .n_layers = plan->sizes.n_groups[i],
                                .n_experts = plan->sizes.n_experts[i]};
    return copy_out(cls, &out, sizeof(out));
}

const char * moestream_plan_warning(const moestream_plan * plan, int32_t i) {
    return plan != NULL && i >= 0 && i < plan->n_warnings ? plan->warning[i] : NULL;
}

/* ---- store ---- */

moestream_status moestream_open(moestream ** out, const char * path, const moestream_params * params,
                                moestream_error * err) {
    moestream_params p;
    moestream_status st = need(out != NULL && path != NULL, "out or path", err);
    st = st == MOESTREAM_OK ? copy_in(&p, sizeof(p), params, "moestream_params", err) : st;
    return st == MOESTREAM_OK ? ms_store_open(out, path, &p, err) : st;
}

moestream_status moestream_close(moestream * ms, moestream_error * err) {
    return ms != NULL ? ms_store_close(ms, err) : MOESTREAM_OK;
}

const moestream_plan * moestream_get_plan(const moestream * ms) {
    return ms != NULL ? ms->plan : NULL;
}

struct ggml_backend_buffer_type * moestream_buffer_type(moestream * ms) {
    return ms != NULL && ms->stream != NULL ? (struct ggml_backend_buffer_type *) &ms->stream_type : NULL;
}

const struct llama_model_tensor_buft_override * moestream_overrides(moestream * ms) {
    return ms != NULL ? ms->overrides : NULL;
}

moestream_status moestream_load_model(moestream * ms, struct llama_model ** out,
                                      const struct llama_model_params * params, moestream_error * err) {
    moestream_status st = need(ms != NULL && out != NULL && params != NULL, "ms, out or params", err);
    return st == MOESTREAM_OK ? ms_load_model(ms, out, params, err) : st;
}

moestream_status moestream_load_begin(moestream * ms, moestream_error * err) {
    moestream_status st = need(ms != NULL, "ms", err);
    return st == MOESTREAM_OK ? ms_load_begin(ms, err) : st;
}

moestream_status moestream_load_end(moestream * ms, const struct llama_model * model, moestream_error * err) {
    moestream_status st = need(ms != NULL, "ms", err);
    return st == MOESTREAM_OK ? ms_load_end(ms, model, err) : st;
}

moestream_status moestream_load_file(moestream * ms, void ** out_file, moestream_error * err) {
    moestream_status st = need(ms != NULL && out_file != NULL, "ms or out_file", err);
    return st == MOESTREAM_OK ? ms_load_file(ms, out_file, err) : st;
}

/* ---- contexts ---- */

moestream_status moestream_context_init(moestream_context ** out, moestream * ms, struct llama_context_params * params,
                                        moestream_error * err) {
    moestream_status st = need(out != NULL && ms != NULL, "out or ms", err);
    return st == MOESTREAM_OK ? ms_context_init(out, ms, params, err) : st;
}

void moestream_context_free(moestream_context * ctx) {
    ms_context_free(ctx);
}

moestream_status moestream_context_attach(moestream_context * ctx, struct llama_context * lctx, int32_t n_threads,
                                          int32_t n_threads_batch, moestream_error * err) {
    moestream_status st = need(ctx != NULL && lctx != NULL, "ctx or lctx", err);
    if (st != MOESTREAM_OK) {
        return st;
    }
    if (n_threads < 1 || n_threads > MS_MAX_THREADS || n_threads_batch < 1 || n_threads_batch > MS_MAX_THREADS) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "n_threads is %d, n_threads_batch is %d; both must be 1 to %d",
                       n_threads, n_threads_batch, MS_MAX_THREADS);
    }
    if (ctx->pool != NULL) {
        return ms_fail(err, MOESTREAM_ERR_BUSY, 0, "this context has a threadpool already");
    }
    /* one pool of the larger size serves both: llama.cpp passes the number of threads with each graph */
    int n = n_threads > n_threads_batch ? n_threads : n_threads_batch;
    struct ggml_threadpool_params tpp = ctx->api->ggml_threadpool_params_default(n);
    ctx->pool = ctx->api->ggml_threadpool_new(&tpp);
    if (ctx->pool == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, errno, "could not start %d compute threads", n);
    }
    ctx->api->llama_attach_threadpool(lctx, ctx->pool, ctx->pool);
    return MOESTREAM_OK;
}

moestream_status moestream_context_status(moestream_context * ctx, moestream_error * err) {
    if (ctx == NULL) {
        return need(false, "ctx", err);
    }
    pthread_mutex_lock(&ctx->error_lock);
    moestream_error e = ctx->error;
    memset(&ctx->error, 0, sizeof(ctx->error));
    pthread_mutex_unlock(&ctx->error_lock);
    atomic_store(&ctx->failed, false);
    atomic_store(&ctx->delivered, false);
    atomic_store(&ctx->cancel, false);
    if (e.status != MOESTREAM_OK) {
        return ms_fail(err, (moestream_status) e.status, e.os_errno, "%s", e.message);
    }
    /* what this call used of a mapping was never read by us */
    const moestream * ms = ctx->ms;
    return ms->stream != NULL && !ms->dense_anon ? ms_stream_check_files(ms->stream, err) : MOESTREAM_OK;
}

void moestream_context_cancel(moestream_context * ctx) {
    if (ctx != NULL) {
        atomic_store(&ctx->cancel, true);
    }
}

/* ---- statistics ---- */

static void add_context_counters(moestream_stats * to, const moestream_context * ctx) {
    to->n_ops += atomic_load(&ctx->n_ops);
    to->compute_ns += atomic_load(&ctx->compute_ns);
    to->stall_ns += atomic_load(&ctx->stall_ns) / (uint64_t) atomic_load(&ctx->n_threads);
}

moestream_status moestream_get_stats(const moestream * ms, moestream_stats * stats) {
    if (ms == NULL) {
        return MOESTREAM_ERR_INVALID;
    }
    moestream_stats s = {0};
    if (ms->stream != NULL) {
        ms_stream_get_stats(ms->stream, &s);
    }
    moestream * unlocked =
        (moestream *) (uintptr_t) ms; /* the lock is not part of what a reader of statistics may see */
    pthread_mutex_lock(&unlocked->totals_lock);
    s.n_ops = ms->totals.n_ops;
    s.compute_ns = ms->totals.compute_ns;
    s.stall_ns = ms->totals.stall_ns;
    for (const moestream_context * c = ms->contexts; c != NULL; c = c->next) {
        add_context_counters(&s, c);
    }
    pthread_mutex_unlock(&unlocked->totals_lock);
    s.n_fallback_tensors = atomic_load(&ms->n_fallback_tensors);
    s.load_expert_bytes += atomic_load(&ms->load_expert_bytes);
    s.load_dense_bytes = atomic_load(&ms->load_dense_bytes);
    s.prefetch = ms->prefetch && (ms->n_routers > 0 || ms->replay != NULL);
    return copy_out(stats, &s, sizeof(s));
}

/* Per-context copy of what only the store knows, so that one struct says everything. */
static void fill_store_fields(const moestream_context * ctx, moestream_stats * s) {
    moestream_stats all = {.struct_size = sizeof(all)};
    moestream_get_stats(ctx->ms, &all);
    s->cache_bytes = all.cache_bytes;
    s->cache_used_bytes = all.cache_used_bytes;
    s->n_slots = all.n_slots;
    s->n_evictions = all.n_evictions;
    s->n_retries = all.n_retries;
    s->n_fallback_tensors = all.n_fallback_tensors;
    s->load_expert_bytes = all.load_expert_bytes;
    s->load_dense_bytes = all.load_dense_bytes;
    s->io = all.io;
    s->direct = all.direct;
    s->queue_depth = all.queue_depth;
    s->prefetch = all.prefetch;
}

static moestream_stats context_total(const moestream_context * ctx) {
    moestream_stats s = ctx->total;
    s.stall_ns = atomic_load(&ctx->stall_ns) / (uint64_t) atomic_load(&ctx->n_threads);
    return s;
}

void moestream_context_begin_call(moestream_context * ctx) {
    if (ctx != NULL) {
        ctx->at_call = context_total(ctx);
    }
}

moestream_status moestream_context_get_stats(const moestream_context * ctx, moestream_stats * call,
                                             moestream_stats * total) {
    if (ctx == NULL) {
        return MOESTREAM_ERR_INVALID;
    }
    moestream_stats t = context_total(ctx), c = t;
    const moestream_stats * before = &ctx->at_call;
    c.n_ops -= before->n_ops;
    c.n_hits -= before->n_hits;
    c.n_misses -= before->n_misses;
    c.n_coalesced -= before->n_coalesced;
    c.n_reads -= before->n_reads;
    c.read_bytes -= before->read_bytes;
    c.slice_bytes -= before->slice_bytes;
    c.stall_ns = c.stall_ns > before->stall_ns ? c.stall_ns - before->stall_ns : 0;
    c.compute_ns -= before->compute_ns;
    c.n_prefetch -= before->n_prefetch;
    c.n_prefetch_useful -= before->n_prefetch_useful;
    c.prefetch_bytes -= before->prefetch_bytes;
    fill_store_fields(ctx, &c);
    fill_store_fields(ctx, &t);
    moestream_status st = call != NULL ? copy_out(call, &c, sizeof(c)) : MOESTREAM_OK;
    return st == MOESTREAM_OK && total != NULL ? copy_out(total, &t, sizeof(t)) : st;
}

const char * moestream_describe(const moestream * ms) {
    return ms != NULL ? ms->describe : "";
}

size_t moestream_choices(const moestream * ms, char * buf, size_t n) {
    char text[800] = "";
    if (ms != NULL && ms->stream != NULL) {
        size_t length = ms_stream_choices(ms->stream, text, sizeof(text));
        snprintf(text + length, sizeof(text) - length, "prefetch=%s: %s\n", ms->prefetch ? "on" : "off",
                 ms->prefetch_asked ? "asked for"
                 : ms->prefetch     ? "auto: it pauses by itself while wrong guesses cost more than right ones win"
                                    : "auto: there is nothing to predict with");
    }
    return (size_t) snprintf(n > 0 ? buf : NULL, n, "%s", text);
}

moestream_status moestream_resize(moestream * ms, uint64_t cache_bytes, moestream_error * err) {
    if (ms == NULL || ms->stream == NULL) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                       "there is no cache to resize: the store is NULL or not streaming");
    }
    moestream_status st = ms_stream_resize(ms->stream, cache_bytes, err);
    if (st == MOESTREAM_OK) {
        ms_store_describe(ms);
    }
    return st;
}

moestream_status moestream_measure_disk(moestream * ms, uint64_t bytes, double * bytes_per_s, moestream_error * err) {
    if (ms == NULL || ms->stream == NULL || bytes_per_s == NULL) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "the store is NULL or not streaming, or bytes_per_s is NULL");
    }
    return ms_stream_measure_disk(ms->stream, bytes, bytes_per_s, err);
}

/* ---- tensors of a loaded model ---- */

int32_t moestream_model_n_tensors(void * libllama, const struct llama_model * model) {
    const ms_api * api = ms_api_find(libllama);
    return api != NULL && api->tensor_map != NULL && model != NULL ? ms_tensor_map_size(api->tensor_map, model) : -1;
}

moestream_status moestream_model_tensor(void * libllama, const struct llama_model * model, int32_t i,
                                        moestream_tensor_place * place, moestream_error * err) {
    const ms_api * api = ms_api_find(libllama);
    int32_t n = moestream_model_n_tensors(libllama, model);
    if (n < 0) {
        return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0, "this libllama does not tell where its tensors are");
    }
    if (i < 0 || i >= n) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "tensor %d was asked for, the model has %d", i, n);
    }
    moestream_tensor_place out = {0};
    const struct ggml_tensor * t = ms_tensor_map_get(api->tensor_map, model, i, &out.name);
    out.bytes = api->ggml_nbytes(t);
    out.buffer_type =
        t->buffer != NULL ? api->ggml_backend_buft_name(api->ggml_backend_buffer_get_type(t->buffer)) : "";
    out.is_host = t->buffer != NULL && api->ggml_backend_buffer_is_host(t->buffer);
    return copy_out(place, &out, sizeof(out));
}
