/*
 * reader: both engines on real files: odd sizes, odd offsets, direct and buffered, several threads at once, and the
 * system's answers changed by script.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>

#include "support/io_faults.h"
#define pread faulty_pread
#define io_uring_submit faulty_submit
#define io_uring_peek_batch_cqe faulty_peek
#include "io/reader_pread.c"
#include "io/reader_uring.c"
#undef pread
#undef io_uring_submit
#undef io_uring_peek_batch_cqe

#include "check.h"
#include "support/read_rig.h"

/* ---- engines, one test per engine and rule ---- */

#define FOR_BOTH(rule)                                                                                                 \
    TEST(uring_##rule) {                                                                                               \
        rule(MOESTREAM_IO_URING);                                                                                      \
    }                                                                                                                  \
    TEST(pread_##rule) {                                                                                               \
        rule(MOESTREAM_IO_PREAD);                                                                                      \
    }
#define BOTH_LISTED(rule) LISTED(uring_##rule), LISTED(pread_##rule)

static void random_windows_of_odd_files_are_right(int io) {
    static const uint64_t sizes[5] = {1, 4095, 3 * MS_PAGE, 1273121, 6000001};
    uint64_t seed = check_seed(11);
    OPEN_OR_SKIP(reader, io, 32, 3);
    CHECK(reader->ops->engine == io);
    for (int direct = MOESTREAM_DIRECT_AUTO; direct <= MOESTREAM_DIRECT_OFF; direct += 2) {
        for (int i = 0; i < 5; i++) {
            char path[512];
            ms_file file;
            if (!make_file("windows", sizes[i], path, sizeof path)) {
                break;
            }
            if (!CHECK(ms_file_open(&file, path, direct, sizes[i] / 2, NULL) == MOESTREAM_OK)) {
                break;
            }
            if (direct == MOESTREAM_DIRECT_AUTO && i == 0) {
                printf("    direct I/O in %s: %s\n", folder, file.direct_fd >= 0 ? "yes" : "no, so buffered twice");
            }
            read_windows(reader, &file, 32, i < 2 ? 50 : 1000, seed + (uint64_t) i);
            ms_file_close(&file);
        }
    }
    reader->ops->close(reader);
}
FOR_BOTH(random_windows_of_odd_files_are_right)

static void windows_are_right_through_short_and_interrupted_reads(int io) {
    static const int passing[4] = {EINTR, EAGAIN, ECANCELED, EFAULT};
    uint64_t seed = check_seed(12);
    OPEN_OR_SKIP(reader, io, 16, 2);
    char path[512];
    ms_file file;
    if (!make_file("short", 700001, path, sizeof path)) {
        return;
    }
    for (int i = 0; i < 4; i++) {
        if (!CHECK(ms_file_open(&file, path, i % 2 ? MOESTREAM_DIRECT_OFF : MOESTREAM_DIRECT_AUTO, 0, NULL) ==
                   MOESTREAM_OK)) {
            break;
        }
        io_faults faults = {.seed = seed + (uint64_t) i,
                            .short_percent = 60,
                            .error_percent = 20,
                            .error_errno = passing[i],
                            .fail_answer = -1};
        io_faults_set(&faults);
        uint64_t retries = reader->ops->retries(reader);
        read_windows(reader, &file, 16, 300, seed);
        CHECK(io_faults_made() > 100 && reader->ops->retries(reader) - retries >= io_faults_made() / 2);
        io_faults_set(NULL);
        ms_file_close(&file);
    }
    reader->ops->close(reader);
}
FOR_BOTH(windows_are_right_through_short_and_interrupted_reads)

