/* stream: the depth of the queue and the engine are measured once for a device, within bounds, and every choice says its
 * reason. */
#include "stream/internal.h"

#define MS_TUNE_FROM 1 /* of a small file, too */
bool rate_of_the_test(ms_stream * s, int depth, uint64_t ns, uint64_t bytes, double * rate);
#define ms_stream_rate rate_of_the_test
#include "stream/tune.c"
#undef ms_stream_rate

#include "check.h"
#include "support/stream_rig.h"

/* What the disk gives: what is measured, or what a test says each engine gives. */
static double uring_gives, pread_gives;

bool rate_of_the_test(ms_stream * s, int depth, uint64_t ns, uint64_t bytes, double * rate) {
    bool ok = ms_stream_rate(s, depth, ns, bytes, rate);
    double said = s->reader->ops->engine == MOESTREAM_IO_URING ? uring_gives : pread_gives;
    *rate = said > 0 ? said : *rate;
    return ok;
}

static bool open_by(rig * r, int io, bool choose, int depth) {
    memset(r, 0, sizeof *r);
    moestream_error err = {.struct_size = sizeof err};
    ms_stream_options o = {.io = io, .queue_depth = depth, .choose_depth = choose, .n_readers = 2};
    if (!make_index(r)) {
        return false;
    }
    o.cache_bytes = slots_of(r, 2 * N_USED);
    return CHECK(ms_stream_open(&r->stream, &r->index, &o, &err) == MOESTREAM_OK);
}

static bool says(const rig * r, const char * words) {
    char text[800];
    size_t n = ms_stream_choices(r->stream, text, sizeof text);
    if (strstr(text, words) == NULL || n != strlen(text)) {
        printf("    %s", text);
        return false;
    }
    return true;
}

static bool open_real(rig * r, bool choose, int depth) {
    return open_by(r, MOESTREAM_IO_PREAD, choose, depth);
}

/* Opens twice, the second time from what is known; the reads that follow have to be right. */
static int engine_taken(double uring, double pread, const char * words) {
    int engine = 0;
    n_known = 0;
    for (int again = 0; again < 2; again++) {
        rig r;
        uring_gives = uring;
        pread_gives = pread;
        if (!CHECK(open_by(&r, MOESTREAM_IO_AUTO, true, 128))) {
            break;
        }
        CHECK(says(&r, words) && r.stream->depth_limit == DEPTHS[0] && (r.stream->tuned_bytes > 0) == (again == 0));
        int now = r.stream->reader->ops->engine;
        CHECK(again == 0 || now == engine);
        engine = now;
        int32_t expert = 3;
        moestream_error err = {.struct_size = sizeof err};
        CHECK(use_experts(&r, 1, 2, &expert, 1, true, &err) == 0);
        ms_stream_close(r.stream);
    }
    uring_gives = pread_gives = 0;
    return engine;
}

TEST(the_engine_is_measured_where_nobody_has_said) {
    rig r;
    REQUIRE(open_by(&r, MOESTREAM_IO_AUTO, false, 128));
    bool have = r.stream->reader->ops->engine == MOESTREAM_IO_URING;
    ms_stream_close(r.stream);
    if (!have) {
        CHECK(engine_taken(1e9, 3e9, "io=pread: auto: io_uring is not to be had") == MOESTREAM_IO_PREAD);
        return;
    }
    CHECK(engine_taken(2e9, 3e9, "io=pread: auto: at this depth io_uring 2000 MB/s, pread 3000") == MOESTREAM_IO_PREAD);
    CHECK(engine_taken(2e9, 2.4e9, "io=io_uring: auto: at this depth io_uring 2000 MB/s, pread 2400") ==
          MOESTREAM_IO_URING);
    CHECK(engine_taken(3e9, 2e9, "io=io_uring: auto: at this depth io_uring 3000 MB/s, pread 2000") ==
          MOESTREAM_IO_URING);
}

