/*
 * moestream.h: Mixture-of-Experts models larger than memory, on an unmodified llama.cpp.
 *
 * Conventions. Each entry below states only where it departs from these.
 *  1. Functions that can fail return moestream_status: MOESTREAM_OK (0) or a negative code. Their last
 *     parameter is an optional moestream_error * owned by the caller (NULL is fine); it is written only on failure.
 *  2. All or nothing: after a failure every output is untouched and no thread, descriptor, mapping or pin is left.
 *  3. Handles are opaque. `open`/`init` hands one out through the first parameter, `close`/`free` takes it back and
 *     accepts NULL. Strings and arrays passed in are copied; strings handed out live as long as their handle.
 *  4. Structs that callers fill begin with `struct_size`; set it to sizeof(the struct), everything else to zero, then
 *     what you want. Zero means the default. A struct of a newer header is accepted if its unknown tail is zero.
 *     No struct crosses the boundary by value.
 *  5. Sizes are bytes, times are nanoseconds unless a name says otherwise (`_ms`). Text is UTF-8, messages are one
 *     line in the past tense with the facts: path, offset, numbers.
 *  6. Threads: a handle may be used by several threads at once except in its own close/free. Nothing here calls back
 *     into the host except the callbacks the host itself set.
 *  7. This library never prints, never touches the network, never writes a file, and never changes the output of a
 *     model: streamed logits equal the resident model's, bit for bit.
 *  8. It is bound to a libllama rather than linked: by default to the one bundled beside it, or to one that the host
 *     has loaded (moestream_params.libllama). llama and ggml structs are only named here, never laid out.
 */
#ifndef MOESTREAM_H
#define MOESTREAM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* cdef:begin */

struct llama_model;
struct llama_context;
struct llama_model_params;
struct llama_context_params;
struct llama_model_tensor_buft_override;
struct ggml_backend_buffer_type;
struct ggml_tensor;

enum { MOESTREAM_ABI_VERSION = 1 };

/* ---- status and error ------------------------------------------------------------------------------------------ */

typedef enum moestream_status {
    MOESTREAM_OK = 0,
    MOESTREAM_ERR_INVALID = -1, /* an argument or option made no sense */
    MOESTREAM_ERR_NOMEM = -2, /* memory was refused, or a budget is too small; the message has the number */
    MOESTREAM_ERR_IO = -3, /* the system refused a read or an open; os_errno says why */
    MOESTREAM_ERR_EOF = -4, /* a file ended before the bytes it promised */
    MOESTREAM_ERR_FORMAT = -5, /* not a GGUF, or one whose numbers contradict each other */
    MOESTREAM_ERR_UNSUPPORTED = -6, /* understood, but this build, model or llama.cpp cannot do it */
    MOESTREAM_ERR_BUSY = -7, /* still in use */
    MOESTREAM_ERR_CLOSED = -8, /* used after close, or aborted by the caller */
    MOESTREAM_ERR_CORRUPT = -9, /* bytes in memory differ from what was read first (verify) */
    MOESTREAM_ERR_INTERNAL = -10 /* a defect in this library */
} moestream_status;

enum { MOESTREAM_MESSAGE_BYTES = 512 };

typedef struct moestream_error {
    size_t struct_size;
    int32_t status;   /* a moestream_status */
    int32_t os_errno; /* 0 where no system call failed */
    char message[512];
} moestream_error;

/* The name of a status, "MOESTREAM_ERR_IO" for -3; "unknown status" for any other number. Never NULL. */
const char * moestream_status_name(int32_t status);

/* ---- what this library is, and what it found ------------------------------------------------------------------- */

/* MOESTREAM_ABI_VERSION of the library that is loaded. Compare it with the header's. */
int32_t moestream_abi_version(void);

/* One line of JSON: version, llama.cpp commit built for, compiler, which readers were compiled in. */
const char * moestream_build_info(void);

/* Binds to a libllama: `libllama` is a dlopen handle, NULL for the library bundled beside libmoestream. Checks by a
 * self-test that what is loaded is what we can drive; later calls with the same handle return at once.
 * Errors: UNSUPPORTED (a function is missing, a layout or a struct size differs: named), IO (no library there). */
moestream_status moestream_bind(void * libllama, moestream_error * err);

