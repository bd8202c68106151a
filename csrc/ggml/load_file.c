/*
 * ggml/load_file: a FILE * that plays the model file to llama_model_load_from_file_ptr of a libllama we did not build,
 * and skips the streamed expert bytes: that library's own loader would read or populate all of them.
 * Guarantees: bytes outside the streamed experts are the file's; inside them reads succeed and leave the target as it is
 * (the loader stages them in memory of its own and hands them to set_tensor, which ignores them).
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ggml/store.h"

enum {
    MS_FILE_BUFFER = 1 << 20
}; /* glibc copies cookie reads through the FILE's buffer: small ones cost a call per byte */

typedef struct skip_range {
    uint64_t begin, end;
} skip_range;

typedef struct skip_file {
    FILE * file;
    uint64_t at, bytes;
    skip_range * skip; /* ascending */
    int n_skip;
    char buffer[MS_FILE_BUFFER];
} skip_file;

/* First range that ends behind `at`. */
static const skip_range * range_after(const skip_file * f, uint64_t at) {
    int lo = 0, hi = f->n_skip;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (f->skip[mid].end <= at) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo < f->n_skip ? &f->skip[lo] : NULL;
}

static ssize_t skip_read(void * cookie, char * buf, size_t n) {
    skip_file * f = cookie;
    if (f->at >= f->bytes) {
        return 0;
    }
    n = n < f->bytes - f->at ? n : (size_t) (f->bytes - f->at);
    const skip_range * range = range_after(f, f->at);
    if (range != NULL && f->at >= range->begin) {
        n = n < range->end - f->at ? n : (size_t) (range->end - f->at);
        f->at += n;
        return (ssize_t) n;
    }
    if (range != NULL && f->at + n > range->begin) {
        n = (size_t) (range->begin - f->at);
    }
    ssize_t got = pread(fileno(f->file), buf, n, (off_t) f->at);
    f->at += got > 0 ? (uint64_t) got : 0;
    return got;
}

static int skip_seek(void * cookie, off64_t * offset, int whence) {
    skip_file * f = cookie;
    off64_t base = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? (off64_t) f->at : (off64_t) f->bytes;
    if (base + *offset < 0) {
        errno = EINVAL;
        return -1;
    }
    f->at = (uint64_t) (base + *offset);
    *offset = (off64_t) f->at;
    return 0;
}

static int skip_close(void * cookie) {
    skip_file * f = cookie;
    int r = fclose(f->file);
    free(f->skip);
    free(f);
    return r;
}

static int compare_ranges(const void * a, const void * b) {
    uint64_t x = ((const skip_range *) a)->begin, y = ((const skip_range *) b)->begin;
    return x < y ? -1 : x > y;
}

moestream_status ms_load_file(moestream * ms, void ** out_file, moestream_error * err) {
    const ms_index * index = &ms->plan->index;
    if (ms->api->load_from_file_ptr == NULL) {
        return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0,
                       "'%s' (ggml %s) has no llama_model_load_from_file_ptr; load with mmap instead, which "
                       "reads the file once",
                       ms->api->path, ms->api->version);
    }
    if (index->n_files > 1) {
        return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0,
                       "'%s' has %d shards; llama_model_load_from_file_ptr takes single files, load with mmap "
                       "instead",
                       index->path[0], index->n_files);
    }
    skip_file * f = ms_calloc(1, sizeof(*f));
    skip_range * skip = ms_calloc((size_t) index->n_banks + 1, sizeof(*skip));
    FILE * under = f != NULL && skip != NULL ? fopen(index->path[0], "rbe") : NULL;
    if (under == NULL) {
        int why = errno;
        free(f);
        free(skip);
        return ms_fail(err, MOESTREAM_ERR_IO, why, "could not open '%s': %s", index->path[0], strerror(why));
    }
    f->file = under;
    f->bytes = index->file_bytes[0];
    f->skip = skip;
    for (int b = 0; b < index->n_banks; b++) {
        if (index->bank[b].group >= 0) {
            const ms_tensor * t = &index->tensor[index->bank[b].tensor];
            skip[f->n_skip++] = (skip_range) {t->offset, t->offset + t->bytes};
        }
    }
    qsort(skip, (size_t) f->n_skip, sizeof(*skip), compare_ranges);
    FILE * file =
        fopencookie(f, "rb", (cookie_io_functions_t) {.read = skip_read, .seek = skip_seek, .close = skip_close});
    if (file == NULL) {
        skip_close(f);
        return ms_fail(err, MOESTREAM_ERR_NOMEM, errno, "could not make a stream over '%s'", index->path[0]);
    }
    setvbuf(file, f->buffer, _IOFBF, sizeof(f->buffer));
    ms->hide_host = true;
    *out_file = file;
    return MOESTREAM_OK;
}
