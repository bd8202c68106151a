"""Faults of the system under a whole process: the right logits or an exception, and the model usable afterwards.

CASES S3 to S6, S12 (checksums), S20; the fault rig is support/preload. Each fault of a read is tried with both engines.
docs/faults.md lists which test makes which fault.
"""

from __future__ import annotations

import pytest
from support import faults

both_engines = pytest.mark.parametrize("io", ["pread", "io_uring"])


@both_engines
def test_the_rig_counts_the_reads_it_could_change(io: str) -> None:
    """Without this every test below could pass because the rig does nothing."""
    done = faults.run(
        """
        faults("read:path=.gguf,min=4096")
        with opened() as model, model.context(256, n_threads=2) as context:
            context.decode([1])
        assert seen(0) > 8, seen(0)
        """,
        io=io,
    )
    assert done.returncode == 0


@both_engines
@pytest.mark.parametrize("short", [1, 511, 4095])
def test_short_reads_are_resumed(io: str, short: int) -> None:
    """S3: every read of the model comes in pieces; most pieces make the rest unaligned for direct I/O."""
    # each read is cut once, at its beginning: a byte at a time would take minutes
    script = f"read:path=.gguf,min=4096,every=2,short={short}"
    faults.run(
        f"""
        want = reference()
        with opened() as model, model.context(256, n_threads=2) as context:
            faults({script!r})
            assert same(steps(context), want)
            assert seen(0) > 20
            assert model.stats()["n_retries"] > 0
        """,
        io=io,
    )


@both_engines
@pytest.mark.parametrize("name", ["EINTR", "EAGAIN"])
def test_interrupted_reads_are_repeated(io: str, name: str) -> None:
    """S3: refused for now, every other time."""
    faults.run(
        f"""
        want = reference()
        with opened() as model, model.context(256, n_threads=2) as context:
            faults(f"read:path=.gguf,min=4096,every=2,errno={{errno.{name}}}")
            assert same(steps(context), want)
            assert model.stats()["n_retries"] > 0
        """,
        io=io,
    )


@both_engines
@pytest.mark.parametrize("fault", ["zero=1", "errno=4", "errno=11"])
def test_no_progress_for_ever_is_an_error_within_a_second(io: str, fault: str) -> None:
    """S3: nothing comes, or the call is interrupted for ever."""
    faults.run(
        f"""
        with opened() as model, model.context(256, n_threads=2) as context:
            faults("read:path=.gguf,min=4096,{fault}")
            begin = time.monotonic()
            try:
                context.decode(PROMPT)
            except ms.ReadError as error:
                assert TINY.name in str(error) and "offset" in str(error), error
            else:
                raise AssertionError("it went through")
            assert time.monotonic() - begin < 1, time.monotonic() - begin
            faults("")
            assert same(steps(context), reference())
        """,
        io=io,
    )


@both_engines
@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_failing_read_raises_with_file_offset_and_errno_and_the_next_decode_is_right(io: str, n_threads: int) -> None:
    """S4: EIO on the 10th read, then the fault is gone. Decode must not return old logits."""
    faults.run(
        f"""
        want = reference(n_threads={n_threads})
        with opened() as model, model.context(256, n_threads={n_threads}) as context:
            faults("read:path=.gguf,min=4096,from=10,errno=5")
            try:
                context.decode(PROMPT)
            except ms.ReadError as error:
                assert error.errno == errno.EIO and error.os_errno == errno.EIO
                assert str(TINY) in str(error) and "offset" in str(error), error
            else:
                raise AssertionError("it went through")
            assert context.n_past() == 0
            before = threading.active_count()
            faults("")
            assert same(steps(context), want)
            assert threading.active_count() == before
        """,
        io=io,
    )


@both_engines
@pytest.mark.parametrize("count", [1, -1], ids=["transient", "permanent"])
def test_failing_the_kth_read_for_every_k_gives_an_exception_or_the_right_logits(io: str, count: int) -> None:
    """Every read of a prompt and 20 tokens once: never different logits, and afterwards the context decodes right."""
    faults.run(
        f"""
        want = reference(n=20, n_threads=1)
        with opened(cache="50%") as model, model.context(256, n_threads=1) as context:
            model.resize("min"); model.resize("50%")  # an empty cache
            faults("read:path=.gguf,min=4096")
            assert same(steps(context, 20), want)
            total, raised = seen(0), 0
            assert total > 60
            for k in range(total):
                context.clear()
                model.resize("min"); model.resize("50%")
                faults(f"read:path=.gguf,min=4096,from={{k}},count={count},errno=5")
                got = []
                try:
                    got.append(context.decode(PROMPT))
                    for i in range(20):
                        got.append(context.decode([7 + i]))
                except ms.ReadError as error:
                    raised += 1
                    assert error.errno == 5, error
                assert same(got, want[: len(got)]), k
                faults("")
                for i in range(len(got), min(21, len(got) + 2)):  # from where it stopped
                    got.append(context.decode(PROMPT if i == 0 else [6 + i]))
                assert same(got, want[: len(got)]), k
            assert raised > total // 5, (raised, total)
            print("k", total, "raised", raised)
        """,
        io=io,
        timeout=150,
    )


