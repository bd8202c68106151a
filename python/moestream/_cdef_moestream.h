/* Generated from csrc/include/moestream.h by tools/cdef.py. Do not edit. */
struct llama_model;
struct llama_context;
struct llama_model_params;
struct llama_context_params;
struct llama_model_tensor_buft_override;
struct ggml_backend_buffer_type;
struct ggml_tensor;
enum { MOESTREAM_ABI_VERSION = 1 };
typedef enum moestream_status {
    MOESTREAM_OK = 0,
    MOESTREAM_ERR_INVALID = -1,
    MOESTREAM_ERR_NOMEM = -2,
    MOESTREAM_ERR_IO = -3,
    MOESTREAM_ERR_EOF = -4,
    MOESTREAM_ERR_FORMAT = -5,
    MOESTREAM_ERR_UNSUPPORTED = -6,
    MOESTREAM_ERR_BUSY = -7,
    MOESTREAM_ERR_CLOSED = -8,
    MOESTREAM_ERR_CORRUPT = -9,
    MOESTREAM_ERR_INTERNAL = -10
} moestream_status;
enum { MOESTREAM_MESSAGE_BYTES = 512 };
typedef struct moestream_error {
    size_t struct_size;
    int32_t status;
    int32_t os_errno;
    char message[512];
} moestream_error;
const char * moestream_status_name(int32_t status);
int32_t moestream_abi_version(void);
const char * moestream_build_info(void);
moestream_status moestream_bind(void * libllama, moestream_error * err);
void * moestream_bundled_llama(void);
size_t moestream_features(void * libllama, char * buf, size_t n);
size_t moestream_libraries(char * buf, size_t n);
struct ggml_backend_buffer_type * llama_get_cpu_buffer_type(void);
typedef struct moestream_log_line {
    size_t struct_size;
    int32_t level;
    int32_t source;
    uint32_t repeats;
    uint32_t dropped;
    char text[1000];
} moestream_log_line;
int32_t moestream_log_take(moestream_log_line * line);
moestream_status moestream_log_capture(void * libllama, int32_t level, moestream_error * err);
enum { MOESTREAM_IO_AUTO = 0, MOESTREAM_IO_URING = 1, MOESTREAM_IO_PREAD = 2 };
enum { MOESTREAM_DIRECT_AUTO = 0, MOESTREAM_DIRECT_ON = 1, MOESTREAM_DIRECT_OFF = 2 };
enum { MOESTREAM_DENSE_ANON = 0, MOESTREAM_DENSE_MMAP = 1 };
enum { MOESTREAM_PREFETCH_AUTO = 0, MOESTREAM_PREFETCH_OFF = 1, MOESTREAM_PREFETCH_ON = 2 };
enum { MOESTREAM_STREAM_ON = 0, MOESTREAM_STREAM_OFF = 1 };
typedef struct moestream_rule {
    const char * pattern;
    const char * place;
} moestream_rule;
typedef struct moestream_params {
    size_t struct_size;
    const moestream_rule * rules;
    size_t n_rules;
    int32_t n_cpu_moe;
    int32_t cpu_moe;
    const int32_t * cpu_moe_layers;
    size_t n_cpu_moe_layers;
    int32_t n_gpu_layers;
    int32_t stream;
    int32_t
        dense;
    uint64_t cache_bytes;
    int32_t cache_none;
    int32_t io;
    int32_t direct;
    int32_t queue_depth;
    int32_t n_readers;
    int32_t prefetch;
    int32_t verify;
    uint32_t deadline_ms;
    void * libllama;
    uint64_t
        reserve_bytes;
    const int32_t * replay_ids;
    size_t n_replay_tokens;
    double
        replay_recall;
    const char * warm_start;
} moestream_params;
typedef struct moestream_plan moestream_plan;
typedef struct moestream_plan_info {
    size_t struct_size;
    int32_t n_layer;
    int32_t n_expert;
    int32_t n_expert_used;
    int32_t n_tensors;
    int32_t n_rules;
    int32_t n_warnings;
    int32_t n_files;
    int32_t n_classes;
    int32_t first_moe_layer;
    uint64_t expert_bytes;
    uint64_t dense_bytes;
    uint64_t stream_bytes;
    uint64_t cycle_bytes;
    uint64_t min_cache_bytes;
    uint64_t full_cache_bytes;
} moestream_plan_info;
typedef struct moestream_plan_tensor {
    size_t struct_size;
    const char * name;
    const char * type;
    const char * place;
    int32_t rule;
    int32_t layer;
    int32_t is_expert;
    int32_t file;
    uint64_t offset;
    uint64_t bytes;
} moestream_plan_tensor;
typedef struct moestream_plan_rule {
    size_t struct_size;
    const char * pattern;
    const char * place;
    const char * origin;
    int32_t n_matched;
    uint64_t bytes;
} moestream_plan_rule;
typedef struct moestream_plan_class {
    size_t struct_size;
    uint64_t slot_bytes;
    int32_t n_layers;
    int32_t n_experts;
} moestream_plan_class;
moestream_status moestream_plan_open(moestream_plan ** out, const char * path, const moestream_params * params,
                                     moestream_error * err);
