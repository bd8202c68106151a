/*
 * ggml/expert_wait: what a compute thread does while a read or a slot is awaited: a few milliseconds at a time, it looks
 * at the caller's abort callback, the cancel flag and the deadline.
 * Guarantees: a wait ends; a call that is to stop, or whose read is beyond the deadline, is marked as failed.
 * Never reads, never computes.
 */
#include <errno.h>

#include "ggml/store.h"

enum { MS_STOPPED_NS = 50 * 1000 * 1000 };

/* While reads are awaited the user's abort callback is asked too, by one thread at a time; ggml itself asks only between
 * nodes. */
static void check_stop(moestream_context * ctx) {
    if (!atomic_flag_test_and_set_explicit(&ctx->op.asking, memory_order_acquire)) {
        ms_abort_callback(ctx); /* marks the call as failed when it is to stop */
        atomic_flag_clear_explicit(&ctx->op.asking, memory_order_release);
    }
}

/* Waits are a few milliseconds long. When none has ended for far longer the process was stopped, starved or computing:
 * that does not count for the deadline. Returns the sum of such times in this operation. */
static uint64_t time_stopped(ms_op * op, uint64_t now) {
    uint64_t last = atomic_exchange_explicit(&op->looked_ns, now, memory_order_relaxed);
    uint64_t more = now > last + MS_STOPPED_NS ? now - last : 0;
    return atomic_fetch_add_explicit(&op->stopped_ns, more, memory_order_relaxed) + more;
}

void ms_wait_for(moestream_context * ctx, int i, bool again) {
    ms_op * op = &ctx->op;
    const ms_entry * entry = &ctx->entry[i];
    uint64_t begin = ms_now_ns();
    /* of several contexts, those that wait would take the cores from those that compute */
    if (!again && atomic_load(&ctx->ms->n_contexts) == 1) {
        ms_stream_spin(ctx->ms->stream, entry->slot, op->slice);
    }
    ms_stream_wait(ctx->ms->stream, entry->slot, op->slice);
    uint64_t now = ms_now_ns();
    atomic_fetch_add_explicit(&ctx->stall_ns, now - begin, memory_order_relaxed);
    check_stop(ctx);
    uint64_t limit = ctx->ms->deadline_ns + time_stopped(op, now);
    if (now - op->started_ns > limit && !atomic_load(&ctx->failed)) {
        /* an operation over many experts may take longer than that; one read may not */
        uint64_t age = ms_stream_read_age(ctx->ms->stream, entry->slot, op->slice);
        if (age > limit) {
            moestream_error e = {.struct_size = sizeof(e)};
            ms_stream_deadline_error(ctx->ms->stream, entry->slot, op->slice, age, &e);
            ms_context_fail(ctx, &e);
        }
    }
}

/* Other contexts hold every slot: they give them back without needing anything of ours. */
void ms_wait_for_slots(moestream_context * ctx) {
    uint64_t begin = ms_now_ns();
    ms_stream_wait_free(ctx->ms->stream);
    uint64_t now = ms_now_ns();
    atomic_fetch_add_explicit(&ctx->stall_ns, now - begin, memory_order_relaxed);
    check_stop(ctx);
    uint64_t since = atomic_load_explicit(&ctx->op.slots_since_ns, memory_order_relaxed);
    uint64_t waited = now > since ? now - since : 0; /* another thread may have got one since the clock was read */
    if (waited > ctx->ms->deadline_ns + time_stopped(&ctx->op, now) && !atomic_load(&ctx->failed)) {
        moestream_error e = {.struct_size = sizeof(e)};
        ms_fail(&e, MOESTREAM_ERR_IO, ETIMEDOUT,
                "no slot of the cache became free in %.1f s (deadline_ms): reads into all of them, for this "
                "or another context, do not end",
                (double) waited * 1e-9);
        ms_context_fail(ctx, &e);
    }
}
