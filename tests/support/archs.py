"""The small models that upstream's own test-llama-archs writes, one GGUF per architecture, and others made of them.

They are made once per llama.cpp commit into build/test-models, by the tool that `make archs` builds. A folder or a file
under its final name is complete. Upstream's models have two experts and use both, so that nothing is ever selected;
`wide_path` gives the same architecture with eight experts, of which two are used, in Q8_0; `nextn_path` one with a
layer for multi-token prediction. `encoder_path` makes an encoder, which the tool does not write.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import secrets
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from support import models

import moestream as ms

Array = np.ndarray[Any, np.dtype[Any]]
Change = Callable[[str, Any], Any]  # a key (without the architecture) and its value: the new value
Tensors = Callable[[str, Array], list[tuple[str, Array]]]  # a tensor: the tensors that take its place

TOOL = models.REPO / "build" / "dev" / "tools" / "test-llama-archs"


@functools.cache
def folder() -> pathlib.Path:
    """Where the models of the llama.cpp commit in use are; built and written first if they are not there.

    AssertionError, with what the tool said, if it fails.
    """
    commit = str(ms.build_info()["llama_commit"])[:12]
    target = models.model_folder() / f"archs-{commit}"
    if target.exists():
        return target
    if not TOOL.exists():
        done = subprocess.run(["make", "archs"], cwd=models.REPO, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"make archs failed:\n{done.stdout}{done.stderr}"
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    fresh.mkdir(parents=True)
    try:
        done = subprocess.run([TOOL, "-o", fresh], capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode == 0, f"{TOOL.name} gave {done.returncode}:\n{done.stdout}{done.stderr}"
        for path in fresh.glob("*-dense.gguf"):
            path.unlink()
        try:
            fresh.rename(target)
        except OSError:  # another process was first; what it made is the same
            assert target.exists()
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def path(arch: str) -> pathlib.Path:
    """The model of one architecture."""
    return folder() / f"{arch}-moe.gguf"


# ---- eight experts of two ----------------------------------------------------------------------------------------

N_UPSTREAM, N_WIDE = 2, 8
# What has one entry for each expert: the banks, what scales and biases their rows, and the router.
_BANKS = tuple(f"ffn_{x}_{kind}.weight" for x in ("gate", "up", "down", "gate_up") for kind in ("exps", "chexps"))
_ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b", "exp_probs_b.bias", "exp_probs_b_vl.bias")
_PER_EXPERT = ("_exps.bias", "_exps.scale", "_exps.input_scale")


def _widened(name: str, data: Array) -> Array:
    """`data`, [2, ...], continued to [8, ...]: experts that differ, and a router that prefers none of them."""
    tail = name.split(".", 2)[2]
    if tail in _ROUTERS:
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))
        # Scores of about 1 for normed activations, and biases that never outweigh them.
        scale = data.shape[-1] ** -0.5 if data.ndim > 1 else 0.01
        return rng.normal(0.0, scale, (N_WIDE, *data.shape[1:])).astype(np.float32)
    # Another expert's rows, turned by some places: other values, the same distribution.
    return np.stack([np.roll(data[e % N_UPSTREAM], 3 * (e // N_UPSTREAM)) for e in range(N_WIDE)])


def _written(writer: gguf.GGUFWriter, fresh: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Writes what `writer` was given to `fresh`, which then becomes `target`: a file under that name is complete."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fresh.rename(target)
    return target


def _derived(arch: str, label: str, change: Change, tensors: Tensors) -> pathlib.Path:
    """A model made of upstream's for `arch`: its values through `change`, its tensors through `tensors`."""
    key = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:12]
    target = folder() / f"{arch}-{label}-{key}.gguf"
    if target.exists():
        return target
    reader = gguf.GGUFReader(path(arch))
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    writer = gguf.GGUFWriter(fresh, str(reader.fields[gguf.Keys.General.ARCHITECTURE].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == gguf.Keys.General.ARCHITECTURE:
            continue
        value = change(field.name.partition(".")[2], field.contents())
        if value == []:  # gguf writes no empty arrays; llama.cpp takes a missing one for empty
            continue
        writer.add_key_value(field.name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        for name, data in tensors(tensor.name, tensor.data):
            tail = name.split(".", 2)[2] if name.startswith("blk.") else ""
            if tail in _BANKS:
                packed = gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(name, data)
    return _written(writer, fresh, target)


def _wide_value(key: str, value: Any) -> Any:
    return N_WIDE if key == "expert_count" else value


def _wide_tensor(name: str, data: Array) -> list[tuple[str, Array]]:
    tail = name.split(".", 2)[2] if name.startswith("blk.") else ""
    per_expert = tail in _BANKS or tail in _ROUTERS or tail.endswith(_PER_EXPERT)
    return [(name, _widened(name, data) if per_expert else data)]


def wide_path(arch: str) -> pathlib.Path:
    """The model of one architecture with N_WIDE experts, its banks in Q8_0. Written if it is not there yet."""
    return _derived(arch, "wide", _wide_value, _wide_tensor)


def nextn_path(arch: str = "qwen35moe") -> pathlib.Path:
    """The wide model with one more layer, a NextN (multi-token prediction) layer made of its last one."""
    n_layer = ms.plan(path(arch)).n_layer
    last = f"blk.{n_layer - 1}."

    def value(key: str, old: Any) -> Any:
        if key == "block_count":
            return n_layer + 1
        if key == "nextn_predict_layers":
            return 1
        # What is given for each layer is given for one more.
        per_layer = isinstance(old, list) and len(old) == n_layer
        return [*old, old[-1]] if per_layer else _wide_value(key, old)

    def tensors(name: str, data: Array) -> list[tuple[str, Array]]:
        out = _wide_tensor(name, data)
        if not name.startswith(last):
            return out
        copy = f"blk.{n_layer}.{name.removeprefix(last)}"
        if not name.endswith("scale"):  # optional, and llama.cpp counts them wrongly where NextN layers are not loaded
            out += _wide_tensor(copy, data)
        if name == f"{last}attn_norm.weight":
            n_embd = len(data)
            rng = np.random.default_rng(7)
            out += [(f"blk.{n_layer}.nextn.{x}.weight", data) for x in ("enorm", "hnorm", "shared_head_norm")]
            weights = rng.normal(0.0, (2 * n_embd) ** -0.5, (n_embd, 2 * n_embd)).astype(np.float32)
            out.append((f"blk.{n_layer}.nextn.eh_proj.weight", weights))
        return out

    return _derived(arch, "nextn", value, tensors)


# ---- an encoder --------------------------------------------------------------------------------------------------


def encoder_path() -> pathlib.Path:
    """A Mixture-of-Experts encoder, nomic-bert-moe, which upstream's tool does not write: 4 layers, the odd ones with
    8 experts of which 2 are used, 256 wide, Q8_0 experts, mean pooling. Written if it is not there yet."""
    key = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:12]
    target = folder() / f"nomic-bert-moe-{key}.gguf"
    if target.exists():
        return target
    n_layer, n_embd, n_ff, n_vocab, n_used = 4, 256, 384, 128, 2
    arch, rng = "nomic-bert-moe", np.random.default_rng(11)
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    writer = gguf.GGUFWriter(fresh, arch)
    writer.add_block_count(n_layer)
    writer.add_context_length(512)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_expert_count(N_WIDE)
    writer.add_expert_used_count(n_used)
    writer.add_moe_every_n_layers(2)
    writer.add_tokenizer_model("test")
    writer.add_token_list([f"tok_{i}" for i in range(n_vocab)])
    writer.add_token_types([1] * n_vocab)
    writer.add_token_scores([0.0] * n_vocab)
    writer.add_token_type_count(1)

    def weight(name: str, *shape: int) -> None:
        values = rng.normal(0.0, shape[-1] ** -0.5, shape).astype(np.float32)
        if name.endswith(_BANKS):
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(n_embd, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(n_embd, np.float32))

    weight("token_embd.weight", n_vocab, n_embd)
    weight("token_types.weight", 1, n_embd)
    norm("token_embd_norm")
    for il in range(n_layer):
        for x in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weight(f"blk.{il}.{x}.weight", n_embd, n_embd)
        norm(f"blk.{il}.attn_output_norm")
        norm(f"blk.{il}.layer_output_norm")
        if il % 2 == 1:
            weight(f"blk.{il}.ffn_gate_inp.weight", N_WIDE, n_embd)
            weight(f"blk.{il}.ffn_up_exps.weight", N_WIDE, n_ff, n_embd)
            weight(f"blk.{il}.ffn_down_exps.weight", N_WIDE, n_embd, n_ff)
        else:
            weight(f"blk.{il}.ffn_up.weight", n_ff, n_embd)
            weight(f"blk.{il}.ffn_down.weight", n_embd, n_ff)
    return _written(writer, fresh, target)
