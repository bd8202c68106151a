"""What can go wrong, as exceptions.

Each class stands for one moestream_status and is a built-in exception as well, so that `except OSError` or
`except ValueError` does what a Python programmer expects. Every error carries `status` (a moestream_status number),
`os_errno` (0 where no system call failed) and `message` (one line, past tense, with the facts).
"""

from __future__ import annotations

import errno as _errno
from typing import Any

OK = 0
INVALID = -1
NOMEM = -2
IO = -3
EOF = -4
FORMAT = -5
UNSUPPORTED = -6
BUSY = -7
CLOSED = -8
CORRUPT = -9
INTERNAL = -10


class MoestreamError(Exception):
    """Base of all errors of this package."""

    default_status = INTERNAL

    def __init__(
        self, message: str, *, status: int | None = None, os_errno: int = 0, filename: str | None = None
    ) -> None:
        del filename  # ReadError keeps it; the others are told so that all are made alike
        self.args = (message,)
        self.message = message
        self.status = self.default_status if status is None else status
        self.os_errno = os_errno

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.status, self.os_errno, getattr(self, "filename", None))


def _rebuild(cls: type[MoestreamError], message: str, status: int, os_errno: int, filename: str | None) -> Any:
    return cls(message, status=status, os_errno=os_errno, filename=filename)


class InvalidError(MoestreamError, ValueError):
    """An argument or option made no sense (MOESTREAM_ERR_INVALID)."""

    default_status = INVALID


class ContextFullError(InvalidError):
    """The tokens did not fit into what is left of the context; the message has the numbers."""


class OutOfMemoryError(MoestreamError, MemoryError):
    """Memory was refused, or a budget is too small; the message has the number (MOESTREAM_ERR_NOMEM)."""

    default_status = NOMEM


class ReadError(MoestreamError, OSError):
    """The system refused an open or a read; `errno` and, where known, `filename` are set (MOESTREAM_ERR_IO)."""

    default_status = IO

    def __init__(
        self, message: str, *, status: int | None = None, os_errno: int = 0, filename: str | None = None
    ) -> None:
        super().__init__(message, status=status, os_errno=os_errno)
        self.errno = os_errno or None
        self.strerror = message
        self.filename = filename


class FileMissingError(ReadError, FileNotFoundError):
    """A ReadError whose cause is that there is no such file."""


class FormatError(MoestreamError, ValueError):
    """Not a GGUF, or one whose numbers contradict each other (MOESTREAM_ERR_FORMAT)."""

    default_status = FORMAT


class TruncatedError(ReadError, FormatError):
    """A file ended before the bytes it promised (MOESTREAM_ERR_EOF)."""

    default_status = EOF


class UnsupportedError(MoestreamError, RuntimeError):
    """Understood, but this build, model or llama.cpp cannot do it (MOESTREAM_ERR_UNSUPPORTED)."""

    default_status = UNSUPPORTED


class MissingFunctionError(UnsupportedError, AttributeError):
    """A function of llama.cpp that this build or the loaded library does not have, by name."""


class BusyError(MoestreamError, RuntimeError):
    """Still in use (MOESTREAM_ERR_BUSY)."""

    default_status = BUSY


class ClosedError(MoestreamError, RuntimeError):
    """Used after close, or aborted by the caller (MOESTREAM_ERR_CLOSED)."""

    default_status = CLOSED


class CorruptError(MoestreamError, RuntimeError):
    """Bytes in memory differed from what was read first (MOESTREAM_ERR_CORRUPT)."""

    default_status = CORRUPT


class InternalError(MoestreamError, RuntimeError):
    """A defect in this library, or a failure that llama.cpp did not explain (MOESTREAM_ERR_INTERNAL)."""

    default_status = INTERNAL


_CLASSES: dict[int, type[MoestreamError]] = {
    INVALID: InvalidError,
    NOMEM: OutOfMemoryError,
    IO: ReadError,
    EOF: TruncatedError,
    FORMAT: FormatError,
    UNSUPPORTED: UnsupportedError,
    BUSY: BusyError,
    CLOSED: ClosedError,
    CORRUPT: CorruptError,
    INTERNAL: InternalError,
}


def from_status(status: int, message: str, os_errno: int = 0, filename: str | None = None) -> MoestreamError:
    """The exception for a moestream_status other than OK; an unknown number becomes InternalError."""
    cls = _CLASSES.get(status, InternalError)
    if cls is ReadError and os_errno == _errno.ENOENT:
        cls = FileMissingError
    return cls(message or f"the call failed with status {status}", status=status, os_errno=os_errno, filename=filename)
