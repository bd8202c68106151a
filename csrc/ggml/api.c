/* ggml/api: finding and filling the function table; see api.h. */
#include "ggml/api.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MS_MAX_LIBRARIES = 16 };

static pthread_mutex_t bind_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the two below and binding itself */
static ms_api * bound[MS_MAX_LIBRARIES];
static ms_api * bundled;

/* ---- where the library is ---- */

static void directory_of(const char * path, char * out, size_t n) {
    snprintf(out, n, "%s", path);
    char * slash = strrchr(out, '/');
    if (slash != NULL) {
        *slash = '\0';
    }
}

static void own_directory(char * out, size_t n) {
    Dl_info info;
    out[0] = '\0';
    if (dladdr((const void *) bound, &info) != 0 && info.dli_fname != NULL) {
        directory_of(info.dli_fname, out, n);
    }
}

/* MOESTREAM_LIBLLAMA names another file, for tests; a build against an installed llama.cpp (MS_LLAMA_LIBRARY) uses that
 * one where it is. */
static moestream_status open_bundled(void ** out, moestream_error * err) {
    char dir[400], path[512];
    const char * given = getenv("MOESTREAM_LIBLLAMA");
    own_directory(dir, sizeof(dir));
    snprintf(path, sizeof(path), "%s/libllama.so", dir);
    const char * file = given != NULL && given[0] != '\0' ? given
                        : sizeof(MS_LLAMA_LIBRARY) > 1    ? MS_LLAMA_LIBRARY
                                                          : path;
    /* Somebody has put a ggml into the global scope, where it would come before our own libraries: then ours look among
     * themselves first. Not otherwise: it would also hide an allocator that the user preloads. */
    bool other = sizeof(MS_SANITIZE) == 1 && dlsym(RTLD_DEFAULT, "ggml_init") != NULL;
    void * handle = dlopen(file, RTLD_NOW | RTLD_LOCAL | (other ? RTLD_DEEPBIND : 0));
    if (handle == NULL) {
        const char * why = dlerror();
        return ms_fail(err, MOESTREAM_ERR_IO, 0, "could not load '%s': %s", file, why != NULL ? why : "unknown reason");
    }
    *out = handle;
    return MOESTREAM_OK;
}

/* ---- symbols ---- */

struct find_cpu {
    void * handle;
    const char * folder; /* where it must lie, NULL: anywhere */
};

static int open_if_cpu_backend(struct dl_phdr_info * info, size_t size, void * user) {
    (void) size;
    struct find_cpu * find = user;
    const char * name = strrchr(info->dlpi_name, '/');
    if (name != NULL && strncmp(name, "/libggml-cpu", 12) == 0 &&
        (find->folder == NULL || (strncmp(find->folder, info->dlpi_name, strlen(find->folder)) == 0 &&
                                  info->dlpi_name + strlen(find->folder) == name))) {
        find->handle = dlopen(info->dlpi_name, RTLD_NOW | RTLD_NOLOAD);
    }
    return find->handle != NULL;
}

/* In GGML_BACKEND_DL builds the CPU backend is not a dependency of libllama: ggml loads the best of several files. Make
 * it do so from the library's own folder, whatever the working directory, and look there too. */
static void * cpu_backend_handle(ms_api * api) {
    void * h = api->libllama;
    if (dlsym(h, "ggml_get_type_traits_cpu") != NULL) {
        return h;
    }
    __typeof__(&ggml_backend_load_all_from_path) load = NULL;
    __typeof__(&ggml_backend_dev_by_type) by_type = NULL;
    *(void **) &load = dlsym(h, "ggml_backend_load_all_from_path");
    *(void **) &by_type = dlsym(h, "ggml_backend_dev_by_type");
    char dir[512];
    directory_of(api->path, dir, sizeof(dir));
    if (load != NULL && by_type != NULL && by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == NULL) {
        load(dir);
    }
    if (by_type == NULL || by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == NULL) {
        return NULL; /* another ggml in the process may have one: not ours to use */
    }
    struct find_cpu find = {.folder = dir}; /* its own first: another ggml in the process has one by the same name */
    dl_iterate_phdr(open_if_cpu_backend, &find);
    if (find.handle == NULL) {
        find.folder = NULL;
        dl_iterate_phdr(open_if_cpu_backend, &find);
    }
    return find.handle;
}

