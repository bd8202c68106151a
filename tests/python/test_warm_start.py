"""Warm start: the experts of the last run are in the cache before they are asked for, and nothing else changes."""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
import time
from collections.abc import Callable

import pytest
from support import compare as c

import moestream as ms
from moestream import logs

IDS = c.tokens(24, 512)
WORK = c.prompts_then_tokens((9, 24), 4)


def run(
    path: pathlib.Path, list_file: pathlib.Path | None, *, wait: bool = True, cache: str = "60%"
) -> tuple[list[c.Array], dict[str, int]]:
    """One run; its results, and its statistics before (as "warm_...") and after."""
    with ms.Model(path, stream=ms.Stream(cache=cache, prefetch="off", warm_start=list_file)) as model:
        if wait:
            end, before = time.monotonic() + 20, -1
            while time.monotonic() < end and (now := model.stats()["cache_used_bytes"]) != before:
                before = now
                time.sleep(0.2)
        warm = {f"warm_{name}": model.stats()[name] for name in ("cache_used_bytes", "n_misses", "n_reads")}
        with c.Setting(1, 64).context(model) as context:
            out = WORK(context)
        stats = model.stats()
    return out, {**stats, **warm}


def test_the_second_run_finds_the_experts_of_the_first(
    tiny_moe: Callable[..., pathlib.Path], tmp_path: pathlib.Path
) -> None:
    path, list_file = tiny_moe("Q4_K"), tmp_path / "hot.txt"
    plain, cold = run(path, None, wait=False)
    assert not list(tmp_path.iterdir()), "nothing is written unless a file is named"
    first, _ = run(path, list_file, wait=False)
    assert [p.name for p in tmp_path.iterdir()] == ["hot.txt"], "no temporary file stays"
    second, warm = run(path, list_file)
    c.same_bits(plain, first, "the run that makes the list")
    c.same_bits(plain, second, "the warm run")
    assert warm["warm_cache_used_bytes"] > 0.9 * warm["cache_bytes"]
    assert warm["warm_n_misses"] == 0, "nobody asked for an expert yet"
    assert warm["n_misses"] < cold["n_misses"]
    # In the middle of the reading, and with a smaller cache than the list was made with:
    for options in ({"wait": False}, {"cache": "min"}):
        c.same_bits(plain, run(path, list_file, **options)[0], f"warm, {options}")  # type: ignore[arg-type]


def test_a_list_of_another_model_is_said_and_replaced(
    tiny_moe: Callable[..., pathlib.Path], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    list_file = tmp_path / "hot.txt"
    run(tiny_moe("Q8_0"), list_file, wait=False)
    of_another = list_file.read_text()
    path = tiny_moe("Q4_K")
    plain, _ = run(path, None, wait=False)
    good = ""
    for text, said in ((of_another, True), ("moestream warm start 1\nrubbish", True), ("", False)):
        list_file.write_text(text)
        with caplog.at_level(logging.WARNING, "moestream"):
            caplog.clear()
            out, stats = run(path, list_file)
        c.same_bits(plain, out, f"with a list of {text[:30]!r}")
        assert ("is a list of another model" in caplog.text) == said
        assert stats["warm_n_reads"] == 0
        good = list_file.read_text()
        assert good != text
    # Entries that are not in the model are passed over.
    list_file.write_text(good.partition("\n")[0] + "\n0 99999\n-1 0\n77 1\n0 0\n1 1\nx y\n")
    out, stats = run(path, list_file)
    c.same_bits(plain, out, "with wrong entries")
    assert stats["warm_cache_used_bytes"] > 0


def test_no_other_file_is_ever_overwritten(tiny_moe: Callable[..., pathlib.Path], tmp_path: pathlib.Path) -> None:
    """A path given by mistake costs nobody a file: the model, a text, a pipe, a device, a folder, a link to one."""
    path = tmp_path / "model.gguf"
    shutil.copyfile(tiny_moe("Q4_K"), path)
    text, pipe, link = tmp_path / "thesis.txt", tmp_path / "pipe", tmp_path / "link"
    text.write_text("my thesis")
    os.mkfifo(pipe)
    link.symlink_to(path)
    before = path.read_bytes()
    for wrong in (path, text, pipe, link, tmp_path, pathlib.Path("/dev/null")):
        with pytest.raises((ms.InvalidError, ms.ReadError), match="warm_start"):
            ms.Model(path, stream=ms.Stream(cache="min", warm_start=wrong))
    with pytest.raises(ms.ReadError, match="no such folder"):
        ms.Model(path, stream=ms.Stream(cache="min", warm_start=tmp_path / "no such folder" / "hot.txt"))
    for nonsense in ("", 5):
        with pytest.raises(ValueError, match="warm_start was"):
            ms.Stream(warm_start=nonsense)  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert text.read_text() == "my thesis"
    assert pathlib.Path("/dev/null").is_char_device()
    assert len(list(tmp_path.iterdir())) == 4


def test_a_file_that_appears_while_the_model_runs_is_kept(
    tiny_moe: Callable[..., pathlib.Path], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    list_file = tmp_path / "hot.txt"
    with caplog.at_level(logging.WARNING, "moestream"):
        with ms.Model(tiny_moe("Q4_K"), stream=ms.Stream(cache="min", warm_start=list_file)) as model:
            with model.context(64, n_threads=1) as context:
                context.decode([1, 2, 3])
            list_file.write_text("somebody's")
        logs.drain()
    assert list_file.read_text() == "somebody's"
    assert "was not written" in caplog.text


def test_the_list_goes_behind_a_link(tiny_moe: Callable[..., pathlib.Path], tmp_path: pathlib.Path) -> None:
    link, target = tmp_path / "link", tmp_path / "hot.txt"
    target.touch()
    link.symlink_to(target)
    run(tiny_moe("Q4_K"), link, wait=False)
    assert link.is_symlink()
    assert target.read_text().startswith("moestream warm start 1")
