/* expert_index: see expert_index.h. Reads headers, validates every number, then forgets the file. */
#include "gguf/expert_index.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "gguf/gguf_check.h"

enum { MS_GGUF_VERSION = 3, MS_MAX_EXPERTS = 1 << 16 };

/* ---- one file ---- */

/* Looks at the first eight bytes ourselves: gguf.h says only "failed" for files that people really pass by mistake. */
static moestream_status check_magic(const char * path, ms_file_id * id, moestream_error * err) {
    struct stat st;
    if (stat(path, &st) != 0) {
        return ms_fail(err, MOESTREAM_ERR_IO, errno, "could not open model file '%s': %s", path, strerror(errno));
    }
    if (!S_ISREG(st.st_mode)) {
        return ms_fail(err, MOESTREAM_ERR_INVALID, 0, "'%s' is not a regular file", path);
    }
    FILE * f = fopen(path, "rbe");
    if (f == NULL) {
        return ms_fail(err, MOESTREAM_ERR_IO, errno, "could not open model file '%s': %s", path, strerror(errno));
    }
    unsigned char head[8] = {0};
    size_t got = fread(head, 1, sizeof(head), f);
    fclose(f);
    if (got < sizeof(head) || memcmp(head, "GGUF", 4) != 0) {
        return ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "'%s' is not a GGUF file (%lld bytes, no GGUF magic)", path,
                       (long long) st.st_size);
    }
    uint32_t version =
        (uint32_t) head[4] | (uint32_t) head[5] << 8 | (uint32_t) head[6] << 16 | (uint32_t) head[7] << 24;
    if ((version & 0xffffu) == 0) {
        return ms_fail(err, MOESTREAM_ERR_FORMAT, 0,
                       "'%s' is a big-endian GGUF (version field 0x%08" PRIx32 "); convert it to little-endian", path,
                       version);
    }
    if (version != MS_GGUF_VERSION) {
        return ms_fail(err, MOESTREAM_ERR_FORMAT, 0,
                       "'%s' is GGUF version %" PRIu32 ", only version %d is supported; convert it again", path,
                       version, MS_GGUF_VERSION);
    }
    *id = ms_file_id_of(&st);
    return MOESTREAM_OK;
}

/* Opens file number `file` of the index, and notes its size and what it is. */
static moestream_status open_gguf(ms_gguf ** out, const ms_gguf_api * api, ms_index * index, int file,
                                  moestream_error * err) {
    const char * path = index->path[file];
    ms_file_id * id = &index->file_id[file];
    moestream_status st = check_magic(path, id, err);
    if (st == MOESTREAM_OK) {
        index->file_bytes[file] = id->bytes;
        st = ms_gguf_check(path, id->bytes, err);
    }
    if (st != MOESTREAM_OK) {
        return st;
    }
    ms_log_clear_foreign_error();
    errno = 0;
    ms_gguf * g = api->open(api->api, path);
    if (g == NULL && errno == ENOMEM) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory to read the GGUF header of '%s'", path);
    }
    if (g == NULL) {
        return ms_fail(err, MOESTREAM_ERR_FORMAT, 0,
                       "the GGUF header of '%s' (%" PRIu64 " bytes) is damaged or cut short: %s", path, id->bytes,
                       ms_log_last_foreign_error());
    }
    *out = g;
    return MOESTREAM_OK;
}

/* ---- names ---- */

/* N of "blk.N.", -1 for other names. */
static int layer_of(const char * name) {
    if (strncmp(name, "blk.", 4) != 0 || !isdigit((unsigned char) name[4])) {
        return -1;
    }
    char * end = NULL;
    errno = 0;
    long n = strtol(name + 4, &end, 10);
    return errno != 0 || *end != '.' || n < 0 || n > INT_MAX ? -1 : (int) n;
}

static bool ends_with(const char * s, const char * tail) {
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && strcmp(s + n - m, tail) == 0;
}

/* Routed expert weights: "blk.N.ffn_{up,down,gate,gate_up}_{,ch}exps.weight", one matrix per expert. Biases and scales
 * of experts are small and stay dense. */
static bool is_expert_tensor(const ms_tensor * t) {
    static const char * const tail[] = {
        ".ffn_up_exps.weight",   ".ffn_down_exps.weight",   ".ffn_gate_exps.weight",   ".ffn_gate_up_exps.weight",
        ".ffn_up_chexps.weight", ".ffn_down_chexps.weight", ".ffn_gate_chexps.weight", ".ffn_gate_up_chexps.weight"};
    if (t->layer < 0 || t->ne[3] != 1) {
        return false;
    }
    for (size_t i = 0; i < sizeof(tail) / sizeof(tail[0]); i++) {
        if (ends_with(t->name, tail[i])) {
            return true;
        }
    }
    return false;
}

/* ---- tensors ---- */

