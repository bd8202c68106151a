/*
 * ggml/store: the structs behind moestream and moestream_context, and what the files of this room offer to each other
 * and to capi. See moestream.h for what each call promises.
 *
 * Threads. `moestream` is shared by the contexts of its model: its fields are set before the model is loaded and only
 * read afterwards, but for the atomics. A moestream_context belongs to one llama_context; the op state in it is used by
 * the compute threads of the one graph that runs at a time.
 */
#ifndef MS_STORE_H
#define MS_STORE_H

#include <pthread.h>
#include <stdatomic.h>

#include "ggml/api.h"
#include "ggml/plan.h"
#include "stream/stream.h"

ms_gguf_api ms_gguf_functions(const ms_api * api);

struct moestream {
    const ms_api * api;
    moestream_plan * plan;
    ms_stream * stream; /* NULL with streaming off */
    struct llama_model_tensor_buft_override * overrides; /* NULL where there is no rule */
    ms_buft stream_type, dense_type; /* handed to llama.cpp by address */
    atomic_int n_buffers;  /* of ours that llama.cpp holds: a loaded model */
    atomic_int n_contexts;
    uint64_t deadline_ns;
    bool verify;
    bool prefetch, prefetch_asked;

    /* while a load is in progress; one thread */
    bool loading;
    bool hide_host;        /* a foreign loader without mmap must stage through set_tensor (buffer_types.c) */
    int n_streamed_seen;   /* expert tensors that arrived in our buffer type */
    moestream_error load_error;

    atomic_uint_fast64_t load_expert_bytes, load_dense_bytes, n_fallback_tensors;
    pthread_mutex_t totals_lock; /* guards totals */
    moestream_stats totals;      /* counters that contexts keep, of those that are gone */
    struct moestream_context * contexts; /* those that live; list under totals_lock */
    char * warm_path;      /* file of the warm start list, NULL without */
    int32_t * replay;      /* [n_replay][n_layer][n_used] or NULL */
    size_t n_replay;
    double replay_recall;  /* of the emulated prediction */
    void ** dense_data;    /* [n_tensors] where dense weights were put, NULL elsewhere */
    struct ms_router * router; /* [n_groups] */
    int n_routers;
    bool dense_anon;
    char describe[700];    /* changes with a resize only */
};

/* ---- one expert matmul at a time ---- */

typedef struct ms_entry {
    int32_t expert;
    int32_t slot;      /* -1: not acquired yet */
    int32_t first_row; /* into op->rows */
    int32_t n_rows;
    atomic_int next;   /* chunk to hand out */
    atomic_int left;   /* chunks not finished */
} ms_entry;

typedef struct ms_row {
    int32_t k; /* rank of the expert for the token */
    int32_t t; /* token */
} ms_row;

/* Set up by thread 0 of each operation before the barrier, read by all after it. */
typedef struct ms_op {
    const struct ggml_tensor * dst;
    int bank, group, slice;
    int n_entries;
    int n_chunks;              /* per entry */
    int64_t chunk_rows;
    atomic_int n_acquired;     /* entries[0..n_acquired) have slots */
    atomic_int n_done;         /* entries finished */
    atomic_int n_inside;       /* threads that may look at its slots */
    atomic_bool ended;         /* ms_stream_end was called, or is about to be */
    atomic_int first_open;     /* entries before it have no chunk left to hand out */
    bool at_once;              /* every entry had a slot from the start */
    uint64_t started_ns;
    atomic_uint_fast64_t slots_since_ns; /* when slots were last had */
    atomic_uint_fast64_t looked_ns;  /* when a thread last looked at the deadline */
    atomic_uint_fast64_t stopped_ns; /* time in which none did for long: it does not count */
    bool leader;               /* first operation of the pass over its layer */
    bool scan;                 /* more experts per token than the model uses */
    atomic_flag predicted;     /* taken by the thread that reads ahead */
    atomic_flag taking;        /* held by the thread that acquires more slots */
    atomic_flag asking;        /* held by the thread that asks the user's abort callback */
} ms_op;

/* What was there at the last look at whether reading ahead pays. */
typedef struct ms_look {
    uint64_t busy_ns, stall_ns, read_bytes, guess_bytes, made, useful;
    int n_passes; /* since then */
    int pause;    /* looks until it is tried again; 0: it goes on */
} ms_look;

