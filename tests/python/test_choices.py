"""What streaming chooses is shown with its reason. (The measurement of the depth: tests/c/tune_test.c.)"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import moestream as ms


def test_small_models_are_not_measured(tiny_moe: Callable[..., pathlib.Path]) -> None:
    with ms.Model(tiny_moe(), stream=ms.Stream(cache="min", io="pread", direct="off", prefetch="off")) as model:
        chosen = model.choices()
        assert chosen == {
            "io": "pread: asked for",
            "direct": "no: asked for",
            "queue_depth": chosen["queue_depth"],
            "prefetch": "off: asked for",
        }
        depth, why = chosen["queue_depth"].split(": ")
        assert 2 <= int(depth) <= 128 and why == "about 2 MiB of slices; not measured"
        assert model.stats()["load_expert_bytes"] == 0
    with ms.Model(tiny_moe(), stream=ms.Stream(cache="min", queue_depth=7)) as model:
        chosen = model.choices()
        assert chosen["queue_depth"] == "7: asked for"
        assert chosen["io"].split(": ")[1].startswith("auto")
        assert chosen["direct"].split(": ")[1].startswith("auto")
        assert chosen["prefetch"].startswith("on: auto")
        assert model.stats()["queue_depth"] == 7
    with ms.Model(tiny_moe()) as model:
        assert model.choices() == {}
