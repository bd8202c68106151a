/*
 * io/wait: condition variables with a monotonic deadline; private to io/.
 */
#ifndef MS_IO_WAIT_H
#define MS_IO_WAIT_H

#include <pthread.h>
#include <time.h>

#include "base/base.h"

/* false: no resources */
static inline bool ms_cond_init(pthread_cond_t * cond) {
    pthread_condattr_t attr;
    if (pthread_condattr_init(&attr) != 0) {
        return false;
    }
    bool ok = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC) == 0 && pthread_cond_init(cond, &attr) == 0;
    pthread_condattr_destroy(&attr);
    return ok;
}

/* `deadline_ns` on the clock of ms_now_ns; UINT64_MAX waits for ever. */
static inline void ms_cond_wait_until(pthread_cond_t * cond, pthread_mutex_t * lock, uint64_t deadline_ns) {
    if (deadline_ns == UINT64_MAX) {
        pthread_cond_wait(cond, lock);
        return;
    }
    struct timespec t;
    t.tv_sec = (time_t) (deadline_ns / 1000000000u);
    t.tv_nsec = (long) (deadline_ns % 1000000000u);
    pthread_cond_timedwait(cond, lock, &t);
}

static inline uint64_t ms_deadline_after(uint64_t timeout_ns) {
    uint64_t deadline;
    return ms_add_u64(ms_now_ns(), timeout_ns, &deadline) ? deadline : UINT64_MAX;
}

#endif
