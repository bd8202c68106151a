/*
 * gguf_maker.h: small GGUF files for C tests, written byte by byte so that every field can be wrong on purpose.
 * Guarantees: what it writes with sane arguments is a GGUF version 3 file that upstream's reader takes.
 * Never needs llama.cpp.
 */
#ifndef MS_TEST_GGUF_MAKER_H
#define MS_TEST_GGUF_MAKER_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAKER_U32 = 4, MAKER_STRING = 8 };

typedef struct gguf_maker {
    uint8_t * bytes;
    size_t n, room;
    uint64_t data; /* bytes of tensor data promised so far */
    uint32_t alignment;
} gguf_maker;

static inline void maker_put(gguf_maker * m, const void * bytes, size_t n) {
    if (m->n + n > m->room) {
        m->room = 2 * (m->n + n) + 256;
        m->bytes = realloc(m->bytes, m->room);
        if (m->bytes == NULL) {
            abort();
        }
    }
    memcpy(m->bytes + m->n, bytes, n);
    m->n += n;
}

static inline void maker_u32(gguf_maker * m, uint32_t v) {
    maker_put(m, &v, sizeof(v));
}

static inline void maker_u64(gguf_maker * m, uint64_t v) {
    maker_put(m, &v, sizeof(v));
}

static inline void maker_text(gguf_maker * m, const char * text) {
    maker_u64(m, strlen(text));
    maker_put(m, text, strlen(text));
}

/* Begins a file with `n_kv` keys (besides general.alignment, written here) and `n_tensors` tensors to come. */
static inline void maker_begin(gguf_maker * m, uint32_t alignment, uint64_t n_kv, uint64_t n_tensors) {
    memset(m, 0, sizeof(*m));
    m->alignment = alignment;
    maker_put(m, "GGUF", 4);
    maker_u32(m, 3);
    maker_u64(m, n_tensors);
    maker_u64(m, n_kv + 1);
    maker_text(m, "general.alignment");
    maker_u32(m, MAKER_U32);
    maker_u32(m, alignment);
}

static inline void maker_key_text(gguf_maker * m, const char * key, const char * value) {
    maker_text(m, key);
    maker_u32(m, MAKER_STRING);
    maker_text(m, value);
}

static inline void maker_key_u32(gguf_maker * m, const char * key, uint32_t value) {
    maker_text(m, key);
    maker_u32(m, MAKER_U32);
    maker_u32(m, value);
}

/* One tensor of `bytes` bytes; its data follows that of the tensor before, aligned. Returns its offset in the data. */
static inline uint64_t maker_tensor(gguf_maker * m, const char * name, uint32_t type, int n_dims, const int64_t * ne,
                                    uint64_t bytes) {
    uint64_t offset = m->data;
    maker_text(m, name);
    maker_u32(m, (uint32_t) n_dims);
    for (int d = 0; d < n_dims; d++) {
        maker_u64(m, (uint64_t) ne[d]);
    }
    maker_u32(m, type);
    maker_u64(m, offset);
    m->data += (bytes + m->alignment - 1) / m->alignment * m->alignment;
    return offset;
}

/* Ends the header: pads it, appends room for the data (zeros). Returns where the data begins. */
static inline size_t maker_end(gguf_maker * m) {
    static const uint8_t zero[4096];
    while (m->n % m->alignment != 0) {
        maker_put(m, zero, 1);
    }
    size_t begin = m->n;
    for (uint64_t left = m->data; left > 0;) {
        size_t part = left < sizeof(zero) ? (size_t) left : sizeof(zero);
        maker_put(m, zero, part);
        left -= part;
    }
    return begin;
}

static inline int maker_write(const gguf_maker * m, const char * path) {
    FILE * f = fopen(path, "wb");
    int ok = f != NULL && fwrite(m->bytes, 1, m->n, f) == m->n;
    return f != NULL && fclose(f) == 0 && ok;
}

static inline void maker_free(gguf_maker * m) {
    free(m->bytes);
    memset(m, 0, sizeof(*m));
}

#endif
