/*
 * gguf: the expert index: (bank, expert) -> file, offset, bytes, for one model in one file or in shards.
 * Guarantees: every range it hands out lies inside its file, as the file was when it was opened; all numbers were
 * checked for overflow; nothing of the weights was read.
 * Never reads weights, never keeps a file open.
 *
 * Words: a *bank* is one expert tensor (all experts of one projection of one block), a *slice* is one expert in one
 * bank, a *group* is the streamed banks of one block that the same router choice selects (up, gate, down).
 */
#ifndef MS_EXPERT_INDEX_H
#define MS_EXPERT_INDEX_H

#include "base/base.h"

enum { MS_MAX_SLICES = 4, MS_MAX_FILES = 512, MS_NAME_BYTES = 128 };

/* A GGUF header in memory; the functions of gguf.h and ggml.h this room uses, filled by the ggml room. */
typedef struct ms_gguf ms_gguf;
typedef struct ms_gguf_api {
    const void * api; /* passed back to open */
    ms_gguf * (*open)(const void * api, const char * path); /* NULL on failure, errno ENOMEM if for memory */
    void (*close)(ms_gguf *);
    int64_t (*n_tensors)(const ms_gguf *);
    const char * (*tensor_name)(const ms_gguf *, int64_t);
    uint64_t (*tensor_offset)(const ms_gguf *, int64_t); /* from the start of the file */
    int (*tensor_type)(const ms_gguf *, int64_t);
    bool (*tensor_ne)(const ms_gguf *, int64_t, int64_t ne[4]); /* false if unknown */
    /* value of a key as an integer; for an array its largest element; false if there is none */
    bool (*get_int)(const ms_gguf *, const char * key, int64_t * out);
    const char * (*get_str)(const ms_gguf *, const char * key); /* NULL if there is none */
    const char * (*type_name)(const void * api, int type);
    uint64_t (*type_size)(const void * api, int type); /* bytes of a block, 0 for a type ggml does not know */
    int64_t (*block_size)(const void * api, int type);
} ms_gguf_api;

typedef struct ms_tensor {
    char name[MS_NAME_BYTES];
    int type; /* ggml_type */
    char type_name[16];
    uint64_t row_bytes; /* nb[1] */
    int64_t ne[4];
    int layer; /* N of "blk.N.", -1 outside */
    int file;
    uint64_t offset; /* in the file */
    uint64_t bytes;
    int bank; /* -1: not an expert tensor */
} ms_tensor;

typedef struct ms_bank {
    int tensor;
    int group; /* -1: not streamed */
    int slice; /* position in the group */
    int n_expert;
    int file;
    uint64_t offset;      /* of expert 0 */
    uint64_t slice_bytes; /* of one expert; expert e starts at offset + e * slice_bytes */
} ms_bank;

typedef struct ms_group {
    int layer;
    int n_expert;
    int n_slices;
    int bank[MS_MAX_SLICES];
} ms_group;

typedef struct ms_index {
    char ** path; /* [n_files] */
    uint64_t * file_bytes;
    ms_file_id * file_id; /* of the files whose headers were read; NULL in an index made by hand */
    int n_files;
    ms_tensor * tensor;
    int n_tensors;
    ms_bank * bank;
    int n_banks;
    ms_group * group;
    int n_groups;
    char arch[64];
    int n_layer;
    int n_expert;
    int n_expert_used;
    int * by_name; /* tensor numbers in the order of their names, for ms_index_find */
} ms_index;

/* Reads the header of `path` and of the shards it names. On failure *index is all zero. */
moestream_status ms_index_open(ms_index * index, const ms_gguf_api * api, const char * path, moestream_error * err);
void ms_index_close(ms_index * index);

/* Puts the banks for which streamed[bank] is set into groups, replacing earlier ones. */
void ms_index_group(ms_index * index, const bool * streamed);

/* Tensor number by name, -1 if there is none. */
int ms_index_find(const ms_index * index, const char * name);

/* File range of one slice. */
static inline uint64_t ms_bank_offset(const ms_bank * bank, int expert) {
    return bank->offset + (uint64_t) expert * bank->slice_bytes;
}

#endif
