/*
 * ggml/expert_rows: the arithmetic of one expert: its output rows for the tokens that chose it.
 * Guarantees: the same bits as ggml_compute_forward_mul_mat_id of the bound library. Activations are quantised once, by
 * from_float. One row for an expert: vec_dot of the weight type, which is what the stock kernel does with one row. Several
 * rows: the stock kernel itself, on a small graph over one expert's slice (it may use tiled kernels with other rounding).
 * Never allocates on the way but for the rare growth of a thread's scratch; never knows where weights come from.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ggml/store.h"

enum { MS_DOT_TOKENS = 8 }; /* up to here one row of an expert is computed by vec_dot, without a small graph */

/* What one thread needs for small graphs; made at its first use, grown when an operation is larger. */
struct ms_scratch {
    struct ggml_context * context;
    ggml_threadpool_t pool;
    uint8_t * bytes; /* activations, results, ids, work */
    size_t room;
};

moestream_status ms_scratch_init(moestream_context * ctx, moestream_error * err) {
    ctx->scratch = ms_calloc(MS_MAX_THREADS, sizeof(*ctx->scratch));
    return ctx->scratch != NULL
               ? MOESTREAM_OK
               : ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for the state of %d threads", MS_MAX_THREADS);
}

void ms_scratch_free(moestream_context * ctx) {
    for (int i = 0; ctx->scratch != NULL && i < MS_MAX_THREADS; i++) {
        if (ctx->scratch[i].context != NULL) {
            ctx->api->ggml_free(ctx->scratch[i].context);
        }
        if (ctx->scratch[i].pool != NULL) {
            ctx->api->ggml_threadpool_free(ctx->scratch[i].pool);
        }
        free(ctx->scratch[i].bytes);
    }
    free(ctx->scratch);
}

static enum ggml_type dot_type(const ms_api * api, const struct ggml_tensor * weights) {
    return api->ggml_get_type_traits_cpu(weights->type)->vec_dot_type;
}

bool ms_few_tokens(const struct ggml_tensor * node) {
    return node->src[2]->ne[1] <= MS_DOT_TOKENS;
}

/* Activations are quantised once for all experts, as the stock kernel does. F32 rows of many tokens are taken from where
 * they are. */
bool ms_quantize_in_common(const ms_api * api, const struct ggml_tensor * node) {
    return ms_few_tokens(node) || dot_type(api, node->src[0]) != GGML_TYPE_F32;
}

bool ms_matmul_reserve(moestream_context * ctx, const struct ggml_tensor * node) {
    const struct ggml_tensor *x = node->src[1], *ids = node->src[2];
    size_t rows = (size_t) (ids->ne[0] * ids->ne[1]);
    if (rows > ctx->n_rows_room) {
        ms_row * grown = realloc(ctx->rows, rows * sizeof(*grown));
        if (grown == NULL) {
            return false;
        }
        ctx->rows = grown;
        ctx->n_rows_room = rows;
    }
    size_t bytes =
        ms_quantize_in_common(ctx->api, node)
            ? ctx->api->ggml_row_size(dot_type(ctx->api, node->src[0]), x->ne[0]) * (size_t) (x->ne[1] * x->ne[2])
            : 0;
    if (bytes > ctx->quantized_room) {
        uint8_t * grown = aligned_alloc(64, ms_align_up(bytes, 64));
        if (grown == NULL) {
            return false;
        }
        free(ctx->quantized);
        ctx->quantized = grown;
        ctx->quantized_room = ms_align_up(bytes, 64);
    }
    return true;
}

/* ---- computing ---- */

void ms_quantize_rows(moestream_context * ctx, const struct ggml_tensor * dst, int part, int n_parts) {
    const ms_api * api = ctx->api;
    const struct ggml_tensor * x = dst->src[1];
    enum ggml_type type = dot_type(api, dst->src[0]);
    ggml_from_float_t from_float = type == GGML_TYPE_F32 ? NULL : api->ggml_get_type_traits_cpu(type)->from_float;
    size_t row = api->ggml_row_size(type, x->ne[0]);
    for (int64_t i = part; i < x->ne[1] * x->ne[2]; i += n_parts) {
        const char * from =
            (const char *) x->data + (size_t) (i % x->ne[1]) * x->nb[1] + (size_t) (i / x->ne[1]) * x->nb[2];
        if (from_float != NULL) {
            from_float((const float *) from, ctx->quantized + row * (size_t) i, x->ne[0]);
        } else {
            memcpy(ctx->quantized + row * (size_t) i, from, row);
        }
    }
}

static void compute_one_row(moestream_context * ctx, const ms_entry * entry, const uint8_t * weights, int64_t r0,
                            int64_t r1) {
    const struct ggml_tensor *dst = ctx->op.dst, *w = dst->src[0], *x = dst->src[1];
    const struct ggml_type_traits_cpu * traits = ctx->api->ggml_get_type_traits_cpu(w->type);
    ms_row row = ctx->rows[entry->first_row];
    size_t x_row = ctx->api->ggml_row_size(traits->vec_dot_type, x->ne[0]);
    const uint8_t * activation = ctx->quantized + x_row * (size_t) (row.t * x->ne[1] + row.k % x->ne[1]);
    float * out = (float *) ((char *) dst->data + (size_t) row.t * dst->nb[2] + (size_t) row.k * dst->nb[1]);
    for (int64_t r = r0; r < r1; r++) {
        traits->vec_dot((int) w->ne[0], out + r, 0, weights + (size_t) r * w->nb[1], 0, activation, 0, 1);
    }
}