/* Userdata of a swapped node: one per bank and context. */
typedef struct ms_node {
    struct moestream_context * ctx;
    unsigned char params[GGML_MAX_OP_PARAMS]; /* op_params of the MUL_MAT_ID it was */
} ms_node;

/* Router of a group's layer, where it lies in our memory (predict.c). */
typedef struct ms_router {
    int next_group;               /* -1 behind the last */
    int64_t n_in;
    const float * weight;         /* [n_expert][n_in] or NULL */
    const float * bias;           /* [n_expert] or NULL */
    const float * selection_bias; /* [n_expert] or NULL */
} ms_router;

typedef struct ms_scratch ms_scratch; /* per thread, expert_matmul.c */

enum { MS_MAX_THREADS = 512, MS_GUESS_TOKENS = 16 /* asked about at once when reading ahead */ };

struct moestream_context {
    moestream * ms;
    const ms_api * api;
    struct moestream_context * next; /* in ms->contexts */

    /* hosts' own callbacks, chained */
    ggml_backend_sched_eval_callback user_eval;
    void * user_eval_data;
    ggml_abort_callback user_abort;
    void * user_abort_data;
    ggml_threadpool_t pool, pool_batch;

    /* op state */
    ms_node * node;        /* [n_banks] */
    ms_op op;
    ms_entry * entry;      /* [max experts] */
    int32_t * entry_of;    /* [max experts] expert -> entry, -1 */
    ms_row * rows;         /* grown by the hook */
    size_t n_rows_room;
    uint8_t * quantized;   /* activations in the weight type's vec_dot_type, grown by the hook */
    size_t quantized_room;
    ms_scratch * scratch;  /* [MS_MAX_THREADS] */
    int32_t * slots;       /* [max experts] for acquire */
    int32_t *experts, *passed;
    atomic_int barrier_count, barrier_phase;
    int pass_group;        /* group and slices of the pass that is running */
    unsigned pass_slices;
    bool pass_all;
    int left_layer;        /* layer whose last operation was the last to end, and when */
    uint64_t left_ns;
    uint64_t gap_ns; /* from there to the first operation of the next layer, when it was last seen; 0: unknown */
    bool gap_few; /* that was with few tokens */
    size_t replay_token, replay_step; /* token of the recording this pass begins at, tokens of this pass */
    atomic_int n_threads; /* of the last operation */

    /* reading ahead (predict.c); used by the one thread that holds op.predicted */
    uint64_t pass_begin_ns; /* reads begun before it belong to earlier calls, or were guesses */
    uint64_t pass_tick; /* what was used since is not evicted for a guess */
    int32_t * guess; /* [max experts, at least MS_GUESS_TOKENS times those a token uses] */
    float * guess_score; /* [MS_GUESS_TOKENS * max experts] */
    int32_t * guess_count; /* [max experts] tokens of a prompt that will probably choose it */
    int n_guess, n_likely, guess_group; /* in `guess`: how many, how many of them tokens will choose, for which group */
    uint64_t pass_cold; /* misses and useful guesses of this context before the pass */
    int n_found; /* passes in a row that found everything */
    uint64_t guess_random;
    ms_look look;

    atomic_bool failed; /* a call failed; results are not to be used */
    atomic_bool delivered; /* ... and ggml was told to stop: the next question belongs to a new call */
    atomic_bool cancel;
    pthread_mutex_t error_lock; /* guards error */
    moestream_error error;

    moestream_stats total;
    moestream_stats at_call; /* copy of total when the call began */
    atomic_uint_fast64_t stall_ns; /* summed over threads */
    atomic_uint_fast64_t n_ops, compute_ns; /* of total, for threads that ask about the store */
};

/* buffer_types.c */
void ms_buffer_types_init(moestream * ms);
/* The store a buffer belongs to if it is one of our expert buffers, else NULL. */
moestream * ms_buffer_store(const ms_api * api, ggml_backend_buffer_t buffer);
/* Makes a whole expert tensor readable in place (an operation we do not stream); once per tensor. */
moestream_status ms_buffer_materialize(moestream * ms, const struct ggml_tensor * tensor, moestream_error * err);

