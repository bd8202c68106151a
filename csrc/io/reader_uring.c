/*
 * io/reader_uring: reads through one io_uring: a whole layer's reads go down with one system call, and whoever waits
 * for bytes collects completions for everybody.
 * Guarantees: as reader.h says. A read the kernel cannot take now waits in `queue` and goes down when completions
 * arrive; no more is in the kernel than its completion queue holds, so no completion is ever lost.
 * Never spins, never holds a lock over a system call that waits or over a `done`.
 *
 * Locks, never nested: `submit_lock` guards the submission queue of the ring and our queue in front of it; `wait_lock`
 * guards the role of the reaper and the sleepers. The completion queue belongs to whoever holds the role (`reaping`):
 * one thread at a time, taken only where free. The role is given up before completions are delivered.
 *
 * No wake-up is lost: a thread falls asleep on `changed` only after it has seen, under `wait_lock`, that nothing has
 * completed since `seen` and that another thread is reaping or delivering. That thread takes `wait_lock` again after
 * it raised `completed`, and after it gave up the role, and wakes the sleepers. Nobody waits in the kernel while a
 * completion is collected but not yet delivered, since it may be the one waited for.
 *
 * No IORING_SETUP_COOP_TASKRUN: completions are posted by the thread that submitted; with that flag it would finish
 * computing its chunk first, or wait for the next tick, while others wait for the bytes. No SINGLE_ISSUER: several
 * threads submit.
 */
#include "io/reader.h"

#ifndef MS_HAVE_LIBURING
#include "ms_config.h" /* what the build found */
#endif

#if MS_HAVE_LIBURING

#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "io/wait.h"

/* Test builds set these to reach the paths of a small ring and of an old kernel. */
#ifndef MS_URING_MAX_ENTRIES
#define MS_URING_MAX_ENTRIES 4096
#endif
#ifndef MS_URING_NO_EXT_ARG
#define MS_URING_NO_EXT_ARG 0
#endif
#ifndef MS_URING_MAX_WAIT_NS
#define MS_URING_MAX_WAIT_NS 50000000
#endif
#ifndef MS_URING_MAX_REFUSED_NS
#define MS_URING_MAX_REFUSED_NS 1000000000
#endif

enum { MIN_ENTRIES = 8, BATCH = 16, REFUSED_PAUSE_NS = 1000000 };

typedef struct uring_reader {
    ms_reader reader; /* first: an ms_reader * is a uring_reader * */
    ms_read_done done;
    void * user;
    struct io_uring ring;
    unsigned kernel_limit; /* completions that fit the ring */
    bool ext_arg;          /* the kernel waits with a timeout by itself (5.11) */

    pthread_mutex_t submit_lock;
    ms_read ** queue; /* ring of `capacity`: reads handed to us and not yet to the kernel; NULL is a wake-up */
    unsigned capacity;
    unsigned head;
    unsigned queued;
    unsigned prepared; /* of these, from head on: already in the ring's submission queue */
    uint64_t refused_since; /* ms_now_ns of the first refusal in a row, 0 while the kernel accepts */
    int broken;        /* errno once the kernel refuses for good: reads then fail with it */
    bool wake_queued;  /* a wake-up is queued or in the kernel */

    pthread_mutex_t wait_lock;
    pthread_cond_t changed;
    bool reaping;        /* somebody owns the completion queue */
    bool blocking;       /* and may be asleep in the kernel */
    unsigned delivering; /* completions collected, not yet delivered */
    unsigned sleeping;   /* threads on `changed` */
    uint64_t wakes;

    atomic_uint unsubmitted; /* mirrors `queued`, so that poll can look without a lock */
    /* Submissions the kernel has and we have not collected. The increment (release) before a submission pairs with
     * the decrement (acquire) after its completion: the kernel orders the two, but in C only this does. */
    atomic_uint in_kernel;
    atomic_uint_fast64_t completed; /* added to (release) after done, read (acquire) by completed */
    atomic_uint_fast64_t retries;
} uring_reader;

