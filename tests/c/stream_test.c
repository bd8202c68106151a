/*
 * stream: demands against a scripted reader. What is handed out is the file's bytes or a failure that says why, for
 * every read that can fail, in any order of completion, from several threads, and while the cache changes its size.
 */
#include "stream/stream.h"

#include <errno.h>
#include <pthread.h>

#include "check.h"
#include "support/stream_rig.h"

/* ---- the rules ---- */

TEST(slices_are_the_files_bytes_in_any_order_of_completion) {
    for (uint64_t seed = 1; seed <= 20; seed++) {
        rig r = {
            .script = {.seed = seed, .reorder = true, .delay_turns = 5, .short_percent = 30, .interrupt_percent = 20}};
        if (!rig_open(&r, 2 * N_USED + (int) (seed % 9), NULL)) {
            return;
        }
        check_random rnd = {seed};
        moestream_error err = {.struct_size = sizeof err};
        for (int i = 0; i < 20; i++) {
            CHECK(token(&r, &rnd, &err) == 0);
        }
        settle(&r);
        ms_stream_close(r.stream);
    }
}

/* Every k of a run, and what it says. A transient failure may be repaired by a later demand. */
static void fail_every_read(int count) {
    rig r = {.script = {.seed = 7}};
    REQUIRE(rig_open(&r, 6, NULL));
    moestream_error err = {.struct_size = sizeof err};
    check_random rnd = {5};
    for (int i = 0; i < 20; i++) {
        CHECK(token(&r, &rnd, &err) == 0);
    }
    uint64_t total = fake_reader_submitted(r.reader);
    ms_stream_close(r.stream);
    CHECK(total > 60);
    int n_said = 0;
    for (uint64_t k = 0; k < total; k++) {
        r.script = (fake_script) {
            .seed = k, .fail_at = k, .fail_count = count, .fail_errno = EIO, .reorder = true, .delay_turns = 2};
        REQUIRE(rig_open(&r, 6, NULL));
        rnd = (check_random) {5};
        memset(&err, 0, sizeof err);
        int failed = 0;
        for (int i = 0; i < 20; i++) {
            failed += token(&r, &rnd, &err);
        }
        if (failed > 0) {
            n_said++;
            CHECK(err.status == MOESTREAM_ERR_IO && err.os_errno == EIO && strstr(err.message, "model") != NULL &&
                  strstr(err.message, "offset") != NULL);
        }
        fake_reader_heal(r.reader);
        for (int i = 0; i < 3; i++) {
            token(&r, &rnd, &err); /* what was read ahead of its use may still say so */
        }
        CHECK(token(&r, &rnd, &err) == 0);
        settle(&r);
        ms_stream_close(r.stream);
    }
    CHECK(count == 1 ? n_said > 0 : n_said > (int) total / 2);
}

TEST(a_read_that_fails_once_is_reported_or_repaired_for_every_read_of_a_run) {
    fail_every_read(1);
}

TEST(reads_that_fail_for_ever_are_reported_from_any_read_on) {
    fail_every_read(FAKE_FOR_EVER);
}

TEST(a_second_demand_joins_the_read_in_flight) {
    rig r = {.script = {.seed = 1}};
    REQUIRE(rig_open(&r, 8, NULL));
    moestream_stats counts = {0};
    int32_t expert = 3, a, b;
    fake_reader_hold(r.reader, true);
    ms_demand d = {.group = 1, .slice = 0, .leader = true};
    CHECK(ms_stream_acquire(r.stream, &d, &expert, 1, &a, &counts) == 1);
    CHECK(ms_stream_acquire(r.stream, &d, &expert, 1, &b, &counts) == 1);
    CHECK(a == b && fake_reader_submitted(r.reader) == 1 && counts.n_coalesced == 1);
    fake_reader_hold(r.reader, false);
    while (ms_stream_state(r.stream, a, 0) == MS_READING) {
        ms_stream_wait(r.stream, a, 0);
    }
    CHECK(right_slice(&r, a, 1, 3, 0));
    ms_stream_release(r.stream, 0, &a, 1);
    ms_stream_release(r.stream, 0, &b, 1);
    settle(&r);
    ms_stream_close(r.stream);
}

