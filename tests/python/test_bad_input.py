"""Bad input is a clear exception of a documented kind, and nothing leaks (issue 2, line 7; CASES S9, S15, S17, S7)."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable

import pytest
from support import models

import moestream as ms


def _fds() -> int:
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def _copy(tmp_path: pathlib.Path, source: pathlib.Path) -> pathlib.Path:
    target = tmp_path / source.name
    shutil.copyfile(source, target)
    return target


def _raises(
    kinds: type[Exception] | tuple[type[Exception], ...], words: str, path: object, **options: object
) -> BaseException:
    before = _fds()
    stream = options.pop("stream", ms.Stream(cache="min"))
    with pytest.raises(kinds, match=words) as caught:
        ms.Model(path, stream=stream, **options)  # type: ignore[arg-type]
    assert _fds() == before
    assert "\n" not in str(caught.value)
    return caught.value


def test_no_such_file(tmp_path: pathlib.Path) -> None:
    _raises(FileNotFoundError, "absent.gguf", tmp_path / "absent.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"not a model at all" * 100, b"GGUF" + b"\xff" * 60])
def test_not_a_gguf(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    _raises((ms.FormatError, ms.ReadError), "other.gguf", path)


def test_a_folder_and_a_named_pipe_are_refused_at_once(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    _raises(ms.MoestreamError, "folder.gguf", tmp_path / "folder.gguf")
    _raises(ms.MoestreamError, "pipe.gguf", tmp_path / "pipe.gguf")


@pytest.mark.parametrize("cut", ["one byte", "1 MB", "in the tensor table", "in the metadata"])
def test_a_truncated_file_is_named_at_load(tmp_path: pathlib.Path, cut: str) -> None:
    """S17."""
    path = _copy(tmp_path, models.tiny())
    size = path.stat().st_size
    at = {"one byte": size - 1, "1 MB": size - 10**6, "in the tensor table": 40_000, "in the metadata": 300}[cut]
    os.truncate(path, min(at, size - 1))
    _raises((ms.FormatError, ms.ReadError), path.name, path)


def test_a_dense_model_with_stream_is_an_error_and_without_loads() -> None:
    """S15."""
    path = models.named("dense_model")
    _raises(ms.UnsupportedError, "no routed experts", path)
    ms.Model(path).close()


def test_stream_options_without_experts_left_to_stream_are_an_error() -> None:
    """S15: everything was placed elsewhere."""
    _raises(ms.UnsupportedError, "left to stream", models.tiny(), cpu_moe=True)


@pytest.mark.parametrize("missing", [1, 4096])
def test_a_cache_below_the_minimum_says_the_number(missing: int) -> None:
    """S9."""
    least = ms.plan(models.tiny(), stream=True).min_cache_bytes
    error = _raises(MemoryError, str(least), models.tiny(), stream=ms.Stream(cache=least - missing))
    assert isinstance(error, ms.OutOfMemoryError)
    _raises(MemoryError, str(least), models.tiny(), stream=ms.Stream(cache=1))


def test_each_size_of_cache_gives_exact_logits_or_the_least_number() -> None:
    """S9: nothing, one expert, a byte too little, the least, everything, and more; for 1, 2 and 64 tokens."""
    path = models.tiny()
    plan = ms.plan(path, stream=True)
    expert = plan.expert_bytes // (plan.n_layer * plan.n_expert)
    prompts = ([1], [1, 2], [1 + i * 5 % 90 for i in range(64)])

    def run(model: ms.Model) -> list[bytes]:
        with model.context(128, n_threads=1, n_ubatch=8) as context:
            return [context.decode(prompt, pos=0, logits="all").tobytes() for prompt in prompts]

    with ms.Model(path, load_mode="none", use_extra_bufts=False) as resident:
        want = run(resident)
    least, full = plan.min_cache_bytes, plan.full_cache_bytes
    for cache in (0, least, least + 1, full - 1, full, 2 * full):
        with ms.Model(path, stream=ms.Stream(cache=cache)) as model:
            assert run(model) == want, cache
    for cache in (1, expert, least - 1):
        with pytest.raises(ms.OutOfMemoryError, match=str(least)):
            ms.Model(path, stream=ms.Stream(cache=cache))


@pytest.mark.parametrize("size", ["-1", "12XB", "nan", "inf", "", "1e400", "101%", "-5%", "0x10"])
def test_nonsense_sizes_are_value_errors(size: str) -> None:
    with pytest.raises(ValueError, match="cache"):
        ms.Stream(cache=size)


def test_a_cache_that_cannot_fit_into_memory_is_an_error_with_the_numbers() -> None:
    """Before the kernel's killer. A slab that holds everything is enough, so a huge number is cut to that."""
    with ms.Model(models.tiny(), stream=ms.Stream(cache="1000TiB")) as model:
        assert model.stats()["cache_bytes"] <= model.plan.full_cache_bytes


