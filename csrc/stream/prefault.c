/*
 * stream/prefault: gives the slab its pages before the first reads land in them, in time that nobody needs.
 * A page that is first touched by a read is cleared by the thread that submits the read, which is a compute thread with
 * io_uring: 6 to 20 % of the time while a cache fills (docs/benchmarks.md). A thread of the idle scheduling class does it
 * while the dense weights are read and while reads are awaited.
 * Guarantees: changes no byte that is there (the kernel populates, nothing is written), ends when asked to, holds no lock.
 * Never runs for a small slab, nor where the kernel cannot populate (before 5.14): pages then come as they are touched.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "stream/internal.h"

#if !defined(MADV_POPULATE_WRITE) && defined(__linux__)
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; glibc 2.35 has the name */
#endif

enum { SMALL = 64 << 20, STEP = 4 << 20 };

#if defined(MADV_POPULATE_WRITE) && defined(SCHED_IDLE)

static void * populate(void * user) {
    ms_prefault * p = user;
    struct sched_param param = {0};
    if (sched_setscheduler(0, SCHED_IDLE, &param) != 0) {
        return NULL; /* it would take time from those who compute */
    }
    for (uint64_t at = 0; at < p->bytes && !atomic_load_explicit(&p->stop, memory_order_relaxed); at += STEP) {
        uint64_t n = p->bytes - at < STEP ? p->bytes - at : STEP;
        if (madvise(p->base + at, (size_t) n, MADV_POPULATE_WRITE) != 0 && errno != EINTR && errno != EAGAIN) {
            break; /* an old kernel, or no memory: whoever needs the page will be told */
        }
    }
    return NULL;
}

void ms_prefault_start(ms_prefault * p, const ms_slab * slab) {
    p->running = false;
    if (slab->bytes < SMALL) {
        return;
    }
    p->base = slab->base;
    p->bytes = slab->bytes;
    atomic_store(&p->stop, false);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the host's handlers run on the host's threads */
    p->running = pthread_create(&p->thread, NULL, populate, p) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void ms_prefault_stop(ms_prefault * p) {
    if (p->running) {
        atomic_store(&p->stop, true);
        pthread_join(p->thread, NULL);
        p->running = false;
    }
}

#else

void ms_prefault_start(ms_prefault * p, const ms_slab * slab) {
    (void) slab;
    p->running = false;
}

void ms_prefault_stop(ms_prefault * p) {
    (void) p;
}

#endif