TEST(nothing_is_published_before_its_bytes_are_there) {
    rig r = {.script = {.seed = 1}};
    REQUIRE(rig_open(&r, 8, NULL));
    moestream_stats counts = {0};
    int32_t experts[2] = {0, 1}, slots[2];
    fake_reader_hold(r.reader, true);
    ms_demand d = {.group = 0, .slice = 0, .leader = true, .all_slices = true};
    CHECK(ms_stream_acquire(r.stream, &d, experts, 2, slots, &counts) == 2);
    for (int k = 0; k < N_SLICES; k++) {
        ms_stream_poll(r.stream);
        CHECK(ms_stream_state(r.stream, slots[0], k) == MS_READING &&
              ms_stream_state(r.stream, slots[1], k) == MS_READING);
    }
    fake_reader_hold(r.reader, false);
    while (fake_reader_in_flight(r.reader) > 0) {
        ms_stream_poll(r.stream);
    }
    CHECK(ms_stream_state(r.stream, slots[0], 0) == MS_READY);
    ms_stream_release(r.stream, 0, slots, 2);
    ms_stream_close(r.stream);
}

TEST(leased_slots_keep_their_bytes_when_all_others_are_used_up) {
    rig r = {.script = {.seed = 1}};
    REQUIRE(rig_open(&r, 2 * N_USED, NULL));
    moestream_stats counts = {0};
    moestream_error err = {.struct_size = sizeof err};
    int32_t held[2] = {0, 1}, slots[2], rest[3] = {2, 3, 4}, got[3];
    ms_demand d = {.group = 0, .slice = 0, .leader = true};
    CHECK(ms_stream_acquire(r.stream, &d, held, 2, slots, &counts) == 2);
    while (fake_reader_in_flight(r.reader) > 0) {
        ms_stream_poll(r.stream);
    }
    for (int i = 0; i < 50; i++) {
        int32_t expert = 2 + i % 4;
        CHECK(use_experts(&r, 0, 0, &expert, 1, false, &err) == 0);
        CHECK(right_slice(&r, slots[0], 0, 0, 0) && right_slice(&r, slots[1], 0, 1, 0));
    }
    /* two are free: the third waits for its turn */
    CHECK(ms_stream_acquire(r.stream, &d, rest, 3, got, &counts) == 2);
    CHECK(!ms_stream_fits(r.stream, 0, 1));
    ms_stream_release(r.stream, 0, got, 2);
    ms_stream_release(r.stream, 0, slots, 2);
    settle(&r);
    ms_stream_close(r.stream);
}

TEST(a_slot_given_to_another_expert_holds_the_other_experts_bytes) {
    rig r = {.script = {.seed = 3}};
    REQUIRE(rig_open(&r, 2 * N_USED, NULL));
    moestream_error err = {.struct_size = sizeof err};
    for (int round = 0; round < 4; round++) {
        for (int g = 0; g < N_LAYERS; g++) {
            for (int32_t e = 0; e < N_EXPERTS; e++) {
                CHECK(use_experts(&r, g, round % N_SLICES, &e, 1, true, &err) == 0);
            }
        }
    }
    ms_stream_close(r.stream);
}

TEST(verify_names_layer_expert_and_slice_of_changed_bytes) {
    ms_stream_options o = {.queue_depth = 8, .direct = MOESTREAM_DIRECT_OFF, .verify = true};
    rig r = {.script = {.seed = 1}};
    REQUIRE(rig_open(&r, 8, &o));
    moestream_error err = {.struct_size = sizeof err};
    int32_t expert = 4;
    CHECK(use_experts(&r, 2, 1, &expert, 1, true, &err) == 0);
    int slot = ms_slot_find(&r.stream->cache, 2, 4);
    REQUIRE(slot >= 0);
    uint8_t * byte = (uint8_t *) (uintptr_t) ms_stream_payload(r.stream, slot, 1) + 5023;
    *byte ^= 1;
    CHECK(use_experts(&r, 2, 1, &expert, 1, false, &err) == 1);
    CHECK(err.status == MOESTREAM_ERR_CORRUPT && strstr(err.message, "expert 4") && strstr(err.message, "layer 2") &&
          strstr(err.message, "slice 1"));
    *byte ^= 1;
    CHECK(use_experts(&r, 2, 1, &expert, 1, false, &err) == 0);
    settle(&r);
    ms_stream_close(r.stream);
    /* and on the way in: a read that differs from the first one */
    r.script = (fake_script) {.seed = 2, .corrupt_at = 3, .corrupt_count = 1};
    REQUIRE(rig_open(&r, 2 * N_USED, &o));
    int failed = 0;
    for (int32_t e = 0; e < 12; e++) {
        int32_t which = e % N_EXPERTS;
        CHECK(use_experts(&r, 0, 0, &which, 1, false, &err) == 0 || ++failed > 0);
        if (failed > 0) {
            break;
        }
    }
    ms_stream_close(r.stream);
}

