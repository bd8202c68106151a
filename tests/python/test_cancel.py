"""Ctrl-C and cancel(): within a second, wherever a call waits; the context is right afterwards."""

from __future__ import annotations

import pytest
from support import faults

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


@pytest.mark.parametrize("what", ["[1] * 64", "[1]"], ids=["prefill", "decode"])
def test_ctrl_c_while_reads_are_slow_returns_within_a_second(what: str) -> None:
    """S20: 50 ms a read; the same for a prompt and for a single token."""
    faults.run(
        INTERRUPT
        + f"""
want = reference()
with opened(readers=1) as model, model.context(256, n_threads=2) as context:
    faults("pread:path=.gguf,min=4096,delay_ms=50")
    interrupted_in(0.2, lambda: [context.decode({what}, pos=0) for _ in range(100)])
    faults("")
    context.clear()
    assert same(steps(context), want)
"""
    )


def test_ctrl_c_in_a_read_that_does_not_come_back_returns_when_it_is_a_reader_thread_that_waits() -> None:
    """Two seconds a read: compute threads of the pread engine read, too, and are held up for one read at most."""
    faults.run(
        INTERRUPT
        + """
with opened() as model, model.context(256, n_threads=2) as context:
    faults("pread:path=.gguf,min=4096,delay_ms=2000")
    interrupted_in(0.3, lambda: context.decode([1]), limit=3.0)
    faults("")
    context.clear()
    assert same(steps(context), reference())
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
