/*
 * index_target.h: one hostile file through the expert index; shared by the libFuzzer harness and the replay test.
 * Guarantees: aborts if the index hands out a range outside the file, or fails without a status and a message.
 * Never leaves a file behind: the bytes lie in an anonymous file.
 */
#ifndef MS_INDEX_TARGET_H
#define MS_INDEX_TARGET_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ggml/store.h"

static const ms_api * target_api(void) {
    static const ms_api * api;
    moestream_error err = {.struct_size = sizeof(err)};
    if (api == NULL) {
        if (moestream_bind(NULL, &err) != MOESTREAM_OK || moestream_log_capture(NULL, 4, &err) != MOESTREAM_OK) {
            fprintf(stderr, "%s\n", err.message);
            abort();
        }
        api = ms_api_bundled();
    }
    return api;
}

static void require(bool holds, const char * what) {
    if (!holds) {
        fprintf(stderr, "the expert index broke its promise: %s\n", what);
        abort();
    }
}

static void check_index(const ms_index * index) {
    require(index->n_files >= 1, "there is a file");
    for (int i = 0; i < index->n_tensors; i++) {
        const ms_tensor * t = &index->tensor[i];
        require(t->file >= 0 && t->file < index->n_files, "a tensor lies in a file");
        require(t->bytes <= index->file_bytes[t->file] && t->offset <= index->file_bytes[t->file] - t->bytes,
                "a tensor lies inside its file");
        require(ms_index_find(index, t->name) == i, "a tensor is found by its name");
    }
    for (int b = 0; b < index->n_banks; b++) {
        const ms_bank * bank = &index->bank[b];
        uint64_t end = ms_bank_offset(bank, bank->n_expert - 1) + bank->slice_bytes;
        require(bank->n_expert > 0 && bank->slice_bytes > 0, "a bank has experts, and they have bytes");
        require(end > bank->offset && end <= index->file_bytes[bank->file], "the last expert lies inside the file");
    }
}

/* True if the file was taken. `*status` says why not. */
static inline bool index_target(const uint8_t * data, size_t n, moestream_error * err) {
    int fd = memfd_create("hostile.gguf", MFD_CLOEXEC);
    require(fd >= 0 && write(fd, data, n) == (ssize_t) n, "the test could make its file");
    char path[64];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    ms_gguf_api functions = ms_gguf_functions(target_api());
    ms_index index;
    *err = (moestream_error) {.struct_size = sizeof(*err)};
    moestream_status st = ms_index_open(&index, &functions, path, err);
    if (st == MOESTREAM_OK) {
        check_index(&index);
        bool * streamed = malloc((size_t) index.n_banks + 1);
        require(streamed != NULL, "the test has memory");
        memset(streamed, 1, (size_t) index.n_banks + 1);
        ms_index_group(&index, streamed);
        ms_stream_sizes sizes;
        ms_stream_size(&index, &sizes, NULL);
        free(streamed);
        ms_index_close(&index);
    } else {
        require(err->status == st && err->message[0] != '\0', "a refusal says why");
    }
    close(fd);
    moestream_log_line line = {.struct_size = sizeof(line)};
    while (moestream_log_take(&line)) {
    }
    return st == MOESTREAM_OK;
}

#endif
