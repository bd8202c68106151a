"""Recorded routings: reading them, and what this library's cache and a least-recently-used one would read for them.

The format is that of the recordings published by the BigMoeOnEdge project: lines beginning with # hold key=value facts,
then a CSV with the columns phase (0 prompt, 1 decode), step (the token), layer, slot (the rank of the expert), expert.
The project's repository carries none of them.
"""

from __future__ import annotations

import csv
import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Trace:
    """A routing. `ids` is int32 [n_tokens, n_layer, n_expert_used]; the first `n_prompt` tokens are the prompt's."""

    name: str
    n_expert: int
    n_prompt: int
    ids: npt.NDArray[np.int32]


def read(path: Path) -> Trace:
    """The routing in a file. ValueError, naming what is missing, if it is not one or not complete."""
    lines = path.read_text(encoding="utf-8").splitlines()
    facts = dict(re.findall(r"(\w+)=(\S+)", "\n".join(line for line in lines if line.startswith("#"))))
    missing = {"n_layer", "n_expert", "n_expert_used"} - set(facts)
    if missing:
        raise ValueError(f"{path}: no {', '.join(sorted(missing))} in its # lines")
    shape = int(facts["n_layer"]), int(facts["n_expert_used"])
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    steps = sorted({int(row["step"]) for row in rows})
    number = {step: i for i, step in enumerate(steps)}
    ids = np.full((len(steps), *shape), -1, np.int32)
    for row in rows:
        ids[number[int(row["step"])], int(row["layer"]), int(row["slot"])] = int(row["expert"])
    n_prompt = len({row["step"] for row in rows if row["phase"] == "0"})
    # Of a prompt only the last token goes through the last layer: its experts stand for those of the others.
    last = ids[:n_prompt, -1]
    last[(last < 0).any(axis=1)] = ids[n_prompt - 1, -1]
    if (ids < 0).any():
        raise ValueError(f"{path}: token, layer, rank {np.argwhere(ids < 0)[0].tolist()} has no expert")
    return Trace(path.name, int(facts["n_expert"]), n_prompt, ids)


def lru_misses(ids: npt.NDArray[np.int32], n_slots: int) -> list[int]:
    """Experts that a cache of `n_slots`, empty at first, reads for each token, evicting the least recently used."""
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    out = []
    for token in ids:
        misses = 0
        for layer, experts in enumerate(token):
            for expert in experts:
                key = (layer, int(expert))
                misses += key not in held
                if key not in held and len(held) == n_slots:
                    held.popitem(last=False)
                held[key] = None
                held.move_to_end(key)
        out.append(misses)
    return out


def misses(ids: npt.NDArray[np.int32], n_slots: int, n_prompt: int = 1) -> list[int]:
    """Experts that this library's cache reads for the first `n_prompt` tokens, computed at once, and for each behind.

    It evicts the expert that most tokens' visits of its layer passed over, of equals the one whose layer comes last;
    never one that the running pass uses.
    """
    n_layer = ids.shape[1]
    held: list[dict[int, int]] = [{} for _ in range(n_layer)]  # expert: token of its last use, the oldest first
    out = []
    for end in range(n_prompt, len(ids) + 1):
        begin, n_misses = (end - 1 if end > n_prompt else 0), 0
        for layer in range(n_layer):
            used: dict[int, int] = {}  # in the order of the last use
            for token in range(begin, end):
                for expert in ids[token, layer].tolist():
                    used.pop(expert, None)
                    used[expert] = token
            mine = {expert: held[layer].pop(expert) for expert in used if expert in held[layer]}
            for expert in used.keys() - mine.keys():
                if sum(map(len, held)) + len(mine) == n_slots:
                    oldest = [(k, *min(held[k].items(), key=lambda item: item[1])) for k in range(n_layer) if held[k]]
                    _, _, k, old = max(
                        ((begin if k > layer else end) - last, (k - layer - 1) % n_layer, -k, old)
                        for k, old, last in oldest
                    )
                    del held[-k][old]
                mine[expert] = 0
                n_misses += 1
            held[layer].update(used)
        out.append(n_misses)
    return out
