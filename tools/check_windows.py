#!/usr/bin/env python3
"""Compiles the shim's own sources for Windows with MinGW-w64, to keep porting a small step.

    python tools/check_windows.py --llama TREE [--stubs-needed]

What Windows lacks is declared in tools/windows_stubs, and nowhere else; a use of anything beyond that fails here. With
--stubs-needed it says which files need the stubs, by compiling without them. It checks syntax, types and warnings; it
links and runs nothing. csrc/ggml/load_policy.c (a linker trick of ELF) and the io_uring reader are Linux's own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "tools" / "windows_stubs"
COMPILERS = {".c": "x86_64-w64-mingw32-gcc", ".cpp": "x86_64-w64-mingw32-g++"}
LINUX_ONLY = ("csrc/ggml/load_policy.c",)


def config(folder: Path) -> None:
    """An ms_config.h for a llama.cpp of today, without liburing."""
    template = (ROOT / "cmake" / "ms_config.h.in").read_text(encoding="utf-8")
    out = []
    for line in template.splitlines():
        words = line.split()
        if line.strip() == "@MS_PROBES@":
            names = "MP_LOAD_MODE MP_LAZY_MODE MP_USE_EXTRA_BUFTS MP_NO_ALLOC MP_NO_HOST CP_OP_OFFLOAD GGML_VERSION"
            names += " LLAMA_MAX_OVERRIDES"
            absent = "MP_USE_MMAP MP_USE_MLOCK MP_USE_DIRECT_IO"
            out += [f"#define MS_HAVE_{name} 1" for name in names.split()]
            out += [f"#define MS_HAVE_{name} 0" for name in absent.split()]
        elif len(words) > 2 and words[0] == "#define" and "@" in line:
            out.append(f"#define {words[1]} " + ('""' if '"@' in line else "0"))
        else:
            out.append(line)
    (folder / "ms_config.h").write_text("\n".join(out) + "\n", encoding="utf-8")


def compile_one(source: Path, llama: Path, work: Path, stubs: bool) -> str:
    """What the compiler says about a file; "" if nothing."""
    standard = "-std=c11" if source.suffix == ".c" else "-std=c++17"
    includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'include'}", f"-I{work}"]
    for folder in (llama / "include", llama / "ggml" / "include"):
        includes += ["-isystem", str(folder)]
    # The C library's printf family is not the one these formats are for; __USE_MINGW_ANSI_STDIO brings the right one.
    options = ["-fsyntax-only", "-Wall", "-Werror", "-Wno-format", "-Wno-format-extra-args", "-Wno-unused"]
    options += ["-D_GNU_SOURCE", "-D_FILE_OFFSET_BITS=64", "-D__USE_MINGW_ANSI_STDIO=1"]
    if stubs:
        options += ["-isystem", str(STUBS)]
        options += ["-include", str(STUBS / "posix_names.h")] if source.suffix == ".c" else []
    command = [COMPILERS[source.suffix], standard, *options, *includes, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def main() -> int:
    """Command line: 0 where all compile, 77 where there is no compiler."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llama", type=Path, required=True, help="a llama.cpp source tree")
    parser.add_argument("--stubs-needed", action="store_true")
    options = parser.parse_args()
    if any(shutil.which(compiler) is None for compiler in COMPILERS.values()):
        print("needs mingw-w64: apt-get install g++-mingw-w64-x86-64-win32", file=sys.stderr)
        return 77
    sources = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in COMPILERS)
    sources = [path for path in sources if str(path.relative_to(ROOT)) not in LINUX_ONLY]
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        config(work)
        for source in sources:
            said = compile_one(source, options.llama, work, stubs=True)
            if said:
                failed += 1
                print(said, file=sys.stderr)
            elif options.stubs_needed and compile_one(source, options.llama, work, stubs=False):
                print(f"needs the stubs: {source.relative_to(ROOT)}")
    print(f"windows: {len(sources) - failed} of {len(sources)} files compile with MinGW-w64 and tools/windows_stubs")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
