/* ggml/api.c: finding functions in a library that is loaded. See posix_names.h. */
#ifndef MS_STUB_DLFCN_H
#define MS_STUB_DLFCN_H

enum { RTLD_LAZY = 1, RTLD_NOW = 2, RTLD_NOLOAD = 4, RTLD_LOCAL = 0, RTLD_DEEPBIND = 8, RTLD_DI_LINKMAP = 2 };
#define RTLD_DEFAULT ((void *) 0)
typedef struct Dl_info {
    const char * dli_fname;
    void * dli_fbase;
} Dl_info;
void * dlopen(const char * file, int mode);
void * dlsym(void * handle, const char * name);
int dlclose(void * handle);
char * dlerror(void);
int dladdr(const void * addr, Dl_info * info);
int dlinfo(void * handle, int request, void * out);
#endif
