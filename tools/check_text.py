#!/usr/bin/env python3
"""Checks what no formatter does: encoding, line ends, length of lines and files, and paths of one machine.

A file is text unless it has a zero byte; what git ignores is not looked at.

    python tools/check_text.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = {".c", ".h", ".cpp", ".py", ".cmake"}
MAX_CODE_LINES = 620
MAX_COLUMNS = 126
GENERATED = {"python/moestream/_cdef_moestream.h"}
HOME = re.compile(r"(?<![\w.])/(?:home|Users)/\w+|(?<![\w.$}])/root/\w")


def project_files() -> list[Path]:
    """Files that git has or would add; without git, all files that lie in no build folder."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name]
        return [ROOT / name for name in names if (ROOT / name).is_file()]
    skip = {"build", ".venv", "third_party", ".git", "dist"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not skip.intersection(path.relative_to(ROOT).parts)]


def check(path: Path) -> list[str]:
    """Every fault of one file."""
    name = path.relative_to(ROOT).as_posix()
    data = path.read_bytes()
    if b"\0" in data:
        return []
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return [f"{name}: not UTF-8 at byte {error.start}"]
    errors: list[str] = []
    lines = text.split("\n")
    code = path.suffix in CODE and name not in GENERATED
    if text and not text.endswith("\n"):
        errors.append(f"{name}: no line end at the end of the file")
    if code and len(lines) > MAX_CODE_LINES:
        errors.append(f"{name}: {len(lines)} lines, at most {MAX_CODE_LINES}: split it")
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        if line.endswith("\r"):
            errors.append(f"{where}: carriage return")
        elif line != line.rstrip() and path.suffix != ".md":
            errors.append(f"{where}: white space at the end of the line")
        if code and "\t" in line:
            errors.append(f"{where}: tab")
        if code and len(line) > MAX_COLUMNS:
            errors.append(f"{where}: {len(line)} columns, at most {MAX_COLUMNS}")
        if HOME.search(line) or f"{ROOT}/" in line:
            errors.append(f"{where}: a path of one machine")
    return errors


def main() -> int:
    """Command line: 0 where nothing was found."""
    files = project_files()
    errors = [error for path in files for error in check(path)]
    for error in errors:
        print(error, file=sys.stderr)
    if not errors:
        print(f"text: {len(files)} files are clean")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
