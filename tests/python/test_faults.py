"""Faults of the system under a whole process: the right logits or an exception, and the model usable afterwards.

CASES S3 to S6, S12 (checksums), S20; the fault rig is support/preload/faults.c. io_uring itself is made to fail in the
C tests of io/ and stream/, where its answers can be changed; here it is refused.
"""

from __future__ import annotations

import pytest
from support import faults


def test_the_rig_counts_the_reads_it_could_change() -> None:
    """Without this every test below could pass because the rig does nothing."""
    done = faults.run(
        """
        faults("pread:path=.gguf,min=4096")
        with opened() as model, model.context(256, n_threads=2) as context:
            context.decode([1])
        assert seen(0) > 8, seen(0)
        """
    )
    assert done.returncode == 0


@pytest.mark.parametrize("short", [1, 511, 4095])
def test_short_reads_are_resumed(short: int) -> None:
    """S3: every read of the model comes in pieces; most pieces make the rest unaligned for direct I/O."""
    # each read is cut once, at its beginning: a byte at a time would take minutes
    script = f"pread:path=.gguf,min=4096,every=2,short={short}"
    faults.run(
        f"""
        want = reference()
        with opened() as model, model.context(256, n_threads=2) as context:
            faults({script!r})
            assert same(steps(context), want)
            assert seen(0) > 20
            assert model.stats()["n_retries"] > 0
        """
    )


@pytest.mark.parametrize("name", ["EINTR", "EAGAIN"])
def test_interrupted_reads_are_repeated(name: str) -> None:
    """S3: refused for now, every other time."""
    faults.run(
        f"""
        want = reference()
        with opened() as model, model.context(256, n_threads=2) as context:
            faults(f"pread:path=.gguf,min=4096,every=2,errno={{errno.{name}}}")
            assert same(steps(context), want)
            assert model.stats()["n_retries"] > 0
        """
    )


@pytest.mark.parametrize("fault", ["zero=1", "errno=4", "errno=11"])
def test_no_progress_for_ever_is_an_error_within_a_second(fault: str) -> None:
    """S3: nothing comes, or the call is interrupted for ever."""
    faults.run(
        f"""
        with opened() as model, model.context(256, n_threads=2) as context:
            faults("pread:path=.gguf,min=4096,{fault}")
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
        """
    )


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_failing_read_raises_with_file_offset_and_errno_and_the_next_decode_is_right(n_threads: int) -> None:
    """S4: EIO on the 10th read, then the fault is gone. Decode must not return old logits."""
    faults.run(
        f"""
        want = reference(n_threads={n_threads})
        with opened() as model, model.context(256, n_threads={n_threads}) as context:
            faults("pread:path=.gguf,min=4096,from=10,errno=5")
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
        """
    )


@pytest.mark.parametrize("count", [1, -1], ids=["transient", "permanent"])
def test_failing_the_kth_read_for_every_k_gives_an_exception_or_the_right_logits(count: int) -> None:
    """Every read of a prompt and 20 tokens once: never different logits, and afterwards the context decodes right."""
    faults.run(
        f"""
        want = reference(n=20, n_threads=1)
        with opened(cache="50%") as model, model.context(256, n_threads=1) as context:
            model.resize("min"); model.resize("50%")  # an empty cache
            faults("pread:path=.gguf,min=4096")
            assert same(steps(context, 20), want)
            total, raised = seen(0), 0
            assert total > 60
            for k in range(total):
                context.clear()
                model.resize("min"); model.resize("50%")
                faults(f"pread:path=.gguf,min=4096,from={{k}},count={count},errno=5")
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
        timeout=150,
    )


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("open:path=.gguf,direct=1,errno=22", "refused O_DIRECT"),
        ("pread:path=.gguf,direct=1,errno=22", "first direct read failed"),
        ("pread:path=.gguf,direct=1,flip=1", "other bytes"),
        ("pread:path=.gguf,direct=1,from=2,errno=22", "direct read was refused"),
    ],
    ids=["at_open", "at_first_read", "wrong_bytes", "later"],
)
def test_direct_reads_that_do_not_work_become_buffered_with_one_warning(script: str, says: str) -> None:
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
        """
    )
    warnings = [line for line in done.stdout.splitlines() if line.startswith("WARNING") and says in line]
    assert len(warnings) == 1, done.stdout


@pytest.mark.parametrize("name", ["EPERM", "ENOSYS", "ENOMEM", "EMFILE"])
def test_refused_io_uring_falls_back_to_pread_and_says_what_would_allow_it(name: str) -> None:
    """S6."""
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
        launcher=faults.without_io_uring(name),
    )
    warning = [line for line in done.stdout.splitlines() if line.startswith("WARNING") and "io_uring" in line]
    required = [line for line in done.stdout.splitlines() if line.startswith("required:")]
    assert len(warning) == 1 and len(required) == 1, done.stdout
    assert required[0].removeprefix("required: ") in warning[0]
    if name in ("EPERM", "ENOSYS", "ENOMEM"):
        assert {"EPERM": "seccomp", "ENOSYS": "Linux 5.6", "ENOMEM": "memlock"}[name].lower() in warning[0].lower()


def test_verify_finds_bytes_that_differ_from_the_first_read() -> None:
    """The message names layer, expert and slice; without verify nobody could know."""
    faults.run(
        """
        with opened(verify=True) as model, model.context(256, n_threads=2) as context:
            want = steps(context)
            context.clear()
            faults("pread:path=.gguf,min=4096,from=9,count=1,flip=1")
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
        """
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
                # the header reader's own table: llama.cpp's reader only says "no", whatever the cause
                header = isinstance(error, ms.FormatError) and "header" in str(error)
                assert isinstance(error, MemoryError) or header, (k, repr(error))
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


def test_slow_storage_warns_once_with_the_expected_speed() -> None:
    """S20: 50 ms a read."""
    done = faults.run(
        """
        with opened() as model, model.context(256, n_threads=2) as context:
            faults("pread:path=.gguf,min=4096,delay_ms=50")
            context.decode([1]); context.decode([2])
            faults("")
        """
    )
    slow = [line for line in done.stdout.splitlines() if "slow storage" in line]
    assert len(slow) == 1 and "tokens/s" in slow[0], done.stdout
    fast = faults.run("with opened() as m, m.context(256) as c:\n    steps(c, 20)\n")
    assert "slow storage" not in fast.stdout
