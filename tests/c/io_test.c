/* io: files, the retry table, the choice of an engine, and the fake reader that other tests rely on. */
#include <errno.h>
#include <sys/stat.h>

#include "support/io_faults.h"
#define pread faulty_pread
#include "io/file.c"
#undef pread

#include "check.h"
#include "support/fake_reader.h"
#include "support/read_rig.h"

/* ---- files ---- */

TEST(opening_a_file_says_what_is_wrong_and_leaves_nothing_open) {
    char path[512];
    ms_file file;
    memset(&file, 0x5a, sizeof file);
    ms_file before;
    memcpy(&before, &file, sizeof file);
    moestream_error err = {.struct_size = sizeof err};
    int fds = count_entries("/proc/self/fd");
    path_of(path, sizeof path, "nowhere.gguf");
    CHECK(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, &err) == MOESTREAM_ERR_IO);
    CHECK(err.os_errno == ENOENT && strstr(err.message, "nowhere.gguf") != NULL);
    CHECK(ms_file_open(&file, folder, MOESTREAM_DIRECT_AUTO, 0, &err) == MOESTREAM_ERR_IO && err.os_errno == EISDIR);
    path_of(path, sizeof path, "pipe");
    REQUIRE(mkfifo(path, 0600) == 0);
    CHECK(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, &err) == MOESTREAM_ERR_IO); /* and does not hang */
    CHECK(memcmp(&file, &before, sizeof file) == 0);
    CHECK(count_entries("/proc/self/fd") == fds);
}

TEST(direct_is_offered_only_after_a_probe_and_off_means_off) {
    char path[512];
    if (!make_file("probe", 3 * MS_PAGE + 77, path, sizeof path)) {
        return;
    }
    ms_file file;
    const uint64_t places[6] = {0, 1, MS_PAGE, 3 * MS_PAGE + 76, 3 * MS_PAGE + 77, UINT64_MAX};
    for (int i = 0; i < 6; i++) {
        REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, places[i], NULL) == MOESTREAM_OK);
        CHECK(file.bytes == 3 * MS_PAGE + 77 && (file.direct_fd >= 0) == atomic_load(&file.direct));
        CHECK(ms_file_fd(&file) == (file.direct_fd >= 0 ? file.direct_fd : file.fd));
        ms_file_close(&file);
        ms_file_close(&file);
    }
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_OFF, 0, NULL) == MOESTREAM_OK);
    CHECK(file.direct_fd == -1 && ms_file_fd(&file) == file.fd);
    ms_file_close(&file);
    if (make_file("empty", 0, path, sizeof path)) {
        REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
        CHECK(file.bytes == 0);
        ms_file_close(&file);
    }
    ms_file_close(NULL);
}

