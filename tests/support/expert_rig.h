/*
 * expert_rig: what tests of expert memory share: a file with a few layers of experts, a store with its banks "loaded" by a
 * graph of our own, and one MUL_MAT_ID computed both ways. Included after check.h by one file of a test program.
 * Guarantees: needs a libllama and no model; everything it makes is removed by rig_main.
 */
#ifndef MS_TEST_EXPERT_RIG_H
#define MS_TEST_EXPERT_RIG_H

#include <dlfcn.h>
#include <fcntl.h>

#include "check.h"
#include "ggml/store.h"
#include "support/gguf_maker.h"

enum { K = 256, M = 96, N_EXPERT = 16, N_USED = 3, MAX_TOKENS = 64 };

static const enum ggml_type types[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q6_K};
enum { N_TYPES = sizeof(types) / sizeof(types[0]) };

/* Functions that the library itself has no use for. */
static struct {
    __typeof__(&ggml_quantize_chunk) quantize;
    __typeof__(&ggml_backend_alloc_ctx_tensors_from_buft) alloc;
    __typeof__(&ggml_backend_tensor_get) get;
    __typeof__(&ggml_backend_view_init) view_init;
    __typeof__(&ggml_view_2d) view_2d;
    __typeof__(&ggml_view_3d) view_3d;
    __typeof__(&ggml_mul_mat) mul_mat;
    __typeof__(&ggml_cont) cont;
    __typeof__(&ggml_add) add;
} fn;
static const ms_api * api;

static inline bool find(void * out, const char * name) {
    *(void **) out = dlsym(api->libllama, name);
    return *(void **) out != NULL;
}

static inline bool bind(void) {
    moestream_error err = {.struct_size = sizeof(err)};
    if (moestream_bind(NULL, &err) != MOESTREAM_OK) {
        printf("    %s\n", err.message);
        return false;
    }
    api = ms_api_bundled();
    return find(&fn.quantize, "ggml_quantize_chunk") && find(&fn.alloc, "ggml_backend_alloc_ctx_tensors_from_buft") &&
           find(&fn.get, "ggml_backend_tensor_get") && find(&fn.view_init, "ggml_backend_view_init") &&
           find(&fn.view_2d, "ggml_view_2d") && find(&fn.view_3d, "ggml_view_3d") &&
           find(&fn.mul_mat, "ggml_mul_mat") && find(&fn.cont, "ggml_cont") && find(&fn.add, "ggml_add");
}

/* ---- the file: one layer for each type, two banks each, behind a tensor that shifts them off the pages ---- */

static char path[64];
static gguf_maker file;
static size_t bank_at[2 * N_TYPES], bank_bytes[2 * N_TYPES];

static inline void bank_name(char * out, size_t n, int bank) {
    snprintf(out, n, "blk.%d.ffn_%s_exps.weight", bank / 2, bank % 2 == 0 ? "up" : "down");
}

static inline bool make_file(void) {
    const int64_t ne[] = {K, M, N_EXPERT}, odd = 24;
    size_t n = (size_t) K * M * N_EXPERT;
    maker_begin(&file, 32, 4, 2 * N_TYPES + 1);
    maker_key_text(&file, "general.architecture", "made-up");
    maker_key_u32(&file, "made-up.block_count", N_TYPES);
    maker_key_u32(&file, "made-up.expert_count", N_EXPERT);
    maker_key_u32(&file, "made-up.expert_used_count", N_USED);
    maker_tensor(&file, "output_norm.weight", GGML_TYPE_F32, 1, &odd, sizeof(float) * 24);
    for (int b = 0; b < 2 * N_TYPES; b++) {
        char name[64];
        bank_name(name, sizeof(name), b);
        bank_bytes[b] = api->ggml_row_size(types[b / 2], K) * M * N_EXPERT;
        bank_at[b] = maker_tensor(&file, name, types[b / 2], 3, ne, bank_bytes[b]);
    }
    size_t begin = maker_end(&file);
    float * values = malloc(n * sizeof(*values));
    check_random r = {7};
    for (int b = 0; values != NULL && b < 2 * N_TYPES; b++) {
        bank_at[b] += begin;
        for (size_t i = 0; i < n; i++) {
            values[i] = (float) check_below(&r, 2001) / 1000.0f - 1.0f;
        }
        fn.quantize(types[b / 2], values, file.bytes + bank_at[b], 0, (int64_t) M * N_EXPERT, K, NULL);
    }
    free(values);
    snprintf(path, sizeof(path), "/tmp/ms_matmul_%d.gguf", (int) getpid());
    return values != NULL && maker_write(&file, path);
}

