"""Placement and streaming for llama-cpp-python (0.3.16 or later), with the llama.cpp libraries it was installed with.

    import llama_cpp, moestream
    from moestream.integrations import llama_cpp_python as bridge

    with bridge.loading(stream=moestream.Stream(cache="8GiB")):
        llm = llama_cpp.Llama(model_path="model.gguf", n_ctx=4096)
    llm.create_chat_completion(...)          # everything of Llama as ever
    bridge.stats(llm)

What it does: six functions of the module `llama_cpp.llama_cpp` are replaced by ones that call the originals, with our
override list when a model is loaded inside `loading`, and our two native callbacks when a context of such a model is
made. Everything else of llama-cpp-python is untouched, and so are models that are loaded outside `loading`.

Guarantees: the ctypes structs of llama_cpp are compared with the loaded library before anything of it is called with
them; ggml calls back into C only, never into Python; a call whose experts could not be read raises, and its results
are not handed out. The store of a model is closed when llama_model_free has returned.

It never loads the libllama that is bundled with moestream, never changes llama.cpp's log, and reimplements nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import difflib
import importlib
import inspect
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from moestream import _native_api as native
from moestream import errors, logs
from moestream.errors import BusyError, InvalidError, UnsupportedError
from moestream.integrations._llama_cpp_abi import abi_differences
from moestream.placement import ExpertLayers, Overrides, PlaceOptions, Plan, open_store
from moestream.stats import stats_dict
from moestream.stream import Stream

_log = logging.getLogger("moestream")
_lock = threading.RLock()  # guards everything in _installed, _models and _contexts


@dataclass(frozen=True)
class _Wanted:
    """What `loading` asks for; n_gpu_layers is known when the model is loaded only."""

    options: dict[str, Any]
    strict: bool
    use_extra_bufts: bool | None


@dataclass
class _Session:
    """The store of one loaded model, and the hooks of its contexts."""

    store: Any
    plan: Plan
    streaming: bool
    hooks: int = 0
    freed: bool = False  # llama_model_free has returned


@dataclass
class _Hook:
    """The native hook of one llama_context, with the callbacks that ctypes must keep."""

    session: _Session
    handle: Any
    keep: list[Any] = field(default_factory=list)


@dataclass
class _Installed:
    """What was replaced, and in which module."""

    low: Any = None  # llama_cpp.llama_cpp; None while the adaptor is not installed
    top: Any = None  # llama_cpp
    libllama: Any = None
    real: dict[str, Any] = field(default_factory=dict)
    features: dict[str, Any] = field(default_factory=dict)


_installed = _Installed()

_wanted: contextvars.ContextVar[_Wanted | None] = contextvars.ContextVar("moestream_loading", default=None)
_models: dict[int, _Session] = {}
_contexts: dict[int, _Hook] = {}
_warnings: deque[str] = deque()  # of plans, until they can be logged


# ---- what a caller uses ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def loading(
    *,
    stream: Stream | bool | None = None,
    cpu_moe: bool = False,
    n_cpu_moe: int = 0,
    cpu_moe_layers: Iterable[int] | None = None,
    expert_layers: ExpertLayers = None,
    overrides: Overrides = None,
    strict: bool = False,
    use_extra_bufts: bool | None = None,
) -> Iterator[None]:
    """Models that llama-cpp-python loads in this block (and this thread or task) are placed and streamed as said.

    Args:
        stream, cpu_moe, n_cpu_moe, cpu_moe_layers, expert_layers, overrides: as for moestream.Model.
        strict: a warning of the plan, such as a rule that matches nothing, is an error.
        use_extra_bufts: let llama.cpp repack weights for the CPU; None is off for a streamed model and
            llama-cpp-python's own setting otherwise. Repacked weights give other last digits.

    Raises:
        ImportError: llama-cpp-python is not installed.
        UnsupportedError: its structs and the library it loaded do not fit, or the library cannot be driven; named.
        ValueError, TypeError: an option that makes no sense.
        From the load itself, through llama_cpp.Llama(...): what moestream.Model raises.
    """
    options: dict[str, Any] = {
        "stream": stream,
        "cpu_moe": cpu_moe,
        "n_cpu_moe": n_cpu_moe,
        "cpu_moe_layers": _rereadable(cpu_moe_layers),
        "expert_layers": _rereadable(expert_layers),
        "overrides": _rereadable(overrides),
    }
    PlaceOptions.of(**options, n_gpu_layers=0)
    install()
    token = _wanted.set(_Wanted(options, strict, use_extra_bufts))
    try:
        yield
    finally:
        _wanted.reset(token)
        _log_what_waits()


def _rereadable(value: Any) -> Any:
    """An option that each load in the block can read; what is no collection is left to PlaceOptions, which names it."""
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, (str, bytes)) or not isinstance(value, Iterable) else list(value)


def _log_what_waits() -> None:
    """Our warnings, outside of a load, whose output llama-cpp-python sends to /dev/null with verbose=False."""
    with contextlib.suppress(IndexError):
        while True:
            _log.warning("%s", _warnings.popleft())
    logs.drain()


def load(model_path: str | os.PathLike[str], **options: Any) -> Any:
    """A llama_cpp.Llama(model_path=...), placed and streamed.

    Args:
        model_path: a GGUF file, or the first shard of a split one.
        options: those of `loading`; all others go to Llama, which itself takes any name without a word, so that one it
            does not know is refused here.

    Raises:
        TypeError: an option that neither `loading` nor Llama has, named.
        Otherwise as `loading`.
    """
    install()
    llama = _installed.top.Llama
    ours = {name: options.pop(name) for name in inspect.signature(loading).parameters if name in options}
    known = inspect.signature(llama.__init__).parameters
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, [*inspect.signature(loading).parameters, *known], 1)
            raise TypeError(f"unknown option {name}" + (f"; did you mean {close[0]}?" if close else ""))
    with loading(**ours):
        return llama(model_path=os.fspath(model_path), **options)


def stats(llm: Any) -> dict[str, Any]:
    """Totals of the expert store of a Llama (or of a llama_model pointer): the fields of moestream_stats, `hit_rate`.

    Raises:
        ValueError: the model was not loaded inside `loading`, or is closed.
    """
    with _lock:
        out = native.new_struct("moestream_stats")
        native.check(native.lib.moestream_get_stats(_session(llm).store, out))
    return stats_dict(out)


def plan(llm: Any) -> Plan:
    """The plan that is in force for a Llama: tensors, rules, sizes, warnings. Errors as for `stats`."""
    with _lock:
        return _session(llm).plan


def describe(llm: Any) -> str:
    """One line that says what is on: layers, bytes, reader, direct or not, and why. Errors as for `stats`."""
    with _lock:
        return native.text(native.lib.moestream_describe(_session(llm).store))


def features() -> dict[str, Any]:
    """What the libllama of llama-cpp-python offers to moestream; installs the adaptor. Errors as for `loading`."""
    install()
    return dict(_installed.features)


def install() -> None:
    """Puts the adaptor in place: checks the structs, binds to llama-cpp-python's library, replaces the functions.

    `loading` does so by itself; a second call does nothing. Errors as for `loading`.
    """
    with _lock:
        if _installed.low is not None:
            return
        low = importlib.import_module("llama_cpp.llama_cpp")
        top = importlib.import_module("llama_cpp")
        _check_entry(top)
        _check_abi(top, low)
        libllama = native.ffi.cast("void *", low._lib._handle)
        err = native.new_error()
        native.check(native.lib.moestream_bind(libllama, err), err)
        _installed.features = json.loads(_sized(lambda buf, n: native.lib.moestream_features(libllama, buf, n)))
        _warn_of_copies()
        _installed.libllama, _installed.low, _installed.top = libllama, low, top
        for name, function in _REPLACED.items():
            if not hasattr(low, name):
                continue
            _installed.real[name] = getattr(low, name)
            _set_everywhere(name, function)


def uninstall() -> None:
    """Gives llama-cpp-python its own functions back.

    Raises:
        BusyError: models that were loaded inside `loading` are still open; close them first.
    """
    with _lock:
        if _installed.low is None:
            return
        if _models or _contexts:
            raise BusyError(
                f"{len(_models)} model(s) and {len(_contexts)} context(s) that were loaded through moestream are "
                "still open; close them before uninstall()"
            )
        for name, function in _installed.real.items():
            _set_everywhere(name, function)
        _installed.real.clear()
        _installed.low = _installed.top = _installed.libllama = None


def is_installed() -> bool:
    """Whether the adaptor is in place."""
    return _installed.low is not None


# ---- before anything is called ---------------------------------------------------------------------------------------


def _check_entry(top: ModuleType) -> None:
    """Does Llama load through the function that we replace? Old releases do not, and nothing would be streamed."""
    methods = vars(importlib.import_module("llama_cpp._internals").LlamaModel).values()
    names = {name for method in methods if isinstance(method, FunctionType) for name in method.__code__.co_names}
    if "llama_model_load_from_file" not in names:
        version = getattr(top, "__version__", "(unknown version)")
        raise UnsupportedError(
            f"llama_cpp {version} at {top.__file__} does not load models through llama_model_load_from_file; "
            "llama-cpp-python 0.3.16 or later is needed"
        )


def _check_abi(top: ModuleType, low: Any) -> None:
    differences = abi_differences(low)
    if differences:
        found = _versions(low)
        raise UnsupportedError(
            f"llama_cpp {getattr(top, '__version__', '(unknown version)')} at {top.__file__} passes structs that the "
            f"library it loaded, {getattr(low._lib, '_name', '(unknown file)')}{found}, lays out differently: "
            f"{', '.join(differences[:4])} read back with other values than llama.cpp's defaults. Nothing was called "
            "with them. Use the library this llama_cpp was built with (unset LLAMA_CPP_LIB_PATH, or reinstall it)"
        )


def _versions(low: Any) -> str:
    parts = []
    for name in ("ggml_version", "ggml_commit"):
        try:
            function = low._lib[name]
        except AttributeError:
            continue
        function.restype = ctypes.c_char_p
        parts.append(f"{name.replace('_', ' ')} {function().decode('utf-8', 'replace')}")
    return f" ({', '.join(parts)})" if parts else ""


def _warn_of_copies() -> None:
    """Two ggml in one process are legal, since all is looked up through one handle; but worth a line."""
    copies = sorted({item["path"] for item in native.libraries() if "libggml-base" in item["path"]})
    if len(copies) > 1:
        _log.warning("%d copies of ggml are loaded in this process: %s", len(copies), ", ".join(copies))


def _sized(call: Callable[[Any, int], int]) -> str:
    size = call(native.ffi.NULL, 0)
    buf = native.ffi.new("char[]", size + 1)
    call(buf, size + 1)
    return native.text(buf)


def _set_everywhere(name: str, function: Any) -> None:
    setattr(_installed.low, name, function)
    if hasattr(_installed.top, name):  # the package star-imports the module
        setattr(_installed.top, name, function)


# ---- stores ----------------------------------------------------------------------------------------------------------


def _address(pointer: Any) -> int:
    if isinstance(pointer, int):
        return pointer
    value = getattr(pointer, "value", None)
    return int(value) if value else 0


def _session(llm: Any) -> _Session:
    pointer = getattr(llm, "model", llm)
    session = _models.get(_address(pointer)) if pointer is not None else None
    if session is None:
        raise ValueError("this model was not loaded inside loading(...), in the same thread, or it is closed")
    return session


def _open(path: bytes, options: PlaceOptions, strict: bool) -> _Session:
    """A store that drives llama-cpp-python's library."""
    cell = native.ffi.new("moestream **")
    plan = open_store(os.fsdecode(path), options, cell, strict=strict, libllama=_installed.libllama)
    _warnings.extend(plan.warnings)
    return _Session(cell[0], plan, options.stream is not None)


