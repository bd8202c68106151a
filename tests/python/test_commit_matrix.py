"""One more llama.cpp than the pinned one: built from the source distribution of an older llama-cpp-python, and driven.

tools/commit_matrix.py --all does the same for every release of the table in docs/support.md; the release here is the
oldest of them, which differs most. The first run builds that llama.cpp in build/commits, which takes minutes.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

REPO = pathlib.Path(__file__).resolve().parents[2]
RELEASE = "0.3.16"


def test_the_oldest_supported_commit_streams_the_demo_model(demo_model: pathlib.Path) -> None:
    command = [sys.executable, REPO / "tools" / "commit_matrix.py", RELEASE, "--json", "--model", demo_model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (row,) = json.loads(done.stdout)
    assert done.returncode == 0 and row["problem"] == "", row
    assert row["llama_builds"] == row["identical"] == row["shim_runs"] == "yes"
    assert len(row["checks"]) == 15 and all(row["checks"].values())
