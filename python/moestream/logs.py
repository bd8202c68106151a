"""Log lines of libmoestream and llama.cpp, handed to Python's logging.

The C side keeps lines in a bounded ring and calls nobody back. They are taken after a load and after each call and
given to the loggers "moestream" and "llama.cpp" (a line that came again is given once, with a count). llama.cpp is
kept from WARNING up unless `set_log_level` says otherwise.
"""

from __future__ import annotations

import collections
import logging
import threading
from typing import Literal

from moestream import _native_api as native

Level = Literal["debug", "info", "warn", "error", "none"]

moestream_logger = logging.getLogger("moestream")
llama_logger = logging.getLogger("llama.cpp")

_LEVELS: dict[str, int] = {"debug": 1, "info": 2, "warn": 3, "error": 4, "none": 5}
_PYTHON_LEVEL = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_level = _LEVELS["warn"]
_lock = threading.Lock()
_recent_errors: collections.deque[str] = collections.deque(maxlen=3)
_line = native.new_struct("moestream_log_line")


def set_log_level(level: Level) -> None:
    """Chooses what is kept of llama.cpp's own log: "debug", "info", "warn" (the default), "error" or "none".

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


def drain(explained: bool = False) -> None:
    """Hands all waiting lines to Python's logging. Costs one C call when there is none.

    Args:
        explained: an exception is about to say what happened; llama.cpp's lines about it go out at DEBUG.
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
        if text:
            suffix = f" (repeated {repeats} times)" if repeats else ""
            shown = logging.DEBUG if explained and source else _PYTHON_LEVEL.get(level, logging.INFO)
            logger.log(shown, "%s%s", text, suffix)


def last_llama_error() -> str:
    """What llama.cpp last said went wrong (its latest error lines), "" if nothing; forgets it."""
    drain(explained=True)
    said = "; ".join(_recent_errors)
    _recent_errors.clear()
    return said
