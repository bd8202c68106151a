"""Every Mixture-of-Experts architecture that llama.cpp can write a test model of, streamed against resident.

There is no code per architecture in this library, so this list is the proof, and the alarm: the models come from
upstream's own tool, and an architecture that appears or disappears fails `test_the_list_is_upstreams`.

In CI each architecture runs at every pair of threads (1, 2) and n_ubatch (1, 8, 64), each in two of the six pairs of
cache (minimum, half, none) and engine, rotating over architectures; `--full` runs all 36 combinations for each.

Upstream's models have two experts and use both. So each architecture runs a second time with eight, of which two are
used (`archs.wide_path`): experts are selected, evicted and read again. In CI that is one setting for each number of
threads, rotating; `--full` runs all of them.
"""

from __future__ import annotations

import itertools
import pathlib
from dataclasses import replace

import pytest
from support import archs, record
from support import compare as c

import moestream as ms

_NAMES = """
    afmoe arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deepseek deepseek2 deepseek32 deepseek4
    dots1 dots3note ernie4_5-moe ernie4_5 exaone-moe glm-dsa glm4moe glm5-next gpt-oss granite granitemoe grok
    grovemoe hunyuan-moe hy_v3 hy_v4 kimi-k3 kimi-linear laguna lfm2moe llada-moe llama llama4 maple mellum
    mimo2 minicpm minimax-01 minimax-m2 minimax-m3 mistral3 mistral4 olmoe paddleocr phimoe qwen2moe qwen35moe
    qwen3moe qwen3next qwen3vlmoe qwen4exp refact rnd1 smallthinker
"""
ARCHS = tuple(_NAMES.split())
WITHOUT_EXPERTS: tuple[str, ...] = ("ernie4_5", "paddleocr")

# Has expert weights in its file, but upstream's graph for it never uses them (and computes no FFN): nothing to stream.
UNUSED_EXPERTS = ("refact",)
# Diffusion models look both ways and keep no KV cache: llama.cpp takes at most n_ubatch tokens of them in one call.
NON_CAUSAL = ("llada-moe", "rnd1")

SETTINGS = [c.Setting(n_threads, n_ubatch, 256) for n_threads in (1, 2) for n_ubatch in (1, 8, 64)]
VARIANTS = [c.Variant(cache, io) for io, cache in itertools.product(c.ENGINES, ("min", 0.5, 0))]
WORK = c.prompts_then_tokens((12, 64), 16)


def chosen(index: int, full: bool) -> dict[c.Variant, list[c.Setting]]:
    """Settings by variant for one architecture."""
    out: dict[c.Variant, list[c.Setting]] = {}
    for j, setting in enumerate(SETTINGS):
        turn = index + j
        picked = VARIANTS if full else [VARIANTS[turn % 3], VARIANTS[3 + (turn + 1) % 3]]
        for variant in picked:
            out.setdefault(variant, []).append(setting)
    return out


def test_the_list_is_upstreams() -> None:
    found = sorted(path.name.removesuffix("-moe.gguf") for path in archs.folder().glob("*-moe.gguf"))
    assert found == sorted(ARCHS)
    assert len(ARCHS) == 55
    assert len(ARCHS) - len(WITHOUT_EXPERTS) - len(UNUSED_EXPERTS) == 52
    dense = [name for name in ARCHS if ms.plan(archs.path(name)).expert_bytes == 0]
    assert dense == list(WITHOUT_EXPERTS)


def compare_all(
    arch: str, path: pathlib.Path, choice: dict[c.Variant, list[c.Setting]], kind: str, name: str
) -> c.Tally:
    """Compares one model in all of `choice`; records what was found."""
    tally = c.Tally()
    unused = arch in UNUSED_EXPERTS
    try:
        with c.reference(path) as ref:
            for variant, settings in choice.items():
                if arch in NON_CAUSAL:
                    settings = [replace(setting, n_batch=setting.n_ubatch) for setting in settings]
                c.compare(ref, "12 and 64", WORK, settings, [variant], tally, used=not unused)
    except BaseException as error:
        record.write(kind, name, False, str(error))
        raise
    record.write(kind, name, True, "upstream's graph uses no experts" if unused else "")
    return tally


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_streams_bit_for_bit(arch: str, full_matrix: bool) -> None:
    path = archs.path(arch)
    if arch in WITHOUT_EXPERTS:
        with pytest.raises(ms.UnsupportedError):
            ms.Model(path, stream=ms.Stream(cache="min"))
        record.write("architecture", arch, False, "upstream's test model has no experts; streaming it is refused")
        return
    tally = compare_all(arch, path, chosen(ARCHS.index(arch), full_matrix), "architecture", arch)
    assert tally.fallbacks == 0
    assert (tally.misses == 0) == (arch in UNUSED_EXPERTS)


@pytest.mark.parametrize("arch", [name for name in ARCHS if name not in WITHOUT_EXPERTS])
def test_every_architecture_selects_among_eight_experts(arch: str, full_matrix: bool) -> None:
    choice = chosen(ARCHS.index(arch), full_matrix)
    if not full_matrix:  # of the first variants: one setting with one thread, one with two
        by_setting = {setting: variant for variant, settings in choice.items() for setting in settings}
        turn = ARCHS.index(arch)
        picked = [SETTINGS[turn % 3], SETTINGS[3 + (turn + 1) % 3]]
        choice = {}
        for setting in picked:
            choice.setdefault(by_setting[setting], []).append(setting)
    path = archs.wide_path(arch)
    tally = compare_all(arch, path, choice, "wide architecture", arch)
    if arch in UNUSED_EXPERTS:
        return
    assert tally.misses > 2 * ms.plan(path).n_layer, "two experts of eight are not all that was chosen"
    assert tally.evictions > 0 or not any(variant.cache == "min" for variant in choice)


def test_the_rotation_covers_every_pair() -> None:
    seen = {
        (variant, setting)
        for index in range(6)
        for variant, settings in chosen(index, False).items()
        for setting in settings
    }
    assert seen == set(itertools.product(VARIANTS, SETTINGS))
