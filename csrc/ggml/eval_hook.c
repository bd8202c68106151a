/*
 * ggml/eval_hook: the callback that the scheduler asks for every node before it computes it. Turns MUL_MAT_ID on streamed
 * experts into a custom operation in place, and makes any other use of expert memory correct by reading that tensor whole.
 * Guarantees: the graph is not cut (the answer is the host's own, "no" without one); nodes that have nothing to do with
 * streamed experts are not changed; a node is changed once, graphs that are reused stay as they are.
 * Never keys on architectures or node names: on the operation and the buffer.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ggml/store.h"

/* ---- failures ---- */

void ms_context_fail(moestream_context * ctx, const moestream_error * error) {
    pthread_mutex_lock(&ctx->error_lock);
    if (ctx->error.status == MOESTREAM_OK) {
        ctx->error = *error; /* the first failure explains the others */
    }
    pthread_mutex_unlock(&ctx->error_lock);
    atomic_store(&ctx->failed, true);
}

static void fail_stop(moestream_context * ctx, const char * who) {
    moestream_error e = {.struct_size = sizeof(e)};
    ms_fail(&e, MOESTREAM_ERR_CLOSED, 0, "the call was stopped by %s", who);
    ms_context_fail(ctx, &e);
}

bool ms_abort_callback(void * user) {
    moestream_context * ctx = user;
    if (!atomic_load_explicit(&ctx->failed, memory_order_relaxed)) {
        if (atomic_load_explicit(&ctx->cancel, memory_order_relaxed)) {
            fail_stop(ctx, "moestream_context_cancel");
        } else if (ctx->user_abort != NULL && ctx->user_abort(ctx->user_abort_data)) {
            fail_stop(ctx, "the caller's abort callback");
        }
    }
    return atomic_load_explicit(&ctx->failed, memory_order_relaxed);
}

/* What ggml asks between nodes; a "yes" ends the call. */
static bool abort_for_ggml(void * user) {
    moestream_context * ctx = user;
    bool stop = ms_abort_callback(ctx);
    if (stop) {
        atomic_store(&ctx->delivered, true);
    }
    return stop;
}

void * moestream_abort_callback(void) {
    void * p;
    bool (*fn)(void *) = abort_for_ggml;
    memcpy(&p, &fn, sizeof(p));
    return p;
}

void * moestream_eval_callback(void) {
    void * p;
    bool (*fn)(struct ggml_tensor *, bool, void *) = ms_eval_callback;
    memcpy(&p, &fn, sizeof(p));
    return p;
}

/* ---- nodes ---- */

static void swap_node(const ms_api * api, struct ggml_tensor * node, ggml_custom_op_t fun, void * userdata) {
    ms_custom_params p;
    memcpy(node->op_params, api->custom_params, sizeof(api->custom_params));
    memcpy(&p, node->op_params, sizeof(p));
    p.fun = fun;
    p.userdata = userdata;
    memcpy(node->op_params, &p, sizeof(p));
    node->op = (enum ggml_op) api->op_custom;
}

/* In place of an operation that cannot be carried out: the call fails, but until ggml stops nobody may touch the reserved
 * memory or read what was never written. */
static void zero_result(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    (void) nth;
    const moestream_context * ctx = userdata;
    if (ith == 0 && dst->data != NULL) {
        memset(dst->data, 0, ctx->api->ggml_nbytes(dst));
    }
}

/* Bank of a tensor if it is one as a whole, -1 otherwise. */
static int bank_of(const moestream_context * ctx, const struct ggml_tensor * weights) {
    if (weights->view_src != NULL) {
        return -1;
    }
    int i = ms_index_find(&ctx->ms->plan->index, weights->name);
    return i >= 0 ? ctx->ms->plan->index.tensor[i].bank : -1;
}

