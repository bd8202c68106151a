"""Checks of arguments: each gives the value back, or raises an error that names the argument and shows its value.

Never changes what a value means (no text is read as a number), and loads neither llama.cpp nor numpy by itself.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any


def shown(value: object) -> str:
    """A value for one line of a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def whole(name: str, value: Any, least: int, most: int, note: str = "") -> int:
    """A whole number from `least` to `most`, as an int; numpy's integers are some, a bool is none.

    Args:
        note: said behind the range, for example why it ends there.

    Raises:
        ValueError: anything else.
    """
    try:
        number: int | None = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise ValueError(f"{name} was {shown(value)}; it is a whole number from {least} to {most}{note}")
    return number


def real(name: str, value: Any, least: float, most: float, what: str = "a number") -> float:
    """A number from `least` to `most`; nan is none.

    Raises:
        ValueError: anything else.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise ValueError(f"{name} was {shown(value)}; it is {what} from {least:g} to {most:.15g}")
    return float(value)


def switch(name: str, value: Any, *, or_none: bool = False) -> Any:
    """True or False; with `or_none` also None.

    Raises:
        TypeError: anything else, 0 and 1 among it: an option that was meant for another argument is found so.
    """
    if not isinstance(value, bool) and not (or_none and value is None):
        raise TypeError(f"{name} was {shown(value)}; it is True or False{' or None' if or_none else ''}")
    return value


def one_of(name: str, value: Any, choices: Iterable[str]) -> str:
    """One of the texts in `choices`.

    Raises:
        ValueError: anything else, with what there is.
    """
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} was {shown(value)}; it is one of {', '.join(known)}")
    return value


def utf8(name: str, value: Any) -> bytes:
    """The UTF-8 bytes of a text.

    Raises:
        TypeError: not a str. ValueError: half a surrogate pair, which is what Python makes of bytes that are not UTF-8.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} was {shown(value)}; it is a text (str)")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is no Unicode text: {value[error.start]!r} at {error.start} (bytes that are not UTF-8?)"
        ) from None


def listed(name: str, value: Any, what: str) -> list[Any]:
    """The members of a collection that is no text, no bytes and no mapping.

    Raises:
        TypeError: anything else; `what` says what the members are.
    """
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, Mapping)):
        try:
            return list(value)
        except TypeError:  # an array without dimensions says that it can be iterated, and cannot
            pass
    raise TypeError(f"{name} was {shown(value)}; it is a list of {what}")


def token_list(tokens: Any, n_vocab: int) -> list[int]:
    """Token numbers as a list of int.

    Raises:
        TypeError: not a list of whole numbers. ValueError: one that is not in the vocabulary.
    """
    ids = []
    for token in listed("tokens", tokens, "token numbers"):
        try:
            ids.append(operator.index(token))
        except TypeError:
            raise TypeError(f"a token was {shown(token)}; it is a whole number") from None
        if not 0 <= ids[-1] < n_vocab:
            raise ValueError(f"token {ids[-1]} is not in the vocabulary (0 to {n_vocab - 1})")
    return ids


def token_array(tokens: Any, n_vocab: int) -> Any:
    """One token number or more as a one-dimensional integer array; an array is given back as it is.

    Raises:
        ValueError: another shape, no whole numbers, or one that is not in the vocabulary.
    """
    import numpy as np

    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, OverflowError):  # lists of different lengths, for one
        raise ValueError(f"tokens were {shown(tokens)}; give one or more token numbers") from None
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(f"tokens had the shape {list(ids.shape)}; give one or more token numbers")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"tokens were of type {ids.dtype}; they are whole numbers")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= n_vocab:
        raise ValueError(f"token {low if low < 0 else high} is not in the vocabulary (0 to {n_vocab - 1})")
    return ids
