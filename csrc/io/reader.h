/*
 * io/reader: the seam between the stream and the engines that read: submit many reads at once, then poll or wait.
 * An engine (reader_uring.c, reader_pread.c, the tests' fake reader) guarantees for each submitted read exactly one
 * call of `done`, from whichever thread is inside submit, poll or wait, or from a thread of the engine; short reads
 * are resumed, EINTR and EAGAIN retried with a bound, a direct read that is refused is repeated through the page
 * cache. An engine holds no lock while it calls `done`.
 * Never allocates after init, never interprets the bytes.
 *
 * Retry table (one place, used by every engine, reader_common.c):
 *   result > 0, less than `need`      resume behind what came (through the page cache where no longer aligned)
 *   result > 0, at least `need`       done
 *   0                                 EOF, unless nothing more was needed
 *   -EINTR, -EAGAIN, -EBUSY           repeat, at most MS_IO_RETRIES times without progress
 *   -ECANCELED, -EFAULT               the same: io_uring's answers when the thread that submitted has exited
 *   -EINVAL, -EOPNOTSUPP on a direct descriptor   ms_file_refuse_direct, repeat buffered
 *   anything else                     IO with that errno
 */
#ifndef MS_IO_READER_H
#define MS_IO_READER_H

#include "base/base.h"
#include "io/file.h"

enum { MS_IO_RETRIES = 100 };

typedef struct ms_read {
    ms_file * file;
    uint64_t offset; /* aligned to MS_PAGE */
    uint32_t bytes;  /* whole window, a multiple of MS_PAGE; may reach past the end of the file */
    uint32_t need;   /* bytes of the window that must arrive: the slice ends here */
    void * dst;      /* aligned to MS_PAGE, room for `bytes` */
    uint64_t tag;    /* the caller's */
    uint64_t submitted_ns; /* filled by submit */
    /* the engine's own state while in flight */
    uint32_t got;
    uint16_t retries;
    uint16_t link;
} ms_read;

/* `status` is OK, IO (os_errno set) or EOF. `read` is no longer used by the engine when this is called. */
typedef void (*ms_read_done)(void * user, ms_read * read, moestream_status status, int os_errno);

typedef struct ms_reader ms_reader;

struct ms_reader_ops {
    const char * name; /* "io_uring", "pread" */
    int engine;        /* MOESTREAM_IO_* */
    bool by_poll;      /* completions are delivered by whoever polls or waits, not by threads of the engine's own */
    /* Hands over `n` reads, with one system call where the engine can; n is at most the depth given to init minus
     * what is in flight. `reads[i]` must stay valid until its done. Thread: any. */
    void (*submit)(ms_reader * reader, ms_read ** reads, int n);
    /* Delivers what has completed, without waiting. Returns how many. Thread: any. */
    int (*poll)(ms_reader * reader);
    /* Returns soon after at least one read has completed since `seen` (a value of ms_reader_completed), or at the
     * timeout, however long the reads take. Thread: any, several at once. */
    void (*wait)(ms_reader * reader, uint64_t seen, uint64_t timeout_ns);
    /* Wakes every thread inside wait. */
    void (*wake)(ms_reader * reader);
    uint64_t (*completed)(ms_reader * reader);
    uint64_t (*retries)(ms_reader * reader);
    /* Waits for what the kernel has (bounded by it, not by us), joins threads, frees. What was not begun may end with
     * IO and ECANCELED. */
    void (*close)(ms_reader * reader);
};

struct ms_reader {
    const struct ms_reader_ops * ops;
};

typedef struct ms_reader_options {
    int depth;     /* reads in flight at most */
    int n_threads; /* pread engine; 0, for tests: whoever waits reads, and is held up as long as the read takes */
    ms_read_done done;
    void * user;
} ms_reader_options;

/* Errors: UNSUPPORTED (not compiled in, or the kernel refused a ring: errno and what would allow it), NOMEM. */
moestream_status ms_reader_uring_open(ms_reader ** out, const ms_reader_options * options, moestream_error * err);
moestream_status ms_reader_pread_open(ms_reader ** out, const ms_reader_options * options, moestream_error * err);

/* `io`: MOESTREAM_IO_*. AUTO tries io_uring and falls back to pread with one log line that says why. */
moestream_status ms_reader_open(ms_reader ** out, int io, const ms_reader_options * options, moestream_error * err);

/* true where io_uring was compiled in */
bool ms_reader_uring_built(void);

/* ---- for engines ---- */

typedef enum ms_read_next {
    MS_READ_DONE_OK,
    MS_READ_DONE_ERROR, /* *status and *os_errno are set */
    MS_READ_AGAIN       /* submit the rest: see ms_read_rest */
} ms_read_next;

/* Applies the retry table to one result (bytes or -errno) of a read that used `fd`. */
ms_read_next ms_read_apply(ms_read * read, int fd, int64_t result, moestream_status * status, int * os_errno);

/* What remains of a read: descriptor, place, length, file offset. */
typedef struct ms_read_part {
    int fd;
    void * dst;
    uint32_t bytes;
    uint64_t offset;
} ms_read_part;
ms_read_part ms_read_rest(const ms_read * read);

#endif