static bool swap_expert_matmul(moestream_context * ctx, struct ggml_tensor * node) {
    int bank = bank_of(ctx, node->src[0]);
    /* the stock kernel's own preconditions; anything else goes the slow way */
    if (bank < 0 || ctx->ms->plan->index.bank[bank].group < 0 || node->src[1]->type != GGML_TYPE_F32 ||
        node->src[1]->nb[0] != sizeof(float) || node->type != GGML_TYPE_F32 || node->src[2]->type != GGML_TYPE_I32) {
        return false;
    }
    memcpy(ctx->node[bank].params, node->op_params, sizeof(node->op_params));
    if (!ms_matmul_reserve(ctx, node)) {
        moestream_error e = {.struct_size = sizeof(e)};
        ms_fail(&e, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for the activations of %lld tokens",
                (long long) node->src[2]->ne[1]);
        ms_context_fail(ctx, &e);
    }
    swap_node(ctx->api, node, ms_expert_matmul, &ctx->node[bank]);
    return true;
}

/* An operation on expert memory that is not streamed. */
static void materialize(moestream_context * ctx, moestream * store, struct ggml_tensor * node,
                        const struct ggml_tensor * src) {
    moestream_error e = {.struct_size = sizeof(e)};
    const struct ggml_tensor * whole = src->view_src != NULL ? src->view_src : src;
    if (ms_buffer_materialize(store, whole, &e) != MOESTREAM_OK) {
        ms_context_fail(ctx, &e);
        swap_node(ctx->api, node, zero_result, ctx);
    }
}

static void look_at(moestream_context * ctx, struct ggml_tensor * node) {
    const ms_api * api = ctx->api;
    for (int i = 0; i < GGML_MAX_SRC && node->src[i] != NULL; i++) {
        struct ggml_tensor * src = node->src[i];
        moestream * store = src->buffer != NULL ? ms_buffer_store(api, src->buffer) : NULL;
        if (store == NULL) {
            continue;
        }
        if (node->view_src != NULL && node->view_src->buffer != NULL &&
            ms_buffer_store(api, node->view_src->buffer) != NULL) {
            return; /* a view of expert memory computes nothing; whoever uses it comes by here too */
        }
        if ((int) node->op == api->op_custom) {
            return; /* ours already: a reused graph */
        }
        if (i == 0 && store == ctx->ms && (int) node->op == api->op_mul_mat_id && swap_expert_matmul(ctx, node)) {
            return;
        }
        materialize(ctx, store, node, src);
    }
}

bool ms_eval_callback(struct ggml_tensor * node, bool ask, void * user) {
    moestream_context * ctx = user;
    if (!ask) {
        return ctx->user_eval != NULL ? ctx->user_eval(node, false, ctx->user_eval_data) : true;
    }
    if (atomic_load_explicit(&ctx->delivered, memory_order_relaxed)) {
        moestream_context_status(ctx, NULL); /* a new call: what failed before is over */
    }
    bool answer = ctx->user_eval != NULL && ctx->user_eval(node, true, ctx->user_eval_data);
    look_at(ctx, node);
    return answer;
}

/* ---- contexts ---- */

static void set_params(moestream_context * ctx, struct llama_context_params * params) {
    ctx->user_eval = params->cb_eval;
    ctx->user_eval_data = params->cb_eval_user_data;
    ctx->user_abort = params->abort_callback;
    ctx->user_abort_data = params->abort_callback_data;
    params->cb_eval = ms_eval_callback;
    params->cb_eval_user_data = ctx;
    params->abort_callback = abort_for_ggml;
    params->abort_callback_data = ctx;
#if MS_HAVE_CP_OP_OFFLOAD
    params->op_offload = false; /* the scheduler would read expert memory itself, before any callback */
#endif
}

