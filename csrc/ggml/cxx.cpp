// ggml/cxx: see cxx.h.
#include "ggml/cxx.h"

#include <gguf.h>

#include <cerrno>
#include <cstdio>
#include <new>
#include <regex>
#include <string>
#include <utility>
#include <vector>

struct ms_regex {
    std::regex re;
};

ms_regex * ms_regex_open(const char * pattern, char * why, size_t n) {
    try {
        return new ms_regex{std::regex(pattern)};
    } catch (const std::exception & e) {
        std::snprintf(why, n, "%s", e.what());
        return nullptr;
    }
}

void ms_regex_close(ms_regex * regex) {
    delete regex;
}

int ms_regex_search(const ms_regex * regex, const char * text, char * why, size_t n) {
    try {
        return std::regex_search(text, regex->re) ? 1 : 0;
    } catch (const std::exception & e) {
        std::snprintf(why, n, "%s", e.what());
        return -1;
    }
}

gguf_context * ms_gguf_open(void * fn, const char * path, gguf_init_params params) {
    try {
        return reinterpret_cast<decltype(&gguf_init_from_file)>(fn)(path, params);
    } catch (const std::exception &) {
        errno = ENOMEM; // bad_alloc, or length_error: more than there can be
        return nullptr;
    }
}

typedef const std::vector<std::pair<std::string, ggml_tensor *>> & (*tensor_map_fn)(const llama_model *);

int ms_tensor_map_size(void * fn, const llama_model * model) {
    return (int) reinterpret_cast<tensor_map_fn>(fn)(model).size();
}

ggml_tensor * ms_tensor_map_get(void * fn, const llama_model * model, int i, const char ** name) {
    const auto & entry = reinterpret_cast<tensor_map_fn>(fn)(model)[(size_t) i];
    *name = entry.first.c_str();
    return entry.second;
}
