/*
 * ggml/warm_list: the file that remembers which experts were in the cache, for a warm start of the next run.
 * A text: a first line that says what it is and of which model (layers, experts, bytes of experts), then "layer expert" per
 * line, the most recently used first.
 * Guarantees: only a file that is not there, is empty or begins as such a list is written; a list of another model is said
 * and passed over; the file is replaced as a whole or not at all (a new file with an unguessable name in the same folder,
 * then a rename).
 * Never writes anything unless the caller named a file; never reads a byte of an expert itself.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ggml/store.h"

static const char MAGIC[] = "moestream warm start 1";

static uint64_t streamed_bytes(const ms_index * index) {
    uint64_t sum = 0;
    for (int b = 0; b < index->n_banks; b++) {
        sum += index->bank[b].slice_bytes * (uint64_t) index->bank[b].n_expert;
    }
    return sum;
}

/* What the first line says of a model. */
static void first_line(const ms_index * index, char * out, size_t n) {
    snprintf(out, n, "%s: %d layers, %d experts, %" PRIu64 " bytes\n", MAGIC, index->n_groups, index->n_expert,
             streamed_bytes(index));
}

static int group_of_layer(const ms_index * index, int layer) {
    for (int g = 0; g < index->n_groups; g++) {
        if (index->group[g].layer == layer) {
            return g;
        }
    }
    return -1;
}

/* ---- which file it may be ---- */

/* May the list be read from, and later put in place of, what is at `path` now? Only a regular file that begins as a list
 * does, an empty one, or none: a path given by mistake must not cost anybody a file. The file is left open in `*out`, NULL
 * where there is none or nothing in it. */
static moestream_status open_list(const moestream * ms, const char * path, FILE ** out, moestream_error * err) {
    *out = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a named pipe would wait for a writer */
    if (fd < 0 && errno == ENOENT) {
        return MOESTREAM_OK;
    }
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) {
        int e = errno;
        if (fd >= 0) {
            close(fd);
        }
        return ms_fail(err, MOESTREAM_ERR_IO, e, "warm_start '%s' could not be opened: %s", path, strerror(e));
    }
    const ms_index * index = &ms->plan->index;
    char begin[sizeof(MAGIC)] = "";
    ms_file_id id = ms_file_id_of(&st);
    bool model = false;
    for (int i = 0; i < index->n_files; i++) {
        model |= id.device == index->file_id[i].device && id.inode == index->file_id[i].inode;
    }
    bool list = S_ISREG(st.st_mode) && !model &&
                (st.st_size == 0 ||
                 (pread(fd, begin, sizeof(MAGIC) - 1, 0) == (ssize_t) sizeof(MAGIC) - 1 && strcmp(begin, MAGIC) == 0));
    *out = list && st.st_size > 0 ? fdopen(fd, "r") : NULL;
    if (*out == NULL) {
        close(fd);
    }
    return list ? MOESTREAM_OK
                : ms_fail(
                      err, MOESTREAM_ERR_INVALID, 0,
                      "warm_start '%s' is %s, which would be overwritten; name a file that is not there, is empty, or "
                      "was written as such a list",
                      path, model ? "the model itself" : "not a list of experts");
}

/* Where the list goes: behind links, so that not the link is replaced. NULL without memory. */
static char * resolved(const char * path) {
    char * real = realpath(path, NULL);
    return real != NULL ? real : ms_strdup(path);
}

moestream_status ms_warm_list_use(moestream * ms, const char * path, moestream_error * err) {
    FILE * f = NULL;
    moestream_status st = open_list(ms, path, &f, err);
    if (f != NULL) {
        fclose(f);
    }
    if (st != MOESTREAM_OK) {
        return st;
    }
    ms->warm_path = resolved(path);
    if (ms->warm_path == NULL) {
        return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM, "no memory for a path");
    }
    char * slash = strrchr(ms->warm_path, '/');
    if (slash != NULL) {
        *slash = '\0';
    }
    const char * folder = slash == NULL ? "." : (ms->warm_path[0] == '\0' ? "/" : ms->warm_path);
    int e = access(folder, W_OK | X_OK) == 0 ? 0 : errno;
    if (slash != NULL) {
        *slash = '/';
    }
    return e == 0 ? MOESTREAM_OK
                  : ms_fail(err, MOESTREAM_ERR_IO, e, "warm_start '%s' could not be written: %s", path, strerror(e));
}