/* dlopen handle of the bundled libllama, NULL if moestream_bind(NULL) has not succeeded. Owner: the library. */
void * moestream_bundled_llama(void);

/* JSON object of what the bound libllama offers: {"load_policy": true, "tensor_map": true, ...}.
 * `buf` receives at most `n` bytes with the final zero; returns the length it would need, 0 before a bind. */
size_t moestream_features(void * libllama, char * buf, size_t n);

/* JSON list of the libllama and libggml files mapped in this process: path, whether we are bound to it. */
size_t moestream_libraries(char * buf, size_t n);

/* The buffer type of plain CPU memory in the libggml we are bound to (the bundled one if none yet); upstream's
 * libllama has no such call. NULL when nothing can be bound. Owner: libggml. */
struct ggml_backend_buffer_type * llama_get_cpu_buffer_type(void);

/* ---- log ------------------------------------------------------------------------------------------------------- */

/* Lines from this library and, after moestream_log_capture, from llama.cpp and ggml, wait in a bounded ring until
 * taken; a line equal to the one before it is counted instead of kept. Nothing is called back, so no host language
 * is entered from a thread of ours. */
typedef struct moestream_log_line {
    size_t struct_size;
    int32_t level;    /* ggml's: 1 debug, 2 info, 3 warning, 4 error */
    int32_t source;   /* 0 moestream, 1 llama.cpp or ggml */
    uint32_t repeats; /* how many more times the same line came */
    uint32_t dropped; /* lines lost before this one because nobody took them */
    char text[1000];
} moestream_log_line;

/* Takes the oldest line; returns 1, or 0 if there is none. */
int32_t moestream_log_take(moestream_log_line * line);

/* Makes the bound libllama and its ggml log into the ring (lines below `level` are not kept). */
moestream_status moestream_log_capture(void * libllama, int32_t level, moestream_error * err);

/* ---- placement and streaming options --------------------------------------------------------------------------- */

enum { MOESTREAM_IO_AUTO = 0, MOESTREAM_IO_URING = 1, MOESTREAM_IO_PREAD = 2 };
enum { MOESTREAM_DIRECT_AUTO = 0, MOESTREAM_DIRECT_ON = 1, MOESTREAM_DIRECT_OFF = 2 };
enum { MOESTREAM_DENSE_ANON = 0, MOESTREAM_DENSE_MMAP = 1 };
enum { MOESTREAM_PREFETCH_AUTO = 0, MOESTREAM_PREFETCH_OFF = 1, MOESTREAM_PREFETCH_ON = 2 };
enum { MOESTREAM_STREAM_ON = 0, MOESTREAM_STREAM_OFF = 1 };

/* One placement rule: tensors whose name `pattern` finds (ECMAScript std::regex_search, what llama.cpp uses) go to
 * `place`: "CPU", "STREAM", "DEFAULT" (llama.cpp decides), or the name of a ggml device or buffer type. */
typedef struct moestream_rule {
    const char * pattern;
    const char * place;
} moestream_rule;

