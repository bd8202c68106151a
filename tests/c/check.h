/*
 * check.h: the few macros the C unit tests are written with.
 * A test program is one file: TEST(a_rule_in_words) { ... CHECK(...); }, then a list and main:
 *
 *     static const check_test tests[] = { LISTED(a_rule_in_words), ... };
 *     int main(int argc, char ** argv) { return check_main(argc, argv, tests, sizeof tests / sizeof tests[0]); }
 *
 * Guarantees: each test's name is printed with its outcome, a failed condition with file and line; the last line is
 * "N passed, N failed" (and ", N skipped" where a test could not run here, each with its reason); the exit status is
 * not zero if anything failed, and 77 if nothing could run. Arguments are names of the tests to run; none means all.
 * CHECK may be used from several threads at once.
 */
#ifndef MS_TEST_CHECK_H
#define MS_TEST_CHECK_H

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct check_test {
    const char * name;
    void (*run)(void);
} check_test;

#define TEST(name) static void name(void)
#define LISTED(name) {#name, name}

static atomic_int check_failures;      /* of the test that runs */
static const char * check_skip_reason; /* set by SKIP, main thread only */

enum {
    CHECK_PRINTED_FAILURES = 10, /* a failing loop must not bury the first failure */
    CHECK_ALL_SKIPPED = 77       /* exit status that ctest counts as skipped */
};

static inline int check_failed(const char * what, const char * file, int line) {
    int n = atomic_fetch_add(&check_failures, 1);
    if (n < CHECK_PRINTED_FAILURES) {
        printf("    %s:%d: not true: %s\n", file, line, what);
    } else if (n == CHECK_PRINTED_FAILURES) {
        printf("    (further failures of this test are only counted)\n");
    }
    return 0;
}

/* Goes on after a failure; its value says whether the condition held. */
#define CHECK(cond) ((cond) ? 1 : check_failed(#cond, __FILE__, __LINE__))

/* Leaves the (void) function after a failure. */
#define REQUIRE(cond)                                                                                                  \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            check_failed(#cond, __FILE__, __LINE__);                                                                   \
            return;                                                                                                    \
        }                                                                                                              \
    } while (0)

#define CHECK_STR(a, b) CHECK(strcmp((a), (b)) == 0)

/* Leaves a test that cannot run on this machine. */
#define SKIP(reason)                                                                                                   \
    do {                                                                                                               \
        check_skip_reason = (reason);                                                                                  \
        return;                                                                                                        \
    } while (0)

/* True if `run(arg)` ends in abort(): for the asserts that guard against wrong use. */
static inline int check_aborts(void (*run)(void *), void * arg) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (freopen("/dev/null", "w", stderr) == NULL) {
            _exit(2);
        }
        run(arg);
        _exit(0);
    }
    int status = 0;
    return child > 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == 6;
}

static inline int check_wanted(int argc, char ** argv, const char * name) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], name) == 0) {
            return 1;
        }
    }
    return argc <= 1;
}

static inline int check_main(int argc, char ** argv, const check_test * tests, size_t n) {
    int passed = 0;
    int failed = 0;
    int skipped = 0;
    for (size_t i = 0; i < n; i++) {
        if (!check_wanted(argc, argv, tests[i].name)) {
            continue;
        }
        atomic_store(&check_failures, 0);
        check_skip_reason = NULL;
        tests[i].run();
        if (atomic_load(&check_failures) > 0) {
            failed++;
            printf("FAIL  %s\n", tests[i].name);
        } else if (check_skip_reason != NULL) {
            skipped++;
            printf("skip  %s: %s\n", tests[i].name, check_skip_reason);
        } else {
            passed++;
            printf("ok    %s\n", tests[i].name);
        }
        fflush(stdout);
    }
    if (passed + failed + skipped == 0) {
        printf("no test of that name\n");
        failed = 1;
    }
    printf("%d passed, %d failed", passed, failed);
    if (skipped > 0) {
        printf(", %d skipped", skipped);
    }
    printf("\n");
    if (failed == 0 && passed == 0) {
        return CHECK_ALL_SKIPPED;
    }
    return failed > 0;
}

/* ---- a small generator, the same everywhere: the seed is printed by the test that uses it ---- */

typedef struct check_random {
    unsigned long long state;
} check_random;

static inline unsigned long long check_next(check_random * r) { /* splitmix64 */
    unsigned long long z = (r->state += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

/* in [0, n), n > 0 */
static inline unsigned long long check_below(check_random * r, unsigned long long n) {
    return check_next(r) % n;
}

/* CHECK_SEED in the environment repeats a run; otherwise `fallback`. Prints what it gives. */
static inline unsigned long long check_seed(unsigned long long fallback) {
    const char * text = getenv("CHECK_SEED");
    unsigned long long seed = text != NULL ? strtoull(text, NULL, 0) : fallback;
    printf("    seed %llu (CHECK_SEED=%llu repeats it)\n", seed, seed);
    return seed;
}

#endif
