"""How llama.cpp reads a model's file: the names of its load modes, and which one was really used."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from moestream import _native_api as native
from moestream import logs
from moestream.errors import UnsupportedError
from moestream.placement import Placement

_OLD_LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")


def load_modes() -> dict[str, int | None]:
    """What load_mode may be: the names that the bound llama.cpp gives its load modes, and their values. One from
    before mid-2026 has switches instead: values are None."""
    try:
        name_of = native.lib.llama_load_mode_name
        values = native.ffi.typeof("enum llama_load_mode").elements
    except (AttributeError, native.ffi.error):
        return dict.fromkeys(_OLD_LOAD_MODES)
    return {native.text(name_of(value)): value for value in sorted(values)}


def locked_bytes() -> int:
    """Memory this process has locked (VmLck); 0 where the system does not tell."""
    try:
        found = re.search(rb"^VmLck:\s+(\d+) kB", Path("/proc/self/status").read_bytes(), re.M)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def _opens_directly(path: str) -> bool:
    """Whether the file system takes O_DIRECT for this file; llama.cpp reads buffered where it does not."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)))
    except OSError:
        return False
    return True


def set_load_mode(params: Any, fields: set[str], load_mode: str) -> None:
    if "load_mode" in fields:
        params.load_mode = load_modes()[load_mode]
        return
    # llama.cpp before mid-2026 had a switch for each.
    if load_mode == "dio" and "use_direct_io" not in fields:
        raise UnsupportedError("load_mode dio: this llama.cpp has no such option")
    params.use_mmap = "mmap" in load_mode
    params.use_mlock = "mlock" in load_mode
    if "use_direct_io" in fields:
        params.use_direct_io = load_mode == "dio"


def mode_used(placement: Placement, asked: str, path: str, locked: bool) -> str:
    """The load mode that was used, by what can be seen of it: mapped buffers, locked memory, a file that opens for
    direct reads."""
    held = {tensor.buffer_type for tensor in placement.tensors}
    if asked == "auto":
        return "mmap" if any(name is not None and name.endswith("_Mapped") for name in held) else "none"
    if "mlock" in asked and not locked:
        logs.moestream_logger.warning(
            "load_mode %s: no memory was locked; `ulimit -l` (RLIMIT_MEMLOCK) limits it", asked
        )
        return "mmap" if "mmap" in asked else "none"
    return "none" if asked == "dio" and not _opens_directly(path) else asked
