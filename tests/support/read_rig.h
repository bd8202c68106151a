/*
 * read_rig: what tests of io/ share: files whose every byte is known, windows in them, and waiting for reads in the way
 * the stream does. Included after check.h by one file of a test program.
 */
#ifndef MS_TEST_READ_RIG_H
#define MS_TEST_READ_RIG_H

#include <dirent.h>
#include <stdio.h>
#include <time.h>

#include "check.h"
#include "io/reader.h"

/* ---- a file with known bytes ---- */

static char folder[256]; /* removed at the end */

static inline void path_of(char * out, size_t n, const char * name) {
    snprintf(out, n, "%s/%s", folder, name);
}

/* The byte at an offset of every test file. */
static inline uint8_t byte_at(uint64_t offset) {
    uint64_t z = (offset >> 3) * 0x9e3779b97f4a7c15u;
    return (uint8_t) ((z ^ (z >> 29)) >> (offset % 8 * 8));
}

static inline bool same_bytes(const uint8_t * bytes, uint64_t n, uint64_t offset) {
    for (uint64_t i = 0; i < n; i++) {
        if (bytes[i] != byte_at(offset + i)) {
            printf("    byte %llu of %llu at offset %llu differs\n", (unsigned long long) i, (unsigned long long) n,
                   (unsigned long long) offset);
            return false;
        }
    }
    return true;
}

static inline bool make_file(const char * name, uint64_t bytes, char * path, size_t n) {
    path_of(path, n, name);
    FILE * f = fopen(path, "wb");
    if (f == NULL) {
        return CHECK(!"the test file could be made");
    }
    bool ok = true;
    for (uint64_t at = 0; at < bytes && ok; at++) {
        ok = putc(byte_at(at), f) != EOF;
    }
    ok = fclose(f) == 0 && ok;
    return CHECK(ok);
}

static inline int count_entries(const char * path) {
    int n = 0;
    DIR * dir = opendir(path);
    if (dir == NULL) {
        return -1;
    }
    while (readdir(dir) != NULL) {
        n++;
    }
    closedir(dir);
    return n;
}

static inline bool log_says(const char * words) {
    moestream_log_line line = {.struct_size = sizeof line};
    bool found = false;
    while (ms_log_take(&line)) {
        found = found || strstr(line.text, words) != NULL;
    }
    return found;
}

/* ---- engines under test ---- */

enum { MAX_READS = 256, MAX_WINDOW_PAGES = 24, PATIENCE_S = 60 };

typedef struct slot_of_test {
    ms_read read; /* first: done gets it back */
    uint8_t * memory;
    uint64_t lead; /* of the slice in the window */
    atomic_int done; /* times; release, pairs with the acquire of whoever waits */
    moestream_status status;
    int os_errno;
} slot_of_test;

static atomic_int slow_dones; /* the next so many done calls take a while, having raised slow_done_began */
static atomic_int slow_done_began;

static inline void on_done(void * user, ms_read * read, moestream_status status, int os_errno) {
    slot_of_test * s = (slot_of_test *) read;
    atomic_fetch_add((atomic_int *) user, 1);
    if (atomic_load(&slow_dones) > 0 && atomic_fetch_sub(&slow_dones, 1) > 0) {
        const struct timespec pause = {0, 50000000};
        atomic_fetch_add(&slow_done_began, 1);
        nanosleep(&pause, NULL);
    }
    s->status = status;
    s->os_errno = os_errno;
    atomic_fetch_add_explicit(&s->done, 1, memory_order_release);
}

static atomic_int n_done; /* over all readers */

static inline ms_reader * open_engine(int io, int depth, int n_threads, moestream_error * err) {
    ms_reader_options options = {.depth = depth, .n_threads = n_threads, .done = on_done, .user = &n_done};
    ms_reader * reader = NULL;
    return ms_reader_open(&reader, io, &options, err) == MOESTREAM_OK ? reader : NULL;
}

