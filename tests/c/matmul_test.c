/*
 * Expert memory met by graphs of our own, without a model: the expert matmul against the stock kernel, ids out of
 * range, operations that are not MUL_MAT_ID, and what the slots hold against the file (CASES S2, S10, S11).
 */
#include <limits.h>

#include "check.h"
#include "support/expert_rig.h"

TEST(strided_ids_give_the_stock_kernels_bits) {
    static const int tokens[] = {1, 2, 7, 8, 9, 64}, used[] = {1, N_USED, N_EXPERT};
    for (int io = MOESTREAM_IO_AUTO; io <= MOESTREAM_IO_PREAD; io += MOESTREAM_IO_PREAD) {
        rig r;
        REQUIRE(rig_open(&r, io, io == MOESTREAM_IO_PREAD));
        for (int bank = 0; bank < 2 * N_TYPES; bank++) {
            for (int i = 0; i < 18; i++) {
                int k = used[i % 3], n_tokens = tokens[i / 3];
                CHECK(agrees(&r, bank, k, bank % 2 == 0 ? 1 : k, n_tokens, 1 + i % 2));
            }
        }
        CHECK(totals(&r).n_evictions > 0 || io == MOESTREAM_IO_PREAD);
        CHECK(totals(&r).n_fallback_tensors == 0);
        rig_close(&r);
    }
}

TEST(an_id_out_of_range_is_an_error_and_reads_nothing) {
    static const int32_t wrong[] = {-1, N_EXPERT, INT_MAX, INT_MIN};
    rig r;
    REQUIRE(rig_open(&r, MOESTREAM_IO_AUTO, false));
    for (int i = 0; i < 12; i++) {
        int n_tokens = i % 3 == 0 ? 1 : i % 3 == 1 ? 7 : 40;
        struct ggml_context * ctx = room();
        struct ggml_tensor *x = make_input(ctx, 1, n_tokens, 5), *ids = make_ids(ctx, N_USED, n_tokens, 6);
        ((int32_t *) ids->data)[(n_tokens - 1) * N_EXPERT + N_USED - 1] = wrong[i / 3];
        struct ggml_tensor * out = api->ggml_mul_mat_id(ctx, r.bank[i % 8], x, ids);
        memset(out->data, 0xee, api->ggml_nbytes(out));
        uint64_t before = totals(&r).n_reads;
        run(ctx, out, &r, 1 + i % 2, &out, 1);
        moestream_error err = {.struct_size = sizeof(err)};
        CHECK(moestream_context_status(r.hook, &err) == MOESTREAM_ERR_INVALID);
        char number[24];
        snprintf(number, sizeof(number), "expert %d,", (int) wrong[i / 3]);
        CHECK(strstr(err.message, number) != NULL);
        CHECK(totals(&r).n_reads == before);
        for (size_t b = 0; b < api->ggml_nbytes(out); b++) {
            if (((uint8_t *) out->data)[b] != 0) {
                CHECK(!"the result of a failed operation is zero");
                break;
            }
        }
        api->ggml_free(ctx);
        CHECK(agrees(&r, i % 8, N_USED, 1, 7, 2)); /* the next call is right again */
    }
    rig_close(&r);
}

TEST(each_slice_is_read_at_most_once_per_operation) {
    rig r;
    REQUIRE(rig_open(&r, MOESTREAM_IO_AUTO, false));
    for (int bank = 0; bank < 2 * N_TYPES; bank++) {
        uint64_t before = totals(&r).n_reads;
        CHECK(agrees(&r, bank, N_USED, 1, MAX_TOKENS, 2));
        CHECK(totals(&r).n_reads - before <= N_EXPERT);
    }
    rig_close(&r);
}

