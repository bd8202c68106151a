/*
 * ggml/plan: the one rule list of a model and what it decides for each tensor, from the GGUF header alone.
 * Guarantees: the rules that llama.cpp will be given decide exactly what the plan says: the same engine, the same order,
 * first match wins; strings are ours, the list is bounded and always ends.
 * Never reads weights, never opens devices.
 */
#ifndef MS_PLAN_H
#define MS_PLAN_H

#include "ggml/api.h"
#include "ggml/cxx.h"
#include "gguf/expert_index.h"
#include "stream/stream.h"

typedef enum ms_place_kind {
    MS_PLACE_DEFAULT = 0, /* llama.cpp decides */
    MS_PLACE_BUFT,        /* a buffer type of ggml */
    MS_PLACE_STREAM,      /* ours: experts */
    MS_PLACE_DENSE        /* ours: anonymous memory for dense weights */
} ms_place_kind;

typedef struct ms_rule {
    char * pattern;     /* as the user wrote it, or generated */
    char * emitted;     /* as llama.cpp gets it: with the tensors of earlier DEFAULT rules excluded */
    char place[288];        /* "RPC0[host:port]" is as long as a host's name may be */
    ms_place_kind kind;
    ggml_backend_buffer_type_t buft; /* MS_PLACE_BUFT */
    const char * origin;
    ms_regex * regex;
    int n_matched;
    uint64_t bytes;
} ms_rule;

enum { MS_MAX_RULES = 4095, MS_MAX_WARNINGS = 64 };

struct moestream_plan {
    const ms_api * api;
    ms_index index;
    ms_rule * rule;
    int n_rules;
    int max_rules;
    int * tensor_rule;      /* [n_tensors], -1: none */
    char * warning[MS_MAX_WARNINGS];
    int n_warnings;
    ms_stream_sizes sizes;  /* of the groups that stream */
    uint64_t expert_bytes, dense_bytes, stream_bytes;
    int first_moe_layer;
    bool streaming;
    int n_cpu_moe;
};

moestream_status ms_plan_open(moestream_plan ** out, const ms_api * api, const char * path,
                              const moestream_params * params, moestream_error * err);
void ms_plan_close(moestream_plan * plan);

static inline ms_place_kind ms_plan_kind(const moestream_plan * plan, int tensor) {
    int r = plan->tensor_rule[tensor];
    return r < 0 ? MS_PLACE_DEFAULT : plan->rule[r].kind;
}

/* rules.c: fills plan->rule from the options; validates patterns and places. */
moestream_status ms_rules_build(moestream_plan * plan, const moestream_params * params, moestream_error * err);

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void ms_plan_warn(moestream_plan * plan, const char * format, ...);

/* What the buffer types of ours are called. */
#define MS_STREAM_NAME "MOESTREAM"
#define MS_DENSE_NAME "MOESTREAM_ANON"

#endif