/* ---- resize and stalls ---- */

TEST(resize_keeps_what_it_says_and_refuses_while_slots_are_used) {
    rig r = {.script = {.seed = 1, .delay_turns = 4, .reorder = true}};
    REQUIRE(rig_open(&r, 6, NULL));
    moestream_error err = {.struct_size = sizeof err};
    moestream_stats counts = {0}, stats;
    check_random rnd = {11};
    for (int i = 0; i < 60; i++) {
        int n = 2 * N_USED + (int) check_below(&rnd, 14);
        CHECK(ms_stream_resize(r.stream, slots_of(&r, n), &err) == MOESTREAM_OK);
        ms_stream_get_stats(r.stream, &stats);
        CHECK(stats.n_slots == (uint64_t) n);
        CHECK(token(&r, &rnd, &err) == 0);
    }
    int32_t expert = 0, slot;
    ms_demand d = {.group = 0, .slice = 0};
    CHECK(ms_stream_acquire(r.stream, &d, &expert, 1, &slot, &counts) == 1);
    CHECK(ms_stream_resize(r.stream, slots_of(&r, 8), &err) == MOESTREAM_ERR_BUSY);
    CHECK(ms_stream_resize(r.stream, slots_of(&r, 1), &err) == MOESTREAM_ERR_NOMEM);
    CHECK(ms_stream_resize(r.stream, UINT64_MAX, &err) == MOESTREAM_ERR_BUSY); /* cut to all experts */
    ms_stream_release(r.stream, 0, &slot, 1);
    settle(&r);
    CHECK(ms_stream_resize(r.stream, slots_of(&r, 4), &err) == MOESTREAM_OK && token(&r, &rnd, &err) == 0);
    settle(&r);
    ms_stream_close(r.stream);
}

/* Another length, and back, so that only the time of modification tells. */
static void touch_file(const rig * r) {
    struct stat st;
    CHECK(stat(r->path[0], &st) == 0 && truncate(r->path[0], st.st_size + 1) == 0 &&
          truncate(r->path[0], st.st_size) == 0);
}

TEST(bytes_of_a_file_that_was_written_to_are_not_used) {
    rig r = {.script = {.seed = 1}};
    REQUIRE(rig_open(&r, 2 * N_USED, NULL));
    moestream_error err = {.struct_size = sizeof err};
    int32_t experts[2] = {0, 1};
    CHECK(ms_stream_check_files(r.stream, &err) == MOESTREAM_OK);
    CHECK(use_experts(&r, 0, 0, experts, 2, true, &err) == 0);
    settle(&r);
    touch_file(&r);
    CHECK(use_experts(&r, 0, 0, experts, 2, true, &err) == 0); /* what is here was read before */
    CHECK(use_experts(&r, 1, 0, experts, 2, true, &err) == 2);
    CHECK(err.status == MOESTREAM_ERR_IO && err.os_errno == ESTALE && strstr(err.message, "written to") != NULL);
    uint8_t byte;
    CHECK(ms_stream_read_range(r.stream, 0, 5, 1, &byte, false, &err) == MOESTREAM_ERR_IO && err.os_errno == ESTALE);
    CHECK(ms_stream_check_files(r.stream, &err) == MOESTREAM_ERR_IO && err.os_errno == ESTALE);
    settle(&r);
    ms_stream_close(r.stream);
}

TEST(a_file_written_to_between_its_header_and_its_opening_is_refused) {
    rig r = {.script = {.seed = 1}};
    REQUIRE(rig_open(&r, 4, NULL));
    ms_file_id id = r.stream->file[0].id;
    ms_stream_close(r.stream);
    r.index.file_id = &id;
    ms_stream_options o = {.queue_depth = 8, .cache_bytes = slots_of(&r, 4), .open_reader = open_fake};
    o.open_reader_user = &r;
    moestream_error err = {.struct_size = sizeof err};
    REQUIRE(ms_stream_open(&r.stream, &r.index, &o, &err) == MOESTREAM_OK);
    ms_stream_close(r.stream);
    touch_file(&r);
    CHECK(ms_stream_open(&r.stream, &r.index, &o, &err) == MOESTREAM_ERR_IO && err.os_errno == ESTALE);
}

