"""Reading ahead names what the next layer will use, for prompts of any length, and never changes a bit."""

from __future__ import annotations

import numpy as np
import pytest
from support import models

import moestream as ms
from moestream.synthetic import Spec
from test_replay import made_up

SPEC = Spec(n_layer=12, n_embd=64, n_ff=32, n_expert=64, n_expert_used=4, n_head=2)


def opened(slots: int, **options: object) -> ms.Model:
    path = models.make(SPEC, "replay")
    slot_bytes = ms.plan(path, stream=True).classes[0].slot_bytes
    return ms.Model(path, stream=ms.Stream(cache=slots * slot_bytes, prefetch="on", **options))


@pytest.mark.parametrize("n_tokens", [1, 4, 8, 9, 20, 30])
def test_with_a_recall_of_one_every_guess_is_used(n_tokens: int) -> None:
    with opened(400, replay=made_up(12, 64, 4), replay_recall=1.0) as model:
        with model.context(64, n_threads=2) as context:
            context.decode([1] * n_tokens, logits="all")
        stats = model.stats()
    assert stats["n_prefetch"] > 0
    assert stats["n_prefetch_useful"] == stats["n_prefetch"]


def test_a_long_prompt_reads_each_expert_of_the_next_layer_once() -> None:
    with opened(12 * 64, replay=made_up(12, 64, 4), replay_recall=1.0) as model:
        with model.context(64, n_threads=2) as context:
            context.decode([1] * 60, logits="all")
        stats = model.stats()
    assert stats["n_reads"] <= 3 * 12 * 64
    assert stats["n_prefetch_useful"] > 0


@pytest.mark.parametrize("n_tokens", [1, 8, 12, 30, 60])
def test_guesses_of_the_router_are_mostly_right_and_change_no_bit(n_tokens: int) -> None:
    tokens = np.random.default_rng(n_tokens).integers(0, 200, n_tokens).tolist()
    with opened(400) as model:
        with model.context(64, n_threads=2) as context:
            streamed = context.decode(tokens, logits="all")
        stats = model.stats()
    with ms.Model(models.make(SPEC, "replay")) as model, model.context(64, n_threads=2) as context:
        resident = context.decode(tokens, logits="all")
    assert np.array_equal(streamed, resident)
    assert stats["n_prefetch"] > 0
    assert stats["n_prefetch_useful"] >= 0.5 * stats["n_prefetch"]
