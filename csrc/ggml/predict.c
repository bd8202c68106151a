/*
 * ggml/predict: which experts the next layer will probably choose, asked while this layer computes, so that the disk works
 * during the attention in between.
 * For a few tokens: the next layer's router on this layer's FFN input (published recall 71 to 89 %). For many: the same for
 * some of them, and the other experts behind those where nearly every one will be used. Under a replayed routing, where no
 * router's choice counts, the recorded experts with a stated recall, for benchmarks, at the cost of asking the router.
 * Guarantees: only reads ahead (stream/ahead.c): a wrong guess costs disk time, never a bit. Stops asking by itself while
 * everything is in the cache and, unless nearly all experts will be used, while wrong guesses cost more than right ones win.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml/store.h"

enum {
    MS_PREDICT_TOKENS = 8,   /* up to here the router is asked for each, of more for MS_GUESS_TOKENS */
    MS_LOOK_TOKENS = 4,      /* between two looks at whether it pays */
    MS_PAUSE_LOOKS = 10      /* looks until it is tried again */
};

/* ---- routers: dense weights that lie in our own memory ---- */

static const float * dense_f32(const moestream * ms, const char * name, int64_t ne0, int64_t ne1) {
    int i = ms_index_find(&ms->plan->index, name);
    if (i < 0 || ms->dense_data == NULL || ms->dense_data[i] == NULL) {
        return NULL;
    }
    const ms_tensor * t = &ms->plan->index.tensor[i];
    bool fits = t->type == GGML_TYPE_F32 && t->ne[0] == ne0 && t->ne[1] == ne1 && t->ne[2] == 1 && t->ne[3] == 1;
    return fits ? ms->dense_data[i] : NULL;
}

/* The group of the nearest later layer with the same number of experts, -1 behind the last. */
static int group_after(const ms_index * index, int g) {
    int best = -1;
    for (int k = 0; k < index->n_groups; k++) {
        if (index->group[k].layer > index->group[g].layer && index->group[k].n_expert == index->group[g].n_expert &&
            (best < 0 || index->group[k].layer < index->group[best].layer)) {
            best = k;
        }
    }
    return best;
}

moestream_status ms_predict_init(moestream * ms, moestream_error * err) {
    const ms_index * index = &ms->plan->index;
    free(ms->router);
    ms->n_routers = 0;
    ms->router = ms_calloc((size_t) index->n_groups + 1, sizeof(*ms->router));
    if (ms->router == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, 0, "no memory for a table of %d routers", index->n_groups);
    }
    for (int g = 0; g < index->n_groups; g++) {
        ms_router * r = &ms->router[g];
        const ms_group * group = &index->group[g];
        char name[64];
        r->next_group = group_after(index, g);
        snprintf(name, sizeof(name), "blk.%d.ffn_gate_inp.weight", group->layer);
        int i = ms_index_find(index, name);
        r->n_in = i >= 0 ? index->tensor[i].ne[0] : 0;
        r->weight = dense_f32(ms, name, r->n_in, group->n_expert);
        snprintf(name, sizeof(name), "blk.%d.ffn_gate_inp.bias", group->layer);
        r->bias = dense_f32(ms, name, group->n_expert, 1);
        snprintf(name, sizeof(name), "blk.%d.exp_probs_b.bias", group->layer);
        r->selection_bias = dense_f32(ms, name, group->n_expert, 1);
        ms->n_routers += r->weight != NULL;
    }
    return MOESTREAM_OK;
}

/* ---- the choice ---- */

/* The n best of score[0..n_expert), best first; few of many, so a simple pass each. */
static int choose(float * score, int n_expert, int n, int32_t * out) {
    int found = 0;
    for (; found < n && found < n_expert; found++) {
        int best = -1;
        for (int e = 0; e < n_expert; e++) {
            if (score[e] > -INFINITY && (best < 0 || score[e] > score[best])) {
                best = e;
            }
        }
        if (best < 0) {
            break;
        }
        out[found] = best;
        score[best] = -INFINITY;
    }
    return found;
}

/* Scores of the router for tokens[0..n) of `x`, into guess_score [n][n_expert]. The router's rows are gone through once: they
 * are more than fits the processor's caches. */
static void router_scores(moestream_context * ctx, const ms_router * r, int n_expert, const struct ggml_tensor * x,
                          const int64_t * tokens, int n) {
    const struct ggml_type_traits_cpu * f32 = ctx->api->ggml_get_type_traits_cpu(GGML_TYPE_F32);
    for (int e = 0; e < n_expert; e++) {
        for (int i = 0; i < n; i++) {
            const float * in = (const float *) ((const char *) x->data + (size_t) tokens[i] * x->nb[2]);
            float logit = 0;
            f32->vec_dot((int) r->n_in, &logit, 0, r->weight + (int64_t) e * r->n_in, 0, in, 0, 1);
            logit += r->bias != NULL ? r->bias[e] : 0;
            ctx->guess_score[i * n_expert + e] =
                r->selection_bias != NULL ? 1.0f / (1.0f + expf(-logit)) + r->selection_bias[e] : logit;
        }
    }
}