static moestream_status add_tensor(ms_index * index, const ms_gguf_api * api, const ms_gguf * g, int64_t i, int file,
                                   moestream_error * err) {
    const char * path = index->path[file];
    ms_tensor * t = &index->tensor[index->n_tensors];
    const char * name = api->tensor_name(g, i);
    if (name == NULL || name[0] == '\0' || strlen(name) >= sizeof(t->name)) {
        return ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "tensor %lld of '%s' has an empty name or one of over %d bytes",
                       (long long) i, path, MS_NAME_BYTES - 1);
    }
    memset(t, 0, sizeof(*t));
    snprintf(t->name, sizeof(t->name), "%s", name);
    t->type = api->tensor_type(g, i);
    t->file = file;
    t->bank = -1;
    t->layer = layer_of(name);

    uint64_t block_bytes = api->type_size(api->api, t->type);
    int64_t block = api->block_size(api->api, t->type);
    if (block_bytes == 0 || block <= 0) {
        return ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "tensor '%s' of '%s' has the unknown type %d", name, path,
                       t->type);
    }
    const char * type_name = api->type_name(api->api, t->type);
    snprintf(t->type_name, sizeof(t->type_name), "%s", type_name != NULL ? type_name : "?");
    if (!api->tensor_ne(g, i, t->ne)) {
        return ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "tensor '%s' of '%s' has no shape", name, path);
    }
    uint64_t bytes = block_bytes;
    for (int d = 0; d < 4; d++) {
        uint64_t factor = d == 0 ? (uint64_t) (t->ne[0] / block) : (uint64_t) t->ne[d];
        if (t->ne[d] <= 0 || (d == 0 && t->ne[0] % block != 0) || !ms_mul_u64(bytes, factor, &bytes)) {
            return ms_fail(err, MOESTREAM_ERR_FORMAT, 0,
                           "tensor '%s' of '%s' has an impossible shape [%lld, %lld, %lld, %lld] for %s", name, path,
                           (long long) t->ne[0], (long long) t->ne[1], (long long) t->ne[2], (long long) t->ne[3],
                           t->type_name);
        }
        if (d == 0) {
            t->row_bytes = bytes;
        }
    }
    t->bytes = bytes;
    t->offset = api->tensor_offset(g, i);
    uint64_t end;
    if (!ms_add_u64(t->offset, bytes, &end) || end > index->file_bytes[file]) {
        return ms_fail(err, MOESTREAM_ERR_EOF, 0,
                       "'%s' is cut short: tensor '%s' needs %" PRIu64 " bytes at offset %" PRIu64
                       ", the file has %" PRIu64,
                       path, name, bytes, t->offset, index->file_bytes[file]);
    }
    index->n_tensors++;
    return MOESTREAM_OK;
}

static moestream_status add_file(ms_index * index, const ms_gguf_api * api, const ms_gguf * g, int file,
                                 moestream_error * err) {
    int64_t n = api->n_tensors(g);
    if (n < 0 || n > MS_MAX_TENSORS || index->n_tensors + n > MS_MAX_TENSORS) {
        return ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "'%s' claims %lld tensors, the limit is %d", index->path[file],
                       (long long) n, MS_MAX_TENSORS);
    }
    size_t want = (size_t) (index->n_tensors + n);
    ms_tensor * grown = want == 0 ? index->tensor : realloc(index->tensor, want * sizeof(*grown));
    if (grown == NULL && want != 0) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for an index of %zu tensors", want);
    }
    index->tensor = grown;
    for (int64_t i = 0; i < n; i++) {
        moestream_status st = add_tensor(index, api, g, i, file, err);
        if (st != MOESTREAM_OK) {
            return st;
        }
    }
    return MOESTREAM_OK;
}

/* ---- shards: "<prefix>-00001-of-00004.gguf", named by llama.cpp's own rule ---- */

static bool shard_path(char * out, size_t n, const char * first, int no, int count) {
    char tail[32];
    snprintf(tail, sizeof(tail), "-%05d-of-%05d.gguf", 1, count);
    size_t len = strlen(first), tail_len = strlen(tail);
    if (len < tail_len || strcmp(first + len - tail_len, tail) != 0) {
        return false;
    }
    int written = snprintf(out, n, "%.*s-%05d-of-%05d.gguf", (int) (len - tail_len), first, no + 1, count);
    return written > 0 && (size_t) written < n;
}

