#!/usr/bin/env python3
"""Streams a small model for a long time in random ways and compares every logit with a resident twin's.

    tests/system/soak.py [--seconds 120] [--seed N] [--contexts 3] [--steps N] [--io ENGINE] [--delays] [--verify]

Each step: one of the contexts decodes 1 to 40 tokens, at its end, again from an earlier position, or from the start;
now and then the cache changes its size, a context is made anew, or (with --delays, under the fault rig) reads are late.
With more than one context they decode in threads, all at once. Guarantees: a seed repeats the choices; the first
difference ends the run with status 1 and its step; the last line is one line of JSON: steps, tokens, differences,
resizes, the slope of the resident set, descriptors before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from support import faults, models

import moestream as ms


def _rss() -> int:
    with open("/proc/self/statm") as f:  # noqa: PTH123
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Run:
    """What all threads share."""

    streamed: ms.Model
    resident: ms.Model
    until: float
    max_steps: int
    delays: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    gate: threading.Condition = field(default_factory=threading.Condition)
    closed: bool = False  # no step begins
    busy: int = 0  # steps that run
    steps: int = 0
    tokens: int = 0
    resizes: int = 0
    refused: int = 0
    difference: str = ""
    error: BaseException | None = None

    @property
    def going(self) -> bool:
        """Whether another step is wanted."""
        return (
            time.monotonic() < self.until
            and not self.difference
            and self.error is None
            and (self.max_steps == 0 or self.steps < self.max_steps)
        )

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """No step runs inside."""
        with self.gate:
            self.closed = True
            self.gate.wait_for(lambda: self.busy == 0)
            try:
                yield
            finally:
                self.closed = False
                self.gate.notify_all()

    @contextlib.contextmanager
    def a_step(self) -> Iterator[None]:
        """One step."""
        with self.gate:
            self.gate.wait_for(lambda: not self.closed)
            self.busy += 1
        try:
            yield
        finally:
            with self.gate:
                self.busy -= 1
                self.gate.notify_all()


class Twin:
    """One context of each model, given the same work."""

    def __init__(self, run: Run, rng: random.Random, number: int) -> None:
        self.run, self.rng, self.number = run, rng, number
        self.pair = self._make()

    def _make(self) -> tuple[ms.Context, ms.Context]:
        options = {"n_threads": 1, "n_ubatch": self.rng.choice((1, 8, 64)), "n_batch": 64}
        return self.run.streamed.context(256, **options), self.run.resident.context(256, **options)

    def close(self) -> None:
        """Frees both contexts."""
        for context in self.pair:
            context.close()

    def step(self) -> None:
        """One random piece of work on both, compared."""
        rng, (a, b) = self.rng, self.pair
        past = a.n_past()
        n = rng.choice((1, 1, 1, 2, 3, 7, 8, 9, rng.randint(1, 40)))
        pos = rng.choice((past, past, past, rng.randint(0, past), 0))
        pos = 0 if pos + n > 256 else pos
        ids = [rng.randrange(1, self.run.streamed.n_vocab) for _ in range(n)]
        got = a.decode(ids, pos=pos, logits="all")
        want = b.decode(ids, pos=pos, logits="all")
        with self.run.lock:
            self.run.steps += 1
            self.run.tokens += n
            if got.tobytes() != want.tobytes() and not self.run.difference:
                self.run.difference = f"context {self.number}, step {self.run.steps}: {n} tokens at position {pos}"
        if rng.random() < 0.01:
            self.close()
            self.pair = self._make()

    def loop(self) -> None:
        """Steps until the run is over."""
        try:
            while self.run.going:
                with self.run.a_step():
                    self.step()
        except BaseException as error:  # told by the main thread
            self.run.error = error


def _disturb(run: Run, rng: random.Random, rig: ctypes.CDLL | None) -> None:
    """Resizes and late reads, from the main thread."""
    share = rng.choice(("min", "20%", "35%", "60%", "100%"))
    try:
        with run.between_steps() if rng.random() < 0.5 else contextlib.nullcontext():  # else it may be refused
            run.streamed.resize(share)
            run.resizes += 1
    except ms.BusyError:
        run.refused += 1
    if rig is not None:
        script = f"read:path=.gguf,min=4096,every={rng.randint(5, 50)},delay_ms={rng.randint(1, 15)}"
        rig.ms_faults_set(b"" if rng.random() < 0.5 else script.encode())


def soak(args: argparse.Namespace) -> dict[str, object]:
    """The whole run; what it found."""
    path = models.tiny(args.type)
    rig = ctypes.CDLL(None) if args.delays else None
    if rig is not None and args.io != "pread" and not rig.ms_faults_uring():
        raise SystemExit("the rig cannot delay io_uring here: give --io pread")
    stream = ms.Stream(cache="min", io=args.io, verify=args.verify)
    with ms.Model(path, stream=stream) as streamed, ms.Model(path, use_extra_bufts=False) as resident:
        run = Run(streamed, resident, time.monotonic() + args.seconds, args.steps, args.delays)
        rng = random.Random(args.seed)
        twins = [Twin(run, random.Random(args.seed * 1000 + i), i) for i in range(args.contexts)]
        threads = [threading.Thread(target=twin.loop) for twin in twins]
        for thread in threads:
            thread.start()
        marks: list[tuple[float, int]] = []
        fds = len(list(pathlib.Path("/proc/self/fd").iterdir()))
        begin = time.monotonic()
        while run.going:
            time.sleep(0.05 if args.seconds < 600 else 0.5)
            if not args.no_resize:
                _disturb(run, rng, rig)
            marks.append((time.monotonic() - begin, _rss()))
        for thread in threads:
            thread.join()
        for twin in twins:
            twin.close()
        late = marks[len(marks) // 3 :]
        slope = (late[-1][1] - late[0][1]) / max(late[-1][0] - late[0][0], 1e-9) if len(late) > 1 else 0.0
        stats = streamed.stats()
        left = len(list(pathlib.Path("/proc/self/fd").iterdir()))
        if run.error is not None:
            raise run.error
        return {
            "seed": args.seed, "seconds": round(time.monotonic() - begin, 1), "contexts": args.contexts,
            "steps": run.steps, "tokens": run.tokens, "differences": int(bool(run.difference)),
            "first_difference": run.difference, "resizes": run.resizes, "busy": run.refused,
            "rss_bytes_per_s": round(slope), "fds": [fds, left], "io": stats["io"],
            "reads": stats["n_reads"], "evictions": stats["n_evictions"],
        }  # fmt: skip


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--steps", type=int, default=0, help="end after so many; 0: by time alone")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--contexts", type=int, default=3)
    parser.add_argument("--type", default="Q4_K", help="type of the experts")
    parser.add_argument(
        "--io", default="auto", help="auto, io_uring or pread; with --delays both engines' reads are late"
    )
    parser.add_argument("--delays", action="store_true", help="late reads: starts itself anew under the fault rig")
    parser.add_argument("--verify", action="store_true", help="checksums on every use")
    parser.add_argument("--no-resize", action="store_true", help="stay at the minimum cache")
    args = parser.parse_args()
    print(f"seed {args.seed}: repeat with --seed {args.seed}", flush=True)
    if args.delays and "MS_FAULTS" not in os.environ:
        command = [sys.executable, *sys.argv, "--seed", str(args.seed)]
        rig = {"MS_FAULTS": "", "LD_PRELOAD": str(faults.library())}
        if args.io != "pread":
            rig["MS_FAULTS_URING"] = "1"
        os.execve(sys.executable, command, {**os.environ, **rig})
    found = soak(args)
    print(json.dumps(found))
    return int(bool(found["differences"]))


if __name__ == "__main__":
    sys.exit(main())
