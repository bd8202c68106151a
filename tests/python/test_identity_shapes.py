"""Models of every shape the generator makes: streamed logits are the resident ones, bit for bit, and reads are counted.

Few and many experts, one or several per token, odd row counts, mixed types, any alignment and tensor order, expert
biases, fused and shared experts, leading dense blocks. Alternative expert groups (chexps) come with grovemoe among the
architectures.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from support import compare as c
from support import models, record

import moestream as ms
from moestream.synthetic import Spec

SHAPES: dict[str, Spec] = {
    name: models.MODELS[name]
    for name in (
        "many_experts",
        "top1",
        "mixtral",
        "gpt_oss_like",
        "fused_gate_up",
        "leading_dense",
        "shared_experts",
        "mixed_layers",
        "mixed_projections",
        "aligned_4096",
        "reversed_order",
        "shuffled_order",
    )
} | {
    "512_experts": Spec(n_layer=2, n_expert=512, n_expert_used=10, n_ff=32),
    "all_experts_used": Spec(n_expert=4, n_expert_used=4),
    "one_expert": Spec(n_expert=1, n_expert_used=1),
    "odd_rows_f16": Spec(n_ff=101, expert_type=(("Q4_K", "Q6_K", "F16"),) * 4),
    "odd_rows_f32": Spec(n_ff=33, expert_type="F32"),
    "rows_of_one_block": Spec(n_ff=32, expert_type="Q4_0"),
    "aligned_8": Spec(alignment=8, expert_type="Q6_K"),
    "aligned_64": Spec(alignment=64, expert_type="Q5_K"),
    "gpt_oss_many": Spec(arch="gpt-oss", expert_type="MXFP4", n_expert=32, n_expert_used=4),
    "fused_mixed": Spec(arch="hy_v3", fused_gate_up=True, expert_type=(("Q4_K", "Q4_K", "Q6_K"),) * 4),
    "one_layer": Spec(n_layer=1, n_expert=16, n_expert_used=3),
}
SETTINGS = [c.Setting(1, 8), c.Setting(1, 64), c.Setting(1, 512)]
VARIANTS = [c.Variant("min", "io_uring"), c.Variant("min", "pread", "off"), c.Variant(0.5, "pread"), c.Variant(0)]
WORK = c.prompts_then_tokens((1, 7, 64, 130), 4)


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_streams_bit_for_bit(name: str, full_matrix: bool) -> None:
    path = models.make(SHAPES[name], name)
    index = list(SHAPES).index(name)
    tally = c.Tally()
    try:
        with c.reference(path) as ref:
            for i, variant in enumerate(VARIANTS):
                settings = SETTINGS if full_matrix else [SETTINGS[(index + i) % 3], SETTINGS[(index + i + 1) % 3]]
                c.compare(ref, "prompts", WORK, settings, [variant], tally)
            c.compare(ref, "7 and 64", c.prompts_then_tokens((7, 64), 2), [c.Setting(2, 64)], VARIANTS[:1], tally)
    except BaseException as error:
        record.write("shape", name, False, str(error))
        raise
    assert tally.fallbacks == 0
    plan = ms.plan(path, stream=ms.Stream(cache="min"))
    assert tally.evictions > 0 or plan.min_cache_bytes == plan.full_cache_bytes
    record.write("shape", name, True, "")


def test_every_slab_holds_its_file_slice() -> None:
    """S2 from the outside: with verify the bytes in each slot are compared on every use, with evictions going on."""
    for name in ("many_experts", "mixed_layers"):
        path = models.make(SHAPES[name], name)
        tally = c.Tally()
        with c.reference(path) as ref:
            variants = [c.Variant("min", io, direct, verify=True) for io in c.ENGINES for direct in ("auto", "off")]
            c.compare(ref, "verify", c.prompts_then_tokens((64,), 8), [c.Setting(1, 64)], variants, tally)
        assert tally.evictions > 0


def test_slices_start_at_any_multiple_of_the_alignment() -> None:
    """The point of S2: models whose slices start on a page prove nothing."""
    starts = {
        offset % 4096
        for name in ("many_experts", "odd_rows_f16", "aligned_8")
        for tensor in gguf.GGUFReader(models.make(SHAPES[name], name)).tensors
        if "_exps" in tensor.name
        for offset in (int(tensor.data_offset) + e * (tensor.n_bytes // int(tensor.shape[2])) for e in range(8))
    }
    assert len(starts) > 20
    assert any(start % 32 for start in starts), "alignment 8 gives starts that are not multiples of 32"


# ---- counted reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["min", 0.5, 1.0, 0])
@pytest.mark.parametrize("name", ["many_experts", "mixed_layers", "fused_gate_up"])
def test_a_slice_is_read_at_most_once_per_operation(name: str, cache: str | float) -> None:
    """One ubatch of 200 tokens runs each expert operation once: so many slices are read, and not one more."""
    spec = SHAPES[name]
    path = models.make(spec, name)
    n_layers = spec.n_layer - spec.n_layer_dense_lead
    n_slices = n_layers * spec.n_expert * (2 if spec.fused_gate_up else 3)
    with c.streamed(path, c.Variant(cache)) as model, c.Setting(1, 512).context(model) as context:
        context.decode(c.tokens(200, model.n_vocab))
        call = context.stats()["call"]
        assert call["n_ops"] == n_layers * (2 if spec.fused_gate_up else 3)
        assert 0 < call["n_reads"] <= n_slices
        assert call["slice_bytes"] <= model.plan.expert_bytes
        assert call["n_retries"] == 0


def test_io_uring_was_among_the_engines_compared() -> None:
    """Everything that compares runs with pread where it is refused: here it shows."""
    if c.why_no_uring():
        pytest.skip(c.why_no_uring())
    assert c.engine("io_uring") == "io_uring" and c.engine("pread") == "pread"


@pytest.mark.parametrize("io", c.ENGINES)
def test_at_full_cache_a_second_pass_reads_nothing(io: str) -> None:
    for name in ("many_experts", "mixed_layers", "mixed_projections"):
        path = models.make(SHAPES[name], name)
        with c.streamed(path, c.Variant(1.0, io)) as model, c.Setting(1, 64).context(model) as context:
            ids = c.tokens(100, model.n_vocab)
            context.decode(ids)
            first = model.stats()
            context.clear()
            context.decode(ids)
            second = model.stats()
        assert first["n_reads"] > 0
        assert second["n_reads"] == first["n_reads"]
        assert second["read_bytes"] == first["read_bytes"]
        assert second["n_evictions"] == 0
        assert second["n_misses"] == first["n_misses"]


def test_the_plan_knows_where_each_tensor_lies() -> None:
    for name in ("shuffled_order", "aligned_4096", "odd_rows_f16"):
        path = models.make(SHAPES[name], name)
        by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        raw = np.memmap(path, dtype=np.uint8, mode="r")
        tensors = ms.plan(path, stream=ms.Stream(cache="min")).tensors
        assert len(tensors) == len(by_name)
        for tensor in tensors:
            packed = by_name[tensor.name].data.reshape(-1).view(np.uint8)
            assert (raw[tensor.offset : tensor.offset + tensor.bytes] == packed).all(), tensor.name
