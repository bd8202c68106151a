/*
 * io/file: a model file opened for reading, directly where that works and is right, else through the page cache.
 * Guarantees: `direct_fd` is only offered after a probe showed the same bytes both ways; every fallback is logged once
 * with its cause; a file that is written to while it is open is noticed. Reads use absolute 64-bit offsets, so one file
 * may be read by many threads.
 * Never writes, never maps.
 */
#ifndef MS_IO_FILE_H
#define MS_IO_FILE_H

#include <stdatomic.h>

#include "base/base.h"

typedef struct ms_file {
    char * path;
    uint64_t bytes;
    ms_file_id id; /* as it was opened */
    int fd;        /* buffered, always open */
    int direct_fd; /* -1 where direct I/O is off or refused */
    atomic_bool direct; /* cleared for good when a direct read is refused later on */
} ms_file;

/* `direct`: MOESTREAM_DIRECT_*. With ON a refusal is an error, with AUTO it is logged. `probe_offset`: where the probe
 * compares a few pages (a multiple of nothing in particular). */
moestream_status ms_file_open(ms_file * file, const char * path, int direct, uint64_t probe_offset,
                              moestream_error * err);
void ms_file_close(ms_file * file);

/* The descriptor to use for a read at an aligned offset, and why not the direct one. */
static inline int ms_file_fd(const ms_file * file) {
    return atomic_load_explicit(&file->direct, memory_order_acquire) ? file->direct_fd : file->fd;
}
/* A direct read was refused (`os_errno`): from now on this file is buffered. Logs once. */
void ms_file_refuse_direct(ms_file * file, int os_errno);

/* 0 while the file is what was opened: ask after a read has succeeded, before its bytes are used. ESTALE once it has been
 * written to or cut; another errno where that cannot be said. A file put in its place under the same name does not
 * matter: the old one stays open. */
int ms_file_changed(const ms_file * file);

/* Reads exactly `bytes` at `offset` through the page cache, resuming short reads.
 * Errors: IO (errno), EOF. */
moestream_status ms_file_pread(const ms_file * file, void * dst, uint64_t bytes, uint64_t offset,
                               moestream_error * err);

#endif