typedef struct completion {
    ms_read * read; /* NULL: a wake-up */
    int result;
} completion;

/* ---- towards the kernel ---- */

/* Neither buffers nor files are registered: measured, and not worth pinning the cache for (docs/benchmarks.md). */
static void prepare(struct io_uring_sqe * sqe, ms_read * read) {
    if (read == NULL) {
        io_uring_prep_nop(sqe);
    } else {
        ms_read_part part = ms_read_rest(read);
        read->link = read->file->direct_fd >= 0 && part.fd == read->file->direct_fd; /* for when it completes */
        io_uring_prep_read(sqe, part.fd, part.dst, part.bytes, part.offset);
    }
    io_uring_sqe_set_data(sqe, read);
}

static bool refused_for_now(int e) {
    return e == 0 || e == EAGAIN || e == EBUSY || e == ENOMEM || e == EINTR;
}

/* While something is in the kernel its completion frees what a submission needs; with nothing there, and still refused
 * after a second, it will not come. Measured in time, because threads that poll would use up any number of tries. */
static void note_refusal_locked(uring_reader * r, int e) {
    uint64_t now = ms_now_ns();
    if (r->refused_since == 0 || atomic_load_explicit(&r->in_kernel, memory_order_relaxed) > 0) {
        r->refused_since = now;
    } else if (now - r->refused_since > MS_URING_MAX_REFUSED_NS) {
        r->broken = e;
    }
}

/* Hands over what the kernel takes now. The rest stays queued; a ring that is refused for good is marked broken. */
static void submit_locked(uring_reader * r) {
    while (r->queued > 0 && r->broken == 0) {
        unsigned taken = atomic_load_explicit(&r->in_kernel, memory_order_relaxed) + r->prepared;
        for (; r->prepared < r->queued && taken < r->kernel_limit; taken++) {
            struct io_uring_sqe * sqe = io_uring_get_sqe(&r->ring);
            if (sqe == NULL) {
                break;
            }
            prepare(sqe, r->queue[(r->head + r->prepared) % r->capacity]);
            r->prepared++;
        }
        if (r->prepared == 0) {
            return; /* the kernel has all it may have: more when completions arrive */
        }
        unsigned n = r->prepared;
        atomic_fetch_add_explicit(&r->in_kernel, n, memory_order_release); /* before another thread can reap them */
        int result = io_uring_submit(&r->ring);
        unsigned accepted = result > 0 ? (unsigned) result : 0;
        MS_ASSERT(accepted <= n);
        atomic_fetch_sub_explicit(&r->in_kernel, n - accepted, memory_order_relaxed);
        r->head = (r->head + accepted) % r->capacity;
        r->queued -= accepted;
        r->prepared -= accepted;
        atomic_store_explicit(&r->unsubmitted, r->queued, memory_order_relaxed);
        if (accepted > 0) {
            r->refused_since = 0;
        } else if (!refused_for_now(-result)) {
            r->broken = -result;
        } else if (result != -EINTR) {
            note_refusal_locked(r, result < 0 ? -result : EAGAIN);
            return;
        }
    }
}

static void queue_locked(uring_reader * r, ms_read * read) {
    MS_ASSERT(r->queued < r->capacity); /* the limit in flight is the caller's duty */
    r->queue[(r->head + r->queued) % r->capacity] = read;
    r->queued++;
    atomic_store_explicit(&r->unsubmitted, r->queued, memory_order_relaxed);
}

static void finish(uring_reader * r, ms_read * read, moestream_status status, int os_errno) {
    r->done(r->user, read, status, os_errno);
    atomic_fetch_add_explicit(&r->completed, 1, memory_order_release);
}

