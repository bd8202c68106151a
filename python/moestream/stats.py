"""Statistics of streaming as plain dictionaries, with the field names of moestream_stats."""

from __future__ import annotations

from typing import Any

from moestream import _native_api as native


def stats_dict(stats: Any) -> dict[str, Any]:
    """A moestream_stats as a dictionary. `io` is "io_uring", "pread" or None, `direct` and `prefetch` are booleans,
    `hit_rate` is hits / (hits + misses), None before the first expert was used."""
    out: dict[str, Any] = {
        name: getattr(stats, name) for name, _ in native.ffi.typeof("moestream_stats").fields if name != "struct_size"
    }
    names = {native.lib.MOESTREAM_IO_URING: "io_uring", native.lib.MOESTREAM_IO_PREAD: "pread"}
    out["io"] = names.get(out["io"])
    out["direct"] = bool(out["direct"])
    out["prefetch"] = bool(out["prefetch"])
    used = out["n_hits"] + out["n_misses"]
    out["hit_rate"] = out["n_hits"] / used if used else None
    return out
