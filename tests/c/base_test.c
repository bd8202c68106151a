/* base: sizes, failures, the log ring. */
#include "base/base.h"

#include <pthread.h>

#include "check.h"

/* ---- sizes ---- */

TEST(align_up_and_down_bracket_the_number) {
    for (uint64_t n = 0; n < 3 * MS_PAGE; n++) {
        uint64_t down = ms_align_down(n, MS_PAGE);
        uint64_t up = ms_align_up(n, MS_PAGE);
        CHECK(down % MS_PAGE == 0 && up % MS_PAGE == 0);
        CHECK(down <= n && n <= up && up - down == (n % MS_PAGE == 0 ? 0 : MS_PAGE));
    }
    CHECK(ms_align_up(UINT64_C(0x123456789abc), 32) == UINT64_C(0x123456789ac0));
}

TEST(addition_and_multiplication_refuse_overflow_and_leave_the_output) {
    uint64_t out = 77;
    CHECK(!ms_add_u64(UINT64_MAX, 1, &out) && out == 77);
    CHECK(!ms_add_u64(1, UINT64_MAX, &out) && out == 77);
    CHECK(!ms_mul_u64(UINT64_MAX, 2, &out) && out == 77);
    CHECK(!ms_mul_u64(UINT64_C(1) << 32, UINT64_C(1) << 32, &out) && out == 77);
    CHECK(ms_add_u64(UINT64_MAX, 0, &out) && out == UINT64_MAX);
    CHECK(ms_mul_u64(UINT64_MAX, 1, &out) && out == UINT64_MAX);
    CHECK(ms_mul_u64(UINT64_C(0xffffffff), UINT64_C(0x100000001), &out) && out == UINT64_MAX);
    CHECK(ms_mul_u64(UINT64_MAX, 0, &out) && out == 0);
}

TEST(calloc_refuses_overflow_and_gives_zeros) {
    size_t huge = SIZE_MAX / 2 + 1;
    CHECK(ms_calloc(huge, 2) == NULL);
    CHECK(ms_calloc(2, huge) == NULL);
    void * none = ms_calloc(0, 8); /* NULL would mean refused */
    CHECK(none != NULL);
    free(none);
    unsigned char * p = ms_calloc(100, 3);
    REQUIRE(p != NULL);
    for (int i = 0; i < 300; i++) {
        CHECK(p[i] == 0);
    }
    free(p);
    char * copy = ms_strdup("a name");
    REQUIRE(copy != NULL);
    CHECK_STR(copy, "a name");
    free(copy);
}

/* ---- failures ---- */

TEST(fail_returns_its_status_and_writes_the_facts) {
    moestream_error err = {.struct_size = sizeof err};
    CHECK(ms_fail(&err, MOESTREAM_ERR_IO, 5, "read %d of %s failed", 3, "x.gguf") == MOESTREAM_ERR_IO);
    CHECK(err.status == MOESTREAM_ERR_IO && err.os_errno == 5 && err.struct_size == sizeof err);
    CHECK_STR(err.message, "read 3 of x.gguf failed");
    CHECK(ms_fail(NULL, MOESTREAM_ERR_EOF, 0, "nobody reads this") == MOESTREAM_ERR_EOF);
    ms_fail_context(&err, "opening the store");
    CHECK_STR(err.message, "opening the store: read 3 of x.gguf failed");
    CHECK(err.status == MOESTREAM_ERR_IO && err.os_errno == 5);
    ms_fail_context(NULL, "x");
    ms_fail(&err, MOESTREAM_ERR_IO, 0, "again: %s", err.message); /* its own message as an argument */
    CHECK_STR(err.message, "again: opening the store: read 3 of x.gguf failed");
}

TEST(a_message_is_one_line_and_never_ends_in_half_a_character) {
    moestream_error err = {.struct_size = sizeof err};
    ms_fail(&err, MOESTREAM_ERR_INVALID, 0, "two\nlines\tand a tab\n");
    CHECK_STR(err.message, "two lines and a tab");
    char text[1024];
    for (int before = 0; before < 5; before++) { /* so that the cut falls on each byte of a character */
        memset(text, 'x', sizeof text);
        for (int i = before; i + 4 < (int) sizeof text; i += 4) {
            memcpy(text + i, "\xf0\x9f\x98\x80", 4);
        }
        text[sizeof text - 1] = '\0';
        ms_fail(&err, MOESTREAM_ERR_INVALID, 0, "%s", text);
        size_t n = strlen(err.message);
        CHECK(n < MOESTREAM_MESSAGE_BYTES && n > MOESTREAM_MESSAGE_BYTES - 5);
        CHECK((n - (size_t) before) % 4 == 0);
        ms_fail_context(&err, text);
        CHECK(strlen(err.message) < MOESTREAM_MESSAGE_BYTES);
    }
}

static void fail_an_assert(void * arg) {
    MS_ASSERT(arg != NULL);
}

TEST(a_failed_assert_aborts) {
    CHECK(check_aborts(fail_an_assert, NULL));
    int here;
    CHECK(!check_aborts(fail_an_assert, &here));
}

