/*
 * ggml/buffer_types: the two buffer types handed to llama.cpp.
 *   MOESTREAM       routed experts: address space without memory (PROT_NONE), so that whatever reads expert weights
 *                   without going through us stops loudly instead of computing on zeros;
 *   MOESTREAM_ANON  dense weights: anonymous memory, filled by direct reads from the file, so that the dense set is
 *                   never reclaimed the way a page cache is.
 * Guarantees: while a model loads no expert byte is read or touched; a buffer asked for at any other time (LoRA adapters
 * are put into their base tensor's buffer type) is plain memory and behaves like ggml's own CPU buffers.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ggml/store.h"

typedef struct ms_buffer {
    moestream * ms;
    uint8_t * base;
    size_t bytes;
    bool experts;         /* address space of streamed experts; else memory */
    bool * materialized;  /* [n_banks] whole tensors read in place; under totals_lock of the store */
} ms_buffer;

static moestream * store_of(ggml_backend_buffer_type_t type) {
    return ((ms_buft *) type)->context;
}

/* A load failure inside a callback that cannot fail: kept for ms_load_end. The first one counts. */
static void load_failed(moestream * ms, const moestream_error * error) {
    if (ms->load_error.status == MOESTREAM_OK) {
        ms->load_error = *error;
    }
}

/* ---- buffers ---- */

static void buffer_free(ms_buffer * b) {
    if (b->base != NULL) {
        munmap(b->base, b->bytes);
    }
    atomic_fetch_sub(&b->ms->n_buffers, 1);
    free(b->materialized);
    free(b);
}

static enum ggml_status buffer_init_tensor(ms_buffer * b, struct ggml_tensor * t) {
    moestream * ms = b->ms;
    if (!ms->loading || t->view_src != NULL) {
        return GGML_STATUS_SUCCESS;
    }
    int i = ms_index_find(&ms->plan->index, t->name);
    const ms_tensor * known = i >= 0 ? &ms->plan->index.tensor[i] : NULL;
    if (b->experts) {
        moestream_error e = {.struct_size = sizeof(e)};
        if (known == NULL || known->bank < 0 || known->bytes != ms->api->ggml_nbytes(t)) {
            ms_fail(&e, MOESTREAM_ERR_INTERNAL, 0,
                    "llama.cpp put '%s' (%zu bytes) among the streamed experts, where the plan has %s", t->name,
                    ms->api->ggml_nbytes(t), known == NULL ? "no such tensor" : "another one");
            load_failed(ms, &e);
        } else {
            ms->n_streamed_seen++;
        }
    } else if (known != NULL) {
        /* where the file's alignment and ours agree, whole pages can be read straight into place */
        t->data = (uint8_t *) t->data + known->offset % MS_PAGE;
    }
    return GGML_STATUS_SUCCESS;
}

static void buffer_set(ms_buffer * b, struct ggml_tensor * t, const void * data, size_t offset, size_t size) {
    moestream * ms = b->ms;
    if (b->experts) {
        return; /* the loader hands over a pointer into its mapping: not touched, the bytes stay in the file */
    }
    int i = ms->loading && offset == 0 ? ms_index_find(&ms->plan->index, t->name) : -1;
    if (i < 0 || size != ms->plan->index.tensor[i].bytes) {
        memcpy((uint8_t *) t->data + offset, data, size);
        return;
    }
    const ms_tensor * known = &ms->plan->index.tensor[i];
    moestream_error e = {.struct_size = sizeof(e)};
    if (ms->load_error.status == MOESTREAM_OK &&
        ms_stream_read_range(ms->stream, known->file, known->offset, known->bytes, t->data, true, &e) != MOESTREAM_OK) {
        ms_fail_context(&e, t->name);
        load_failed(ms, &e);
    }
    ms->dense_data[i] = t->data;
    atomic_fetch_add(&ms->load_dense_bytes, known->bytes);
}

static void buffer_get(ms_buffer * b, const struct ggml_tensor * t, void * data, size_t offset, size_t size) {
    if (!b->experts) {
        memcpy(data, (const uint8_t *) t->data + offset, size);
        return;
    }
    moestream * ms = b->ms;
    const struct ggml_tensor * whole = t->view_src != NULL ? t->view_src : t;
    uint64_t at = (uint64_t) ((const uint8_t *) t->data - (const uint8_t *) whole->data) + offset;
    int i = ms_index_find(&ms->plan->index, whole->name);
    moestream_error e = {.struct_size = sizeof(e)};
    if (i < 0 || at + size > ms->plan->index.tensor[i].bytes ||
        ms_stream_read_range(ms->stream, ms->plan->index.tensor[i].file, ms->plan->index.tensor[i].offset + at, size,
                             data, false, &e) != MOESTREAM_OK) {
        ms_log(MS_LOG_ERROR, "could not read %zu bytes of '%s': %s", size, whole->name, e.message);
        memset(data, 0xff,
               size); /* not a number in most types: this call cannot fail, so the result must not look right */
    }
}

