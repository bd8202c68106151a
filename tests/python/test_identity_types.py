"""Every weight type that experts can have: streamed logits are the resident ones, bit for bit, with evictions going on.

In CI each type runs all prompts at all n_ubatch, with engine, cache and direct rotating so that every pair of them
occurs for every n_ubatch; `--full` runs every combination for every type.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from support import compare as c
from support import models, record

import moestream as ms
from moestream._block_types import BLOCK_TYPES

PROMPTS = (1, 7, 8, 64, 300)
UBATCHES = (8, 64, 512)
# The tiny model has 32 experts in one size class and uses 2 of 8: its minimum is 4 slots.
VARIANTS = [
    c.Variant(cache, io, direct) for cache, io, direct in itertools.product(("min", 0.5), c.ENGINES, ("auto", "off"))
]
TYPES = tuple(BLOCK_TYPES)
WORK = c.prompts_then_tokens(PROMPTS, 4)


def chosen(index: int, n_ubatch: int, full: bool) -> list[c.Variant]:
    """The variants for a type: all with `full`, else one with cache "min" and one with half, engines and direct
    rotating by type and n_ubatch."""
    if full:
        return VARIANTS
    turn = index + UBATCHES.index(n_ubatch)
    return [VARIANTS[turn % 4], VARIANTS[4 + (turn + 3) % 4]]


@pytest.mark.parametrize("name", TYPES)
def test_every_weight_type_streams_bit_for_bit(name: str, tiny_moe: Callable[..., Path], full_matrix: bool) -> None:
    path = tiny_moe(name)
    by_variant: dict[c.Variant, list[c.Setting]] = {}
    for n_ubatch in UBATCHES:
        for variant in chosen(TYPES.index(name), n_ubatch, full_matrix):
            by_variant.setdefault(variant, []).append(c.Setting(1, n_ubatch))
    tally = c.Tally()
    try:
        with c.reference(path) as ref:
            for variant, settings in by_variant.items():
                c.compare(ref, "prompts", WORK, settings, [variant], tally)
            two_threads = [c.Setting(2, u) for u in (UBATCHES if full_matrix else UBATCHES[1:2])]
            c.compare(ref, "8 and 64", c.prompts_then_tokens((8, 64), 2), two_threads, [VARIANTS[0]], tally)
    except BaseException as error:
        record.write("type", name, False, str(error))
        raise
    assert tally.evictions > 0
    assert tally.fallbacks == 0
    record.write("type", name, True, "")


def test_the_reads_were_direct_where_the_table_says_so(tiny_moe: Callable[..., Path]) -> None:
    path = tiny_moe("Q4_K")
    try:
        model = ms.Model(path, stream=ms.Stream(cache="min", direct="on"))
    except ms.UnsupportedError as error:
        pytest.skip(f"needs O_DIRECT: {error}")
    with model:
        assert model.stats()["direct"]
    for variant in VARIANTS:
        with c.streamed(path, variant) as streamed:
            assert streamed.stats()["direct"] == (variant.direct == "auto")


def test_the_rotation_covers_every_pair() -> None:
    seen = {
        (variant, n_ubatch)
        for index in range(len(TYPES))
        for n_ubatch in UBATCHES
        for variant in chosen(index, n_ubatch, False)
    }
    assert seen == set(itertools.product(VARIANTS, UBATCHES))


def test_the_table_in_the_docs_says_what_was_found() -> None:
    """Every result of this checkout's last runs is a row of docs/support.md (tools/support_table.py writes it)."""
    text = (models.REPO / "docs" / "support.md").read_text(encoding="utf-8")
    for result in record.read():
        row = f"| {result['name']} | {'yes' if result['identical'] else 'no'} |"
        assert row in text, f"{result['kind']} {result['name']}: run tools/support_table.py"