/* Submits what is queued; fails it where the ring is broken. Returns how many reads that ended. */
static int flush(uring_reader * r) {
    int n_failed = 0;
    pthread_mutex_lock(&r->submit_lock);
    submit_locked(r);
    while (r->broken != 0 && r->queued > 0) {
        ms_read * read = r->queue[r->head];
        int os_errno = r->broken;
        r->head = (r->head + 1) % r->capacity;
        r->queued--;
        r->prepared -= r->prepared > 0; /* left in the submission queue, which is never submitted again */
        r->wake_queued = r->wake_queued && read != NULL;
        atomic_store_explicit(&r->unsubmitted, r->queued, memory_order_relaxed);
        pthread_mutex_unlock(&r->submit_lock);
        if (read != NULL) {
            finish(r, read, MOESTREAM_ERR_IO, os_errno);
            n_failed++;
        }
        pthread_mutex_lock(&r->submit_lock);
    }
    pthread_mutex_unlock(&r->submit_lock);
    return n_failed;
}

/* ---- from the kernel ---- */

/* Waits in the kernel for a completion. The caller has the role of the reaper. */
static void wait_in_kernel(uring_reader * r, uint64_t timeout_ns) {
    if (r->ext_arg) {
        struct __kernel_timespec t;
        t.tv_sec = (long long) (timeout_ns / 1000000000u);
        t.tv_nsec = (long long) (timeout_ns % 1000000000u);
        struct io_uring_cqe * cqe;
        io_uring_wait_cqe_timeout(&r->ring, &cqe, &t); /* whatever it says, the queue is looked at next */
    } else {
        /* Without that feature liburing would queue a timeout, in a submission queue that others are filling. */
        struct timespec t;
        t.tv_sec = (time_t) (timeout_ns / 1000000000u);
        t.tv_nsec = (long) (timeout_ns % 1000000000u);
        struct pollfd p = {.fd = r->ring.ring_fd, .events = POLLIN};
        ppoll(&p, 1, &t, NULL);
    }
}

/* What is in the completion queue, at most BATCH. The caller has the role of the reaper. */
static int collect(uring_reader * r, completion * out) {
    struct io_uring_cqe * cqes[BATCH];
    unsigned n = io_uring_peek_batch_cqe(&r->ring, cqes, BATCH);
    for (unsigned i = 0; i < n; i++) {
        out[i].read = io_uring_cqe_get_data(cqes[i]);
        out[i].result = cqes[i]->res;
    }
    io_uring_cq_advance(&r->ring, n);
    atomic_fetch_sub_explicit(&r->in_kernel, n, memory_order_acq_rel);
    return (int) n;
}

/* Gives up the role; `n` collected completions are the caller's to deliver. */
static void leave_reaping_locked(uring_reader * r, int n) {
    r->reaping = false;
    r->blocking = false;
    r->delivering += (unsigned) n;
    if (n == 0 && r->sleeping > 0) {
        pthread_cond_broadcast(&r->changed); /* else deliver wakes them */
    }
}

/* Applies the retry table to each completion, without a lock. Returns how many reads ended. */
static int deliver(uring_reader * r, const completion * batch, int n) {
    int n_done = 0;
    bool again = false;
    for (int i = 0; i < n; i++) {
        ms_read * read = batch[i].read;
        if (read == NULL) {
            pthread_mutex_lock(&r->submit_lock);
            r->wake_queued = false;
            pthread_mutex_unlock(&r->submit_lock);
        } else {
            moestream_status status = MOESTREAM_OK;
            int os_errno = 0;
            int fd = read->link ? read->file->direct_fd : read->file->fd;
            if (ms_read_apply(read, fd, batch[i].result, &status, &os_errno) == MS_READ_AGAIN) {
                atomic_fetch_add_explicit(&r->retries, 1, memory_order_relaxed);
                if (read->retries > 0) {
                    ms_relax(read->retries); /* refused for now: let the others go first */
                }
                pthread_mutex_lock(&r->submit_lock);
                queue_locked(r, read);
                pthread_mutex_unlock(&r->submit_lock);
                again = true;
            } else {
                finish(r, read, status, os_errno);
                n_done++;
            }
        }
        if (i + 1 == n && (again || atomic_load_explicit(&r->unsubmitted, memory_order_relaxed) > 0)) {
            n_done += flush(r); /* before the last one is counted as delivered: until then nobody waits in the kernel */
        }
        pthread_mutex_lock(&r->wait_lock);
        r->delivering--;
        if (r->sleeping > 0) {
            pthread_cond_broadcast(&r->changed);
        }
        pthread_mutex_unlock(&r->wait_lock);
    }
    return n_done;
}