static void buffer_clear(ms_buffer * b, uint8_t value) {
    if (!b->experts) {
        memset(b->base, value, b->bytes);
    }
}

/* The vtable entries, once per layout of ggml_backend_buffer: the context lies right behind the buffer type. */
#define MS_BUFFER_FUNCTIONS(L, OFFSET)                                                                                 \
    static ms_buffer * of_##L(ggml_backend_buffer_t b) {                                                               \
        return *(ms_buffer **) ((char *) b + (OFFSET) + sizeof(void *));                                               \
    }                                                                                                                  \
    static void free_##L(ggml_backend_buffer_t b) {                                                                    \
        buffer_free(of_##L(b));                                                                                        \
    }                                                                                                                  \
    static void * base_##L(ggml_backend_buffer_t b) {                                                                  \
        return of_##L(b)->base;                                                                                        \
    }                                                                                                                  \
    static enum ggml_status init_##L(ggml_backend_buffer_t b, struct ggml_tensor * t) {                                \
        return buffer_init_tensor(of_##L(b), t);                                                                       \
    }                                                                                                                  \
    static void memset_##L(ggml_backend_buffer_t b, struct ggml_tensor * t, uint8_t v, size_t o, size_t n) {           \
        if (!of_##L(b)->experts) {                                                                                     \
            memset((uint8_t *) t->data + o, v, n);                                                                     \
        }                                                                                                              \
    }                                                                                                                  \
    static void set_##L(ggml_backend_buffer_t b, struct ggml_tensor * t, const void * d, size_t o, size_t n) {         \
        buffer_set(of_##L(b), t, d, o, n);                                                                             \
    }                                                                                                                  \
    static void get_##L(ggml_backend_buffer_t b, const struct ggml_tensor * t, void * d, size_t o, size_t n) {         \
        buffer_get(of_##L(b), t, d, o, n);                                                                             \
    }                                                                                                                  \
    static void clear_##L(ggml_backend_buffer_t b, uint8_t v) {                                                        \
        buffer_clear(of_##L(b), v);                                                                                    \
    }                                                                                                                  \
    static const ms_buffer_i iface_##L = {.free_buffer = free_##L,                                                     \
                                          .get_base = base_##L,                                                        \
                                          .init_tensor = init_##L,                                                     \
                                          .memset_tensor = memset_##L,                                                 \
                                          .set_tensor = set_##L,                                                       \
                                          .get_tensor = get_##L,                                                       \
                                          .clear = clear_##L}
MS_BUFFER_FUNCTIONS(a, MS_BUFT_OFFSET_A);
MS_BUFFER_FUNCTIONS(b, MS_BUFT_OFFSET_B);

/* ---- buffer types ---- */

static ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t type, size_t size, bool experts) {
    moestream * ms = store_of(type);
    ms_buffer * b = ms_calloc(1, sizeof(*b));
    bool reserve = experts && ms->loading;
    moestream_error e = {.struct_size = sizeof(e)};
    if (b == NULL) {
        ms_fail(&e, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for the description of a buffer");
        load_failed(ms, &e);
        return NULL;
    }
    b->ms = ms;
    b->bytes = (size_t) ms_align_up(size + 1, MS_PAGE);
    b->experts = reserve;
    b->base = mmap(NULL, b->bytes, reserve ? PROT_NONE : PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | (reserve ? MAP_NORESERVE : 0), -1, 0);
    if (b->base == MAP_FAILED) {
        ms_fail(&e, MOESTREAM_ERR_NOMEM, errno, "the system refused %zu bytes of %s for weights: %s", b->bytes,
                reserve ? "address space" : "memory", strerror(errno));
        b->base = NULL;
    } else if (reserve) {
        b->materialized = ms_calloc((size_t) ms->plan->index.n_banks + 1, sizeof(bool));
        if (b->materialized == NULL) {
            ms_fail(&e, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for the state of %d expert tensors",
                    ms->plan->index.n_banks);
        }
    } else {
        madvise(b->base, b->bytes, MADV_HUGEPAGE); /* best effort */
    }
    atomic_fetch_add(&ms->n_buffers, 1);
    if (b->base == NULL || (reserve && b->materialized == NULL)) {
        load_failed(ms, &e);
        buffer_free(b);
        return NULL;
    }
    return ms_buffer_make(ms->api, type, ms->api->layout_b ? &iface_b : &iface_a, b, size);
}

static const char * stream_name(ggml_backend_buffer_type_t type) {
    (void) type;
    return MS_STREAM_NAME;
}

static const char * dense_name(ggml_backend_buffer_type_t type) {
    (void) type;
    return MS_DENSE_NAME;
}

static ggml_backend_buffer_t stream_alloc(ggml_backend_buffer_type_t type, size_t size) {
    return type_alloc(type, size, true);
}

static ggml_backend_buffer_t dense_alloc(ggml_backend_buffer_type_t type, size_t size) {
    return type_alloc(type, size, false);
}

static size_t page_alignment(ggml_backend_buffer_type_t type) {
    (void) type;
    return MS_PAGE;
}

/* Each tensor has its own pages: for dense weights so that a window read around it hurts nobody, for experts so that one
 * can be made readable alone. */
static size_t paged_size(ggml_backend_buffer_type_t type, const struct ggml_tensor * t) {
    return (size_t) ms_align_up(store_of(type)->api->ggml_nbytes(t), MS_PAGE) + 2 * MS_PAGE;
}

/* "Host" means that the CPU backend may compute on it. A loader without mmap would also read straight into it, which for
 * experts must not happen: then the answer is no until the load is over, and bytes arrive through set_tensor. */
static bool type_is_host(ggml_backend_buffer_type_t type) {
    return !store_of(type)->hide_host;
}

void ms_buffer_types_init(moestream * ms) {
    ggml_backend_dev_t cpu = ms->api->ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ms->stream_type = (ms_buft) {.iface = {.get_name = stream_name,
                                           .alloc_buffer = stream_alloc,
                                           .get_alignment = page_alignment,
                                           .get_alloc_size = paged_size,
                                           .is_host = type_is_host},
                                 .device = cpu,
                                 .context = ms};
    ms->dense_type = ms->stream_type;
    ms->dense_type.iface.get_name = dense_name;
    ms->dense_type.iface.alloc_buffer = dense_alloc;
}

moestream * ms_buffer_store(const ms_api * api, ggml_backend_buffer_t buffer) {
    const ms_buft * type = (const ms_buft *) ms_buffer_buft(api, buffer);
    if (type == NULL || type->iface.get_name != stream_name) {
        return NULL;
    }
    const ms_buffer * b = ms_buffer_context(api, buffer);
    return b->experts ? b->ms : NULL;
}

moestream_status ms_buffer_materialize(moestream * ms, const struct ggml_tensor * tensor, moestream_error * err) {
    ms_buffer * b = ms_buffer_context(ms->api, tensor->buffer);
    int i = ms_index_find(&ms->plan->index, tensor->name);
    if (i < 0 || ms->plan->index.tensor[i].bank < 0) {
        return ms_fail(err, MOESTREAM_ERR_INTERNAL, 0, "'%s' lies among the streamed experts but is not in the index",
                       tensor->name);
    }
    const ms_tensor * known = &ms->plan->index.tensor[i];
    pthread_mutex_lock(&ms->totals_lock);
    moestream_status st = MOESTREAM_OK;
    if (!b->materialized[known->bank]) {
        uint8_t * page = (uint8_t *) ms_align_down((uintptr_t) tensor->data, MS_PAGE);
        size_t bytes = (size_t) ms_align_up((uintptr_t) tensor->data + known->bytes, MS_PAGE) - (uintptr_t) page;
        if (mprotect(page, bytes, PROT_READ | PROT_WRITE) != 0) {
            st = ms_fail(err, MOESTREAM_ERR_NOMEM, errno, "could not make %zu bytes of '%s' readable: %s", bytes,
                         tensor->name, strerror(errno));
        } else {
            st = ms_stream_read_range(ms->stream, known->file, known->offset, known->bytes, tensor->data, false, err);
        }
        if (st == MOESTREAM_OK) {
            b->materialized[known->bank] = true;
            atomic_fetch_add(&ms->n_fallback_tensors, 1);
            ms_log(MS_LOG_WARN,
                   "'%s' is used by an operation that is not streamed: all of it, %" PRIu64
                   " bytes, was read into memory",
                   tensor->name, known->bytes);
        } else {
            mprotect(page, bytes, PROT_NONE);
        }
    }
    pthread_mutex_unlock(&ms->totals_lock);
    return st;
}
