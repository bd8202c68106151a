/* gguf/gguf_check: see gguf_check.c. */
#ifndef MS_GGUF_CHECK_H
#define MS_GGUF_CHECK_H

#include "base/base.h"

/* Walks the header of a GGUF (little-endian, version 3: the caller has looked) of `file_bytes` bytes.
 * Errors: IO; FORMAT, naming the key or tensor. */
moestream_status ms_gguf_check(const char * path, uint64_t file_bytes, moestream_error * err);

#endif
