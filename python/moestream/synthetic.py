"""Synthetic Mixture-of-Experts models: GGUF files of any shape, with random but sane weights.

What it does: a `Spec` says everything about a model (architecture, sizes, weight types per layer and projection,
shards, tensor order, alignment); `write_model` writes it. Tests, benchmarks and tools/make_model.py all use this.

Guarantees: the same Spec gives the same bytes everywhere. Weights are scaled by their fan-in, so that activations
and logits stay finite through any number of layers, in every weight type. No two experts of a layer hold the same
bytes, and no two layers hold the same expert at the same place, even where bytes are shared to write faster.

Never: needs llama.cpp, loads a model, or leaves an incomplete file under a final name.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGUFValueType
from tqdm import tqdm

from ._block_types import BlockType, Bytes, block_type, pack, random_weights, unit_noise
from ._gguf_writer import KeyValue, TensorSource, WrittenFile, require_free_space, write_gguf

# Part of every recipe: raise it whenever the same Spec would give other bytes.
GENERATOR_VERSION = 1
# A SentencePiece vocabulary has 256 byte tokens, then unknown, begin and end.
_N_SPECIAL_TOKENS = 259
_MAX_SHARDS = 9

ExpertTypes = str | tuple[str | tuple[str, str, str], ...] | Callable[[int, str], str]
"""One name for all; per layer a name or a (gate, up, down) triple; or a function of (layer, projection)."""


@dataclass(frozen=True)
class _Arch:
    """What one llama.cpp architecture asks for beyond the common tensors."""

    qk_norm: bool = False
    post_attention_norm: bool = False  # gpt-oss: its FFN norm has this name
    sinks: bool = False
    attention_bias: bool = False
    expert_bias: bool = False
    shared: str = ""  # "", "gated" (qwen2moe), "plain"
    leading_dense: bool = False
    fused: bool = False
    selection_bias: bool = False
    dense: bool = False  # may have no experts at all
    full_width: bool = False  # n_head * head_dim has to be n_embd
    all_heads_kv: bool = False  # n_head_kv has to be n_head


ARCHITECTURES: Mapping[str, _Arch] = {
    "qwen3moe": _Arch(qk_norm=True),
    "llama": _Arch(dense=True),
    "qwen2moe": _Arch(shared="gated", full_width=True),
    "dots1": _Arch(qk_norm=True, shared="plain", leading_dense=True, selection_bias=True, all_heads_kv=True),
    "hy_v3": _Arch(qk_norm=True, shared="plain", leading_dense=True, fused=True),
    "gpt-oss": _Arch(post_attention_norm=True, sinks=True, attention_bias=True, expert_bias=True),
}


@dataclass(frozen=True)
class Spec:
    """Everything about one synthetic model. Sizes are in weights; the defaults are the smallest usual test model.

    `n_ff` is the width of one expert, `n_ff_dense` that of dense and shared FFNs (0: twice n_embd). `n_expert` 0
    makes a dense model (architecture llama only). `expert_type` names the type of the routed experts, see
    ExpertTypes; with `fused_gate_up` gate and up are one tensor of gate's type. Expert biases come with gpt-oss,
    shared experts with qwen2moe, dots1 and hy_v3, leading dense blocks (`n_layer_dense_lead`) with the last two.

    `n_shards` 2 to 9 splits the model as llama.cpp's gguf-split does; with `first_shard_metadata_only` the first
    shard holds no tensors. `tensor_order` is normal, reversed or shuffled. `share_blocks` makes the experts of
    one layer once and rotates them from layer to layer: large models are then written at the speed of the disk.
    `random_blocks` fills quantised blocks with random bits instead of quantising random numbers.

    Raises ValueError, naming the field, if llama.cpp could not load the result.
    """

    arch: str = "qwen3moe"
    n_layer: int = 4
    n_embd: int = 256
    n_ff: int = 256
    n_expert: int = 8
    n_expert_used: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_vocab: int = 512
    n_ctx: int = 4096
    n_ff_dense: int = 0
    expert_type: ExpertTypes = "Q8_0"
    dense_type: str = "Q8_0"
    embedding_type: str = ""
    output_type: str = ""
    n_layer_dense_lead: int = 0
    fused_gate_up: bool = False
    seed: int = 1
    share_blocks: bool = False
    random_blocks: bool = False
    alignment: int = 32
    n_shards: int = 1
    first_shard_metadata_only: bool = False
    tensor_order: str = "normal"
    name: str = "moestream synthetic"

    def __post_init__(self) -> None:
        _check(self)

    def expert_type_of(self, il: int, projection: str) -> str:
        """The weight type of `projection` ("gate", "up" or "down") in layer `il`."""
        if isinstance(self.expert_type, str):
            return self.expert_type
        if callable(self.expert_type):
            return self.expert_type(il, projection)
        entry = self.expert_type[il]
        return entry if isinstance(entry, str) else entry[("gate", "up", "down").index(projection)]

    def has_experts(self, il: int) -> bool:
        """Whether layer `il` has routed experts."""
        return self.n_expert > 0 and il >= self.n_layer_dense_lead

    def recipe(self) -> dict[str, Any]:
        """Everything the bytes depend on, as plain JSON values; callables are resolved to the types they choose."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["expert_type"] = [
            [self.expert_type_of(il, projection) for projection in ("gate", "up", "down")]
            for il in range(self.n_layer)
            if self.has_experts(il)
        ]
        return {"generator": GENERATOR_VERSION, **values}

    def recipe_json(self) -> str:
        """The recipe as canonical JSON text, ready to be hashed."""
        return json.dumps(self.recipe(), sort_keys=True, separators=(",", ":"))

    def tensor_bytes(self) -> int:
        """Packed bytes of all tensors together, without padding."""
        return sum(tensor.nbytes for tensor in _tensors(self))

    def expert_bytes(self) -> int:
        """Packed bytes of all routed experts together, without their biases."""
        return sum(tensor.nbytes for tensor in _tensors(self) if tensor.name.endswith("_exps.weight"))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check(spec: Spec) -> None:
    _require(spec.arch in ARCHITECTURES, f"arch {spec.arch!r} is not one of {', '.join(ARCHITECTURES)}")
    arch = ARCHITECTURES[spec.arch]
    for field in ("n_layer", "n_embd", "n_ff", "n_head", "n_head_kv", "head_dim", "n_ctx"):
        _require(getattr(spec, field) > 0, f"{field} is {getattr(spec, field)}, it has to be positive")
    _require(spec.n_expert > 0 or arch.dense, f"n_expert is 0, but {spec.arch} has no dense form")
    if spec.n_expert:
        _require(
            0 < spec.n_expert_used <= spec.n_expert, f"n_expert_used {spec.n_expert_used} is not in 1..{spec.n_expert}"
        )
    _require(
        spec.n_vocab >= _N_SPECIAL_TOKENS,
        f"n_vocab {spec.n_vocab} is below the {_N_SPECIAL_TOKENS} of a byte vocabulary",
    )
    _require(spec.n_head % spec.n_head_kv == 0, f"n_head {spec.n_head} is not a multiple of n_head_kv {spec.n_head_kv}")
    _require(
        not arch.full_width or spec.n_head * spec.head_dim == spec.n_embd,
        f"{spec.arch} needs n_head * head_dim = n_embd",
    )
    _require(not arch.all_heads_kv or spec.n_head == spec.n_head_kv, f"{spec.arch} needs n_head_kv = n_head")
    _require(
        0 <= spec.n_layer_dense_lead < spec.n_layer,
        f"n_layer_dense_lead {spec.n_layer_dense_lead} is not in 0..{spec.n_layer - 1}",
    )
    _require(arch.leading_dense or spec.n_layer_dense_lead == 0, f"{spec.arch} has no leading dense blocks")
    _require(arch.fused or not spec.fused_gate_up, f"{spec.arch} has no fused ffn_gate_up_exps")
    _require(1 <= spec.n_shards <= _MAX_SHARDS, f"n_shards {spec.n_shards} is not in 1..{_MAX_SHARDS}")
    _require(
        not spec.first_shard_metadata_only or spec.n_shards > 1,
        "first_shard_metadata_only needs n_shards of at least 2",
    )
    _require(
        spec.tensor_order in ("normal", "reversed", "shuffled"),
        f"tensor_order {spec.tensor_order!r} is not normal, reversed or shuffled",
    )
    if isinstance(spec.expert_type, tuple):
        _require(
            len(spec.expert_type) == spec.n_layer, f"expert_type names {len(spec.expert_type)} layers of {spec.n_layer}"
        )
    n_filled = spec.n_shards - spec.first_shard_metadata_only
    _require(len(_tensors(spec)) >= n_filled, f"n_shards {spec.n_shards} is more than there are tensors")