static void * symbol(void * libllama, void * cpu, const char * name) {
    void * p = dlsym(libllama, name);
    return p == NULL && cpu != NULL ? dlsym(cpu, name) : p;
}

static moestream_status fill(ms_api * api, moestream_error * err) {
    void * cpu = cpu_backend_handle(api);
    if (cpu == NULL) {
        return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0,
                       "'%s' has no CPU backend: no libggml-cpu*.so was found beside it", api->path);
    }
#define MS_REQUIRED(name)                                                                                              \
    if ((*(void **) & api->name = symbol(api->libllama, cpu, #name)) == NULL) {                                        \
        return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0, "'%s' lacks the function %s; built for llama.cpp %s",        \
                       api->path, #name, MS_LLAMA_COMMIT);                                                             \
    }
#define MS_OPTIONAL(name) *(void **) &api->name = symbol(api->libllama, cpu, #name);
    MS_API_FUNCTIONS(MS_REQUIRED, MS_OPTIONAL)
#undef MS_REQUIRED
#undef MS_OPTIONAL
    *(void **) &api->buffer_init = symbol(api->libllama, cpu, "ggml_backend_buffer_init");
    if (api->buffer_init == NULL) {
        return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0, "'%s' lacks the function ggml_backend_buffer_init",
                       api->path);
    }
    api->load_from_file_ptr = dlsym(api->libllama, "llama_model_load_from_file_ptr");
    *(void **) &api->load_policy_set = dlsym(api->libllama, "moestream_load_policy_set");
    api->tensor_map = dlsym(api->libllama, "_Z29llama_internal_get_tensor_mapB5cxx11PK11llama_model");
    if (api->tensor_map == NULL) {
        api->tensor_map = dlsym(api->libllama, "_Z29llama_internal_get_tensor_mapPK11llama_model");
    }
    if (api->ggml_commit != NULL) {
        snprintf(api->commit, sizeof(api->commit), "%s", api->ggml_commit());
        char * dirty = strstr(api->commit, "-dirty"); /* a source archive lacks files git tracks */
        if (dirty != NULL) {
            *dirty = '\0';
        }
    }
    if (api->ggml_version != NULL) {
        snprintf(api->version, sizeof(api->version), "%s", api->ggml_version());
    }
    return MOESTREAM_OK;
}

static void path_of_handle(void * handle, char * out, size_t n) {
    struct link_map * map = NULL;
    out[0] = '\0';
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != NULL) {
        snprintf(out, n, "%s", map->l_name);
    }
    if (out[0] == '\0') {
        snprintf(out, n, "(the program itself)");
    }
}

/* ---- bind ---- */

static ms_api * find_bound(void * libllama) {
    for (int i = 0; i < MS_MAX_LIBRARIES && bound[i] != NULL; i++) {
        if (bound[i]->libllama == libllama) {
            return bound[i];
        }
    }
    return NULL;
}

static moestream_status bind_locked(ms_api ** out, void * libllama, moestream_error * err) {
    int free_entry = 0;
    while (free_entry < MS_MAX_LIBRARIES && bound[free_entry] != NULL) {
        free_entry++;
    }
    if (free_entry == MS_MAX_LIBRARIES) {
        return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0, "%d different libllama are bound already", MS_MAX_LIBRARIES);
    }
    ms_api * api = ms_calloc(1, sizeof(*api));
    if (api == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for the function table");
    }
    api->libllama = libllama;
    path_of_handle(libllama, api->path, sizeof(api->path));
    moestream_status st = fill(api, err);
    if (st == MOESTREAM_OK) {
        api->llama_backend_init();
        st = ms_api_selftest(api, err);
    }
    if (st != MOESTREAM_OK) {
        free(api);
        return st;
    }
    bound[free_entry] = api;
    *out = api;
    return MOESTREAM_OK;
}

