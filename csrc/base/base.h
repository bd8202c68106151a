/*
 * base: what every room needs and nothing more: failures with their facts, checked sizes, which file it is, the clock,
 * the log ring.
 * Guarantees: no allocation on a failure path, no output, no global state but the log ring.
 * Never includes another room or a llama.cpp header.
 */
#ifndef MS_BASE_H
#define MS_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include "moestream.h"

/* Kept in release builds: a wrong use inside the library must not go on to compute wrong results. */
#define MS_ASSERT(x) ((x) ? (void) 0 : ms_assert_failed(#x, __FILE__, __LINE__))
_Noreturn void ms_assert_failed(const char * what, const char * file, int line);

/* Writes status, errno and message to `err` (may be NULL) and returns `status`. */
#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
moestream_status ms_fail(moestream_error * err, moestream_status status, int os_errno, const char * format, ...);

/* Puts "context: " in front of the message already in `err`. */
void ms_fail_context(moestream_error * err, const char * context);

/* ---- sizes ---- */

enum { MS_PAGE = 4096 };

static inline uint64_t ms_align_up(uint64_t n, uint64_t alignment) {
    return (n + alignment - 1) / alignment * alignment;
}
static inline uint64_t ms_align_down(uint64_t n, uint64_t alignment) {
    return n / alignment * alignment;
}
/* false on overflow, *out untouched */
static inline bool ms_add_u64(uint64_t a, uint64_t b, uint64_t * out) {
    if (a > UINT64_MAX - b) {
        return false;
    }
    *out = a + b;
    return true;
}
static inline bool ms_mul_u64(uint64_t a, uint64_t b, uint64_t * out) {
    if (b != 0 && a > UINT64_MAX / b) {
        return false;
    }
    *out = a * b;
    return true;
}

/* calloc whose n * size cannot overflow; NULL when refused. Free with free(). */
void * ms_calloc(size_t n, size_t size);
char * ms_strdup(const char * s);

/* ---- which file ---- */

/* What tells a file from another one, and from itself before it was written to. The time of modification moves before
 * the bytes do, so whoever reads first and looks then has missed nothing; a writer that puts it back is not noticed. */
typedef struct ms_file_id {
    uint64_t device, inode, bytes;
    int64_t modified_s, modified_ns;
} ms_file_id;

ms_file_id ms_file_id_of(const struct stat * st);
bool ms_same_file(const ms_file_id * a, const ms_file_id * b);

/* ---- clock ---- */

uint64_t ms_now_ns(void); /* monotonic */

/* Spins briefly, then yields the core: ggml's threads and our readers may need it. `n` counts the calls of one wait. */
void ms_relax(unsigned n);

/* ---- log ring: see moestream_log_take ---- */

enum { MS_LOG_DEBUG = 1, MS_LOG_INFO = 2, MS_LOG_WARN = 3, MS_LOG_ERROR = 4 };
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
void ms_log(int level, const char * format, ...);
/* A piece of text from llama.cpp; may be a part of a line. */
void ms_log_foreign(int level, const char * text);
bool ms_log_take(moestream_log_line * line);
void ms_log_set_level(int level);
/* The last error line llama.cpp logged on this thread, "" if none; for messages when a load returns NULL. */
const char * ms_log_last_foreign_error(void);
void ms_log_clear_foreign_error(void);

#endif
