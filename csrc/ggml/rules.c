/* ggml/rules: from options to the rule list; see plan.h. User's rules first, then n_cpu_moe and cpu_moe_layers, then
 * cpu_moe, then streaming, then dense weights. Few rules: llama.cpp compiles each one once per tensor. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml/plan.h"

/* What upstream's --cpu-moe matches (common/common.h, LLM_FFN_EXPS_REGEX): weights, biases and scales of routed experts. */
#define EXPERTS "ffn_(up|down|gate|gate_up)_(ch|)exps"

/* ---- places ---- */

static moestream_status unknown_place(const ms_api * api, const char * place, int rule, moestream_error * err) {
    char names[300] = "CPU, STREAM, DEFAULT";
    for (size_t i = 0; i < api->ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t dev = api->ggml_backend_dev_get(i);
        ggml_backend_buffer_type_t buft = api->ggml_backend_dev_buffer_type(dev);
        const char * name = buft != NULL ? api->ggml_backend_buft_name(buft) : "";
        if (name[0] != '\0' && strcmp(name, "CPU") != 0) {
            size_t len = strlen(names);
            snprintf(names + len, sizeof(names) - len, ", %s", name);
        }
    }
    return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "rule %d names the unknown place '%s'; there are: %s", rule + 1,
                   place, names);
}

static moestream_status resolve_place(const ms_api * api, ms_rule * rule, const char * place, int number,
                                      bool streaming, moestream_error * err) {
    snprintf(rule->place, sizeof(rule->place), "%s", place);
    if (strcmp(place, "DEFAULT") == 0) {
        rule->kind = MS_PLACE_DEFAULT;
        return MOESTREAM_OK;
    }
    if (strcmp(place, "STREAM") == 0) {
        if (!streaming) {
            return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "rule %d sends tensors to STREAM, but streaming is off",
                           number + 1);
        }
        rule->kind = MS_PLACE_STREAM;
        return MOESTREAM_OK;
    }
    rule->kind = MS_PLACE_BUFT;
    if (strcmp(place, "CPU") == 0) {
        rule->buft = api->ggml_backend_cpu_buffer_type();
        return MOESTREAM_OK;
    }
    for (size_t i = 0; i < api->ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t dev = api->ggml_backend_dev_get(i);
        ggml_backend_buffer_type_t buft = api->ggml_backend_dev_buffer_type(dev);
        if (buft != NULL && (strcmp(api->ggml_backend_buft_name(buft), place) == 0 ||
                             strcmp(api->ggml_backend_dev_name(dev), place) == 0)) {
            rule->buft = buft;
            snprintf(rule->place, sizeof(rule->place), "%s", api->ggml_backend_buft_name(buft));
            return MOESTREAM_OK;
        }
    }
    return unknown_place(api, place, number, err);
}

/* ---- adding ---- */

/* Patterns come from command lines and files of other people, and the engine recurses once or more per parenthesis. */
enum { MS_MAX_PATTERN = 1024 };

static moestream_status check_user_pattern(const moestream_rule * r, int number, moestream_error * err) {
    if (r->pattern == NULL || r->place == NULL || r->pattern[0] == '\0' || r->place[0] == '\0') {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "rule %d has an empty pattern or place", number);
    }
    size_t len = strlen(r->pattern);
    if (len > MS_MAX_PATTERN) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                       "rule %d, '%.60s...', has a pattern of %zu bytes, the limit is %d", number, r->pattern, len,
                       MS_MAX_PATTERN);
    }
    /* Such a rule is handed over inside the patterns of the rules behind it (emit), where its groups have other numbers. */
    if (strcmp(r->place, "DEFAULT") == 0) {
        for (const char * c = r->pattern; *c != '\0'; c++) {
            if (*c == '\\' && *++c >= '1' && *c <= '9') {
                return ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                               "rule %d, '%s', refers back to a group; a DEFAULT rule cannot", number, r->pattern);
            }
            if (*c == '\0') {
                break;
            }
        }
    }
    return MOESTREAM_OK;
}

static moestream_status add_rule(moestream_plan * plan, const char * pattern, const char * place, const char * origin,
                                 moestream_error * err) {
    if (plan->n_rules >= plan->max_rules) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                       "there are more than %d placement rules, which is all that llama.cpp takes (the rules "
                       "made by n_cpu_moe, cpu_moe and streaming count, too)",
                       plan->max_rules);
    }
    ms_rule * rule = &plan->rule[plan->n_rules];
    memset(rule, 0, sizeof(*rule));
    rule->origin = origin;
    if (strcmp(place, MS_DENSE_NAME) == 0) {
        rule->kind = MS_PLACE_DENSE;
        snprintf(rule->place, sizeof(rule->place), "%s", place);
    } else {
        moestream_status st = resolve_place(plan->api, rule, place, plan->n_rules, plan->streaming, err);
        if (st != MOESTREAM_OK) {
            return st;
        }
    }
    char why[160] = "";
    rule->pattern = ms_strdup(pattern);
    rule->regex = rule->pattern != NULL ? ms_regex_open(pattern, why, sizeof(why)) : NULL;
    plan->n_rules++; /* from here ms_plan_close frees it */
    if (rule->pattern == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for rule %d", plan->n_rules);
    }
    if (rule->regex == NULL) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                       "rule %d, '%s', is not a valid pattern (ECMAScript, as llama.cpp takes it): %s", plan->n_rules,
                       pattern, why);
    }
    return MOESTREAM_OK;
}

