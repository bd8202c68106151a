"""Everything a host does besides one prompt in one sequence: streamed, it gives the resident model's bits.

Batches of several sequences, embeddings in and out, state, KV cache editing, attention variants, warm-up, LoRA, two
contexts on one model, recurrent and hybrid models. Models are tiny and the cache is at its minimum, so that experts
are evicted and read again throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from support import archs, models, record
from support import compare as c
from support.compare import Row

import moestream as ms
from moestream import _native_api as native

VARIANTS = [c.Variant("min", "io_uring"), c.Variant("min", "pread", "off")]
BASE = c.Setting(1, 8, 256)
HYBRID = ("kimi-linear", "lfm2moe", "minimax-01", "qwen35moe", "qwen3next")


def check(
    name: str, path: Path, work: c.Work, settings: list[c.Setting], variants: list[c.Variant] | None = None
) -> c.Tally:
    """Compares, records the outcome under `name`, and returns what it added up to."""
    tally = c.Tally()
    try:
        with c.reference(path) as ref:
            c.compare(ref, name, work, settings, variants or VARIANTS, tally)
    except BaseException as error:
        record.write("use", name, False, str(error))
        raise
    record.write("use", name, True, "")
    return tally


def with_options(**options: object) -> c.Setting:
    """BASE with more context options."""
    return replace(BASE, options=tuple(options.items()))


# ---- several sequences -----------------------------------------------------------------------------------------


def four_sequences(context: ms.Context) -> list[c.Array]:
    """Prompts of different lengths interleaved in one batch, then one token of each sequence at a time, then a
    sequence that shares the beginning of another."""
    ids = c.tokens(80, context.model.n_vocab)
    lengths = (5, 11, 1, 8)
    rows = [
        Row(ids[16 * seq + pos], pos, (seq,), wanted=pos == lengths[seq] - 1)
        for pos in range(max(lengths))
        for seq in range(4)
        if pos < lengths[seq]
    ]
    assert c.decode_rows(context, rows) == 0
    out = [c.logits(context, 4)]
    for step in range(3):
        assert c.decode_rows(context, [Row(ids[70 + seq], lengths[seq] + step, (seq,)) for seq in range(4)]) == 0
        out.append(c.logits(context, 4))
    context.seq_rm(2)
    context.seq_cp(1, 2)
    assert c.decode_rows(context, [Row(ids[3], lengths[1] + 3, (1,)), Row(ids[4], lengths[1] + 3, (2,))]) == 0
    return [*out, c.logits(context, 2)]


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("n_ubatch", [1, 8, 64])
def test_batches_of_four_sequences(unified: bool, n_ubatch: int, tiny_moe: Callable[..., Path]) -> None:
    setting = replace(with_options(n_seq_max=4, kv_unified=unified), n_ubatch=n_ubatch)
    name = f"four sequences, KV cache {'unified' if unified else 'apart'}, n_ubatch {n_ubatch}"
    assert check(name, tiny_moe("Q4_K"), four_sequences, [setting]).evictions > 0


@pytest.mark.parametrize("model", ["tiny", "top1", "many_experts"])
def test_ids_are_a_strided_view(model: str, tiny_moe: Callable[..., Path]) -> None:
    # The router's ids are a view of [n_expert, n_tokens] sorted indices: n_expert_used of them per row (S10).
    path = tiny_moe("Q4_K") if model == "tiny" else models.named(model)
    check(f"1, 2, 7 and 64 tokens at n_ubatch 8, {model}", path, c.prompts_then_tokens((1, 2, 7, 64), 3), [BASE])


# ---- embeddings ------------------------------------------------------------------------------------------------


def embedding_input(context: ms.Context) -> list[c.Array]:
    """Vectors instead of tokens, as from an image encoder, then tokens behind them."""
    n_embd = context.model.n_embd
    vectors = np.sin(np.arange(20 * n_embd, dtype=np.float32).reshape(20, n_embd)) * np.float32(0.05)
    assert c.decode_rows(context, [Row(vectors[i], i) for i in range(20)]) == 0
    out = [c.logits(context, 20)]
    ids = c.tokens(4, context.model.n_vocab)
    assert c.decode_rows(context, [Row(token, 20 + i) for i, token in enumerate(ids)]) == 0
    return [*out, c.logits(context, 4)]


def test_embeddings_as_input(tiny_moe: Callable[..., Path]) -> None:
    check("embeddings as input", tiny_moe("Q4_K"), embedding_input, [BASE])


@pytest.mark.parametrize("pooling", ["none", "mean", "last"])
def test_embeddings_as_output(pooling: str, tiny_moe: Callable[..., Path]) -> None:
    def work(context: ms.Context) -> list[c.Array]:
        return [context.embed(c.tokens(n, context.model.n_vocab)) for n in (1, 8, 40)]

    setting = replace(with_options(embeddings=True, pooling=pooling), n_ubatch=64)
    check(f"embeddings as output, pooling {pooling}", tiny_moe("Q4_K"), work, [setting])


# ---- state and KV cache ----------------------------------------------------------------------------------------


def state_in_mid_run(context: ms.Context) -> list[c.Array]:
    """Saves, goes on, puts back, goes on again: the second time has to give the same as the first."""
    ids = c.tokens(30, context.model.n_vocab)
    context.decode(ids[:20], logits="none")
    state = context.state_get()
    first = [context.decode(ids[i : i + 1]) for i in range(20, 26)]
    context.state_set(state)
    second = [context.decode(ids[i : i + 1]) for i in range(20, 26)]
    context.clear()
    context.state_set(state)
    third = [context.decode(ids[20:26])]
    c.same_bits(first, second, "the same tokens after the state was put back")
    return first + third


def kv_edits(context: ms.Context) -> list[c.Array]:
    """Removal and re-decoding, then a context shift: a piece is cut out and what follows moves up."""
    ids = c.tokens(60, context.model.n_vocab)
    out = [context.decode(ids[:30], logits="all")]
    assert context.seq_rm(0, 12)
    out.append(context.decode(ids[30:50], logits="all"))
    assert context.seq_rm(0, 4, 9)
    context.seq_add(0, 9, -1, -5)
    out.append(context.decode(ids[50:51], pos=27))
    return [*out, context.decode(ids[51:60], logits="all")]


def test_state_save_and_restore_in_mid_run(tiny_moe: Callable[..., Path]) -> None:
    check("state saved and put back", tiny_moe("Q4_K"), state_in_mid_run, [BASE])


def test_kv_removal_and_context_shift(tiny_moe: Callable[..., Path]) -> None:
    check("KV removal, re-decoding, context shift", tiny_moe("Q4_K"), kv_edits, [BASE])


@pytest.mark.parametrize("arch", HYBRID)
def test_hybrid_models(arch: str) -> None:
    def work(context: ms.Context) -> list[c.Array]:
        assert native.lib.llama_model_is_hybrid(context.model._handles.model)
        return state_in_mid_run(context) + c.prompts_then_tokens((9, 40), 3)(context)

    check(f"hybrid {arch}: state, prompts", archs.path(arch), work, [BASE], [c.Variant(0), c.Variant(0, "pread")])


# ---- attention, warm-up, contexts ------------------------------------------------------------------------------


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_attention_variants(flash: bool, kv_type: str, tiny_moe: Callable[..., Path]) -> None:
    if not flash and kv_type == "q8_0":
        kv_type = "f32"  # a quantised V cache needs flash attention
    setting = with_options(flash_attn=flash, type_k=kv_type, type_v=kv_type)
    name = f"flash attention {'on' if flash else 'off'}, KV cache {kv_type}"
    check(name, tiny_moe("Q4_K"), c.prompts_then_tokens((9, 40), 3), [setting])


def warm_up(context: ms.Context) -> None:
    """What llama.cpp's tools do first: a decode that selects every expert of every layer."""
    lib, pointer = native.lib, context._handles.context
    lib.llama_set_warmup(pointer, True)
    assert c.decode_rows(context, [Row(1, 0), Row(2, 1)]) == 0
    lib.llama_set_warmup(pointer, False)
    context.clear()


