"""Advice is given once, with the numbers, and only where it helps."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable

import pytest
from support import compare as c

import moestream as ms


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The advice so far."""
    return [record.getMessage() for record in caplog.records if "n_ubatch" in record.getMessage()]


def test_a_prompt_in_pieces_is_told_about_n_ubatch(
    tiny_moe: Callable[..., pathlib.Path], caplog: pytest.LogCaptureFixture
) -> None:
    path, ids = tiny_moe("Q4_K"), c.tokens(100, 512)
    pieces, whole, cached, resident = ("min", 16), ("min", 128), ("100%", 16), (None, 16)
    for (cache, n_ubatch), expected in ((pieces, 1), (whole, 0), (cached, 0), (resident, 0)):
        caplog.clear()
        stream = None if cache is None else ms.Stream(cache=cache)
        options = {"n_threads": 1, "n_ubatch": n_ubatch, "n_batch": 128}
        with (
            caplog.at_level(logging.WARNING, "moestream"),
            ms.Model(path, stream=stream) as model,
            model.context(256, **options) as context,
        ):
            for _ in range(2):
                context.clear()
                context.decode(ids)
        assert len(said(caplog)) == expected, (cache, n_ubatch, said(caplog))
        if expected:
            assert "100 tokens are computed in 7 pieces of n_ubatch=16" in said(caplog)[0]
