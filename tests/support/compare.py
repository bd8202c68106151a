"""Streamed against resident, bit for bit: running one model both ways and comparing every number that comes out.

What it does: `Reference` holds one resident model and what it computed, `compare` runs the same work on a streamed one
and names the first difference. Work is a function of a Context that returns arrays; both sides get the same tokens,
threads, n_batch, n_ubatch and attention, because llama.cpp's own results depend on those.

Guarantees: values are compared as bits (so 0.0 is not -0.0, and a NaN equals only itself) and have to be finite; the
resident model never uses repacked buffers, whose kernels round otherwise.

Where io_uring is refused, the variants that ask for it read with pread instead; that shows in the run as the skip of
`test_identity_shapes.py::test_io_uring_was_among_the_engines_compared`, with the reason.

Never: takes a difference as small enough.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from support import models

import moestream as ms
from moestream import _native_api as native

Array = npt.NDArray[np.float32]
Work = Callable[[ms.Context], list[Array]]

ENGINES = ("io_uring", "pread")
_LCG = 6364136223846793005


@functools.cache
def why_no_uring() -> str:
    """ "" where io_uring can be had, else why not, in the words of a registered skip."""
    try:
        ms.Model(models.tiny(), stream=ms.Stream(cache="min", io="io_uring")).close()
    except ms.MoestreamError as error:
        return f"needs io_uring: {error}"
    return ""


def engine(io: str) -> Literal["io_uring", "pread"]:
    """The engine that stands for `io` here."""
    return "io_uring" if io == "io_uring" and not why_no_uring() else "pread"


def tokens(n: int, n_vocab: int, seed: int = 1) -> list[int]:
    """`n` token numbers that look random and never change: 1 to n_vocab - 1."""
    state, out = seed * 2 + 1, []
    for _ in range(n):
        state = (state * _LCG + 1442695040888963407) % 2**64
        out.append(1 + (state >> 33) % (n_vocab - 1))
    return out


@dataclass(frozen=True)
class Setting:
    """How a context computes: everything that llama.cpp's own rounding depends on."""

    n_threads: int = 1
    n_ubatch: int = 512
    n_ctx: int = 512
    n_batch: int = 0  # 0: as many as n_ctx
    options: tuple[tuple[str, Any], ...] = ()

    def context(self, model: ms.Model) -> ms.Context:
        """A context of `model` that computes this way."""
        n_batch = self.n_batch or self.n_ctx
        return model.context(
            self.n_ctx, n_threads=self.n_threads, n_batch=n_batch, n_ubatch=self.n_ubatch, **dict(self.options)
        )


@dataclass(frozen=True)
class Variant:
    """One way to stream. `cache` is "min", a share of full such as 0.5 (raised to the minimum), or 0 for none."""

    cache: str | float = "min"
    io: str = "io_uring"
    direct: str = "auto"
    verify: bool = False

    def stream(self, path: pathlib.Path) -> ms.Stream:
        """Its Stream options for the model at `path`."""
        cache: int | str = 0
        if self.cache:
            plan = ms.plan(path, stream=ms.Stream(cache="min"))
            share = 0.0 if self.cache == "min" else float(self.cache)
            cache = max(plan.min_cache_bytes, int(plan.full_cache_bytes * share))
        return ms.Stream(cache=cache, io=engine(self.io), direct=self.direct, verify=self.verify)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"cache={self.cache},{self.io},direct={self.direct}{',verify' if self.verify else ''}"


class Difference(AssertionError):
    """A streamed number was not the resident one."""


def same_bits(expected: Sequence[Array], got: Sequence[Array], what: str) -> int:
    """How many numbers were compared. Difference, naming `what`, at the first that is not finite or not the same."""
    assert len(expected) == len(got), f"{what}: {len(got)} results, the resident model gave {len(expected)}"
    n = 0
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert a.shape == b.shape, f"{what}: result {i} has the shape {b.shape}, resident {a.shape}"
        if not np.isfinite(a).all():
            raise Difference(f"{what}: result {i} of the resident model is not finite")
        wrong = np.argwhere(a.view(np.uint32) != b.view(np.uint32))
        if len(wrong):
            at = tuple(int(x) for x in wrong[0])
            raise Difference(
                f"{what}: result {i} differs at {at} ({len(wrong)} of {a.size}): resident {a[at]!r}, streamed {b[at]!r}"
            )
        n += a.size
    return n


@dataclass
class Reference:
    """One model, resident, and its results by work and setting, so that each is computed once."""

    path: pathlib.Path
    model: ms.Model
    known: dict[tuple[str, Setting], list[Array]] = field(default_factory=dict)

    def results(self, name: str, work: Work, setting: Setting) -> list[Array]:
        """What `work` gives on the resident model; `name` stands for it among the known results."""
        key = (name, setting)
        if key not in self.known:
            with setting.context(self.model) as context:
                self.known[key] = work(context)
        return self.known[key]


