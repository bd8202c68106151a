#!/usr/bin/env python3
"""Checks what the built libraries export and how they are named.

- libmoestream.so: exactly the functions that moestream.h declares, nothing else.
- libllama.so must not define llama_get_cpu_buffer_type (it would be upstream's then, not ours), and must have
  moestream_load_policy_set where it was built by us.
- No library of ours links libllama or libggml by name, except llama.cpp's own; each file is called what its SONAME
  says, finds its neighbours by $ORIGIN, and has no symbol that all libraries of a process would share (STB_GNU_UNIQUE).

    python tools/check_symbols.py [--lib-dir build/dev/_lib]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "csrc" / "include" / "moestream.h"


def run(*command: str) -> str:
    """Standard output of a command that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def declared(header: Path) -> set[str]:
    """Names of the functions between the cdef marks of the public header."""
    text = header.read_text(encoding="utf-8").split("/* cdef:begin */", 1)[1].split("/* cdef:end */", 1)[0]
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"\{[^{}]*\}", "{}", text)
    names: set[str] = set()
    for statement in text.split(";"):
        found = re.search(r"\b(\w+)\s*\(", statement)
        if found and not statement.strip().startswith("typedef"):
            names.add(found.group(1))
    return names


def exported(library: Path) -> dict[str, str]:
    """Defined dynamic symbols of a library: name -> nm's letter."""
    symbols: dict[str, str] = {}
    for line in run("nm", "-D", "--defined-only", str(library)).splitlines():
        fields = line.split()
        if len(fields) >= 2:
            symbols[fields[-1].split("@")[0]] = fields[-2]
    return symbols


def dynamic(library: Path) -> dict[str, list[str]]:
    """SONAME, NEEDED and RUNPATH (or RPATH) entries."""
    entries: dict[str, list[str]] = {}
    for line in run("readelf", "-dW", str(library)).splitlines():
        found = re.search(r"\((SONAME|NEEDED|RUNPATH|RPATH)\).*\[(.*)\]", line)
        if found:
            key = "RUNPATH" if found.group(1) == "RPATH" else found.group(1)
            entries.setdefault(key, []).append(found.group(2))
    return entries


def check(folder: Path) -> list[str]:
    """Every deviation in the folder that holds the package's libraries."""
    errors: list[str] = []
    ours = folder / "libmoestream.so"
    if not ours.is_file():
        return [f"{ours}: no such file; build first"]

    have, want = set(exported(ours)), declared(HEADER)
    errors += [f"{ours}: {name} is declared in moestream.h but not exported" for name in sorted(want - have)]
    errors += [f"{ours}: {name} is exported but not declared in moestream.h" for name in sorted(have - want)]
    if "llama_get_cpu_buffer_type" not in want:
        errors.append(f"{HEADER}: llama_get_cpu_buffer_type is not declared")

    llama = folder / "libllama.so"
    if llama.is_file():
        symbols = exported(llama)
        if "llama_get_cpu_buffer_type" in symbols:
            errors.append(f"{llama}: defines llama_get_cpu_buffer_type; ours would hide upstream's")
        if "moestream_load_policy_set" not in symbols:
            errors.append(f"{llama}: moestream_load_policy_set is missing: opening a model would read all of it")

    # libllama-common: a part of upstream's test programs (make archs), not of the package
    found = (path for path in sorted(folder.glob("*.so*")) if not path.name.startswith("libllama-common"))
    libraries = [path for path in found if not path.is_symlink()]
    for library in libraries:
        entries = dynamic(library)
        if entries.get("SONAME") != [library.name]:
            errors.append(f"{library}: SONAME {entries.get('SONAME')} is not its file name")
        if entries.get("RUNPATH") != ["$ORIGIN"]:
            errors.append(f"{library}: RUNPATH {entries.get('RUNPATH')} is not $ORIGIN")
        unique = [name for name, letter in exported(library).items() if letter == "u"]
        if unique:
            errors.append(f"{library}: {len(unique)} unique symbols, which other copies in the process would share")
        for needed in entries.get("NEEDED", []):
            upstream = re.match(r"lib(ggml|llama)\b", needed)
            if upstream and library == ours:
                errors.append(f"{library}: links {needed}; libmoestream binds it at run time")
            if upstream and needed not in {path.name for path in libraries}:
                errors.append(f"{library}: needs {needed}, which is not beside it")
            if upstream and needed.startswith("libggml") and ".so.ms-" not in needed:
                errors.append(f"{library}: needs {needed}, a name that another package may bring as well")
    return errors


def main() -> int:
    """Command line: 0 where all is as declared."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lib-dir", type=Path, default=ROOT / "build" / "dev" / "_lib")
    options = parser.parse_args()
    errors = check(options.lib_dir)
    for error in errors:
        print(error, file=sys.stderr)
    if not errors:
        print(f"symbols: libmoestream.so exports the {len(declared(HEADER))} functions of moestream.h and nothing else")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