typedef struct moestream_params {
    size_t struct_size;
    /* placement, in the order in which rules are tried: rules, n_cpu_moe / cpu_moe_layers, cpu_moe, streaming */
    const moestream_rule * rules;
    size_t n_rules;
    int32_t n_cpu_moe; /* routed experts of the first N blocks stay in CPU memory */
    int32_t cpu_moe;   /* 1: all routed experts stay in CPU memory */
    const int32_t * cpu_moe_layers;
    size_t n_cpu_moe_layers;
    int32_t n_gpu_layers; /* what will be passed to llama.cpp; says which dense tensors stay on the CPU */
    /* streaming */
    int32_t stream; /* MOESTREAM_STREAM_*: OFF makes only the rule list */
    int32_t
        dense; /* MOESTREAM_DENSE_*: ANON reads dense CPU weights into anonymous memory, MMAP leaves them mapped (and
                    * a file that is cut meanwhile then ends the process with SIGBUS, as with llama.cpp alone) */
    uint64_t cache_bytes; /* slab size; 0 chooses one by the memory that is free */
    int32_t cache_none; /* 1: nothing is kept between operations, cache_bytes is ignored */
    int32_t io; /* MOESTREAM_IO_* */
    int32_t direct; /* MOESTREAM_DIRECT_* */
    int32_t queue_depth; /* slices in flight at most, 1 to 1024; 0 = as few as keep the disk busy, up to 128 of many */
    int32_t n_readers; /* threads of the pread engine, 1 to 64; 0 = 4 */
    int32_t prefetch; /* MOESTREAM_PREFETCH_* */
    int32_t verify; /* 1: keep a checksum of each slice and compare it on every use */
    uint32_t deadline_ms; /* a read that takes longer fails the call; 0 = 60000 */
    void * libllama; /* dlopen handle of the libllama to drive; NULL = the bundled one */
    uint64_t
        reserve_bytes; /* cache_bytes = 0: memory left to the rest of the machine on top of what is known; 0 = 512 MiB */
    /* A recorded routing to replay instead of the router's choice, for benchmarks: expert of (token, layer, rank),
     * n_replay_tokens * n_layer * n_expert_used numbers, copied; tokens wrap around. Results are then meaningless. */
    const int32_t * replay_ids;
    size_t n_replay_tokens;
    double
        replay_recall; /* share of the recorded experts that reading ahead is told before; 0 = it is off under replay */
    /* A file that remembers which experts were in the cache, NULL for none: read behind the load, the experts it lists
     * fill the cache while the disk is idle; written anew by moestream_close. Only a file that is not there, is empty or
     * is such a list: INVALID for any other, IO where it cannot be written. */
    const char * warm_start;
} moestream_params;

/* ---- plan: where each tensor goes, from the GGUF header alone -------------------------------------------------- */

typedef struct moestream_plan moestream_plan;

typedef struct moestream_plan_info {
    size_t struct_size;
    int32_t n_layer;
    int32_t n_expert; /* 0 for a dense model */
    int32_t n_expert_used;
    int32_t n_tensors;
    int32_t n_rules; /* effective rules, the generated ones included */
    int32_t n_warnings;
    int32_t n_files;
    int32_t n_classes; /* slot size classes of the streamed experts */
    int32_t first_moe_layer; /* first block with routed experts, -1 if none */
    uint64_t expert_bytes; /* routed expert weights of the model */
    uint64_t dense_bytes; /* everything else */
    uint64_t stream_bytes; /* expert weights this plan streams */
    uint64_t cycle_bytes; /* slab bytes one token touches: with less, most of them are read for each token */
    uint64_t min_cache_bytes; /* smallest cache that opens */
    uint64_t full_cache_bytes; /* slab bytes that hold every streamed expert */
} moestream_plan_info;

typedef struct moestream_plan_tensor {
    size_t struct_size;
    const char * name;
    const char * type; /* ggml type name, "q4_K" */
    const char * place; /* "STREAM", "CPU", "DEFAULT", "CPU_ANON" or a buffer type name */
    int32_t rule; /* index of the rule that won, -1 = none, llama.cpp decides */
    int32_t layer; /* block number, -1 outside the blocks */
    int32_t is_expert; /* 1: routed expert weights */
    int32_t file; /* shard index */
    uint64_t offset; /* in that file */
    uint64_t bytes;
} moestream_plan_tensor;

typedef struct moestream_plan_rule {
    size_t struct_size;
    const char * pattern;
    const char * place;
    const char * origin; /* "rules", "n_cpu_moe", "cpu_moe_layers", "cpu_moe", "stream", "dense" */
    int32_t n_matched; /* tensors this rule won */
    uint64_t bytes;
} moestream_plan_rule;

typedef struct moestream_plan_class {
    size_t struct_size;
    uint64_t slot_bytes;
    int32_t n_layers; /* expert banks (layers) of this size */
    int32_t n_experts; /* experts of this size in the model */
} moestream_plan_class;

/* Reads the header(s) of a GGUF (`path`: the file, or the first shard) and applies the options.
 * Errors: IO, FORMAT, EOF, INVALID (bad pattern, unknown place, shard other than the first), UNSUPPORTED. */
moestream_status moestream_plan_open(moestream_plan ** out, const char * path, const moestream_params * params,
                                     moestream_error * err);
