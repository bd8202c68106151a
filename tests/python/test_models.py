"""The synthetic models, the writer below them, and the test rigs above them."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from support import expected_skips, models

from moestream import _block_types, _gguf_writer, synthetic
from moestream._block_types import BLOCK_TYPES
from moestream._gguf_writer import KeyValue, TensorSource
from moestream.synthetic import Spec

# Types that the installed gguf package may not know by name, though llama.cpp does.
READABLE = [name for name in BLOCK_TYPES if name in GGMLQuantizationType.__members__]
DEQUANTIZABLE = [name for name in READABLE if name != "Q1_0"]


def sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tensors_of(*files: pathlib.Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> (type, ggml shape, bytes), over all shards of a model."""
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for file in files:
        for tensor in GGUFReader(file).tensors:
            assert tensor.name not in found
            shape = tuple(int(n) for n in tensor.shape)
            found[tensor.name] = (tensor.tensor_type.name, shape, tensor.data.tobytes())
    return found


# ---- weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READABLE)
def test_block_sizes_are_those_of_gguf(name: str) -> None:
    from gguf import GGML_QUANT_SIZES

    kind = BLOCK_TYPES[name]
    member = GGMLQuantizationType[name]
    assert kind.id == int(member)
    assert (kind.weights, kind.bytes) == GGML_QUANT_SIZES[member]


@pytest.mark.parametrize("random_blocks", [False, True])
@pytest.mark.parametrize("name", DEQUANTIZABLE)
def test_weights_are_finite_and_have_the_scale_asked_for(name: str, random_blocks: bool) -> None:
    kind, shape, rms = BLOCK_TYPES[name], (256, 1024), 0.03
    packed = _block_types.random_weights("k", kind, shape, rms, random_blocks=random_blocks)
    assert packed.dtype == np.uint8
    assert packed.nbytes == kind.nbytes(shape)
    if kind.weights == 1:
        values = dequantize(packed.view({"F32": "<f4", "F16": "<f2"}.get(name, "u1")), GGMLQuantizationType[name])
    else:
        values = dequantize(packed.reshape(-1, kind.bytes), GGMLQuantizationType[name])
    assert np.isfinite(values).all()
    measured = float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
    # MXFP4's scales are powers of two, so random blocks of it hit any one scale only within a factor of two; rounding
    # to three values (-1, 0, 1 times the largest of a block) makes ternary weights larger than what they stand for.
    tolerance = {"MXFP4": 0.5, "TQ1_0": 0.2, "TQ2_0": 0.2}.get(name, 0.08)
    assert measured == pytest.approx(rms, rel=tolerance)
    assert abs(float(values.mean())) < 0.05 * rms


def test_weights_depend_on_the_key_and_on_nothing_else() -> None:
    kind = BLOCK_TYPES["Q4_K"]
    one = _block_types.random_weights("a", kind, (2, 256), 1.0, random_blocks=True)
    assert (one == _block_types.random_weights("a", kind, (2, 256), 1.0, random_blocks=True)).all()
    assert (one != _block_types.random_weights("b", kind, (2, 256), 1.0, random_blocks=True)).any()


def test_the_noise_has_mean_zero_and_variance_one() -> None:
    for noise in (_block_types.unit_noise("n", (1000, 300)), _block_types.uniform_noise("n", (1000, 300))):
        assert noise.dtype == np.float32
        assert abs(float(noise.mean())) < 0.01
        assert float(noise.std()) == pytest.approx(1.0, abs=0.01)


def test_an_unknown_type_and_a_broken_row_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown weight type 'Q9'.*Q4_K"):
        _block_types.block_type("Q9")
    with pytest.raises(ValueError, match="rows of 100 weights are not whole Q4_K blocks of 256"):
        Spec(n_ff=100, expert_type="Q4_K")


