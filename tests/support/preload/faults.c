/*
 * faults: an LD_PRELOAD library that changes what the system answers, by script, for tests of whole processes.
 *
 * A script is a list of rules, separated by ';', each "call:key=value,key=value". It comes from MS_FAULTS in the
 * environment, or later from ms_faults_set (Python: ctypes.CDLL(None).ms_faults_set(b"...")), which replaces it and
 * starts counting anew. Calls: pread, uring (reads through io_uring, see uring.c), read (both), open, mmap (anonymous),
 * thread (pthread_create), calloc. Keys, where "reads" are pread, uring and read:
 *   path=TEXT     reads, open: only files whose path contains it        direct=1   only O_DIRECT / only not (0)
 *   min=N         reads, mmap, calloc: only from so many bytes on       lib=TEXT   calloc, mmap, thread: only calls out
 *   from=K        the K-th matching call (from 0) is the first hit                 of a library whose path contains it
 *   count=N       hits so many of them; -1, the default, all
 *   errno=N       the call fails with it; mmap, thread and calloc too   every=N    every N-th of them
 *   short=N       reads at most N bytes                                 delay_ms=N a read comes so much later
 *   flip=1        one bit of a read is wrong                            zero=1     a read returns 0
 * Guarantees: without a rule that matches, every call is the system's. Counters: ms_faults_seen(rule number).
 * Never allocates, never prints; thread-safe.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "faults.h"

enum { MAX_RULES = 16 };

static rule rules[MAX_RULES];
static atomic_int n_rules;
static atomic_bool ready;

void ms_faults_set(const char * script);
long long ms_faults_seen(int number);
long long ms_faults_bytes(int number);

static void set_key(rule * r, const char * key, const char * value) {
    long long n = strtoll(value, NULL, 0);
    if (strcmp(key, "path") == 0) {
        snprintf(r->path, sizeof r->path, "%s", value);
    } else if (strcmp(key, "lib") == 0) {
        snprintf(r->lib, sizeof r->lib, "%s", value);
    } else if (strcmp(key, "min") == 0) {
        r->min = n;
    } else if (strcmp(key, "from") == 0) {
        r->from = n;
    } else if (strcmp(key, "count") == 0) {
        r->count = n;
    } else if (strcmp(key, "every") == 0) {
        r->every = n;
    } else if (strcmp(key, "errno") == 0) {
        r->err = (int) n;
    } else if (strcmp(key, "short") == 0) {
        r->short_bytes = n;
    } else if (strcmp(key, "delay_ms") == 0) {
        r->delay_ms = (int) n;
    } else if (strcmp(key, "flip") == 0) {
        r->flip = (int) n;
    } else if (strcmp(key, "zero") == 0) {
        r->zero = (int) n;
    } else if (strcmp(key, "direct") == 0) {
        r->direct = (int) n;
    } else {
        abort(); /* a typing error in a test must not make it pass */
    }
}

static void parse_rule(rule * r, char * text) {
    memset(r, 0, sizeof *r);
    r->count = -1;
    r->every = 1;
    r->direct = -1;
    char * keys = strchr(text, ':');
    if (keys == NULL) {
        abort();
    }
    *keys++ = '\0';
    snprintf(r->call, sizeof r->call, "%s", text);
    char * save = NULL;
    for (char * pair = strtok_r(keys, ",", &save); pair != NULL; pair = strtok_r(NULL, ",", &save)) {
        char * value = strchr(pair, '=');
        if (value == NULL) {
            abort();
        }
        *value++ = '\0';
        set_key(r, pair, value);
    }
}

void ms_faults_set(const char * script) {
    char copy[4096], *save = NULL;
    int n = 0;
    atomic_store(&n_rules, 0);
    snprintf(copy, sizeof copy, "%s", script != NULL ? script : "");
    for (char * text = strtok_r(copy, ";", &save); text != NULL && n < MAX_RULES; text = strtok_r(NULL, ";", &save)) {
        parse_rule(&rules[n++], text);
    }
    atomic_store(&ready, true);
    atomic_store(&n_rules, n);
}

long long ms_faults_seen(int number) {
    return number >= 0 && number < MAX_RULES ? atomic_load(&rules[number].seen) : -1;
}

long long ms_faults_bytes(int number) {
    return number >= 0 && number < MAX_RULES ? atomic_load(&rules[number].bytes) : -1;
}

__attribute__((constructor)) static void begin(void) {
    ms_faults_set(getenv("MS_FAULTS"));
}

/* ---- matching ---- */

static int path_of_fd(int fd, char * out, size_t n) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t got = readlink(link, out, n - 1);
    out[got > 0 ? got : 0] = '\0';
    return got > 0;
}

static int from_library(const char * lib, void * caller) {
    Dl_info info;
    return lib[0] == '\0' ||
           (dladdr(caller, &info) != 0 && info.dli_fname != NULL && strstr(info.dli_fname, lib) != NULL);
}

/* Counts a call that a rule matches; true if it is one of those to hit. */
static int hits(rule * r) {
    long long number = atomic_fetch_add(&r->seen, 1) - r->from;
    return number >= 0 && number % r->every == 0 && (r->count < 0 || number / r->every < r->count);
}

