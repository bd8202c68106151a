"""Two minutes of soak.py, in two flavours (CASES S12, S13). Longer by hand: tests/system/soak.py --seconds 3600."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.parametrize(
    "options",
    [["--contexts", "3"], ["--contexts", "2", "--delays", "--io", "pread", "--verify", "--type", "Q8_0"]],
    ids=["three_contexts", "late_reads_with_checksums"],
)
def test_random_work_never_differs_from_a_resident_twin(options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(HERE / "soak.py"), "--seconds", "60", *options],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["differences"] == 0 and found["steps"] > 200 and found["evictions"] > 0
    assert found["resizes"] > 0 and found["fds"][1] <= found["fds"][0]