TEST(the_gap_between_layers_is_known_and_is_that_of_as_many_tokens) {
    rig r;
    REQUIRE(rig_open(&r, MOESTREAM_IO_AUTO, false));
    CHECK(agrees(&r, 0, N_USED, 1, 1, 2) && r.hook->left_ns == 0); /* one of the layer's two operations */
    CHECK(agrees(&r, 1, N_USED, N_USED, 1, 2) && r.hook->left_ns > 0 && r.hook->gap_ns == 0);
    CHECK(agrees(&r, 2, N_USED, 1, 1, 2) && r.hook->gap_ns > 0);
    uint64_t gap = r.hook->gap_ns;
    CHECK(agrees(&r, 3, N_USED, N_USED, 1, 2) && agrees(&r, 0, N_USED, 1, 1, 2));
    CHECK(r.hook->gap_ns == gap); /* from the last layer to the first one: not a gap */
    CHECK(agrees(&r, 1, N_USED, N_USED, 40, 2) && agrees(&r, 2, N_USED, 1, 40, 2) && r.hook->gap_ns == 0);
    rig_close(&r);
}

/* ---- operations that are not streamed ---- */

TEST(another_operation_reads_the_tensor_whole_and_once) {
    rig r;
    REQUIRE(rig_open(&r, MOESTREAM_IO_AUTO, false));
    for (int round = 0; round < 2; round++) {
        struct ggml_context * ctx = room();
        struct ggml_tensor * w = r.bank[1];
        struct ggml_tensor * copy = fn.cont(ctx, w);
        struct ggml_tensor * sum = fn.add(ctx, copy, w);
        struct ggml_tensor * nodes[] = {copy, sum};
        CHECK(run(ctx, sum, &r, 2, nodes, 2) == GGML_STATUS_SUCCESS);
        const float * from = (const float *) (file.bytes + bank_at[1]);
        CHECK(memcmp(copy->data, from, bank_bytes[1]) == 0);
        CHECK(((const float *) sum->data)[4711] == 2 * from[4711]);
        CHECK(totals(&r).n_fallback_tensors == 1);
        api->ggml_free(ctx);
    }
    CHECK(agrees(&r, 1, N_USED, 1, 7, 2)); /* its experts go on to be streamed */
    rig_close(&r);
}

TEST(a_plain_matmul_with_one_expert_is_right) {
    rig r;
    REQUIRE(rig_open(&r, MOESTREAM_IO_AUTO, false));
    for (int bank = 0; bank < 2 * N_TYPES; bank += 2) {
        struct ggml_context * ctx = room();
        struct ggml_tensor *x = make_input(ctx, 1, 5, 9), *flat = fn.view_2d(ctx, x, K, 5, x->nb[2], 0);
        struct ggml_tensor * plain = plain_bank(ctx, bank);
        struct ggml_tensor * one = fn.view_2d(ctx, plain, K, M, plain->nb[1], 3 * plain->nb[2]);
        struct ggml_tensor * stock = fn.mul_mat(ctx, one, flat);
        struct ggml_tensor * part = fn.view_2d(ctx, r.bank[bank], K, M, plain->nb[1], 3 * plain->nb[2]);
        fn.view_init(part); /* ggml's allocator does this for a scheduled graph */
        struct ggml_tensor * ours = fn.mul_mat(ctx, part, flat);
        struct ggml_tensor * nodes[] = {part, ours};
        CHECK(run(ctx, stock, NULL, 2, NULL, 0) == GGML_STATUS_SUCCESS);
        CHECK(run(ctx, ours, &r, 2, nodes, 2) == GGML_STATUS_SUCCESS);
        CHECK(same(stock, ours));
        api->ggml_free(ctx);
    }
    CHECK(totals(&r).n_fallback_tensors == N_TYPES);
    rig_close(&r);
}