def _close(session: _Session) -> None:
    """Ends a store that nothing uses any more."""
    if session.store is None:
        return
    err = native.new_error()
    native.check(native.lib.moestream_close(session.store, err), err)
    session.store = None
    logs.drain()


# ---- the functions that take the place of llama_cpp's ----------------------------------------------------------------


def _load_from_file(path: Any, params: Any) -> Any:
    wanted = _wanted.get()
    real = _installed.real["llama_model_load_from_file"]
    if wanted is None or params.vocab_only:
        return real(path, params)
    raw = path if isinstance(path, bytes) else _bytes_of(path)
    options = PlaceOptions.of(**wanted.options, n_gpu_layers=params.n_gpu_layers)
    with _lock:
        session = _open(raw, options, wanted.strict)
    try:
        model = _load_into(session, options, wanted, raw, type(params).from_buffer_copy(params))
    except BaseException:
        with _lock:
            _close(session)
        raise
    with _lock:
        if model:
            _models[_address(model)] = session
        else:
            _close(session)
    return model


def _bytes_of(path: Any) -> bytes:
    value = ctypes.cast(path, ctypes.c_char_p).value
    return b"" if value is None else value


def _load_into(session: _Session, options: PlaceOptions, wanted: _Wanted, path: bytes, params: Any) -> Any:
    """llama.cpp's load, with our overrides. None where llama.cpp could not, and has said why in its own log."""
    ffi, lib, low = native.ffi, native.lib, _installed.low
    names = {name for name, *_ in params._fields_}
    if params.tensor_buft_overrides:
        raise InvalidError("tensor_buft_overrides is set: give such rules to loading(overrides=...)")
    params.tensor_buft_overrides = int(ffi.cast("uintptr_t", lib.moestream_overrides(session.store))) or None
    extra = wanted.use_extra_bufts
    if session.streaming and extra is None:
        extra = False
    if extra is not None and "use_extra_bufts" in names:
        params.use_extra_bufts = extra
    use_file = False
    if session.streaming:
        _refuse_whole_reads(params, names, low)
        assert options.stream is not None
        use_file = (
            bool(_installed.features.get("load_from_file_ptr"))
            and not _installed.features.get("load_policy")
            and session.plan.n_files == 1
            and options.stream.dense == "anon"
            and hasattr(low, "llama_model_load_from_file_ptr")
        )
        _set_mmap(params, names, low, not use_file)
    err = native.new_error()
    native.check(lib.moestream_load_begin(session.store, err), err)
    model = None
    try:
        if use_file:
            model = _load_from_stream(session, params)
        else:
            model = _installed.real["llama_model_load_from_file"](path, params)
    finally:
        pointer = ffi.cast("struct llama_model *", _address(model) if model else 0)
        status = lib.moestream_load_end(session.store, pointer, err)
    if status == errors.OK:
        return model
    if model:
        _installed.real["llama_model_free"](model)
    elif status == errors.INTERNAL:
        return None
    native.check(status, err, os.fsdecode(path))
    return None