static moestream_status add_shards(ms_index * index, const ms_gguf_api * api, int count, moestream_error * err) {
    for (int no = 1; no < count; no++) {
        char path[PATH_MAX];
        if (!shard_path(path, sizeof(path), index->path[0], no, count)) {
            return ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                           "'%s' is one of %d shards, but its name does not end in '-00001-of-%05d.gguf', so the "
                           "others cannot be found",
                           index->path[0], count, count);
        }
        index->path[no] = ms_strdup(path);
        if (index->path[no] == NULL) {
            return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for the paths of %d shards", count);
        }
        index->n_files = no + 1;
        ms_gguf * g = NULL;
        moestream_status st = open_gguf(&g, api, index, no, err);
        if (st != MOESTREAM_OK) {
            char context[64];
            snprintf(context, sizeof(context), "shard %d of %d", no + 1, count);
            ms_fail_context(err, context);
            return st;
        }
        int64_t found = -1;
        if (!api->get_int(g, "split.no", &found) || found != no) {
            st = ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "'%s' should be shard %d of %d, but says it is shard %lld", path,
                         no + 1, count, (long long) found + 1);
        } else if (!api->get_int(g, "split.count", &found) || found != count) {
            st = ms_fail(err, MOESTREAM_ERR_FORMAT, 0,
                         "'%s' is shard %d of %lld, not of %d: it belongs to another split", path, no + 1,
                         (long long) found, count);
        } else {
            st = add_file(index, api, g, no, err);
        }
        api->close(g);
        if (st != MOESTREAM_OK) {
            return st;
        }
    }
    return MOESTREAM_OK;
}

/* ---- banks and groups ---- */

static moestream_status sort_names(ms_index * index, moestream_error * err) {
    index->by_name = ms_calloc((size_t) index->n_tensors + 1, sizeof(int));
    if (index->by_name == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for an index of %d tensors", index->n_tensors);
    }
    for (int i = 0; i < index->n_tensors; i++) {
        index->by_name[i] = i;
    }
    /* qsort takes no context and must stay re-entrant; a shell sort of a few thousand names costs nothing */
    for (int gap = index->n_tensors / 2; gap > 0; gap /= 2) {
        for (int i = gap; i < index->n_tensors; i++) {
            int v = index->by_name[i], j = i;
            for (; j >= gap && strcmp(index->tensor[index->by_name[j - gap]].name, index->tensor[v].name) > 0;
                 j -= gap) {
                index->by_name[j] = index->by_name[j - gap];
            }
            index->by_name[j] = v;
        }
    }
    for (int i = 1; i < index->n_tensors; i++) {
        const char * name = index->tensor[index->by_name[i]].name;
        if (strcmp(index->tensor[index->by_name[i - 1]].name, name) == 0) {
            return ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "tensor '%s' appears twice in '%s'", name, index->path[0]);
        }
    }
    return MOESTREAM_OK;
}

/* Banks of one block belong together when the same ids select them: same block, same family (exps or chexps), same
 * number of experts. A wrong guess would only cost an extra read, never a bit. */
static bool same_group(const ms_index * index, const ms_group * group, const ms_tensor * t) {
    const ms_tensor * first = &index->tensor[index->bank[group->bank[0]].tensor];
    return group->layer == t->layer && group->n_expert == (int) t->ne[2] && group->n_slices < MS_MAX_SLICES &&
           ends_with(first->name, "_chexps.weight") == ends_with(t->name, "_chexps.weight");
}

static moestream_status build_banks(ms_index * index, moestream_error * err) {
    int n = 0;
    for (int i = 0; i < index->n_tensors; i++) {
        n += is_expert_tensor(&index->tensor[i]);
    }
    index->bank = ms_calloc((size_t) n + 1, sizeof(*index->bank));
    index->group = ms_calloc((size_t) n + 1, sizeof(*index->group));
    if (index->bank == NULL || index->group == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for %d expert tensors", n);
    }
    for (int i = 0; i < index->n_tensors; i++) {
        ms_tensor * t = &index->tensor[i];
        if (!is_expert_tensor(t)) {
            continue;
        }
        if (t->ne[2] > MS_MAX_EXPERTS) {
            return ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "tensor '%s' claims %lld experts, the limit is %d", t->name,
                           (long long) t->ne[2], MS_MAX_EXPERTS);
        }
        uint64_t slice_bytes = t->bytes / (uint64_t) t->ne[2];
        if (slice_bytes > INT32_MAX) {
            return ms_fail(err, MOESTREAM_ERR_UNSUPPORTED, 0,
                           "one expert of '%s' has %" PRIu64 " bytes, the limit is %d", t->name, slice_bytes,
                           INT32_MAX);
        }
        t->bank = index->n_banks++;
        index->bank[t->bank] = (ms_bank) {.tensor = i,
                                          .group = -1,
                                          .n_expert = (int) t->ne[2],
                                          .file = t->file,
                                          .offset = t->offset,
                                          .slice_bytes = slice_bytes};
    }
    return MOESTREAM_OK;
}

