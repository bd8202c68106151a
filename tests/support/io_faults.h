/*
 * io_faults: the system's answers to reads, changed by script, for tests of the real engines. A test program compiles
 * the engines into itself with other names for the calls they make:
 *
 *     #include "support/io_faults.h"
 *     #define pread faulty_pread
 *     #define io_uring_submit faulty_submit
 *     #define io_uring_peek_batch_cqe faulty_peek
 *     #include "io/reader_uring.c"
 *
 * Guarantees: with no script set, everything is as the system says; with one, the bytes are really read first, and
 * then the answer is changed.
 */
#ifndef MS_TEST_IO_FAULTS_H
#define MS_TEST_IO_FAULTS_H

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/base.h"

#ifndef MS_HAVE_LIBURING
#include "ms_config.h"
#endif
#if MS_HAVE_LIBURING
#include <liburing.h>
#endif

typedef struct io_faults {
    uint64_t seed;
    int short_percent;      /* chance of an answer to be cut to 1, 511, 4095 or any number of bytes */
    int error_percent;      /* chance of an answer to be -error_errno instead */
    int error_errno;
    int64_t fail_answer;    /* number of the answer (from 0) that is -fail_errno; -1 none */
    int fail_errno;
    uint64_t corrupt_nth;   /* the pread of this number (from 1) brings a wrong first byte; 0 none */
    int refused_submits;    /* the next so many submissions are refused, */
    uint64_t refuse_for_ns; /* and all of them for so long, */
    int submit_errno;       /* with this */
} io_faults;

static io_faults io_script;
static atomic_bool io_script_active; /* set while no read is in flight: io_script is constant meanwhile */
static atomic_uint_fast64_t io_answers;
static atomic_uint_fast64_t io_made;
static atomic_uint_fast64_t io_preads;
static atomic_int io_refusals_left;
static uint64_t io_refuse_until;

/* NULL ends the faults. */
static inline void io_faults_set(const io_faults * script) {
    atomic_store(&io_script_active, false);
    if (script == NULL) {
        return;
    }
    io_script = *script;
    atomic_store(&io_answers, 0);
    atomic_store(&io_made, 0);
    atomic_store(&io_preads, 0);
    atomic_store(&io_refusals_left, script->refused_submits);
    io_refuse_until = ms_now_ns() + script->refuse_for_ns;
    atomic_store(&io_script_active, true);
}

/* How many answers were changed since. */
static inline uint64_t io_faults_made(void) {
    return atomic_load(&io_made);
}

static inline uint64_t io_mix(uint64_t z) { /* splitmix64's finisher */
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline int64_t io_changed(int64_t answer) {
    static const int64_t odd[3] = {1, 511, 4095};
    uint64_t number = atomic_fetch_add(&io_answers, 1);
    uint64_t chance = io_mix(io_script.seed ^ number);
    int64_t result = answer;
    if (io_script.fail_answer >= 0 && number == (uint64_t) io_script.fail_answer) {
        result = -(int64_t) io_script.fail_errno;
    } else if ((int) (chance % 100) < io_script.error_percent) {
        result = -(int64_t) io_script.error_errno;
    } else if (answer > 1 && (int) (chance / 100 % 100) < io_script.short_percent) {
        uint64_t choice = io_mix(chance);
        result = choice % 4 < 3 ? odd[choice % 4] : 1 + (int64_t) ((choice >> 8) % (uint64_t) answer);
        result = result < answer ? result : answer;
    }
    if (result != answer) {
        atomic_fetch_add(&io_made, 1);
    }
    return result;
}

/* Until this moment, no pread returns; 0 lets them go. */
static atomic_uint_fast64_t io_stuck_until_ns;
static atomic_int io_stuck;

static inline ssize_t faulty_pread(int fd, void * dst, size_t bytes, off_t offset) {
    atomic_fetch_add(&io_stuck, 1);
    while (ms_now_ns() < atomic_load(&io_stuck_until_ns)) {
        usleep(1000);
    }
    atomic_fetch_sub(&io_stuck, 1);
    ssize_t n = pread(fd, dst, bytes, offset);
    int64_t answer = n >= 0 ? n : -(int64_t) errno;
    if (atomic_load(&io_script_active)) {
        if (atomic_fetch_add(&io_preads, 1) + 1 == io_script.corrupt_nth && answer > 0) {
            *(uint8_t *) dst ^= 1;
        }
        answer = io_changed(answer);
    }
    if (answer < 0) {
        errno = (int) -answer;
        return -1;
    }
    return (ssize_t) answer;
}

#if MS_HAVE_LIBURING

static inline int faulty_submit(struct io_uring * ring) {
    if (atomic_load(&io_script_active) && (atomic_load(&io_refusals_left) > 0 || ms_now_ns() < io_refuse_until)) {
        atomic_fetch_sub(&io_refusals_left, 1);
        atomic_fetch_add(&io_made, 1);
        return -io_script.submit_errno;
    }
    return io_uring_submit(ring);
}

static inline unsigned faulty_peek(struct io_uring * ring, struct io_uring_cqe ** cqes, unsigned count) {
    unsigned n = io_uring_peek_batch_cqe(ring, cqes, count);
    for (unsigned i = 0; i < n && atomic_load(&io_script_active); i++) {
        if (io_uring_cqe_get_data(cqes[i]) != NULL) { /* a read, not a wake-up */
            cqes[i]->res = (int32_t) io_changed(cqes[i]->res);
        }
    }
    return n;
}

#endif

#endif