@pytest.mark.parametrize("cache", ["min", 0.5, 0])
def test_warm_up_does_no_harm(cache: str | float, tiny_moe: Callable[..., Path]) -> None:
    def work(context: ms.Context) -> list[c.Array]:
        warm_up(context)
        return c.prompts_then_tokens((9,), 3)(context)

    check(f"after a warm-up decode, cache {cache}", tiny_moe("Q4_K"), work, [BASE], [c.Variant(cache)])


def test_warm_up_does_not_flush_the_cache(tiny_moe: Callable[..., Path]) -> None:
    path = tiny_moe("Q4_K")
    ids = c.tokens(1, 512)
    with c.streamed(path, c.Variant(0.5)) as model, BASE.context(model) as context:
        context.decode(ids)
        context.clear()
        context.decode(ids)
        before = context.stats()["call"]
        assert before["n_hits"] == 8, "one token uses two experts in each of four layers"
        assert before["n_misses"] == 0
        context.clear()
        warm_up(context)
        context.decode(ids)
        assert context.stats()["call"]["n_misses"] == 0


def test_two_contexts_take_turns(tiny_moe: Callable[..., Path]) -> None:
    """As with a draft context on the same model: each gives what it gives alone, whatever the other evicted."""
    path = tiny_moe("Q4_K")
    ids = c.tokens(40, 512)

    def run(model: ms.Model) -> list[c.Array]:
        out = []
        with BASE.context(model) as one, replace(BASE, n_ubatch=64).context(model) as two:
            out += [one.decode(ids[:20], logits="all"), two.decode(ids[10:40], logits="all")]
            for i in range(5):
                out += [one.decode(ids[20 + i : 21 + i]), two.decode(ids[i : i + 1])]
        return out

    with c.reference(path) as ref, c.streamed(path, VARIANTS[0]) as model:
        c.same_bits(run(ref.model), run(model), "two contexts")
        assert model.stats()["n_evictions"] > 0
    record.write("use", "two contexts of one model in turn", True, "")


