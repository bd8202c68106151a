"""Streams a MoE model with nothing but ctypes: block 0's experts in CPU memory, all others from the file.

    python stream.py FOLDER_OF_THE_LIBRARIES MODEL.gguf

llama.cpp's parameter structs are carried as opaque bytes, larger than any of them: moestream sets what it needs.
"""

import ctypes as c
import sys


class Error(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("status", c.c_int32), ("errno", c.c_int32), ("message", c.c_char * 512)]


class Params(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t), ("rules", c.c_void_p), ("n_rules", c.c_size_t), ("n_cpu_moe", c.c_int32),
        ("cpu_moe", c.c_int32), ("cpu_moe_layers", c.c_void_p), ("n_cpu_moe_layers", c.c_size_t),
        ("n_gpu_layers", c.c_int32), ("stream", c.c_int32), ("dense", c.c_int32), ("cache_bytes", c.c_uint64),
        ("cache_none", c.c_int32), ("io", c.c_int32), ("direct", c.c_int32), ("queue_depth", c.c_int32),
        ("n_readers", c.c_int32), ("prefetch", c.c_int32), ("verify", c.c_int32), ("deadline_ms", c.c_uint32),
        ("libllama", c.c_void_p),
    ]  # fmt: skip


class Opaque(c.Structure):
    _fields_ = [("bytes", c.c_uint64 * 64)]


def function(library, name, result, *arguments):
    """A function with its types; `arguments` in C's order."""
    found = library[name]
    found.restype, found.argtypes = result, arguments
    return found


folder, path = sys.argv[1], sys.argv[2].encode()
ms, llama = c.CDLL(f"{folder}/libmoestream.so"), c.CDLL(f"{folder}/libllama.so")
error = Error(struct_size=c.sizeof(Error))
P, Int, store, model, hook = c.c_void_p, c.c_int32, c.c_void_p(), c.c_void_p(), c.c_void_p()


def call(name, *arguments):
    """A moestream function that returns a status and takes an error last."""
    if ms[name](*arguments, c.byref(error)) != 0:
        sys.exit(f"{name}: {error.message.decode()}")


# Zero is each option's default: streaming is on, and the cache is as large as memory allows.
options = Params(struct_size=c.sizeof(Params), n_cpu_moe=1)
call("moestream_log_capture", None, 3)  # llama.cpp's log: warnings, into a ring, not to stderr
model_params = function(llama, "llama_model_default_params", Opaque)()
context_params = function(llama, "llama_context_default_params", Opaque)()
call("moestream_open", c.byref(store), path, c.byref(options))
call("moestream_load_model", store, c.byref(model), c.byref(model_params))
call("moestream_context_init", c.byref(hook), store, c.byref(context_params))
context = P(function(llama, "llama_init_from_model", P, P, Opaque)(model, context_params))
llama.llama_set_n_threads(context, 1, 1)
print(function(ms, "moestream_describe", c.c_char_p, P)(store).decode())

get_one = function(llama, "llama_batch_get_one", Opaque, P, Int)
decode = function(llama, "llama_decode", Int, P, Opaque)
get_logits = function(llama, "llama_get_logits_ith", c.POINTER(c.c_float), P, Int)
n_vocab = llama.llama_vocab_n_tokens(P(function(llama, "llama_model_get_vocab", P, P)(model)))
tokens, hash_ = (c.c_int32 * 8)(1, 2, 3, 4, 5, 6, 7, 8), 14695981039346656037
for step in range(8):
    code = decode(context, get_one(tokens, 1 if step else 8))
    call("moestream_context_status", hook)
    assert code == 0, f"llama_decode returned {code}"
    logits = get_logits(context, -1)
    tokens[0] = max(range(n_vocab), key=lambda i: (logits[i], -i))
    for byte in c.string_at(logits, 4 * n_vocab):  # FNV-1a
        hash_ = (hash_ ^ byte) * 1099511628211 % 2**64
    print("token", tokens[0])
print(f"logits {hash_:016x}")
llama.llama_free(context)
ms.moestream_context_free(hook)
llama.llama_model_free(model)
call("moestream_close", store)
