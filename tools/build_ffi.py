#!/usr/bin/env python3
"""Writes the C source of moestream._native, the cffi module behind the Python package.

    python tools/build_ffi.py --moestream-header H --llama-include DIR[;DIR2] --out FILE.c

Compile FILE.c with the include folders of moestream.h and of the same llama.cpp, and link it to libmoestream only.
Functions of libmoestream are called directly. Functions of llama.cpp are called through pointers that
`ms_native_bind` fills from a dlopen handle, so that the module has no link-time tie to any libllama.
It guarantees that types and values are those of the headers given (a mismatch does not compile).
It never does: compile, import, or look at anything but the headers named on the command line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import cffi

from cdef import OPTIONAL_FUNCTIONS, HeaderError, LlamaCdef, find_llama_headers, llama_cdef, moestream_cdef

MODULE = "moestream._native"

# Declared to cffi beside the two headers; defined in the preamble below, or in Python (the progress callback).
OWN_CDEF = """
const char * ms_native_bind(void * handle);
int32_t ms_native_has(const char * name);
const char * ms_native_left_out(void);
bool ms_native_abort(void * flag);
void ms_native_set_flag(int32_t * flag, int32_t value);
extern "Python" bool ms_native_progress(float, void *);
"""

PREAMBLE_HEAD = """
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "llama.h"
#include "moestream.h"

/* Deprecated functions are offered on purpose; the host decides. */
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

/* Set from one thread, read by ggml's between two nodes of a graph: the value alone matters, it orders nothing. */
static void ms_native_set_flag(int32_t * flag, int32_t value) {
    __atomic_store_n(flag, value, __ATOMIC_RELAXED);
}

static bool ms_native_abort(void * flag) {
    return __atomic_load_n((int32_t *) flag, __ATOMIC_RELAXED) != 0;
}
"""

PREAMBLE_BIND = """
static const struct ms_native_entry {
    const char * name;
    void ** slot;
    int optional;
} ms_native_table[] = {
%(rows)s
};

enum { MS_NATIVE_COUNT = sizeof(ms_native_table) / sizeof(ms_native_table[0]) };

/* Looks all functions up before it changes one pointer: NULL, or the first required name that `handle` lacks. */
static const char * ms_native_bind(void * handle) {
    void * found[MS_NATIVE_COUNT];
    for (int i = 0; i < MS_NATIVE_COUNT; i++) {
        found[i] = handle ? dlsym(handle, ms_native_table[i].name) : NULL;
        if (!found[i] && !ms_native_table[i].optional) {
            return ms_native_table[i].name;
        }
    }
    for (int i = 0; i < MS_NATIVE_COUNT; i++) {
        *ms_native_table[i].slot = found[i];
    }
    return NULL;
}

/* 1: bound, 0: unbound or absent from the library, -1: not a function of llama.cpp that this module offers. */
static int32_t ms_native_has(const char * name) {
    for (int i = 0; i < MS_NATIVE_COUNT; i++) {
        if (strcmp(ms_native_table[i].name, name) == 0) {
            return *ms_native_table[i].slot != NULL;
        }
    }
    return -1;
}

/* Functions that the headers of this build did not declare, separated by spaces. */
static const char * ms_native_left_out(void) {
    return "%(left_out)s";
}

"""


def preamble(llama: LlamaCdef) -> str:
    """The C text in front of cffi's wrappers."""
    pointers = "".join(f"static __typeof__(&{name}) ms_p_{name};\n" for name in llama.functions)
    rows = ",\n".join(
        f'    {{ "{name}", (void **) &ms_p_{name}, {int(name in OPTIONAL_FUNCTIONS)} }}' for name in llama.functions
    )
    # Function-like, because llama_pooling_type and others are the name of a type as well.
    macros = "".join(f"#define {name}(...) ms_p_{name}(__VA_ARGS__)\n" for name in llama.functions)
    bind = PREAMBLE_BIND % {"rows": rows, "left_out": " ".join(llama.left_out)}
    return PREAMBLE_HEAD + "\n" + pointers + bind + macros


def write_source(header: Path, llama_folders: list[Path], out: Path) -> LlamaCdef:
    """Derives both sets of declarations and writes the module's C source to `out`."""
    llama = llama_cdef(find_llama_headers(llama_folders))
    ffi = cffi.FFI()
    ffi.cdef(llama.text)
    ffi.cdef(moestream_cdef(header.read_text(encoding="utf-8")))
    ffi.cdef(OWN_CDEF)
    ffi.set_source(MODULE, preamble(llama))
    out.parent.mkdir(parents=True, exist_ok=True)
    ffi.emit_c_code(str(out))
    return llama


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the C source of the cffi module moestream._native.")
    parser.add_argument("--moestream-header", type=Path, required=True)
    parser.add_argument("--llama-include", required=True, metavar="DIR[;DIR2]", help="folders of llama.h and ggml.h")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        folders = [Path(folder) for folder in args.llama_include.split(";") if folder]
        llama = write_source(args.moestream_header, folders, args.out)
    except (HeaderError, OSError, cffi.CDefError) as error:
        print(f"build_ffi: {error}", file=sys.stderr)
        return 1
    print(f"build_ffi: {len(llama.functions)} llama.cpp functions; left out: {' '.join(llama.left_out) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
