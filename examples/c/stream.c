/* Streams a MoE model from C: block 0's experts in CPU memory, all others from the file through the smallest cache.
 * Prints what is on, the tokens it chose, what was read, and a hash of all logits (the same in every language).
 *
 *   cc stream.c $(pkg-config --cflags --libs moestream) -o stream && ./stream MODEL.gguf
 */
#include <inttypes.h>
#include <llama.h>
#include <moestream.h>
#include <stdio.h>

static moestream_error err = {.struct_size = sizeof(err)};

static int failed(moestream_status status) {
    if (status != MOESTREAM_OK) {
        fprintf(stderr, "%s: %s\n", moestream_status_name(status), err.message);
    }
    return status != MOESTREAM_OK;
}

int main(int argc, char ** argv) {
    moestream_params options = {
        .struct_size = sizeof(options), .n_cpu_moe = 1, .cache_bytes = 1, .prefetch = MOESTREAM_PREFETCH_OFF};
    moestream_plan * plan = NULL;
    moestream_plan_info info = {.struct_size = sizeof(info)};
    moestream * store = NULL;
    moestream_context * hook = NULL;
    struct llama_model * model = NULL;
    /* llama.cpp's log lines wait in a ring (moestream_log_take) instead of going to stderr */
    if (argc < 2 || failed(moestream_log_capture(NULL, 3, &err)) ||
        failed(moestream_plan_open(&plan, argv[1], &options, &err))) {
        return 2;
    }
    moestream_plan_get_info(plan, &info); /* what will go where, from the header alone */
    moestream_plan_close(plan);
    options.cache_bytes = info.min_cache_bytes;

    /* 1: the store, 2: the model, 3: the hook of a context, 4: the context */
    struct llama_model_params mparams = llama_model_default_params();
    struct llama_context_params cparams = llama_context_default_params();
    if (failed(moestream_open(&store, argv[1], &options, &err)) ||
        failed(moestream_load_model(store, &model, &mparams, &err)) ||
        failed(moestream_context_init(&hook, store, &cparams, &err))) {
        return 1;
    }
    struct llama_context * ctx = llama_init_from_model(model, cparams);
    llama_set_n_threads(ctx, 1, 1);
    printf("%s\n", moestream_describe(store));

    llama_token tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model)), n = 8;
    uint64_t hash = 14695981039346656037u; /* FNV-1a over the logits' bytes */
    for (int step = 0; step < 8; step++, n = 1) {
        if (llama_decode(ctx, llama_batch_get_one(tokens, n)) != 0 || failed(moestream_context_status(hook, &err))) {
            return 1;
        }
        const float * logits = llama_get_logits_ith(ctx, -1);
        tokens[0] = 0;
        for (int32_t i = 1; i < n_vocab; i++) {
            tokens[0] = logits[i] > logits[tokens[0]] ? i : tokens[0];
        }
        for (size_t i = 0; i < (size_t) n_vocab * sizeof(float); i++) {
            hash = (hash ^ ((const unsigned char *) logits)[i]) * 1099511628211u;
        }
        printf("token %d\n", tokens[0]);
    }
    moestream_stats stats = {.struct_size = sizeof(stats)};
    moestream_get_stats(store, &stats);
    printf("hits %" PRIu64 " misses %" PRIu64 " read %" PRIu64 "\nlogits %016" PRIx64 "\n", stats.n_hits,
           stats.n_misses, stats.read_bytes, hash);
    llama_free(ctx); /* the way back: context, hook, model, store */
    moestream_context_free(hook);
    llama_model_free(model);
    return failed(moestream_close(store, &err));
}
