/*
 * ggml/expert_matmul: MUL_MAT_ID over experts that arrive from disk, run in place of the stock operation on all of the
 * CPU backend's threads.
 * Guarantees: the same bits as the stock operation (expert_rows.c); whichever experts are there are computed first.
 * One barrier, before the work; none after it: ggml has one behind every node.
 * Never keeps a slice pinned after the operation; never allocates.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ggml/store.h"

enum { MS_CHUNK_ROWS = 64 }; /* output rows per chunk, a multiple of every tile height in ggml */

/* ---- barrier: sense by phase; yields after a short spin, since readers and other threads may need the core ---- */

static void barrier(moestream_context * ctx, int nth) {
    if (nth == 1) {
        return;
    }
    int phase = atomic_load_explicit(&ctx->barrier_phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&ctx->barrier_count, 1, memory_order_acq_rel) == nth - 1) {
        atomic_store_explicit(&ctx->barrier_count, 0, memory_order_relaxed);
        atomic_store_explicit(&ctx->barrier_phase, phase + 1, memory_order_release); /* pairs with the acquire below */
        return;
    }
    for (unsigned n = 0; atomic_load_explicit(&ctx->barrier_phase, memory_order_acquire) == phase; n++) {
        ms_relax(n);
    }
}

/* ---- start: thread 0 sorts rows by expert and acquires slots ---- */

/* The router's choice; under replay the recorded one. */
static int32_t id_at(const moestream_context * ctx, const struct ggml_tensor * ids, int64_t k, int64_t t) {
    const moestream * ms = ctx->ms;
    if (ms->replay != NULL && k < ms->plan->index.n_expert_used) {
        size_t token = (ctx->replay_token + (size_t) t) % ms->n_replay;
        size_t layer = (size_t) ms->plan->index.group[ctx->op.group].layer;
        return ms->replay[(token * (size_t) ms->plan->index.n_layer + layer) * (size_t) ms->plan->index.n_expert_used +
                          (size_t) k];
    }
    return *(const int32_t *) ((const char *) ids->data + (size_t) t * ids->nb[1] + (size_t) k * ids->nb[0]);
}

/* An entry for each expert that is chosen, in the order of their last use. false if an id is out of range. */
static bool find_experts(moestream_context * ctx, const struct ggml_tensor * ids, int n_expert, moestream_error * e) {
    int n = 0; /* found so far, the one that is used last first */
    bool ok = true;
    for (int64_t t = ids->ne[1] - 1; t >= 0 && ok; t--) {
        for (int64_t k = ids->ne[0] - 1; k >= 0 && ok; k--) {
            int32_t expert = id_at(ctx, ids, k, t);
            if (expert < 0 || expert >= n_expert) {
                ms_fail(e, MOESTREAM_ERR_INVALID, 0, "token %lld of layer %d chose expert %d, there are %d",
                        (long long) t, ctx->ms->plan->index.group[ctx->op.group].layer, (int) expert, n_expert);
                ok = false;
            } else if (ctx->entry_of[expert] < 0) {
                ctx->entry_of[expert] = 0;
                ctx->experts[n++] = expert;
            }
        }
    }
    for (int i = 0; i < n; i++) {
        ms_entry * entry = &ctx->entry[i];
        entry->expert = ctx->experts[n - 1 - i];
        entry->n_rows = 0;
        ctx->entry_of[entry->expert] = ok ? i : -1;
    }
    ctx->op.n_entries = ok ? n : 0;
    return ok;
}

/* Groups the rows by expert. false if an id is out of range. */
static bool sort_rows(moestream_context * ctx, const struct ggml_tensor * ids, int n_expert, moestream_error * e) {
    ms_op * op = &ctx->op;
    int64_t n_used = ids->ne[0], n_tokens = ids->ne[1];
    if (!find_experts(ctx, ids, n_expert, e)) {
        return false;
    }
    for (int64_t t = 0; t < n_tokens; t++) {
        for (int64_t k = 0; k < n_used; k++) {
            ctx->entry[ctx->entry_of[id_at(ctx, ids, k, t)]].n_rows++;
        }
    }
    int32_t at = 0;
    for (int i = 0; i < op->n_entries; i++) {
        ms_entry * entry = &ctx->entry[i];
        entry->first_row = at;
        at += entry->n_rows;
        entry->n_rows = 0;
    }
    for (int64_t t = 0; t < n_tokens; t++) {
        for (int64_t k = 0; k < n_used; k++) {
            ms_entry * entry = &ctx->entry[ctx->entry_of[id_at(ctx, ids, k, t)]];
            ctx->rows[entry->first_row + entry->n_rows++] = (ms_row) {(int32_t) k, (int32_t) t};
        }
    }
    for (int i = 0; i < op->n_entries; i++) {
        ctx->entry_of[ctx->entry[i].expert] = -1;
    }
    return true;
}

