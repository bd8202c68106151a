/* budget: what memory there is, told by meminfo and by limits of either cgroup version at any level. */
#include <sys/stat.h>

#include "check.h"
#include "ggml/store.h"

static char root[200];

static void put(const char * name, const char * text) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s", root, name);
    for (char * p = path + strlen(root) + 1; (p = strchr(p, '/')) != NULL; p++) {
        *p = '\0';
        mkdir(path, 0700);
        *p = '/';
    }
    FILE * f = fopen(path, "w");
    if (f == NULL || fputs(text, f) == EOF) {
        CHECK(!"a file could be written");
    }
    if (f != NULL) {
        fclose(f);
    }
}

typedef struct mount_line {
    const char * before;
    const char * behind;
} mount_line;

static void fresh(const char * cgroup, const mount_line * mounts, const char * at) {
    char text[900];
    snprintf(root, sizeof root, "%s/ms_budget_XXXXXX", getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp");
    CHECK(mkdtemp(root) != NULL);
    put("meminfo", "MemTotal:       24000000 kB\nMemAvailable:    8000000 kB\n");
    put("self/cgroup", cgroup);
    snprintf(text, sizeof text, "%s%s/%s%s", mounts->before, root, at, mounts->behind);
    put("self/mountinfo", text);
}

static const mount_line v2_mount[] = {{"30 20 0:26 / ", " rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"}};
static const mount_line v1_mount[] = {{"31 20 0:27 / ", " rw,nosuid shared:5 - cgroup cgroup rw,memory\n"}};

static uint64_t room(void) {
    char command[300];
    uint64_t n = ms_memory_room_at(root);
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    CHECK(system(command) == 0);
    return n;
}

TEST(without_limits_it_is_what_the_kernel_calls_available) {
    fresh("0::/\n", v2_mount, "cg");
    CHECK(room() == 8000000ull * 1024);
}

TEST(a_v2_limit_counts_at_every_level_less_its_use) {
    fresh("0::/a/b\n", v2_mount, "cg");
    put("cg/a/b/memory.max", "max\n");
    put("cg/a/b/memory.current", "5000\n");
    put("cg/a/memory.max", "300000000\n");
    put("cg/a/memory.current", "100000000\n");
    put("cg/a/memory.stat", "anon 1\ninactive_file 40000000\n"); /* reclaimed before anybody is killed */
    CHECK(room() == 240000000);
}

TEST(a_v2_soft_limit_counts_too) {
    fresh("0::/a\n", v2_mount, "cg");
    put("cg/a/memory.max", "300000000\n");
    put("cg/a/memory.high", "200000000\n");
    put("cg/a/memory.current", "50000000\n");
    CHECK(room() == 150000000);
}

TEST(a_v1_limit_counts_and_its_huge_number_does_not) {
    fresh("4:memory:/x\n3:cpu:/\n0::/\n", v1_mount, "cg");
    put("cg/x/memory.limit_in_bytes", "314572800\n");
    put("cg/x/memory.usage_in_bytes", "14572800\n");
    put("cg/memory.limit_in_bytes", "9223372036854771712\n");
    CHECK(room() == 300000000);
}

TEST(a_container_that_sees_only_its_own_group_finds_its_limit) {
    fresh("4:memory:/docker/0123\n", v1_mount, "cg"); /* the path is the host's, the mount the container's */
    put("cg/memory.limit_in_bytes", "200000000\n");
    put("cg/memory.usage_in_bytes", "1000\n");
    CHECK(room() == 199999000);
}

TEST(use_above_the_limit_leaves_nothing) {
    fresh("0::/a\n", v2_mount, "cg");
    put("cg/a/memory.max", "1000\n");
    put("cg/a/memory.current", "5000\n");
    CHECK(room() == 0);
}

static const check_test tests[] = {
    LISTED(without_limits_it_is_what_the_kernel_calls_available),
    LISTED(a_v2_limit_counts_at_every_level_less_its_use),
    LISTED(a_v2_soft_limit_counts_too),
    LISTED(a_v1_limit_counts_and_its_huge_number_does_not),
    LISTED(a_container_that_sees_only_its_own_group_finds_its_limit),
    LISTED(use_above_the_limit_leaves_nothing),
};

int main(int argc, char ** argv) {
    return check_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
