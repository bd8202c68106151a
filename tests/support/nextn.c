/* Decodes with a context and with a draft context for multi-token prediction on the same model, in turn, as speculative
 * decoding does, and prints a hash of all logits of each.
 *
 *   nextn MODEL.gguf [stream]      with "stream", experts come from the file through the smallest cache
 *
 * It never compares anything: its caller runs it both ways.
 */
#include <inttypes.h>
#include <llama.h>
#include <math.h>
#include <moestream.h>
#include <stdio.h>
#include <stdlib.h>

enum { N_PROMPT = 9, N_STEPS = 6 };

static moestream_error err = {.struct_size = sizeof(err)};

static void require(int good, const char * what) {
    if (!good) {
        fprintf(stderr, "nextn: %s failed: %s\n", what, err.message);
        exit(1);
    }
}

static void add_hash(uint64_t * hash, const float * values, size_t n) {
    for (size_t i = 0; i < n * sizeof(float); i++) {
        *hash = (*hash ^ ((const unsigned char *) values)[i]) * 1099511628211u;
    }
}

/* One call of the draft context: each token with a state as the target model would hand it on. The batch holds both. */
static void draft(struct llama_context * ctx, int32_t n_embd, int32_t pos, int32_t n, llama_token * tokens) {
    struct llama_batch batch = llama_batch_init(n, n_embd, 1);
    for (int32_t k = 0; k < n; k++) {
        for (int32_t i = 0; i < n_embd; i++) {
            batch.embd[k * n_embd + i] = sinf(0.37f * (float) i + (float) (pos + k));
        }
        batch.pos[k] = pos + k;
        batch.n_seq_id[k] = 1;
        batch.seq_id[k][0] = 0;
        batch.logits[k] = 1;
    }
    batch.n_tokens = n;
    batch.token = tokens;
    require(llama_decode(ctx, batch) == 0, "llama_decode of the draft");
    batch.token = NULL; /* the caller's */
    llama_batch_free(batch);
}

int main(int argc, char ** argv) {
    require(argc >= 2, "MODEL");
    require(moestream_log_capture(NULL, 3, &err) == MOESTREAM_OK, "log");
    const int stream = argc > 2;
    moestream_params options = {.struct_size = sizeof(options), .cache_bytes = 1};
    moestream_plan * plan = NULL;
    moestream_plan_info info = {.struct_size = sizeof(info)};
    require(moestream_plan_open(&plan, argv[1], &options, &err) == MOESTREAM_OK, "plan");
    moestream_plan_get_info(plan, &info);
    moestream_plan_close(plan);
    options.cache_bytes = info.min_cache_bytes;

    moestream * store = NULL;
    struct llama_model * model = NULL;
    struct llama_model_params mparams = llama_model_default_params();
    mparams.load_mtp = true;
    mparams.use_extra_bufts = false;
    if (stream) {
        require(moestream_open(&store, argv[1], &options, &err) == MOESTREAM_OK, "open");
        require(moestream_load_model(store, &model, &mparams, &err) == MOESTREAM_OK, "load");
    } else {
        model = llama_model_load_from_file(argv[1], mparams);
        require(model != NULL, "llama_model_load_from_file");
    }
    require(llama_model_n_layer_nextn(model) == 1, "a NextN layer");

    moestream_context * hooks[2] = {NULL, NULL};
    struct llama_context * contexts[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) {
        struct llama_context_params cparams = llama_context_default_params();
        cparams.n_ctx = 128;
        cparams.n_threads = cparams.n_threads_batch = 1;
        cparams.ctx_type = i == 1 ? LLAMA_CONTEXT_TYPE_MTP : LLAMA_CONTEXT_TYPE_DEFAULT;
        cparams.ctx_other = i == 1 ? contexts[0] : NULL;
        require(!stream || moestream_context_init(&hooks[i], store, &cparams, &err) == MOESTREAM_OK, "hook");
        contexts[i] = llama_init_from_model(model, cparams);
        require(contexts[i] != NULL, "llama_init_from_model");
    }

    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model)), n_embd = llama_model_n_embd(model);
    llama_token tokens[N_PROMPT] = {3, 1, 4, 15, 9, 26, 5, 35, 8};
    uint64_t hashes[2] = {14695981039346656037u, 14695981039346656037u};
    for (int32_t step = 0, pos = 0, n = N_PROMPT; step < N_STEPS; step++, pos += n, n = 1) {
        if (step > 0) {
            tokens[0] = (llama_token) (7 * step + 1);
        }
        require(llama_decode(contexts[0], llama_batch_get_one(tokens, n)) == 0, "llama_decode");
        add_hash(&hashes[0], llama_get_logits_ith(contexts[0], -1), (size_t) n_vocab);
        draft(contexts[1], n_embd, pos, n, tokens);
        add_hash(&hashes[1], llama_get_logits(contexts[1]), (size_t) n * (size_t) n_vocab);
        for (int i = 0; i < 2 && stream; i++) {
            require(moestream_context_status(hooks[i], &err) == MOESTREAM_OK, "a context's status");
        }
    }
    printf("target %016" PRIx64 "\ndraft %016" PRIx64 "\n", hashes[0], hashes[1]);
    if (stream) {
        moestream_stats stats = {.struct_size = sizeof(stats)};
        moestream_get_stats(store, &stats);
        printf("misses %" PRIu64 " evictions %" PRIu64 "\n", stats.n_misses, stats.n_evictions);
    }
    for (int i = 1; i >= 0; i--) {
        llama_free(contexts[i]);
        moestream_context_free(hooks[i]);
    }
    llama_model_free(model);
    return stream ? moestream_close(store, &err) : 0;
}