moestream_status ms_api_bind(const ms_api ** out, void * libllama, moestream_error * err) {
    pthread_mutex_lock(&bind_lock);
    ms_api * api = libllama == NULL ? bundled : find_bound(libllama);
    moestream_status st = MOESTREAM_OK;
    if (api == NULL) {
        void * handle = libllama;
        if (libllama == NULL) {
            st = open_bundled(&handle, err);
            api = st == MOESTREAM_OK ? find_bound(handle) : NULL;
        }
        if (st == MOESTREAM_OK && api == NULL) {
            st = bind_locked(&api, handle, err);
        }
        if (st == MOESTREAM_OK && libllama == NULL) {
            bundled = api; /* the handle stays open for good: buffer types and log callbacks point into it */
        } else if (st != MOESTREAM_OK && libllama == NULL && handle != NULL) {
            dlclose(handle);
        }
    }
    if (st == MOESTREAM_OK) {
        *out = api;
    }
    pthread_mutex_unlock(&bind_lock);
    return st;
}

static const ms_api * locked_read(void * libllama, int which) {
    pthread_mutex_lock(&bind_lock);
    const ms_api * api = which == 0   ? bundled
                         : which == 1 ? (bundled != NULL ? bundled : bound[0])
                                      : find_bound(libllama);
    pthread_mutex_unlock(&bind_lock);
    return api;
}

const ms_api * ms_api_bundled(void) {
    return locked_read(NULL, 0);
}

const ms_api * ms_api_any(void) {
    return locked_read(NULL, 1);
}

const ms_api * ms_api_find(void * libllama) {
    return libllama == NULL ? ms_api_bundled() : locked_read(libllama, 2);
}

ggml_backend_buffer_t ms_buffer_make(const ms_api * api, ggml_backend_buffer_type_t buft, const ms_buffer_i * iface,
                                     void * context, size_t size) {
    ms_buffer_i passed = *iface;
    if (!api->layout_b) {
        /* the older library reads cpy_tensor, clear and reset where the two 2d entries are now */
        void ** entry = (void **) &passed;
        memmove(&entry[6], &entry[8], 3 * sizeof(void *));
    }
    return api->buffer_init(buft, passed, context, size);
}

/* ---- what is there ---- */

size_t ms_api_features(const ms_api * api, char * buf, size_t n) {
    int len =
        snprintf(buf, n,
                 "{\"libllama\": \"%s\", \"ggml_commit\": \"%s\", \"ggml_version\": \"%s\", \"built_for\": \"%s\", "
                 "\"buffer_layout\": \"%s\", \"params_match\": %s, \"params_why\": \"%s\", \"load_policy\": %s, "
                 "\"load_from_file_ptr\": %s, "
                 "\"tensor_map\": %s}",
                 api->path, api->commit, api->version, MS_LLAMA_COMMIT, api->layout_b ? "B" : "A",
                 api->params_match ? "true" : "false", api->params_why, api->load_policy_set != NULL ? "true" : "false",
                 api->load_from_file_ptr != NULL ? "true" : "false", api->tensor_map != NULL ? "true" : "false");
    return len > 0 ? (size_t) len : 0;
}

struct list_libraries {
    char * buf;
    size_t n, len;
    bool first;
};

static void append(struct list_libraries * list, const char * text) {
    size_t room = list->len < list->n ? list->n - list->len : 0;
    int len = snprintf(room > 0 ? list->buf + list->len : NULL, room, "%s", text);
    list->len += len > 0 ? (size_t) len : 0;
}

static int add_library(struct dl_phdr_info * info, size_t size, void * user) {
    (void) size;
    struct list_libraries * list = user;
    const char * name = strrchr(info->dlpi_name, '/');
    if (name == NULL || (strncmp(name, "/libllama", 9) != 0 && strncmp(name, "/libggml", 8) != 0 &&
                         strncmp(name, "/libmoestream", 13) != 0)) {
        return 0;
    }
    bool ours = false;
    for (int i = 0; i < MS_MAX_LIBRARIES && bound[i] != NULL; i++) {
        ours |= strcmp(bound[i]->path, info->dlpi_name) == 0;
    }
    append(list, list->first ? "[{\"path\": \"" : ", {\"path\": \"");
    append(list, info->dlpi_name);
    append(list, ours ? "\", \"bound\": true}" : "\", \"bound\": false}");
    list->first = false;
    return 0;
}

size_t ms_api_libraries(char * buf, size_t n) {
    struct list_libraries list = {.buf = buf, .n = n, .first = true};
    pthread_mutex_lock(&bind_lock);
    dl_iterate_phdr(add_library, &list);
    pthread_mutex_unlock(&bind_lock);
    append(&list, list.first ? "[]" : "]");
    return list.len;
}