/* ---- reading and writing ---- */

void ms_warm_list_read(moestream * ms) {
    const ms_index * index = &ms->plan->index;
    if (ms->warm_path == NULL || ms->stream == NULL) {
        return;
    }
    moestream_error err = {.struct_size = sizeof(err)};
    FILE * f = NULL;
    if (open_list(ms, ms->warm_path, &f, &err) != MOESTREAM_OK) {
        ms_log(MS_LOG_WARN, "no warm start: %s", err.message);
    }
    if (f == NULL) {
        return;
    }
    char want[160], line[160];
    first_line(index, want, sizeof(want));
    if (fgets(line, sizeof(line), f) == NULL || strcmp(line, want) != 0) {
        ms_log(MS_LOG_WARN, "no warm start: '%s' is a list of another model; it is replaced when this one is closed",
               ms->warm_path);
        fclose(f);
        return;
    }
    int room = 0, n = 0, layer, expert;
    for (int g = 0; g < index->n_groups; g++) {
        room += index->group[g].n_expert;
    }
    ms_hot * list = ms_calloc((size_t) room + 1, sizeof(*list));
    while (list != NULL && n < room && fscanf(f, "%d %d", &layer, &expert) == 2) {
        list[n++] = (ms_hot) {.group = group_of_layer(index, layer), .expert = expert};
    }
    fclose(f);
    if (list == NULL || ms_stream_warm(ms->stream, list, n, &err) != MOESTREAM_OK) {
        ms_log(MS_LOG_WARN, "no warm start: %s", list == NULL ? "no memory for the list" : err.message);
    }
    free(list);
}

static bool write_list(const moestream * ms, FILE * f, const ms_hot * list, int n) {
    char line[160];
    first_line(&ms->plan->index, line, sizeof(line));
    bool ok = fputs(line, f) >= 0;
    for (int i = 0; i < n && ok; i++) {
        ok = fprintf(f, "%d %d\n", ms->plan->index.group[list[i].group].layer, (int) list[i].expert) > 0;
    }
    return ok;
}

void ms_warm_list_write(moestream * ms) {
    if (ms->warm_path == NULL || ms->stream == NULL) {
        return;
    }
    ms_stream_warm_stop(ms->stream);
    moestream_stats stats = {.struct_size = sizeof(stats)};
    ms_stream_get_stats(ms->stream, &stats);
    if (stats.n_hits + stats.n_misses == 0) {
        return; /* nothing ran: what the last run left is worth more */
    }
    moestream_error err = {.struct_size = sizeof(err)};
    FILE * there = NULL;
    if (open_list(ms, ms->warm_path, &there, &err) != MOESTREAM_OK) { /* it is another file by now */
        ms_log(MS_LOG_WARN, "the list for a warm start was not written: %s", err.message);
        return;
    }
    if (there != NULL) {
        fclose(there);
    }
    size_t n_path = strlen(ms->warm_path) + 8;
    ms_hot * list = ms_calloc((size_t) stats.n_slots + 1, sizeof(*list));
    char * fresh = ms_calloc(n_path, 1);
    int fd = -1, e = ENOMEM;
    if (list != NULL && fresh != NULL) {
        snprintf(fresh, n_path, "%s.XXXXXX", ms->warm_path);
        fd = mkstemp(fresh);
        e = errno;
    }
    FILE * f = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (f != NULL) {
        int n = ms_stream_hot(ms->stream, list, (int) stats.n_slots);
        bool ok = write_list(ms, f, list, n);
        ok = fclose(f) == 0 && ok;
        ok = ok && rename(fresh, ms->warm_path) == 0;
        e = ok ? 0 : errno;
    } else if (fd >= 0) {
        e = errno;
        close(fd);
    }
    if (e != 0) {
        if (fd >= 0) {
            unlink(fresh);
        }
        ms_log(MS_LOG_WARN, "the list for a warm start could not be written to '%s': %s", ms->warm_path, strerror(e));
    }
    free(list);
    free(fresh);
}
