/*
 * io/reader_common: the retry table that every engine goes by, and the choice of an engine.
 * Guarantees: a read is repeated without progress at most MS_IO_RETRIES times.
 * Never waits, never allocates.
 */
#include <errno.h>

#include "io/reader.h"

static bool is_direct_fd(const ms_file * file, int fd) {
    return file->direct_fd >= 0 && fd == file->direct_fd;
}

ms_read_next ms_read_apply(ms_read * read, int fd, int64_t result, moestream_status * status, int * os_errno) {
    if (result > 0) {
        MS_ASSERT((uint64_t) result <= read->bytes - read->got);
        read->got += (uint32_t) result;
        read->retries = 0;
    }
    if (result >= 0 && read->got >= read->need) {
        return MS_READ_DONE_OK;
    }
    if (result > 0) {
        return MS_READ_AGAIN;
    }
    if (result == 0) {
        *status = MOESTREAM_ERR_EOF;
        *os_errno = 0;
        return MS_READ_DONE_ERROR;
    }
    int e = (int) -result;
    switch (e) {
        case EINTR:
        case EAGAIN:
        case EBUSY:
        /* io_uring ends a read with one of these two when the thread that submitted it has exited. We never cancel,
         * and a pointer that is truly wrong still fails, after the bounded repeats. */
        case ECANCELED:
        case EFAULT:
            if (read->retries < MS_IO_RETRIES) {
                read->retries++;
                return MS_READ_AGAIN;
            }
            break;
        case EINVAL:
        case EOPNOTSUPP:
            if (is_direct_fd(read->file, fd)) {
                ms_file_refuse_direct(read->file, e);
                return MS_READ_AGAIN; /* at most once: ms_read_rest no longer gives the direct descriptor */
            }
            break;
        default: break;
    }
    *status = MOESTREAM_ERR_IO;
    *os_errno = e;
    return MS_READ_DONE_ERROR;
}

ms_read_part ms_read_rest(const ms_read * read) {
    ms_read_part part;
    part.dst = (uint8_t *) read->dst + read->got;
    part.bytes = read->bytes - read->got;
    part.offset = read->offset + read->got;
    /* Direct I/O wants offset, length and memory aligned. The start is, by contract; what remains after a short read
     * may not be, and then comes through the page cache. */
    part.fd = read->got % MS_PAGE == 0 ? ms_file_fd(read->file) : read->file->fd;
    return part;
}

moestream_status ms_reader_open(ms_reader ** out, int io, const ms_reader_options * options, moestream_error * err) {
    if (io == MOESTREAM_IO_PREAD) {
        return ms_reader_pread_open(out, options, err);
    }
    if (io == MOESTREAM_IO_URING) {
        return ms_reader_uring_open(out, options, err);
    }
    if (io != MOESTREAM_IO_AUTO) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "io was %d, which is no engine", io);
    }
    moestream_error why = {.struct_size = sizeof why};
    if (ms_reader_uring_open(out, options, &why) == MOESTREAM_OK) {
        return MOESTREAM_OK;
    }
    moestream_status status = ms_reader_pread_open(out, options, err);
    if (status == MOESTREAM_OK) {
        ms_log(MS_LOG_WARN, "reading with pread and %d threads, because %s", options->n_threads, why.message);
    }
    return status;
}
