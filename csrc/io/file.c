/*
 * io/file: opens a model file twice, through the page cache and past it, and decides which of the two may be used.
 * Guarantees: as file.h says; on failure nothing is left open.
 * Never writes, never maps.
 */
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/reader.h" /* MS_IO_RETRIES */

_Static_assert(sizeof(off_t) == 8, "files are read at 64-bit offsets");

enum { CAUSE_BYTES = 160, PROBE_PAGES = 3, NOTHING_WAS_READ = 0xa5 };

/* Why direct reads are off for a file. */
typedef struct refusal {
    int os_errno; /* 0 where no system call failed */
    char text[CAUSE_BYTES];
} refusal;

/* One pread that only gives up on EINTR when it comes for ever. */
static ssize_t pread_patiently(int fd, void * dst, size_t bytes, uint64_t offset) {
    for (unsigned tries = 0;; tries++) {
        ssize_t n = pread(fd, dst, bytes, (off_t) offset);
        if (n >= 0 || (errno != EINTR && errno != EAGAIN) || tries >= MS_IO_RETRIES) {
            return n;
        }
        ms_relax(tries);
    }
}

/* ---- is direct I/O right here? ---- */

/* Some file systems accept O_DIRECT and then refuse the first read, or serve stale bytes. */
static bool probe_direct(int fd, int direct_fd, uint64_t file_bytes, uint64_t probe_offset, refusal * why) {
    uint64_t start = ms_align_down(probe_offset < file_bytes ? probe_offset : file_bytes, MS_PAGE);
    start -= start >= MS_PAGE ? MS_PAGE : 0;
    size_t window = (size_t) PROBE_PAGES * MS_PAGE;
    uint8_t * direct = aligned_alloc(MS_PAGE, 2 * window);
    if (direct == NULL) {
        why->os_errno = ENOMEM;
        snprintf(why->text, sizeof why->text, "no memory for the probe");
        return false;
    }
    uint8_t * buffered = direct + window;
    memset(direct, NOTHING_WAS_READ, window);
    bool same = false;
    ssize_t expected = pread_patiently(fd, buffered, window, start);
    int expected_errno = errno;
    ssize_t n = pread_patiently(direct_fd, direct, window, start);
    int direct_errno = errno;
    if (expected < 0) {
        why->os_errno = expected_errno;
        snprintf(why->text, sizeof why->text, "a read at offset %llu failed: %s", (unsigned long long) start,
                 strerror(expected_errno));
    } else if (n < 0) {
        why->os_errno = direct_errno;
        snprintf(why->text, sizeof why->text, "the first direct read failed: %s", strerror(direct_errno));
    } else if (n == 0 && expected > 0) {
        snprintf(why->text, sizeof why->text, "a direct read at offset %llu gave nothing", (unsigned long long) start);
    } else if (memcmp(direct, buffered, (size_t) (n < expected ? n : expected)) != 0) {
        snprintf(why->text, sizeof why->text, "a direct read at offset %llu gave other bytes than the page cache",
                 (unsigned long long) start);
    } else {
        same = true;
    }
    free(direct);
    return same;
}

/* A probed descriptor, or -1 and the cause. */
static int open_direct(const char * path, int fd, const struct stat * buffered, uint64_t probe_offset, refusal * why) {
#ifdef O_DIRECT
    int direct_fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (direct_fd < 0) {
        why->os_errno = errno;
        snprintf(why->text, sizeof why->text, "the file system refused O_DIRECT: %s", strerror(why->os_errno));
        return -1;
    }
    struct stat direct;
    if (fstat(direct_fd, &direct) != 0 || direct.st_dev != buffered->st_dev || direct.st_ino != buffered->st_ino) {
        snprintf(why->text, sizeof why->text, "the file was replaced while it was opened");
    } else if (probe_direct(fd, direct_fd, (uint64_t) buffered->st_size, probe_offset, why)) {
        return direct_fd;
    }
    close(direct_fd);
    return -1;
#else
    (void) path, (void) fd, (void) buffered, (void) probe_offset;
    snprintf(why->text, sizeof why->text, "this system has no O_DIRECT");
    return -1;
#endif
}

/* ---- open and close ---- */