static ms_demand demand_of(const moestream_context * ctx, bool leader) {
    return (ms_demand) {.group = ctx->op.group,
                        .slice = ctx->op.slice,
                        .leader = leader,
                        .scan = ctx->op.scan,
                        .all_slices = leader && ctx->pass_all};
}

/* Acquires slots for the entries that have none, as many as there is room for. Thread 0 before the barrier; later any
 * thread that finished an entry, one at a time (op.taking). */
static void acquire_more(moestream_context * ctx, bool leader, bool begins) {
    ms_op * op = &ctx->op;
    int have = atomic_load_explicit(&op->n_acquired, memory_order_relaxed);
    int n = op->n_entries - have;
    bool many = !ms_few_tokens(op->dst);
    int n_tokens = (int) op->dst->src[2]->ne[1];
    for (int i = 0; i < n; i++) {
        const ms_entry * entry = &ctx->entry[have + i];
        ctx->experts[i] = entry->expert;
        ctx->passed[i] = many ? n_tokens - 1 - ctx->rows[entry->first_row + entry->n_rows - 1].t : 0;
    }
    ms_demand demand = demand_of(ctx, leader);
    demand.begins = begins;
    demand.n_visits = many ? n_tokens : 1; /* a few tokens are of several sequences: none is older than the others */
    demand.passed = ctx->passed;
    int got = n > 0 ? ms_stream_acquire(ctx->ms->stream, &demand, ctx->experts, n, ctx->slots, &ctx->total) : 0;
    for (int i = 0; i < got; i++) {
        ctx->entry[have + i].slot = ctx->slots[i];
    }
    if (got > 0) {
        atomic_store_explicit(&op->slots_since_ns, ms_now_ns(), memory_order_relaxed);
    }
    atomic_store_explicit(&op->n_acquired, have + got, memory_order_release); /* pairs with the acquire in next_chunk */
}

/* The first operation of a layer asks for the whole expert (up, gate and down), so that the later reads overlap with the
 * earlier computing. Where not all experts fit at once, each operation reads only its own slices. */
static bool begin_pass(moestream_context * ctx) {
    ms_op * op = &ctx->op;
    unsigned bit = 1u << op->slice;
    bool leader = ctx->pass_group != op->group || (ctx->pass_slices & bit) != 0;
    if (leader) {
        if (op->group == 0) {
            ctx->replay_token += ctx->replay_step;
            ctx->replay_step = (size_t) op->dst->src[2]->ne[1];
        }
        ctx->pass_group = op->group;
        ctx->pass_slices = 0;
    }
    ctx->pass_slices |= bit;
    return leader;
}

/* Rows per chunk: small for single rows, so that threads end together; with many rows a chunk costs a small graph and a
 * second quantisation of the activations, so whole experts where there are enough of them to go round. */
static int64_t chunk_rows(const struct ggml_tensor * dst, int n_entries, int nth) {
    int64_t n_out = dst->src[0]->ne[1];
    if (ms_few_tokens(dst)) {
        return MS_CHUNK_ROWS;
    }
    int64_t parts = (4 * nth + n_entries - 1) / n_entries; /* per expert, for four chunks a thread */
    int64_t rows = nth == 1 ? n_out : (n_out + parts - 1) / parts;
    return (int64_t) ms_align_up((uint64_t) rows, MS_CHUNK_ROWS);
}

/* How long no expert is computed between two layers. Gaps of many tokens say nothing about those of few; and between two
 * passes it is the caller's time. */
static void note_gap(moestream_context * ctx) {
    const ms_op * op = &ctx->op;
    bool few = ms_few_tokens(op->dst);
    int layer = ctx->ms->plan->index.group[op->group].layer;
    if (few != ctx->gap_few) {
        ctx->gap_ns = 0;
    } else if (layer > ctx->left_layer && ctx->left_ns > 0) {
        ctx->gap_ns = op->started_ns - ctx->left_ns;
    }
    ctx->gap_few = few;
}

