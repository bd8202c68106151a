/*
 * ggml/ggml_abi: the two private vtables of ggml through which a buffer type is made, and the place of two fields in a
 * buffer. Private to ggml (ggml-backend-impl.h is not installed), so they are declared here, in the one room that may
 * know them, and nothing is believed before the self-test at bind time has called through each entry (selftest.c).
 *
 * ggml_backend_buffer_i grew two entries in the middle in 2026-04 ("layout B"); older libraries have layout A. We fill
 * the longer one and close the gap for the older (buffer_types.c). COMPAT: docs/support.md.
 */
#ifndef MS_GGML_ABI_H
#define MS_GGML_ABI_H

#include "ggml-backend.h"
#include "ggml.h"

typedef struct ms_buft_i {
    const char * (*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t size);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    size_t (*get_max_size)(ggml_backend_buffer_type_t);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const struct ggml_tensor *);
    bool (*is_host)(ggml_backend_buffer_type_t);
} ms_buft_i;

/* What a ggml_backend_buffer_type_t points to. */
typedef struct ms_buft {
    ms_buft_i iface;
    ggml_backend_dev_t device;
    void * context;
} ms_buft;

typedef struct ms_buffer_i {
    void (*free_buffer)(ggml_backend_buffer_t);
    void * (*get_base)(ggml_backend_buffer_t);
    enum ggml_status (*init_tensor)(ggml_backend_buffer_t, struct ggml_tensor *);
    void (*memset_tensor)(ggml_backend_buffer_t, struct ggml_tensor *, uint8_t value, size_t offset, size_t size);
    void (*set_tensor)(ggml_backend_buffer_t, struct ggml_tensor *, const void * data, size_t offset, size_t size);
    void (*get_tensor)(ggml_backend_buffer_t, const struct ggml_tensor *, void * data, size_t offset, size_t size);
    void (*set_tensor_2d)(void); /* layout B only; NULL means "use set_tensor" */
    void (*get_tensor_2d)(void);
    bool (*cpy_tensor)(ggml_backend_buffer_t, const struct ggml_tensor * src, struct ggml_tensor * dst);
    void (*clear)(ggml_backend_buffer_t, uint8_t value);
    void (*reset)(ggml_backend_buffer_t);
} ms_buffer_i;

typedef ggml_backend_buffer_t (*ms_buffer_init_fn)(ggml_backend_buffer_type_t, ms_buffer_i, void * context,
                                                   size_t size);

/* Offsets of `buft` in a ggml_backend_buffer; `context` follows it. */
enum { MS_BUFT_OFFSET_A = 9 * sizeof(void *), MS_BUFT_OFFSET_B = 11 * sizeof(void *) };

#endif