/* ---- the seam ---- */

/* Ends the wait of whoever sleeps in the kernel, by a completion that is nobody's. */
static void kick(uring_reader * r) {
    pthread_mutex_lock(&r->submit_lock);
    if (!r->wake_queued && r->broken == 0) {
        r->wake_queued = true;
        queue_locked(r, NULL);
        submit_locked(r);
    }
    pthread_mutex_unlock(&r->submit_lock);
}

static void uring_submit(ms_reader * reader, ms_read ** reads, int n) {
    uring_reader * r = (uring_reader *) reader;
    uint64_t now = ms_now_ns();
    pthread_mutex_lock(&r->submit_lock);
    for (int i = 0; i < n; i++) {
        reads[i]->submitted_ns = now;
        reads[i]->got = 0;
        reads[i]->retries = 0;
        reads[i]->link = 0;
        queue_locked(r, reads[i]);
    }
    pthread_mutex_unlock(&r->submit_lock);
    flush(r);
}

static int uring_poll(ms_reader * reader) {
    uring_reader * r = (uring_reader *) reader;
    int n_done = 0;
    if (atomic_load_explicit(&r->unsubmitted, memory_order_relaxed) > 0) {
        n_done += flush(r);
    }
    while (atomic_load_explicit(&r->in_kernel, memory_order_relaxed) > 0) {
        pthread_mutex_lock(&r->wait_lock);
        bool taken = r->reaping;
        r->reaping = true;
        pthread_mutex_unlock(&r->wait_lock);
        if (taken) {
            break; /* that thread delivers */
        }
        completion batch[BATCH];
        int n = collect(r, batch);
        pthread_mutex_lock(&r->wait_lock);
        leave_reaping_locked(r, n);
        pthread_mutex_unlock(&r->wait_lock);
        n_done += deliver(r, batch, n);
        if (n < BATCH) {
            break;
        }
    }
    return n_done;
}

/* One turn of the reaper, at most `timeout_ns` long; called and returns with `wait_lock` held. */
static void reap_locked(uring_reader * r, uint64_t seen, uint64_t timeout_ns) {
    bool may_block = r->delivering == 0;
    r->reaping = true;
    r->blocking = may_block;
    pthread_mutex_unlock(&r->wait_lock);
    if (atomic_load_explicit(&r->unsubmitted, memory_order_relaxed) > 0) {
        flush(r);
    }
    completion batch[BATCH];
    int n = collect(r, batch);
    if (n == 0 && may_block && atomic_load_explicit(&r->completed, memory_order_acquire) == seen) {
        uint64_t limit = MS_URING_MAX_WAIT_NS;
        if (atomic_load_explicit(&r->unsubmitted, memory_order_relaxed) > 0 &&
            atomic_load_explicit(&r->in_kernel, memory_order_relaxed) == 0) {
            limit = REFUSED_PAUSE_NS; /* the kernel refused them, and nothing is coming: ask it again soon */
        }
        wait_in_kernel(r, timeout_ns < limit ? timeout_ns : limit);
        n = collect(r, batch);
    }
    pthread_mutex_lock(&r->wait_lock);
    leave_reaping_locked(r, n);
    if (n > 0) {
        pthread_mutex_unlock(&r->wait_lock);
        deliver(r, batch, n);
        pthread_mutex_lock(&r->wait_lock);
    }
}