static int32_t recorded(const moestream * ms, size_t token, int group, int k) {
    const ms_index * index = &ms->plan->index;
    size_t layer = (size_t) index->group[group].layer;
    return ms
        ->replay[(token % ms->n_replay * (size_t) index->n_layer + layer) * (size_t) index->n_expert_used + (size_t) k];
}

/* A wrong guess is an expert that another token chose in this layer: a router that errs names likely experts, too. */
static int recorded_choice(moestream_context * ctx, int group, int64_t t, int32_t * out) {
    const moestream * ms = ctx->ms;
    int n_used = ms->plan->index.n_expert_used;
    for (int k = 0; k < n_used; k++) {
        ctx->guess_random = ctx->guess_random * 6364136223846793005u + 1442695040888963407u;
        bool hit = (double) (ctx->guess_random >> 40) < ms->replay_recall * (double) (1 << 24);
        size_t token = hit ? ctx->replay_token + (size_t) t : (size_t) (ctx->guess_random >> 16) % ms->n_replay;
        out[k] = recorded(ms, token, group, hit ? k : (int) ((ctx->guess_random >> 8) % (uint64_t) n_used));
    }
    return n_used;
}

/* What tokens[0..n) of this pass, at most MS_GUESS_TOKENS, will probably choose in `group`, whose router is asked for the
 * input `x` of this layer: `out` gets n_used for each. Returns how many in all, 0 where nobody can say. */
static int ask(moestream_context * ctx, int group, const struct ggml_tensor * x, const int64_t * tokens, int n,
               int32_t * out) {
    const ms_index * index = &ctx->ms->plan->index;
    const ms_router * r = &ctx->ms->router[group];
    int n_expert = index->group[group].n_expert, n_out = 0;
    bool usable = r->weight != NULL && x->ne[0] == r->n_in && x->ne[1] == 1 && tokens[n - 1] < x->ne[2];
    if (usable) {
        router_scores(ctx, r, n_expert, x, tokens, n);
    }
    for (int i = 0; i < n && usable; i++) {
        n_out += choose(ctx->guess_score + i * n_expert, n_expert, index->n_expert_used, out + n_out);
    }
    if (ctx->ms->replay != NULL) { /* the router was asked all the same: what that costs belongs to the figure */
        n_out = 0;
        for (int i = 0; i < n; i++) {
            n_out += recorded_choice(ctx, group, tokens[i], out + n_out);
        }
    }
    return n_out;
}

/* Tokens may choose the same expert: the stream passes over what it has. */
static int ask_for_few(moestream_context * ctx, int group, const struct ggml_tensor * x, int n_tokens) {
    int64_t tokens[MS_PREDICT_TOKENS];
    for (int t = 0; t < n_tokens; t++) {
        tokens[t] = t;
    }
    return ask(ctx, group, x, tokens, n_tokens, ctx->guess);
}

/* Would so many tokens, choosing at random, leave less than a tenth of the experts unused? */
static bool nearly_all_used(const ms_index * index, int group, int64_t n_tokens) {
    double unused = 1.0 - (double) index->n_expert_used / (double) index->group[group].n_expert;
    return unused <= 0 || pow(unused, (double) n_tokens) < 0.1;
}

/* Some tokens from all over the prompt, its last one among them, stand for the others: what they will choose, the most
 * wanted first, and behind it (from n_likely on) the other experts where nearly all will be used. */
static int ask_for_many(moestream_context * ctx, int group, const struct ggml_tensor * x, int64_t n_tokens, bool all) {
    int n_expert = ctx->ms->plan->index.group[group].n_expert;
    int64_t tokens[MS_GUESS_TOKENS];
    int n_sampled = n_tokens < MS_GUESS_TOKENS ? (int) n_tokens : MS_GUESS_TOKENS;
    for (int i = 0; i < n_sampled; i++) {
        tokens[i] = (i + 1) * n_tokens / n_sampled - 1;
    }
    int n = ask(ctx, group, x, tokens, n_sampled, ctx->guess);
    memset(ctx->guess_count, 0, (size_t) n_expert * sizeof(*ctx->guess_count));
    ctx->n_likely = 0;
    for (int i = 0; i < n; i++) {
        int32_t e = ctx->guess[i]; /* a recording may hold anything: the layer itself will say so */
        ctx->n_likely += e >= 0 && e < n_expert && ctx->guess_count[e]++ == 0;
    }
    for (int e = 0; e < n_expert; e++) {
        ctx->guess_score[e] = all || ctx->guess_count[e] > 0 ? (float) ctx->guess_count[e] : -INFINITY;
    }
    return choose(ctx->guess_score, n_expert, n_expert, ctx->guess);
}

