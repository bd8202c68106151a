"""Do the ctypes structs of a llama_cpp module fit the library it loaded?

llama-cpp-python passes parameter structs by value, and an older package on a newer library imports without a word. The
default parameters are fetched through a result that is larger than any struct of llama.cpp, so that a longer struct
cannot write past it, and compared, at the offsets the package believes in, with the values that llama.cpp has had as
defaults for as long as each field exists. A layout that differs moves at least one of them;
tests/python/test_llama_cpp_python.py moves some.
"""

from __future__ import annotations

import ctypes
from typing import Any

_MODEL = {
    "tensor_buft_overrides": None,
    "split_mode": 1,
    "main_gpu": 0,
    "tensor_split": None,
    "kv_overrides": None,
    "load_mode": -1,
    "lazy_mode": 1,
    "use_mmap": True,
    "use_mlock": False,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
}
_CONTEXT = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "cb_eval": None,
    "cb_eval_user_data": None,
    "abort_callback": None,
    "abort_callback_data": None,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "offload_kqv": True,
    "op_offload": True,
    "swa_full": True,
}


class _Oversized(ctypes.Structure):
    _fields_ = (("byte", ctypes.c_ubyte * 1024),)


def abi_differences(low: Any) -> list[str]:
    """Fields, as "llama_model_params.use_extra_bufts", that do not read as llama.cpp's defaults; [] if all fit.

    Args:
        low: the module llama_cpp.llama_cpp.
    """
    return _differences(low, "llama_model_params", "llama_model_default_params", _MODEL) + _differences(
        low, "llama_context_params", "llama_context_default_params", _CONTEXT
    )


def _differences(low: Any, struct: str, function_name: str, expected: dict[str, Any]) -> list[str]:
    cls = getattr(low, struct)
    function = low._lib[function_name]  # a fresh object: the module's own keeps its result type
    function.argtypes, function.restype = [], _Oversized
    raw = bytes(function())
    value = cls.from_buffer_copy(raw)
    wrong = []
    for name, ctype, *_ in cls._fields_:
        if name not in expected:
            continue
        want = expected[name]
        if isinstance(want, bool):  # any byte but 0 reads as True: the byte itself is compared
            fits = raw[getattr(cls, name).offset] == int(want)
        elif want is None:
            offset = getattr(cls, name).offset
            fits = not any(raw[offset : offset + ctypes.sizeof(ctype)])
        else:
            fits = getattr(value, name) == want
        if not fits:
            wrong.append(f"{struct}.{name}")
    if struct == "llama_context_params" and not 0 < value.n_threads <= 4096:
        wrong.append(f"{struct}.n_threads")
    return wrong
