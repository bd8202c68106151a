/* stream: a warm start, and real files through the real engines. */
#include "stream/stream.h"

#include "check.h"
#include "support/stream_rig.h"

/* While another thread assigns some. */
static int slots_used(const rig * r) {
    pthread_mutex_lock(&r->stream->lock);
    int n = r->stream->cache.used;
    pthread_mutex_unlock(&r->stream->lock);
    return n;
}

TEST(a_warm_start_fills_free_slots_and_evicts_nothing) {
    rig r = {.script = {.seed = 3, .reorder = true, .delay_turns = 3}};
    REQUIRE(rig_open(&r, 6, NULL));
    moestream_error err = {.struct_size = sizeof err};
    int32_t used[N_USED] = {1, 4};
    CHECK(use_experts(&r, 0, 0, used, N_USED, true, &err) == 0);
    settle(&r);
    /* out of range, there already, four that fit, and one more */
    ms_hot list[] = {{.group = 9},
                     {.group = 1, .expert = 99},
                     {.group = 0, .expert = 4},
                     {.group = 1, .expert = 0},
                     {.group = 1, .expert = 5},
                     {.group = 2, .expert = 3},
                     {.group = 2, .expert = 2},
                     {.group = 2}};
    CHECK(ms_stream_warm(r.stream, list, sizeof list / sizeof list[0], &err) == MOESTREAM_OK);
    uint64_t give_up = ms_now_ns() + (uint64_t) PATIENCE_S * 1000000000u;
    while (slots_used(&r) < 6 && ms_now_ns() < give_up) {
        ms_stream_poll(r.stream); /* the thread collects, too; the scripted engine takes turns */
    }
    ms_stream_warm_stop(r.stream);
    settle(&r);
    CHECK(r.stream->cache.n_evictions == 0);
    ms_hot hot[8];
    REQUIRE(ms_stream_hot(r.stream, hot, 8) == 6);
    int n_used = 0;
    for (int i = 0; i < 6; i++) {
        n_used += hot[i].group == 0;
        CHECK(i == 0 || hot[i - 1].used_at >= hot[i].used_at);
    }
    CHECK(n_used == N_USED);
    int32_t warm = 5;
    uint64_t before = fake_reader_submitted(r.reader);
    CHECK(use_experts(&r, 1, 0, &warm, 1, true, &err) == 0);
    CHECK(fake_reader_submitted(r.reader) == before);
    settle(&r);
    ms_stream_close(r.stream);
}

/* The real engines on whatever file system TMPDIR is: tests/system/test_file_systems.py names several. */
TEST(every_slice_of_a_real_file_is_read_right) {
    const int engines[] = {MOESTREAM_IO_AUTO, MOESTREAM_IO_PREAD},
              direct[] = {MOESTREAM_DIRECT_AUTO, MOESTREAM_DIRECT_OFF};
    for (int i = 0; i < 4; i++) {
        rig r;
        memset(&r, 0, sizeof r);
        REQUIRE(make_index(&r));
        moestream_error err = {.struct_size = sizeof err};
        ms_stream_options o = {.cache_bytes = slots_of(&r, 2 * N_USED),
                               .io = engines[i / 2],
                               .direct = direct[i % 2],
                               .queue_depth = 4,
                               .n_readers = 2,
                               .verify = true,
                               .deadline_ns = 10000000000u};
        if (ms_stream_open(&r.stream, &r.index, &o, &err) != MOESTREAM_OK) {
            printf("    %s\n", err.message);
            CHECK(!"the stream opened");
            return;
        }
        for (int b = 0; b < N_BANKS; b++) {
            for (int32_t expert = N_EXPERTS - 1; expert >= 0; expert--) {
                CHECK(use_experts(&r, b / N_SLICES, b % N_SLICES, &expert, 1, b % N_SLICES == 0, &err) == 0);
            }
        }
        ms_stream_close(r.stream);
    }
}

static const check_test tests[] = {
    LISTED(a_warm_start_fills_free_slots_and_evicts_nothing),
    LISTED(every_slice_of_a_real_file_is_read_right),
};

int main(int argc, char ** argv) {
    return rig_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
