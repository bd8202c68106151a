"""Interrupts at any moment of a load and of making a context: what C made is freed, whatever the moment (issue 5).

An interrupt between C's return and Python's note of what it returned used to lose a whole model or a whole KV cache.
"""

from __future__ import annotations

import pytest
from support import faults

STORM = """
import random
def rss():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
armed = False
def interrupt(*_):
    if armed:
        raise KeyboardInterrupt
def shortest(work):
    # How long it takes when nothing disturbs it: interrupts up to then hit it.
    times = []
    for _ in range(5):
        started = time.monotonic()
        work()
        times.append(time.monotonic() - started)
    return min(times)
def storm(n, longest_s, work, seed):
    # Runs work n times, each interrupted after a random time; how many were. An alarm that comes when work is over,
    # but the timer not off yet, is raised inside the outer try; a later one finds nothing armed.
    global armed
    rng, hit = random.Random(seed), 0
    signal.signal(signal.SIGALRM, interrupt)
    for _ in range(n):
        try:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, longest_s))
                work()
            finally:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            hit += 1
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    gc.collect()
    return hit
"""


def test_interrupts_while_a_context_is_made_lose_nothing() -> None:
    """A KV cache of 64 MiB each: a few that were lost would show."""
    faults.run(
        STORM
        + """
with opened() as model:
    def make():
        with model.context(32768, n_threads=1, n_batch=16):
            pass
    longest = shortest(make)
    storm(20, longest, make, 1)
    before, maps = rss(), len(open("/proc/self/maps").readlines())
    hit = storm(100, longest, make, 2)
    grown, more = rss() - before, len(open("/proc/self/maps").readlines()) - maps
    print(hit, grown, more)
    assert hit > 9, hit
    assert grown < 48 << 20 and more < 20, (grown, more)
    with model.context(256, n_threads=2) as context:
        assert same(steps(context), reference())
""",
        timeout=120,
    )


@pytest.mark.parametrize("stream", [True, False])
def test_interrupts_while_a_model_loads_lose_nothing(stream: bool) -> None:
    faults.run(
        STORM
        + f"""
def load():
    if {stream}:
        opened().close()
    else:
        ms.Model(models.tiny("Q4_K")).close()
longest = shortest(load)
storm(20, longest, load, 1)
before, fds = rss(), len(os.listdir("/proc/self/fd"))
hit = storm(200, longest, load, 2)
grown = rss() - before
print(hit, grown)
assert hit > 40, hit
# A model that an interrupt left to the collector is freed at exit only, should another one hit weakref.finalize itself
assert len(os.listdir("/proc/self/fd")) <= fds + 8
assert grown < 24 << 20, grown
with opened() as model, model.context(256, n_threads=2) as context:
    assert same(steps(context), reference())
""",
        timeout=120,
    )