/* ---- a store with the banks "loaded", and a hook ---- */

typedef struct rig {
    moestream * ms;
    moestream_context * hook;
    struct ggml_context * weights;
    ggml_backend_buffer_t buffer;
    struct ggml_tensor * bank[2 * N_TYPES];
} rig;

/* What llama.cpp's loader does, as far as a buffer type can see it. */
static inline bool load(rig * r, moestream_error * err) {
    struct ggml_init_params params = {.mem_size = 64 * api->ggml_tensor_overhead(), .no_alloc = true};
    r->weights = api->ggml_init(params);
    for (int b = 0; b < 2 * N_TYPES; b++) {
        char name[64];
        bank_name(name, sizeof(name), b);
        r->bank[b] = api->ggml_new_tensor_3d(r->weights, types[b / 2], K, M, N_EXPERT);
        api->ggml_set_name(r->bank[b], name);
    }
    if (moestream_load_begin(r->ms, err) != MOESTREAM_OK) {
        return false;
    }
    r->buffer = fn.alloc(r->weights, moestream_buffer_type(r->ms));
    return moestream_load_end(r->ms, (const struct llama_model *) r, err) == MOESTREAM_OK && r->buffer != NULL;
}

static inline void rig_close(rig * r) {
    moestream_context_free(r->hook);
    if (r->buffer != NULL) {
        api->ggml_backend_buffer_free(r->buffer);
    }
    if (r->weights != NULL) {
        api->ggml_free(r->weights);
    }
    CHECK(r->ms == NULL || moestream_close(r->ms, NULL) == MOESTREAM_OK);
}

static inline bool rig_open(rig * r, int io, bool cache_none) {
    moestream_error err = {.struct_size = sizeof(err)};
    moestream_params params = {.struct_size = sizeof(params), .io = io, .cache_none = cache_none, .verify = 1};
    moestream_plan * plan = NULL;
    moestream_plan_info info = {.struct_size = sizeof(info)};
    memset(r, 0, sizeof(*r));
    if (moestream_plan_open(&plan, path, &params, &err) == MOESTREAM_OK) {
        moestream_plan_get_info(plan, &info);
        params.cache_bytes = info.min_cache_bytes;
        moestream_plan_close(plan);
        if (moestream_open(&r->ms, path, &params, &err) == MOESTREAM_OK && load(r, &err) &&
            moestream_context_init(&r->hook, r->ms, NULL, &err) == MOESTREAM_OK) {
            return true;
        }
    }
    printf("    %s\n", err.message);
    rig_close(r);
    return false;
}

static inline moestream_stats totals(const rig * r) {
    moestream_stats s = {.struct_size = sizeof(s)};
    moestream_get_stats(r->ms, &s);
    return s;
}

/* ---- graphs ---- */

/* A context with room for tensors and their data. */
static inline struct ggml_context * room(void) {
    struct ggml_init_params params = {.mem_size = (size_t) 24 << 20};
    return api->ggml_init(params);
}

/* Activations [K, rows, n_tokens] and a view of [k, n_tokens] ids in rows of N_EXPERT, each row a permutation. */
static inline struct ggml_tensor * make_input(struct ggml_context * ctx, int rows, int n_tokens, unsigned seed) {
    struct ggml_tensor * x = api->ggml_new_tensor_3d(ctx, GGML_TYPE_F32, K, rows, n_tokens);
    check_random r = {seed};
    for (int i = 0; i < K * rows * n_tokens; i++) {
        ((float *) x->data)[i] = (float) check_below(&r, 4001) / 2000.0f - 1.0f;
    }
    return x;
}

