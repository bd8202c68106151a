"""Split models (CASES S7): the shards are one model, and whatever is wrong with one of them is named at open.

Nothing here may be found out during a decode: a model whose shards do not belong together is refused before it loads.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import pytest
from support import compare as c
from support import models, record

import moestream as ms
from moestream import synthetic
from moestream.synthetic import Spec

WORK = c.prompts_then_tokens((1, 9, 64), 4)
SPLITS = {
    "2 shards": Spec(n_shards=2),
    "4 shards": Spec(n_shards=4),
    "9 shards, the first without tensors": Spec(n_shards=9, first_shard_metadata_only=True),
    "3 shards, experts of a layer apart": Spec(n_shards=3, tensor_order="shuffled", expert_type="Q4_K", seed=5),
}


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Four shards of one model that a test may damage."""
    for path in models.all_shards(models.make(Spec(n_shards=4), "four_shards")):
        copy = tmp_path / path.name
        shutil.copy(path, copy)
        copy.chmod(0o644)
    return sorted(tmp_path.glob("*.gguf"))


def open_streamed(path: Path) -> ms.Model:
    return ms.Model(path, stream=ms.Stream(cache="min"))


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_model_streams_bit_for_bit(name: str) -> None:
    path = models.make(SPLITS[name], "split")
    tally = c.Tally()
    with c.reference(path) as ref:
        variants = [c.Variant("min", "io_uring"), c.Variant("min", "pread", "off")]
        c.compare(ref, "prompts", WORK, [c.Setting(1, 8), c.Setting(1, 64)], variants, tally)
    assert tally.evictions > 0
    assert ms.plan(path).n_files == SPLITS[name].n_shards
    record.write("shape", name, True, "")


def test_experts_of_one_layer_lie_in_different_shards() -> None:
    """What makes the case above worth its name."""
    plan = ms.plan(models.make(SPLITS["3 shards, experts of a layer apart"], "split"))
    files = {t.layer: {u.file for u in plan.tensors if u.is_expert and u.layer == t.layer} for t in plan.tensors}
    assert any(len(found) > 1 for found in files.values())


def test_four_shards_are_the_one_file(tmp_path: Path) -> None:
    (whole,) = synthetic.write_model(tmp_path / "whole.gguf", Spec())
    split = models.make(Spec(n_shards=4), "four_shards")
    tally = c.Tally()
    with c.reference(whole.path) as ref:
        expected = ref.results("prompts", WORK, c.Setting(1, 8))
        with c.streamed(split, c.Variant("min")) as model, c.Setting(1, 8).context(model) as context:
            tally.numbers = c.same_bits(expected, WORK(context), "four shards against one file")
    assert tally.numbers > 0


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_missing_shard_is_named(missing: int, shards: list[Path]) -> None:
    shards[missing].unlink()
    with pytest.raises(FileNotFoundError, match=shards[missing].name):
        open_streamed(shards[0])


def test_a_shard_other_than_the_first_says_to_pass_the_first(shards: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"shard 2 of 4; pass the first shard.*-00001-of-00004\.gguf"):
        open_streamed(shards[1])


def test_symbolic_links_to_shards_work(tmp_path: Path) -> None:
    """As in the cache of a model hub: names are links, the files lie elsewhere under other names."""
    links = tmp_path / "links"
    links.mkdir()
    for i, path in enumerate(models.all_shards(models.make(Spec(n_shards=4), "four_shards"))):
        blob = tmp_path / f"blob-{i}"
        shutil.copy(path, blob)
        (links / path.name).symlink_to(blob)
    first = sorted(links.glob("*.gguf"))[0]
    with open_streamed(first) as model, c.Setting(1, 8).context(model) as context:
        got = WORK(context)
    with c.reference(first) as ref:
        c.same_bits(ref.results("prompts", WORK, c.Setting(1, 8)), got, "linked shards")


def test_swapped_contents_are_refused(shards: list[Path]) -> None:
    other = shards[1].with_suffix(".swap")
    shards[1].rename(other)
    shards[2].rename(shards[1])
    other.rename(shards[2])
    with pytest.raises(ms.FormatError, match=r"should be shard 2 of 4, but says it is shard 3"):
        open_streamed(shards[0])


def test_a_shard_of_another_split_is_refused(shards: list[Path], tmp_path: Path) -> None:
    """The right number in the right place, but of a model that was split otherwise."""
    made = synthetic.write_model(tmp_path / "other.gguf", Spec(n_shards=3))
    shutil.copy(made[1].path, shards[1])
    with pytest.raises(ms.FormatError, match=r"is shard 2 of 3, not of 4"):
        open_streamed(shards[0])


@pytest.mark.parametrize("cut", [1, 4096])
def test_a_shard_that_is_cut_short_is_named(cut: int, shards: list[Path]) -> None:
    size = shards[2].stat().st_size
    with shards[2].open("r+b") as file:
        file.truncate(size - cut)
    with pytest.raises((ms.TruncatedError, ms.FormatError), match=shards[2].name):
        open_streamed(shards[0])


def test_a_file_whose_name_hides_its_shards_is_refused(shards: list[Path]) -> None:
    renamed = shards[0].with_name("model.gguf")
    shards[0].rename(renamed)
    with pytest.raises(ValueError, match=r"one of 4 shards, but its name does not end in"):
        open_streamed(renamed)


def test_big_endian_and_old_files_are_refused_by_name(tmp_path: Path) -> None:
    whole = models.make(Spec(), "tiny-Q8_0").read_bytes()
    for version, message in ((b"\x00\x00\x00\x03", "big-endian"), (b"\x02\x00\x00\x00", "GGUF version 2")):
        path = tmp_path / "model.gguf"
        path.write_bytes(whole[:4] + version + whole[8:])
        with pytest.raises(ms.FormatError, match=message):
            open_streamed(path)


def test_a_plan_of_a_split_model_adds_up() -> None:
    path = models.make(SPLITS["4 shards"], "split")
    plan = ms.plan(path)
    sizes = [sum(t.n_bytes for t in gguf.GGUFReader(shard).tensors) for shard in models.all_shards(path)]
    assert [sum(t.bytes for t in plan.tensors if t.file == i) for i in range(4)] == sizes
