/* ggml/plan: see plan.h. Applies the rule list to every tensor, sums up, and says what looks like a mistake. */
#include "ggml/plan.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml/store.h"

void ms_plan_warn(moestream_plan * plan, const char * format, ...) {
    if (plan->n_warnings >= MS_MAX_WARNINGS) {
        return;
    }
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    char * kept = ms_strdup(text);
    if (kept != NULL) {
        plan->warning[plan->n_warnings++] = kept;
    }
}

/* ---- applying ---- */

static moestream_status match_tensor(moestream_plan * plan, int i, moestream_error * err) {
    const ms_tensor * t = &plan->index.tensor[i];
    plan->tensor_rule[i] = -1;
    for (int r = 0; r < plan->n_rules; r++) {
        char why[160] = "";
        int found = ms_regex_search(plan->rule[r].regex, t->name, why, sizeof(why));
        if (found < 0) {
            return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "rule %d, '%s', is too complex for tensor '%s': %s", r + 1,
                           plan->rule[r].pattern, t->name, why);
        }
        if (found) {
            if (plan->rule[r].kind == MS_PLACE_STREAM && t->bank < 0) {
                return ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                               "rule %d, '%s', sends '%s' to STREAM, but only the weights of routed experts can "
                               "be streamed",
                               r + 1, plan->rule[r].pattern, t->name);
            }
            plan->tensor_rule[i] = r;
            plan->rule[r].n_matched++;
            plan->rule[r].bytes += t->bytes;
            break;
        }
    }
    return MOESTREAM_OK;
}

static moestream_status apply(moestream_plan * plan, moestream_error * err) {
    ms_index * index = &plan->index;
    plan->tensor_rule = ms_calloc((size_t) index->n_tensors + 1, sizeof(int));
    bool * streamed = ms_calloc((size_t) index->n_banks + 1, sizeof(*streamed));
    moestream_status st = MOESTREAM_OK;
    if (plan->tensor_rule == NULL || streamed == NULL) {
        st = ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for a plan of %d tensors", index->n_tensors);
    }
    for (int i = 0; st == MOESTREAM_OK && i < index->n_tensors; i++) {
        st = match_tensor(plan, i, err);
        const ms_tensor * t = &index->tensor[i];
        if (st == MOESTREAM_OK && t->bank >= 0 && ms_plan_kind(plan, i) == MS_PLACE_STREAM) {
            streamed[t->bank] = true;
            plan->stream_bytes += t->bytes;
        }
    }
    if (st == MOESTREAM_OK) {
        ms_index_group(index, streamed);
        ms_stream_size(index, &plan->sizes, NULL);
    }
    free(streamed);
    return st;
}

static void sum_up(moestream_plan * plan) {
    plan->first_moe_layer = -1;
    for (int i = 0; i < plan->index.n_tensors; i++) {
        const ms_tensor * t = &plan->index.tensor[i];
        if (t->bank < 0) {
            plan->dense_bytes += t->bytes;
            continue;
        }
        plan->expert_bytes += t->bytes;
        if (plan->first_moe_layer < 0 || t->layer < plan->first_moe_layer) {
            plan->first_moe_layer = t->layer;
        }
    }
}

/* ---- warnings ---- */

static void warn_unmatched(moestream_plan * plan) {
    for (int r = 0; r < plan->n_rules; r++) {
        const ms_rule * rule = &plan->rule[r];
        if (rule->n_matched > 0 || rule->kind == MS_PLACE_DENSE || strcmp(rule->origin, "stream") == 0) {
            continue;
        }
        if (plan->index.n_banks == 0 && strcmp(rule->origin, "rules") != 0) {
            ms_plan_warn(plan, "%s has no effect: the model (%s) has no routed experts", rule->origin,
                         plan->index.arch);
        } else if (strcmp(rule->origin, "n_cpu_moe") != 0 || plan->n_cpu_moe > plan->first_moe_layer) {
            /* else said already, with the first block that has experts */
            ms_plan_warn(plan, "rule %d, '%s' (%s), matches no tensor%s", r + 1, rule->pattern, rule->origin,
                         r > 0 ? " that an earlier rule has not taken" : "");
        }
    }
}

