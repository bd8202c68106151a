/*
 * io/reader_pread: reads with a few threads of our own.
 * Guarantees: as reader.h says; reads are begun in the order in which they were submitted. A thread that waits never
 * reads: it sleeps until its timeout, so that a deadline or a cancel is seen while the disk does not answer. (Without
 * threads of our own, which only tests ask for, the waiting thread reads.) Reads that wait for their turn when the
 * engine is closed end with ECANCELED; those that were begun are waited for, since they write to the caller's memory.
 * Never spins, never holds its lock over a read or a `done`.
 *
 * Locks: `lock` guards everything in pread_reader that is not atomic or constant after open.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io/reader.h"
#include "io/wait.h"

typedef struct pread_reader {
    ms_reader reader; /* first: an ms_reader * is a pread_reader * */
    ms_read_done done;
    void * user;
    int n_threads;
    pthread_t * threads;

    pthread_mutex_t lock;
    pthread_cond_t work;     /* for the threads: reads are queued, or closing */
    pthread_cond_t progress; /* for waiters: something completed, or wake was called */
    ms_read ** queue;        /* ring of `capacity` */
    int capacity;
    int head;
    int queued;
    int waiting; /* threads asleep on `progress` */
    uint64_t wakes;
    bool closing;

    atomic_uint_fast64_t completed; /* added to (release) after done, read (acquire) by completed */
    atomic_uint_fast64_t retries;
} pread_reader;

/* ---- one read ---- */

static void end_read(pread_reader * r, ms_read * read, moestream_status status, int os_errno) {
    r->done(r->user, read, status, os_errno);
    atomic_fetch_add_explicit(&r->completed, 1, memory_order_release);
}

static void perform(pread_reader * r, ms_read * read) {
    moestream_status status = MOESTREAM_OK;
    int os_errno = 0;
    for (;;) {
        ms_read_part part = ms_read_rest(read);
        ssize_t n = pread(part.fd, part.dst, part.bytes, (off_t) part.offset);
        int64_t result = n >= 0 ? n : -(int64_t) errno;
        if (ms_read_apply(read, part.fd, result, &status, &os_errno) != MS_READ_AGAIN) {
            break;
        }
        atomic_fetch_add_explicit(&r->retries, 1, memory_order_relaxed);
        if (read->retries > 0) {
            ms_relax(read->retries); /* refused for now: let the others go first */
        }
    }
    end_read(r, read, status, os_errno);
}

/* Takes the oldest read and does it, or ends it where nobody will look at it; called and returns with the lock held. */
static void do_next_locked(pread_reader * r) {
    ms_read * read = r->queue[r->head];
    bool closing = r->closing;
    r->head = (r->head + 1) % r->capacity;
    r->queued--;
    pthread_mutex_unlock(&r->lock);
    if (closing) {
        end_read(r, read, MOESTREAM_ERR_IO, ECANCELED);
    } else {
        perform(r, read);
    }
    pthread_mutex_lock(&r->lock);
    if (r->waiting > 0) {
        pthread_cond_broadcast(&r->progress);
    }
}

