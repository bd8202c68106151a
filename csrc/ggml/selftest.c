/*
 * ggml/selftest: does the library we just bound behave as we rely on? Version strings are not enough: different layouts
 * share a version. Everything is tried on dummies; nothing is believed from enumerators or offsets in headers.
 * Order matters: each step only uses what an earlier one has shown, so a wrong library gives a message, not a crash.
 */
#include <stdio.h>
#include <string.h>

#include "ggml/api.h"

#define REFUSE(...) return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0, __VA_ARGS__)

static void dummy_op(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    (void) dst;
    (void) ith;
    (void) nth;
    (void) userdata;
}

/* ---- tensors and nodes ---- */

static moestream_status check_nodes(ms_api * api, struct ggml_context * c, moestream_error * err) {
    struct ggml_tensor * w = api->ggml_new_tensor_3d(c, GGML_TYPE_F32, 8, 4, 2);
    struct ggml_tensor * x = api->ggml_new_tensor_3d(c, GGML_TYPE_F32, 8, 1, 3);
    struct ggml_tensor * ids = api->ggml_new_tensor_2d(c, GGML_TYPE_I32, 1, 3);
    api->ggml_set_name(w, "probe");
    if (w->type != GGML_TYPE_F32 || w->ne[0] != 8 || w->ne[1] != 4 || w->ne[2] != 2 || w->nb[1] != 32 ||
        w->nb[2] != 128 || strcmp(w->name, "probe") != 0) {
        REFUSE("struct ggml_tensor of '%s' (ggml %s, commit %s) is not the one of llama.cpp %s", api->path,
               api->version, api->commit, MS_LLAMA_COMMIT);
    }
    struct ggml_tensor * m = api->ggml_mul_mat_id(c, w, x, ids);
    struct ggml_tensor * args[3] = {w, x, ids};
    int mark = 0;
    struct ggml_tensor * t =
        api->ggml_custom_4d(c, GGML_TYPE_F32, 4, 1, 3, 1, args, 3, dummy_op, GGML_N_TASKS_MAX, &mark);
    ms_custom_params p;
    memcpy(&p, t->op_params, sizeof(p));
    if (m->src[0] != w || m->src[1] != x || m->src[2] != ids || m->ne[0] != 4 || m->ne[1] != 1 || m->ne[2] != 3) {
        REFUSE("MUL_MAT_ID of '%s' (ggml %s, commit %s) has another shape than we rely on", api->path, api->version,
               api->commit);
    }
    if (p.fun != dummy_op || p.n_tasks != GGML_N_TASKS_MAX || p.userdata != &mark || t->src[0] != w ||
        t->src[2] != ids || t->op == m->op) {
        REFUSE("custom operations of '%s' (ggml %s, commit %s) have another layout than we rely on", api->path,
               api->version, api->commit);
    }
    api->op_mul_mat_id = (int) m->op;
    api->op_custom = (int) t->op;
    memcpy(api->custom_params, t->op_params, sizeof(api->custom_params));
    const struct ggml_type_traits_cpu * tt = api->ggml_get_type_traits_cpu(GGML_TYPE_Q8_0);
    if (tt == NULL || tt->vec_dot == NULL || tt->vec_dot_type != GGML_TYPE_Q8_0 || tt->nrows < 1 || tt->nrows > 8 ||
        strcmp(api->ggml_type_name(GGML_TYPE_Q4_K), "q4_K") != 0) {
        REFUSE("type traits of '%s' (ggml %s, commit %s) have another layout than we rely on", api->path, api->version,
               api->commit);
    }
    return MOESTREAM_OK;
}

/* ---- buffer types ---- */

typedef struct probe_calls {
    int base, clear, reset, freed;
} probe_calls;
static _Thread_local probe_calls calls;
static _Thread_local char probe_memory[256];

