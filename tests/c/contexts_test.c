/*
 * Several contexts of one store through ggml, each in its own thread and with compute threads of its own: made and freed
 * while others compute, at the smallest cache, while the cache changes its size. Runs under the thread sanitizer, too.
 */
#include <pthread.h>

#include "check.h"
#include "support/expert_rig.h"

enum { N_CONTEXTS = 3, ROUNDS = 6, PER_ROUND = 8 };

typedef struct job {
    const rig * shared;
    unsigned seed;
    atomic_int * running;
} job;

/* Each round has a context of its own. */
static void * compute(void * arg) {
    const job * j = arg;
    check_random r = {j->seed};
    for (int round = 0; round < ROUNDS; round++) {
        rig mine = *j->shared;
        moestream_error err = {.struct_size = sizeof(err)};
        mine.hook = NULL;
        if (!CHECK(moestream_context_init(&mine.hook, mine.ms, NULL, &err) == MOESTREAM_OK)) {
            break;
        }
        for (int i = 0; i < PER_ROUND; i++) {
            static const int tokens[] = {1, 1, 2, 9};
            int bank = (int) check_below(&r, 2 * N_TYPES), n_tokens = tokens[check_below(&r, 4)];
            CHECK(agrees(&mine, bank, 1 + (int) check_below(&r, N_USED), 1, n_tokens, 1 + i % 2));
        }
        moestream_context_free(mine.hook);
    }
    atomic_fetch_sub(j->running, 1);
    return NULL;
}

static void contexts_compute_at_once(int io) {
    rig r;
    REQUIRE(rig_open(&r, io, false));
    uint64_t least = totals(&r).cache_bytes;
    atomic_int running = N_CONTEXTS;
    pthread_t thread[N_CONTEXTS];
    job jobs[N_CONTEXTS];
    for (int i = 0; i < N_CONTEXTS; i++) {
        jobs[i] = (job) {&r, 11u * (unsigned) (i + 1), &running};
        REQUIRE(pthread_create(&thread[i], NULL, compute, &jobs[i]) == 0);
    }
    int n_resized = 0;
    for (uint64_t turn = 0; atomic_load(&running) > 0; turn++) {
        moestream_status st = moestream_resize(r.ms, least + turn % 3 * least, NULL);
        CHECK(st == MOESTREAM_OK || st == MOESTREAM_ERR_BUSY);
        n_resized += st == MOESTREAM_OK;
        moestream_stats all = totals(&r);
        CHECK(all.n_hits + all.n_misses >= all.n_coalesced);
        usleep(2000);
    }
    for (int i = 0; i < N_CONTEXTS; i++) {
        pthread_join(thread[i], NULL);
    }
    CHECK(totals(&r).n_evictions > 0 || n_resized > 0);
    CHECK(agrees(&r, 3, N_USED, 1, 7, 2)); /* the first context, which slept */
    rig_close(&r);
}

TEST(contexts_in_threads_give_the_stock_kernels_bits_with_either_engine) {
    contexts_compute_at_once(MOESTREAM_IO_AUTO);
    contexts_compute_at_once(MOESTREAM_IO_PREAD);
}

static void * cancel_often(void * arg) {
    moestream_context * const * hooks = arg;
    for (int i = 0; i < 200; i++) {
        moestream_context_cancel(hooks[i % 2]);
        usleep(300);
    }
    return NULL;
}