void moestream_plan_close(moestream_plan * plan);
moestream_status moestream_plan_get_info(const moestream_plan * plan, moestream_plan_info * info);
moestream_status moestream_plan_get_tensor(const moestream_plan * plan, int32_t i, moestream_plan_tensor * tensor);
moestream_status moestream_plan_get_rule(const moestream_plan * plan, int32_t i, moestream_plan_rule * rule);
moestream_status moestream_plan_get_class(const moestream_plan * plan, int32_t i, moestream_plan_class * cls);
const char * moestream_plan_warning(const moestream_plan * plan, int32_t i);
typedef struct moestream moestream;
moestream_status moestream_open(moestream ** out, const char * path, const moestream_params * params,
                                moestream_error * err);
moestream_status moestream_close(moestream * ms, moestream_error * err);
const moestream_plan * moestream_get_plan(const moestream * ms);
struct ggml_backend_buffer_type * moestream_buffer_type(moestream * ms);
const struct llama_model_tensor_buft_override * moestream_overrides(moestream * ms);
moestream_status moestream_load_model(moestream * ms, struct llama_model ** out,
                                      const struct llama_model_params * params, moestream_error * err);
moestream_status moestream_load_begin(moestream * ms, moestream_error * err);
moestream_status moestream_load_end(moestream * ms, const struct llama_model * model, moestream_error * err);
moestream_status moestream_load_file(moestream * ms, void ** out_file, moestream_error * err);
typedef struct moestream_context moestream_context;
moestream_status moestream_context_init(moestream_context ** out, moestream * ms, struct llama_context_params * params,
                                        moestream_error * err);
void moestream_context_free(moestream_context * ctx);
moestream_status moestream_context_attach(moestream_context * ctx, struct llama_context * lctx, int32_t n_threads,
                                          int32_t n_threads_batch, moestream_error * err);
moestream_status moestream_context_status(moestream_context * ctx, moestream_error * err);
void moestream_context_cancel(moestream_context * ctx);
void * moestream_eval_callback(void);
void * moestream_abort_callback(void);
typedef struct moestream_stats {
    size_t struct_size;
    uint64_t n_ops;
    uint64_t n_hits;
    uint64_t n_misses;
    uint64_t n_coalesced;
    uint64_t n_reads;
    uint64_t read_bytes;
    uint64_t slice_bytes;
    uint64_t n_evictions;
    uint64_t stall_ns;
    uint64_t compute_ns;
    uint64_t n_prefetch;
    uint64_t n_prefetch_useful;
    uint64_t prefetch_bytes;
    uint64_t n_retries;
    uint64_t n_fallback_tensors;
    uint64_t load_expert_bytes;
    uint64_t load_dense_bytes;
    uint64_t cache_bytes;
    uint64_t cache_used_bytes;
    uint64_t n_slots;
    int32_t io;
    int32_t direct;
    int32_t queue_depth;
    int32_t prefetch;
} moestream_stats;
moestream_status moestream_get_stats(const moestream * ms, moestream_stats * stats);
moestream_status moestream_context_get_stats(const moestream_context * ctx, moestream_stats * call,
                                             moestream_stats * total);
void moestream_context_begin_call(moestream_context * ctx);
const char * moestream_describe(const moestream * ms);
size_t moestream_choices(const moestream * ms, char * buf, size_t n);
moestream_status moestream_resize(moestream * ms, uint64_t cache_bytes, moestream_error * err);
typedef struct moestream_tensor_place {
    size_t struct_size;
    const char * name;
    const char * buffer_type;
    uint64_t bytes;
    int32_t is_host;
} moestream_tensor_place;
int32_t moestream_model_n_tensors(void * libllama, const struct llama_model * model);
moestream_status moestream_model_tensor(void * libllama, const struct llama_model * model, int32_t i,
                                        moestream_tensor_place * place, moestream_error * err);
moestream_status moestream_measure_disk(moestream * ms, uint64_t bytes, double * bytes_per_s, moestream_error * err);