void moestream_plan_close(moestream_plan * plan);
moestream_status moestream_plan_get_info(const moestream_plan * plan, moestream_plan_info * info);
moestream_status moestream_plan_get_tensor(const moestream_plan * plan, int32_t i, moestream_plan_tensor * tensor);
moestream_status moestream_plan_get_rule(const moestream_plan * plan, int32_t i, moestream_plan_rule * rule);
moestream_status moestream_plan_get_class(const moestream_plan * plan, int32_t i, moestream_plan_class * cls);
/* Warning i, NULL past the end. */
const char * moestream_plan_warning(const moestream_plan * plan, int32_t i);

/* ---- a model's expert store ------------------------------------------------------------------------------------ */

typedef struct moestream moestream;

/* Opens the expert store of one model: plans, opens the files, takes the slab. `path` as for the plan.
 * Errors: those of the plan; NOMEM (cache below the minimum, or the memory was refused); UNSUPPORTED (streaming asked
 * for a model without experts, or io_uring required and refused, with what would allow it). */
moestream_status moestream_open(moestream ** out, const char * path, const moestream_params * params,
                                moestream_error * err);

/* Ends the store. Call it after llama_model_free and after every moestream_context_free.
 * Errors: BUSY (a context or a loaded model still uses it; nothing was freed). */
moestream_status moestream_close(moestream * ms, moestream_error * err);

/* The plan in force. Owner: `ms`. */
const moestream_plan * moestream_get_plan(const moestream * ms);

/* The buffer type whose tensors are streamed. Owner: `ms`; it must outlive the model. NULL with stream off. */
struct ggml_backend_buffer_type * moestream_buffer_type(moestream * ms);

/* The override list for llama_model_params.tensor_buft_overrides, ended by a NULL pattern; NULL where there is no
 * rule. Owner: `ms`; it must outlive the model. */
const struct llama_model_tensor_buft_override * moestream_overrides(moestream * ms);

/* Loads the model through the bound libllama. `params` is what llama_model_default_params gave plus the caller's
 * wishes; overrides, load mode and extra buffer types are set here where streaming needs them. The caller frees the
 * model with llama_model_free before moestream_close. Thread: one load at a time per store.
 * Errors: INVALID (use_mlock, check_tensors or overrides in `params`), IO, EOF, UNSUPPORTED (tensors that should
 * stream were placed elsewhere), CLOSED (the progress callback said stop), INTERNAL with llama.cpp's own last error. */
moestream_status moestream_load_model(moestream * ms, struct llama_model ** out,
                                      const struct llama_model_params * params, moestream_error * err);

/* For hosts that call llama_model_load_from_file themselves: bracket that call with begin and end, on one thread.
 * begin: with our libllama the file is then mapped without being read; with another one the load still works but
 * reads the file. end: `model` is what the host's load returned (NULL if it failed); finishes and checks. */
moestream_status moestream_load_begin(moestream * ms, moestream_error * err);
moestream_status moestream_load_end(moestream * ms, const struct llama_model * model, moestream_error * err);

/* For hosts with another libllama: a FILE * for llama_model_load_from_file_ptr that skips the expert bytes. Load with
 * mmap off, inside begin/end. Owner: the caller (fclose after the load).
 * Errors: UNSUPPORTED (split models, or no such function). */
moestream_status moestream_load_file(moestream * ms, void ** out_file, moestream_error * err);

/* ---- one llama_context that streams ---------------------------------------------------------------------------- */

typedef struct moestream_context moestream_context;

/* Makes the hook of one context and sets it in `params`: eval callback, abort callback (the caller's own ones are
 * chained), op_offload off. Pass `params` to llama_init_from_model afterwards; one hook, one llama_context.
 * `params` may be NULL: the host then sets moestream_eval_callback and moestream_abort_callback, with this handle as
 * user data, by itself, and op_offload = false.
 * Free it after llama_free. */
moestream_status moestream_context_init(moestream_context ** out, moestream * ms, struct llama_context_params * params,
                                        moestream_error * err);
void moestream_context_free(moestream_context * ctx);

/* Gives `lctx` a threadpool that lives as long as `ctx`, so that ggml does not create threads for each call.
 * Call llama_free before moestream_context_free. */
moestream_status moestream_context_attach(moestream_context * ctx, struct llama_context * lctx, int32_t n_threads,
                                          int32_t n_threads_batch, moestream_error * err);

