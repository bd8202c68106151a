"""Log lines of libmoestream and llama.cpp, handed to Python's logging.

The C side keeps lines in a bounded ring and calls nobody back, so no Python runs while a model computes. They are taken
after a load and after each call and given to the loggers "moestream" and "llama.cpp". A line that comes again is given
once, with a count: within one call by the ring, from call to call here, where the count follows when the model or a
context is closed, and about once a minute. llama.cpp is kept from WARNING up unless `set_log_level` says otherwise.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import Literal

from moestream import _native_api as native

Level = Literal["debug", "info", "warn", "error", "none"]

moestream_logger = logging.getLogger("moestream")
llama_logger = logging.getLogger("llama.cpp")

_LEVELS: dict[str, int] = {"debug": 1, "info": 2, "warn": 3, "error": 4, "none": 5}
_PYTHON_LEVEL = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_level = _LEVELS["warn"]
_lock = threading.RLock()
_recent_errors: collections.deque[str] = collections.deque(maxlen=3)
_line = native.new_struct("moestream_log_line")

_REMEMBERED = 64  # lines that are known again
_COUNT_EVERY_S = 60.0


class _Repeated:
    """A line that was given, and how often it came again since then."""

    __slots__ = ("count", "given_at")

    def __init__(self, now: float) -> None:
        self.count = 0
        self.given_at = now


_seen: collections.OrderedDict[tuple[int, int, str], _Repeated] = collections.OrderedDict()


def set_log_level(level: Level) -> None:
    """Chooses what is kept of llama.cpp's log and of this library's: "debug", "info", "warn" (the default), "error" or
    "none".

    It takes effect at once, or at the first use of llama.cpp. Which of the kept lines are shown, and where, is up to
    Python's logging: the logger's name is "llama.cpp".

    Raises:
        ValueError: another level.
    """
    global _level
    if level not in _LEVELS:
        raise ValueError(f"level was {level!r}; it is one of {', '.join(_LEVELS)}")
    _level = _LEVELS[level]
    for name, number in _PYTHON_LEVEL.items():
        if name == _level:
            llama_logger.setLevel(number)
    if native.is_bound():
        capture()


def capture() -> None:
    """Makes the bound libllama log into the ring, at the chosen level."""
    err = native.new_error()
    native.check(native.lib.moestream_log_capture(native.ffi.NULL, _level, err), err)


def drain(explained: bool = False, quiet: bool = False) -> None:
    """Hands all waiting lines to Python's logging. Costs one C call when there is none.

    Args:
        explained: an exception is about to say what happened; llama.cpp's lines about it go out at DEBUG.
        quiet: all lines go out at DEBUG: they are about a measurement of our own, not about what the caller does.
    """
    take = native.lib.moestream_log_take
    with _lock:
        lines = []
        while take(_line):
            text = native.ffi.string(_line.text).decode("utf-8", "replace").rstrip()
            lines.append((_line.level, _line.source, _line.repeats, _line.dropped, text))
    for level, source, repeats, dropped, text in lines:
        logger = llama_logger if source else moestream_logger
        if dropped:
            moestream_logger.warning("%d log lines were lost because nobody took them", dropped)
        if source and level == 4:
            _recent_errors.append(text)
        if not text:
            continue
        shown = logging.DEBUG if quiet or (explained and source) else _PYTHON_LEVEL.get(level, logging.INFO)
        for n, known in _count(source, shown, text, repeats):
            logger.log(shown, "%s%s", known, f" (repeated {n} times)" if n else "")


def _count(source: int, level: int, text: str, repeats: int) -> list[tuple[int, str]]:
    """What to log of a line that came 1 + repeats times: (repetitions, text) pairs, none while it is only counted."""
    now = time.monotonic()
    with _lock:
        key = (source, level, text)
        known = _seen.get(key)
        if known is None:
            _seen[key] = _Repeated(now)
            if len(_seen) > _REMEMBERED:
                _forget_oldest()
            return [(repeats, text)]
        _seen.move_to_end(key)
        known.count += 1 + repeats
        if now - known.given_at < _COUNT_EVERY_S:
            return []
        n, known.count, known.given_at = known.count, 0, now
        return [(n, text)]


def _forget_oldest() -> None:
    (source, level, text), known = _seen.popitem(last=False)
    if known.count:
        logger = llama_logger if source else moestream_logger
        logger.log(level, "%s (repeated %d times)", text, known.count)


def forget() -> None:
    """Gives the counts that are still owed, and takes the next line for a new one. Called where a model or a context
    begins and ends."""
    drain()
    with _lock:
        while _seen:
            _forget_oldest()


def last_llama_error() -> str:
    """What llama.cpp last said went wrong (its latest error lines), "" if nothing; forgets it."""
    drain(explained=True)
    said = "; ".join(_recent_errors)
    _recent_errors.clear()
    return said