static void probe_free(ggml_backend_buffer_t b) {
    (void) b;
    calls.freed++;
}
static void * probe_base(ggml_backend_buffer_t b) {
    (void) b;
    calls.base++;
    return probe_memory;
}
static void probe_clear(ggml_backend_buffer_t b, uint8_t value) {
    (void) b;
    calls.clear += value == 0x5a;
}
static void probe_reset(ggml_backend_buffer_t b) {
    (void) b;
    calls.reset++;
}
static const char * probe_name(ggml_backend_buffer_type_t t) {
    (void) t;
    return "MOESTREAM_PROBE";
}
static size_t probe_alignment(ggml_backend_buffer_type_t t) {
    (void) t;
    return 64;
}
static bool probe_is_host(ggml_backend_buffer_type_t t) {
    (void) t;
    return true;
}

static moestream_status check_buffers(ms_api * api, moestream_error * err) {
    ms_buft type = {.iface = {.get_name = probe_name, .get_alignment = probe_alignment, .is_host = probe_is_host},
                    .device = api->ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)};
    ggml_backend_buffer_type_t t = (ggml_backend_buffer_type_t) &type;
    if (type.device == NULL) {
        REFUSE("'%s' offers no CPU device", api->path);
    }
    if (strcmp(api->ggml_backend_buft_name(t), "MOESTREAM_PROBE") != 0 || !api->ggml_backend_buft_is_host(t) ||
        api->ggml_backend_buft_get_alignment(t) != 64 || api->ggml_backend_buft_get_device(t) != type.device) {
        REFUSE("buffer types of '%s' (ggml %s, commit %s) have another layout than we rely on", api->path, api->version,
               api->commit);
    }
    /* Which layout: an empty vtable of the longer kind, then look where the library kept the buffer type. Empty as it is,
     * in either layout, freeing it calls nothing. */
    ms_buffer_i none;
    memset(&none, 0, sizeof(none));
    char * b = (char *) api->buffer_init(t, none, probe_memory, sizeof(probe_memory));
    bool at_b = *(void **) (b + MS_BUFT_OFFSET_B) == (void *) t &&
                *(void **) (b + MS_BUFT_OFFSET_B + sizeof(void *)) == probe_memory;
    bool at_a = *(void **) (b + MS_BUFT_OFFSET_A) == (void *) t &&
                *(void **) (b + MS_BUFT_OFFSET_A + sizeof(void *)) == probe_memory;
    if (at_a == at_b) {
        REFUSE("buffers of '%s' (ggml %s, commit %s) have a layout this version does not know", api->path, api->version,
               api->commit);
    }
    api->layout_b = at_b;
    api->buft_offset = at_b ? MS_BUFT_OFFSET_B : MS_BUFT_OFFSET_A;
    api->ggml_backend_buffer_free((ggml_backend_buffer_t) b);

    ms_buffer_i iface;
    memset(&iface, 0, sizeof(iface));
    iface.free_buffer = probe_free;
    iface.get_base = probe_base;
    iface.clear = probe_clear;
    iface.reset = probe_reset;
    memset(&calls, 0, sizeof(calls));
    ggml_backend_buffer_t buffer = ms_buffer_make(api, t, &iface, probe_memory, sizeof(probe_memory));
    bool ok = api->ggml_backend_buffer_get_size(buffer) == sizeof(probe_memory) &&
              api->ggml_backend_buffer_get_type(buffer) == t &&
              api->ggml_backend_buffer_get_base(buffer) == probe_memory && calls.base == 1;
    if (ok) {
        api->ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        api->ggml_backend_buffer_reset(buffer);
        ok = api->ggml_backend_buffer_get_usage(buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS && calls.reset == 1;
    }
    if (ok) {
        api->ggml_backend_buffer_clear(buffer, 0x5a);
        ok = calls.clear == 1;
    }
    if (ok) {
        api->ggml_backend_buffer_free(buffer);
        ok = calls.freed == 1;
    }
    if (!ok) {
        REFUSE("the buffer functions of '%s' (ggml %s, commit %s) are in another order than we rely on", api->path,
               api->version, api->commit);
    }
    return MOESTREAM_OK;
}