# ---- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in models.MODELS if name != "mid_430mb"])
def test_the_files_parse_and_hold_what_the_spec_says(name: str) -> None:
    spec = models.MODELS[name]
    files = models.all_shards(models.named(name))
    assert len(files) == spec.n_shards
    found = tensors_of(*files)
    assert sum(len(data) for _, _, data in found.values()) == spec.tensor_bytes()
    fields = GGUFReader(files[0]).fields
    assert fields["general.architecture"].contents() == spec.arch
    assert fields[f"{spec.arch}.block_count"].contents() == spec.n_layer
    for il in range(spec.n_layer):
        if not spec.has_experts(il):
            assert f"blk.{il}.ffn_up.weight" in found
            assert f"blk.{il}.ffn_down_exps.weight" not in found
            continue
        assert fields[f"{spec.arch}.expert_count"].contents() == spec.n_expert
        kind, shape, _ = found[f"blk.{il}.ffn_down_exps.weight"]
        assert (kind, shape) == (spec.expert_type_of(il, "down"), (spec.n_ff, spec.n_embd, spec.n_expert))
        assert (f"blk.{il}.ffn_gate_up_exps.weight" in found) == spec.fused_gate_up


@pytest.mark.parametrize("expert_type", READABLE)
def test_every_type_makes_a_model_that_parses(expert_type: str, tiny_moe: Callable[..., pathlib.Path]) -> None:
    found = tensors_of(tiny_moe(expert_type))
    assert found["blk.3.ffn_up_exps.weight"][:2] == (expert_type, (256, 256, 8))


def test_the_same_spec_gives_the_same_bytes(tmp_path: pathlib.Path) -> None:
    spec = Spec(expert_type="Q4_K", tensor_order="shuffled")
    (one,) = synthetic.write_model(tmp_path / "one.gguf", spec)
    (two,) = synthetic.write_model(tmp_path / "two.gguf", spec)
    assert one.sha256 == two.sha256 == sha256(one.path)
    assert one.bytes == one.path.stat().st_size
    (other,) = synthetic.write_model(tmp_path / "two.gguf", dataclasses.replace(spec, seed=2))
    assert other.sha256 != one.sha256


def test_a_fresh_process_makes_the_same_bytes(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: pathlib.Path
) -> None:
    code = """
        import pathlib, sys
        from moestream import synthetic
        print(synthetic.write_model(pathlib.Path(sys.argv[1]), synthetic.Spec())[0].sha256)
    """
    there = run_python(code, args=(str(tmp_path / "there.gguf"),), env={"PYTHONHASHSEED": "7"}).stdout.strip()
    assert there == synthetic.write_model(tmp_path / "here.gguf", Spec())[0].sha256


@pytest.mark.parametrize("n_shards", [2, 4, 9])
@pytest.mark.parametrize("metadata_only", [False, True])
def test_shards_hold_the_tensors_of_the_single_file(n_shards: int, metadata_only: bool, tmp_path: pathlib.Path) -> None:
    (whole,) = synthetic.write_model(tmp_path / "whole.gguf", Spec())
    spec = Spec(n_shards=n_shards, first_shard_metadata_only=metadata_only)
    shards = [file.path for file in synthetic.write_model(tmp_path / "split.gguf", spec)]
    assert [path.name for path in shards] == [f"split-{i + 1:05d}-of-{n_shards:05d}.gguf" for i in range(n_shards)]
    found = tensors_of(*shards)
    assert found == tensors_of(whole.path)
    for i, path in enumerate(shards):
        reader = GGUFReader(path)
        assert reader.fields["split.no"].contents() == i
        assert reader.fields["split.count"].contents() == n_shards
        assert reader.fields["split.tensors.count"].contents() == len(found)
        assert ("general.architecture" in reader.fields) == (i == 0)
        assert (len(reader.tensors) == 0) == (metadata_only and i == 0)


def test_the_order_of_tensors_changes_their_places_only(tmp_path: pathlib.Path) -> None:
    files = {
        order: synthetic.write_model(tmp_path / f"{order}.gguf", Spec(tensor_order=order))[0].path
        for order in ("normal", "reversed", "shuffled")
    }
    names = {order: [tensor.name for tensor in GGUFReader(path).tensors] for order, path in files.items()}
    assert names["reversed"] == names["normal"][::-1]
    assert names["shuffled"] not in (names["normal"], names["reversed"])
    assert tensors_of(files["normal"]) == tensors_of(files["reversed"]) == tensors_of(files["shuffled"])


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_tensors_start_at_multiples_of_the_alignment(alignment: int, make_moe: Callable[..., pathlib.Path]) -> None:
    reader = GGUFReader(make_moe(Spec(alignment=alignment)))
    assert all(int(tensor.data_offset) % alignment == 0 for tensor in reader.tensors)
    assert ("general.alignment" in reader.fields) == (alignment != 32)


