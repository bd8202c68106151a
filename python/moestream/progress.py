"""Progress of long work: a bar on stderr, or the caller's own function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

ProgressOption = bool | Callable[[float], object]


class Progress:
    """Shows how far one piece of work is, from 0 to 1.

    Args:
        option: True for a bar on stderr, a function called with the fraction done, False for nothing.
        title: what is being done, in a word or two.
        only_tty: True draws no bar where stderr is not a terminal.
    """

    def __init__(self, option: ProgressOption, title: str, only_tty: bool = False) -> None:
        self._call: Callable[[float], object] | None = option if callable(option) else None
        self._bar: Any = None
        if option is True and (not only_tty or sys.stderr.isatty()):
            from tqdm import tqdm

            self._bar = tqdm(total=100, desc=title, file=sys.stderr, unit="%", leave=False, delay=0.3)

    @property
    def wanted(self) -> bool:
        """Whether anybody looks."""
        return self._call is not None or self._bar is not None

    def update(self, fraction: float) -> None:
        """Says how much is done."""
        if self._call is not None:
            self._call(fraction)
        if self._bar is not None:
            self._bar.update(min(100.0, 100 * fraction) - self._bar.n)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
