"""Advice is given once, with the numbers, and only where it helps."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable

import pytest
from support import compare as c
from support import models

import moestream as ms
from moestream.disk import slice_rate


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The advice so far."""
    return [record.getMessage() for record in caplog.records if "n_ubatch" in record.getMessage()]


def test_a_prompt_in_pieces_is_told_about_n_ubatch(
    tiny_moe: Callable[..., pathlib.Path], caplog: pytest.LogCaptureFixture
) -> None:
    path, ids = tiny_moe("Q4_K"), c.tokens(100, 512)
    pieces, both, whole, cached, resident = ("min", 16), ("min", 32), ("min", 128), ("100%", 16), (None, 16)
    for (cache, n_ubatch), expected in ((pieces, 1), (both, 1), (whole, 0), (cached, 0), (resident, 0)):
        caplog.clear()
        stream = None if cache is None else ms.Stream(cache=cache)
        options = {"n_threads": 1, "n_ubatch": n_ubatch, "n_batch": n_ubatch if n_ubatch == 32 else 128}
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
            assert f"100 tokens are computed in {-(-100 // n_ubatch)} pieces of n_ubatch={n_ubatch}" in said(caplog)[0]
            larger = "n_ubatch (up to n_batch=128)" if n_ubatch == 16 else "n_ubatch together with n_batch (now 32)"
            assert f"a larger {larger} reads" in said(caplog)[0]


def test_measuring_the_disk_gives_no_advice_about_its_own_cache(caplog: pytest.LogCaptureFixture) -> None:
    path = models.tiny(n_layer=12)
    assert ms.plan(path, stream=True).min_cache_bytes < ms.plan(path, stream=True).cycle_bytes
    with caplog.at_level(logging.INFO, "moestream"):
        assert slice_rate(path, ms.Stream(cache="min"), 1 << 20) > 0
        assert caplog.text == ""
        ms.Model(path, stream=ms.Stream(cache="min")).close()
        assert "smaller than what one token touches" in caplog.text
