"""The C libraries as this package calls them: `lib`, `ffi`, binding, and the one place that turns a status into raise.

Importing this loads libmoestream and nothing else. libllama is loaded, checked and bound on the first use of anything
that needs it (`bind`, or any llama_* or ggml_* attribute of `lib`).
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from moestream import errors

try:
    from moestream import _native
except ImportError as _error:
    raise ImportError(
        f"the compiled part of moestream could not be loaded ({_error}); build it with `pip install .` in the "
        "source tree, or reinstall the package"
    ) from _error

ffi: Any = _native.ffi
_raw: Any = _native.lib

_lock = threading.RLock()


class _State:
    """What has been done once for the process."""

    bound = False


if _raw.moestream_abi_version() != _raw.MOESTREAM_ABI_VERSION:
    raise ImportError(
        f"libmoestream.so has ABI version {_raw.moestream_abi_version()}, this package was built for "
        f"{_raw.MOESTREAM_ABI_VERSION}; the installation mixes two versions"
    )


class _Lib:
    """The functions and constants of moestream.h, and those of llama.cpp that this build offers.

    Reading a llama_* or ggml_* function binds libllama first. One that this llama.cpp does not have raises
    MissingFunctionError (an AttributeError) when it is read, before any call.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("llama_", "ggml_")) and name != "llama_get_cpu_buffer_type":
            _require_function(name)
        value = getattr(_raw, name)
        self.__dict__[name] = value  # the next read is a plain attribute
        return value

    def __dir__(self) -> list[str]:
        return [name for name in dir(_raw) if not name.startswith("ms_native_")]


def _require_function(name: str) -> None:
    known = _raw.ms_native_has(name.encode())
    if known == -1:
        left_out = ffi.string(_raw.ms_native_left_out()).decode().split()
        why = "the llama.cpp it was built for does not declare it" if name in left_out else "it is not in its list"
        raise errors.MissingFunctionError(f"{name} is not offered by this build of moestream: {why}")
    if known == 0:
        bind()
        if _raw.ms_native_has(name.encode()) != 1:
            raise errors.MissingFunctionError(f"{name} is missing from the libllama that was loaded")


lib: Any = _Lib()


def new_error() -> Any:
    """A moestream_error to pass as the last argument of a call."""
    err = ffi.new("moestream_error *")
    err.struct_size = ffi.sizeof("moestream_error")
    return err


def new_struct(ctype: str) -> Any:
    """A zeroed struct of moestream.h with its struct_size set."""
    struct = ffi.new(ctype + " *")
    struct.struct_size = ffi.sizeof(ctype)
    return struct


def check(status: int, err: Any = None, filename: str | None = None) -> None:
    """Raises the exception for `status` unless it is OK; `err` is the moestream_error given to the call."""
    if status == errors.OK:
        return
    message, os_errno = "", 0
    if err is not None:
        message = ffi.string(err.message).decode("utf-8", "replace")
        os_errno = err.os_errno
    raise errors.from_status(status, message, os_errno, filename)


def bind() -> None:
    """Loads and checks the bundled libllama, once; quick when it has been done.

    Raises:
        UnsupportedError: the library is not the one this build can drive; what differs is named.
        ReadError: there is no library.
    """
    if is_bound():
        return
    with _lock:
        if is_bound():
            return
        err = new_error()
        check(_raw.moestream_bind(ffi.NULL, err), err)
        # A struct passed by value in another layout is a crash, so this comes before any function that takes one.
        found = _sized_json(lambda buf, n: _raw.moestream_features(ffi.NULL, buf, n))
        if not found["params_match"]:
            raise errors.UnsupportedError(
                f"this moestream was built for llama.cpp {found['built_for']}, the library that was loaded, "
                f"{found['libllama']}, is {found['ggml_commit'] or 'of an unknown commit'} (ggml "
                f"{found['ggml_version'] or 'unknown'}): {found['params_why']}. Rebuild moestream against it "
                "(MOESTREAM_LLAMA_DIR), or unset MOESTREAM_LIBLLAMA"
            )
        missing = _raw.ms_native_bind(_raw.moestream_bundled_llama())
        if missing != ffi.NULL:
            raise errors.UnsupportedError(
                f"the bundled libllama has no function {ffi.string(missing).decode()}; it is not the one this "
                "package was built with"
            )
        from moestream import logs

        logs.capture()
        _raw.llama_backend_init()
        _State.bound = True


def is_bound() -> bool:
    """Whether libllama has been loaded and bound."""
    return _State.bound


def enumerator(option: str, name: str, value: object) -> int:
    """An enumerator of llama.cpp that an option stands for.

    Raises:
        ValueError: this llama.cpp has no such enumerator; names the option and its value.
    """
    try:
        return int(getattr(_raw, name))
    except AttributeError:
        raise ValueError(f"{option} was {value!r}; this llama.cpp does not know it") from None


def text(pointer: Any) -> str:
    """A C string as str; "" for NULL."""
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode("utf-8", "replace")


def encode_path(path: str | os.PathLike[str]) -> bytes:
    """A file name as the system sees it.

    Raises:
        ValueError: empty, or with a zero byte in it.
    """
    raw = os.fsencode(path)
    if not raw or b"\0" in raw:
        raise ValueError(f"path was {path!r}; it is empty or has a zero byte in it")
    return raw


def _sized_json(call: Any) -> Any:
    needed = call(ffi.NULL, 0)
    if not needed:
        return None
    buf = ffi.new("char[]", needed + 1)
    call(buf, needed + 1)
    return json.loads(ffi.string(buf).decode("utf-8", "replace"))


def build_info() -> dict[str, Any]:
    """How this library was built: version, llama.cpp commit, compiler, readers compiled in. Loads no libllama."""
    info: dict[str, Any] = json.loads(text(_raw.moestream_build_info()))
    return info


def features() -> dict[str, Any]:
    """What the bound libllama offers (binds it), and the functions this build left out."""
    bind()
    found: dict[str, Any] = _sized_json(lambda buf, n: _raw.moestream_features(ffi.NULL, buf, n)) or {}
    found["left_out_functions"] = text(_raw.ms_native_left_out()).split()
    return found


def libraries() -> list[dict[str, Any]]:
    """The libllama and libggml files mapped into this process: path, and whether we are bound to it."""
    found: list[dict[str, Any]] = _sized_json(_raw.moestream_libraries) or []
    return found


def get_cpu_buffer_type() -> Any:
    """The ggml_backend_buffer_type_t of plain CPU memory, as a cffi pointer; upstream's libllama has no such call.

    Raises:
        UnsupportedError: no libggml could be bound.
    """
    bind()
    pointer = _raw.llama_get_cpu_buffer_type()
    if pointer == ffi.NULL:
        raise errors.UnsupportedError("the CPU buffer type could not be found in the loaded libggml")
    return pointer