static void uring_wait(ms_reader * reader, uint64_t seen, uint64_t timeout_ns) {
    uring_reader * r = (uring_reader *) reader;
    uint64_t deadline = ms_deadline_after(timeout_ns);
    bool looked = false; /* at the completion queue, while others deliver */
    pthread_mutex_lock(&r->wait_lock);
    uint64_t wakes = r->wakes;
    while (atomic_load_explicit(&r->completed, memory_order_acquire) == seen && r->wakes == wakes) {
        uint64_t now = ms_now_ns();
        if (now >= deadline) {
            break;
        }
        if (r->reaping || (looked && r->delivering > 0)) {
            r->sleeping++;
            ms_cond_wait_until(&r->changed, &r->wait_lock, deadline);
            r->sleeping--;
            looked = false;
        } else {
            reap_locked(r, seen, deadline - now);
            looked = true;
        }
    }
    pthread_mutex_unlock(&r->wait_lock);
}

static void uring_wake(ms_reader * reader) {
    uring_reader * r = (uring_reader *) reader;
    pthread_mutex_lock(&r->wait_lock);
    r->wakes++;
    bool in_kernel = r->blocking;
    pthread_cond_broadcast(&r->changed);
    pthread_mutex_unlock(&r->wait_lock);
    if (in_kernel) {
        kick(r);
    }
}

static uint64_t uring_completed(ms_reader * reader) {
    return atomic_load_explicit(&((uring_reader *) reader)->completed, memory_order_acquire);
}

static uint64_t uring_retries(ms_reader * reader) {
    return atomic_load_explicit(&((uring_reader *) reader)->retries, memory_order_relaxed);
}

/* ---- open and close ---- */

static void uring_close(ms_reader * reader) {
    if (reader == NULL) {
        return;
    }
    uring_reader * r = (uring_reader *) reader;
    while (atomic_load_explicit(&r->in_kernel, memory_order_acquire) > 0 ||
           atomic_load_explicit(&r->unsubmitted, memory_order_relaxed) > 0) {
        uring_wait(reader, uring_completed(reader), MS_URING_MAX_WAIT_NS);
    }
    io_uring_queue_exit(&r->ring);
    pthread_cond_destroy(&r->changed);
    pthread_mutex_destroy(&r->wait_lock);
    pthread_mutex_destroy(&r->submit_lock);
    free(r->queue);
    free(r);
}

static const struct ms_reader_ops uring_ops = {
    .name = "io_uring",
    .engine = MOESTREAM_IO_URING,
    .by_poll = true,
    .submit = uring_submit,
    .poll = uring_poll,
    .wait = uring_wait,
    .wake = uring_wake,
    .completed = uring_completed,
    .retries = uring_retries,
    .close = uring_close,
};

/* A ring is not enough: reads must be known, and the submitting call allowed. 0 or an errno. */
static int try_ring(struct io_uring * ring) {
    struct io_uring_probe * probe = io_uring_get_probe_ring(ring);
    bool can_read = probe != NULL && io_uring_opcode_supported(probe, IORING_OP_READ);
    io_uring_free_probe(probe);
    if (!can_read) {
        return ENOSYS;
    }
    struct io_uring_sqe * sqe = io_uring_get_sqe(ring);
    io_uring_prep_nop(sqe);
    io_uring_sqe_set_data(sqe, NULL);
    int result = io_uring_submit(ring);
    if (result < 0) {
        return -result;
    }
    struct io_uring_cqe * cqe;
    do {
        result = io_uring_wait_cqe(ring, &cqe);
    } while (result == -EINTR);
    if (result < 0) {
        return -result;
    }
    io_uring_cqe_seen(ring, cqe);
    return 0;
}