def _load_from_stream(session: _Session, params: Any) -> Any:
    """A load that never reads the experts: through a FILE that skips them, because this library's mmap reads all."""
    out, err = native.ffi.new("void **"), native.new_error()
    native.check(native.lib.moestream_load_file(session.store, out, err), err)
    address = int(native.ffi.cast("uintptr_t", out[0]))
    try:
        return _installed.low.llama_model_load_from_file_ptr(ctypes.c_void_p(address), params)
    finally:
        fclose = ctypes.CDLL(None)["fclose"]
        fclose.argtypes = [ctypes.c_void_p]
        fclose(address)


def _refuse_whole_reads(params: Any, names: set[str], low: Any) -> None:
    locked = bool(params.use_mlock) if "use_mlock" in names else params.load_mode in _modes(low, "MLOCK", "MMAP_MLOCK")
    if locked:
        raise InvalidError("use_mlock would lock every expert in memory; a streamed model cannot be loaded with it")
    if "check_tensors" in names and params.check_tensors:
        raise InvalidError("check_tensors would read every expert; a streamed model cannot be loaded with it")


def _modes(low: Any, *names: str) -> list[int]:
    return [getattr(low, f"LLAMA_LOAD_MODE_{name}") for name in names if hasattr(low, f"LLAMA_LOAD_MODE_{name}")]