def test_no_two_experts_are_the_same_even_where_layers_share_bytes(make_moe: Callable[..., pathlib.Path]) -> None:
    spec = Spec(n_layer=4, n_expert=8, share_blocks=True, random_blocks=True)
    found = tensors_of(make_moe(spec))
    for projection in ("gate", "up", "down"):
        banks = [found[f"blk.{il}.ffn_{projection}_exps.weight"][2] for il in range(spec.n_layer)]
        n = len(banks[0]) // spec.n_expert
        slices = [[bank[e * n : (e + 1) * n] for e in range(spec.n_expert)] for bank in banks]
        assert all(len(set(layer)) == spec.n_expert for layer in slices)
        for expert in range(spec.n_expert):
            assert len({layer[expert] for layer in slices}) == spec.n_layer
        assert set(slices[0]) == set(slices[3])  # shared they are


def test_types_can_be_a_function_of_layer_and_projection(make_moe: Callable[..., pathlib.Path]) -> None:
    def kinds(il: int, projection: str) -> str:
        return "F16" if projection == "down" else ("Q8_0", "Q4_0")[il % 2]

    spec = Spec(expert_type=kinds)
    found = tensors_of(make_moe(spec))
    assert found["blk.1.ffn_up_exps.weight"][0] == "Q4_0"
    assert found["blk.2.ffn_gate_exps.weight"][0] == "Q8_0"
    assert found["blk.2.ffn_down_exps.weight"][0] == "F16"
    assert spec.recipe()["expert_type"][1] == ["Q4_0", "Q4_0", "F16"]


def test_the_430_mb_model_has_its_size() -> None:
    spec = models.MODELS["mid_430mb"]
    assert models.named("mid_430mb").stat().st_size == pytest.approx(430e6, rel=0.05)
    assert spec.expert_bytes() > 0.9 * spec.tensor_bytes()