# ---- what the model consists of --------------------------------------------------------------------------------


class _Weights:
    """Makes the bytes of one model's tensors. With share_blocks it keeps the experts of one layer, else nothing."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._shared: dict[str, Bytes] = {}

    def matrix(self, name: str, kind: BlockType, shape: tuple[int, int], rms: float = 0.0) -> TensorSource:
        """A dense matrix [out, in]; the default scale keeps the size of activations. Never shared: the same
        attention and router in every layer would drive all tokens to the same few experts."""
        spec, scale = self._spec, rms or 1.0 / math.sqrt(shape[1])
        key = f"{spec.seed}/{name}/{kind.name}"
        return TensorSource(
            name, shape, kind, lambda: [random_weights(key, kind, shape, scale, random_blocks=spec.random_blocks)]
        )

    def experts(self, name: str, kind: BlockType, shape: tuple[int, int, int]) -> TensorSource:
        """A bank of experts [n_expert, out, in], made one expert at a time."""
        _, il, owner = name.split(".", 2)
        n_expert, rows, columns = shape
        spec = self._spec

        def made(key: str) -> Bytes:
            return random_weights(
                key, kind, (rows, columns), 1.0 / math.sqrt(columns), random_blocks=spec.random_blocks
            )

        def chunks() -> Iterable[Bytes]:
            for expert in range(n_expert):
                if not spec.share_blocks:
                    yield made(f"{spec.seed}/{name}/{expert}/{kind.name}")
                    continue
                # The rotation tells layers apart where they share bytes: expert e of layer l is not e of layer l+1.
                key = f"{spec.seed}/{owner}/{(expert + int(il)) % n_expert}/{kind.name}"
                if key not in self._shared:
                    self._shared[key] = made(key)
                yield self._shared[key]

        return TensorSource(name, shape, kind, chunks)

    def vector(self, name: str, shape: tuple[int, ...], mean: float, rms: float) -> TensorSource:
        """Norms, biases and sinks: float32, `mean` plus noise."""
        kind = block_type("F32")
        key = f"{self._spec.seed}/{name}"
        return TensorSource(
            name, shape, kind, lambda: [pack(np.float32(mean) + np.float32(rms) * unit_noise(key, shape), kind)]
        )


def _attention(spec: Spec, arch: _Arch, w: _Weights, il: int) -> list[TensorSource]:
    p = f"blk.{il}."
    kind = block_type(spec.dense_type)
    q, kv = spec.n_head * spec.head_dim, spec.n_head_kv * spec.head_dim
    tensors = [
        w.vector(p + "attn_norm.weight", (spec.n_embd,), 1.0, 0.1),
        w.matrix(p + "attn_q.weight", kind, (q, spec.n_embd)),
        w.matrix(p + "attn_k.weight", kind, (kv, spec.n_embd)),
        w.matrix(p + "attn_v.weight", kind, (kv, spec.n_embd)),
        w.matrix(p + "attn_output.weight", kind, (spec.n_embd, q)),
    ]
    if arch.qk_norm:
        tensors += [w.vector(f"{p}attn_{x}_norm.weight", (spec.head_dim,), 1.0, 0.1) for x in "qk"]
    if arch.attention_bias:
        widths = {"attn_q": q, "attn_k": kv, "attn_v": kv, "attn_output": spec.n_embd}
        tensors += [w.vector(f"{p}{name}.bias", (width,), 0.0, 0.05) for name, width in widths.items()]
    if arch.sinks:
        tensors.append(w.vector(p + "attn_sinks.weight", (spec.n_head,), 0.0, 1.0))
    norm = "post_attention_norm.weight" if arch.post_attention_norm else "ffn_norm.weight"
    return [*tensors, w.vector(p + norm, (spec.n_embd,), 1.0, 0.1)]


def _ffn(spec: Spec, w: _Weights, il: int, suffix: str, width: int) -> list[TensorSource]:
    """A dense FFN (suffix "") or a shared expert (suffix "_shexp")."""
    kind = block_type(spec.dense_type)
    return [
        w.matrix(f"blk.{il}.ffn_gate{suffix}.weight", kind, (width, spec.n_embd)),
        w.matrix(f"blk.{il}.ffn_up{suffix}.weight", kind, (width, spec.n_embd)),
        w.matrix(f"blk.{il}.ffn_down{suffix}.weight", kind, (spec.n_embd, width)),
    ]


def _routed(spec: Spec, arch: _Arch, w: _Weights, il: int) -> list[TensorSource]:
    p = f"blk.{il}."
    n, ff, embd = spec.n_expert, spec.n_ff, spec.n_embd
    kinds = {x: block_type(spec.expert_type_of(il, x)) for x in ("gate", "up", "down")}
    # Twice the scale of other matrices: logits far enough apart that the choice of experts is not a toss-up.
    tensors = [w.matrix(p + "ffn_gate_inp.weight", block_type("F32"), (n, embd), 2.0 / math.sqrt(embd))]
    if spec.fused_gate_up:
        tensors.append(w.experts(p + "ffn_gate_up_exps.weight", kinds["gate"], (n, 2 * ff, embd)))
    else:
        tensors.append(w.experts(p + "ffn_gate_exps.weight", kinds["gate"], (n, ff, embd)))
        tensors.append(w.experts(p + "ffn_up_exps.weight", kinds["up"], (n, ff, embd)))
    tensors.append(w.experts(p + "ffn_down_exps.weight", kinds["down"], (n, embd, ff)))
    if arch.expert_bias:
        tensors.append(w.vector(p + "ffn_gate_inp.bias", (n,), 0.0, 0.1))
        widths = {"gate": ff, "up": ff, "down": embd}
        tensors += [w.vector(f"{p}ffn_{x}_exps.bias", (n, width), 0.0, 0.05) for x, width in widths.items()]
    if arch.selection_bias:
        tensors.append(w.vector(p + "exp_probs_b.bias", (n,), 0.0, 0.05))
    return tensors


def _shared_width(spec: Spec, arch: _Arch) -> int:
    # dots1 has no key for it: there a shared expert is as wide as a routed one.
    return spec.n_ff if arch.selection_bias else spec.n_ff_dense or 2 * spec.n_embd


def _tensors(spec: Spec) -> list[TensorSource]:
    """All tensors in the order of the file. Making the list makes no weights."""
    arch, w = ARCHITECTURES[spec.arch], _Weights(spec)
    head = block_type(spec.output_type or spec.dense_type)
    tensors = [
        w.matrix(
            "token_embd.weight", block_type(spec.embedding_type or spec.dense_type), (spec.n_vocab, spec.n_embd), 1.0
        ),
        w.vector("output_norm.weight", (spec.n_embd,), 1.0, 0.1),
        w.matrix("output.weight", head, (spec.n_vocab, spec.n_embd)),
    ]
    for il in range(spec.n_layer):
        tensors += _attention(spec, arch, w, il)
        if not spec.has_experts(il):
            tensors += _ffn(spec, w, il, "", _dense_width(spec))
            continue
        tensors += _routed(spec, arch, w, il)
        if arch.shared:
            tensors += _ffn(spec, w, il, "_shexp", _shared_width(spec, arch))
        if arch.shared == "gated":
            tensors.append(
                w.vector(f"blk.{il}.ffn_gate_inp_shexp.weight", (spec.n_embd,), 0.0, 1 / math.sqrt(spec.n_embd))
            )
    for tensor in tensors:
        tensor.type.nbytes(tensor.shape)  # raises where a row is not whole blocks
    if spec.tensor_order == "reversed":
        tensors.reverse()
    elif spec.tensor_order == "shuffled":
        order = np.argsort(unit_noise(f"{spec.seed}/order", (len(tensors),)), kind="stable")
        tensors = [tensors[i] for i in order]
    return tensors


def _dense_width(spec: Spec) -> int:
    # Architecture llama has one key for the width of dense FFNs and experts alike.
    return spec.n_ff if spec.arch == "llama" else spec.n_ff_dense or 2 * spec.n_embd


def _metadata(spec: Spec) -> list[KeyValue]:
    arch, a = ARCHITECTURES[spec.arch], spec.arch
    kv = [
        KeyValue.text("general.architecture", a),
        KeyValue.text("general.name", spec.name),
        KeyValue.u32(f"{a}.block_count", spec.n_layer),
        KeyValue.u32(f"{a}.context_length", spec.n_ctx),
        KeyValue.u32(f"{a}.embedding_length", spec.n_embd),
        KeyValue.u32(f"{a}.feed_forward_length", _dense_width(spec)),
        KeyValue.u32(f"{a}.attention.head_count", spec.n_head),
        KeyValue.u32(f"{a}.attention.head_count_kv", spec.n_head_kv),
        KeyValue.u32(f"{a}.attention.key_length", spec.head_dim),
        KeyValue.u32(f"{a}.attention.value_length", spec.head_dim),
        KeyValue.u32(f"{a}.rope.dimension_count", spec.head_dim),
        KeyValue.f32(f"{a}.rope.freq_base", 1e6),
        KeyValue.f32(f"{a}.attention.layer_norm_rms_epsilon", 1e-6),
    ]
    if spec.n_expert:
        kv += [
            KeyValue.u32(f"{a}.expert_count", spec.n_expert),
            KeyValue.u32(f"{a}.expert_used_count", spec.n_expert_used),
            KeyValue.u32(f"{a}.expert_feed_forward_length", spec.n_ff),
        ]
    if arch.shared:
        kv += [
            KeyValue.u32(f"{a}.expert_shared_count", 1),
            KeyValue.u32(f"{a}.expert_shared_feed_forward_length", _shared_width(spec, arch)),
        ]
    if arch.leading_dense:
        kv += [
            KeyValue.u32(f"{a}.leading_dense_block_count", spec.n_layer_dense_lead),
            KeyValue.u32(f"{a}.expert_gating_func", 2),  # sigmoid
            KeyValue.boolean(f"{a}.expert_weights_norm", True),
            KeyValue.f32(f"{a}.expert_weights_scale", 1.0),
        ]
    if arch.sinks:
        kv.append(KeyValue.u32(f"{a}.attention.sliding_window", 128))
    return kv + _vocabulary(spec.n_vocab)


def _vocabulary(n_vocab: int) -> list[KeyValue]:
    """A byte vocabulary of SentencePiece kind: any text tokenises, and any token is some text."""
    tokens = [f"<0x{i:02X}>" for i in range(256)] + ["<unk>", "<s>", "</s>"]
    tokens += [f"<t{i}>" for i in range(len(tokens), n_vocab)]
    normal, unknown, control, byte = 1, 2, 3, 6
    kinds = [byte] * 256 + [unknown, control, control] + [normal] * (n_vocab - _N_SPECIAL_TOKENS)
    return [
        KeyValue.text("tokenizer.ggml.model", "llama"),
        KeyValue.array("tokenizer.ggml.tokens", tokens, GGUFValueType.STRING),
        KeyValue.array("tokenizer.ggml.scores", [0.0] * n_vocab, GGUFValueType.FLOAT32),
        KeyValue.array("tokenizer.ggml.token_type", kinds, GGUFValueType.INT32),
        KeyValue.u32("tokenizer.ggml.unknown_token_id", 256),
        KeyValue.u32("tokenizer.ggml.bos_token_id", 257),
        KeyValue.u32("tokenizer.ggml.eos_token_id", 258),
    ]


# ---- writing ---------------------------------------------------------------------------------------------------


def shard_paths(path: pathlib.Path, n_shards: int) -> list[pathlib.Path]:
    """The files that write_model makes for `path`: itself, or `stem-00001-of-0000N.gguf` and so on beside it."""
    if n_shards == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{i + 1:05d}-of-{n_shards:05d}.gguf") for i in range(n_shards)]


def _split(spec: Spec, tensors: list[TensorSource]) -> list[list[TensorSource]]:
    """Contiguous runs of tensors, as equal in number as they can be."""
    n_filled = spec.n_shards - spec.first_shard_metadata_only
    cuts = [i * len(tensors) // n_filled for i in range(n_filled + 1)]
    groups = [tensors[a:b] for a, b in itertools.pairwise(cuts)]
    return [[], *groups] if spec.first_shard_metadata_only else groups


def write_model(path: pathlib.Path | str, spec: Spec, *, progress: bool = False) -> list[WrittenFile]:
    """Write the model and return its files in order; the first is the one to open.

    Existing files of the same names are replaced, each at once. `progress` shows a bar on stderr. Raises OSError
    (ENOSPC, with the numbers) before anything is written if the disk is too small, or when a write fails; shards
    that were complete by then stay.
    """
    target = pathlib.Path(path)
    tensors = _tensors(spec)
    total = sum(tensor.nbytes for tensor in tensors)
    require_free_space(target.parent, total, f"model {target.name}")
    files = shard_paths(target, spec.n_shards)
    written = []
    with tqdm(total=total, unit="B", unit_scale=True, desc=target.name, disable=not progress, mininterval=0.5) as bar:
        for i, (file, group) in enumerate(zip(files, _split(spec, tensors), strict=True)):
            # Only the first shard describes the model; the others say where they belong.
            kv = _metadata(spec) if i == 0 else []
            if spec.n_shards > 1:
                kv += [
                    KeyValue.u16("split.no", i),
                    KeyValue.u16("split.count", spec.n_shards),
                    KeyValue.i32("split.tensors.count", len(tensors)),
                ]
            written.append(write_gguf(file, kv, group, alignment=spec.alignment, on_bytes=bar.update))
    return written


# ---- presets ---------------------------------------------------------------------------------------------------


def _q4_k_m(il: int, projection: str) -> str:
    """As llama.cpp's Q4_K_M has it in outline: ffn_down in Q6_K in every other layer, all else in Q4_K."""
    return "Q6_K" if projection == "down" and il % 2 == 0 else "Q4_K"


