"""Replaying a recorded routing: what is read is what a simulation of the cache reads, byte for byte, and not more than
a least-recently-used cache would.

CI replays a made-up routing with the habits of real ones (some experts often, the last token's experts again).
MOESTREAM_TRACES may name a folder with recordings (*.route.csv, see bench/traces.py), which are replayed as well.
"""

from __future__ import annotations

import os
import pathlib
import sys

import numpy as np
import numpy.typing as npt
import pytest
from support import models

import moestream as ms
from moestream.synthetic import Spec

sys.path.insert(0, str(models.REPO / "bench"))
import traces

SHARES = (0.05, 0.10, 0.15, 0.25, 0.40)
N_TOKENS = 60


def made_up(n_layer: int, n_expert: int, n_used: int) -> npt.NDArray[np.int32]:
    """[N_TOKENS, n_layer, n_used]: half of each token's experts are the last token's, the others by a Zipf law."""
    rng = np.random.default_rng(3)
    weight = 1.0 / np.arange(1, n_expert + 1)
    out = np.empty((N_TOKENS, n_layer, n_used), np.int32)
    for layer in range(n_layer):
        names = rng.permutation(n_expert)
        for token in range(N_TOKENS):
            kept = rng.permutation(out[token - 1, layer])[: n_used // 2] if token else np.empty(0, np.int32)
            others = [e for e in names[rng.choice(n_expert, n_expert, False, weight / weight.sum())] if e not in kept]
            out[token, layer] = [*kept, *others[: n_used - len(kept)]]
    return out


def recordings() -> list[str]:
    """ "made up", and the recordings there are."""
    folder = os.environ.get("MOESTREAM_TRACES")
    return ["made up", *sorted(map(str, pathlib.Path(folder).glob("*.route.csv")))] if folder else ["made up"]


@pytest.mark.parametrize("source", recordings())
def test_reads_are_those_of_a_simulated_cache(source: str) -> None:
    if source == "made up":
        n_layer, n_expert = 12, 64
        ids = made_up(n_layer, n_expert, 4)
    else:
        trace = traces.read(pathlib.Path(source))
        ids, n_expert = trace.ids, trace.n_expert
        n_layer = ids.shape[1]
    spec = Spec(n_layer=n_layer, n_embd=64, n_ff=32, n_expert=n_expert, n_expert_used=ids.shape[2], n_head=2)
    path = models.make(spec, "replay")
    plan = ms.plan(path, stream=True)
    slot_bytes = plan.classes[0].slot_bytes
    assert len(plan.classes) == 1
    for share in SHARES:
        n_slots = max(int(share * n_layer * n_expert), 2 * ids.shape[2])
        stream = ms.Stream(cache=n_slots * slot_bytes, prefetch="off", replay=ids)
        with ms.Model(path, stream=stream) as model, model.context(len(ids), n_threads=1) as context:
            assert model.stats()["n_slots"] == n_slots
            misses, before = [], 0
            for _ in range(len(ids)):
                context.decode([1])
                seen = model.stats()["n_misses"]
                misses.append(seen - before)
                before = seen
            stats = model.stats()
        assert misses == traces.misses(ids, n_slots)
        assert sum(misses) <= 1.01 * sum(traces.lru_misses(ids, n_slots))
        assert stats["n_reads"] == 3 * sum(misses), "gate, up and down of each, once"
        assert stats["slice_bytes"] == sum(misses) * plan.expert_bytes // (n_layer * n_expert)
        print(
            f"{pathlib.Path(source).name}, {100 * share:.0f} %: {stats['slice_bytes'] / len(ids):.0f} bytes per token"
        )


@pytest.mark.parametrize("n_prompt", [9, 30])
def test_a_prompt_leaves_what_its_last_tokens_chose(n_prompt: int) -> None:
    ids = made_up(12, 64, 4)
    path = models.make(Spec(n_layer=12, n_embd=64, n_ff=32, n_expert=64, n_expert_used=4, n_head=2), "replay")
    slot_bytes = ms.plan(path, stream=True).classes[0].slot_bytes
    for n_slots in (70, 120, 300):  # a layer's at least
        stream = ms.Stream(cache=n_slots * slot_bytes, prefetch="off", replay=ids)
        with ms.Model(path, stream=stream) as model, model.context(len(ids), n_threads=1) as context:
            misses, before = [], 0
            for n in [n_prompt] + [1] * (len(ids) - n_prompt):
                context.decode([1] * n, logits="all")  # else the last layer sees one token only
                seen = model.stats()["n_misses"]
                misses.append(seen - before)
                before = seen
        assert misses == traces.misses(ids, n_slots, n_prompt)
        one_by_one = traces.misses(ids, n_slots)[n_prompt:]
        assert sum(misses[1:6]) <= 1.2 * sum(one_by_one[:5]), "nearly as if the prompt had come token by token"


def test_a_wrong_recording_is_refused() -> None:
    path = models.tiny()
    plan = ms.plan(path)
    ids = np.zeros((3, plan.n_layer, plan.n_expert_used), np.int32)
    for wrong, words in (
        (ids[:, :1], "replay has the shape"),
        (ids - 1, "replay names expert"),
        (ids + plan.n_expert, f"there are {plan.n_expert}"),
    ):
        with pytest.raises(ms.InvalidError, match=words):
            ms.Model(path, stream=ms.Stream(cache="min", replay=wrong))
    with pytest.raises(ValueError, match="replay_recall was 2"):
        ms.Stream(replay_recall=2.0)
    with pytest.raises(ValueError, match="n_tokens, n_layer, n_expert_used"):
        ms.Stream(replay=ids[0])