static inline struct ggml_tensor * make_ids(struct ggml_context * ctx, int k, int n_tokens, unsigned seed) {
    struct ggml_tensor * all = api->ggml_new_tensor_2d(ctx, GGML_TYPE_I32, N_EXPERT, n_tokens);
    check_random r = {seed};
    for (int t = 0; t < n_tokens; t++) {
        int32_t * row = (int32_t *) all->data + t * N_EXPERT;
        for (int i = 0; i < N_EXPERT; i++) {
            int j = (int) check_below(&r, (unsigned) i + 1);
            row[i] = row[j];
            row[j] = i;
        }
    }
    return fn.view_2d(ctx, all, k, n_tokens, all->nb[1], 0);
}

/* Runs the graph that ends in `out`; with `hook` each node is shown to it first, as the scheduler does. */
static inline enum ggml_status run(struct ggml_context * ctx, struct ggml_tensor * out, const rig * r, int n_threads,
                                   struct ggml_tensor ** nodes, int n_nodes) {
    struct ggml_cgraph * graph = api->ggml_new_graph_custom(ctx, 32, false);
    api->ggml_build_forward_expand(graph, out);
    for (int i = 0; r != NULL && i < n_nodes; i++) {
        CHECK(!ms_eval_callback(nodes[i], true, r->hook));
    }
    struct ggml_cplan plan = api->ggml_graph_plan(graph, n_threads, NULL);
    plan.work_data = malloc(plan.work_size + 1);
    if (r != NULL) {
        void * stop = moestream_abort_callback();
        memcpy(&plan.abort_callback, &stop, sizeof(stop));
        plan.abort_callback_data = r->hook;
    }
    enum ggml_status st = api->ggml_graph_compute(graph, &plan);
    free(plan.work_data);
    return st;
}

/* The bank as an ordinary tensor. */
static inline struct ggml_tensor * plain_bank(struct ggml_context * ctx, int bank) {
    struct ggml_tensor * w = api->ggml_new_tensor_3d(ctx, types[bank / 2], K, M, N_EXPERT);
    memcpy(w->data, file.bytes + bank_at[bank], bank_bytes[bank]);
    return w;
}

static inline bool same(const struct ggml_tensor * a, const struct ggml_tensor * b) {
    return api->ggml_nbytes(a) == api->ggml_nbytes(b) && memcmp(a->data, b->data, api->ggml_nbytes(a)) == 0;
}

/* One MUL_MAT_ID both ways; true if each bit is the same. */
static inline bool agrees(const rig * r, int bank, int k, int rows, int n_tokens, int n_threads) {
    struct ggml_context * ctx = room();
    struct ggml_tensor * x = make_input(ctx, rows, n_tokens, (unsigned) (bank + n_tokens));
    struct ggml_tensor * ids = make_ids(ctx, k, n_tokens, (unsigned) (3 * bank + n_tokens));
    struct ggml_tensor * stock = api->ggml_mul_mat_id(ctx, plain_bank(ctx, bank), x, ids);
    struct ggml_tensor * ours = api->ggml_mul_mat_id(ctx, r->bank[bank], x, ids);
    memset(ours->data, 0xee, api->ggml_nbytes(ours));
    moestream_error err = {.struct_size = sizeof(err)};
    bool computed = run(ctx, stock, NULL, n_threads, NULL, 0) == GGML_STATUS_SUCCESS &&
                    run(ctx, ours, r, n_threads, &ours, 1) == GGML_STATUS_SUCCESS;
    bool good = moestream_context_status(r->hook, &err) == MOESTREAM_OK;
    bool ok = computed && good && same(stock, ours);
    if (!ok) {
        printf("    bank %d, %d of %d experts, %d rows, %d tokens, %d threads: %s\n", bank, k, N_EXPERT, rows, n_tokens,
               n_threads, !computed || !good ? err.message : "other bits");
    }
    api->ggml_free(ctx);
    return ok;
}

/* The main of a test program. */
static inline int rig_main(int argc, char ** argv, const check_test * tests, size_t n) {
    if (!bind() || !make_file()) {
        printf("0 passed, 1 failed\n");
        return 1;
    }
    int status = check_main(argc, argv, tests, n);
    unlink(path);
    maker_free(&file);
    return status;
}

#endif
