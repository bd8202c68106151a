/*
 * base: failures with their facts, checked allocation, which file it is, the clock, and waiting that gives way.
 * Guarantees: no allocation on a failure path; a message is one line and always ends in a zero.
 * Never prints, with one exception: the last words of a failed assert, just before abort().
 */
#include "base/base.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/text.h"

_Noreturn void ms_assert_failed(const char * what, const char * file, int line) {
    char text[512];
    int n = snprintf(text, sizeof text, "moestream: assertion failed: %s (%s:%d)\n", what, file, line);
    if (n > 0) {
        size_t length = (size_t) n < sizeof text ? (size_t) n : sizeof text - 1;
        ssize_t written = write(STDERR_FILENO, text, length);
        (void) written; /* there is nobody left to tell */
    }
    abort();
}

/* ---- failures ---- */

moestream_status ms_fail(moestream_error * err, moestream_status status, int os_errno, const char * format, ...) {
    if (err == NULL) {
        return status;
    }
    char text[MOESTREAM_MESSAGE_BYTES]; /* apart, because an argument may point into err->message */
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    size_t length = n < 0 ? 0 : (size_t) n;
    bool cut = length >= sizeof text;
    length = ms_text_one_line(text, cut ? sizeof text - 1 : length, cut);
    err->status = status;
    err->os_errno = os_errno;
    memcpy(err->message, text, length + 1);
    return status;
}

void ms_fail_context(moestream_error * err, const char * context) {
    if (err == NULL || context == NULL) {
        return;
    }
    char text[MOESTREAM_MESSAGE_BYTES];
    int n = snprintf(text, sizeof text, "%s: %s", context, err->message);
    size_t length = n < 0 ? 0 : (size_t) n;
    bool cut = length >= sizeof text;
    length = ms_text_one_line(text, cut ? sizeof text - 1 : length, cut);
    memcpy(err->message, text, length + 1);
}

/* ---- memory ---- */

void * ms_calloc(size_t n, size_t size) {
    uint64_t bytes;
    if (!ms_mul_u64(n, size, &bytes) || bytes > SIZE_MAX) {
        return NULL;
    }
    return calloc(1, bytes > 0 ? (size_t) bytes : 1); /* NULL means refused, also for nothing at all */
}

char * ms_strdup(const char * s) {
    size_t bytes = strlen(s) + 1;
    char * copy = malloc(bytes);
    if (copy != NULL) {
        memcpy(copy, s, bytes);
    }
    return copy;
}

/* ---- clock and waiting ---- */

ms_file_id ms_file_id_of(const struct stat * st) {
    return (ms_file_id) {.device = (uint64_t) st->st_dev,
                         .inode = (uint64_t) st->st_ino,
                         .bytes = (uint64_t) st->st_size,
                         .modified_s = (int64_t) st->st_mtime,
#ifndef _WIN32
                         .modified_ns = (int64_t) st->st_mtim.tv_nsec
#endif
    };
}

bool ms_same_file(const ms_file_id * a, const ms_file_id * b) {
    return a->device == b->device && a->inode == b->inode && a->bytes == b->bytes && a->modified_s == b->modified_s &&
           a->modified_ns == b->modified_ns;
}

uint64_t ms_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t) t.tv_sec * 1000000000u + (uint64_t) t.tv_nsec;
}

static inline void cpu_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
    __asm__ __volatile__("yield");
#endif
}

void ms_relax(unsigned n) {
    enum { PAUSES = 32, SPINS = 16, YIELDS = 256, SLEEP_NS = 50000 };
    if (n < SPINS) {
        for (int i = 0; i < PAUSES; i++) {
            cpu_pause();
        }
    } else if (n < YIELDS) {
        sched_yield();
    } else {
        struct timespec t = {0, SLEEP_NS};
        nanosleep(&t, NULL);
    }
}