/* ---- clock and waiting ---- */

TEST(the_clock_never_goes_back_and_relax_returns) {
    uint64_t before = ms_now_ns();
    for (unsigned n = 0; n < 400; n++) {
        ms_relax(n);
        uint64_t now = ms_now_ns();
        CHECK(now >= before);
        before = now;
    }
    ms_relax(UINT32_MAX);
}

/* ---- log ring ---- */

static void drain(void) {
    moestream_log_line line = {.struct_size = sizeof line};
    while (ms_log_take(&line)) {
    }
    ms_log_set_level(MS_LOG_INFO);
}

static bool take(moestream_log_line * line) {
    memset(line, 0, sizeof *line);
    line->struct_size = sizeof *line;
    return ms_log_take(line);
}

TEST(lines_come_out_in_order_with_level_and_source) {
    moestream_log_line line;
    drain();
    ms_log(MS_LOG_WARN, "first %d", 1);
    ms_log_foreign(MS_LOG_ERROR, "second\n");
    ms_log(MS_LOG_INFO, "third");
    CHECK(take(&line) && line.level == MS_LOG_WARN && line.source == 0 && line.repeats == 0 && line.dropped == 0);
    CHECK_STR(line.text, "first 1");
    CHECK(line.struct_size == sizeof line);
    CHECK(take(&line) && line.level == MS_LOG_ERROR && line.source == 1);
    CHECK_STR(line.text, "second");
    CHECK(take(&line));
    CHECK_STR(line.text, "third");
    CHECK(!take(&line));
}

TEST(an_equal_line_is_only_counted) {
    moestream_log_line line;
    drain();
    for (int i = 0; i < 10000; i++) {
        ms_log_foreign(MS_LOG_INFO, "CUDA Graph id 3 reused\n");
    }
    ms_log_foreign(MS_LOG_INFO, "another\n");
    CHECK(take(&line) && line.repeats == 9999 && line.dropped == 0);
    CHECK_STR(line.text, "CUDA Graph id 3 reused");
    CHECK(take(&line) && line.repeats == 0);
    CHECK_STR(line.text, "another");
    CHECK(!take(&line));
}

TEST(equal_text_of_another_level_or_source_or_after_a_take_is_kept) {
    moestream_log_line line;
    drain();
    ms_log(MS_LOG_INFO, "same");
    ms_log(MS_LOG_WARN, "same");
    ms_log_foreign(MS_LOG_WARN, "same\n");
    ms_log(MS_LOG_WARN, "same"); /* what the other source said in between does not matter */
    CHECK(take(&line) && line.level == MS_LOG_INFO && line.repeats == 0);
    CHECK(take(&line) && line.level == MS_LOG_WARN && line.source == 0 && line.repeats == 1);
    CHECK(take(&line) && line.source == 1 && line.repeats == 0);
    ms_log(MS_LOG_WARN, "same");
    CHECK(take(&line) && line.repeats == 0);
    CHECK(!take(&line));
}

TEST(a_full_ring_drops_the_oldest_and_says_how_many) {
    moestream_log_line line;
    drain();
    ms_log(MS_LOG_INFO, "line 0");
    ms_log(MS_LOG_INFO, "line 0");
    int n = 1000;
    for (int i = 1; i < n; i++) {
        ms_log(MS_LOG_INFO, "line %d", i);
    }
    uint32_t dropped = 0;
    int kept = 0;
    int number = -1;
    while (take(&line)) {
        CHECK(kept == 0 || line.dropped == 0);
        dropped += line.dropped;
        kept++;
        int next = atoi(line.text + strlen("line "));
        CHECK(number < 0 || next == number + 1);
        number = next;
    }
    CHECK(number == n - 1 && kept > 1 && kept < n);
    CHECK((int) dropped + kept == n + 1); /* the repeated first line counts twice */
    ms_log(MS_LOG_INFO, "after");
    CHECK(take(&line) && line.dropped == 0);
}

TEST(lines_below_the_level_are_not_kept) {
    moestream_log_line line;
    drain();
    ms_log(MS_LOG_DEBUG, "not by default");
    ms_log_set_level(MS_LOG_WARN);
    ms_log(MS_LOG_INFO, "no");
    ms_log_foreign(MS_LOG_INFO, "no\n");
    ms_log(MS_LOG_WARN, "yes");
    CHECK(take(&line));
    CHECK_STR(line.text, "yes");
    CHECK(!take(&line));
    ms_log_set_level(MS_LOG_DEBUG);
    ms_log(MS_LOG_DEBUG, "now");
    CHECK(take(&line));
    drain();
}