TEST(an_engine_that_was_not_there_is_measured_once_it_is) {
    rig r;
    uring_gives = 3e9;
    pread_gives = 1e9;
    n_known = 0;
    REQUIRE(open_by(&r, MOESTREAM_IO_AUTO, true, 128));
    bool have = r.stream->reader->ops->engine == MOESTREAM_IO_URING;
    ms_stream_close(r.stream);
    REQUIRE(n_known == 1);
    known[0].engine = MOESTREAM_IO_PREAD; /* as if the kernel had refused a ring */
    known[0].pread = 1e9;
    known[0].uring = 0;
    REQUIRE(open_by(&r, MOESTREAM_IO_AUTO, true, 128));
    CHECK(!have || says(&r, "io=io_uring: auto: at this depth io_uring 3000 MB/s, pread 1000"));
    CHECK(!have || known[0].uring > 0);
    CHECK(n_known == 1 && known[0].engine == r.stream->reader->ops->engine);
    ms_stream_close(r.stream);
    uring_gives = pread_gives = 0;
}

TEST(a_device_is_measured_once) {
    rig r;
    n_known = 0;
    REQUIRE(open_real(&r, true, 128));
    CHECK(says(&r, ": measured at open, MB/s by slices in flight: "));
    bool known_depth = false;
    for (int i = 0; i < N_DEPTHS; i++) {
        known_depth |= r.stream->depth_limit == DEPTHS[i];
    }
    CHECK(known_depth);
    CHECK(r.stream->tuned_bytes > 0 && r.stream->tuned_bytes <= N_DEPTHS * (uint64_t) (8224 + 2 * MS_PAGE));
    int first = r.stream->depth_limit;
    int32_t expert = 3;
    moestream_error err = {.struct_size = sizeof err};
    CHECK(use_experts(&r, 1, 2, &expert, 1, true, &err) == 0); /* what was read to measure is not taken for an expert */
    ms_stream_close(r.stream);
    REQUIRE(open_real(&r, true, 128));
    CHECK(says(&r, ": measured before on this device, at "));
    CHECK(r.stream->depth_limit == first && r.stream->tuned_bytes == 0);
    ms_stream_close(r.stream);
}

TEST(a_depth_that_was_asked_for_is_kept) {
    rig r;
    REQUIRE(open_real(&r, false, 7));
    CHECK(says(&r, "queue_depth=7: asked for") && r.stream->tuned_bytes == 0);
    ms_stream_close(r.stream);
}

TEST(no_more_reads_are_in_flight_than_the_limit_says) {
    rig r = {.script = {.seed = 5, .delay_turns = 1000}};
    ms_stream_options o = {.queue_depth = 8, .direct = MOESTREAM_DIRECT_OFF};
    REQUIRE(rig_open(&r, N_EXPERTS, &o));
    r.stream->depth_limit = 2;
    int32_t experts[N_USED] = {0, 5}, slots[N_USED];
    moestream_stats counts = {0};
    ms_demand d = {.group = 0, .leader = true, .all_slices = true};
    REQUIRE(ms_stream_acquire(r.stream, &d, experts, N_USED, slots, &counts) == N_USED);
    CHECK(fake_reader_in_flight(r.reader) == 2 && counts.n_reads == 6);
    for (int k = 0; k < N_SLICES; k++) {
        for (int i = 0; i < N_USED; i++) {
            while (ms_stream_state(r.stream, slots[i], k) == MS_READING) {
                CHECK(fake_reader_in_flight(r.reader) <= 2);
                ms_stream_poll(r.stream);
            }
            CHECK(right_slice(&r, slots[i], 0, experts[i], k));
        }
    }
    ms_stream_release(r.stream, 0, slots, N_USED);
    settle(&r);
    ms_stream_close(r.stream);
}