def _set_mmap(params: Any, names: set[str], low: Any, mmap: bool) -> None:
    if "load_mode" in names:
        params.load_mode = low.LLAMA_LOAD_MODE_MMAP if mmap else low.LLAMA_LOAD_MODE_NONE
    else:
        params.use_mmap, params.use_mlock = mmap, False
    if "use_direct_io" in names:
        params.use_direct_io = False


def _init_from_model(model: Any, params: Any) -> Any:
    real = _installed.real["llama_init_from_model"]
    with _lock:
        session = _models.get(_address(model))
        if session is None or not session.streaming:
            return real(model, params)
        hook = _make_hook(session, params)
        session.hooks += 1
    context = None
    try:
        context = real(model, params)
    finally:
        with _lock:
            if context:
                _contexts[_address(context)] = hook
            else:
                _free_hook(hook)
    return context


def _make_hook(session: _Session, params: Any) -> _Hook:
    """Sets our callbacks in `params`. Callbacks that the caller set are chained where this build knows the struct."""
    ffi, lib, low = native.ffi, native.lib, _installed.low
    out, err = ffi.new("moestream_context **"), native.new_error()
    names = {name for name, *_ in params._fields_}
    if params.cb_eval or params.abort_callback:
        if not _installed.features.get("params_match"):
            raise UnsupportedError(
                "cb_eval or abort_callback is set, and this build of moestream cannot chain them: it was built for "
                f"llama.cpp {_installed.features.get('built_for')}, the library is "
                f"{_installed.features.get('ggml_commit')}"
            )
        pointer = ffi.cast("struct llama_context_params *", ctypes.addressof(params))
        native.check(lib.moestream_context_init(out, session.store, pointer, err), err)
        return _Hook(session, out[0], [params])
    native.check(lib.moestream_context_init(out, session.store, ffi.NULL, err), err)
    user = int(ffi.cast("uintptr_t", out[0]))
    # A native address in a ctypes prototype is called as it is: no Python frame, no interpreter lock.
    params.cb_eval = low.ggml_backend_sched_eval_callback(int(ffi.cast("uintptr_t", lib.moestream_eval_callback())))
    params.cb_eval_user_data = user
    params.abort_callback = low.ggml_abort_callback(int(ffi.cast("uintptr_t", lib.moestream_abort_callback())))
    params.abort_callback_data = user
    if "op_offload" in names:
        params.op_offload = False
    return _Hook(session, out[0], [params.cb_eval, params.abort_callback])