/* After llama_decode or llama_encode: OK, or why the call's results must not be used. Clears the error. */
moestream_status moestream_context_status(moestream_context * ctx, moestream_error * err);

/* Asks a running decode of this context to stop; it returns 2 and moestream_context_status gives CLOSED. */
void moestream_context_cancel(moestream_context * ctx);

/* The two callbacks by address, for hosts that fill llama_context_params themselves (see moestream_context_init). */
void * moestream_eval_callback(void);
void * moestream_abort_callback(void);

/* ---- statistics ------------------------------------------------------------------------------------------------ */

typedef struct moestream_stats {
    size_t struct_size;
    uint64_t n_ops; /* expert matrix multiplications run by us */
    uint64_t n_hits; /* experts found in the slab, all of their slices read or on their way */
    uint64_t n_misses; /* experts that had to be read */
    uint64_t n_coalesced; /* of the hits: those whose read was still in flight */
    uint64_t n_reads; /* slices read */
    uint64_t read_bytes; /* bytes read for them, alignment included */
    uint64_t slice_bytes; /* of these, bytes of weights */
    uint64_t n_evictions;
    uint64_t stall_ns; /* compute threads waiting for reads, averaged over the threads */
    uint64_t compute_ns; /* inside our operation, stalls included, thread 0 */
    uint64_t n_prefetch; /* experts read ahead */
    uint64_t n_prefetch_useful;
    uint64_t prefetch_bytes;
    uint64_t n_retries; /* reads resumed or repeated */
    uint64_t n_fallback_tensors; /* whole tensors read because of an operation we do not stream */
    uint64_t load_expert_bytes; /* expert bytes read while loading and probing */
    uint64_t load_dense_bytes;
    uint64_t cache_bytes; /* slab size */
    uint64_t cache_used_bytes;
    uint64_t n_slots;
    int32_t io; /* engine in use, MOESTREAM_IO_* */
    int32_t direct; /* 1: all files are read directly, 0: some or all are buffered */
    int32_t queue_depth;
    int32_t prefetch; /* 1 while reading ahead is on */
} moestream_stats;

/* Totals of the store since it was opened. */
moestream_status moestream_get_stats(const moestream * ms, moestream_stats * stats);
/* Of one context: `call` since the last moestream_context_begin_call, `total` since init. Either may be NULL. */
moestream_status moestream_context_get_stats(const moestream_context * ctx, moestream_stats * call,
                                             moestream_stats * total);
void moestream_context_begin_call(moestream_context * ctx);

/* One line that says what is on: layers, bytes, engine, direct or not, and why. Owner: `ms`. */
const char * moestream_describe(const moestream * ms);

/* What was chosen for this store and why, a line each: "queue_depth=2: measured at open, ...". Writes at most n bytes with
 * the ending zero, returns the length it would take. */
size_t moestream_choices(const moestream * ms, char * buf, size_t n);

/* Changes the cache size between calls; shrinking gives memory back at once.
 * Errors: NOMEM (below the minimum, or refused), BUSY (a call is running). */
moestream_status moestream_resize(moestream * ms, uint64_t cache_bytes, moestream_error * err);

/* ---- what really happened to each tensor of a loaded model ----------------------------------------------------- */

typedef struct moestream_tensor_place {
    size_t struct_size;
    const char * name;
    const char * buffer_type;
    uint64_t bytes;
    int32_t is_host;
} moestream_tensor_place;

/* Number of weight tensors of a model loaded by libllama `libllama` (NULL = bundled), -1 where that library does not
 * tell. */
int32_t moestream_model_n_tensors(void * libllama, const struct llama_model * model);
moestream_status moestream_model_tensor(void * libllama, const struct llama_model * model, int32_t i,
                                        moestream_tensor_place * place, moestream_error * err);

/* ---- for tools: disk speed of a model file --------------------------------------------------------------------- */

/* Reads up to `bytes` of expert slices of the store's files in random order, directly where possible, with the
 * engine and depth of the store, past the cache; out: bytes per second. */
moestream_status moestream_measure_disk(moestream * ms, uint64_t bytes, double * bytes_per_s, moestream_error * err);

/* cdef:end */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif
