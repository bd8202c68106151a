/* gguf/gguf_check: see gguf_check.c. */
#ifndef MS_GGUF_CHECK_H
#define MS_GGUF_CHECK_H

#include "base/base.h"

/* In all shards together. The largest models have 2,000; upstream compares each name with all others of its file. */
enum { MS_MAX_TENSORS = 1 << 15 };

/* Walks the header of a GGUF (little-endian, version 3: the caller has looked) of `file_bytes` bytes.
 * Errors: IO; FORMAT, naming the key or tensor. */
moestream_status ms_gguf_check(const char * path, uint64_t file_bytes, moestream_error * err);

#endif