@both_engines
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("open:path=.gguf,direct=1,errno=22", "refused O_DIRECT"),
        ("read:path=.gguf,direct=1,errno=22", "first direct read failed"),
        ("read:path=.gguf,direct=1,flip=1", "other bytes"),
        ("read:path=.gguf,direct=1,from=2,errno=22", "direct read was refused"),
    ],
    ids=["at_open", "at_first_read", "wrong_bytes", "later"],
)
def test_direct_reads_that_do_not_work_become_buffered_with_one_warning(io: str, script: str, says: str) -> None:
    """S5."""
    done = faults.run(
        f"""
        want = reference()
        faults({script!r})
        with opened() as model, model.context(256, n_threads=2) as context:
            assert same(steps(context), want)
            assert not model.stats()["direct"]
        try:
            opened(direct="on").close()
        except ms.UnsupportedError as error:
            print("on:", error)
        """,
        io=io,
    )
    warnings = [line for line in done.stdout.splitlines() if line.startswith("WARNING") and says in line]
    assert len(warnings) == 1, done.stdout


@pytest.mark.parametrize(
    ("name", "call"),
    [("EPERM", ""), ("ENOSYS", ""), ("ENOMEM", ""), ("EMFILE", ""), ("EPERM", "enter"), ("ENOMEM", "register")],
)
def test_refused_io_uring_falls_back_to_pread_and_says_what_would_allow_it(name: str, call: str) -> None:
    """S6: all of it, or a ring that is given and then cannot be used."""
    done = faults.run(
        """
        want = reference()
        with opened(io="auto") as model, model.context(256, n_threads=2) as context:
            assert model.stats()["io"] == "pread"
            assert same(steps(context), want)
        try:
            opened(io="io_uring")
        except ms.MoestreamError as error:
            print("required:", error)
        else:
            raise AssertionError("io_uring was had")
        """,
        launcher=faults.without_io_uring(name, call),
    )
    warning = [line for line in done.stdout.splitlines() if line.startswith("WARNING") and "io_uring" in line]
    required = [line for line in done.stdout.splitlines() if line.startswith("required:")]
    assert len(warning) == 1 and len(required) == 1, done.stdout
    assert required[0].removeprefix("required: ") in warning[0]
    if not call and name in ("EPERM", "ENOSYS", "ENOMEM"):
        assert {"EPERM": "seccomp", "ENOSYS": "Linux 5.6", "ENOMEM": "memlock"}[name].lower() in warning[0].lower()


@both_engines
def test_verify_finds_bytes_that_differ_from_the_first_read(io: str) -> None:
    """The message names layer, expert and slice; without verify nobody could know."""
    faults.run(
        """
        with opened(verify=True) as model, model.context(256, n_threads=2) as context:
            want = steps(context)
            context.clear()
            faults("read:path=.gguf,min=4096,from=9,count=1,flip=1")
            try:
                steps(context)
            except ms.CorruptError as error:
                for word in ("layer", "expert", "slice", str(TINY)):
                    assert word in str(error), error
            else:
                raise AssertionError("it went through")
            faults("")
            context.clear()
            assert same(steps(context), want)
            assert same(want, reference())
        """,
        io=io,
    )


def test_allocation_failures_at_open_are_clear_and_leave_nothing() -> None:
    """Each calloc of the library during open fails once; mmap of the slab and the reader threads, too."""
    faults.run(
        """
        opened().close()
        def fds():
            return len(os.listdir("/proc/self/fd"))
        before = fds()
        faults("calloc:lib=libmoestream")
        opened().close()
        total = seen(0)
        assert total > 10, total
        for k in range(total):
            faults(f"calloc:lib=libmoestream,from={k},count=1,errno=12")
            try:
                opened().close()
            except ms.MoestreamError as error:
                assert isinstance(error, ms.OutOfMemoryError), (k, repr(error))
        faults("mmap:lib=libmoestream,min=400000,errno=12")
        try:
            opened()
            raise AssertionError("opened without memory")
        except ms.OutOfMemoryError as error:
            assert "bytes" in str(error), error
        faults("thread:lib=libmoestream,from=2,errno=11")
        try:
            opened()
            raise AssertionError("opened without threads")
        except ms.OutOfMemoryError as error:
            assert "4 reader threads" in str(error), error
        faults("")
        gc.collect()
        assert fds() == before, (before, fds())
        with opened() as model, model.context(256, n_threads=2) as context:
            assert same(steps(context), reference())
        """
    )


@both_engines
def test_slow_storage_warns_once_with_the_expected_speed(io: str) -> None:
    """S20: 50 ms a read."""
    done = faults.run(
        """
        with opened() as model, model.context(256, n_threads=2) as context:
            faults("read:path=.gguf,min=4096,delay_ms=50")
            for token in range(1, 9): context.decode([token])
            faults("")
        """,
        io=io,
    )
    slow = [line for line in done.stdout.splitlines() if "slow storage" in line]
    assert len(slow) == 1 and "tokens/s" in slow[0], done.stdout
    fast = faults.run("with opened() as m, m.context(256) as c:\n    steps(c, 20)\n", io=io)
    assert "slow storage" not in fast.stdout
