/* ggml/api.c: which libraries are loaded. See posix_names.h. */
#ifndef MS_STUB_LINK_H
#define MS_STUB_LINK_H
#include <stddef.h>

struct link_map {
    char * l_name;
};
struct dl_phdr_info {
    const char * dlpi_name;
};
int dl_iterate_phdr(int (*callback)(struct dl_phdr_info *, size_t, void *), void * user);
#endif