TEST(a_read_that_does_not_end_is_busy_for_resize_and_has_an_age) {
    rig r = {.script = {.seed = 1}};
    REQUIRE(rig_open(&r, 6, NULL)); /* deadline 0.2 s */
    moestream_error err = {.struct_size = sizeof err};
    moestream_stats counts = {0};
    int32_t expert = 0, slot;
    ms_demand d = {.group = 0, .slice = 0};
    fake_reader_hold(r.reader, true);
    CHECK(ms_stream_acquire(r.stream, &d, &expert, 1, &slot, &counts) == 1);
    ms_stream_wait(r.stream, slot, 0);
    CHECK(ms_stream_read_age(r.stream, slot, 0) > 1000000 && ms_stream_read_age(r.stream, slot, 1) == 0);
    ms_stream_release(r.stream, 0, &slot, 1);
    CHECK(ms_stream_resize(r.stream, slots_of(&r, 8), &err) == MOESTREAM_ERR_BUSY &&
          strstr(err.message, "did not end") != NULL);
    fake_reader_hold(r.reader, false);
    CHECK(ms_stream_resize(r.stream, slots_of(&r, 8), &err) == MOESTREAM_OK);
    CHECK(use_experts(&r, 0, 0, &expert, 1, true, &err) == 0);
    CHECK(ms_stream_read_age(r.stream, slot, 0) == 0);
    settle(&r);
    ms_stream_close(r.stream);
}

TEST(slow_reads_are_warned_of_once) {
    rig r = {.script = {.seed = 1}};
    REQUIRE(rig_open(&r, 6, NULL));
    moestream_error err = {.struct_size = sizeof err};
    check_random rnd = {1};
    CHECK(token(&r, &rnd, &err) == 0);
    log_says("");
    for (int i = 0; i < 100; i++) { /* held for 25 ms each */
        moestream_stats counts = {0};
        const struct timespec pause = {0, 25000000};
        int32_t expert = (int32_t) (i % N_EXPERTS), slot;
        ms_demand d = {.group = i / N_EXPERTS % N_LAYERS, .slice = 0};
        fake_reader_hold(r.reader, true);
        CHECK(ms_stream_acquire(r.stream, &d, &expert, 1, &slot, &counts) == 1);
        nanosleep(&pause, NULL);
        fake_reader_hold(r.reader, false);
        ms_stream_poll(r.stream);
        ms_stream_release(r.stream, 0, &slot, 1);
    }
    moestream_log_line line = {.struct_size = sizeof line};
    int n = 0;
    while (ms_log_take(&line)) {
        n += strstr(line.text, "slow storage") != NULL && strstr(line.text, "tokens/s") != NULL && line.repeats == 0;
    }
    CHECK(n == 1);
    settle(&r);
    ms_stream_close(r.stream);
}

/* ---- threads ---- */

typedef struct worker {
    const rig * r;
    uint64_t seed;
    int n_failed;
} worker;

static void * work_thread(void * arg) {
    worker * w = arg;
    check_random rnd = {w->seed};
    moestream_error err = {.struct_size = sizeof err};
    for (int i = 0; i < 60; i++) {
        w->n_failed += token(w->r, &rnd, &err);
    }
    return NULL;
}

TEST(several_contexts_share_a_minimal_cache_while_it_is_resized) {
    rig r = {.script = {.seed = 9, .reorder = true, .delay_turns = 3, .short_percent = 10}};
    REQUIRE(rig_open(&r, 2 * N_USED, NULL));
    worker w[3];
    pthread_t thread[3];
    for (int i = 0; i < 3; i++) {
        w[i] = (worker) {&r, 100 + (uint64_t) i, 0};
        REQUIRE(pthread_create(&thread[i], NULL, work_thread, &w[i]) == 0);
    }
    moestream_error err = {.struct_size = sizeof err};
    for (int i = 0; i < 50; i++) {
        moestream_status st = ms_stream_resize(r.stream, slots_of(&r, 2 * N_USED + i % 10), &err);
        CHECK(st == MOESTREAM_OK || st == MOESTREAM_ERR_BUSY);
        moestream_stats stats;
        ms_stream_get_stats(r.stream, &stats);
        ms_stream_idle(r.stream);
        const struct timespec pause = {0, 300000};
        nanosleep(&pause, NULL);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(thread[i], NULL);
        CHECK(w[i].n_failed == 0);
    }
    settle(&r);
    ms_stream_close(r.stream);
}

