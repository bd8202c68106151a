"""Under a memory cgroup, v1 or v2: larger than memory is not killed, and "auto" stays below the limit (CASES S1, S16).

Needs the right to make a memory cgroup (root, usually); skips with the reason otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from support import faults, models

V1 = pathlib.Path("/sys/fs/cgroup/memory")
V2 = pathlib.Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited(limit: int) -> Iterator[pathlib.Path]:
    """A fresh memory cgroup with a limit in bytes. Skips where none can be made."""
    name = f"moestream-test-{os.getpid()}"
    for root, file in ((V1, "memory.limit_in_bytes"), (V2, "memory.max")):
        folder = root / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / file).exists():
                (folder / file).write_text(str(limit))
                yield folder
                return
        finally:
            folder.rmdir()
    pytest.skip("needs a memory cgroup: none could be made here")


def run_in(folder: pathlib.Path, code: str, timeout: float = 120) -> dict[str, float]:
    """Runs code inside the cgroup; the last line it prints is JSON."""
    enter = f"open({str(folder / 'cgroup.procs')!r}, 'w').write('0')\n"
    text = enter + faults.prelude() + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", text], capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "LD_PRELOAD": str(faults.library())}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def refused_charges(folder: pathlib.Path) -> int:
    """How often the limit was hit without anything left to reclaim (an OOM event)."""
    v1 = folder / "memory.oom_control"
    text = v1.read_text() if v1.exists() else (folder / "memory.events").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))


DECODE = """
import json
path = models.named("mid_430mb")
with open(path, "rb") as f:  # pages that others read are charged to others
    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
def faults_now():
    with open("/proc/self/stat") as f:
        return int(f.read().rsplit(")", 1)[1].split()[9])  # major page faults
def run(model, n=30):
    out = []
    with model.context(64, n_threads=2, n_batch=8) as context:
        context.decode([5, 6, 7])
        before = faults_now()
        for i in range(n):
            out.append(int(context.decode([11 + 13 * i % 400]).argmax()))
        return out, (faults_now() - before) / n
"""


def test_a_model_larger_than_the_limit_is_not_killed_and_gives_the_same_tokens() -> None:
    """S1: 430 MB of experts, 220 MB of memory, 80 MB of cache; mmap has five times the page faults."""
    want = json.loads(
        models.run_python(
            faults.prelude().replace("_lib = ctypes.CDLL(None)", "_lib = None")
            + DECODE
            + "with ms.Model(path, use_extra_bufts=False) as m: print(json.dumps(run(m)[0]))"
        ).stdout.splitlines()[-1]
    )
    with limited(220 << 20) as folder:
        streamed = run_in(
            folder,
            DECODE
            + "with opened(path, cache='80MB', io='auto') as m:\n    t, f = run(m)\n"
            + "print(json.dumps({'tokens': t, 'faults': f}))",
        )
        assert streamed["tokens"] == want
        assert refused_charges(folder) == 0
        mapped = run_in(
            folder,
            DECODE
            + "with ms.Model(path, load_mode='mmap', use_extra_bufts=False) as m:\n    t, f = run(m, 6)\n"
            + "print(json.dumps({'tokens': t, 'faults': f}))",
        )
        print("major faults per token: streamed", streamed["faults"], "mapped", mapped["faults"])
        assert streamed["faults"] < 10 and mapped["faults"] >= 5 * max(streamed["faults"], 1)


def test_auto_cache_stays_below_a_300_mb_limit() -> None:
    """S16: the host has far more."""
    with limited(300 << 20) as folder:
        found = run_in(
            folder,
            DECODE
            + """
with opened(path, cache="auto", io="auto") as m:
    t, f = run(m)
    s = m.stats()
    print(json.dumps({"cache": s["cache_bytes"], "used": s["cache_used_bytes"]}))
""",
        )
        print(found)
        assert 20 << 20 < found["cache"] < 300 << 20
        assert refused_charges(folder) == 0


def test_a_cache_beyond_the_limit_is_refused_with_the_numbers_instead_of_killed() -> None:
    with limited(200 << 20) as folder:
        found = run_in(
            folder,
            """
            import json
            try:
                opened(models.named("mid_430mb"), cache="100%")
                print(json.dumps({"refused": 0}))
            except ms.OutOfMemoryError as error:
                assert "do not fit" in str(error) and "bytes" in str(error), error
                print(json.dumps({"refused": 1}))
            """,
        )
        assert found["refused"] == 1
        assert refused_charges(folder) == 0