/* A call either gives the right bits or says it was stopped; the other context is not touched. */
TEST(cancelling_one_context_does_nothing_to_the_bits_of_another) {
    rig a, b;
    REQUIRE(rig_open(&a, MOESTREAM_IO_AUTO, false));
    b = a;
    b.hook = NULL;
    REQUIRE(moestream_context_init(&b.hook, b.ms, NULL, NULL) == MOESTREAM_OK);
    moestream_context * hooks[2] = {a.hook, a.hook};
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, cancel_often, hooks) == 0);
    for (int i = 0; i < 30; i++) {
        CHECK(agrees(&b, i % (2 * N_TYPES), N_USED, 1, 1 + i % 9, 1 + i % 2));
        struct ggml_context * ctx = room();
        struct ggml_tensor *x = make_input(ctx, 1, 7, 5), *ids = make_ids(ctx, N_USED, 7, 6);
        struct ggml_tensor * stock = api->ggml_mul_mat_id(ctx, plain_bank(ctx, i % 8), x, ids);
        struct ggml_tensor * out = api->ggml_mul_mat_id(ctx, a.bank[i % 8], x, ids);
        run(ctx, stock, NULL, 1, NULL, 0);
        run(ctx, out, &a, 1 + i % 2, &out, 1);
        moestream_status st = moestream_context_status(a.hook, NULL);
        CHECK(st == MOESTREAM_ERR_CLOSED || (st == MOESTREAM_OK && same(stock, out)));
        api->ggml_free(ctx);
    }
    pthread_join(thread, NULL);
    moestream_context_status(a.hook, NULL);
    CHECK(agrees(&a, 1, N_USED, 1, 7, 2));
    moestream_context_free(b.hook);
    rig_close(&a);
}

/* A thread reads the clock and is preempted; another gets slots and notes when; the first compares. */
TEST(a_slot_that_came_after_the_clock_was_read_is_not_a_deadline) {
    rig r;
    REQUIRE(rig_open(&r, MOESTREAM_IO_AUTO, false));
    r.hook->op.looked_ns = ms_now_ns();
    r.hook->op.slots_since_ns = ms_now_ns() + 10 * 1000000000u;
    ms_wait_for_slots(r.hook);
    moestream_error err = {.struct_size = sizeof(err)};
    if (!CHECK(moestream_context_status(r.hook, &err) == MOESTREAM_OK)) {
        printf("    %s\n", err.message);
    }
    rig_close(&r);
}

static bool caller_says_stop(void * user) {
    return *(bool *) user;
}

TEST(the_callers_abort_callback_and_its_answer_are_kept) {
    rig r;
    REQUIRE(rig_open(&r, MOESTREAM_IO_AUTO, false));
    moestream_context_free(r.hook);
    r.hook = NULL;
    bool stop = false;
    struct llama_context_params params;
    memset(&params, 0, sizeof(params));
    params.abort_callback = caller_says_stop;
    params.abort_callback_data = &stop;
    REQUIRE(moestream_context_init(&r.hook, r.ms, &params, NULL) == MOESTREAM_OK);
    CHECK(params.abort_callback != caller_says_stop && params.cb_eval != NULL);
    CHECK(agrees(&r, 2, N_USED, 1, 7, 2));
    stop = true;
    struct ggml_context * ctx = room();
    struct ggml_tensor *x = make_input(ctx, 1, 7, 5), *ids = make_ids(ctx, N_USED, 7, 6);
    struct ggml_tensor * out = api->ggml_mul_mat_id(ctx, r.bank[5], x, ids);
    run(ctx, out, &r, 2, &out, 1);
    CHECK(params.abort_callback(params.abort_callback_data));
    moestream_error err = {.struct_size = sizeof(err)};
    CHECK(moestream_context_status(r.hook, &err) == MOESTREAM_ERR_CLOSED &&
          strstr(err.message, "caller's abort callback") != NULL);
    api->ggml_free(ctx);
    stop = false;
    CHECK(agrees(&r, 5, N_USED, 1, 7, 2));
    rig_close(&r);
}

static const check_test tests[] = {
    LISTED(the_callers_abort_callback_and_its_answer_are_kept),
    LISTED(a_slot_that_came_after_the_clock_was_read_is_not_a_deadline),
    LISTED(contexts_in_threads_give_the_stock_kernels_bits_with_either_engine),
    LISTED(cancelling_one_context_does_nothing_to_the_bits_of_another),
};

int main(int argc, char ** argv) {
    return rig_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