/* Two contexts in one layer, in step: what is learnt of the order must stay a permutation, or a guess is counted twice and
 * a resize waits for ever. */
TEST(contexts_in_one_layer_leave_the_order_of_use_a_permutation) {
    rig r;
    memset(&r, 0, sizeof r);
    REQUIRE(rig_open(&r, N_EXPERTS, NULL));
    int32_t expert = 0, slot, guesses[2] = {3, 4};
    moestream_stats counts = {0};
    const int slices[] = {2, 2, 0, 0, 1, 1};
    for (int i = 0; i < 6; i++) {
        ms_demand d = {.group = 0, .slice = slices[i], .leader = i < 2, .begins = true};
        REQUIRE(ms_stream_acquire(r.stream, &d, &expert, 1, &slot, &counts) == 1);
        unsigned seen = 0;
        for (int k = 0; k < N_SLICES; k++) {
            seen |= 1u << r.stream->use_order[k];
        }
        CHECK(seen == (1u << N_SLICES) - 1);
        ms_stream_end(r.stream, slices[i], &slot, 1);
    }
    CHECK(r.stream->use_order[0] == 2 && r.stream->use_order[1] == 0 && r.stream->use_order[2] == 1);
    CHECK(ms_stream_prefetch(r.stream, 0, guesses, 2, true, 0, &counts) == 2);
    settle(&r);
    CHECK(r.stream->n_ahead_waiting == 0 && counts.n_prefetch == 2);
    CHECK(ms_stream_resize(r.stream, slots_of(&r, 2 * N_USED), NULL) == MOESTREAM_OK);
    ms_stream_close(r.stream);
}

TEST(no_cache_keeps_nothing_and_is_right) {
    ms_stream_options o = {.queue_depth = 3, .direct = MOESTREAM_DIRECT_OFF, .cache_none = true};
    rig r = {.script = {.seed = 1, .reorder = true}};
    REQUIRE(rig_open(&r, 4, &o));
    moestream_error err = {.struct_size = sizeof err};
    int32_t expert = 1;
    CHECK(use_experts(&r, 0, 0, &expert, 1, false, &err) == 0);
    uint64_t once = fake_reader_submitted(r.reader);
    CHECK(use_experts(&r, 0, 0, &expert, 1, false, &err) == 0);
    CHECK(fake_reader_submitted(r.reader) == 2 * once);
    settle(&r);
    ms_stream_close(r.stream);
}

static const check_test tests[] = {
    LISTED(slices_are_the_files_bytes_in_any_order_of_completion),
    LISTED(a_read_that_fails_once_is_reported_or_repaired_for_every_read_of_a_run),
    LISTED(reads_that_fail_for_ever_are_reported_from_any_read_on),
    LISTED(a_second_demand_joins_the_read_in_flight),
    LISTED(nothing_is_published_before_its_bytes_are_there),
    LISTED(leased_slots_keep_their_bytes_when_all_others_are_used_up),
    LISTED(a_slot_given_to_another_expert_holds_the_other_experts_bytes),
    LISTED(verify_names_layer_expert_and_slice_of_changed_bytes),
    LISTED(resize_keeps_what_it_says_and_refuses_while_slots_are_used),
    LISTED(bytes_of_a_file_that_was_written_to_are_not_used),
    LISTED(a_file_written_to_between_its_header_and_its_opening_is_refused),
    LISTED(a_read_that_does_not_end_is_busy_for_resize_and_has_an_age),
    LISTED(slow_reads_are_warned_of_once),
    LISTED(several_contexts_share_a_minimal_cache_while_it_is_resized),
    LISTED(contexts_in_one_layer_leave_the_order_of_use_a_permutation),
    LISTED(no_cache_keeps_nothing_and_is_right),
};

int main(int argc, char ** argv) {
    return rig_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