static void * reader_thread(void * arg) {
    pread_reader * r = arg;
    pthread_mutex_lock(&r->lock);
    for (;;) {
        if (r->queued > 0) {
            do_next_locked(r);
        } else if (r->closing) {
            break;
        } else {
            pthread_cond_wait(&r->work, &r->lock);
        }
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

/* ---- the seam ---- */

static void pread_submit(ms_reader * reader, ms_read ** reads, int n) {
    pread_reader * r = (pread_reader *) reader;
    uint64_t now = ms_now_ns();
    pthread_mutex_lock(&r->lock);
    MS_ASSERT(n >= 0 && n <= r->capacity - r->queued); /* the limit in flight is the caller's duty */
    for (int i = 0; i < n; i++) {
        reads[i]->submitted_ns = now;
        reads[i]->got = 0;
        reads[i]->retries = 0;
        reads[i]->link = 0;
        r->queue[(r->head + r->queued) % r->capacity] = reads[i];
        r->queued++;
    }
    if (n == 1) {
        pthread_cond_signal(&r->work);
    } else if (n > 1) {
        pthread_cond_broadcast(&r->work);
    }
    if (r->n_threads == 0 && r->waiting > 0) {
        pthread_cond_broadcast(&r->progress); /* it is they who read */
    }
    pthread_mutex_unlock(&r->lock);
}

static int pread_poll(ms_reader * reader) {
    (void) reader; /* each read is delivered by the thread that did it */
    return 0;
}

static void pread_wait(ms_reader * reader, uint64_t seen, uint64_t timeout_ns) {
    pread_reader * r = (pread_reader *) reader;
    uint64_t deadline = ms_deadline_after(timeout_ns);
    pthread_mutex_lock(&r->lock);
    uint64_t wakes = r->wakes;
    while (atomic_load_explicit(&r->completed, memory_order_acquire) == seen && r->wakes == wakes) {
        if (r->queued > 0 && r->n_threads == 0) {
            do_next_locked(r);
        } else if (ms_now_ns() >= deadline) {
            break;
        } else {
            r->waiting++;
            ms_cond_wait_until(&r->progress, &r->lock, deadline);
            r->waiting--;
        }
    }
    pthread_mutex_unlock(&r->lock);
}

static void pread_wake(ms_reader * reader) {
    pread_reader * r = (pread_reader *) reader;
    pthread_mutex_lock(&r->lock);
    r->wakes++;
    pthread_cond_broadcast(&r->progress);
    pthread_mutex_unlock(&r->lock);
}

static uint64_t pread_completed(ms_reader * reader) {
    return atomic_load_explicit(&((pread_reader *) reader)->completed, memory_order_acquire);
}

static uint64_t pread_retries(ms_reader * reader) {
    return atomic_load_explicit(&((pread_reader *) reader)->retries, memory_order_relaxed);
}

/* ---- open and close ---- */

static void stop_threads(pread_reader * r, int n_started) {
    pthread_mutex_lock(&r->lock);
    r->closing = true;
    pthread_cond_broadcast(&r->work);
    while (r->queued > 0) {
        do_next_locked(r);
    }
    pthread_mutex_unlock(&r->lock);
    for (int i = 0; i < n_started; i++) {
        pthread_join(r->threads[i], NULL);
    }
}

static void free_reader(pread_reader * r) {
    free(r->queue);
    free(r->threads);
    free(r);
}

static void pread_close(ms_reader * reader) {
    if (reader == NULL) {
        return;
    }
    pread_reader * r = (pread_reader *) reader;
    stop_threads(r, r->n_threads);
    pthread_cond_destroy(&r->progress);
    pthread_cond_destroy(&r->work);
    pthread_mutex_destroy(&r->lock);
    free_reader(r);
}

static const struct ms_reader_ops pread_ops = {
    .name = "pread",
    .engine = MOESTREAM_IO_PREAD,
    .submit = pread_submit,
    .poll = pread_poll,
    .wait = pread_wait,
    .wake = pread_wake,
    .completed = pread_completed,
    .retries = pread_retries,
    .close = pread_close,
};

/* 0 or an errno; what was started is stopped again on failure. */
static int start_threads(pread_reader * r) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the host's handlers run on the host's threads */
    int e = 0;
    int n_started = 0;
    while (n_started < r->n_threads && e == 0) {
        e = pthread_create(&r->threads[n_started], NULL, reader_thread, r);
        n_started += e == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (e != 0) {
        stop_threads(r, n_started);
    }
    return e;
}

moestream_status ms_reader_pread_open(ms_reader ** out, const ms_reader_options * options, moestream_error * err) {
    MS_ASSERT(options->depth > 0 && options->n_threads >= 0 && options->done != NULL);
    pread_reader * r = ms_calloc(1, sizeof *r);
    if (r == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory was left for the pread engine");
    }
    r->reader.ops = &pread_ops;
    r->done = options->done;
    r->user = options->user;
    r->n_threads = options->n_threads;
    r->capacity = options->depth;
    r->queue = ms_calloc((size_t) r->capacity, sizeof *r->queue);
    r->threads = ms_calloc((size_t) r->n_threads, sizeof *r->threads);
    atomic_init(&r->completed, 0);
    atomic_init(&r->retries, 0);
    if (r->queue == NULL || r->threads == NULL) {
        free_reader(r);
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory was left for a queue of %d reads", options->depth);
    }
    if (pthread_mutex_init(&r->lock, NULL) != 0) {
        free_reader(r);
        return ms_fail(err, MOESTREAM_ERR_NOMEM, 0, "a mutex was refused");
    }
    bool have_work = ms_cond_init(&r->work);
    bool have_progress = have_work && ms_cond_init(&r->progress);
    int e = have_progress ? start_threads(r) : ENOMEM;
    if (e != 0) {
        if (have_progress) {
            pthread_cond_destroy(&r->progress);
        }
        if (have_work) {
            pthread_cond_destroy(&r->work);
        }
        pthread_mutex_destroy(&r->lock);
        free_reader(r);
        return ms_fail(err, MOESTREAM_ERR_NOMEM, e, "%d reader threads could not be started: %s", options->n_threads,
                       strerror(e));
    }
    *out = &r->reader;
    return MOESTREAM_OK;
}
