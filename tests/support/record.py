"""What identity tests found, kept for docs/support.md: one small JSON file for each architecture, type or shape.

tools/support_table.py makes the table of them. A record is of the last run; nothing in it depends on the machine or
on the time, so that the same result gives the same table.
"""

from __future__ import annotations

import json
import os
import pathlib
import re

from support import models

FOLDER = models.REPO / "build" / "identity"


def write(kind: str, name: str, identical: bool, note: str) -> None:
    """Keeps one result. `kind` is a key of KINDS in tools/support_table.py; `note` says what ran, or why not."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    target = FOLDER / f"{kind}-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.json"
    fresh = target.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps({"kind": kind, "name": name, "identical": identical, "note": note}, sort_keys=True))
    fresh.replace(target)


def read() -> list[dict[str, object]]:
    """All results there are."""
    return [json.loads(path.read_text()) for path in sorted(pathlib.Path(FOLDER).glob("*.json"))]
