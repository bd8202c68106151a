/*
 * replay_ids: puts recorded experts in place of the router's choice in a model that moestream does not stream, so that
 * upstream's modes do the same work as a streamed replay. An eval callback (llama_context_params.cb_eval): llama.cpp's own
 * name for the tensor of chosen experts is ffn_moe_topk-<layer>; it is asked for, and written once it is computed.
 * It cuts the graph once a layer; nothing else changes. Compiled by bench/streaming.py, never part of the package.
 */
#include <ggml.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct replay {
    const int32_t * ids; /* [n_tokens][n_layer][n_used] */
    int64_t n_tokens, n_layer, n_used;
    int64_t token, step; /* where this call begins in the recording, and its tokens */
    int64_t first_layer; /* the first layer with experts */
    int64_t n_written;   /* layers, over all calls */
};

bool replay_eval(struct ggml_tensor * tensor, bool ask, void * user);

bool replay_eval(struct ggml_tensor * tensor, bool ask, void * user) {
    static const char NAME[] = "ffn_moe_topk-";
    struct replay * r = user;
    if (strncmp(tensor->name, NAME, sizeof(NAME) - 1) != 0) {
        return !ask;
    }
    if (ask) {
        return true;
    }
    const int64_t layer = strtol(tensor->name + sizeof(NAME) - 1, NULL, 10);
    if (layer == r->first_layer) {
        r->token += r->step;
        r->step = tensor->ne[1];
    }
    for (int64_t t = 0; t < tensor->ne[1]; t++) {
        const int32_t * from = r->ids + ((r->token + t) % r->n_tokens * r->n_layer + layer) * r->n_used;
        memcpy((char *) tensor->data + (size_t) t * tensor->nb[1], from, (size_t) r->n_used * sizeof(*from));
    }
    r->n_written++;
    return true;
}