QWEN3_30B_SHAPE = Spec(
    n_layer=48, n_embd=2048, n_ff=768, n_expert=128, n_expert_used=8, n_head=32, n_head_kv=4,
    head_dim=128, n_vocab=32000, expert_type=_q4_k_m, dense_type="Q4_K", output_type="Q6_K", share_blocks=True,
    random_blocks=True, name="Qwen3-30B-A3B shape",
)  # fmt: skip
"""The measures of Qwen3-30B-A3B with a small vocabulary; experts as in Q4_K_M."""

GPT_OSS_20B_SHAPE = Spec(
    arch="gpt-oss", n_layer=24, n_embd=2880, n_ff=2880, n_expert=32, n_expert_used=4, n_head=64, n_head_kv=8,
    head_dim=64, n_vocab=32000, expert_type="MXFP4", dense_type="Q8_0", share_blocks=True,
    random_blocks=True, name="gpt-oss-20b shape",
)  # fmt: skip
"""The measures of gpt-oss-20b: MXFP4 experts with biases."""

SMALL_EXPERT_EXTREME = Spec(
    n_layer=48, n_embd=512, n_ff=256, n_expert=512, n_expert_used=10, n_head=8, n_head_kv=2, head_dim=64,
    n_vocab=32000, expert_type="Q4_K", dense_type="Q8_0", share_blocks=True, random_blocks=True, name="small experts",
)  # fmt: skip
"""Many tiny slices (72 KiB): the cost of each read, not the disk's rate, decides."""

LARGE_EXPERT_EXTREME = Spec(
    n_layer=8, n_embd=6144, n_ff=16384, n_expert=8, n_expert_used=2, n_head=48, n_head_kv=8, head_dim=128,
    n_vocab=32000, expert_type="Q4_K", dense_type="Q4_K", share_blocks=True, random_blocks=True, name="large experts",
)  # fmt: skip
"""Few huge slices (54 MiB, the experts of Mixtral 8x22B): a cache holds few of them."""

PRESETS: Mapping[str, Spec] = {
    "tiny": Spec(),
    "qwen3-30b": QWEN3_30B_SHAPE,
    "gpt-oss-20b": GPT_OSS_20B_SHAPE,
    "small-experts": SMALL_EXPERT_EXTREME,
    "large-experts": LARGE_EXPERT_EXTREME,
}
