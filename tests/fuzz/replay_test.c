/*
 * Hostile GGUF files through the expert index, without a fuzzer: the corpus beside this file (what was found worth
 * keeping; MOESTREAM_CORPUS names another folder), and mutations of sane headers with a fixed seed.
 * MOESTREAM_FUZZ_SECONDS runs for longer.
 */
#include <dirent.h>
#include <time.h>

#include "check.h"
#include "fuzz/index_target.h"
#include "support/gguf_maker.h"

enum { N_SEEDS = 3, N_MUTATIONS = 4000 };

static gguf_maker seed[N_SEEDS];
static size_t header_bytes[N_SEEDS];

static void make_seed(int which) {
    static const char * const names[] = {"up", "down", "gate"};
    gguf_maker * m = &seed[which];
    const int64_t ne[] = {32, 4, 3}, one = 8;
    maker_begin(m, which == 1 ? 64 : 32, which == 2 ? 7 : 4, 7);
    maker_key_text(m, "general.architecture", "made");
    maker_key_u32(m, "made.block_count", 2);
    maker_key_u32(m, "made.expert_count", 3);
    maker_key_u32(m, "made.expert_used_count", 1);
    if (which == 2) {
        maker_key_u32(m, "split.count", 1);
        maker_key_u32(m, "split.no", 0);
        maker_key_u32(m, "split.tensors.count", 7);
    }
    maker_tensor(m, "output_norm.weight", 0, 1, &one, 32);
    for (int i = 0; i < 6; i++) {
        char name[64];
        snprintf(name, sizeof(name), "blk.%d.ffn_%s_exps.weight", i / 3, names[i % 3]);
        maker_tensor(m, name, which == 0 ? 8 : 2, 3, ne, which == 0 ? 34 * 12 : 18 * 12); /* Q8_0, Q4_0 */
    }
    header_bytes[which] = maker_end(m);
}

/* A few changes of the kinds that break parsers: bits, whole numbers at their limits, pieces moved, ends cut off. */
static size_t mutate(check_random * r, uint8_t * bytes, size_t n, size_t header) {
    static const uint64_t extreme[] = {0,
                                       1,
                                       0x7f,
                                       0x80,
                                       0xff,
                                       0x7fffffff,
                                       0x80000000,
                                       0xffffffff,
                                       0x100000000,
                                       INT64_MAX,
                                       (uint64_t) INT64_MAX + 1,
                                       UINT64_MAX,
                                       UINT64_MAX - 31,
                                       1ULL << 60};
    for (uint64_t changes = 1 + check_below(r, 4); changes > 0; changes--) {
        size_t at = (size_t) check_below(r, header);
        uint64_t value = extreme[check_below(r, sizeof(extreme) / sizeof(extreme[0]))];
        size_t width = (size_t) 1 << check_below(r, 4);
        switch (check_below(r, 6)) {
            case 0: bytes[at] ^= (uint8_t) (1u << check_below(r, 8)); break;
            case 1: bytes[at] = (uint8_t) check_next(r); break;
            case 2:
            case 3: memcpy(bytes + at, &value, at + width <= n ? width : 1); break;
            case 4: {
                size_t from = (size_t) check_below(r, header), length = (size_t) check_below(r, 24);
                if (from + length <= n && at + length <= n) {
                    memmove(bytes + at, bytes + from, length);
                }
                break;
            }
            default: n = check_below(r, 8) == 0 ? (size_t) check_below(r, n) + 1 : n; break;
        }
        header = header < n ? header : n;
    }
    return n;
}

TEST(sane_files_are_taken) {
    for (int s = 0; s < N_SEEDS; s++) {
        moestream_error err;
        bool taken = index_target(seed[s].bytes, seed[s].n, &err);
        if (!CHECK(taken)) {
            printf("    seed %d: %s\n", s, err.message);
        }
    }
}

TEST(every_cut_header_is_refused) {
    moestream_error err;
    for (size_t n = 0; n < header_bytes[0]; n++) {
        CHECK(!index_target(seed[0].bytes, n, &err));
    }
    CHECK(!index_target(seed[0].bytes, seed[0].n - 64, &err));
    CHECK(err.status == MOESTREAM_ERR_EOF && strstr(err.message, "blk.1.ffn_gate_exps.weight") != NULL);
}

TEST(mutated_headers_never_crash_or_point_outside) {
    const char * text = getenv("MOESTREAM_FUZZ_SECONDS");
    time_t until = time(NULL) + (text != NULL ? atoi(text) : 0);
    check_random r = {check_seed(20261130)};
    long n_done = 0, n_taken = 0;
    for (; n_done < N_MUTATIONS || time(NULL) < until; n_done++) {
        int s = (int) check_below(&r, N_SEEDS);
        uint8_t * bytes = malloc(seed[s].n);
        REQUIRE(bytes != NULL);
        memcpy(bytes, seed[s].bytes, seed[s].n);
        size_t n = mutate(&r, bytes, seed[s].n, header_bytes[s]);
        moestream_error err;
        n_taken += index_target(bytes, n, &err);
        free(bytes);
    }
    printf("    %ld files, %ld taken\n", n_done, n_taken);
    CHECK(n_taken > 0 && n_taken < n_done);
}

TEST(the_corpus_never_crashes_or_points_outside) {
    char beside[1024];
    snprintf(beside, sizeof(beside), "%.*scorpus", (int) (strlen(__FILE__) - strlen("replay_test.c")), __FILE__);
    const char * folder = getenv("MOESTREAM_CORPUS") != NULL ? getenv("MOESTREAM_CORPUS") : beside;
    DIR * dir = opendir(folder);
    REQUIRE(dir != NULL);
    int n_files = 0;
    for (struct dirent * entry; (entry = readdir(dir)) != NULL;) {
        char path[2048];
        snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        FILE * f = entry->d_name[0] != '.' ? fopen(path, "rb") : NULL;
        if (f == NULL) {
            continue;
        }
        uint8_t * bytes = malloc(1 << 20);
        size_t n = bytes != NULL ? fread(bytes, 1, 1 << 20, f) : 0;
        moestream_error err;
        index_target(bytes, n, &err);
        free(bytes);
        fclose(f);
        n_files++;
    }
    closedir(dir);
    printf("    %d files\n", n_files);
    CHECK(n_files > 0);
}

static const check_test tests[] = {
    LISTED(sane_files_are_taken),
    LISTED(every_cut_header_is_refused),
    LISTED(mutated_headers_never_crash_or_point_outside),
    LISTED(the_corpus_never_crashes_or_points_outside),
};

int main(int argc, char ** argv) {
    for (int s = 0; s < N_SEEDS; s++) {
        make_seed(s);
    }
    int status = check_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
    for (int s = 0; s < N_SEEDS; s++) {
        maker_free(&seed[s]);
    }
    return status;
}
