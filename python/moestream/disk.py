"""How fast the disk under a model file is, and what reads it allows."""

from __future__ import annotations

import errno
import mmap
import os
import time
from typing import Any

from moestream import _native_api as native
from moestream import logs
from moestream.placement import PlaceOptions
from moestream.stream import Stream

DIRECT_BLOCK = 4096


def slice_rate(path: str | os.PathLike[str], stream: Stream, n_bytes: int) -> float:
    """Bytes per second of reading expert slices of a model in random order, with the reader and depth of `stream`.

    Raises:
        UnsupportedError: a model without experts. The errors of opening and reading.
    """
    native.bind()
    options = PlaceOptions(stream=stream)
    params, keep = options.to_c(options.resolve_cache(path))
    out, err = native.ffi.new("moestream **"), native.new_error()
    raw = native.encode_path(path)
    try:
        native.check(native.lib.moestream_open(out, raw, params, err), err, os.fsdecode(raw))
    except BaseException:
        logs.drain(quiet=True)
        raise
    del keep
    try:
        rate = native.ffi.new("double *")
        native.check(native.lib.moestream_measure_disk(out[0], n_bytes, rate, err), err, os.fsdecode(raw))
        return float(rate[0])
    finally:
        native.check(native.lib.moestream_close(out[0], err), err)
        logs.drain(quiet=True)  # the cache is as small as can be here, which is no advice to anybody


def try_direct(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Whether one direct read of a file works: {"works", "why"}; the page cache is not consulted."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        return {"works": False, "why": f"open refused: {error.strerror}"}
    try:
        with mmap.mmap(-1, DIRECT_BLOCK) as block:  # page aligned, as direct reads want it
            os.preadv(fd, [block], 0)
        return {"works": True, "why": None}
    except OSError as error:
        why = "the file system refuses it" if error.errno == errno.EINVAL else str(error.strerror)
        return {"works": False, "why": f"read refused: {why}"}
    finally:
        os.close(fd)


def file_rate(path: str | os.PathLike[str], n_bytes: int, block_bytes: int = 4 * 1024**2) -> dict[str, Any]:
    """Bytes per second of reading spread blocks of any file, one at a time; direct where that works.

    A floor rather than the disk's best: a stream keeps many reads in flight.
    """
    direct = bool(try_direct(path)["works"])
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        n_blocks = os.fstat(fd).st_size // block_bytes
        wanted = max(1, min(n_blocks, n_bytes // block_bytes))
        done = 0
        with mmap.mmap(-1, block_bytes) as block:
            started = time.monotonic()
            for i in range(wanted):
                # Every third block or so, back and forth: neighbours would be read ahead for us.
                at = (i * 7919) % max(1, n_blocks)
                done += os.preadv(fd, [block], at * block_bytes)
            took = time.monotonic() - started
    finally:
        os.close(fd)
    return {"bytes_per_s": done / took if took else 0.0, "direct": direct, "read_bytes": done}
