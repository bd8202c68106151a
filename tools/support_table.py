#!/usr/bin/env python3
"""Writes what the identity tests found into docs/support.md.

    python tools/support_table.py            rewrite the section between the two marks
    python tools/support_table.py --check    fail if it would change, naming the rows

The tests leave one small file for each architecture, weight type, shape and use in build/identity. It guarantees that
a table is written only from a complete run: every architecture and type the tests know has to have its file.
It never does: run a test, or change anything outside the marks.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
RECORDS = REPO / "build" / "identity"
DOCUMENT = REPO / "docs" / "support.md"
BEGIN = "<!-- identity:begin, written by tools/support_table.py from what the tests found -->"
END = "<!-- identity:end -->"
TITLE = "# What is supported\n\n"
KINDS = {
    "architecture": "Architectures (upstream's own test models, all that have a Mixture-of-Experts form)",
    "wide architecture": "The same architectures, made to choose 2 of 8 experts, in Q8_0",
    "type": "Weight types of experts",
    "shape": "Shapes of models and files",
    "use": "Uses",
}

Record = dict[str, object]


def read_records(folder: Path) -> list[Record]:
    """All results, in the order of the table. OSError or ValueError if one cannot be read."""
    records: list[Record] = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    order = list(KINDS)
    return sorted(records, key=lambda r: (order.index(str(r["kind"])), str(r["name"])))


def known_names() -> dict[str, list[str]]:
    """The architectures and types that the tests run, read from their sources."""
    archs = (REPO / "tests" / "python" / "test_identity_archs.py").read_text(encoding="utf-8")
    types = (REPO / "python" / "moestream" / "_block_types.py").read_text(encoding="utf-8")
    names = archs.partition('_NAMES = """')[2].partition('"""')[0].split()
    without = re.findall(r'"([\w-]+)"', archs.partition("WITHOUT_EXPERTS")[2].partition(")")[0])
    return {
        "architecture": names,
        "wide architecture": [name for name in names if name not in without],
        "type": re.findall(r'BlockType\("(\w+)"', types),
    }


def missing(records: list[Record]) -> list[str]:
    """What a complete run would have left and is not there."""
    found = {(r["kind"], r["name"]) for r in records}
    lacking = [f"{kind} {name}" for kind, names in known_names().items() for name in names if (kind, name) not in found]
    return lacking + [kind for kind in KINDS if not any(r["kind"] == kind for r in records)]


def section(records: list[Record]) -> str:
    """The text between the marks, marks included."""
    lines = [
        BEGIN,
        "",
        "Streamed against resident on the CPU, every logit compared bit for bit, at the same n_threads, n_batch and",
        "n_ubatch and without repacking. What each row ran: `tests/python/test_identity_*.py`.",
        "",
    ]
    for kind, title in KINDS.items():
        rows = [r for r in records if r["kind"] == kind]
        same = sum(bool(r["identical"]) for r in rows)
        lines += [f"## {title}", "", f"{same} of {len(rows)} identical.", "", "| | identical | why not, or remark |"]
        lines += ["|---|---|---|"]
        for r in rows:
            note = str(r["note"]).replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {r['name']} | {'yes' if r['identical'] else 'no'} | {note} |")
        lines.append("")
    return "\n".join([*lines, END]) + "\n"


def replaced(text: str, fresh: str) -> str:
    """`text` with the section replaced, or appended where there is none."""
    before, mark, rest = text.partition(BEGIN)
    if not mark:
        return (text or TITLE).rstrip("\n") + "\n\n" + fresh
    _, mark, after = rest.partition(END + "\n")
    if not mark:
        raise ValueError(f"the end mark {END} is missing")
    return before + fresh + after


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the identity tests' results into docs/support.md.")
    parser.add_argument("--check", action="store_true", help="change nothing, fail if something would change")
    args = parser.parse_args()
    try:
        records = read_records(RECORDS)
        lacking = missing(records)
        if lacking:
            raise ValueError(f"no results for {', '.join(lacking)} in {RECORDS}; run the identity tests first")
        before = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
        after = replaced(before, section(records))
    except (OSError, ValueError) as error:
        print(f"support_table: {error}", file=sys.stderr)
        return 1
    if args.check and before != after:
        old = set(before.splitlines())
        for line in after.splitlines():
            if line not in old:
                print(f"support_table: not in {DOCUMENT.name}: {line}", file=sys.stderr)
        return 1
    if before != after:
        DOCUMENT.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