static void an_error_reaches_done_with_its_errno_and_later_reads_are_right(int io) {
    OPEN_OR_SKIP(reader, io, 8, 2);
    char path[512];
    ms_file file;
    slot_of_test * slots = make_slots(1);
    if (slots == NULL || !make_file("error", 100000, path, sizeof path)) {
        return;
    }
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    io_faults fail = {.fail_answer = 0, .fail_errno = EIO};
    io_faults_set(&fail);
    set_window(&slots[0], &file, 5000, 20000);
    submit_one(reader, &slots[0]);
    await(reader, &slots[0]);
    io_faults_set(NULL);
    CHECK(slots[0].status == MOESTREAM_ERR_IO && slots[0].os_errno == EIO);
    io_faults for_ever = {.fail_answer = -1, .error_percent = 100, .error_errno = EINTR};
    io_faults_set(&for_ever);
    uint64_t start = ms_now_ns();
    set_window(&slots[0], &file, 5000, 20000);
    submit_one(reader, &slots[0]);
    await(reader, &slots[0]);
    io_faults_set(NULL);
    CHECK(slots[0].status == MOESTREAM_ERR_IO && slots[0].os_errno == EINTR);
    CHECK(ms_now_ns() - start < 10u * 1000000000u);
    set_window(&slots[0], &file, 5000, 20000);
    submit_one(reader, &slots[0]);
    CHECK(await(reader, &slots[0]) && right_bytes(&slots[0]));
    free_slots(slots, 1);
    ms_file_close(&file);
    reader->ops->close(reader);
}
FOR_BOTH(an_error_reaches_done_with_its_errno_and_later_reads_are_right)

static void a_direct_read_refused_later_is_repeated_buffered(int io) {
    OPEN_OR_SKIP(reader, io, 16, 2);
    char path[512];
    ms_file file;
    if (!make_file("later", 500001, path, sizeof path)) {
        return;
    }
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    if (file.direct_fd < 0) {
        ms_file_close(&file);
        reader->ops->close(reader);
        SKIP("needs O_DIRECT: the temporary folder refuses it");
    }
    log_says("");
    io_faults fail = {.fail_answer = 3, .fail_errno = EINVAL};
    io_faults_set(&fail);
    read_windows(reader, &file, 16, 100, 5);
    io_faults_set(NULL);
    CHECK(ms_file_fd(&file) == file.fd && log_says(path));
    ms_file_close(&file);
    reader->ops->close(reader);
}
FOR_BOTH(a_direct_read_refused_later_is_repeated_buffered)

static void direct_reads_refused_together_are_all_repeated_buffered(int io) {
    enum { READS = 16 };
    OPEN_OR_SKIP(reader, io, READS, 2);
    char path[512];
    ms_file file;
    slot_of_test * slots = make_slots(READS);
    ms_read * batch[READS];
    if (slots == NULL || !make_file("together", 300001, path, sizeof path)) {
        return;
    }
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    for (int i = 0; i < READS; i++) {
        set_window(&slots[i], &file, 10000u * (unsigned) i + 77, 40000);
        slots[i].read.dst = slots[i].memory + 1; /* where no device can write directly */
        batch[i] = &slots[i].read;
    }
    reader->ops->submit(reader, batch, READS);
    for (int i = 0; i < READS; i++) {
        CHECK(await(reader, &slots[i]) && slots[i].status == MOESTREAM_OK);
        CHECK(same_bytes(slots[i].memory + 1, slots[i].read.need, slots[i].read.offset));
    }
    free_slots(slots, READS);
    ms_file_close(&file);
    reader->ops->close(reader);
}
FOR_BOTH(direct_reads_refused_together_are_all_repeated_buffered)

static void a_truncated_file_gives_end_of_file(int io) {
    OPEN_OR_SKIP(reader, io, 8, 2);
    slot_of_test * slots = make_slots(8);
    REQUIRE(slots != NULL);
    for (int direct = MOESTREAM_DIRECT_AUTO; direct <= MOESTREAM_DIRECT_OFF; direct += 2) {
        char path[512];
        ms_file file;
        if (!make_file("truncated", 10 * MS_PAGE, path, sizeof path)) {
            break;
        }
        REQUIRE(ms_file_open(&file, path, direct, 0, NULL) == MOESTREAM_OK);
        set_window(&slots[0], &file, 7 * MS_PAGE + 5, MS_PAGE);      /* its end is gone */
        set_window(&slots[1], &file, 9 * MS_PAGE, MS_PAGE);          /* all of it is gone */
        set_window(&slots[2], &file, 6 * MS_PAGE, MS_PAGE + 1000);   /* to the last byte */
        set_window(&slots[3], &file, 6 * MS_PAGE, MS_PAGE + 1001);   /* one more */
        REQUIRE(truncate(path, 7 * MS_PAGE + 1000) == 0);
        for (int i = 0; i < 4; i++) {
            submit_one(reader, &slots[i]);
        }
        for (int i = 0; i < 4; i++) {
            await(reader, &slots[i]);
            CHECK(slots[i].status == (i == 2 ? MOESTREAM_OK : MOESTREAM_ERR_EOF));
        }
        right_bytes(&slots[2]);
        ms_file_close(&file);
    }
    free_slots(slots, 8);
    reader->ops->close(reader);
}
FOR_BOTH(a_truncated_file_gives_end_of_file)