static bool alloc_tables(moestream_context * ctx) {
    const ms_index * index = &ctx->ms->plan->index;
    int most = 1;
    for (int b = 0; b < index->n_banks; b++) {
        most = index->bank[b].n_expert > most ? index->bank[b].n_expert : most;
    }
    ctx->entry = ms_calloc((size_t) most, sizeof(*ctx->entry));
    ctx->entry_of = ms_calloc((size_t) most, sizeof(*ctx->entry_of));
    ctx->slots = ms_calloc((size_t) most, sizeof(*ctx->slots));
    ctx->experts = ms_calloc((size_t) most, sizeof(*ctx->experts));
    ctx->passed = ms_calloc((size_t) most, sizeof(*ctx->passed));
    int used = index->n_expert_used < most ? index->n_expert_used : most;
    int n_guess = most > MS_GUESS_TOKENS * used ? most : MS_GUESS_TOKENS * used;
    ctx->guess = ms_calloc((size_t) n_guess, sizeof(*ctx->guess));
    ctx->guess_score = ms_calloc((size_t) most * MS_GUESS_TOKENS, sizeof(*ctx->guess_score));
    ctx->guess_count = ms_calloc((size_t) most, sizeof(*ctx->guess_count));
    ctx->guess_random = 1;
    ctx->node = ms_calloc((size_t) index->n_banks + 1, sizeof(*ctx->node));
    if (!ctx->guess || !ctx->guess_score || !ctx->guess_count || !ctx->entry || !ctx->entry_of || !ctx->slots ||
        !ctx->experts || !ctx->passed || !ctx->node) {
        return false;
    }
    for (int e = 0; e < most; e++) {
        ctx->entry_of[e] = -1;
    }
    for (int b = 0; b < index->n_banks; b++) {
        ctx->node[b].ctx = ctx;
    }
    return true;
}

static void free_tables(moestream_context * ctx) {
    ms_scratch_free(ctx);
    free(ctx->entry);
    free(ctx->entry_of);
    free(ctx->slots);
    free(ctx->experts);
    free(ctx->passed);
    free(ctx->guess);
    free(ctx->guess_score);
    free(ctx->guess_count);
    free(ctx->node);
    free(ctx->rows);
    free(ctx->quantized);
    pthread_mutex_destroy(&ctx->error_lock);
    free(ctx);
}

moestream_status ms_context_init(moestream_context ** out, moestream * ms, struct llama_context_params * params,
                                 moestream_error * err) {
    if (ms->stream == NULL) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                       "this store was opened with streaming off; its contexts need no hook");
    }
    if (params != NULL && !ms->api->params_match) {
        return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0, "built for llama.cpp %s, '%s' is %s: %s", MS_LLAMA_COMMIT,
                       ms->api->path, ms->api->commit, ms->api->params_why);
    }
    moestream_context * ctx = ms_calloc(1, sizeof(*ctx));
    if (ctx == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for a context");
    }
    ctx->ms = ms;
    ctx->api = ms->api;
    ctx->pass_group = -1;
    atomic_init(&ctx->n_threads, 1);
    atomic_flag_clear(&ctx->op.taking);
    atomic_flag_clear(&ctx->op.asking);
    pthread_mutex_init(&ctx->error_lock, NULL);
    moestream_status st = ms_scratch_init(ctx, err);
    if (st == MOESTREAM_OK && !alloc_tables(ctx)) {
        st = ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for the tables of a context");
    }
    if (st != MOESTREAM_OK) {
        free_tables(ctx);
        return st;
    }
    if (params != NULL) {
        set_params(ctx, params);
    }
    pthread_mutex_lock(&ms->totals_lock);
    ctx->next = ms->contexts;
    ms->contexts = ctx;
    pthread_mutex_unlock(&ms->totals_lock);
    atomic_fetch_add(&ms->n_contexts, 1);
    *out = ctx;
    return MOESTREAM_OK;
}

void ms_context_free(moestream_context * ctx) {
    if (ctx == NULL) {
        return;
    }
    moestream * ms = ctx->ms;
    pthread_mutex_lock(&ms->totals_lock);
    for (moestream_context ** at = &ms->contexts; *at != NULL; at = &(*at)->next) {
        if (*at == ctx) {
            *at = ctx->next;
            break;
        }
    }
    ms->totals.n_ops += ctx->total.n_ops;
    ms->totals.compute_ns += ctx->total.compute_ns;
    ms->totals.stall_ns += atomic_load(&ctx->stall_ns) / (uint64_t) atomic_load(&ctx->n_threads);
    pthread_mutex_unlock(&ms->totals_lock);
    if (ctx->pool_batch != NULL) {
        ctx->api->ggml_threadpool_free(ctx->pool_batch);
    }
    if (ctx->pool != NULL) {
        ctx->api->ggml_threadpool_free(ctx->pool);
    }
    free_tables(ctx);
    atomic_fetch_sub(&ms->n_contexts, 1);
}