def _free_hook(hook: _Hook) -> None:
    """With the lock held, after llama_free."""
    native.lib.moestream_context_free(hook.handle)
    hook.session.hooks -= 1
    if hook.session.freed and hook.session.hooks == 0:
        _close(hook.session)


def _free_context(context: Any) -> None:
    with _lock:  # forgotten first: once it is freed, another thread may get the same address
        hook = _contexts.pop(_address(context), None)
    _installed.real["llama_free"](context)
    if hook is not None:
        with _lock:
            _free_hook(hook)


def _free_model(model: Any) -> None:
    with _lock:
        session = _models.pop(_address(model), None)
    _installed.real["llama_model_free"](model)
    if session is not None:
        with _lock:
            session.freed = True
            if session.hooks == 0:
                _close(session)


def _decode(context: Any, batch: Any) -> Any:
    return _run("llama_decode", context, batch)


def _encode(context: Any, batch: Any) -> Any:
    return _run("llama_encode", context, batch)


def _run(name: str, context: Any, batch: Any) -> Any:
    """The original, then our word on whether its results may be used: llama.cpp itself cannot know."""
    code = _installed.real[name](context, batch)
    _log_what_waits()
    hook = _contexts.get(_address(context)) if _contexts else None
    if hook is not None:
        err = native.new_error()
        status = native.lib.moestream_context_status(hook.handle, err)
        if status != errors.OK:
            native.check(status, err, hook.session.plan.path)
    return code


_REPLACED: dict[str, Callable[..., Any]] = {
    "llama_model_load_from_file": _load_from_file,
    "llama_init_from_model": _init_from_model,
    "llama_free": _free_context,
    "llama_model_free": _free_model,
    "llama_decode": _decode,
    "llama_encode": _encode,
}

__all__ = ["describe", "features", "install", "is_installed", "load", "loading", "plan", "stats", "uninstall"]
