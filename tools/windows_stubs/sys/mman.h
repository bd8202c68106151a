/* cache/slab.c, ggml/buffer_types.c, stream/range.c: address space, and memory in pages. See ../posix_names.h. */
#ifndef MS_STUB_MMAN_H
#define MS_STUB_MMAN_H
#include <sys/types.h>
#include <stddef.h>

enum { PROT_NONE = 0, PROT_READ = 1, PROT_WRITE = 2 };
enum { MAP_PRIVATE = 2, MAP_ANONYMOUS = 0x20, MAP_NORESERVE = 0x4000, MAP_POPULATE = 0x8000 };
enum { MADV_DONTNEED = 4, MADV_HUGEPAGE = 14, MADV_POPULATE_WRITE = 23 };
#define MAP_FAILED ((void *) -1)
void * mmap(void * addr, size_t n, int prot, int flags, int fd, off_t offset);
int munmap(void * addr, size_t n);
int mprotect(void * addr, size_t n, int prot);
int madvise(void * addr, size_t n, int advice);
#endif
