"""What users do to processes: stop them, fork them, interrupt them many times, take away their limits."""

from __future__ import annotations

import pytest
from support import faults

both_engines = pytest.mark.parametrize("io", ["pread", "io_uring"])


@both_engines
def test_a_stopped_process_goes_on_where_it_was(io: str) -> None:
    """SIGSTOP for longer than the deadline: time passed, but no read was late once the process runs again."""
    faults.run(
        """
        want = reference(n=8, n_threads=1)
        def stop_often():
            for _ in range(5):
                time.sleep(0.03)
                os.system(f"(sleep 0.4; kill -CONT {os.getpid()}) & kill -STOP {os.getpid()}")
            done.set()
        done = threading.Event()
        with opened(deadline_s=0.2) as model, model.context(256, n_threads=1) as context:
            threading.Thread(target=stop_often).start()
            while not done.is_set():
                context.clear()
                assert same(steps(context, 8), want)
        """,
        io=io,
    )


@both_engines
def test_a_storm_of_interrupts_leaves_the_context_right(io: str) -> None:
    """Ctrl-C held down: each call gives the right logits or KeyboardInterrupt, and then all is as before."""
    faults.run(
        """
        want = reference(n=8, n_threads=1)
        def storm():
            try:
                for i in range(60):
                    time.sleep(0.004 + i % 7 * 0.002)
                    os.kill(os.getpid(), signal.SIGINT)
            finally:
                done.set()
        done = threading.Event()
        interrupted = 0
        with opened() as model, model.context(256, n_threads=1) as context:
            faults("read:path=.gguf,min=4096,every=9,delay_ms=2")
            threading.Thread(target=storm).start()
            while not done.is_set():
                try:
                    got = []
                    context.clear()
                    got.append(context.decode(PROMPT))
                    for i in range(8):
                        got.append(context.decode([7 + i]))
                        assert same(got, want[: len(got)])
                except KeyboardInterrupt:
                    interrupted += 1
            while True:
                try:
                    time.sleep(0.1)  # the last one
                    break
                except KeyboardInterrupt:
                    pass
            faults("")
            context.clear()
            assert same(steps(context, 8), want)
        assert interrupted > 5, interrupted
        """,
        io=io,
    )


@both_engines
def test_forking_while_other_threads_decode_does_them_no_harm(io: str) -> None:
    """Children that end, run another program, or try to decode and are refused."""
    faults.run(
        """
        import subprocess
        want = reference(n=6, n_threads=1)
        stop, failed = threading.Event(), []
        with opened(prefetch="on") as model, model.context(256, n_threads=1) as context:
            def decode():
                try:
                    while not stop.is_set():
                        context.clear()
                        assert same(steps(context, 6), want)
                except BaseException as error:
                    failed.append(error)
            thread = threading.Thread(target=decode)
            thread.start()
            for i in range(12):
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        model.stats()
                    except ms.ClosedError:
                        code = 0
                    os._exit(code)
                assert os.waitpid(child, 0)[1] == 0
                assert subprocess.run(["true"]).returncode == 0
            stop.set()
            thread.join(30)
            assert not thread.is_alive() and not failed, failed
        """,
        io=io,
    )


def test_without_a_descriptor_left_an_open_model_goes_on() -> None:
    faults.run(
        """
        import resource
        want = reference()
        with opened(io="auto") as model, model.context(256, n_threads=2) as context:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            got = steps(context)
            model.resize("100%")
            context.clear()
            again = steps(context)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert same(got, want) and same(again, want)
        """
    )