/* ---- several threads on one reader ---- */

static void several_threads_submit_and_wait_at_once(int io) {
    enum { THREADS = 6, EACH = 8 };
    uint64_t seed = check_seed(13);
    OPEN_OR_SKIP(reader, io, THREADS * EACH, 2);
    char path[512];
    ms_file file;
    if (!make_file("team", 900001, path, sizeof path)) {
        return;
    }
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    int before = atomic_load(&n_done);
    uint64_t start = ms_now_ns();
    pthread_t threads[THREADS];
    team teams[THREADS];
    for (int i = 0; i < THREADS; i++) {
        teams[i] = (team) {reader, &file, EACH, 400, seed + (uint64_t) i};
        REQUIRE(pthread_create(&threads[i], NULL, read_windows_thread, &teams[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    /* each wait was patient enough to show a lost wake-up here */
    CHECK(ms_now_ns() - start < (uint64_t) PATIENCE_S * 1000000000u);
    CHECK(atomic_load(&n_done) - before == THREADS * 400);
    CHECK(reader->ops->completed(reader) == THREADS * 400);
    reader->ops->close(reader);
    ms_file_close(&file);
}
FOR_BOTH(several_threads_submit_and_wait_at_once)

static void wake_ends_every_wait_and_the_timeout_does(int io) {
    enum { THREADS = 4 };
    OPEN_OR_SKIP(reader, io, 8, 2);
    pthread_t threads[THREADS];
    waiting w = {.reader = reader, .seen = 0, .timeout_ns = 600u * UINT64_C(1000000000)};
    for (int i = 0; i < THREADS; i++) {
        REQUIRE(pthread_create(&threads[i], NULL, wait_thread, &w) == 0);
    }
    while (atomic_load(&w.started) < THREADS) {
        ms_relax(1000);
    }
    uint64_t start = ms_now_ns();
    while (atomic_load(&w.returned) < THREADS && ms_now_ns() - start < (uint64_t) PATIENCE_S * 1000000000u) {
        reader->ops->wake(reader); /* again and again: a thread may not have reached its wait yet */
        ms_relax(1000);
    }
    REQUIRE(atomic_load(&w.returned) == THREADS);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    start = ms_now_ns();
    reader->ops->wait(reader, 0, 20000000); /* nothing is in flight */
    CHECK(ms_now_ns() - start >= 20000000);
    start = ms_now_ns();
    reader->ops->wait(reader, 12345, 600u * UINT64_C(1000000000)); /* something "has completed" since */
    CHECK(ms_now_ns() - start < (uint64_t) PATIENCE_S * 1000000000u);
    CHECK(reader->ops->completed(reader) == 0 && reader->ops->poll(reader) == 0);
    reader->ops->close(reader);
}
FOR_BOTH(wake_ends_every_wait_and_the_timeout_does)

static void a_thread_that_waits_sees_what_another_submits(int io) {
    OPEN_OR_SKIP(reader, io, 8, 1);
    char path[512];
    ms_file file;
    slot_of_test * slots = make_slots(1);
    if (slots == NULL || !make_file("other", 100000, path, sizeof path)) {
        return;
    }
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    for (int round = 0; round < 50; round++) {
        waiting w = {.reader = reader,
                     .seen = reader->ops->completed(reader),
                     .timeout_ns = (uint64_t) PATIENCE_S * 1000000000u};
        pthread_t thread;
        REQUIRE(pthread_create(&thread, NULL, wait_thread, &w) == 0);
        while (round % 2 && atomic_load(&w.started) == 0) {
            ms_relax(100);
        }
        uint64_t start = ms_now_ns();
        set_window(&slots[0], &file, (uint64_t) round * 100, 50000);
        submit_one(reader, &slots[0]);
        pthread_join(thread, NULL);
        CHECK(ms_now_ns() - start < (uint64_t) PATIENCE_S / 2 * 1000000000u);
        CHECK(await(reader, &slots[0]) && right_bytes(&slots[0]));
    }
    free_slots(slots, 1);
    reader->ops->close(reader);
    ms_file_close(&file);
}
FOR_BOTH(a_thread_that_waits_sees_what_another_submits)

static void when_a_waiter_leaves_another_takes_its_place(int io) {
    OPEN_OR_SKIP(reader, io, 8, 0);
    char path[512];
    ms_file file;
    slot_of_test * slots = make_slots(1);
    if (slots == NULL || !make_file("leaver", 100000, path, sizeof path)) {
        return;
    }
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    for (int round = 0; round < 5; round++) {
        uint64_t seen = reader->ops->completed(reader);
        waiting brief = {.reader = reader, .seen = seen, .timeout_ns = 30000000};
        waiting patient = {.reader = reader, .seen = seen, .timeout_ns = (uint64_t) PATIENCE_S * 1000000000u};
        pthread_t first, second;
        REQUIRE(pthread_create(&first, NULL, wait_thread, &brief) == 0);
        while (atomic_load(&brief.started) == 0) {
            ms_relax(1000);
        }
        ms_relax(1000);
        REQUIRE(pthread_create(&second, NULL, wait_thread, &patient) == 0);
        pthread_join(first, NULL);
        uint64_t start = ms_now_ns();
        set_window(&slots[0], &file, 100, 50000);
        submit_one(reader, &slots[0]);
        pthread_join(second, NULL);
        CHECK(ms_now_ns() - start < (uint64_t) PATIENCE_S / 2 * 1000000000u);
        CHECK(await(reader, &slots[0]) && right_bytes(&slots[0]));
    }
    free_slots(slots, 1);
    reader->ops->close(reader);
    ms_file_close(&file);
}
FOR_BOTH(when_a_waiter_leaves_another_takes_its_place)

static void a_completion_still_being_delivered_is_waited_for(int io) {
    OPEN_OR_SKIP(reader, io, 8, 0);
    char path[512];
    ms_file file;
    slot_of_test * slots = make_slots(1);
    if (slots == NULL || !make_file("slow", 100000, path, sizeof path)) {
        return;
    }
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    for (int round = 0; round < 5; round++) {
        int began = atomic_load(&slow_done_began);
        atomic_store(&slow_dones, 1);
        set_window(&slots[0], &file, 100, 50000);
        submit_one(reader, &slots[0]);
        pthread_t deliverer;
        awaiting a = {reader, &slots[0]};
        uint64_t start = ms_now_ns();
        REQUIRE(pthread_create(&deliverer, NULL, await_thread, &a) == 0);
        while (atomic_load(&slow_done_began) == began) {
            ms_relax(1000);
        }
        CHECK(await(reader, &slots[0])); /* nothing is in flight any more, and nothing is done yet */
        pthread_join(deliverer, NULL);
        CHECK(ms_now_ns() - start < (uint64_t) PATIENCE_S / 2 * 1000000000u);
        right_bytes(&slots[0]);
    }
    free_slots(slots, 1);
    reader->ops->close(reader);
    ms_file_close(&file);
}
FOR_BOTH(a_completion_still_being_delivered_is_waited_for)

static void reads_survive_the_thread_that_submitted_them(int io) {
    enum { READS = 32 };
    OPEN_OR_SKIP(reader, io, READS, 2);
    slot_of_test * slots = make_slots(READS);
    REQUIRE(slots != NULL);
    for (int round = 0; round < 20; round++) {
        char path[512];
        ms_file file;
        if (!make_file("leave", 2000003, path, sizeof path)) {
            break;
        }
        int direct = round % 2 ? MOESTREAM_DIRECT_AUTO : MOESTREAM_DIRECT_OFF;
        REQUIRE(ms_file_open(&file, path, direct, 0, NULL) == MOESTREAM_OK);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        REQUIRE(fd >= 0 && fdatasync(fd) == 0);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); /* so that the reads take a while */
        close(fd);
        check_random rnd = {1000u + (unsigned) round};
        for (int i = 0; i < READS; i++) {
            random_window(&slots[i], &file, &rnd);
        }
        pthread_t thread;
        leaving l = {reader, slots, READS};
        REQUIRE(pthread_create(&thread, NULL, submit_and_exit, &l) == 0);
        pthread_join(thread, NULL);
        for (int i = 0; i < READS; i++) {
            if (!await(reader, &slots[i]) || !right_bytes(&slots[i])) {
                break;
            }
        }
        ms_file_close(&file);
    }
    free_slots(slots, READS);
    reader->ops->close(reader);
}
FOR_BOTH(reads_survive_the_thread_that_submitted_them)

/* ---- ends ---- */

static void close_with_reads_in_flight_finishes_each_once(int io) {
    enum { READS = 64 };
    slot_of_test * slots = make_slots(READS);
    char path[512];
    ms_file file;
    if (slots == NULL || !make_file("close", 2000003, path, sizeof path)) {
        return;
    }
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    check_random rnd = {9};
    for (int round = 0; round < 20; round++) {
        OPEN_OR_SKIP(reader, io, READS, 2);
        for (int i = 0; i < READS; i++) {
            random_window(&slots[i], &file, &rnd);
        }
        leaving l = {reader, slots, READS};
        submit_and_exit(&l);
        reader->ops->close(reader);
        for (int i = 0; i < READS; i++) {
            CHECK(atomic_load(&slots[i].done) == 1);
            if (slots[i].status == MOESTREAM_ERR_IO && slots[i].os_errno == ECANCELED) {
                continue; /* it had not been begun */
            }
            right_bytes(&slots[i]);
        }
    }
    free_slots(slots, READS);
    ms_file_close(&file);
}
FOR_BOTH(close_with_reads_in_flight_finishes_each_once)

static void opening_and_closing_leaks_no_descriptor_and_no_thread(int io) {
    char path[512];
    if (!make_file("leak", 10000, path, sizeof path)) {
        return;
    }
    int fds = count_entries("/proc/self/fd");
    int threads = count_entries("/proc/self/task");
    slot_of_test * slots = make_slots(1);
    REQUIRE(slots != NULL);
    for (int i = 0; i < 200; i++) {
        ms_file file;
        OPEN_OR_SKIP(reader, io, 16, 2);
        REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
        set_window(&slots[0], &file, 100, 5000);
        submit_one(reader, &slots[0]);
        await(reader, &slots[0]);
        reader->ops->close(reader);
        ms_file_close(&file);
    }
    free_slots(slots, 1);
    CHECK(count_entries("/proc/self/fd") == fds);
    CHECK(falls_to("/proc/self/task", threads));
}
FOR_BOTH(opening_and_closing_leaks_no_descriptor_and_no_thread)

/* ---- what only one engine can show ---- */

TEST(pread_waiting_threads_do_the_reads_themselves) {
    ms_reader * reader = open_engine(MOESTREAM_IO_PREAD, 8, 0, NULL); /* no thread of its own */
    REQUIRE(reader != NULL);
    char path[512];
    ms_file file;
    if (!make_file("self", 300001, path, sizeof path)) {
        return;
    }
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    read_windows(reader, &file, 8, 100, 3);
    ms_file_close(&file);
    reader->ops->close(reader);
}

TEST(pread_a_wait_ends_at_its_timeout_while_reads_are_stuck) {
    enum { READS = 6 };
    ms_reader * reader = open_engine(MOESTREAM_IO_PREAD, READS, 2, NULL);
    REQUIRE(reader != NULL);
    char path[512];
    ms_file file;
    slot_of_test * slots = make_slots(READS);
    if (slots == NULL || !make_file("stuck", 300001, path, sizeof path)) {
        return;
    }
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    uint64_t until = ms_now_ns() + (uint64_t) PATIENCE_S * 1000000000u;
    atomic_store(&io_stuck_until_ns, until);
    for (int i = 0; i < READS; i++) {
        set_window(&slots[i], &file, 40000u * (unsigned) i, 9000);
        submit_one(reader, &slots[i]);
    }
    while (atomic_load(&io_stuck) < 2) { /* both threads; four reads are queued, which a waiter could take */
        ms_relax(1000);
    }
    uint64_t seen = reader->ops->completed(reader);
    reader->ops->wait(reader, seen, 20000000);
    CHECK(ms_now_ns() < until && atomic_load(&io_stuck) == 2 && !is_done(&slots[0]) && !is_done(&slots[READS - 1]));
    atomic_store(&io_stuck_until_ns, 0);
    for (int i = 0; i < READS; i++) {
        CHECK(await(reader, &slots[i]) && right_bytes(&slots[i]));
    }
    reader->ops->close(reader);
    free_slots(slots, READS);
    ms_file_close(&file);
}

TEST(uring_a_submission_refused_for_a_while_loses_no_read) {
    OPEN_OR_SKIP(reader, MOESTREAM_IO_URING, 16, 0);
    static const int refusals[3] = {EAGAIN, EBUSY, EINTR};
    char path[512];
    ms_file file;
    if (!make_file("again", 300001, path, sizeof path)) {
        return;
    }
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    for (int i = 0; i < 3; i++) {
        io_faults faults = {.fail_answer = -1, .refused_submits = 7, .submit_errno = refusals[i]};
        io_faults_set(&faults);
        read_windows(reader, &file, 16, 60, 4);
        CHECK(io_faults_made() == 7);
        io_faults_set(NULL);
    }
    ms_file_close(&file);
    reader->ops->close(reader);
}

static void fails_with(int submit_errno, uint64_t refuse_for_ns, int refused_submits) {
    OPEN_OR_SKIP(reader, MOESTREAM_IO_URING, 16, 0);
    char path[512];
    ms_file file;
    slot_of_test * slots = make_slots(16);
    if (slots == NULL || !make_file("broken", 300001, path, sizeof path)) {
        return;
    }
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    io_faults faults = {.fail_answer = -1,
                        .refused_submits = refused_submits,
                        .submit_errno = submit_errno,
                        .refuse_for_ns = refuse_for_ns};
    io_faults_set(&faults);
    for (int i = 0; i < 16; i++) {
        set_window(&slots[i], &file, 1000u * (unsigned) i, 5000);
    }
    leaving l = {reader, slots, 15};
    submit_and_exit(&l);
    for (int i = 0; i < 15; i++) {
        await(reader, &slots[i]);
        CHECK(slots[i].status == MOESTREAM_ERR_IO && slots[i].os_errno == submit_errno);
    }
    io_faults_set(NULL);
    submit_one(reader, &slots[15]); /* a broken ring stays broken, and says so at once */
    CHECK(await(reader, &slots[15]) && slots[15].status == MOESTREAM_ERR_IO);
    reader->ops->wake(reader);
    reader->ops->close(reader);
    free_slots(slots, 16);
    ms_file_close(&file);
}

TEST(uring_a_submission_refused_for_good_fails_the_reads) {
    fails_with(EBADF, 0, 1);
}

TEST(uring_a_submission_refused_for_ever_fails_the_reads_in_the_end) {
    fails_with(EAGAIN, 30u * UINT64_C(1000000000), 0);
}

static const check_test tests[] = {
    BOTH_LISTED(random_windows_of_odd_files_are_right),
    BOTH_LISTED(windows_are_right_through_short_and_interrupted_reads),
    BOTH_LISTED(an_error_reaches_done_with_its_errno_and_later_reads_are_right),
    BOTH_LISTED(a_direct_read_refused_later_is_repeated_buffered),
    BOTH_LISTED(direct_reads_refused_together_are_all_repeated_buffered),
    BOTH_LISTED(a_truncated_file_gives_end_of_file),
    BOTH_LISTED(several_threads_submit_and_wait_at_once),
    BOTH_LISTED(wake_ends_every_wait_and_the_timeout_does),
    BOTH_LISTED(a_thread_that_waits_sees_what_another_submits),
    BOTH_LISTED(when_a_waiter_leaves_another_takes_its_place),
    BOTH_LISTED(a_completion_still_being_delivered_is_waited_for),
    BOTH_LISTED(reads_survive_the_thread_that_submitted_them),
    BOTH_LISTED(close_with_reads_in_flight_finishes_each_once),
    BOTH_LISTED(opening_and_closing_leaks_no_descriptor_and_no_thread),
    LISTED(pread_waiting_threads_do_the_reads_themselves),
    LISTED(pread_a_wait_ends_at_its_timeout_while_reads_are_stuck),
    LISTED(uring_a_submission_refused_for_a_while_loses_no_read),
    LISTED(uring_a_submission_refused_for_good_fails_the_reads),
    LISTED(uring_a_submission_refused_for_ever_fails_the_reads_in_the_end),
};

int main(int argc, char ** argv) {
    return rig_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
