"""Four threads call random methods of shared models and contexts, with good and bad arguments, while reads are late.

Guarantees checked: each call ends; it gives the right logits or an exception of a documented kind; nothing crashes.
MOESTREAM_RANDOM_SEED repeats a run's choices (not the timing of its threads); MOESTREAM_RANDOM_SECONDS: longer.
"""

from __future__ import annotations

import os

import pytest
from support import faults

CALLS = """
import random
SEED, SECONDS = {seed}, {seconds}
print("seed", SEED, flush=True)
logging.getLogger().setLevel(logging.CRITICAL)
want = reference(n=0)[0].tobytes()
models_open, contexts, locks = [], [], {{}}
until = time.monotonic() + SECONDS
right, said, wrong = [0], set(), []

def open_model(r):
    cache, engine = r.choice(("min", "30%", "100%", 0)), r.choice(("auto", "pread"))
    prefetch = r.choice(("on", "off")) if cache else "off"
    models_open.append(opened(cache=cache, io=engine, prefetch=prefetch, verify=r.random() < 0.2))

def make_context(r):
    if models_open:
        contexts.append(r.choice(models_open).context(r.choice((64, 128)), n_threads=1, n_ubatch=r.choice((4, 64))))

def any_context(r):
    context = r.choice(contexts)
    return context, locks.setdefault(id(context), threading.Lock())  # clear and decode belong together

def decode(r):
    if contexts:
        context, lock = any_context(r)
        with lock:
            context.clear()
            got = context.decode(PROMPT).tobytes()
        right[0] += 1
        if got != want:
            wrong.append("other logits")

def nonsense(r):
    if contexts:
        context, lock = any_context(r)
        tokens = r.choice(([], [[1, 2]], "abc", [2**40], [-1], [1.5], [1, 2], list(range(30))))
        with lock:
            r.choice((
                lambda: context.decode(tokens, pos=r.choice((0, None, 3, 1000, -1))),
                lambda: list(context.generate([1, 2], 3, ignore_eog=True)),
                context.n_past, context.stats, context.clear, context.cancel,
            ))()

def resize(r):
    if models_open:
        r.choice(models_open).resize(r.choice(("min", "50%", "100%", "0%", 5, -1, "x")))

def look(r):
    if models_open:
        model = r.choice(models_open)
        model.stats(), model.placement(), model.describe()

def end(r):
    if contexts and r.random() < 0.7:
        r.choice((r.choice(contexts).cancel, r.choice(contexts).close))()
    elif models_open and r.random() < 0.3:
        r.choice(models_open).close()
    if len(contexts) > 4:
        contexts.pop(r.randrange(len(contexts)))
    if len(models_open) > 3:
        models_open.pop(r.randrange(len(models_open)))

def late(r):
    faults(r.choice(("", f"read:path=.gguf,min=4096,every={{r.randint(3, 30)}},delay_ms={{r.randint(1, 9)}}")))

CALLS = [open_model, make_context, make_context, *[decode] * 8, *[nonsense] * 4, resize, look, end, end, late]

def run(number):
    r = random.Random(SEED * 100 + number)
    while time.monotonic() < until and not wrong:
        call = r.choice(CALLS)
        try:
            call(r)
        except IndexError:  # another thread took the last one
            pass
        except (ms.MoestreamError, ValueError, TypeError) as error:
            said.add(type(error).__name__)
        except BaseException as error:
            wrong.append(f"{{call.__name__}}: {{error!r}}")

threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(4)]
[t.start() for t in threads]
[t.join(SECONDS + 60) for t in threads]
assert not any(t.is_alive() for t in threads), "a call does not end"
assert not wrong, wrong
assert right[0] > 20 and len(said) >= 3, (right, said)
faults("")
print(right, sorted(said))
"""


@pytest.mark.parametrize("io", ["pread", "io_uring"])
def test_random_calls_are_right_or_refused(io: str) -> None:
    seed = int(os.environ.get("MOESTREAM_RANDOM_SEED") or int.from_bytes(os.urandom(3), "big"))
    seconds = float(os.environ.get("MOESTREAM_RANDOM_SECONDS") or 4)
    done = faults.run(CALLS.format(seed=seed, seconds=seconds), io=io, timeout=seconds + 90)
    print(done.stdout)
