"""The small models that upstream's own test-llama-archs writes, one GGUF per architecture.

They are made once per llama.cpp commit into build/test-models, by the tool that `make archs` builds. A folder under
its final name is complete.
"""

from __future__ import annotations

import functools
import pathlib
import secrets
import shutil
import subprocess

from support import models

import moestream as ms

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
