"""Choosing tokens with llama.cpp's own samplers, and turning their bytes into text.

The chain is the usual one: top-k, top-p, min-p, temperature, then a draw; or the most likely token at temperature 0.
"""

from __future__ import annotations

import codecs
import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moestream import _native_api as native
from moestream import checks


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most likely token; above, the higher the more varied.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens that together have this probability; 1 keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
        seed: 0 to 2**32 - 1 makes a run repeatable; None draws one.

    Raises:
        ValueError: an option out of its range, named.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature was {self.temperature!r}; it is a number, 0 or more")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k was {self.top_k!r}; it is a whole number, 0 (keep all) or more")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1:
                raise ValueError(f"{name} was {value!r}; it is a number from 0 to 1")
        seed = self.seed
        # The last number means "draw one" to llama.cpp, and would not repeat.
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32 - 1):
            raise ValueError(f"seed was {seed!r}; it is a whole number from 0 to {2**32 - 2}, or None")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class Sampler:
    """One chain of llama.cpp samplers. `seed` is the seed in use (None at temperature 0)."""

    def __init__(self, options: SamplingOptions) -> None:
        lib, ffi = native.lib, native.ffi
        self.seed: int | None = None
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if chain == ffi.NULL:
            raise MemoryError("llama.cpp could not make a sampler")
        self._chain = chain
        # Not at exit, when a thread may still be sampling: the system takes the memory back.
        weakref.finalize(self, lib.llama_sampler_free, chain).atexit = False
        if options.temperature == 0:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_greedy())
            return
        if options.top_k:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_k(options.top_k))
        if options.top_p < 1:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_top_p(options.top_p, 1))
        if options.min_p > 0:
            lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_min_p(options.min_p, 1))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(options.temperature))
        self.seed = int.from_bytes(os.urandom(4), "little") % (2**32 - 1) if options.seed is None else options.seed
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(self.seed))

    def sample(self, context_pointer: Any) -> int:
        """The token chosen from the last output of a llama_context. Holds: the context's call lock."""
        return int(native.lib.llama_sampler_sample(self._chain, context_pointer, -1))


class TextStream:
    """Turns the bytes of tokens into text that can be shown at once: whole characters only, and nothing that might
    be the beginning of a stop text.

    Args:
        stop: texts at which the output ends; they are not part of it.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str):
            stop = [stop]
        self._stop = checks.listed("stop", stop, "texts")
        if any(not isinstance(text, str) or not text for text in self._stop):
            raise ValueError(f"stop was {checks.shown(self._stop)}; it is a list of texts that are not empty")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped_at: str | None = None

    def push(self, piece: bytes) -> str:
        """Text that may be shown after these bytes; sets `stopped_at` when a stop text came."""
        return self._take(self._decoder.decode(piece))

    def finish(self) -> str:
        """What was held back, once no more bytes come."""
        out = self._take(self._decoder.decode(b"", final=True))
        if self.stopped_at is None:
            out, self._held = out + self._held, ""
        return out

    def _take(self, text: str) -> str:
        if self.stopped_at is not None:
            return ""
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if found:
            at, self.stopped_at = min(found)
            out, self._held = self._held[:at], ""
            return out
        keep = max((self._overlap(stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _overlap(self, stop: str) -> int:
        """Length of the longest beginning of `stop` that the held text ends with."""
        for n in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:n]):
                return n
        return 0
