"""The options of streaming, checked where they are written down."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from moestream import checks
from moestream.sizes import CacheSize, parse_cache

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_CHOICES: dict[str, dict[str, str]] = {
    "io": {"auto": "MOESTREAM_IO_AUTO", "io_uring": "MOESTREAM_IO_URING", "pread": "MOESTREAM_IO_PREAD"},
    "prefetch": {"auto": "MOESTREAM_PREFETCH_AUTO", "on": "MOESTREAM_PREFETCH_ON", "off": "MOESTREAM_PREFETCH_OFF"},
    "dense": {"anon": "MOESTREAM_DENSE_ANON", "mmap": "MOESTREAM_DENSE_MMAP"},
    "direct": {"auto": "MOESTREAM_DIRECT_AUTO", "on": "MOESTREAM_DIRECT_ON", "off": "MOESTREAM_DIRECT_OFF"},
}


@dataclass(frozen=True)
class Stream:
    """How the routed experts of a model are streamed from its file.

    Attributes:
        cache: memory for experts: bytes, "8GiB", "25%" of all streamed experts, "min", or "auto" (by what is free).
            0 keeps nothing between operations.
        io: reader: "auto" tries io_uring and falls back to pread, saying why once; the other two are required.
        prefetch: read the experts that the next layer will probably choose while this one computes; "auto" pauses by
            itself while that costs more than it wins.
        dense: where the weights that are not streamed live: "anon" memory, or "mmap", llama.cpp's own way.
        direct: bypass the page cache: "auto" where the file system allows it, "on" required, "off" never.
        queue_depth: slices in flight at most, 1 to 1024; 0 is the library's choice: as few as keep the disk busy.
        readers: threads of the pread reader, 1 to 64; 0 is the library's choice.
        verify: keep a checksum of each slice and compare it on every use (slow; for diagnosis).
        deadline_s: seconds after which a read that has not come back fails the call.
        warm_start: a file that remembers which experts the cache held when the model was closed. If it is there, they
            are read again after the load, while the disk is idle. Nothing is written unless a file is named, only to
            one that is not there, is empty, or is such a list.
        replay: for benchmarks: experts to use instead of the router's choice, int32 [n_tokens, n_layer, n_expert_used],
            from the first token on, beginning anew at its end. The logits are then meaningless.
        replay_recall: under replay, the share of right guesses that reading ahead is given, 0 (none is made) to 1.

    Raises:
        ValueError: an option out of its range, named.
    """

    cache: int | str = "auto"
    io: Literal["auto", "io_uring", "pread"] = "auto"
    prefetch: Literal["auto", "on", "off"] = "auto"
    dense: Literal["anon", "mmap"] = "anon"
    direct: Literal["auto", "on", "off"] = "auto"
    queue_depth: int = 0
    readers: int = 0
    verify: bool = False
    deadline_s: float = 60.0
    warm_start: str | os.PathLike[str] | None = None
    replay: npt.NDArray[np.int32] | None = field(default=None, compare=False, repr=False)
    replay_recall: float = 0.0

    def __post_init__(self) -> None:
        parse_cache(self.cache)
        for name, choices in _CHOICES.items():
            checks.one_of(name, getattr(self, name), choices)
        for name, most in (("queue_depth", 1024), ("readers", 64)):
            checks.whole(name, getattr(self, name), 0, most, " (0: the library's choice)")
        if not isinstance(self.verify, bool):
            raise ValueError(f"verify was {self.verify!r}; it is True or False")
        checks.real("deadline_s", self.deadline_s, 0.001, 4294967, "a number of seconds")
        if self.warm_start is not None and not (
            isinstance(self.warm_start, (str, os.PathLike)) and str(self.warm_start)
        ):
            raise ValueError(f"warm_start was {self.warm_start!r}; it is the path of a file")
        checks.real("replay_recall", self.replay_recall, 0, 1, "a share")
        if self.replay is None and self.replay_recall:
            raise ValueError(f"replay_recall was {self.replay_recall!r} without replay; it is about a replayed routing")
        if self.replay is not None:
            _check_replay(self.replay)

    @property
    def cache_size(self) -> CacheSize:
        """`cache`, parsed."""
        return parse_cache(self.cache)

    def constant(self, option: str) -> str:
        """The name of the C constant for a choice option: constant("io") -> "MOESTREAM_IO_AUTO"."""
        return _CHOICES[option][getattr(self, option)]


def _check_replay(ids: Any) -> None:
    kind = getattr(getattr(ids, "dtype", None), "kind", "")  # numpy is not imported for a question
    if kind not in ("i", "u"):
        raise ValueError(f"replay was {checks.shown(ids)}; it is an array of int32, [n_tokens, n_layer, n_expert_used]")
    if ids.ndim != 3 or ids.size == 0:
        raise ValueError(f"replay has the shape {ids.shape}; it is [n_tokens, n_layer, n_expert_used]")


def as_stream(value: Stream | bool | None) -> Stream | None:
    """Stream options from what callers may pass: a Stream, True for the defaults, None or False for no streaming."""
    if value is None or value is False:
        return None
    if value is True:
        return Stream()
    if isinstance(value, Stream):
        return value
    raise TypeError(f"stream was {value!r}; pass moestream.Stream(...), True or None")
