/*
 * stream_rig: a small model of known bytes behind the scripted engine, and what an operation does with it. Included after
 * check.h by one file of a test program.
 */
#ifndef MS_TEST_STREAM_RIG_H
#define MS_TEST_STREAM_RIG_H

#include <errno.h>

#include "stream/internal.h"
#include "support/fake_reader.h"
#include "support/read_rig.h"

/* ---- a model of known bytes ---- */

enum { N_LAYERS = 3, N_EXPERTS = 6, N_SLICES = 3, N_USED = 2, N_BANKS = N_LAYERS * N_SLICES };
static const uint64_t SLICE_BYTES[N_SLICES] = {5024, 5024, 8224}; /* not multiples of a page, nor of each other */
static const uint64_t FIRST_OFFSET = 96;

typedef struct rig {
    ms_index index;
    ms_tensor tensor[N_BANKS];
    ms_bank bank[N_BANKS];
    ms_group group[N_LAYERS];
    char * path[1];
    uint64_t file_bytes[1];
    char name[300];
    fake_script script;
    ms_reader * reader;
    ms_stream * stream;
} rig;

static inline moestream_status open_fake(void * user, ms_reader ** out, const ms_reader_options * options,
                                         moestream_error * err) {
    rig * r = user;
    moestream_status st = fake_reader_open(out, options, &r->script, err);
    r->reader = st == MOESTREAM_OK ? *out : NULL;
    return st;
}

static inline bool make_index(rig * r) {
    uint64_t at = FIRST_OFFSET;
    for (int b = 0; b < N_BANKS; b++) {
        int g = b / N_SLICES, k = b % N_SLICES;
        ms_tensor * t = &r->tensor[b];
        snprintf(t->name, sizeof t->name, "blk.%d.slice%d_exps.weight", g, k);
        t->layer = g;
        t->offset = at;
        t->bytes = SLICE_BYTES[k] * N_EXPERTS;
        t->bank = b;
        r->bank[b] = (ms_bank) {
            .tensor = b, .group = g, .slice = k, .n_expert = N_EXPERTS, .offset = at, .slice_bytes = SLICE_BYTES[k]};
        r->group[g] = (ms_group) {.layer = g, .n_expert = N_EXPERTS, .n_slices = N_SLICES};
        at += t->bytes;
    }
    for (int g = 0; g < N_LAYERS; g++) {
        for (int k = 0; k < N_SLICES; k++) {
            r->group[g].bank[k] = g * N_SLICES + k;
        }
    }
    static bool made;
    path_of(r->name, sizeof r->name, "model");
    if (!made && !make_file("model", at, r->name, sizeof r->name)) {
        return false;
    }
    made = true;
    r->path[0] = r->name;
    r->file_bytes[0] = at;
    r->index = (ms_index) {.path = r->path,
                           .file_bytes = r->file_bytes,
                           .n_files = 1,
                           .tensor = r->tensor,
                           .n_tensors = N_BANKS,
                           .bank = r->bank,
                           .n_banks = N_BANKS,
                           .group = r->group,
                           .n_groups = N_LAYERS,
                           .n_layer = N_LAYERS,
                           .n_expert = N_EXPERTS,
                           .n_expert_used = N_USED};
    return true;
}

static inline uint64_t slots_of(const rig * r, int n) {
    ms_stream_sizes z;
    ms_stream_size(&r->index, &z, NULL);
    return z.slot_bytes[0] * (uint64_t) n;
}

/* A stream with `n_slots` slots over the scripted engine; a script of zeros is a good disk. */
static inline bool rig_open(rig * r, int n_slots, const ms_stream_options * more) {
    fake_script script = r->script;
    memset(r, 0, sizeof *r);
    r->script = script;
    if (!make_index(r)) {
        return false;
    }
    ms_stream_options o = {.queue_depth = 8, .direct = MOESTREAM_DIRECT_OFF, .deadline_ns = 200000000};
    o = more != NULL ? *more : o;
    o.cache_bytes = slots_of(r, n_slots);
    o.open_reader = open_fake;
    o.open_reader_user = r;
    moestream_error err = {.struct_size = sizeof err};
    if (ms_stream_open(&r->stream, &r->index, &o, &err) != MOESTREAM_OK) {
        printf("    %s\n", err.message);
        return CHECK(!"the stream opened");
    }
    return true;
}

static inline bool right_slice(const rig * r, int slot, int group, int expert, int slice) {
    const ms_bank * b = &r->bank[r->group[group].bank[slice]];
    return same_bytes(ms_stream_payload(r->stream, slot, slice), b->slice_bytes, ms_bank_offset(b, expert));
}

/* What an operation does: acquire, wait, use, release. Returns how many slices failed; wrong bytes fail the test. */
static inline int use_experts(const rig * r, int group, int slice, const int32_t * experts, int n, bool leader,
                              moestream_error * err) {
    moestream_stats counts = {0};
    int failed = 0, done = 0;
    uint64_t give_up = ms_now_ns() + (uint64_t) PATIENCE_S * 1000000000u;
    while (done < n && ms_now_ns() < give_up) {
        int32_t slots[N_EXPERTS];
        ms_demand d = {.group = group, .slice = slice, .leader = leader, .all_slices = leader};
        int got = ms_stream_acquire(r->stream, &d, experts + done, n - done, slots, &counts);
        for (int i = 0; i < got; i++) {
            while (ms_stream_state(r->stream, slots[i], slice) == MS_READING && ms_now_ns() < give_up) {
                ms_stream_wait(r->stream, slots[i], slice);
            }
            if (ms_stream_state(r->stream, slots[i], slice) == MS_READY &&
                ms_stream_verify(r->stream, slots[i], slice, err) == MOESTREAM_OK) {
                CHECK(right_slice(r, slots[i], group, experts[done + i], slice));
            } else {
                failed++;
                ms_stream_read_error(r->stream, slots[i], slice, err);
            }
        }
        ms_stream_release(r->stream, slice, slots, got);
        done += got;
        if (got == 0) {
            ms_stream_wait_free(r->stream);
        }
    }
    CHECK(done == n);
    return failed;
}

/* One token: every layer, every slice, experts by a small generator. */
static inline int token(const rig * r, check_random * rnd, moestream_error * err) {
    int failed = 0;
    for (int g = 0; g < N_LAYERS; g++) {
        int32_t experts[N_USED];
        experts[0] = (int32_t) check_below(rnd, N_EXPERTS);
        experts[1] = (int32_t) ((unsigned) experts[0] + 1 + check_below(rnd, N_EXPERTS - 1)) % N_EXPERTS;
        for (int k = 0; k < N_SLICES; k++) {
            failed += use_experts(r, g, k, experts, N_USED, k == 0, err);
        }
    }
    return failed;
}

static inline void settle(const rig * r) {
    while (fake_reader_in_flight(r->reader) > 0) {
        ms_stream_poll(r->stream);
    }
    ms_slot_cache_check(&r->stream->cache);
    CHECK(ms_stream_in_use(r->stream) == 0);
}

#endif