/* ---- whether to ask ---- */

/* Everything this layer needed was there, and not because of a guess. */
static bool found_all(moestream_context * ctx) {
    bool found = ctx->total.n_misses + ctx->total.n_prefetch_useful == ctx->pass_cold;
    ctx->n_found = found ? ctx->n_found + 1 : 0;
    return found;
}

/* Without guesses nearly all of the disk's time for what is needed would be waited for; with them, what still is waited for,
 * behind wrong ones, too. One look compares the two: starts a pause, or ends one when enough looks have passed. */
static void look(moestream_context * ctx) {
    const moestream_stats * total = &ctx->total;
    ms_look now = {.busy_ns = ms_stream_busy_ns(ctx->ms->stream),
                   .stall_ns = atomic_load(&ctx->stall_ns) / (uint64_t) atomic_load(&ctx->n_threads),
                   .read_bytes = total->read_bytes,
                   .guess_bytes = total->prefetch_bytes,
                   .made = total->n_prefetch,
                   .useful = total->n_prefetch_useful,
                   .pause = ctx->look.pause > 0 ? ctx->look.pause - 1 : 0};
    /* guesses that were given up are taken off again, so these may shrink */
    int64_t made = (int64_t) (now.made - ctx->look.made), useful = (int64_t) (now.useful - ctx->look.useful);
    int64_t guess_bytes = (int64_t) (now.guess_bytes - ctx->look.guess_bytes);
    double read = (double) (int64_t) (now.read_bytes - ctx->look.read_bytes);
    if (made > 0 && read > 0) {
        double wrong = useful < made ? 1 - (double) useful / (double) made : 0;
        double needed = 1 - wrong * (double) guess_bytes / read;
        double without = needed * (double) (now.busy_ns - ctx->look.busy_ns);
        double with = (double) (now.stall_ns - ctx->look.stall_ns);
        if (with > without) {
            now.pause = MS_PAUSE_LOOKS;
            ms_log(
                MS_LOG_INFO,
                "reading ahead pauses: %.1f ms were waited for bytes, without it about %.1f ms would be (%lld of %lld "
                "guesses were used)",
                with * 1e-6, without * 1e-6, (long long) useful, (long long) made);
        }
    }
    ctx->look = now;
}

static bool paused(moestream_context * ctx) {
    if (++ctx->look.n_passes >= MS_LOOK_TOKENS * ctx->ms->plan->index.n_groups) {
        ctx->look.n_passes = 0;
        look(ctx);
    }
    return ctx->look.pause > 0;
}

void ms_predict(moestream_context * ctx) {
    moestream * ms = ctx->ms;
    const ms_op * op = &ctx->op;
    const struct ggml_tensor * x = op->dst->src[1];
    int64_t n_tokens = op->dst->src[2]->ne[1];
    int next = ms->router[op->group].next_group, n = 0;
    bool few = n_tokens <= MS_PREDICT_TOKENS;
    if (!ms->prefetch || next < 0 || !ctx->pass_all || (few && !op->leader)) {
        return;
    }
    /* many tokens that found all: the next layer has probably all, too; few say little until a whole token has */
    if (found_all(ctx) && (!few || ctx->n_found > ms->plan->index.n_groups)) {
        return;
    }
    bool all = !few && nearly_all_used(&ms->plan->index, next, n_tokens);
    if (few) {
        n = paused(ctx) ? 0 : ask_for_few(ctx, next, x, (int) n_tokens);
        ctx->n_likely = n;
    } else if (op->leader || ctx->guess_group != next) {
        n = !all && paused(ctx) ? 0 : ask_for_many(ctx, next, x, n_tokens, all);
    } else {
        n = ctx->n_guess; /* at each operation of the pass: what did not fit into the queue before */
    }
    ctx->n_guess = n;
    ctx->guess_group = next;
    int likely = n > 0 ? ctx->n_likely : 0;
    if (likely > 0) {
        ms_stream_prefetch(ms->stream, next, ctx->guess, likely, !few, ctx->pass_tick, &ctx->total);
    }
    if (n > likely) {
        ms_stream_prefetch(ms->stream, next, ctx->guess + likely, n - likely, true, ctx->pass_tick, &ctx->total);
    }
}