/* Behind the last operation of a layer. With one context nobody looks at the disk until the next one. */
static void leave_layer(moestream_context * ctx) {
    const ms_group * group = &ctx->ms->plan->index.group[ctx->op.group];
    if (ctx->pass_slices != (1u << group->n_slices) - 1 || atomic_load(&ctx->failed)) {
        return;
    }
    ctx->left_ns = ms_now_ns();
    ctx->left_layer = group->layer;
    if (atomic_load(&ctx->ms->n_contexts) == 1) {
        ms_stream_fill(ctx->ms->stream, ctx->gap_ns);
    }
}

static void start(moestream_context * ctx, const struct ggml_tensor * dst, int bank, int nth) {
    ms_op * op = &ctx->op;
    const ms_bank * b = &ctx->ms->plan->index.bank[bank];
    op->dst = dst;
    op->bank = bank;
    op->group = b->group;
    op->slice = b->slice;
    moestream_error e = {.struct_size = sizeof(e)};
    op->started_ns = ms_now_ns();
    atomic_store_explicit(&op->slots_since_ns, op->started_ns, memory_order_relaxed);
    bool leader = begin_pass(ctx);
    op->leader = leader;
    if (leader) {
        note_gap(ctx);
    }
    int n_used = ctx->ms->plan->index.n_expert_used;
    op->scan = n_used > 0 && dst->src[2]->ne[0] > n_used;
    atomic_flag_clear_explicit(&op->predicted, memory_order_relaxed);
    if (atomic_load(&ctx->failed)) {
        op->n_entries = 0;
    } else if (!sort_rows(ctx, dst->src[2], b->n_expert, &e)) {
        ms_context_fail(ctx, &e);
    }
    atomic_store_explicit(&op->n_acquired, 0, memory_order_relaxed);
    atomic_store_explicit(&op->n_done, 0, memory_order_relaxed);
    atomic_store_explicit(&op->first_open, 0, memory_order_relaxed);
    if (op->n_entries == 0) {
        ms_zero_all(dst);
        return;
    }
    if (leader) {
        ctx->pass_begin_ns = op->started_ns;
        ctx->pass_cold = ctx->total.n_misses + ctx->total.n_prefetch_useful;
        ctx->pass_tick = ms_stream_tick(ctx->ms->stream) + 1;
        ctx->pass_all = !op->scan && ms_stream_fits(ctx->ms->stream, op->group, op->n_entries);
    }
    op->chunk_rows = chunk_rows(dst, op->n_entries, nth);
    op->n_chunks = (int) ((dst->src[0]->ne[1] + op->chunk_rows - 1) / op->chunk_rows);
    for (int i = 0; i < op->n_entries; i++) {
        ctx->entry[i].slot = -1;
        atomic_store_explicit(&ctx->entry[i].next, 0, memory_order_relaxed);
        atomic_store_explicit(&ctx->entry[i].left, op->n_chunks, memory_order_relaxed);
    }
    atomic_store_explicit(&op->ended, false, memory_order_relaxed);
    atomic_store_explicit(&op->stopped_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&op->looked_ns, op->started_ns, memory_order_relaxed);
    acquire_more(ctx, leader, true);
    if (leader) {
        ms_stream_poll(ctx->ms->stream); /* what has arrived since the last layer makes room for what is missing now */
    }
    op->at_once = atomic_load_explicit(&op->n_acquired, memory_order_relaxed) == op->n_entries;
    ctx->total.n_ops++;
}

/* ---- computing one chunk ---- */

/* The slice of this entry is there, right, and the call has not failed; else the call fails now. */
static bool slice_usable(moestream_context * ctx, const ms_entry * entry, int chunk) {
    ms_stream * stream = ctx->ms->stream;
    moestream_error e = {.struct_size = sizeof(e)};
    if (atomic_load_explicit(&ctx->failed, memory_order_relaxed)) {
        return false;
    }
    if (ms_stream_state(stream, entry->slot, ctx->op.slice) != MS_READY) {
        ms_stream_read_error(stream, entry->slot, ctx->op.slice, &e);
    } else if (!ctx->ms->verify || chunk != 0 ||
               ms_stream_verify(stream, entry->slot, ctx->op.slice, &e) == MOESTREAM_OK) {
        return true;
    }
    ms_context_fail(ctx, &e);
    return false;
}

