/*
 * ggml/api: the one table of llama.cpp and ggml functions through which everything in this library goes, filled by
 * dlsym from a libllama, plus what the self-test found out about it.
 * Guarantees: a table that was handed out is complete for what it says it can do, and never changes.
 * Never links libllama or libggml: the same binary serves our own bundled libraries and those of a host.
 */
#ifndef MS_API_H
#define MS_API_H

#include "base/base.h"
#include "ggml/ggml_abi.h"
#include "ggml-cpu.h"
#include "gguf.h"
#include "llama.h"
#include "ms_config.h"

#if !MS_HAVE_LLAMA_MAX_OVERRIDES
size_t llama_max_tensor_buft_overrides(void); /* never called by name; older headers do not declare it */
#endif

/* Every function used, required (R) or optional (O: its absence takes a feature away, see ms_features). */
/* clang-format off */
#define MS_API_FUNCTIONS(R, O) \
    R(ggml_init) R(ggml_free) R(ggml_reset) R(ggml_new_tensor_1d) R(ggml_new_tensor_2d) \
    R(ggml_new_tensor_3d) R(ggml_mul_mat_id) R(ggml_new_graph_custom) R(ggml_build_forward_expand) \
    R(ggml_custom_4d) R(ggml_get_tensor) R(ggml_tensor_overhead) R(ggml_graph_overhead_custom) \
    R(ggml_row_size) R(ggml_nbytes) R(ggml_type_name) R(ggml_type_size) R(ggml_blck_size) R(ggml_set_name) \
    R(ggml_get_type_traits_cpu) R(ggml_graph_plan) R(ggml_graph_compute) R(ggml_threadpool_params_default) \
    R(ggml_threadpool_new) R(ggml_threadpool_free) R(ggml_backend_buft_name) R(ggml_backend_buft_is_host) \
    R(ggml_backend_buft_get_alignment) R(ggml_backend_buft_get_device) R(ggml_backend_buft_alloc_buffer) \
    R(ggml_backend_buffer_get_type) R(ggml_backend_buffer_get_base) R(ggml_backend_buffer_get_size) \
    R(ggml_backend_buffer_reset) R(ggml_backend_buffer_clear) R(ggml_backend_buffer_free) \
    R(ggml_backend_buffer_set_usage) R(ggml_backend_buffer_get_usage) R(ggml_backend_buffer_is_host) \
    R(ggml_backend_dev_by_type) R(ggml_backend_dev_count) R(ggml_backend_dev_get) R(ggml_backend_dev_name) \
    R(ggml_backend_dev_buffer_type) R(ggml_backend_dev_backend_reg) R(ggml_backend_reg_get_proc_address) \
    R(ggml_backend_cpu_buffer_type) R(gguf_init_from_file) R(gguf_free) R(gguf_get_n_tensors) \
    R(gguf_get_tensor_name) R(gguf_get_tensor_offset) R(gguf_get_tensor_type) R(gguf_get_data_offset) \
    R(gguf_find_key) R(gguf_get_kv_type) R(gguf_get_arr_type) R(gguf_get_val_u8) R(gguf_get_val_i8) \
    R(gguf_get_val_u16) R(gguf_get_val_i16) R(gguf_get_val_u32) R(gguf_get_val_i32) R(gguf_get_val_u64) \
    R(gguf_get_val_i64) R(gguf_get_val_str) R(gguf_get_arr_n) R(gguf_get_arr_data) R(llama_log_set) \
    R(llama_model_default_params) R(llama_context_default_params) R(llama_model_load_from_file) \
    R(llama_model_free) R(llama_attach_threadpool) R(llama_backend_init) O(ggml_version) O(ggml_commit) \
    O(ggml_backend_load_all_from_path) O(llama_max_tensor_buft_overrides) O(ggml_backend_reg_by_name)
/* clang-format on */

typedef struct ms_api {
    void * libllama;  /* the handle this table was filled from */
    char path[512];   /* file of libllama */
    char commit[64];  /* ggml_commit() without "-dirty", "" if the library does not say */
    char version[64]; /* ggml_version() */
#define MS_API_FIELD(name) __typeof__(&name) name;
    MS_API_FUNCTIONS(MS_API_FIELD, MS_API_FIELD)
#undef MS_API_FIELD
    ms_buffer_init_fn buffer_init;
    /* by address only: their types differ between commits, or are ours */
    void * load_from_file_ptr; /* llama_model_load_from_file_ptr */
    int (*load_policy_set)(int lazy); /* in the libllama we build: csrc/ggml/load_policy.c */
    void * tensor_map;         /* llama_internal_get_tensor_map, C++ */

    /* found by the self-test */
    int op_custom, op_mul_mat_id;
    size_t buft_offset;  /* of `buft` in a ggml_backend_buffer */
    bool layout_b;       /* ms_buffer_i as declared; else without the two 2d entries */
    bool params_match;   /* llama_model_params and llama_context_params are those of our headers */
    char params_why[200]; /* what differs, if not */
    unsigned char custom_params[GGML_MAX_OP_PARAMS]; /* op_params of a ggml_custom_4d node */
} ms_api;

/* How ggml lays out a custom operation's parameters; checked by the self-test against a real node. */
typedef struct ms_custom_params {
    ggml_custom_op_t fun;
    int n_tasks;
    void * userdata;
} ms_custom_params;

/* The table for a handle (NULL: the bundled library); filled and tested once per handle, then kept for good. */
moestream_status ms_api_bind(const ms_api ** out, void * libllama, moestream_error * err);
/* The table of moestream_bind(NULL), or NULL. Does not bind. */
const ms_api * ms_api_bundled(void);
/* Any table that has been bound, bundled first, or NULL. */
const ms_api * ms_api_any(void);
/* Table already bound for a handle (NULL = bundled), or NULL. */
const ms_api * ms_api_find(void * libllama);

size_t ms_api_features(const ms_api * api, char * buf, size_t n);
size_t ms_api_libraries(char * buf, size_t n);

/* Fills the found-by-test part; UNSUPPORTED names the first thing that is not as we need it. */
moestream_status ms_api_selftest(ms_api * api, moestream_error * err);

static inline ggml_backend_buffer_type_t ms_buffer_buft(const ms_api * api, ggml_backend_buffer_t buffer) {
    return *(ggml_backend_buffer_type_t *) ((char *) buffer + api->buft_offset);
}
static inline void * ms_buffer_context(const ms_api * api, ggml_backend_buffer_t buffer) {
    return *(void **) ((char *) buffer + api->buft_offset + sizeof(void *));
}
/* ggml_backend_buffer_init with the layout of this library. */
ggml_backend_buffer_t ms_buffer_make(const ms_api * api, ggml_backend_buffer_type_t buft, const ms_buffer_i * iface,
                                     void * context, size_t size);

#endif
