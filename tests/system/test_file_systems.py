"""Slices on several file systems hold their file's bytes, and streamed logits are the resident ones (CASES S2).

The disk tests run on, a loop device with 4096-byte sectors under ext4, an overlay, and tmpfs. On each: every slice of a
file of known bytes through the real engines (tests/c/stream_files_test), and models whose slices start anywhere.
Making the last three takes root; they skip with the reason otherwise. What was mounted is unmounted again.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from support import compare as c
from support import models

KINDS = ("ordinary disk", "4096-byte sectors", "overlayfs", "tmpfs")
STREAM_TEST = models.REPO / "build" / "dev" / "tests" / "stream_files_test"


def _run(*command: str | os.PathLike[str]) -> str:
    """Standard output. Skips, with what it said, where the command cannot be run or refuses."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"needs loop devices and mounts: {error}")
    if done.returncode != 0:
        pytest.skip(f"needs loop devices and mounts: {command[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def mounted(kind: str, tmp: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder on the kind of file system."""
    if kind == "ordinary disk":
        yield tmp
        return
    undo: list[list[str | os.PathLike[str]]] = []
    target = tmp / "mount"
    target.mkdir()
    try:
        if kind == "tmpfs":
            _run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", target)
        elif kind == "overlayfs":
            # The upper layer on the disk of the tests: an overlay over another overlay is refused by the kernel.
            parts = {name: tmp / name for name in ("lowerdir", "upperdir", "workdir")}
            for part in parts.values():
                part.mkdir()
            _run("mount", "-t", "overlay", "overlay", "-o", ",".join(f"{k}={v}" for k, v in parts.items()), target)
        else:
            image = tmp / "image"
            with image.open("wb") as file:
                file.truncate(96 << 20)
            device = _run("losetup", "--find", "--show", "--sector-size", "4096", image)
            undo.append(["losetup", "--detach", device])
            _run("mkfs.ext4", "-q", device)
            _run("mount", device, target)
        undo.append(["umount", target])
        yield target
    finally:
        for command in reversed(undo):
            subprocess.run(command, check=True)


@pytest.mark.parametrize("kind", KINDS)
def test_slices_on_a_file_system(kind: str, tmp_path: pathlib.Path) -> None:
    with mounted(kind, tmp_path) as folder:
        if not STREAM_TEST.exists():
            pytest.skip("needs the build tree: stream_files_test is not built (make ctest)")
        done = subprocess.run(
            [STREAM_TEST, "every_slice_of_a_real_file_is_read_right"],
            capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(folder)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        for name in ("many_experts", "mixed_layers"):
            source = models.named(name)
            path = folder / f"{name}.gguf"
            shutil.copyfile(source, path)
            tally = c.Tally()
            variants = [c.Variant("min", io, direct, verify=True) for io in c.ENGINES for direct in ("auto", "off")]
            with c.reference(source) as ref:
                here = c.Reference(path, ref.model)
                c.compare(here, "64 and 8", c.prompts_then_tokens((64,), 8), [c.Setting(1, 64)], variants, tally)
            assert tally.evictions > 0
            path.unlink()