TEST(experts_chosen_from_a_view_fall_back_and_are_right) {
    rig r;
    REQUIRE(rig_open(&r, MOESTREAM_IO_AUTO, false));
    struct ggml_context * ctx = room();
    struct ggml_tensor *x = make_input(ctx, 1, 9, 11), *ids = make_ids(ctx, N_USED, 9, 12);
    for (int i = 0; i < 9 * N_EXPERT; i++) {
        ((int32_t *) ids->data)[i] %= N_EXPERT / 2;
    }
    struct ggml_tensor * plain = plain_bank(ctx, 4);
    struct ggml_tensor * half =
        fn.view_3d(ctx, plain, K, M, N_EXPERT / 2, plain->nb[1], plain->nb[2], 8 * plain->nb[2]);
    struct ggml_tensor * part =
        fn.view_3d(ctx, r.bank[4], K, M, N_EXPERT / 2, plain->nb[1], plain->nb[2], 8 * plain->nb[2]);
    fn.view_init(part);
    struct ggml_tensor *stock = api->ggml_mul_mat_id(ctx, half, x, ids),
                       *ours = api->ggml_mul_mat_id(ctx, part, x, ids);
    struct ggml_tensor * nodes[] = {part, ours};
    CHECK(run(ctx, stock, NULL, 1, NULL, 0) == GGML_STATUS_SUCCESS);
    CHECK(run(ctx, ours, &r, 1, nodes, 2) == GGML_STATUS_SUCCESS);
    CHECK(same(stock, ours));
    CHECK(totals(&r).n_fallback_tensors == 1);
    api->ggml_free(ctx);
    rig_close(&r);
}

/* ---- bytes ---- */

TEST(every_slot_holds_the_bytes_of_the_file) {
    for (int io = MOESTREAM_IO_AUTO; io <= MOESTREAM_IO_PREAD; io += MOESTREAM_IO_PREAD) {
        rig r;
        REQUIRE(rig_open(&r, io, false));
        ms_stream * stream = r.ms->stream;
        for (int bank = 0; bank < 2 * N_TYPES; bank++) {
            int at = ms_index_find(&r.ms->plan->index, r.bank[bank]->name);
            REQUIRE(at >= 0);
            const ms_bank * b = &r.ms->plan->index.bank[r.ms->plan->index.tensor[at].bank];
            for (int32_t expert = N_EXPERT - 1; expert >= 0; expert--) {
                ms_demand demand = {.group = b->group, .slice = b->slice, .leader = true};
                moestream_stats counts = {.struct_size = sizeof(counts)};
                int32_t slot = -1;
                REQUIRE(ms_stream_acquire(stream, &demand, &expert, 1, &slot, &counts) == 1);
                while (ms_stream_state(stream, slot, b->slice) == MS_READING) {
                    ms_stream_wait(stream, slot, b->slice);
                }
                CHECK(ms_stream_state(stream, slot, b->slice) == MS_READY);
                CHECK(memcmp(ms_stream_payload(stream, slot, b->slice),
                             file.bytes + bank_at[bank] + (size_t) expert * b->slice_bytes, b->slice_bytes) == 0);
                ms_stream_release(stream, b->slice, &slot, 1);
            }
        }
        CHECK(totals(&r).n_evictions > 0);
        rig_close(&r);
    }
}

TEST(asking_ggml_for_a_tensor_gives_the_bytes_of_the_file) {
    rig r;
    REQUIRE(rig_open(&r, MOESTREAM_IO_AUTO, false));
    for (int bank = 0; bank < 2 * N_TYPES; bank++) {
        uint8_t * got = calloc(1, bank_bytes[bank]);
        fn.get(r.bank[bank], got, 0, bank_bytes[bank]);
        CHECK(memcmp(got, file.bytes + bank_at[bank], bank_bytes[bank]) == 0);
        memset(got, 0, bank_bytes[bank]);
        fn.get(r.bank[bank], got, 1234, 777);
        CHECK(memcmp(got, file.bytes + bank_at[bank] + 1234, 777) == 0);
        free(got);
    }
    CHECK(totals(&r).n_fallback_tensors == 0);
    rig_close(&r);
}

static const check_test tests[] = {
    LISTED(strided_ids_give_the_stock_kernels_bits),
    LISTED(an_id_out_of_range_is_an_error_and_reads_nothing),
    LISTED(the_gap_between_layers_is_known_and_is_that_of_as_many_tokens),
    LISTED(each_slice_is_read_at_most_once_per_operation),
    LISTED(another_operation_reads_the_tensor_whole_and_once),
    LISTED(a_plain_matmul_with_one_expert_is_right),
    LISTED(experts_chosen_from_a_view_fall_back_and_are_right),
    LISTED(every_slot_holds_the_bytes_of_the_file),
    LISTED(asking_ggml_for_a_tensor_gives_the_bytes_of_the_file),
};

int main(int argc, char ** argv) {
    return rig_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