/* NULL if io_uring can be had, else why not, in the words of a registered skip. */
static inline const char * why_no_uring(void) {
    static char why[MOESTREAM_MESSAGE_BYTES + 32];
    moestream_error err = {.struct_size = sizeof err};
    ms_reader * reader = open_engine(MOESTREAM_IO_URING, 8, 0, &err);
    if (reader != NULL) {
        reader->ops->close(reader);
        return NULL;
    }
    snprintf(why, sizeof why, "needs io_uring: %s", err.message);
    return why;
}

/* Declares `reader`, or leaves a test that cannot have it. */
#define OPEN_OR_SKIP(reader, io, depth, n_threads)                                                                     \
    if ((io) == MOESTREAM_IO_URING && why_no_uring() != NULL) {                                                        \
        SKIP(why_no_uring());                                                                                          \
    }                                                                                                                  \
    ms_reader * reader = open_engine((io), (depth), (n_threads), NULL);                                                \
    REQUIRE(reader != NULL)

static inline slot_of_test * make_slots(int n) {
    slot_of_test * slots = calloc((size_t) n, sizeof *slots);
    for (int i = 0; slots != NULL && i < n; i++) {
        slots[i].memory = aligned_alloc(MS_PAGE, (size_t) MAX_WINDOW_PAGES * MS_PAGE);
        atomic_init(&slots[i].done, 0);
    }
    return slots;
}

static inline void free_slots(slot_of_test * slots, int n) {
    for (int i = 0; i < n; i++) {
        free(slots[i].memory);
    }
    free(slots);
}

/* The window around `bytes` at `offset`, as the stream makes it. */
static inline void set_window(slot_of_test * s, ms_file * file, uint64_t offset, uint64_t bytes) {
    uint64_t start = ms_align_down(offset, MS_PAGE);
    memset(&s->read, 0, sizeof s->read);
    s->lead = offset - start;
    s->read.file = file;
    s->read.offset = start;
    s->read.need = (uint32_t) (s->lead + bytes);
    s->read.bytes = (uint32_t) ms_align_up(s->read.need, MS_PAGE);
    s->read.dst = s->memory;
    memset(s->memory, 0xee, s->read.bytes);
    atomic_store(&s->done, 0);
}

static inline void random_window(slot_of_test * s, ms_file * file, check_random * rnd) {
    uint64_t most = (uint64_t) (MAX_WINDOW_PAGES - 1) * MS_PAGE - MS_PAGE;
    most = most < file->bytes ? most : file->bytes;
    uint64_t bytes = 1 + check_below(rnd, check_below(rnd, 4) == 0 ? 100 : most);
    bytes = bytes < file->bytes ? bytes : file->bytes;
    uint64_t room = file->bytes - bytes;
    uint64_t offset = check_below(rnd, 8) == 0 ? room : check_below(rnd, room + 1); /* often the end of the file */
    set_window(s, file, offset, bytes);
}

static inline bool is_done(const slot_of_test * s) {
    return atomic_load_explicit(&s->done, memory_order_acquire) > 0;
}

/* Waits for one read in the way the stream does; false if it takes for ever. */
static inline bool await(ms_reader * reader, const slot_of_test * s) {
    uint64_t give_up = ms_now_ns() + (uint64_t) PATIENCE_S * 1000000000u;
    for (;;) {
        uint64_t seen = reader->ops->completed(reader);
        if (is_done(s)) {
            return CHECK(atomic_load(&s->done) == 1);
        }
        if (ms_now_ns() > give_up) {
            return CHECK(!"the read completed");
        }
        reader->ops->wait(reader, seen, (uint64_t) PATIENCE_S * 1000000000u);
    }
}

static inline void submit_one(ms_reader * reader, slot_of_test * s) {
    ms_read * read = &s->read;
    reader->ops->submit(reader, &read, 1);
}

static inline bool right_bytes(const slot_of_test * s) {
    return CHECK(s->status == MOESTREAM_OK) && CHECK(s->read.got >= s->read.need) &&
           CHECK(same_bytes(s->memory, s->read.need, s->read.offset));
}

