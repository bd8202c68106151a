/*
 * ggml/budget: how large a slab the machine can afford right now, for cache_bytes = 0.
 * min(MemAvailable, every cgroup limit on the way up minus its use that cannot be reclaimed) minus what loading will still
 * take and a reserve. Never MemTotal. Reads /proc and /sys only.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml/store.h"

static const uint64_t MS_RESERVE = (uint64_t) 512 << 20;

static bool read_u64(const char * path, uint64_t * out) {
    FILE * f = fopen(path, "re");
    if (f == NULL) {
        return false;
    }
    unsigned long long v = 0;
    bool ok = fscanf(f, "%llu", &v) == 1; /* cgroup v2 says "max" for no limit */
    fclose(f);
    *out = v;
    return ok;
}

static bool read_field(const char * path, const char * key, uint64_t scale, uint64_t * out) {
    FILE * f = fopen(path, "re");
    char line[256];
    bool ok = false;
    size_t n = strlen(key);
    while (f != NULL && !ok && fgets(line, sizeof(line), f) != NULL) {
        if (strncmp(line, key, n) == 0 && (line[n] == ':' || line[n] == ' ')) {
            *out = strtoull(line + n + 1, NULL, 10) * scale;
            ok = true;
        }
    }
    if (f != NULL) {
        fclose(f);
    }
    return ok;
}

/* Room below one cgroup's limit; page cache counts as room, since the kernel gives it up first. */
static uint64_t cgroup_room(const char * dir, const char * limit_file, const char * use_file, const char * cache_key) {
    char path[700];
    uint64_t limit = 0, use = 0, cache = 0;
    snprintf(path, sizeof(path), "%s/%s", dir, limit_file);
    if (!read_u64(path, &limit) || limit >= (uint64_t) 1 << 62) { /* v1 says "none" with a huge number */
        return UINT64_MAX;
    }
    snprintf(path, sizeof(path), "%s/%s", dir, use_file);
    read_u64(path, &use);
    snprintf(path, sizeof(path), "%s/memory.stat", dir);
    read_field(path, cache_key, 1, &cache);
    use = use > cache ? use - cache : 0;
    return limit > use ? limit - use : 0;
}

/* Walks from our own group up to the root of the hierarchy: a limit counts at every level. */
static uint64_t walk(const char * root, const char * group, bool v2) {
    char dir[600];
    uint64_t room = UINT64_MAX;
    snprintf(dir, sizeof(dir), "%s%s", root, group);
    for (;;) {
        uint64_t here = v2 ? cgroup_room(dir, "memory.max", "memory.current", "inactive_file")
                           : cgroup_room(dir, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file");
        room = here < room ? here : room;
        if (v2) { /* beyond this one the kernel does not kill, it slows to a crawl */
            here = cgroup_room(dir, "memory.high", "memory.current", "inactive_file");
            room = here < room ? here : room;
        }
        char * slash = strrchr(dir, '/');
        if (slash == NULL || strlen(dir) <= strlen(root)) {
            return room;
        }
        *slash = '\0';
    }
}

static FILE * open_in(const char * proc, const char * name) {
    char path[600];
    snprintf(path, sizeof(path), "%s/%s", proc, name);
    return fopen(path, "re");
}

/* Where a hierarchy is mounted, from /proc/self/mountinfo; false if it is not. */
static bool mount_of(const char * proc, bool v2, char * out, size_t n) {
    FILE * f = open_in(proc, "self/mountinfo");
    char line[1024];
    bool found = false;
    while (f != NULL && !found && fgets(line, sizeof(line), f) != NULL) {
        char at[512] = "", *tail = strstr(line, " - ");
        if (tail == NULL || sscanf(line, "%*s %*s %*s %*s %511s", at) != 1) {
            continue;
        }
        if (v2 ? strncmp(tail, " - cgroup2 ", 11) == 0
               : strncmp(tail, " - cgroup ", 10) == 0 && strstr(tail, "memory") != NULL) {
            snprintf(out, n, "%s", at);
            found = true;
        }
    }
    if (f != NULL) {
        fclose(f);
    }
    return found;
}

static uint64_t cgroups_room(const char * proc) {
    FILE * f = open_in(proc, "self/cgroup");
    char line[600], mount[512];
    uint64_t room = UINT64_MAX;
    while (f != NULL && fgets(line, sizeof(line), f) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':'), *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (group == NULL) {
            continue;
        }
        *group++ = '\0';
        bool v2 = controllers[1] == '\0';
        if ((v2 || strstr(controllers + 1, "memory") != NULL) && mount_of(proc, v2, mount, sizeof(mount))) {
            uint64_t here = walk(mount, strcmp(group, "/") == 0 ? "" : group, v2);
            room = here < room ? here : room;
        }
    }
    if (f != NULL) {
        fclose(f);
    }
    return room;
}

uint64_t ms_memory_room_at(const char * proc) {
    char meminfo[600];
    uint64_t available = 0, groups = cgroups_room(proc);
    snprintf(meminfo, sizeof(meminfo), "%s/meminfo", proc);
    if (!read_field(meminfo, "MemAvailable", 1024, &available)) {
        available = UINT64_MAX;
    }
    return available < groups ? available : groups;
}

uint64_t ms_memory_room(void) {
    return ms_memory_room_at("/proc");
}

/* Weights that will take memory of this machine beside the slab. */
static uint64_t dense_bytes(const moestream_plan * plan) {
    uint64_t bytes = 0;
    for (int i = 0; i < plan->index.n_tensors; i++) {
        const ms_tensor * t = &plan->index.tensor[i];
        ms_place_kind kind = ms_plan_kind(plan, i);
        bool on_device = kind == MS_PLACE_BUFT && strcmp(plan->rule[plan->tensor_rule[i]].place, "CPU") != 0;
        if (kind != MS_PLACE_STREAM && !on_device) {
            bytes += t->bytes;
        }
    }
    return bytes;
}

uint64_t ms_budget_auto(const moestream_plan * plan, uint64_t room, uint64_t reserve) {
    if (reserve == 0) { /* KV cache, compute buffers, the rest of the machine; less of it in a small container */
        reserve = room / 4 < MS_RESERVE ? room / 4 : MS_RESERVE;
    }
    uint64_t dense = dense_bytes(plan), spoken_for = 0;
    uint64_t budget = ms_add_u64(dense, reserve, &spoken_for) && room > spoken_for ? room - spoken_for : 0;
    return budget < plan->sizes.full_bytes ? budget : plan->sizes.full_bytes;
}

moestream_status ms_budget_check(const moestream_plan * plan, uint64_t room, uint64_t cache_bytes,
                                 moestream_error * err) {
    uint64_t slab = cache_bytes < plan->sizes.full_bytes ? cache_bytes : plan->sizes.full_bytes, need = 0;
    uint64_t dense = dense_bytes(plan);
    if (room == UINT64_MAX || (ms_add_u64(slab, dense, &need) && need <= room)) {
        return MOESTREAM_OK;
    }
    return ms_fail(err, MOESTREAM_ERR_NOMEM, ENOMEM,
                   "a cache of %" PRIu64 " bytes and dense weights of %" PRIu64 " bytes do not fit into the %" PRIu64
                   " bytes of memory that are free here (MemAvailable and cgroup limits)",
                   slab, dense, room);
}
