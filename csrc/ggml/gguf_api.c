/* ggml/gguf_api: gguf.h for the gguf room, which must not see llama.cpp functions; header only, never weights. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ggml/cxx.h"
#include "ggml/store.h"

struct ms_gguf {
    const ms_api * api;
    struct gguf_context * gguf;
    struct ggml_context * shapes; /* tensors without data */
};

static ms_gguf * gguf_open(const void * user, const char * path) {
    const ms_api * api = user;
    ms_gguf * g = ms_calloc(1, sizeof(*g));
    if (g == NULL) {
        return NULL;
    }
    struct gguf_init_params params = {.no_alloc = true, .ctx = &g->shapes};
    g->api = api;
    g->gguf = ms_gguf_open((void *) (uintptr_t) api->gguf_init_from_file, path, params);
    if (g->gguf == NULL) {
        int why = errno; /* open_gguf looks at it */
        free(g);
        errno = why;
        return NULL;
    }
    return g;
}

static void gguf_close(ms_gguf * g) {
    g->api->gguf_free(g->gguf);
    if (g->shapes != NULL) {
        g->api->ggml_free(g->shapes);
    }
    free(g);
}

static int64_t gguf_count(const ms_gguf * g) {
    return g->api->gguf_get_n_tensors(g->gguf);
}

static const char * gguf_name(const ms_gguf * g, int64_t i) {
    return g->api->gguf_get_tensor_name(g->gguf, i);
}

static uint64_t gguf_offset(const ms_gguf * g, int64_t i) {
    uint64_t offset = g->api->gguf_get_tensor_offset(g->gguf, i), end = UINT64_MAX;
    return ms_add_u64(offset, g->api->gguf_get_data_offset(g->gguf), &end) ? end : UINT64_MAX;
}

static int gguf_type_of(const ms_gguf * g, int64_t i) {
    return (int) g->api->gguf_get_tensor_type(g->gguf, i);
}

static bool gguf_ne(const ms_gguf * g, int64_t i, int64_t ne[4]) {
    const struct ggml_tensor * t =
        g->shapes != NULL ? g->api->ggml_get_tensor(g->shapes, g->api->gguf_get_tensor_name(g->gguf, i)) : NULL;
    if (t == NULL) {
        return false;
    }
    memcpy(ne, t->ne, 4 * sizeof(*ne));
    return true;
}

static bool array_max(const ms_gguf * g, int64_t key, int64_t * out) {
    enum gguf_type type = g->api->gguf_get_arr_type(g->gguf, key);
    size_t n = g->api->gguf_get_arr_n(g->gguf, key);
    if ((type != GGUF_TYPE_INT32 && type != GGUF_TYPE_UINT32) || n == 0) {
        return false;
    }
    const int32_t * value = g->api->gguf_get_arr_data(g->gguf, key);
    int64_t max = INT64_MIN;
    for (size_t i = 0; i < n; i++) {
        int64_t v = type == GGUF_TYPE_INT32 ? value[i] : (int64_t) (uint32_t) value[i];
        max = v > max ? v : max;
    }
    *out = max;
    return true;
}

static bool gguf_int(const ms_gguf * g, const char * name, int64_t * out) {
    const ms_api * a = g->api;
    int64_t key = a->gguf_find_key(g->gguf, name);
    if (key < 0) {
        return false;
    }
    switch (a->gguf_get_kv_type(g->gguf, key)) {
        case GGUF_TYPE_UINT8:  *out = a->gguf_get_val_u8(g->gguf, key); return true;
        case GGUF_TYPE_INT8:   *out = a->gguf_get_val_i8(g->gguf, key); return true;
        case GGUF_TYPE_UINT16: *out = a->gguf_get_val_u16(g->gguf, key); return true;
        case GGUF_TYPE_INT16:  *out = a->gguf_get_val_i16(g->gguf, key); return true;
        case GGUF_TYPE_UINT32: *out = a->gguf_get_val_u32(g->gguf, key); return true;
        case GGUF_TYPE_INT32:  *out = a->gguf_get_val_i32(g->gguf, key); return true;
        case GGUF_TYPE_UINT64: *out = (int64_t) a->gguf_get_val_u64(g->gguf, key); return true;
        case GGUF_TYPE_INT64:  *out = a->gguf_get_val_i64(g->gguf, key); return true;
        case GGUF_TYPE_ARRAY:  return array_max(g, key, out);
        default:               return false;
    }
}

static const char * gguf_str(const ms_gguf * g, const char * name) {
    int64_t key = g->api->gguf_find_key(g->gguf, name);
    return key >= 0 && g->api->gguf_get_kv_type(g->gguf, key) == GGUF_TYPE_STRING
               ? g->api->gguf_get_val_str(g->gguf, key)
               : NULL;
}

static const char * type_name(const void * api, int type) {
    return ((const ms_api *) api)->ggml_type_name((enum ggml_type) type);
}

/* gguf.h has refused types outside the enumeration already; a retired type has size 0. */
static uint64_t type_size(const void * api, int type) {
    return ((const ms_api *) api)->ggml_type_size((enum ggml_type) type);
}

static int64_t block_size(const void * api, int type) {
    return ((const ms_api *) api)->ggml_blck_size((enum ggml_type) type);
}

ms_gguf_api ms_gguf_functions(const ms_api * api) {
    return (ms_gguf_api) {.api = api,
                          .open = gguf_open,
                          .close = gguf_close,
                          .n_tensors = gguf_count,
                          .tensor_name = gguf_name,
                          .tensor_offset = gguf_offset,
                          .tensor_type = gguf_type_of,
                          .tensor_ne = gguf_ne,
                          .get_int = gguf_int,
                          .get_str = gguf_str,
                          .type_name = type_name,
                          .type_size = type_size,
                          .block_size = block_size};
}