/* `total` random windows, `depth` in flight, in batches. */
static inline void read_windows(ms_reader * reader, ms_file * file, int depth, int total, uint64_t seed) {
    check_random rnd = {seed};
    slot_of_test * slots = make_slots(depth);
    ms_read * batch[MAX_READS];
    REQUIRE(slots != NULL && depth <= MAX_READS);
    int submitted = 0;
    int finished = 0;
    bool busy[MAX_READS] = {false};
    while (finished < total && atomic_load(&check_failures) == 0) {
        int n = 0;
        uint64_t how_many = 1 + check_below(&rnd, (uint64_t) depth);
        for (int i = 0; i < depth && submitted < total && (uint64_t) n < how_many; i++) {
            if (!busy[i]) {
                random_window(&slots[i], file, &rnd);
                batch[n++] = &slots[i].read;
                busy[i] = true;
                submitted++;
            }
        }
        reader->ops->submit(reader, batch, n);
        reader->ops->poll(reader);
        int waited = -1;
        for (int i = 0; i < depth; i++) {
            if (busy[i] && (is_done(&slots[i]) || waited < 0)) {
                waited = i;
                if (!await(reader, &slots[i]) || !right_bytes(&slots[i])) {
                    break;
                }
                busy[i] = false;
                finished++;
            }
        }
    }
    for (int i = 0; i < depth; i++) {
        if (busy[i]) {
            await(reader, &slots[i]); /* after a failure */
        }
    }
    free_slots(slots, depth);
}

/* ---- what a thread of a test does ---- */

typedef struct team {
    ms_reader * reader;
    ms_file * file;
    int depth;
    int total;
    uint64_t seed;
} team;

static inline void * read_windows_thread(void * arg) {
    const team * t = arg;
    read_windows(t->reader, t->file, t->depth, t->total, t->seed);
    return NULL;
}

typedef struct waiting {
    ms_reader * reader;
    uint64_t seen;
    uint64_t timeout_ns;
    atomic_int started;
    atomic_int returned;
} waiting;

static inline void * wait_thread(void * arg) {
    waiting * w = arg;
    atomic_fetch_add(&w->started, 1);
    w->reader->ops->wait(w->reader, w->seen, w->timeout_ns);
    atomic_fetch_add(&w->returned, 1);
    return NULL;
}

typedef struct awaiting {
    ms_reader * reader;
    slot_of_test * slot;
} awaiting;

static inline void * await_thread(void * arg) {
    const awaiting * a = arg;
    await(a->reader, a->slot);
    return NULL;
}

typedef struct leaving {
    ms_reader * reader;
    slot_of_test * slots;
    int n;
} leaving;

static inline void * submit_and_exit(void * arg) {
    const leaving * l = arg;
    ms_read * batch[MAX_READS];
    for (int i = 0; i < l->n; i++) {
        batch[i] = &l->slots[i].read;
    }
    l->reader->ops->submit(l->reader, batch, l->n);
    return NULL;
}

/* The kernel's list of threads lags behind a join, and its own workers (io_uring has some) end a little later. */
static inline bool falls_to(const char * path, int n) {
    uint64_t give_up = ms_now_ns() + (uint64_t) PATIENCE_S * 1000000000u;
    while (count_entries(path) > n && ms_now_ns() < give_up) {
        ms_relax(1000);
    }
    return count_entries(path) <= n;
}

/* ---- the end ---- */

static inline void remove_folder(void) {
    DIR * dir = opendir(folder);
    for (struct dirent * e; dir != NULL && (e = readdir(dir)) != NULL;) {
        char path[sizeof folder + sizeof e->d_name + 1];
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        unlink(path); /* "." and ".." refuse */
    }
    if (dir != NULL) {
        closedir(dir);
    }
    rmdir(folder);
}

/* The main of every test program with files. */
static inline int rig_main(int argc, char ** argv, const check_test * tests, size_t n) {
    const char * tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/ms_io_test_XXXXXX", tmp != NULL ? tmp : "/tmp");
    if (mkdtemp(folder) == NULL) {
        perror(folder);
        return 1;
    }
    int failed = check_main(argc, argv, tests, n);
    remove_folder();
    return failed;
}

#endif
