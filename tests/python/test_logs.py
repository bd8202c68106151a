"""P16: log lines of the library and of llama.cpp go to Python's logging, selectable and without floods."""

from __future__ import annotations

import ctypes
import functools
import logging
import pathlib
from collections.abc import Iterator

import pytest
from support import models, rpc

import moestream as ms
from moestream import logs

LEVELS = ("debug", "info", "warn", "error", "none")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    logs.forget()
    levels = logs.llama_logger.level, logs.moestream_logger.level
    yield
    ms.set_log_level("warn")
    logs.llama_logger.setLevel(levels[0])
    logs.moestream_logger.setLevel(levels[1])
    logs.forget()


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    ]


@functools.cache
def log_callback() -> tuple[int, int]:
    """The callback that libllama was given, and its user data."""
    ms.features()
    llama = ctypes.CDLL(str(next(iter(sorted(rpc.library_folder().glob("libllama.so*"))))))
    callback, data = ctypes.c_void_p(), ctypes.c_void_p()
    llama.llama_log_get(ctypes.byref(callback), ctypes.byref(data))
    return callback.value or 0, data.value or 0


def say(text: str, level: int = 3, times: int = 1) -> None:
    """A line as ggml would send it, through that callback."""
    address, data = log_callback()
    call = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(address)
    for _ in range(times):
        call(level, text.encode() + b"\n", data)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_importing_prints_nothing_and_logs_nothing() -> None:
    done = models.run_python(
        """
        import logging
        logging.basicConfig(level=1)
        import moestream
        moestream.build_info()
        """
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_a_load_and_a_decode_print_nothing_to_the_terminal() -> None:
    """Not llama.cpp's own stderr either; the lines go to logging, which shows warnings only."""
    code = """
    import logging, sys
    logging.getLogger("llama.cpp").addHandler(logging.NullHandler())
    logging.getLogger("llama.cpp").propagate = False
    import moestream as ms
    with ms.Model(sys.argv[1], stream=True) as model, model.context(32, n_threads=1) as context:
        context.decode([1, 2, 3])
    """
    done = models.run_python(code, args=(str(models.tiny()),))
    assert (done.stdout, done.stderr) == ("", "")


def test_ten_thousand_equal_lines_are_one_line_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1)
    say("CUDA Graph id 3 reused", times=10_000)
    logs.drain()
    assert messages(caplog) == ["CUDA Graph id 3 reused (repeated 9999 times)"]


def test_a_line_in_each_of_ten_thousand_calls_is_one_line_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    """Two lines that take turns, taken after every call, as a decode loop does it."""
    caplog.set_level(1)
    for i in range(10_000):
        say(f"CUDA Graph id {i % 2} reused")
        logs.drain()
    assert messages(caplog) == ["CUDA Graph id 0 reused", "CUDA Graph id 1 reused"]
    logs.forget()
    assert messages(caplog)[2:] == [f"CUDA Graph id {i} reused (repeated 4999 times)" for i in range(2)]
    say("CUDA Graph id 0 reused")
    logs.drain()
    assert messages(caplog)[4:] == ["CUDA Graph id 0 reused"], "after the count it is a new line"


def test_the_level_chooses_what_is_kept_and_the_logger_is_llama_cpp(caplog: pytest.LogCaptureFixture) -> None:
    for least, level in enumerate(LEVELS, 1):
        caplog.clear()
        ms.set_log_level(level)  # type: ignore[arg-type]
        caplog.set_level(1)
        for number in (1, 2, 3, 4):
            say(f"line of level {number} at {level}", number)
        logs.drain()
        kept = [record for record in caplog.records if "line of level" in record.getMessage()]
        assert [record.getMessage()[14] for record in kept] == [str(n) for n in range(least, 5)]
        assert {record.name for record in kept} <= {"llama.cpp"}
        by_number = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
        assert all(record.levelno == by_number[int(record.getMessage()[14])] for record in kept)


def test_another_level_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="it is one of debug, info"):
        ms.set_log_level("loud")  # type: ignore[arg-type]


def test_info_shows_what_llama_cpp_says_of_a_load(caplog: pytest.LogCaptureFixture) -> None:
    ms.set_log_level("info")
    caplog.set_level(logging.INFO)
    with ms.Model(models.tiny(), load_mode="none"):
        pass
    assert any("load_mode = none" in message for message in messages(caplog))


def test_no_python_runs_while_a_model_computes() -> None:
    """llama.cpp logs into a function of libmoestream; handlers run in the calling thread, around the call only."""
    ms.set_log_level("debug")
    found = _DlInfo()
    assert ctypes.CDLL(None).dladdr(ctypes.c_void_p(log_callback()[0]), ctypes.byref(found))
    assert pathlib.Path(found.file.decode()).name.startswith("libmoestream")
    threads: set[str] = set()

    class Remember(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            threads.add(record.threadName or "")

    handler = Remember()
    logs.llama_logger.addHandler(handler)
    try:
        with ms.Model(models.tiny()) as model, model.context(32, n_threads=2) as context:
            context.decode([5])
    finally:
        logs.llama_logger.removeHandler(handler)
    assert threads == {"MainThread"}


def test_lines_nobody_took_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1)
    for i in range(1000):
        say(f"line {i} of many")
    logs.drain()
    lost = [message for message in messages(caplog) if "were lost" in message]
    kept = [message for message in messages(caplog) if "of many" in message]
    assert len(lost) == 1 and int(lost[0].split()[0]) + len(kept) == 1000


def test_the_warning_of_a_plan_is_not_printed_but_returned(capfd: pytest.CaptureFixture[str]) -> None:
    made = ms.plan(models.tiny(), overrides={"typo": "CPU"})
    assert made.warnings and capfd.readouterr() == ("", "")