TEST(a_gap_is_filled_with_what_the_disk_can_do_in_it) {
    rig r = {.script = {.seed = 5}};
    ms_stream_options o = {.queue_depth = 8, .direct = MOESTREAM_DIRECT_OFF};
    REQUIRE(rig_open(&r, N_EXPERTS, &o));
    r.stream->depth_limit = 2;
    fake_reader_hold(r.reader, true);
    int32_t experts[4] = {0, 1, 2, 3};
    moestream_stats counts = {0};
    CHECK(ms_stream_prefetch(r.stream, 1, experts, 4, true, 0, &counts) == 4);
    CHECK(counts.n_reads == 4 * N_SLICES && fake_reader_in_flight(r.reader) == 2);
    ms_stream_fill(r.stream, 1000000000); /* nothing is known of the disk */
    CHECK(fake_reader_in_flight(r.reader) == 2);
    r.stream->pace.busy_bytes = counts.read_bytes; /* as if all of them had taken 12 us */
    r.stream->pace.busy_ns = 4 * N_SLICES * 1000;
    ms_stream_fill(r.stream, 4000); /* four in that time, and behind them as many as always */
    CHECK(fake_reader_in_flight(r.reader) == 6);
    ms_stream_fill(r.stream, 0);
    CHECK(fake_reader_in_flight(r.reader) == 6);
    ms_stream_fill(r.stream, 1000000000);
    CHECK(fake_reader_in_flight(r.reader) == 8);
    fake_reader_hold(r.reader, false);
    settle(&r);
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < N_SLICES; k++) {
            CHECK(right_slice(&r, ms_slot_find(&r.stream->cache, 1, experts[i]), 1, experts[i], k));
        }
    }
    ms_stream_close(r.stream);
}

TEST(demand_does_not_wait_for_guesses_and_dropped_guesses_are_not_counted) {
    rig r = {.script = {.seed = 5}};
    ms_stream_options o = {.queue_depth = 16, .direct = MOESTREAM_DIRECT_OFF};
    REQUIRE(rig_open(&r, N_EXPERTS, &o));
    r.stream->depth_limit = 2;
    r.stream->pace.busy_bytes = 1000000;
    r.stream->pace.busy_ns = 1;
    fake_reader_hold(r.reader, true);
    int32_t experts[5] = {0, 1, 2, 3, 4}, needed[2] = {2, 5}, slots[2];
    moestream_stats counts = {0}, other = {0};
    CHECK(ms_stream_prefetch(r.stream, 1, experts, 2, true, 0, &counts) == 2);
    ms_stream_fill(r.stream, 1000); /* all six */
    CHECK(ms_stream_prefetch(r.stream, 1, experts + 2, 1, true, 0, &other) == 1); /* from here on they wait */
    CHECK(ms_stream_prefetch(r.stream, 1, experts + 3, 1, true, 0, &counts) == 1);
    CHECK(ms_stream_prefetch(r.stream, 1, experts + 4, 1, true, 0, &other) == 1);
    CHECK(fake_reader_in_flight(r.reader) == 6 && counts.n_prefetch == 3 && counts.n_reads == 9);
    ms_demand d = {.group = 1, .leader = true, .all_slices = true};
    REQUIRE(ms_stream_acquire(r.stream, &d, needed, 2, slots, &counts) == 2);
    CHECK(fake_reader_in_flight(r.reader) == 8);
    CHECK(counts.n_prefetch == 2 && counts.n_reads == 9); /* less expert 3, and what was missing of expert 5 */
    CHECK(other.n_prefetch == 2 && r.stream->stats.n_prefetch == 3); /* 4 is not taken off what another one counts */
    CHECK(counts.n_misses == 1 && counts.n_prefetch_useful == 1);
    const struct timespec pause = {0, 2000000};
    nanosleep(&pause, NULL);
    CHECK(ms_stream_read_age(r.stream, slots[1], 2) > 1000000); /* it waits behind reads that do not end */
    fake_reader_hold(r.reader, false);
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < N_SLICES; k++) {
            while (ms_stream_state(r.stream, slots[i], k) == MS_READING) {
                ms_stream_poll(r.stream);
            }
            CHECK(right_slice(&r, slots[i], 1, needed[i], k));
        }
    }
    ms_stream_release(r.stream, 0, slots, 2);
    settle(&r);
    CHECK(fake_reader_submitted(r.reader) == r.stream->stats.n_reads);
    ms_stream_close(r.stream);
}

static const check_test tests[] = {
    LISTED(the_engine_is_measured_where_nobody_has_said),
    LISTED(an_engine_that_was_not_there_is_measured_once_it_is),
    LISTED(a_device_is_measured_once),
    LISTED(a_depth_that_was_asked_for_is_kept),
    LISTED(no_more_reads_are_in_flight_than_the_limit_says),
    LISTED(a_gap_is_filled_with_what_the_disk_can_do_in_it),
    LISTED(demand_does_not_wait_for_guesses_and_dropped_guesses_are_not_counted),
};

int main(int argc, char ** argv) {
    return rig_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