/* expert_matmul.c */
void ms_expert_matmul(struct ggml_tensor * dst, int ith, int nth, void * userdata);

/* expert_rows.c */
moestream_status ms_scratch_init(moestream_context * ctx, moestream_error * err);
void ms_scratch_free(moestream_context * ctx);
/* Room for one operation's activations and rows; called by the hook, before the graph runs. */
bool ms_matmul_reserve(moestream_context * ctx, const struct ggml_tensor * node);
bool ms_few_tokens(const struct ggml_tensor * node);
/* Are activations quantised once for all experts (ms_quantize_rows, part `part` of `n_parts`)? F32 rows of many tokens
 * are taken from where they are. */
bool ms_quantize_in_common(const ms_api * api, const struct ggml_tensor * node);
void ms_quantize_rows(moestream_context * ctx, const struct ggml_tensor * dst, int part, int n_parts);
/* Output rows r0 to r1 of one expert for all its tokens, by thread `ith`; false if there is no memory. */
bool ms_compute_rows(moestream_context * ctx, int ith, const ms_entry * entry, const uint8_t * weights, int64_t r0,
                     int64_t r1);
/* Results of a call that failed: nothing may read what was never written. */
void ms_zero_rows(moestream_context * ctx, const ms_entry * entry, int64_t r0, int64_t r1);
void ms_zero_all(const struct ggml_tensor * dst);

/* expert_wait.c: for the slice of entry i (`again`: this thread has just waited for it in vain, so the storage is slow);
 * for a slot that another context holds */
void ms_wait_for(moestream_context * ctx, int i, bool again);
void ms_wait_for_slots(moestream_context * ctx);

/* predict.c */
moestream_status ms_predict_init(moestream * ms, moestream_error * err);
/* Reads ahead for the layer behind the operation that is running. */
void ms_predict(moestream_context * ctx);

/* eval_hook.c */
bool ms_eval_callback(struct ggml_tensor * node, bool ask, void * user);
bool ms_abort_callback(void * user);
moestream_status ms_context_init(moestream_context ** out, moestream * ms, struct llama_context_params * params,
                                 moestream_error * err);
void ms_context_free(moestream_context * ctx);
void ms_context_fail(moestream_context * ctx, const moestream_error * error);

/* load.c */
moestream_status ms_store_open(moestream ** out, const char * path, const moestream_params * params,
                               moestream_error * err);
/* Writes ms->describe anew. */
void ms_store_describe(moestream * ms);
moestream_status ms_store_close(moestream * ms, moestream_error * err);
moestream_status ms_load_begin(moestream * ms, moestream_error * err);
moestream_status ms_load_end(moestream * ms, const struct llama_model * model, moestream_error * err);
moestream_status ms_load_model(moestream * ms, struct llama_model ** out, const struct llama_model_params * params,
                               moestream_error * err);
/* warm_list.c. `use` notes where the list is kept: IO or INVALID where it must not or cannot be written. `read` begins the
 * warm start that the file asks for, `write` writes it anew; their failures are logged. */
moestream_status ms_warm_list_use(moestream * ms, const char * path, moestream_error * err);
void ms_warm_list_read(moestream * ms);
void ms_warm_list_write(moestream * ms);
/* load_file.c */
moestream_status ms_load_file(moestream * ms, void ** out_file, moestream_error * err);

/* budget.c */
/* Memory that can still be had: MemAvailable and cgroup limits. UINT64_MAX where nothing tells. */
uint64_t ms_memory_room(void);
/* The same, told by the files of another folder than /proc (meminfo, self/cgroup, self/mountinfo): for tests. */
uint64_t ms_memory_room_at(const char * proc);
/* Slab size for cache_bytes = 0: `room` less what loading will take and a reserve (0: chosen by the room). */
uint64_t ms_budget_auto(const moestream_plan * plan, uint64_t room, uint64_t reserve);
/* NOMEM, with the numbers, if a slab of `cache_bytes` and the dense weights cannot fit into `room`: said now, rather
 * than by the kernel's killer later. */
moestream_status ms_budget_check(const moestream_plan * plan, uint64_t room, uint64_t cache_bytes,
                                 moestream_error * err);

#endif