def test_the_second_shard_says_to_pass_the_first() -> None:
    """S7."""
    shards = models.all_shards(models.named("four_shards"))
    _raises(ms.MoestreamError, "00001-of-00004", shards[1])


def test_a_missing_shard_is_named(tmp_path: pathlib.Path) -> None:
    """S7."""
    shards = models.all_shards(models.named("four_shards"))
    for shard in shards:
        _copy(tmp_path, shard)
    (tmp_path / shards[2].name).unlink()
    _raises(FileNotFoundError, "00003-of-00004", tmp_path / shards[0].name)


def test_shards_may_be_symlinks_and_swapped_contents_are_refused(tmp_path: pathlib.Path) -> None:
    """S7."""
    shards = models.all_shards(models.named("four_shards"))
    for shard in shards:
        (tmp_path / shard.name).symlink_to(shard)
    ms.Model(tmp_path / shards[0].name, stream=ms.Stream(cache="min")).close()
    (tmp_path / shards[1].name).unlink()
    (tmp_path / shards[1].name).symlink_to(shards[2])
    _raises((ms.FormatError, ms.MoestreamError), "0000[23]-of-00004", tmp_path / shards[0].name)


def test_a_hostile_shard_count_does_not_leave_the_folder_of_the_model(tmp_path: pathlib.Path) -> None:
    """Shards are found by the name of the first one alone; a name with a path in it is only a name."""
    path = tmp_path / "..%2f-00001-of-00004.gguf"
    shutil.copyfile(models.all_shards(models.named("four_shards"))[0], path)
    _raises(FileNotFoundError, "00002-of-00004", path)


def test_a_nul_in_the_path_is_refused() -> None:
    _raises(ValueError, "zero byte", "a\0b.gguf")


@pytest.mark.parametrize(
    "option",
    [{"queue_depth": -1}, {"queue_depth": 5000}, {"readers": 65}, {"io": "fast"}, {"deadline_s": 0}, {"dense": "gpu"}],
)
def test_stream_options_out_of_range_are_value_errors(option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        ms.Stream(**option)  # type: ignore[arg-type]


def test_a_failed_open_leaves_nothing(tmp_path: pathlib.Path) -> None:
    """1,000 of several kinds: descriptors, threads, mappings and the resident set are flat."""
    path = _copy(tmp_path, models.tiny())
    os.truncate(path, path.stat().st_size - 1)

    def maps() -> int:
        return len(pathlib.Path("/proc/self/maps").read_text().splitlines())

    def rss() -> int:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def fail() -> None:
        for bad, cache in ((path, "min"), (models.tiny(), 1), (tmp_path / "absent", "min")):
            with pytest.raises(ms.MoestreamError):
                ms.Model(bad, stream=ms.Stream(cache=cache, io="pread"))

    for _ in range(20):
        fail()
    before = (_fds(), len(list(pathlib.Path("/proc/self/task").iterdir())), maps(), rss())
    for _ in range(334):
        fail()
    after = (_fds(), len(list(pathlib.Path("/proc/self/task").iterdir())), maps(), rss())
    assert after[0] == before[0] and after[1] <= before[1] and after[2] <= before[2] + 10, (before, after)
    assert after[3] - before[3] < 4 << 20, (before, after)


@pytest.mark.parametrize("call", ["decode_token", "pos_gap", "resize"])
def test_bad_arguments_of_calls_leave_the_model_usable(call: str, tiny_moe: Callable[..., pathlib.Path]) -> None:
    with ms.Model(tiny_moe(), stream=ms.Stream(cache="min")) as model, model.context(64) as context:
        want = context.decode([1, 2, 3]).tobytes()
        with pytest.raises((ValueError, MemoryError)):
            if call == "decode_token":
                context.decode([10**6])
            elif call == "pos_gap":
                context.decode([1], pos=50)
            else:
                model.resize(1)
        context.clear()
        assert context.decode([1, 2, 3]).tobytes() == want