def test_the_large_presets_have_the_sizes_they_stand_for() -> None:
    qwen = synthetic.QWEN3_30B_SHAPE
    assert qwen.tensor_bytes() == pytest.approx(18e9, rel=0.03)
    assert [qwen.expert_type_of(il, "down") for il in (0, 1)] == ["Q6_K", "Q4_K"]
    assert synthetic.GPT_OSS_20B_SHAPE.expert_bytes() == 24 * 32 * 3 * 2880 * 2880 // 32 * 17
    small, large = synthetic.SMALL_EXPERT_EXTREME, synthetic.LARGE_EXPERT_EXTREME
    assert BLOCK_TYPES["Q4_K"].nbytes((small.n_ff, small.n_embd)) < 100 << 10
    assert BLOCK_TYPES["Q4_K"].nbytes((large.n_ff, large.n_embd)) > 50 << 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "mamba"}, "arch 'mamba' is not one of"),
        ({"n_expert_used": 9}, "n_expert_used 9"),
        ({"n_expert": 0}, "no dense form"),
        ({"n_vocab": 100}, "n_vocab 100"),
        ({"n_head": 3}, "n_head 3"),
        ({"n_layer": 0}, "n_layer is 0"),
        ({"n_shards": 10}, "n_shards 10"),
        ({"first_shard_metadata_only": True}, "first_shard_metadata_only"),
        ({"fused_gate_up": True}, "fused"),
        ({"n_layer_dense_lead": 1}, "leading dense"),
        ({"tensor_order": "random"}, "tensor_order"),
        ({"expert_type": ("Q4_0",)}, "expert_type names 1 layers of 4"),
        ({"expert_type": "Q4_X"}, "unknown weight type"),
        ({"arch": "dots1"}, "n_head_kv = n_head"),
    ],
)
def test_a_senseless_spec_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec(**changes)  # type: ignore[arg-type]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gguf_writer.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 10**12, 10**9))
    with pytest.raises(OSError, match=r"needs 18\.\d+ GB .* only 1\.00 GB are free") as caught:
        synthetic.write_model(tmp_path / "big.gguf", synthetic.QWEN3_30B_SHAPE)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["raises", "too short"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(fault: str, tmp_path: pathlib.Path) -> None:
    target = tmp_path / "m.gguf"
    target.write_bytes(b"the old one")

    def chunks() -> list[np.ndarray]:
        if fault == "raises":
            raise OSError(errno.EIO, "made up")
        return [np.zeros(4, dtype=np.uint8)]

    tensor = TensorSource("t", (8,), BLOCK_TYPES["F32"], chunks)
    with pytest.raises((OSError, ValueError)):
        _gguf_writer.write_gguf(target, [KeyValue.text("general.architecture", "llama")], [tensor])
    assert target.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [target]


def test_temporary_names_cannot_be_guessed(tmp_path: pathlib.Path) -> None:
    seen = []

    def chunks() -> list[np.ndarray]:
        seen.extend(path.name for path in tmp_path.iterdir())
        return [np.zeros(32, dtype=np.uint8)]

    for _ in range(2):
        tensor = TensorSource("t", (8,), BLOCK_TYPES["F32"], chunks)
        _gguf_writer.write_gguf(tmp_path / "m.gguf", [], [tensor])
        (tmp_path / "m.gguf").unlink()
    assert len(set(seen)) == 2
    assert all(len(name) > 32 and name.startswith(_gguf_writer.TEMP_PREFIX) for name in seen)


@pytest.mark.parametrize("alignment", [0, 4, 48])
def test_a_senseless_alignment_is_refused(alignment: int, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="power of two"):
        _gguf_writer.write_gguf(tmp_path / "m.gguf", [], [], alignment=alignment)


# ---- rigs ------------------------------------------------------------------------------------------------------


def test_models_are_made_once_and_read_only(tiny_moe: Callable[..., pathlib.Path]) -> None:
    path = tiny_moe("Q8_0")
    assert path == tiny_moe("Q8_0")
    assert path.stat().st_mode & 0o222 == 0
    assert path != tiny_moe("Q8_0", seed=2)


def test_the_command_line_makes_models_without_a_build(tmp_path: pathlib.Path) -> None:
    tool = models.REPO / "tools" / "make_model.py"
    out = tmp_path / "m.gguf"
    done = subprocess.run(
        [sys.executable, tool, "synthetic", out, "--expert-type", "Q4_K,Q4_K,Q6_K", "--quiet"],
        capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{out}\n", "")
    assert tensors_of(out)["blk.0.ffn_down_exps.weight"][0] == "Q6_K"
    done = subprocess.run(
        [sys.executable, tool, "synthetic", out, "--n-expert-used", "99"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "make_model.py: n_expert_used 99 is not in 1..8\n"


def test_run_python_passes_the_environment_and_shows_failures(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_python(
        "import os, sys; print(os.environ['MS_X'], 'HOME' in os.environ, sys.argv[1])",
        env={"MS_X": "1", "HOME": None},
        args=("a",),
    )
    assert done.stdout.split() == ["1", "False", "a"]
    with pytest.raises(AssertionError, match=r"exit status 3(.|\n)*boom"):
        run_python("import sys; print('boom'); sys.exit(3)")
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("import time; time.sleep(60)", timeout=0.5)


SKIPPING = """
import pytest
def test_known(): pytest.skip("needs io_uring: refused here")
def test_unknown(): pytest.skip("did not feel like it")
@pytest.mark.xfail
def test_expected_failure(): assert False
def test_fine(): pass
"""


@pytest.mark.parametrize(
    ("ci", "selected", "status"),
    [("true", "", 1), ("", "", 0), ("true", "not test_unknown", 0), ("true", "test_unknown", 1), ("false", "", 0)],
)
def test_an_unexpected_skip_fails_the_run_in_ci(
    ci: str, selected: str, status: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "skips.txt").write_text("needs io_uring: *  # containers refuse it\n")
    (tmp_path / "test_it.py").write_text(SKIPPING)
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(models.REPO / 'tests')!r})\n"
        "import pathlib\nfrom support.expected_skips import ExpectedSkips\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(ExpectedSkips(pathlib.Path(__file__).parent / 'skips.txt'))\n"
    )
    monkeypatch.setenv("CI", ci)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, "-k", selected],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    assert ("test_unknown: did not feel like it" in done.stdout) == (selected != "not test_unknown")
    assert "test_known: needs" not in done.stdout


def test_a_pattern_without_a_reason_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "skips.txt"
    path.write_text("# a comment\n\nneeds x: *\n")
    with pytest.raises(ValueError, match=r"skips\.txt:3"):
        expected_skips.read_patterns(path)
    assert expected_skips.read_patterns(models.REPO / "tests" / "expected_skips.txt")