/* ---- parameter structs: fetched through an oversized result, so that a longer struct cannot hurt ---- */

typedef struct oversized {
    unsigned char byte[1024];
} oversized;
typedef oversized (*oversized_fn)(void);

/* Fills the first and the second half with different marks beforehand is not possible for a returned struct, so the
 * defaults themselves are what is compared: they sit at the offsets our headers say, or the structs differ. */
static bool model_params_match(const ms_api * api, char * why, size_t n) {
    oversized_fn get;
    memcpy(&get, &api->llama_model_default_params, sizeof(get));
    oversized raw = get();
    struct llama_model_params p;
    memcpy(&p, &raw, sizeof(p));
    const unsigned char * extra = (const unsigned char *) &p.check_tensors;
    bool ok = p.tensor_buft_overrides == NULL && p.kv_overrides == NULL && p.main_gpu == 0 &&
              p.split_mode == LLAMA_SPLIT_MODE_LAYER && p.tensor_split == NULL && *extra == 0;
#if MS_HAVE_MP_USE_EXTRA_BUFTS
    ok = ok && *(const unsigned char *) &p.use_extra_bufts == 1;
#endif
#if MS_HAVE_MP_NO_ALLOC
    ok = ok && *(const unsigned char *) &p.no_alloc == 0 && *(const unsigned char *) &p.no_host == 0;
#endif
#if MS_HAVE_MP_LOAD_MODE
    ok = ok && p.load_mode == LLAMA_LOAD_MODE_AUTO;
#else
    ok = ok && *(const unsigned char *) &p.use_mmap == 1 && *(const unsigned char *) &p.use_mlock == 0;
#endif
    if (!ok) {
        snprintf(why, n, "llama_model_params differ");
    }
    return ok;
}

static bool context_params_match(const ms_api * api, char * why, size_t n) {
    oversized_fn get;
    memcpy(&get, &api->llama_context_default_params, sizeof(get));
    oversized raw = get();
    struct llama_context_params p;
    memcpy(&p, &raw, sizeof(p));
    bool ok = p.n_ctx == 512 && p.n_batch == 2048 && p.n_ubatch == 512 && p.n_seq_max == 1 && p.cb_eval == NULL &&
              p.cb_eval_user_data == NULL && p.type_k == GGML_TYPE_F16 && p.type_v == GGML_TYPE_F16 &&
              p.abort_callback == NULL && p.abort_callback_data == NULL && (int) p.rope_scaling_type == -1 &&
              (int) p.pooling_type == -1 && *(const unsigned char *) &p.embeddings == 0 &&
              *(const unsigned char *) &p.offload_kqv == 1;
#if MS_HAVE_CP_OP_OFFLOAD
    ok = ok && *(const unsigned char *) &p.op_offload == 1;
#endif
    if (!ok) {
        snprintf(why, n, "llama_context_params differ");
    }
    return ok;
}

moestream_status ms_api_selftest(ms_api * api, moestream_error * err) {
    struct ggml_init_params ip = {.mem_size = 1 << 16, .mem_buffer = NULL, .no_alloc = true};
    struct ggml_context * c = api->ggml_init(ip);
    if (c == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, 0, "ggml_init of '%s' refused 64 KiB", api->path);
    }
    moestream_status st = check_nodes(api, c, err);
    api->ggml_free(c);
    if (st == MOESTREAM_OK) {
        st = check_buffers(api, err);
    }
    if (st == MOESTREAM_OK) {
        /* not fatal: a host that fills its own parameter structs never passes ours */
        api->params_match = model_params_match(api, api->params_why, sizeof(api->params_why)) &&
                            context_params_match(api, api->params_why, sizeof(api->params_why));
    }
    return st;
}
