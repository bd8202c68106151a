/*
 * ggml/cxx: the three things that only C++ can say: matching with the regular expression engine that llama.cpp uses,
 * reading the tensor list of a loaded model, which llama.cpp offers as a std::vector, and catching what gguf.h throws when
 * memory is refused.
 * Guarantees: no exception leaves; a pattern that this engine accepts is one that llama.cpp accepts.
 */
#ifndef MS_CXX_H
#define MS_CXX_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ms_regex ms_regex;

/* Compiles an ECMAScript pattern; NULL with the engine's reason in `why`. */
ms_regex * ms_regex_open(const char * pattern, char * why, size_t n);
void ms_regex_close(ms_regex * regex);
/* 1 found, 0 not, -1 where the engine gave up (too complex); `why` as above. */
int ms_regex_search(const ms_regex * regex, const char * text, char * why, size_t n);

struct ggml_tensor;
struct llama_model;

/* Number of tensors and tensor i of a model, through llama_internal_get_tensor_map at `fn`. */
int ms_tensor_map_size(void * fn, const struct llama_model * model);
struct ggml_tensor * ms_tensor_map_get(void * fn, const struct llama_model * model, int i, const char ** name);

struct gguf_context;
struct gguf_init_params;

/* gguf_init_from_file, at `fn`; NULL with errno ENOMEM where memory was refused. */
struct gguf_context * ms_gguf_open(void * fn, const char * path, struct gguf_init_params params);

#ifdef __cplusplus
}
#endif

#endif
