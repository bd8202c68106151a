"""The demo model, a real language model: 256 greedy tokens with every cache, reader, path and thread count of issue 2.

In CI the 32 combinations are cut to five in which each value of each option appears; `--full` runs all. The resident
tokens and logits are computed once per thread count, the streamed contexts are fed the same tokens.
"""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import compare

import moestream as ms

TOKENS = 256
QUESTION = [{"role": "user", "content": "Explain in a few sentences why the sky is blue."}]
ALL = list(itertools.product(("min", "10%", "50%", "100%"), ("io_uring", "pread"), ("on", "off"), (1, 2)))
FEW = [ALL[i] for i in (0, 7, 13, 18, 27)]

Logits = npt.NDArray[np.float32]


def resident(path: pathlib.Path, n_threads: int) -> tuple[list[int], list[int], list[Logits]]:
    """Prompt, greedy tokens and their logits of the resident model."""
    with (
        ms.Model(path, load_mode="none", use_extra_bufts=False) as model,
        model.context(512, n_threads=n_threads) as ctx,
    ):
        prompt = model.tokenize(model.apply_chat_template(QUESTION), add_special=False, parse_special=True)
        rows = [np.array(ctx.decode(prompt)[-1])]
        out: list[int] = []
        for _ in range(TOKENS):
            out.append(int(rows[-1].argmax()))
            rows.append(np.array(ctx.decode([out[-1]])[-1]))
        return prompt, out, rows


@pytest.fixture(scope="module")
def references(demo_model: pathlib.Path) -> dict[int, Any]:
    """What the resident model gives with 1 and with 2 threads."""
    return {n: resident(demo_model, n) for n in (1, 2)}


def test_the_reference_is_english(demo_model: pathlib.Path, references: dict[int, Any]) -> None:
    """Words a person would use on the subject; a broken model gives none of them."""
    with ms.Model(demo_model, vocab_only=True) as model:
        text = model.detokenize(references[2][1]).lower()
    assert sum(word in text for word in ("sky", "blue", "light", "the")) >= 3, text


def test_256_tokens_are_the_resident_models_bit_for_bit(
    demo_model: pathlib.Path, references: dict[int, Any], full_matrix: bool
) -> None:
    """Every logit of the prompt's last token and of 256 more."""
    for cache, io, direct, n_threads in ALL if full_matrix else FEW:
        prompt, out, rows = references[n_threads]
        stream = ms.Stream(cache=cache, io=compare.engine(io), direct=direct)  # type: ignore[arg-type]
        with ms.Model(demo_model, stream=stream) as model, model.context(512, n_threads=n_threads) as ctx:
            where = f"cache {cache}, {io}, direct {direct}, {n_threads} thread(s)"
            assert np.array_equal(ctx.decode(prompt)[-1].view(np.uint32), rows[0].view(np.uint32)), where
            for i, token in enumerate(out):
                got = ctx.decode([token])[-1]
                assert np.array_equal(got.view(np.uint32), rows[i + 1].view(np.uint32)), f"{where}, token {i}"
            assert model.stats()["n_ops"] > TOKENS, where
