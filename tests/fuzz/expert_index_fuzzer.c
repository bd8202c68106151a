/*
 * libFuzzer harness of the expert index: hostile GGUF headers. By hand, with clang:
 *
 *     make fuzz FUZZ_SECONDS=600
 */
#include "fuzz/index_target.h"

int LLVMFuzzerTestOneInput(const uint8_t * data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t * data, size_t n) {
    moestream_error err;
    index_target(data, n, &err);
    return 0;
}