TEST(a_direct_read_that_fails_or_lies_in_the_probe_means_buffered_or_an_error) {
    char path[512];
    if (!make_file("refused", 5 * MS_PAGE, path, sizeof path)) {
        return;
    }
    ms_file file;
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    bool direct = file.direct_fd >= 0;
    ms_file_close(&file);
    if (!direct) {
        SKIP("needs O_DIRECT: the temporary folder refuses it");
    }
    log_says("");
    io_faults second = {.fail_answer = 1, .fail_errno = EINVAL};
    io_faults_set(&second); /* the buffered read is the first */
    CHECK(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    io_faults_set(NULL);
    CHECK(file.direct_fd == -1 && !atomic_load(&file.direct) && log_says(path));
    ms_file_close(&file);
    io_faults wrong = {.fail_answer = -1, .corrupt_nth = 2};
    io_faults_set(&wrong);
    CHECK(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    io_faults_set(NULL);
    CHECK(file.direct_fd == -1 && log_says("other bytes"));
    ms_file_close(&file);
    moestream_error err = {.struct_size = sizeof err};
    int fds = count_entries("/proc/self/fd");
    io_faults_set(&second);
    CHECK(ms_file_open(&file, path, MOESTREAM_DIRECT_ON, 0, &err) == MOESTREAM_ERR_UNSUPPORTED);
    io_faults_set(NULL);
    CHECK(err.os_errno == EINVAL && strstr(err.message, path) != NULL);
    CHECK(count_entries("/proc/self/fd") == fds && !log_says(path));
}

TEST(file_pread_reads_exactly_or_says_where_the_file_ended) {
    char path[512];
    if (!make_file("exact", 100003, path, sizeof path)) {
        return;
    }
    ms_file file;
    moestream_error err = {.struct_size = sizeof err};
    REQUIRE(ms_file_open(&file, path, MOESTREAM_DIRECT_AUTO, 0, NULL) == MOESTREAM_OK);
    static uint8_t bytes[100003];
    io_faults faults = {.seed = 3, .short_percent = 60, .error_percent = 20, .error_errno = EINTR, .fail_answer = -1};
    io_faults_set(&faults);
    for (uint64_t from = 0; from < 40; from++) {
        CHECK(ms_file_pread(&file, bytes, sizeof bytes - from, from, &err) == MOESTREAM_OK);
        CHECK(same_bytes(bytes, sizeof bytes - from, from));
    }
    CHECK(io_faults_made() > 0);
    io_faults_set(NULL);
    CHECK(ms_file_pread(&file, bytes, 0, 100003, &err) == MOESTREAM_OK);
    CHECK(ms_file_pread(&file, bytes, 10, 99994, &err) == MOESTREAM_ERR_EOF && strstr(err.message, path) != NULL);
    CHECK(ms_file_pread(&file, bytes, 1, UINT64_MAX, &err) == MOESTREAM_ERR_EOF);
    io_faults fail = {.fail_answer = 0, .fail_errno = EIO};
    io_faults_set(&fail);
    CHECK(ms_file_pread(&file, bytes, 10, 40, &err) == MOESTREAM_ERR_IO && err.os_errno == EIO);
    io_faults for_ever = {.fail_answer = -1, .error_percent = 100, .error_errno = EINTR};
    io_faults_set(&for_ever);
    CHECK(ms_file_pread(&file, bytes, 10, 40, &err) == MOESTREAM_ERR_IO && err.os_errno == EINTR);
    io_faults_set(NULL);
    ms_file_close(&file);
}

/* ---- the retry table ---- */

typedef struct table_case {
    ms_file file;
    ms_read read;
    moestream_status status;
    int os_errno;
} table_case;

enum { BUFFERED_FD = 1000, DIRECT_FD = 1001 };

static void start_case(table_case * t) {
    static char name[] = "a.gguf";
    memset(&t->read, 0, sizeof t->read);
    t->file.path = name;
    t->file.bytes = 1 << 20;
    t->file.fd = BUFFERED_FD;
    t->file.direct_fd = DIRECT_FD;
    atomic_init(&t->file.direct, true);
    t->read.file = &t->file;
    t->read.offset = 8 * MS_PAGE;
    t->read.bytes = 4 * MS_PAGE;
    t->read.need = 3 * MS_PAGE + 100;
    t->read.dst = (void *) (uintptr_t) (16 * MS_PAGE);
    t->status = MOESTREAM_OK;
    t->os_errno = 0;
}

static ms_read_next apply(table_case * t, int fd, int64_t result) {
    return ms_read_apply(&t->read, fd, result, &t->status, &t->os_errno);
}

TEST(table_enough_is_done_even_if_short) {
    table_case t;
    const int64_t enough[3] = {3 * MS_PAGE + 100, 3 * MS_PAGE + 101, 4 * MS_PAGE};
    for (int i = 0; i < 3; i++) {
        start_case(&t);
        CHECK(apply(&t, DIRECT_FD, enough[i]) == MS_READ_DONE_OK && t.read.got == enough[i]);
    }
}

TEST(table_a_short_read_resumes_behind_what_came) {
    table_case t;
    start_case(&t);
    ms_read_part part = ms_read_rest(&t.read);
    CHECK(part.fd == DIRECT_FD && part.bytes == 4 * MS_PAGE && part.offset == 8 * MS_PAGE && part.dst == t.read.dst);
    CHECK(apply(&t, DIRECT_FD, MS_PAGE) == MS_READ_AGAIN);
    part = ms_read_rest(&t.read);
    CHECK(part.fd == DIRECT_FD && part.bytes == 3 * MS_PAGE && part.offset == 9 * MS_PAGE);
    CHECK(part.dst == (uint8_t *) t.read.dst + MS_PAGE);
    CHECK(apply(&t, DIRECT_FD, 511) == MS_READ_AGAIN); /* no longer aligned: through the page cache */
    part = ms_read_rest(&t.read);
    CHECK(part.fd == BUFFERED_FD && part.bytes == 3 * MS_PAGE - 511 && part.offset == 9 * MS_PAGE + 511);
    CHECK(apply(&t, BUFFERED_FD, 2 * MS_PAGE - 511) == MS_READ_AGAIN); /* aligned again */
    CHECK(ms_read_rest(&t.read).fd == DIRECT_FD);
    CHECK(apply(&t, DIRECT_FD, 99) == MS_READ_AGAIN);
    CHECK(apply(&t, BUFFERED_FD, 1) == MS_READ_DONE_OK);
}

TEST(table_nothing_is_end_of_file) {
    table_case t;
    start_case(&t);
    CHECK(apply(&t, DIRECT_FD, 0) == MS_READ_DONE_ERROR && t.status == MOESTREAM_ERR_EOF && t.os_errno == 0);
    start_case(&t);
    CHECK(apply(&t, DIRECT_FD, 3 * MS_PAGE) == MS_READ_AGAIN);
    CHECK(apply(&t, DIRECT_FD, 0) == MS_READ_DONE_ERROR && t.status == MOESTREAM_ERR_EOF);
    start_case(&t);
    t.read.need = 0;
    CHECK(apply(&t, DIRECT_FD, 0) == MS_READ_DONE_OK);
}

TEST(table_interruptions_are_repeated_with_a_bound_that_progress_resets) {
    const int passing[5] = {EINTR, EAGAIN, EBUSY, ECANCELED, EFAULT};
    for (int i = 0; i < 5; i++) {
        table_case t;
        start_case(&t);
        for (int round = 0; round < 2; round++) {
            for (int k = 0; k < MS_IO_RETRIES; k++) {
                CHECK(apply(&t, DIRECT_FD, -passing[i]) == MS_READ_AGAIN);
            }
            if (round == 0) {
                CHECK(apply(&t, DIRECT_FD, 1) == MS_READ_AGAIN && t.read.retries == 0);
            }
        }
        CHECK(apply(&t, DIRECT_FD, -passing[i]) == MS_READ_DONE_ERROR);
        CHECK(t.status == MOESTREAM_ERR_IO && t.os_errno == passing[i]);
        CHECK(atomic_load(&t.file.direct));
    }
}

TEST(table_a_refused_direct_read_makes_the_file_buffered_with_one_line) {
    const int refusals[2] = {EINVAL, EOPNOTSUPP};
    for (int i = 0; i < 2; i++) {
        table_case t;
        start_case(&t);
        log_says("");
        CHECK(apply(&t, DIRECT_FD, -refusals[i]) == MS_READ_AGAIN && !atomic_load(&t.file.direct));
        CHECK(ms_read_rest(&t.read).fd == BUFFERED_FD);
        CHECK(log_says("a.gguf"));
        CHECK(apply(&t, DIRECT_FD, -refusals[i]) == MS_READ_AGAIN); /* another that was in flight already */
        CHECK(!log_says("a.gguf"));
        CHECK(apply(&t, BUFFERED_FD, -refusals[i]) == MS_READ_DONE_ERROR && t.os_errno == refusals[i]);
    }
}

TEST(table_other_errors_end_the_read) {
    const int errors[4] = {EIO, EBADF, ENXIO, ESTALE};
    for (int i = 0; i < 4; i++) {
        table_case t;
        start_case(&t);
        CHECK(apply(&t, DIRECT_FD, -errors[i]) == MS_READ_DONE_ERROR);
        CHECK(t.status == MOESTREAM_ERR_IO && t.os_errno == errors[i]);
    }
}

/* ---- the choice of an engine ---- */

TEST(auto_says_why_it_reads_with_pread) {
    moestream_error err = {.struct_size = sizeof err};
    log_says("");
    ms_reader * reader = open_engine(MOESTREAM_IO_AUTO, 8, 2, &err);
    REQUIRE(reader != NULL);
    bool warned = log_says("io_uring");
    CHECK(warned == (reader->ops->engine == MOESTREAM_IO_PREAD));
    reader->ops->close(reader);
    if (!ms_reader_uring_built()) {
        CHECK(open_engine(MOESTREAM_IO_URING, 8, 2, &err) == NULL && err.status == MOESTREAM_ERR_UNSUPPORTED);
        CHECK(strstr(err.message, "not compiled in") != NULL);
    }
    CHECK(open_engine(99, 8, 2, &err) == NULL && err.status == MOESTREAM_ERR_INVALID);
}

/* ---- the fake reader keeps the contract, too ---- */

TEST(fake_reader_delivers_each_read_once_and_right_through_its_faults) {
    uint64_t seed = check_seed(21);
    static uint8_t bytes[200001];
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = byte_at(i);
    }
    ms_file file = {.bytes = sizeof bytes, .fd = -1, .direct_fd = -1};
    for (unsigned i = 0; i < 10; i++) {
        fake_script script = {.seed = seed + i,
                              .bytes = bytes,
                              .n_bytes = sizeof bytes,
                              .short_percent = 50,
                              .interrupt_percent = 20,
                              .delay_turns = 5,
                              .reorder = i % 2,
                              .max_deliveries = 2,
                              .fail_at = 20,
                              .fail_count = 10,
                              .fail_errno = EAGAIN,
                              .fail_attempts = 3};
        ms_reader_options options = {.depth = 16, .done = on_done, .user = &n_done};
        ms_reader * reader = NULL;
        REQUIRE(fake_reader_open(&reader, &options, &script, NULL) == MOESTREAM_OK);
        read_windows(reader, &file, 16, 100, seed);
        CHECK(fake_reader_submitted(reader) == 100 && fake_reader_in_flight(reader) == 0);
        CHECK(reader->ops->retries(reader) > 0);
        reader->ops->close(reader);
    }
}

TEST(fake_reader_fails_corrupts_holds_and_heals_by_script) {
    static uint8_t bytes[50000];
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = byte_at(i);
    }
    ms_file file = {.bytes = sizeof bytes, .fd = -1, .direct_fd = -1};
    fake_script script = {.bytes = bytes,
                          .n_bytes = sizeof bytes,
                          .fail_at = 2,
                          .fail_count = FAKE_FOR_EVER,
                          .fail_errno = EIO,
                          .corrupt_at = 1,
                          .corrupt_count = 1};
    ms_reader_options options = {.depth = 4, .done = on_done, .user = &n_done};
    ms_reader * reader = NULL;
    REQUIRE(fake_reader_open(&reader, &options, &script, NULL) == MOESTREAM_OK);
    slot_of_test * s = make_slots(1);
    REQUIRE(s != NULL);
    for (int i = 0; i < 5; i++) {
        if (i == 4) {
            fake_reader_heal(reader);
        }
        set_window(s, &file, 4000, 9000);
        fake_reader_hold(reader, true);
        submit_one(reader, s);
        CHECK(reader->ops->poll(reader) == 0 && fake_reader_in_flight(reader) == 1 && !is_done(s));
        fake_reader_hold(reader, false);
        await(reader, s);
        bool failed = i == 2 || i == 3;
        CHECK(s->status == (failed ? MOESTREAM_ERR_IO : MOESTREAM_OK) && s->os_errno == (failed ? EIO : 0));
        CHECK(failed || (memcmp(s->memory, bytes, s->read.need) == 0) == (i != 1));
    }
    CHECK(fake_reader_most_in_flight(reader) == 1);
    free_slots(s, 1);
    reader->ops->close(reader);
}

static const check_test tests[] = {
    LISTED(opening_a_file_says_what_is_wrong_and_leaves_nothing_open),
    LISTED(direct_is_offered_only_after_a_probe_and_off_means_off),
    LISTED(a_direct_read_that_fails_or_lies_in_the_probe_means_buffered_or_an_error),
    LISTED(file_pread_reads_exactly_or_says_where_the_file_ended),
    LISTED(table_enough_is_done_even_if_short),
    LISTED(table_a_short_read_resumes_behind_what_came),
    LISTED(table_nothing_is_end_of_file),
    LISTED(table_interruptions_are_repeated_with_a_bound_that_progress_resets),
    LISTED(table_a_refused_direct_read_makes_the_file_buffered_with_one_line),
    LISTED(table_other_errors_end_the_read),
    LISTED(auto_says_why_it_reads_with_pread),
    LISTED(fake_reader_delivers_each_read_once_and_right_through_its_faults),
    LISTED(fake_reader_fails_corrupts_holds_and_heals_by_script),
};

int main(int argc, char ** argv) {
    return rig_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
