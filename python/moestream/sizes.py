"""Byte sizes as people write them: 8589934592, "8GiB", "512MB", "1.5G", and for a cache "25%", "auto", "min".

KB, MB, GB, TB are powers of 1000; KiB and the rest are powers of 1024, and so are the bare letters K, M, G, T
(as in llama.cpp's and most system tools). Nothing else is guessed: a sign, an unknown unit, nan or inf is an error.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

_UNITS: dict[str, int] = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power

_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")
_PERCENT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*%")
_MAX_BYTES = 2**63 - 1


def parse_size(value: int | str, what: str = "size") -> int:
    """Bytes of a size given as a number or as text.

    Raises:
        ValueError: negative, not a whole number of bytes that fits 63 bits, or not a size at all; names `what`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f'{what} was {value!r}; a size is a number of bytes or text such as "8GiB"')
    if isinstance(value, int):
        result = value
    else:
        match = _SIZE.fullmatch(value.strip())
        if match is None or match.group(2).lower() not in _UNITS:
            raise ValueError(f'{what} was {value!r}; a size is a number of bytes or text such as "8GiB" or "512MB"')
        factor = _UNITS[match.group(2).lower()]
        digits = match.group(1)
        result = int(digits) * factor if digits.isdigit() else round(float(digits) * factor)
    if result < 0:
        raise ValueError(f"{what} was {value!r}; a size cannot be negative")
    if result > _MAX_BYTES:
        raise ValueError(f"{what} was {value!r}; that is more than 2**63 - 1 bytes")
    return result


@dataclass(frozen=True)
class CacheSize:
    """A cache size that may depend on the model and the machine.

    Attributes:
        kind: "bytes", "percent" (of the slab that holds every streamed expert), "auto" (by the memory that is free)
            or "min" (the smallest that opens).
        value: bytes or percent; 0 for the other kinds.
    """

    kind: Literal["bytes", "percent", "auto", "min"]
    value: float = 0

    @property
    def needs_plan(self) -> bool:
        """Whether the number of bytes depends on the model's header."""
        return self.kind in ("percent", "min")

    def resolve(self, full_cache_bytes: int, min_cache_bytes: int) -> int:
        """Bytes, given the two bounds of a plan. "auto" gives 0, which the library takes as "choose"."""
        if self.kind == "percent":
            return max(1, math.ceil(full_cache_bytes * self.value / 100)) if self.value else 0
        if self.kind == "min":
            return min_cache_bytes
        return int(self.value)

    @property
    def is_none(self) -> bool:
        """Whether nothing is to be kept between operations (a size of 0)."""
        return self.kind in ("bytes", "percent") and self.value == 0


def parse_cache(value: int | str) -> CacheSize:
    """Reads a cache size: what parse_size takes, or "P%", "auto", "min".

    Raises:
        ValueError: anything else, with what is accepted.
    """
    if isinstance(value, str):
        text = value.strip().lower()
        if text == "auto":
            return CacheSize("auto")
        if text == "min":
            return CacheSize("min")
        percent = _PERCENT.fullmatch(text)
        if percent:
            number = float(percent.group(1))
            if number > 100:
                raise ValueError(f"cache was {value!r}; more than 100% of the experts cannot be kept")
            return CacheSize("percent", number)
        if not _SIZE.fullmatch(text):
            raise ValueError(f'cache was {value!r}; use a size such as "8GiB", a share such as "25%", "min" or "auto"')
    return CacheSize("bytes", parse_size(value, "cache"))


def format_bytes(n: float) -> str:
    """`n` bytes for people, three significant digits: "1.23 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1023.95:
            return f"{n:.0f} {unit}" if unit == "B" or abs(n) >= 100 else f"{n:.{2 if abs(n) < 10 else 1}f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"