# ---- LoRA ------------------------------------------------------------------------------------------------------


def write_lora(path: Path, targets: dict[str, tuple[int, ...]], rank: int = 4) -> None:
    """An adapter for the tensors named, whose shapes are given as numpy has them: [experts,] out, in."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for i, (name, shape) in enumerate(targets.items()):
        *bank, n_out, n_in = shape
        for tail, dims in (("lora_a", (*bank, rank, n_in)), ("lora_b", (*bank, n_out, rank))):
            n = int(np.prod(dims))
            values = np.sin(np.arange(n, dtype=np.float64) * (1.7 + i)).astype(np.float32) * np.float32(0.1)
            writer.add_tensor(f"{name}.{tail}", values.reshape(dims))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_lora_adapter_on_streamed_experts(tiny_moe: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "lora.gguf"
    targets: dict[str, tuple[int, ...]] = {"blk.1.attn_q.weight": (256, 256)}
    for il in (0, 2):
        targets |= {f"blk.{il}.ffn_{x}_exps.weight": (8, 256, 256) for x in ("gate", "up", "down")}
    write_lora(file, targets)

    def work(context: ms.Context) -> list[c.Array]:
        ffi, lib = native.ffi, native.lib
        plain = c.prompts_then_tokens((9,), 2)(context)
        adapter = lib.llama_adapter_lora_init(context.model._handles.model, str(file).encode())
        assert adapter != ffi.NULL
        adapters = ffi.new("struct llama_adapter_lora *[]", [adapter])
        assert lib.llama_set_adapters_lora(context._handles.context, adapters, 1, ffi.new("float[]", [0.7])) == 0
        adapted = c.prompts_then_tokens((9, 33), 3)(context)
        assert lib.llama_set_adapters_lora(context._handles.context, ffi.NULL, 0, ffi.NULL) == 0
        assert (adapted[0] != plain[0]).any(), "the adapter changed nothing"
        c.same_bits(plain, c.prompts_then_tokens((9,), 2)(context), "after the adapter was taken away")
        return plain + adapted

    tally = check("LoRA adapter on streamed experts", tiny_moe("Q4_K"), work, [BASE, replace(BASE, n_ubatch=64)])
    assert tally.fallbacks == 0
