"""Ctrl-C and cancel(): within a second, wherever a call waits; the context is right afterwards."""

from __future__ import annotations

import gc
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from support import faults

import moestream as ms

INTERRUPT = """
def interrupted_in(seconds, call, limit=1.0):
    def later():
        time.sleep(seconds)
        marks.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    marks = []
    threading.Thread(target=later, daemon=True).start()
    try:
        call()
    except KeyboardInterrupt:
        took = time.monotonic() - marks[0]
        assert took < limit, took
        return
    raise AssertionError("the call ended by itself")
"""


both_engines = pytest.mark.parametrize("io", ["pread", "io_uring"])


@both_engines
@pytest.mark.parametrize("what", ["[1] * 64", "[1]"], ids=["prefill", "decode"])
def test_ctrl_c_while_reads_are_slow_returns_within_a_second(io: str, what: str) -> None:
    """S20: 50 ms a read; the same for a prompt and for a single token."""
    faults.run(
        INTERRUPT
        + f"""
want = reference()
with opened(readers=1) as model, model.context(256, n_threads=2) as context:
    faults("read:path=.gguf,min=4096,delay_ms=50")
    interrupted_in(0.2, lambda: [context.decode({what}, pos=0) for _ in range(100)])
    faults("")
    context.clear()
    assert same(steps(context), want)
""",
        io=io,
    )


@pytest.mark.parametrize(("io", "n_threads"), [("pread", 1), ("pread", 2), ("io_uring", 2)])
def test_ctrl_c_in_a_read_that_does_not_come_back_returns_within_a_second(io: str, n_threads: int) -> None:
    """Two seconds a read. The reads go on: their slots stay taken, and the next call waits for them."""
    faults.run(
        INTERRUPT
        + f"""
want = reference(n_threads={n_threads})
with opened(readers=2) as model, model.context(256, n_threads={n_threads}) as context:
    faults("read:path=.gguf,min=4096,delay_ms=2000")
    interrupted_in(0.3, lambda: context.decode([1]))
    faults("")
    context.clear()
    assert same(steps(context), want)
""",
        io=io,
    )


@both_engines
def test_a_read_beyond_the_deadline_is_an_error_while_it_is_still_stuck(io: str) -> None:
    """Named with file, offset and seconds; not waited for in silence. Once the storage answers, all is right again."""
    faults.run(
        """
        want = reference()
        with opened(readers=1, deadline_s=0.3) as model, model.context(256, n_threads=2) as context:
            faults("read:path=.gguf,min=4096,delay_ms=2000")
            begin = time.monotonic()
            try:
                context.decode([1])
                raise AssertionError("it went through")
            except ms.ReadError as error:
                assert time.monotonic() - begin < 1.8, time.monotonic() - begin
                assert error.errno == errno.ETIMEDOUT, error
                for word in ("deadline", "offset", str(TINY)):
                    assert word in str(error), error
            faults("")
            give_up = time.monotonic() + 20
            while True:
                context.clear()
                try:
                    got = steps(context)
                    break
                except ms.ReadError:  # reads of the failed call are still stuck
                    assert time.monotonic() < give_up
            assert same(got, want)
        """,
        io=io,
    )


def test_close_does_not_begin_reads_that_nobody_waits_for() -> None:
    """Two seconds a read and one reader: closing waits for the read that was begun, not for the dozens behind it."""
    faults.run(
        INTERRUPT
        + """
model = opened(readers=1)
context = model.context(256, n_threads=2)
faults("pread:path=.gguf,min=4096,delay_ms=2000")
interrupted_in(0.3, lambda: context.decode([1] * 8))
begin, before = time.monotonic(), seen(0)
model.close()
assert seen(0) == before, (before, seen(0))
assert time.monotonic() - begin < 5, time.monotonic() - begin
"""
    )


def test_ctrl_c_during_load_stops_it() -> None:
    """Dense weights are read tensor by tensor; the progress callback sees the interrupt."""
    faults.run(
        INTERRUPT
        + """
faults("pread:path=.gguf,min=4096,delay_ms=50")
interrupted_in(0.4, opened)
faults("")
gc.collect()
with opened() as model, model.context(256, n_threads=2) as context:
    assert same(steps(context), reference())
"""
    )


def test_cancel_from_another_thread_raises_closed_and_the_next_call_is_right() -> None:
    """cancel() is for one call: one that comes between two calls does nothing to the next."""
    faults.run(
        """
        want = reference()
        with opened() as model, model.context(256, n_threads=2) as context:
            faults("pread:path=.gguf,min=4096,delay_ms=50")
            threading.Timer(0.2, context.cancel).start()
            begin = time.monotonic()
            try:
                for _ in range(100):
                    context.decode([1] * 64, pos=0)
                raise AssertionError("it went through")
            except ms.ClosedError:
                assert time.monotonic() - begin < 1.5
            faults("")
            context.cancel()
            context.clear()
            assert same(steps(context), want)
        """
    )


def test_a_generation_closed_within_its_own_step_keeps_its_sampler_to_the_end_of_it(
    tiny_moe: Callable[..., pathlib.Path],
) -> None:
    """As a signal handler or another thread may; the sampler had been freed under the step that uses it."""
    with ms.Model(tiny_moe(), stream=ms.Stream(cache="min")) as model, model.context(64) as context:
        generation = context.generate([1, 2], max_tokens=8, temperature=1.0, seed=1)
        sampler, decode, alive = weakref.ref(generation._sampler), context._decode, []

        def closing(*args: Any) -> None:
            decode(*args)
            generation.close()
            gc.collect()
            alive.append(sampler() is not None)

        context._decode = closing
        list(generation)
        assert alive == [True] and generation.stop_reason == "closed"
        assert sampler() is None
        context._decode = decode
        assert context.decode([3]).shape == (1, model.n_vocab)
