/*
 * The expert index on well-formed and on wrong headers: which tensors are experts, where each slice lies, what goes
 * together, and how a wrong header is named. Hostile bytes are tests/fuzz.
 */
#include "check.h"
#include "fuzz/index_target.h"
#include "support/gguf_maker.h"

typedef struct made {
    gguf_maker m;
    ms_index index;
    moestream_error err;
    moestream_status st;
    char path[64];
} made;

static void begin(made * f, int n_tensors) {
    memset(f, 0, sizeof(*f));
    f->err.struct_size = sizeof(f->err);
    maker_begin(&f->m, 32, 4, (uint64_t) n_tensors);
    maker_key_text(&f->m, "general.architecture", "made");
    maker_key_u32(&f->m, "made.block_count", 12);
    maker_key_u32(&f->m, "made.expert_count", 5);
    maker_key_u32(&f->m, "made.expert_used_count", 2);
}

/* An F32 tensor [8, rows, n]. */
static uint64_t add(made * f, const char * name, int64_t rows, int64_t n) {
    const int64_t ne[] = {8, rows, n};
    return maker_tensor(&f->m, name, 0, 3, ne, (uint64_t) (32 * rows * n));
}

static size_t finish(made * f) {
    size_t data = maker_end(&f->m);
    snprintf(f->path, sizeof(f->path), "/tmp/ms_index_%d.gguf", (int) getpid());
    ms_gguf_api functions = ms_gguf_functions(target_api());
    f->st =
        maker_write(&f->m, f->path) ? ms_index_open(&f->index, &functions, f->path, &f->err) : MOESTREAM_ERR_INTERNAL;
    return data;
}

static void end(made * f) {
    ms_index_close(&f->index);
    maker_free(&f->m);
    unlink(f->path);
}

TEST(only_routed_expert_weights_are_banks) {
    made f;
    begin(&f, 7);
    add(&f, "blk.0.ffn_gate_up_exps.weight", 4, 5);
    add(&f, "blk.10.ffn_down_chexps.weight", 2, 3);
    add(&f, "blk.0.ffn_down_exps.bias", 1, 5);
    add(&f, "blk.0.ffn_down_shexp.weight", 4, 1);
    add(&f, "ffn_down_exps.weight", 4, 5);
    add(&f, "blk.x.ffn_down_exps.weight", 4, 5);
    add(&f, "blk.99999999999999999999.ffn_down_exps.weight", 4, 5);
    finish(&f);
    CHECK(f.st == MOESTREAM_OK);
    CHECK(f.index.n_tensors == 7 && f.index.n_banks == 2);
    CHECK(f.index.n_layer == 12 && f.index.n_expert == 5 && f.index.n_expert_used == 2);
    int at = ms_index_find(&f.index, "blk.10.ffn_down_chexps.weight");
    REQUIRE(at >= 0);
    CHECK(f.index.tensor[at].layer == 10 && f.index.tensor[at].bank >= 0);
    CHECK(ms_index_find(&f.index, "blk.1.ffn_down_chexps.weight") == -1);
    end(&f);
}

TEST(each_slice_lies_behind_the_one_before) {
    made f;
    begin(&f, 2);
    uint64_t first = add(&f, "blk.0.ffn_up_exps.weight", 3, 5), second = add(&f, "blk.0.ffn_down_exps.weight", 7, 5);
    size_t data = finish(&f);
    REQUIRE(f.st == MOESTREAM_OK && f.index.n_banks == 2);
    for (int b = 0; b < 2; b++) {
        uint64_t rows = b == 0 ? 3 : 7;
        for (uint64_t e = 0; e < 5; e++) {
            CHECK(ms_bank_offset(&f.index.bank[b], (int) e) == data + (b == 0 ? first : second) + e * rows * 32);
        }
        CHECK(f.index.bank[b].slice_bytes == rows * 32 && f.index.bank[b].n_expert == 5);
    }
    end(&f);
}

TEST(banks_that_one_choice_selects_are_a_group) {
    made f;
    begin(&f, 6);
    add(&f, "blk.0.ffn_gate_exps.weight", 4, 5);
    add(&f, "blk.1.ffn_gate_exps.weight", 4, 5);
    add(&f, "blk.0.ffn_up_exps.weight", 4, 5);
    add(&f, "blk.0.ffn_up_chexps.weight", 4, 3);
    add(&f, "blk.0.ffn_down_exps.weight", 4, 5);
    add(&f, "blk.1.ffn_down_exps.weight", 4, 6); /* another number of experts cannot share the ids */
    finish(&f);
    REQUIRE(f.st == MOESTREAM_OK && f.index.n_banks == 6);
    bool streamed[6] = {true, true, true, true, true, true};
    ms_index_group(&f.index, streamed);
    CHECK(f.index.n_groups == 4);
    CHECK(f.index.bank[0].group == f.index.bank[2].group && f.index.bank[0].group == f.index.bank[4].group);
    CHECK(f.index.bank[3].group != f.index.bank[0].group && f.index.bank[5].group != f.index.bank[1].group);
    streamed[2] = false;
    ms_index_group(&f.index, streamed);
    CHECK(f.index.bank[2].group == -1 && f.index.group[f.index.bank[0].group].n_slices == 2);
    end(&f);
}

TEST(an_impossible_shape_names_its_tensor) {
    static const int64_t shapes[][3] = {{INT64_MAX, 2, 4}, {8, 0, 4}, {1LL << 31, 1LL << 31, 4}, {-1, 1, 1}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        made f;
        begin(&f, 1);
        maker_tensor(&f.m, "blk.3.ffn_up_exps.weight", 0, 3, shapes[i], 4096);
        finish(&f);
        CHECK(f.st == MOESTREAM_ERR_FORMAT);
        CHECK(strstr(f.err.message, "blk.3.ffn_up_exps.weight") != NULL && strstr(f.err.message, f.path) != NULL);
        end(&f);
    }
}

TEST(a_tensor_behind_the_end_is_named) {
    made f;
    begin(&f, 2);
    add(&f, "blk.0.ffn_up_exps.weight", 4, 5);
    const int64_t ne[] = {8, 1000, 5};
    maker_tensor(&f.m, "blk.0.ffn_down_exps.weight", 0, 3, ne, 64); /* promises 160000 bytes, brings 64 */
    finish(&f);
    CHECK(f.st == MOESTREAM_ERR_EOF || f.st == MOESTREAM_ERR_FORMAT);
    CHECK(strstr(f.err.message, "blk.0.ffn_down_exps.weight") != NULL);
    end(&f);
}

TEST(a_failed_open_leaves_an_empty_index) {
    made f;
    begin(&f, 1);
    const int64_t ne[] = {8, 0, 1};
    maker_tensor(&f.m, "t", 0, 3, ne, 64);
    finish(&f);
    CHECK(f.st != MOESTREAM_OK && f.index.tensor == NULL && f.index.n_files == 0 && f.index.path == NULL);
    end(&f);
}

static const check_test tests[] = {
    LISTED(only_routed_expert_weights_are_banks),      LISTED(each_slice_lies_behind_the_one_before),
    LISTED(banks_that_one_choice_selects_are_a_group), LISTED(an_impossible_shape_names_its_tensor),
    LISTED(a_tensor_behind_the_end_is_named),          LISTED(a_failed_open_leaves_an_empty_index),
};

int main(int argc, char ** argv) {
    return check_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