@contextlib.contextmanager
def reference(path: pathlib.Path) -> Iterator[Reference]:
    """The resident model at `path`, loaded into memory, without repacking."""
    with ms.Model(path, load_mode="none", use_extra_bufts=False) as model:
        yield Reference(path, model)


@contextlib.contextmanager
def streamed(path: pathlib.Path, variant: Variant) -> Iterator[ms.Model]:
    """The model at `path`, streamed. Checks that the variant's engine is the one that runs."""
    with ms.Model(path, stream=variant.stream(path)) as model:
        assert model.stats()["io"] == engine(variant.io)
        yield model


@dataclass
class Tally:
    """What comparisons of one model added up to."""

    runs: int = 0
    numbers: int = 0
    evictions: int = 0
    hits: int = 0
    misses: int = 0
    fallbacks: int = 0

    def add_model(self, stats: dict[str, Any]) -> None:
        """Adds the totals of a streamed model."""
        self.evictions += stats["n_evictions"]
        self.hits += stats["n_hits"]
        self.misses += stats["n_misses"]
        self.fallbacks += stats["n_fallback_tensors"]


def compare(
    ref: Reference,
    name: str,
    work: Work,
    settings: Sequence[Setting],
    variants: Sequence[Variant],
    tally: Tally,
    *,
    used: bool = True,
) -> None:
    """Runs `work` streamed in each variant and setting; raises Difference where a bit is not the resident one's.

    AssertionError where no expert was streamed, unless the model's graph does not use any (`used` False).
    """
    for variant in variants:
        with streamed(ref.path, variant) as model:
            for setting in settings:
                expected = ref.results(name, work, setting)
                with setting.context(model) as context:
                    got = work(context)
                tally.numbers += same_bits(expected, got, f"{ref.path.name}: {name}, {setting}, {variant}")
                tally.runs += 1
            stats = model.stats()
            assert (stats["n_misses"] > 0) == used, f"{stats['n_misses']} experts were streamed"
            tally.add_model(stats)


# ---- work ------------------------------------------------------------------------------------------------------


def prompts_then_tokens(prompts: Sequence[int], n_decode: int) -> Work:
    """For each length: a fresh sequence, the prompt with all its logits, then n_decode tokens one by one."""

    def work(context: ms.Context) -> list[Array]:
        out = []
        for n in prompts:
            ids = tokens(n + n_decode, context.model.n_vocab, seed=n)
            context.clear()
            out.append(context.decode(ids[:n], logits="all"))
            out += [context.decode(ids[i : i + 1]) for i in range(n, n + n_decode)]
        return out

    return work


@dataclass(frozen=True)
class Row:
    """One entry of a batch: a token (or an embedding), where it goes, and whether its output is wanted."""

    token: int | Array
    pos: int
    seqs: tuple[int, ...] = (0,)
    wanted: bool = True


def decode_rows(context: ms.Context, rows: Sequence[Row], *, encode: bool = False) -> int:
    """llama_decode (or llama_encode) of a batch of our own making, as a host with several sequences calls it.

    Returns what it returned. What Context.decode checks is checked here, too: the store's own reason is raised.
    """
    ffi, lib = native.ffi, native.lib
    handles = context._handles
    n_embd = 0 if isinstance(rows[0].token, int) else len(rows[0].token)
    batch = ffi.new("struct llama_batch *", lib.llama_batch_init(len(rows), n_embd, 4))
    try:
        for i, row in enumerate(rows):
            if isinstance(row.token, int):
                batch.token[i] = row.token
            else:
                batch.embd[i * n_embd : (i + 1) * n_embd] = [float(x) for x in row.token]
            batch.pos[i], batch.n_seq_id[i], batch.logits[i] = row.pos, len(row.seqs), row.wanted
            for k, seq in enumerate(row.seqs):
                batch.seq_id[i][k] = seq
        batch.n_tokens = len(rows)
        result = int((lib.llama_encode if encode else lib.llama_decode)(handles.context, batch[0]))
        if handles.hook != ffi.NULL:
            err = native.new_error()
            native.check(lib.moestream_context_status(handles.hook, err), err)
        return result
    finally:
        lib.llama_batch_free(batch[0])


def floats(pointer: Any, shape: tuple[int, ...]) -> Array:
    """A copy of llama.cpp's floats at `pointer`."""
    assert pointer != native.ffi.NULL, "llama.cpp gave no output"
    n = int(np.prod(shape))
    out: Array = np.frombuffer(native.ffi.buffer(pointer, 4 * n), dtype=np.float32).reshape(shape).copy()
    return out


def logits(context: ms.Context, n_rows: int) -> Array:
    """The logits of the last batch, [n_rows, n_vocab]."""
    return floats(native.lib.llama_get_logits(context._handles.context), (n_rows, context.model.n_vocab))
