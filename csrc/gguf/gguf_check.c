/*
 * gguf/gguf_check: walks a GGUF header before upstream's reader sees it. That reader is thorough, but some numbers make
 * it abort the process (a shape whose product overflows) or ask for absurd memory; here they are errors that name the
 * tensor or the key.
 * Guarantees: reads nothing behind the header, allocates nothing, and never seeks past the end of the file.
 * Never judges what upstream's reader judges well: duplicate names, offsets, alignment.
 */
#include "gguf/gguf_check.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MS_MAX_KEY_BYTES = 65535, MS_KV_STRING = 8, MS_KV_ARRAY = 9, MS_KV_TYPES = 13 };

typedef struct cursor {
    FILE * f;
    const char * path;
    uint64_t left; /* bytes of the file not yet passed */
} cursor;

static bool take(cursor * c, void * to, size_t n) {
    if (n > c->left || fread(to, 1, n, c->f) != n) {
        return false;
    }
    c->left -= n;
    return true;
}

static bool skip(cursor * c, uint64_t n) {
    char passed[512];
    if (n <= sizeof(passed)) {
        return take(c, passed, (size_t) n); /* a vocabulary has a hundred thousand short strings: no seek for each */
    }
    if (n > c->left || fseeko(c->f, (off_t) n, SEEK_CUR) != 0) {
        return false;
    }
    c->left -= n;
    return true;
}

/* A string, of which the first n - 1 bytes are kept to name it in a message. Whether these have a zero byte: for whoever
 * reads on, such a name ends there. */
static bool take_text(cursor * c, char * to, size_t n, bool * has_zero) {
    uint64_t length;
    if (!take(c, &length, sizeof(length)) || length > MS_MAX_KEY_BYTES) {
        return false;
    }
    size_t kept = length < n - 1 ? (size_t) length : n - 1;
    to[0] = '\0';
    if (!take(c, to, kept)) {
        return false;
    }
    to[kept] = '\0';
    *has_zero = memchr(to, '\0', kept) != NULL;
    for (size_t i = 0; i < kept; i++) {
        to[i] = to[i] < ' ' || to[i] == 127 ? '?' : to[i];
    }
    return skip(c, length - kept);
}

static bool skip_text(cursor * c) {
    uint64_t length;
    return take(c, &length, sizeof(length)) && skip(c, length);
}

static bool skip_value(cursor * c, uint32_t type) {
    static const uint8_t bytes[MS_KV_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    if (type >= MS_KV_TYPES) {
        return false;
    }
    if (type == MS_KV_STRING) {
        return skip_text(c);
    }
    if (type != MS_KV_ARRAY) {
        return skip(c, bytes[type]);
    }
    uint32_t inner;
    uint64_t n, total;
    if (!take(c, &inner, sizeof(inner)) || !take(c, &n, sizeof(n)) || inner >= MS_KV_TYPES || inner == MS_KV_ARRAY) {
        return false;
    }
    if (inner != MS_KV_STRING) {
        return ms_mul_u64(n, bytes[inner], &total) && skip(c, total);
    }
    if (n > c->left / sizeof(uint64_t)) {
        return false; /* each string has at least its length */
    }
    for (; n > 0; n--) {
        if (!skip_text(c)) {
            return false;
        }
    }
    return true;
}

static moestream_status check_shape(cursor * c, uint64_t i, moestream_error * err) {
    char name[128];
    bool has_zero = false;
    uint32_t n_dims, type;
    uint64_t offset, n = 1, ne[4] = {1, 1, 1, 1};
    if (!take_text(c, name, sizeof(name), &has_zero) || !take(c, &n_dims, sizeof(n_dims)) || n_dims > 4) {
        return ms_fail(err, MOESTREAM_ERR_FORMAT, 0,
                       "the GGUF header of '%s' is damaged or cut short at tensor %" PRIu64, c->path, i);
    }
    if (!take(c, ne, n_dims * sizeof(ne[0])) || !take(c, &type, sizeof(type)) || !take(c, &offset, sizeof(offset))) {
        return ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "the GGUF header of '%s' is cut short inside tensor '%s'", c->path,
                       name);
    }
    if (has_zero) {
        return ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "tensor '%s' of '%s' has a zero byte in its name", name, c->path);
    }
    for (int d = 0; d < 4; d++) {
        if (ne[d] == 0 || !ms_mul_u64(n, ne[d], &n) || n > INT64_MAX / 64) { /* room for the bytes of a weight */
            return ms_fail(err, MOESTREAM_ERR_FORMAT, 0,
                           "tensor '%s' of '%s' has an impossible shape [%" PRIu64 ", %" PRIu64 ", %" PRIu64
                           ", %" PRIu64 "]",
                           name, c->path, ne[0], ne[1], ne[2], ne[3]);
        }
    }
    return MOESTREAM_OK;
}

static moestream_status check_header(cursor * c, moestream_error * err) {
    uint64_t head[3], n_tensors, n_kv; /* magic and version were looked at before */
    if (!take(c, head, sizeof(head))) {
        return ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "the GGUF header of '%s' is cut short", c->path);
    }
    n_tensors = head[1];
    n_kv = head[2];
    if (n_tensors > MS_MAX_TENSORS) {
        return ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "'%s' claims %" PRIu64 " tensors, the limit is %d", c->path,
                       n_tensors, MS_MAX_TENSORS);
    }
    for (uint64_t i = 0; i < n_kv; i++) {
        char key[128] = "?";
        bool has_zero;
        uint32_t type;
        if (!take_text(c, key, sizeof(key), &has_zero) || !take(c, &type, sizeof(type)) || !skip_value(c, type)) {
            return ms_fail(err, MOESTREAM_ERR_FORMAT, 0,
                           "the GGUF header of '%s' is damaged or cut short at key %" PRIu64 " of %" PRIu64 ", '%s'",
                           c->path, i, n_kv, key);
        }
    }
    moestream_status st = MOESTREAM_OK;
    for (uint64_t i = 0; st == MOESTREAM_OK && i < n_tensors; i++) {
        st = check_shape(c, i, err);
    }
    return st;
}

moestream_status ms_gguf_check(const char * path, uint64_t file_bytes, moestream_error * err) {
    cursor c = {.f = fopen(path, "rbe"), .path = path, .left = file_bytes};
    if (c.f == NULL) {
        return ms_fail(err, MOESTREAM_ERR_IO, errno, "could not open model file '%s': %s", path, strerror(errno));
    }
    moestream_status st = check_header(&c, err);
    fclose(c.f);
    return st;
}
