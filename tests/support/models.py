"""The models that tests run on, and fresh Python processes to run them in.

Models are made once and kept in build/test-models (or $MOESTREAM_TEST_MODELS), in a folder named after a hash of
their recipe and of the code that makes them: change either and a new one is made. A folder under its final name is
complete. The files are shared by all tests and read-only: a test that changes a model copies it first.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace

from moestream import _block_types, _gguf_writer, synthetic
from moestream.synthetic import Spec

REPO = pathlib.Path(__file__).resolve().parents[2]

TINY = Spec()
"""qwen3moe, 4 layers, 8 experts of which 2 are used, 256 wide, Q8_0: the default of every test."""

MODELS: dict[str, Spec] = {
    "many_experts": Spec(n_expert=128, n_expert_used=8, expert_type="Q4_K"),
    "top1": Spec(n_expert_used=1),
    "four_shards": Spec(n_shards=4),
    "metadata_shard": Spec(n_shards=3, first_shard_metadata_only=True),
    # 12 tensors a layer: 579 in all, and 48 size-equal layers.
    "wide_48_layers": Spec(n_layer=48, expert_type="Q4_K", dense_type="Q8_0", random_blocks=True),
    # 8 layers of 64 experts, about 430 MB: large enough for memory limits to bite.
    "mid_430mb": Spec(n_layer=8, n_embd=512, n_ff=512, n_expert=64, n_expert_used=4, n_head=8, random_blocks=True),
    "dense_model": Spec(arch="llama", n_expert=0),
    "mixtral": Spec(arch="llama", expert_type="Q4_0"),
    "gpt_oss_like": Spec(arch="gpt-oss", expert_type="MXFP4"),
    "fused_gate_up": Spec(arch="hy_v3", fused_gate_up=True, n_layer_dense_lead=1),
    "leading_dense": Spec(arch="dots1", n_head_kv=4, n_layer_dense_lead=2),
    "shared_experts": Spec(arch="qwen2moe"),
    # ffn_down larger in every other layer, as in Q4_K_M: two size classes.
    "mixed_layers": Spec(expert_type=tuple(("Q4_K", "Q4_K", "Q6_K" if il % 2 == 0 else "Q4_K") for il in range(4))),
    # Another type for each projection and layer.
    "mixed_projections": Spec(
        expert_type=(
            ("F32", "Q8_0", "Q4_K"),
            ("IQ4_XS", "F16", "Q5_K"),
            ("BF16", "Q2_K", "MXFP4"),
            ("Q6_K", "TQ2_0", "F32"),
        )
    ),
    "aligned_4096": Spec(alignment=4096),
    "reversed_order": Spec(tensor_order="reversed"),
    "shuffled_order": Spec(tensor_order="shuffled", seed=3),
}
"""The models with a name. Fixtures of the same names hand out their paths."""


@functools.cache
def _generator_hash() -> str:
    digest = hashlib.sha256()
    for module in (_block_types, _gguf_writer, synthetic):
        assert module.__file__ is not None
        digest.update(pathlib.Path(module.__file__).read_bytes())
    return digest.hexdigest()


def model_folder() -> pathlib.Path:
    """Where the models are kept."""
    return pathlib.Path(os.environ.get("MOESTREAM_TEST_MODELS") or REPO / "build" / "test-models")


def make(spec: Spec, label: str = "model") -> pathlib.Path:
    """The path of a model (of its first shard), written if it is not there yet."""
    key = hashlib.sha256((spec.recipe_json() + _generator_hash()).encode()).hexdigest()[:20]
    folder = model_folder() / f"{label}-{key}"
    first = synthetic.shard_paths(folder / "model.gguf", spec.n_shards)[0]
    if first.exists():
        return first
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    fresh.mkdir(parents=True)
    try:
        for file in synthetic.write_model(fresh / "model.gguf", spec):
            file.path.chmod(0o444)
        try:
            fresh.rename(folder)
        except OSError:  # another process was first; what it made is the same
            if not first.exists():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return first


def named(name: str) -> pathlib.Path:
    """The path of one of MODELS."""
    return make(MODELS[name], name)


def tiny(expert_type: synthetic.ExpertTypes = "Q8_0", **changes: object) -> pathlib.Path:
    """TINY with another expert type, and with any other field of Spec changed."""
    label = f"tiny-{expert_type}" if isinstance(expert_type, str) else "tiny"
    return make(replace(TINY, expert_type=expert_type, **changes), label)  # type: ignore[arg-type]


def all_shards(first: pathlib.Path) -> list[pathlib.Path]:
    """All files of a model, given its first, in order."""
    return sorted(first.parent.glob("*.gguf"))


def run_python(
    code: str,
    *,
    env: Mapping[str, str | None] | None = None,
    preload: str | pathlib.Path | None = None,
    timeout: float = 120.0,
    args: tuple[str, ...] = (),
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh Python process.

    `env` changes the environment (None removes a variable), `preload` is put in front of LD_PRELOAD, `args` are in
    sys.argv[1:], `timeout` is in seconds. With `check` a nonzero exit is an AssertionError that shows the output.
    subprocess.TimeoutExpired, with what was printed so far, if it takes too long (the process is killed then).
    """
    environment = dict(os.environ)
    for name, value in (env or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    if preload is not None:
        before = environment.get("LD_PRELOAD")
        environment["LD_PRELOAD"] = f"{preload}:{before}" if before else str(preload)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code), *args],
        capture_output=True, text=True, errors="replace", env=environment, timeout=timeout, check=False,
    )  # fmt: skip
    assert not check or done.returncode == 0, (
        f"exit status {done.returncode}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
    )
    return done