/* One rule for a set of blocks: "blk\.(0|1|5)\.<what>". NULL if memory is short. */
static char * blocks_pattern(const bool * in, int n_layer, const char * what) {
    size_t room = (size_t) n_layer * 12 + strlen(what) + 32;
    char * text = malloc(room);
    if (text == NULL) {
        return NULL;
    }
    size_t len = (size_t) snprintf(text, room, "^blk\\.(");
    bool first = true;
    for (int il = 0; il < n_layer; il++) {
        if (in[il]) {
            len += (size_t) snprintf(text + len, room - len, first ? "%d" : "|%d", il);
            first = false;
        }
    }
    snprintf(text + len, room - len, ")\\.%s", what);
    return text;
}

static moestream_status add_blocks(moestream_plan * plan, const bool * in, int n_layer, const char * what,
                                   const char * place, const char * origin, moestream_error * err) {
    bool any = false;
    for (int il = 0; il < n_layer; il++) {
        any |= in[il];
    }
    if (!any) {
        return MOESTREAM_OK;
    }
    char * pattern = blocks_pattern(in, n_layer, what);
    if (pattern == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for a rule over %d blocks", n_layer);
    }
    moestream_status st = add_rule(plan, pattern, place, origin, err);
    free(pattern);
    return st;
}

/* Blocks of the file: the metadata's count or more, since MTP blocks may lie behind it. */
static int count_blocks(const ms_index * index) {
    int n = index->n_layer;
    for (int i = 0; i < index->n_tensors; i++) {
        n = index->tensor[i].layer >= n && index->tensor[i].layer < 100000 ? index->tensor[i].layer + 1 : n;
    }
    return n;
}

static moestream_status add_cpu_layers(moestream_plan * plan, const moestream_params * p, int n_layer, bool * in,
                                       moestream_error * err) {
    int n = p->n_cpu_moe < n_layer ? p->n_cpu_moe : n_layer;
    for (int il = 0; il < n; il++) {
        in[il] = true;
    }
    if (p->n_cpu_moe > n_layer) {
        ms_plan_warn(plan, "n_cpu_moe is %d, the model has %d blocks: all routed experts stay on the CPU", p->n_cpu_moe,
                     n_layer);
    }
    for (size_t i = 0; i < p->n_cpu_moe_layers; i++) {
        int il = p->cpu_moe_layers[i];
        if (il < 0 || il >= n_layer) {
            return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "cpu_moe_layers names block %d, the model has blocks 0 to %d",
                           il, n_layer - 1);
        }
        in[il] = true;
    }
    if (n > 0 && plan->first_moe_layer >= n) {
        ms_plan_warn(plan, "n_cpu_moe = %d moves nothing: the first block with routed experts is %d", p->n_cpu_moe,
                     plan->first_moe_layer);
    }
    return add_blocks(plan, in, n_layer, EXPERTS, "CPU", p->n_cpu_moe_layers > 0 ? "cpu_moe_layers" : "n_cpu_moe", err);
}

/* Dense weights that llama.cpp would leave in CPU memory: all of them without offloading, else those of the blocks before
 * the offloaded ones. Tensors outside the blocks are left alone then: a tied embedding is also the output matrix, which
 * belongs on the device. */
static moestream_status add_dense(moestream_plan * plan, const moestream_params * p, int n_layer, bool * in,
                                  moestream_error * err) {
    if (p->n_gpu_layers == 0) {
        return add_rule(plan, ".", MS_DENSE_NAME, "dense", err);
    }
    int first_on_device = p->n_gpu_layers < 0 ? 0 : plan->index.n_layer + 1 - p->n_gpu_layers;
    for (int il = 0; il < n_layer; il++) {
        in[il] = il < first_on_device;
    }
    return add_blocks(plan, in, n_layer, "", MS_DENSE_NAME, "dense", err);
}

/* ---- the list ---- */

/* A DEFAULT rule keeps tensors from the rules behind it; llama.cpp has no such entry, so those are emitted with a
 * negative look-ahead in front. */