void ms_index_group(ms_index * index, const bool * streamed) {
    index->n_groups = 0;
    for (int b = 0; b < index->n_banks; b++) {
        ms_bank * bank = &index->bank[b];
        const ms_tensor * t = &index->tensor[bank->tensor];
        bank->group = -1;
        if (!streamed[b]) {
            continue;
        }
        int g = -1;
        for (int k = index->n_groups - 1; k >= 0 && g < 0; k--) {
            g = same_group(index, &index->group[k], t) ? k : -1;
        }
        if (g < 0) {
            g = index->n_groups++;
            index->group[g] = (ms_group) {.layer = t->layer, .n_expert = bank->n_expert};
        }
        ms_group * group = &index->group[g];
        bank->group = g;
        bank->slice = group->n_slices;
        group->bank[group->n_slices++] = b;
    }
}

static int meta_int(const ms_index * index, const ms_gguf_api * api, const ms_gguf * g, const char * suffix) {
    char key[128];
    int64_t value = 0;
    snprintf(key, sizeof(key), "%s.%s", index->arch, suffix);
    return api->get_int(g, key, &value) && value > 0 && value < INT_MAX ? (int) value : 0;
}

static moestream_status open_first(ms_index * index, const ms_gguf_api * api, int * n_shards, moestream_error * err) {
    ms_gguf * g = NULL;
    moestream_status st = open_gguf(&g, api, index, 0, err);
    if (st != MOESTREAM_OK) {
        return st;
    }
    int64_t no = 0, count = 0;
    if (api->get_int(g, "split.count", &count) && count > 1) {
        if (api->get_int(g, "split.no", &no) && no != 0) {
            st = ms_fail(err, MOESTREAM_ERR_INVALID, 0,
                         "'%s' is shard %lld of %lld; pass the first shard, whose name ends in '-00001-of-%05lld.gguf'",
                         index->path[0], (long long) no + 1, (long long) count, (long long) count);
        } else if (count > MS_MAX_FILES) {
            st = ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "'%s' claims %lld shards, the limit is %d", index->path[0],
                         (long long) count, MS_MAX_FILES);
        }
    }
    const char * arch = api->get_str(g, "general.architecture");
    if (st == MOESTREAM_OK && arch == NULL) {
        st = ms_fail(err, MOESTREAM_ERR_FORMAT, 0, "'%s' has no general.architecture; it is not a model",
                     index->path[0]);
    }
    if (st == MOESTREAM_OK) {
        snprintf(index->arch, sizeof(index->arch), "%s", arch);
        index->n_layer = meta_int(index, api, g, "block_count");
        index->n_expert = meta_int(index, api, g, "expert_count");
        index->n_expert_used = meta_int(index, api, g, "expert_used_count");
        *n_shards = count > 1 ? (int) count : 1;
        st = add_file(index, api, g, 0, err);
    }
    api->close(g);
    return st;
}

moestream_status ms_index_open(ms_index * index, const ms_gguf_api * api, const char * path, moestream_error * err) {
    ms_index built = {0};
    built.path = ms_calloc(MS_MAX_FILES, sizeof(*built.path));
    built.file_bytes = ms_calloc(MS_MAX_FILES, sizeof(*built.file_bytes));
    built.file_id = ms_calloc(MS_MAX_FILES, sizeof(*built.file_id));
    if (built.path != NULL) {
        built.path[0] = ms_strdup(path);
        built.n_files = 1;
    }
    memset(index, 0, sizeof(*index));
    moestream_status st = MOESTREAM_OK;
    if (built.path == NULL || built.file_bytes == NULL || built.file_id == NULL || built.path[0] == NULL) {
        st = ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory to open '%s'", path);
    }
    int n_shards = 1;
    if (st == MOESTREAM_OK) {
        st = open_first(&built, api, &n_shards, err);
    }
    if (st == MOESTREAM_OK) {
        st = add_shards(&built, api, n_shards, err);
    }
    if (st == MOESTREAM_OK) {
        st = sort_names(&built, err);
    }
    if (st == MOESTREAM_OK) {
        st = build_banks(&built, err);
    }
    if (st != MOESTREAM_OK) {
        ms_index_close(&built);
        return st;
    }
    *index = built;
    return MOESTREAM_OK;
}

void ms_index_close(ms_index * index) {
    for (int i = 0; i < index->n_files; i++) {
        free(index->path[i]);
    }
    free(index->path);
    free(index->file_bytes);
    free(index->file_id);
    free(index->tensor);
    free(index->bank);
    free(index->group);
    free(index->by_name);
    memset(index, 0, sizeof(*index));
}

int ms_index_find(const ms_index * index, const char * name) {
    int lo = 0, hi = index->n_tensors - 1;
    while (lo <= hi) {
        int mid = lo + (hi - lo) / 2;
        int c = strcmp(index->tensor[index->by_name[mid]].name, name);
        if (c == 0) {
            return index->by_name[mid];
        }
        if (c < 0) {
            lo = mid + 1;
        } else {
            hi = mid - 1;
        }
    }
    return -1;
}