static rule * find_by_bytes(const char * call, size_t bytes, void * caller) {
    for (int i = 0; i < atomic_load(&n_rules); i++) {
        rule * r = &rules[i];
        if (strcmp(r->call, call) == 0 && (long long) bytes >= r->min && from_library(r->lib, caller) && hits(r)) {
            return r->err != 0 ? r : NULL; /* without an errno a rule only counts */
        }
    }
    return NULL;
}

/* ---- the calls ---- */

rule * ms_faults_match_read(const char * call, int fd, size_t bytes, rule ** matched) {
    char path[512] = "";
    rule * hit = NULL;
    int n = atomic_load(&n_rules);
    *matched = NULL;
    for (int i = 0; i < n && hit == NULL; i++) {
        rule * r = &rules[i];
        if ((strcmp(r->call, call) != 0 && strcmp(r->call, "read") != 0) || (long long) bytes < r->min) {
            continue;
        }
        if (path[0] == '\0') {
            path_of_fd(fd, path, sizeof path);
        }
        int direct = (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
        if (strstr(path, r->path) == NULL || (r->direct >= 0 && r->direct != direct)) {
            continue;
        }
        *matched = r;
        hit = hits(r) ? r : NULL;
    }
    return hit;
}

long long ms_faults_read(const rule * hit, int fd, void * dst, size_t bytes, off_t offset) {
    if (hit != NULL && (hit->err != 0 || hit->zero)) {
        return -(long long) hit->err;
    }
    long long got = (long long) syscall(SYS_pread64, fd, dst, bytes, offset);
    if (got < 0) {
        return -(long long) errno;
    }
    if (hit != NULL && hit->short_bytes > 0 && got > hit->short_bytes) {
        got = hit->short_bytes; /* really read, so that bytes beyond the answer are not trusted by luck alone */
    }
    if (hit != NULL && hit->flip && got > 0) {
        ((uint8_t *) dst)[got / 2] ^= 1;
    }
    return got;
}

static ssize_t faulty_pread(int fd, void * dst, size_t bytes, off_t offset) {
    rule * matched;
    rule * hit = ms_faults_match_read("pread", fd, bytes, &matched);
    if (hit != NULL && hit->delay_ms > 0) {
        struct timespec t = {hit->delay_ms / 1000, hit->delay_ms % 1000 * 1000000L};
        while (nanosleep(&t, &t) != 0 && errno == EINTR) {
        }
    }
    long long got = ms_faults_read(hit, fd, dst, bytes, offset);
    if (matched != NULL && got > 0) {
        atomic_fetch_add(&matched->bytes, got);
    }
    if (got < 0) {
        errno = (int) -got;
        return -1;
    }
    return (ssize_t) got;
}

ssize_t pread(int fd, void * dst, size_t bytes, off_t offset) {
    return faulty_pread(fd, dst, bytes, offset);
}

ssize_t pread64(int fd, void * dst, size_t bytes, off64_t offset) {
    return faulty_pread(fd, dst, bytes, offset);
}

static int faulty_open(const char * path, int flags, mode_t mode) {
    int direct = (flags & O_DIRECT) != 0;
    for (int i = 0; i < atomic_load(&n_rules); i++) {
        rule * r = &rules[i];
        if (strcmp(r->call, "open") == 0 && strstr(path, r->path) != NULL && (r->direct < 0 || r->direct == direct) &&
            hits(r) && r->err != 0) {
            errno = r->err;
            return -1;
        }
    }
    return (int) syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

#define OPEN(name)                                                                                                     \
    int name(const char * path, int flags, ...) {                                                                      \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0;                                 \
        va_end(rest);                                                                                                  \
        return faulty_open(path, flags, mode);                                                                         \
    }
OPEN(open)
OPEN(open64)

static void * faulty_mmap(void * at, size_t bytes, int prot, int flags, int fd, off_t offset, void * caller) {
    if ((flags & MAP_ANONYMOUS) != 0) {
        rule * r = find_by_bytes("mmap", bytes, caller);
        if (r != NULL) {
            errno = r->err;
            return MAP_FAILED;
        }
    }
    return (void *) syscall(SYS_mmap, at, bytes, prot, flags, fd, offset);
}

void * mmap(void * at, size_t bytes, int prot, int flags, int fd, off_t offset) {
    return faulty_mmap(at, bytes, prot, flags, fd, offset, __builtin_return_address(0));
}

void * mmap64(void * at, size_t bytes, int prot, int flags, int fd, off64_t offset) {
    return faulty_mmap(at, bytes, prot, flags, fd, offset, __builtin_return_address(0));
}

int pthread_create(pthread_t * thread, const pthread_attr_t * attr, void * (*run)(void *), void * arg) {
    static int (*real)(pthread_t *, const pthread_attr_t *, void * (*)(void *), void *);
    if (real == NULL) {
        *(void **) &real = dlsym(RTLD_NEXT, "pthread_create");
    }
    rule * r = find_by_bytes("thread", 0, __builtin_return_address(0));
    return r != NULL ? r->err : real(thread, attr, run, arg);
}

extern void * __libc_calloc(size_t n, size_t size);

void * calloc(size_t n, size_t size) {
    if (atomic_load(&ready) && atomic_load(&n_rules) > 0 &&
        find_by_bytes("calloc", n * size, __builtin_return_address(0)) != NULL) {
        errno = ENOMEM;
        return NULL;
    }
    return __libc_calloc(n, size);
}