/* 0 or an errno. Kernels before 5.12 count rings as locked memory, so a smaller one may be had. */
static int open_ring(struct io_uring * ring, int depth) {
    unsigned entries = depth < MS_URING_MAX_ENTRIES ? (unsigned) depth : MS_URING_MAX_ENTRIES;
    entries = entries < MIN_ENTRIES ? MIN_ENTRIES : entries;
    int result;
    for (;;) {
        result = io_uring_queue_init(entries, ring, 0);
        if (result != -ENOMEM || entries <= MIN_ENTRIES) {
            break;
        }
        entries = entries / 2 < MIN_ENTRIES ? MIN_ENTRIES : entries / 2;
    }
    if (result < 0) {
        return -result;
    }
    int e = try_ring(ring);
    if (e != 0) {
        io_uring_queue_exit(ring);
    }
    return e;
}

static moestream_status fail_ring(moestream_error * err, int e) {
    const char * remedy = "";
    if (e == EPERM || e == EACCES) {
        remedy = "; a container seccomp profile that permits io_uring_setup, io_uring_enter and io_uring_register, and "
                 "sysctl kernel.io_uring_disabled=0, would allow it";
    } else if (e == ENOSYS) {
        remedy = "; it takes Linux 5.6 or newer, built with io_uring";
    } else if (e == ENOMEM) {
        remedy = "; a higher RLIMIT_MEMLOCK (ulimit -l) would allow it";
    }
    return ms_fail(err, e == ENOMEM ? MOESTREAM_ERR_NOMEM : MOESTREAM_ERR_UNSUPPORTED, e, "io_uring was refused: %s%s",
                   strerror(e), remedy);
}

moestream_status ms_reader_uring_open(ms_reader ** out, const ms_reader_options * options, moestream_error * err) {
    MS_ASSERT(options->depth > 0 && options->done != NULL);
    uring_reader * r = ms_calloc(1, sizeof *r);
    ms_read ** queue = ms_calloc((size_t) options->depth + 1, sizeof *queue); /* one more for a wake-up */
    if (r == NULL || queue == NULL) {
        free(queue);
        free(r);
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory was left for a queue of %d reads", options->depth);
    }
    int e = open_ring(&r->ring, options->depth);
    if (e != 0) {
        free(queue);
        free(r);
        return fail_ring(err, e);
    }
    r->reader.ops = &uring_ops;
    r->done = options->done;
    r->user = options->user;
    r->queue = queue;
    r->capacity = (unsigned) options->depth + 1;
    r->kernel_limit = *r->ring.cq.kring_entries;
    r->ext_arg = (r->ring.features & IORING_FEAT_EXT_ARG) != 0 && !MS_URING_NO_EXT_ARG;
    atomic_init(&r->unsubmitted, 0);
    atomic_init(&r->in_kernel, 0);
    atomic_init(&r->completed, 0);
    atomic_init(&r->retries, 0);
    bool have_submit = pthread_mutex_init(&r->submit_lock, NULL) == 0;
    bool have_wait = have_submit && pthread_mutex_init(&r->wait_lock, NULL) == 0;
    if (!have_wait || !ms_cond_init(&r->changed)) {
        if (have_wait) {
            pthread_mutex_destroy(&r->wait_lock);
        }
        if (have_submit) {
            pthread_mutex_destroy(&r->submit_lock);
        }
        io_uring_queue_exit(&r->ring);
        free(queue);
        free(r);
        return ms_fail(err, MOESTREAM_ERR_NOMEM, 0, "a lock was refused");
    }
    *out = &r->reader;
    return MOESTREAM_OK;
}

bool ms_reader_uring_built(void) {
    return true;
}

#else

moestream_status ms_reader_uring_open(ms_reader ** out, const ms_reader_options * options, moestream_error * err) {
    (void) out, (void) options;
    return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0,
                   "io_uring was not compiled in: liburing was not found when this library was built");
}

bool ms_reader_uring_built(void) {
    return false;
}

#endif