static void compute_chunk(moestream_context * ctx, int ith, int i, int chunk) {
    ms_op * op = &ctx->op;
    const ms_entry * entry = &ctx->entry[i];
    int64_t r0 = chunk * op->chunk_rows, n_out = op->dst->src[0]->ne[1];
    int64_t r1 = r0 + op->chunk_rows < n_out ? r0 + op->chunk_rows : n_out;
    bool ok = slice_usable(ctx, entry, chunk);
    if (ok) {
        const uint8_t * weights = ms_stream_payload(ctx->ms->stream, entry->slot, op->slice);
        if (!ms_compute_rows(ctx, ith, entry, weights, r0, r1)) {
            moestream_error e = {.struct_size = sizeof(e)};
            ms_fail(&e, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory to compute %d rows of an expert", entry->n_rows);
            ms_context_fail(ctx, &e);
            ok = false;
        }
    }
    if (!ok) {
        ms_zero_rows(ctx, entry, r0, r1); /* nothing may read garbage; the call fails through the abort callback */
    }
}

/* ---- handing out chunks ---- */

/* The next chunk of an entry whose slice is there: hits first, misses as they arrive. Returns the entry, or -1 with
 * *pending = an entry whose read is to be waited for, -1 if there is none. After a failure nothing is waited for. */
static int next_chunk(moestream_context * ctx, int * chunk, int * pending) {
    ms_op * op = &ctx->op;
    bool failed = atomic_load_explicit(&ctx->failed, memory_order_relaxed);
    int n = atomic_load_explicit(&op->n_acquired, memory_order_acquire); /* pairs with the release in acquire_more */
    int first = atomic_load_explicit(&op->first_open, memory_order_relaxed);
    *pending = -1;
    for (int i = first; i < n; i++) {
        ms_entry * entry = &ctx->entry[i];
        if (atomic_load_explicit(&entry->next, memory_order_relaxed) >= op->n_chunks) {
            int expected = i;
            atomic_compare_exchange_strong(&op->first_open, &expected,
                                           i + 1); /* only moves over closed entries in front */
            continue;
        }
        ms_slice_state state = ms_stream_state(ctx->ms->stream, entry->slot, op->slice);
        if (!failed && state == MS_FAILED && atomic_load_explicit(&entry->next, memory_order_relaxed) == 0 &&
            ms_stream_retry(ctx->ms->stream, entry->slot, op->slice, ctx->pass_begin_ns)) {
            state = MS_READING;
        }
        if (!failed && state == MS_READING) {
            *pending = *pending < 0 ? i : *pending;
            continue;
        }
        *chunk = atomic_fetch_add_explicit(&entry->next, 1, memory_order_relaxed);
        if (*chunk < op->n_chunks) {
            return i;
        }
    }
    return -1;
}

/* Called by whoever finished the last chunk of an entry. Slots go back at once where others wait for them, else together
 * at the end (leave), with one lock for all. */
static void finish_entry(moestream_context * ctx, int i) {
    ms_op * op = &ctx->op;
    if (!op->at_once) {
        int32_t slot = ctx->entry[i].slot;
        ms_stream_release(ctx->ms->stream, op->slice, &slot, 1);
    }
    atomic_fetch_add_explicit(&op->n_done, 1, memory_order_acq_rel);
}

/* The last thread inside ends the operation; one that comes later sees, by n_inside, that every chunk is handed out. */
static void leave(moestream_context * ctx) {
    ms_op * op = &ctx->op;
    if (atomic_fetch_sub_explicit(&op->n_inside, 1, memory_order_acq_rel) > 1 || atomic_exchange(&op->ended, true)) {
        return;
    }
    int n = op->at_once ? op->n_entries : 0;
    for (int k = 0; k < n; k++) {
        ctx->slots[k] = ctx->entry[k].slot;
    }
    ms_stream_end(ctx->ms->stream, op->slice, ctx->slots, n);
    leave_layer(ctx);
}

/* More experts than slots: takes what has become free; one thread at a time. Returns false if there was nothing to take. */
static bool take_more(moestream_context * ctx) {
    ms_op * op = &ctx->op;
    if (atomic_flag_test_and_set_explicit(&op->taking, memory_order_acquire)) {
        return false;
    }
    int before = atomic_load_explicit(&op->n_acquired, memory_order_relaxed);
    if (atomic_load_explicit(&ctx->failed, memory_order_relaxed)) {
        /* entries that never got a slot: nothing to compute, nothing to give back */
        for (int i = before; i < op->n_entries; i++) {
            ms_zero_rows(ctx, &ctx->entry[i], 0, op->dst->src[0]->ne[1]);
            atomic_store_explicit(&ctx->entry[i].next, op->n_chunks, memory_order_relaxed);
        }
        atomic_fetch_add(&op->n_done, op->n_entries - before);
        atomic_store_explicit(&op->n_acquired, op->n_entries, memory_order_release);
    } else if (before < op->n_entries) {
        acquire_more(ctx, false, false);
    }
    bool more = atomic_load_explicit(&op->n_acquired, memory_order_relaxed) > before;
    atomic_flag_clear_explicit(&op->taking, memory_order_release);
    return more;
}

/* ---- the work of one thread ---- */

/* Once an operation: of few tokens by the last thread before it computes, as every moment counts until the next layer needs
 * them; else by the first thread that finds nothing to compute. */
static bool may_predict(moestream_context * ctx) {
    return ctx->ms->prefetch && ctx->op.at_once && !atomic_load_explicit(&ctx->failed, memory_order_relaxed) &&
           !atomic_flag_test_and_set_explicit(&ctx->op.predicted, memory_order_acquire);
}

static void work(moestream_context * ctx, int ith, int nth) {
    ms_op * op = &ctx->op;
    unsigned idle = 0;
    int waited = -1;
    if (ith == nth - 1 && op->leader && ms_few_tokens(op->dst) && may_predict(ctx)) {
        ms_predict(ctx);
    }
    for (;;) {
        int chunk = 0, pending = -1;
        int i = next_chunk(ctx, &chunk, &pending);
        if (i >= 0) {
            compute_chunk(ctx, ith, i, chunk);
            ms_stream_poll(ctx->ms->stream); /* what has arrived is counted, and reads that wait go down */
            if (atomic_fetch_sub_explicit(&ctx->entry[i].left, 1, memory_order_acq_rel) == 1) {
                finish_entry(ctx, i);
            }
            idle = 0;
        } else if (may_predict(ctx)) {
            ms_predict(ctx); /* before the first wait or, with nothing to wait for, before leaving */
        } else if (pending >= 0) {
            ms_wait_for(ctx, pending, pending == waited);
            waited = pending;
        } else if (atomic_load_explicit(&op->n_acquired, memory_order_acquire) == op->n_entries) {
            return; /* all handed out; ggml's barrier waits for those who still compute */
        } else if (!take_more(ctx)) {
            if (atomic_load(&op->n_done) < atomic_load(&op->n_acquired)) {
                ms_relax(idle++); /* a slot of ours comes back when another thread ends its chunk */
            } else {
                ms_wait_for_slots(ctx);
            }
        }
    }
}

void ms_expert_matmul(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const ms_node * node = userdata;
    moestream_context * ctx = node->ctx;
    if (ith == 0) {
        start(ctx, dst, (int) (node - ctx->node), nth);
    }
    if (ms_quantize_in_common(ctx->api, dst) && !atomic_load_explicit(&ctx->failed, memory_order_relaxed)) {
        /* of few rows thread 0 does none: it has been busy getting the reads on their way */
        int first = ms_few_tokens(dst) && nth > 1 ? 1 : 0;
        if (ith >= first) {
            ms_quantize_rows(ctx, dst, ith - first, nth - first);
        }
    }
    barrier(ctx, nth);
    if (ctx->op.n_entries > 0) {
        atomic_fetch_add_explicit(&ctx->op.n_inside, 1, memory_order_acq_rel);
        work(ctx, ith, nth);
        leave(ctx);
    }
    if (ith == 0) {
        ctx->total.compute_ns += ms_now_ns() - ctx->op.started_ns;
        atomic_store_explicit(&ctx->n_ops, ctx->total.n_ops, memory_order_relaxed);
        atomic_store_explicit(&ctx->compute_ns, ctx->total.compute_ns, memory_order_relaxed);
        atomic_store_explicit(&ctx->n_threads, nth, memory_order_relaxed);
    }
}