/* The buffered descriptor, or -1 with `err` filled. */
static int open_buffered(const char * path, struct stat * st, moestream_error * err) {
    /* Asked before open, which would wait for a writer if the path were a named pipe. */
    if (stat(path, st) != 0) {
        int e = errno;
        ms_fail(err, MOESTREAM_ERR_IO, e, "%s could not be opened: %s", path, strerror(e));
        return -1;
    }
    if (!S_ISREG(st->st_mode)) {
        ms_fail(err, MOESTREAM_ERR_IO, S_ISDIR(st->st_mode) ? EISDIR : EINVAL, "%s was not a regular file", path);
        return -1;
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        int e = errno;
        ms_fail(err, MOESTREAM_ERR_IO, e, "%s could not be opened: %s", path, strerror(e));
        return -1;
    }
    if (fstat(fd, st) != 0) {
        int e = errno;
        close(fd);
        ms_fail(err, MOESTREAM_ERR_IO, e, "the size of %s could not be read: %s", path, strerror(e));
        return -1;
    }
    return fd;
}

moestream_status ms_file_open(ms_file * file, const char * path, int direct, uint64_t probe_offset,
                              moestream_error * err) {
    struct stat st;
    char * path_copy = ms_strdup(path);
    if (path_copy == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory was left for the name of %s", path);
    }
    int fd = open_buffered(path, &st, err);
    if (fd < 0) {
        free(path_copy);
        return MOESTREAM_ERR_IO;
    }
    int direct_fd = -1;
    if (direct != MOESTREAM_DIRECT_OFF) {
        refusal why = {0, ""};
        direct_fd = open_direct(path, fd, &st, probe_offset, &why);
        if (direct_fd < 0 && direct == MOESTREAM_DIRECT_ON) {
            close(fd);
            free(path_copy);
            return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, why.os_errno,
                           "direct reads of %s were required and are not possible: %s", path, why.text);
        }
        if (direct_fd < 0) {
            ms_log(MS_LOG_WARN, "%s is read through the page cache: %s", path, why.text);
        }
    }
#if defined(POSIX_FADV_RANDOM)
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM); /* advice: slices are read whole, nothing beyond them is wanted */
#endif
    file->path = path_copy;
    file->bytes = (uint64_t) st.st_size;
    file->id = ms_file_id_of(&st);
    file->fd = fd;
    file->direct_fd = direct_fd;
    atomic_init(&file->direct, direct_fd >= 0);
    return MOESTREAM_OK;
}

void ms_file_close(ms_file * file) {
    if (file == NULL || file->path == NULL) {
        return;
    }
    close(file->fd);
    if (file->direct_fd >= 0) {
        close(file->direct_fd);
    }
    free(file->path);
    file->path = NULL;
    file->fd = -1;
    file->direct_fd = -1;
    atomic_store_explicit(&file->direct, false, memory_order_release);
}

void ms_file_refuse_direct(ms_file * file, int os_errno) {
    if (atomic_exchange_explicit(&file->direct, false, memory_order_acq_rel)) {
        ms_log(MS_LOG_WARN, "%s is read through the page cache from now on: a direct read was refused: %s", file->path,
               strerror(os_errno));
    }
}

int ms_file_changed(const ms_file * file) {
    struct stat st;
    if (fstat(file->fd, &st) != 0) {
        return errno;
    }
    ms_file_id now = ms_file_id_of(&st);
    return ms_same_file(&now, &file->id) ? 0 : ESTALE;
}

/* ---- one plain read ---- */

moestream_status ms_file_pread(const ms_file * file, void * dst, uint64_t bytes, uint64_t offset,
                               moestream_error * err) {
    const uint64_t chunk = (uint64_t) 1 << 30; /* Linux moves at most 2 GiB a call */
    uint64_t end;
    if (!ms_add_u64(offset, bytes, &end) || end > INT64_MAX) {
        return ms_fail(err, MOESTREAM_ERR_EOF, 0, "%s ended at %llu, before %llu bytes at offset %llu", file->path,
                       (unsigned long long) file->bytes, (unsigned long long) bytes, (unsigned long long) offset);
    }
    uint64_t got = 0;
    while (got < bytes) {
        uint64_t want = bytes - got < chunk ? bytes - got : chunk;
        ssize_t n = pread_patiently(file->fd, (uint8_t *) dst + got, (size_t) want, offset + got);
        if (n < 0) {
            int e = errno;
            return ms_fail(err, MOESTREAM_ERR_IO, e, "a read of %llu bytes at offset %llu of %s failed: %s",
                           (unsigned long long) want, (unsigned long long) (offset + got), file->path, strerror(e));
        }
        if (n == 0) {
            return ms_fail(err, MOESTREAM_ERR_EOF, 0, "%s ended at %llu, before %llu bytes at offset %llu", file->path,
                           (unsigned long long) (offset + got), (unsigned long long) bytes,
                           (unsigned long long) offset);
        }
        got += (uint64_t) n;
    }
    return MOESTREAM_OK;
}
