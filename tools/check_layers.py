#!/usr/bin/env python3
"""Checks which room of csrc/ includes which: base <- {gguf, io, cache} <- stream <- ggml <- capi.

Also: only gguf/ and ggml/ include llama.cpp's headers, only rooms that are built against them see ms_config.h, no
include leaves its room by "..", and nothing is compiled that lies in no room. CMake holds most of this by what a room
can see; this finds the rest, and says which line.

    python tools/check_layers.py [--root csrc] [--self-test]
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEES: dict[str, set[str]] = {
    "base": set(),
    "gguf": {"base"},
    "io": {"base"},
    "cache": {"base"},
    "stream": {"base", "gguf", "io", "cache"},
    "ggml": {"base", "gguf", "io", "cache", "stream"},
    "capi": {"base", "gguf", "io", "cache", "stream", "ggml"},
}
LLAMA_ROOMS = {"gguf", "ggml"}
PUBLIC_INCLUDES = {"stddef.h", "stdint.h"}
CONFIG_ROOMS = {"io", "gguf", "ggml", "capi"}
LLAMA_HEADER = re.compile(r"^(llama|ggml|gguf)([-.].*)?\.(h|hpp)$")
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)')
SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cc"}


def include_error(room: str, name: str, folder: Path, root: Path) -> str | None:
    """Why `room` may not include `name`, written in a file of `folder`; None where it may."""
    if ".." in Path(name).parts:
        return "leaves its folder by '..'"
    if name == "moestream.h":
        return None
    if name == "ms_config.h":
        return None if room in CONFIG_ROOMS else f"room {room} must not depend on what was configured"
    first = Path(name).parts[0]
    if first in SEES and len(Path(name).parts) > 1:
        if first != room and first not in SEES[room]:
            return f"room {room} must not see room {first}"
        return None if (root / name).is_file() else "no such file"
    if LLAMA_HEADER.match(Path(name).name):
        return None if room in LLAMA_ROOMS else f"room {room} must not see llama.cpp"
    if (folder / name).is_file():
        return None  # a neighbour in the same room
    return None if not (root / name).exists() else "is not in a room"


def check(root: Path) -> list[str]:
    """Every violation below `root`, as `file:line: text`."""
    errors: list[str] = []
    n_files = 0
    for path in sorted(root.rglob("*")):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        n_files += 1
        parts = path.relative_to(root).parts
        if parts == ("include", "moestream.h"):
            room = ""
        elif len(parts) != 2 or parts[0] not in SEES:
            errors.append(f"{path}: lies in no room ({', '.join(SEES)})")
            continue
        else:
            room = parts[0]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = INCLUDE.match(line)
            if not found:
                continue
            name = found.group(1) or found.group(2)
            if room == "":
                why = None if found.group(2) in PUBLIC_INCLUDES else "only stddef.h and stdint.h are allowed here"
            else:
                why = include_error(room, name, path.parent, root)
            if why:
                errors.append(f"{path}:{number}: {line.strip()}: {why}")
    if n_files == 0:
        errors.append(f"{root}: no source files")
    return errors


def self_test() -> list[str]:
    """Plants one wrong include of each kind in an otherwise right tree; what was not noticed comes back."""
    wrong = [
        ("base/a.c", '#include "io/io.h"'),
        ("base/a.c", '#include "ms_config.h"'),
        ("base/a.c", '#include "ggml.h"'),
        ("io/a.c", '#include "cache/cache.h"'),
        ("cache/a.c", '#include "../io/io.h"'),
        ("gguf/a.c", '#include "stream/stream.h"'),
        ("stream/a.c", '#include "ggml/ggml.h"'),
        ("stream/a.c", "#include <llama.h>"),
        ("stream/a.c", '#  include "ggml-backend.h"'),
        ("ggml/a.c", '#include "capi/capi.h"'),
        ("capi/a.c", '#include "llama.h"'),
        ("capi/a.c", '#include "gguf.h"'),
        ("capi/a.c", '#include "base/missing.h"'),
        ("io/deeper/a.c", "int x;"),
        ("include/moestream.h", '#include "llama.h"'),
    ]
    right = [
        ("gguf/a.c", '#include "base/base.h"\n#include "gguf.h"\n#include "ms_config.h"'),
        ("io/a.c", '#include "base/base.h"\n#include <liburing.h>\n#include "io.h"\n#include "io/io.h"'),
        ("stream/a.c", '#include "io/io.h"\n#include "gguf/gguf.h"'),
        ("ggml/a.c", '#include "ggml/ggml.h"\n#include "ggml-backend.h"\n#include "stream/stream.h"'),
        ("capi/a.c", '#include "ggml/ggml.h"\n#include "moestream.h"'),
    ]
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for room in [*SEES, "include"]:
            (root / room).mkdir()
            (root / room / f"{room}.h").write_text("\n")
        (root / "include" / "include.h").unlink()
        for file, text in right:
            (root / file).write_text(text + "\n")
        failures += [f"self-test: a right tree was refused: {error}" for error in check(root)]
        for file, text in wrong:
            path = root / file
            before = path.read_text() if path.exists() else None
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n")
            if not check(root):
                failures.append(f"self-test: not noticed: {text!r} in {file}")
            if before is None:
                path.unlink()
            else:
                path.write_text(before)
    return failures


def main() -> int:
    """Command line: 0 where the arrows hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT / "csrc")
    parser.add_argument("--self-test", action="store_true", help="show that wrong includes are noticed")
    options = parser.parse_args()
    errors = self_test() if options.self_test else check(options.root)
    for error in errors:
        print(error, file=sys.stderr)
    if not errors:
        print("layers: wrong includes are noticed" if options.self_test else "layers: the arrows hold")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
