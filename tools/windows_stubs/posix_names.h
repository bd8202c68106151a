/* What Windows' C library lacks and a port of moestream has to supply, as declarations only: included in front of
 * every file by tools/check_windows.py. A name that is neither here nor in MinGW's headers fails that check, so this
 * folder is the list of what is missing on Windows (docs/support.md repeats it in words). Nothing here is linked. */
#ifndef MS_POSIX_NAMES_H
#define MS_POSIX_NAMES_H

#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

/* io/file.c, stream/: a file that is another one than before */
#ifndef ESTALE
#define ESTALE 116
#endif

/* io/file.c: descriptors */
#define O_CLOEXEC 0
ssize_t pread(int fd, void * buf, size_t n, off_t offset);
int posix_fadvise(int fd, off_t offset, off_t n, int advice);

/* io/reader_pread.c: reader threads take no signals (MinGW has pthread_sigmask as a macro that does nothing) */
typedef unsigned long sigset_t;
int sigfillset(sigset_t * set);
enum { SIG_SETMASK = 2 };

/* ggml/expert_rows.c: scratch memory on cache lines; Windows has _aligned_malloc, which _aligned_free must free */
void * aligned_alloc(size_t alignment, size_t n);

/* ggml/warm_list.c: a path that may be anything (Windows: _fullpath; no named pipes among files) */
#define O_NONBLOCK 0
char * realpath(const char * path, char * resolved);

/* ggml/load_file.c: a FILE of our own */
typedef int64_t off64_t;
typedef struct cookie_io_functions_t {
    ssize_t (*read)(void *, char *, size_t);
    ssize_t (*write)(void *, const char *, size_t);
    int (*seek)(void *, off64_t *, int);
    int (*close)(void *);
} cookie_io_functions_t;
FILE * fopencookie(void * cookie, const char * mode, cookie_io_functions_t functions);

#endif