static bool same_place(const moestream_plan * plan, int a, int b) {
    return a == b ||
           (a >= 0 && b >= 0 && plan->rule[a].kind == plan->rule[b].kind && plan->rule[a].buft == plan->rule[b].buft);
}

/* A rule of the user that takes some expert matrices of a block but leaves the fused gate_up, or takes shared experts
 * along with routed ones, is usually an old pattern. One line per rule. */
static void warn_partial(moestream_plan * plan) {
    for (int r = 0; r < plan->n_rules; r++) {
        if (strcmp(plan->rule[r].origin, "rules") != 0) {
            continue;
        }
        const char * shared = NULL;
        const ms_tensor *taken = NULL, *missed = NULL;
        for (int i = 0; i < plan->index.n_tensors; i++) {
            const ms_tensor * t = &plan->index.tensor[i];
            bool mine = plan->tensor_rule[i] == r;
            if (mine && strstr(t->name, "_shexp") != NULL) {
                shared = t->name;
            }
            if (mine && t->bank >= 0 && taken == NULL) {
                taken = t;
            }
        }
        for (int i = 0; taken != NULL && missed == NULL && i < plan->index.n_tensors; i++) {
            const ms_tensor * t = &plan->index.tensor[i];
            if (t->bank >= 0 && t->layer == taken->layer && !same_place(plan, plan->tensor_rule[i], r) &&
                strstr(t->name, "gate_up") != NULL) {
                missed = t;
            }
        }
        if (missed != NULL) {
            ms_plan_warn(
                plan, "rule %d, '%s', takes '%s' but misses the fused tensor '%s'; say ffn_(up|down|gate|gate_up)_exps",
                r + 1, plan->rule[r].pattern, taken->name, missed->name);
        }
        if (shared != NULL && taken != NULL) {
            ms_plan_warn(plan,
                         "rule %d, '%s', takes shared experts ('%s') along with routed ones ('%s'); shared experts are "
                         "used by every "
                         "token",
                         r + 1, plan->rule[r].pattern, shared, taken->name);
        }
    }
}

/* ---- open ---- */

moestream_status ms_plan_open(moestream_plan ** out, const ms_api * api, const char * path,
                              const moestream_params * params, moestream_error * err) {
    moestream_plan * plan = ms_calloc(1, sizeof(*plan));
    if (plan == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for a plan");
    }
    plan->api = api;
    plan->streaming = params->stream == MOESTREAM_STREAM_ON;
    plan->n_cpu_moe = params->n_cpu_moe;
    ms_gguf_api functions = ms_gguf_functions(api);
    moestream_status st = ms_index_open(&plan->index, &functions, path, err);
    if (st == MOESTREAM_OK) {
        sum_up(plan);
        st = ms_rules_build(plan, params, err);
    }
    if (st == MOESTREAM_OK) {
        st = apply(plan, err);
    }
    if (st != MOESTREAM_OK) {
        ms_plan_close(plan);
        return st;
    }
    warn_unmatched(plan);
    warn_partial(plan);
    *out = plan;
    return MOESTREAM_OK;
}

void ms_plan_close(moestream_plan * plan) {
    if (plan == NULL) {
        return;
    }
    for (int i = 0; i < plan->n_rules; i++) {
        free(plan->rule[i].pattern);
        free(plan->rule[i].emitted);
        ms_regex_close(plan->rule[i].regex);
    }
    for (int i = 0; i < plan->n_warnings; i++) {
        free(plan->warning[i]);
    }
    free(plan->rule);
    free(plan->tensor_rule);
    ms_index_close(&plan->index);
    free(plan);
}