TEST(pieces_of_a_foreign_line_are_put_together) {
    moestream_log_line line;
    drain();
    ms_log_foreign(MS_LOG_WARN, "load");
    ms_log_foreign(5, "ing");
    ms_log_foreign(5, "...");
    CHECK(!take(&line));
    ms_log_foreign(5, " done\nsecond\n\n");
    CHECK(take(&line) && line.level == MS_LOG_WARN);
    CHECK_STR(line.text, "loading... done");
    CHECK(take(&line) && line.level == MS_LOG_WARN);
    CHECK_STR(line.text, "second");
    CHECK(!take(&line)); /* an empty line is none */
    ms_log_foreign(MS_LOG_INFO, "never ended");
    ms_log_foreign(MS_LOG_ERROR, "a new message\n");
    CHECK(take(&line) && line.level == MS_LOG_INFO);
    CHECK_STR(line.text, "never ended");
    CHECK(take(&line) && line.level == MS_LOG_ERROR);
    ms_log_foreign(MS_LOG_INFO, NULL);
    ms_log_foreign(99, "an unknown level counts as information\n");
    CHECK(take(&line) && line.level == MS_LOG_INFO);
}

TEST(an_overlong_line_is_cut_not_spilled) {
    moestream_log_line line;
    drain();
    char text[4000];
    memset(text, 'y', sizeof text);
    text[sizeof text - 2] = '\n';
    text[sizeof text - 1] = '\0';
    ms_log_foreign(MS_LOG_INFO, text);
    ms_log(MS_LOG_INFO, "%s", text);
    for (int i = 0; i < 2; i++) {
        CHECK(take(&line));
        CHECK(strlen(line.text) == sizeof line.text - 1);
    }
    CHECK(!take(&line));
}

static void * fail_elsewhere(void * arg) {
    (void) arg;
    CHECK_STR(ms_log_last_foreign_error(), "");
    ms_log_foreign(MS_LOG_ERROR, "theirs\n");
    CHECK_STR(ms_log_last_foreign_error(), "theirs");
    return NULL;
}

TEST(the_last_foreign_error_is_kept_per_thread_and_below_any_level) {
    drain();
    ms_log_set_level(MS_LOG_ERROR + 1);
    ms_log_clear_foreign_error();
    CHECK_STR(ms_log_last_foreign_error(), "");
    ms_log_foreign(MS_LOG_ERROR, "tensor data is not within ");
    ms_log_foreign(5, "the file bounds\n");
    ms_log_foreign(MS_LOG_WARN, "a warning\n");
    pthread_t other;
    REQUIRE(pthread_create(&other, NULL, fail_elsewhere, NULL) == 0);
    pthread_join(other, NULL);
    CHECK_STR(ms_log_last_foreign_error(), "tensor data is not within the file bounds");
    ms_log_clear_foreign_error();
    CHECK_STR(ms_log_last_foreign_error(), "");
    moestream_log_line line;
    CHECK(!take(&line));
    drain();
}

enum { LOG_THREADS = 4, LOG_LINES = 2000 };

static void * log_a_lot(void * arg) {
    int who = *(int *) arg;
    for (int i = 0; i < LOG_LINES; i++) {
        ms_log(MS_LOG_INFO, "thread %d line %d", who, i);
        ms_log_foreign(MS_LOG_INFO, "piece ");
        ms_log_foreign(5, "and end\n");
    }
    return NULL;
}

TEST(no_line_is_lost_uncounted_with_several_threads) {
    drain();
    pthread_t threads[LOG_THREADS];
    int who[LOG_THREADS];
    for (int i = 0; i < LOG_THREADS; i++) {
        who[i] = i;
        REQUIRE(pthread_create(&threads[i], NULL, log_a_lot, &who[i]) == 0);
    }
    moestream_log_line line = {.struct_size = sizeof line};
    uint64_t seen = 0;
    for (int i = 0; i < 1000; i++) {
        if (ms_log_take(&line)) {
            seen += 1u + line.repeats + line.dropped;
        }
    }
    for (int i = 0; i < LOG_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    while (ms_log_take(&line)) {
        seen += 1u + line.repeats + line.dropped;
        CHECK(line.source == 0 || strcmp(line.text, "piece and end") == 0);
    }
    CHECK(seen == (uint64_t) LOG_THREADS * LOG_LINES * 2);
}

static const check_test tests[] = {
    LISTED(align_up_and_down_bracket_the_number),
    LISTED(addition_and_multiplication_refuse_overflow_and_leave_the_output),
    LISTED(calloc_refuses_overflow_and_gives_zeros),
    LISTED(fail_returns_its_status_and_writes_the_facts),
    LISTED(a_message_is_one_line_and_never_ends_in_half_a_character),
    LISTED(a_failed_assert_aborts),
    LISTED(the_clock_never_goes_back_and_relax_returns),
    LISTED(lines_come_out_in_order_with_level_and_source),
    LISTED(an_equal_line_is_only_counted),
    LISTED(equal_text_of_another_level_or_source_or_after_a_take_is_kept),
    LISTED(a_full_ring_drops_the_oldest_and_says_how_many),
    LISTED(lines_below_the_level_are_not_kept),
    LISTED(pieces_of_a_foreign_line_are_put_together),
    LISTED(an_overlong_line_is_cut_not_spilled),
    LISTED(the_last_foreign_error_is_kept_per_thread_and_below_any_level),
    LISTED(no_line_is_lost_uncounted_with_several_threads),
};

int main(int argc, char ** argv) {
    return check_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