/* Room for one small graph: tensors, activations [K, n], results [M, n], ids [n], ggml's work. */
static bool scratch_ready(const ms_api * api, ms_scratch * s, size_t bytes) {
    if (s->context == NULL) {
        struct ggml_init_params params = {.mem_size = 8 * api->ggml_tensor_overhead() +
                                                      api->ggml_graph_overhead_custom(8, false),
                                          .mem_buffer = NULL,
                                          .no_alloc = true};
        struct ggml_threadpool_params pool = api->ggml_threadpool_params_default(1);
        s->context = api->ggml_init(params);
        s->pool = s->context != NULL ? api->ggml_threadpool_new(&pool) : NULL;
    }
    if (bytes > s->room) {
        free(s->bytes);
        s->bytes = aligned_alloc(64, ms_align_up(bytes, 64));
        s->room = s->bytes != NULL ? ms_align_up(bytes, 64) : 0;
    }
    return s->pool != NULL && s->room >= bytes;
}

static bool compute_rows(moestream_context * ctx, ms_scratch * s, const ms_entry * entry, const uint8_t * weights,
                         int64_t r0, int64_t r1) {
    const ms_api * api = ctx->api;
    const struct ggml_tensor *dst = ctx->op.dst, *w = dst->src[0], *x = dst->src[1];
    int64_t n = entry->n_rows, n_in = w->ne[0], n_out = r1 - r0;
    bool quantized = ms_quantize_in_common(api, dst);
    enum ggml_type type = quantized ? dot_type(api, w) : GGML_TYPE_F32;
    size_t x_row = api->ggml_row_size(type, n_in);
    size_t x_bytes = ms_align_up(x_row * (size_t) n, 64),
           d_bytes = ms_align_up((size_t) (n_out * n) * sizeof(float), 64);
    size_t id_bytes = ms_align_up((size_t) n * sizeof(int32_t), 64);
    if (!scratch_ready(api, s, x_bytes + d_bytes + id_bytes)) {
        return false;
    }
    api->ggml_reset(s->context);
    struct ggml_tensor * sw = api->ggml_new_tensor_3d(s->context, w->type, n_in, n_out, 1);
    struct ggml_tensor * sx = api->ggml_new_tensor_3d(s->context, type, n_in, 1, n);
    struct ggml_tensor * si = api->ggml_new_tensor_2d(s->context, GGML_TYPE_I32, 1, n);
    struct ggml_tensor * sd = api->ggml_mul_mat_id(s->context, sw, sx, si);
    struct ggml_cgraph * graph = api->ggml_new_graph_custom(s->context, 8, false);
    memcpy(sd->op_params, ctx->node[ctx->op.bank].params, sizeof(sd->op_params));
    api->ggml_build_forward_expand(graph, sd);
    struct ggml_cplan plan = api->ggml_graph_plan(graph, 1, s->pool);
    if (!scratch_ready(api, s, x_bytes + d_bytes + id_bytes + plan.work_size)) {
        return false;
    }
    uint8_t * xs = s->bytes;
    float * ds = (float *) (s->bytes + x_bytes);
    sw->data = (void *) (uintptr_t) (weights + (size_t) r0 * w->nb[1]);
    sx->data = xs;
    sd->data = ds;
    si->data = memset(s->bytes + x_bytes + d_bytes, 0, id_bytes);
    plan.work_data = s->bytes + x_bytes + d_bytes + id_bytes;
    for (int64_t i = 0; i < n; i++) {
        ms_row row = ctx->rows[entry->first_row + i];
        const uint8_t * from =
            quantized ? ctx->quantized + x_row * (size_t) (row.t * x->ne[1] + row.k % x->ne[1])
                      : (const uint8_t *) x->data + (size_t) row.t * x->nb[2] + (size_t) (row.k % x->ne[1]) * x->nb[1];
        memcpy(xs + x_row * (size_t) i, from, x_row);
    }
    if (api->ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS) {
        return false;
    }
    for (int64_t i = 0; i < n; i++) {
        ms_row row = ctx->rows[entry->first_row + i];
        memcpy((char *) dst->data + (size_t) row.t * dst->nb[2] + (size_t) row.k * dst->nb[1] +
                   (size_t) r0 * sizeof(float),
               ds + i * n_out, (size_t) n_out * sizeof(float));
    }
    return true;
}

bool ms_compute_rows(moestream_context * ctx, int ith, const ms_entry * entry, const uint8_t * weights, int64_t r0,
                     int64_t r1) {
    if (entry->n_rows == 1 && ms_few_tokens(ctx->op.dst)) {
        compute_one_row(ctx, entry, weights, r0, r1);
        return true;
    }
    return compute_rows(ctx, &ctx->scratch[ith], entry, weights, r0, r1);
}

/* ---- results of a call that failed ---- */

void ms_zero_all(const struct ggml_tensor * dst) {
    for (int64_t t = 0; t < dst->ne[2]; t++) {
        for (int64_t k = 0; k < dst->ne[1]; k++) {
            memset((char *) dst->data + (size_t) t * dst->nb[2] + (size_t) k * dst->nb[1], 0,
                   (size_t) dst->ne[0] * sizeof(float));
        }
    }
}

void ms_zero_rows(moestream_context * ctx, const ms_entry * entry, int64_t r0, int64_t r1) {
    const struct ggml_tensor * dst = ctx->op.dst;
    for (int i = 0; i < entry->n_rows; i++) {
        ms_row row = ctx->rows[entry->first_row + i];
        memset((char *) dst->data + (size_t) row.t * dst->nb[2] + (size_t) row.k * dst->nb[1] +
                   (size_t) r0 * sizeof(float),
               0, (size_t) (r1 - r0) * sizeof(float));
    }
}
