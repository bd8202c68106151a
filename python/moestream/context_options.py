"""The options of a context: checked before anything is made, then as llama.cpp's llama_context_params.

Never lets a value through that ends the process inside llama.cpp, and never calls llama.cpp but for its defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moestream import _native_api as native
from moestream import checks, host
from moestream.errors import UnsupportedError

_POOLING = ("unspecified", "none", "mean", "cls", "last", "rank")
# What llama.cpp's own tools offer for a KV cache. Others are allocated, and end the process in the first decode.
_KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
_MOST = 2**31 - 1


def sizes(
    n_ctx_train: int,
    n_ctx: Any,
    n_batch: Any,
    n_ubatch: Any,
    n_threads: Any,
    n_threads_batch: Any,
    n_seq_max: Any,
) -> dict[str, int]:
    """The sizes and numbers of threads to ask llama.cpp for, by the names of its parameters.

    Raises:
        ValueError: one that is no whole number in its range, named.
    """
    if n_ctx is None:
        n_ctx = min(4096, n_ctx_train) if n_ctx_train > 0 else 4096
    n_ctx = checks.whole("n_ctx", n_ctx, 0, _MOST)
    n_batch = checks.whole("n_batch", n_batch, 1, _MOST)
    if n_ctx:
        n_batch = min(n_batch, n_ctx)
    n_threads = checks.whole("n_threads", host.physical_cores() if n_threads is None else n_threads, 1, 512)
    return {
        "n_ctx": n_ctx,
        "n_batch": n_batch,
        "n_ubatch": min(checks.whole("n_ubatch", n_ubatch, 1, _MOST), n_batch),
        "n_threads": n_threads,
        "n_threads_batch": n_threads
        if n_threads_batch is None
        else checks.whole("n_threads_batch", n_threads_batch, 1, 512),
        "n_seq_max": checks.whole("n_seq_max", n_seq_max, 1, _MOST),
    }


def make_params(
    plain: Mapping[str, Any],
    *,
    type_k: Any,
    type_v: Any,
    pooling: Any,
    flash_attn: bool | None,
    eval_callback: Any,
    abort_flag: Any,
) -> Any:
    """A llama_context_params of checked sizes and switches (`plain`, by llama.cpp's names; None leaves its default).

    Raises:
        ValueError: a KV type or pooling that is not one of those there are. TypeError: an eval_callback that is no
        pair of addresses. UnsupportedError: an option that this llama.cpp does not have.
    """
    ffi, lib = native.ffi, native.lib
    params = ffi.new("struct llama_context_params *", lib.llama_context_default_params())
    fields = {name for name, _ in ffi.typeof("struct llama_context_params").fields}
    for name, value in plain.items():
        if value is None:
            continue
        if name not in fields:
            raise UnsupportedError(f"{name}: this llama.cpp has no such option")
        setattr(params, name, value)
    for name, kind in (("type_k", type_k), ("type_v", type_v)):
        if kind is not None:
            lower = checks.one_of(name, kind.lower() if isinstance(kind, str) else kind, _KV_TYPES)
            setattr(params, name, native.enumerator(name, f"GGML_TYPE_{lower.upper()}", kind))
    if pooling is not None:
        checks.one_of("pooling", pooling, _POOLING)
        params.pooling_type = native.enumerator("pooling", f"LLAMA_POOLING_TYPE_{pooling.upper()}", pooling)
    if flash_attn is not None:
        if "flash_attn_type" in fields:
            params.flash_attn_type = (
                lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attn else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
            )
        else:
            params.flash_attn = flash_attn
    if eval_callback is not None:
        function, state = _callback(eval_callback)
        params.cb_eval = ffi.cast(ffi.typeof(params.cb_eval), function)
        params.cb_eval_user_data = ffi.cast("void *", state)
    # Our own flag is asked between the nodes of a graph; moestream_context_init chains it behind its own.
    params.abort_callback = ffi.addressof(native._raw, "ms_native_abort")
    params.abort_callback_data = abort_flag
    return params


def _callback(pair: Any) -> tuple[Any, Any]:
    """Both addresses of an eval_callback; no state is NULL."""
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        function, state = pair[0], 0 if pair[1] is None else pair[1]
        if _is_address(function) and function and _is_address(state):
            return function, state
    raise TypeError(
        f"eval_callback was {checks.shown(pair)}; it is a pair: the address of a C function, and that of its state or "
        "None (each an int or a cffi pointer)"
    )


def _is_address(value: Any) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64
    return is_int or isinstance(value, native.ffi.CData)
