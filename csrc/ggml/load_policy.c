/*
 * ggml/load_policy: compiled into the libllama we build, linked with --wrap=mmap and --wrap=posix_madvise.
 * While a streamed load is in progress on this thread, maps the model file without populating it and without asking the
 * kernel to read it: llama.cpp maps with MAP_POPULATE and WILLNEED, which would read every expert.
 * Guarantees: every other call, on any thread at any time, goes through unchanged.
 * Never includes anything of moestream: it is part of libllama.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/types.h>

void * __real_mmap(void * addr, size_t length, int prot, int flags, int fd, off_t offset);
int __real_posix_madvise(void * addr, size_t length, int advice);
void * __wrap_mmap(void * addr, size_t length, int prot, int flags, int fd, off_t offset);
int __wrap_posix_madvise(void * addr, size_t length, int advice);
int moestream_load_policy_set(int lazy);

static _Thread_local int lazy_load;

/* Sets the policy of this thread; returns the one before. */
__attribute__((visibility("default"))) int moestream_load_policy_set(int lazy) {
    int before = lazy_load;
    lazy_load = lazy;
    return before;
}

void * __wrap_mmap(void * addr, size_t length, int prot, int flags, int fd, off_t offset) {
    return __real_mmap(addr, length, prot, lazy_load ? flags & ~MAP_POPULATE : flags, fd, offset);
}

int __wrap_posix_madvise(void * addr, size_t length, int advice) {
    return lazy_load && advice == POSIX_MADV_WILLNEED ? 0 : __real_posix_madvise(addr, length, advice);
}
