"""Several contexts, models and threads: each gets what it would get alone (CASES S13, docs/threading.md)."""

from __future__ import annotations

from support import faults

THREADS = """
def in_threads(*jobs):
    failed = []
    def run(job):
        try:
            job()
        except BaseException as error:
            failed.append(error)
    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    [t.start() for t in threads]
    [t.join(40) for t in threads]
    assert not any(t.is_alive() for t in threads), "a thread hangs"
    if failed:
        raise failed[0]
def decoding(model, want, stop):
    # A job: the same tokens again and again, each time as alone, until `stop` is set.
    def job():
        with model.context(256, n_threads=1) as context:
            while not stop.is_set():
                context.clear()
                assert same(steps(context, len(want) - 1), want)
    return job
"""


def test_three_contexts_of_one_model_at_the_minimum_cache_equal_their_single_runs() -> None:
    faults.run(
        THREADS
        + """
want = reference(n=6, n_threads=1)
with opened() as model:
    def job():
        with model.context(256, n_threads=1) as context:
            for _ in range(3):
                context.clear()
                assert same(steps(context, 6), want)
    in_threads(job, job, job)
    assert model.stats()["n_evictions"] > 0
"""
    )


def test_two_models_and_a_resize_between_and_during_calls() -> None:
    """Resize is refused as busy or done; either way the numbers stay right."""
    faults.run(
        THREADS
        + """
want = reference(n=6, n_threads=1)
other = models.tiny("Q4_K")
want_other = reference(other, n=6, n_threads=1)
with opened() as a, opened(other, io="auto") as b:
    stop = threading.Event()
    def job(model, right):
        with model.context(256, n_threads=1) as context:
            for _ in range(4):
                context.clear()
                assert same(steps(context, 6), right)
    def resize():
        for i in range(40):
            try:
                a.resize(("min", "50%", "100%")[i % 3])
            except ms.BusyError:
                pass
            time.sleep(0.002)
    in_threads(lambda: job(a, want), lambda: job(b, want_other), resize)
"""
    )


def test_close_waits_for_the_call_in_flight_and_later_calls_say_closed() -> None:
    faults.run(
        THREADS
        + """
model = opened()
context = model.context(256, n_threads=1)
faults("pread:path=.gguf,min=4096,delay_ms=20")
def decode():
    try:
        for i in range(50):
            context.decode([1 + i])
    except ms.ClosedError:
        return
    raise AssertionError("decoded after close")
def close():
    time.sleep(0.2)
    model.close()
in_threads(decode, close)
faults("")
for call in (lambda: context.decode([1]), lambda: model.stats(), lambda: model.context(64)):
    try:
        call()
        raise AssertionError("used after close")
    except ms.ClosedError:
        pass
model.close()
"""
    )


def test_a_forked_child_is_refused_and_ends_by_itself() -> None:
    """Threads are not forked along, so a call would hang for ever; the parent goes on."""
    faults.run(
        """
        want = reference()
        with opened() as model, model.context(256, n_threads=2) as context:
            assert same(steps(context), want)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    context.decode([1])
                except ms.ClosedError as error:
                    code = 0 if "forked" in str(error) else 2
                del context, model
                gc.collect()
                sys.exit(code)  # with finalizers
            give_up = time.monotonic() + 10
            while time.monotonic() < give_up:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    break
                time.sleep(0.02)
            else:
                os.kill(child, signal.SIGKILL)
                raise AssertionError("the child hangs")
            assert os.waitstatus_to_exitcode(status) == 0, status
            context.clear()
            assert same(steps(context), want)
        """
    )


def test_contexts_made_and_freed_while_others_decode() -> None:
    """By close, by the garbage collector, and with a call of their own cancelled; the others notice nothing."""
    faults.run(
        THREADS
        + """
want = reference(n=6, n_threads=1)
stop = threading.Event()
with opened(io="auto", prefetch="on") as model:
    decode = decoding(model, want, stop)
    def churn():
        try:
            for i in range(24):
                context = model.context(64, n_threads=1)
                if i % 3 == 0:
                    context.close()
                elif i % 3 == 1:
                    threading.Timer(0.001, context.cancel).start()
                    try:
                        got = context.decode(PROMPT)
                        assert got.tobytes() == want[0].tobytes()
                    except ms.ClosedError:
                        pass
                context = None
            gc.collect()
        finally:
            stop.set()
    in_threads(decode, decode, churn)
"""
    )


def test_models_opened_and_closed_while_another_decodes() -> None:
    faults.run(
        THREADS
        + """
want = reference(n=6, n_threads=1)
stop = threading.Event()
with opened() as model:
    decode = decoding(model, want, stop)
    def others():
        try:
            for i in range(6):
                with opened(io=("auto", "pread")[i % 2]) as other, other.context(64, n_threads=1) as context:
                    assert context.decode(PROMPT).tobytes() == want[0].tobytes()
        finally:
            stop.set()
    in_threads(decode, others)
"""
    )