static moestream_status emit(moestream_plan * plan, moestream_error * err) {
    size_t excluded_bytes = 1;
    for (int i = 0; i < plan->n_rules; i++) {
        excluded_bytes += plan->rule[i].kind == MS_PLACE_DEFAULT ? strlen(plan->rule[i].pattern) + 16 : 0;
    }
    char * excluded = ms_calloc(excluded_bytes, 1);
    moestream_status st = excluded != NULL ? MOESTREAM_OK : MOESTREAM_ERR_NOMEM;
    for (int i = 0; st == MOESTREAM_OK && i < plan->n_rules; i++) {
        ms_rule * rule = &plan->rule[i];
        if (rule->kind == MS_PLACE_DEFAULT) {
            size_t len = strlen(excluded);
            snprintf(excluded + len, excluded_bytes - len, "(?!.*(?:%s))", rule->pattern);
            continue;
        }
        size_t room = strlen(excluded) + strlen(rule->pattern) + 32;
        rule->emitted = malloc(room);
        if (rule->emitted == NULL) {
            st = MOESTREAM_ERR_NOMEM;
        } else if (excluded[0] == '\0') {
            snprintf(rule->emitted, room, "%s", rule->pattern);
        } else {
            snprintf(rule->emitted, room, "^(?=.*(?:%s))%s", rule->pattern, excluded);
        }
    }
    free(excluded);
    return st == MOESTREAM_OK ? st : ms_fail(err, st, ENOMEM, "no memory for %d rules", plan->n_rules);
}

static moestream_status add_user_rules(moestream_plan * plan, const moestream_params * p, moestream_error * err) {
    for (size_t i = 0; i < p->n_rules; i++) {
        const moestream_rule * r = &p->rules[i];
        moestream_status st = check_user_pattern(r, (int) i + 1, err);
        if (st == MOESTREAM_OK) {
            st = add_rule(plan, r->pattern, r->place, "rules", err);
        }
        if (st != MOESTREAM_OK) {
            return st;
        }
    }
    return MOESTREAM_OK;
}

/* One less than the library says: its number includes the NULL at the end. */
static int most_rules(const ms_api * api) {
    size_t most = api->llama_max_tensor_buft_overrides != NULL ? api->llama_max_tensor_buft_overrides() : 0;
    return most > 1 && most - 1 < MS_MAX_RULES ? (int) most - 1 : MS_MAX_RULES;
}

moestream_status ms_rules_build(moestream_plan * plan, const moestream_params * p, moestream_error * err) {
    if (p->n_cpu_moe < 0) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "n_cpu_moe is %d, it must be 0 or more", p->n_cpu_moe);
    }
    plan->max_rules = most_rules(plan->api);
    if (p->n_rules > (size_t) plan->max_rules) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "%zu placement rules were given, llama.cpp takes at most %d",
                       p->n_rules, plan->max_rules);
    }
    int n_layer = count_blocks(&plan->index);
    /* our own at most four rules come on top; the list as a whole is still bounded by what llama.cpp takes */
    plan->rule = ms_calloc(p->n_rules + 5 < MS_MAX_RULES ? p->n_rules + 5 : MS_MAX_RULES + 1, sizeof(*plan->rule));
    bool * in = ms_calloc((size_t) n_layer + 1, sizeof(*in));
    moestream_status st = MOESTREAM_OK;
    if (plan->rule == NULL || in == NULL) {
        st = ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for %zu rules", p->n_rules);
    }
    if (st == MOESTREAM_OK) {
        st = add_user_rules(plan, p, err);
    }
    if (st == MOESTREAM_OK && p->cpu_moe) {
        if (p->n_cpu_moe > 0 || p->n_cpu_moe_layers > 0) {
            ms_plan_warn(plan, "cpu_moe and %s were both given: cpu_moe, which covers all blocks, is what counts",
                         p->n_cpu_moe > 0 ? "n_cpu_moe" : "cpu_moe_layers");
        }
        st = add_rule(plan, "\\." EXPERTS, "CPU", "cpu_moe", err);
    } else if (st == MOESTREAM_OK && (p->n_cpu_moe > 0 || p->n_cpu_moe_layers > 0)) {
        st = add_cpu_layers(plan, p, n_layer, in, err);
    }
    if (st == MOESTREAM_OK && plan->streaming) {
        st = add_rule(plan, "^blk\\.\\d+\\." EXPERTS "\\.weight$", "STREAM", "stream", err);
        if (st == MOESTREAM_OK && p->dense == MOESTREAM_DENSE_ANON) {
            memset(in, 0, (size_t) n_layer * sizeof(*in));
            st = add_dense(plan, p, n_layer, in, err);
        }
    }
    free(in);
    return st == MOESTREAM_OK ? emit(plan, err) : st;
}
