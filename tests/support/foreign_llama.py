"""Somebody else's llama.cpp, made in seconds: the objects of the build tree linked once more, the plain way.

`libraries()` gives a folder with libllama.so and libggml*.so.0 as upstream's own build names them, without our load
policy: what a package such as llama-cpp-python brings. `package()` gives a folder for PYTHONPATH with the real Python
package `llama_cpp` of the release that carries the pinned commit, and what it imports; none of it is compiled.
Both are made once and kept in build/.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence

import pytest

REPO = pathlib.Path(__file__).resolve().parents[2]
BUILD = REPO / "build" / "dev"

# library: (SONAME, folder of its objects, what it links), in the order of linking
_LIBRARIES = {
    "libggml-base": ("libggml-base.so.0", "ggml/src/CMakeFiles/ggml-base.dir", ()),
    "libggml-cpu": ("libggml-cpu.so.0", "ggml/src/CMakeFiles/ggml-cpu.dir", ("libggml-base",)),
    "libggml-rpc": ("libggml-rpc.so.0", "ggml/src/ggml-rpc/CMakeFiles/ggml-rpc.dir", ("libggml-base",)),
    "libggml": ("libggml.so.0", "ggml/src/CMakeFiles/ggml.dir", ("libggml-base", "libggml-cpu", "libggml-rpc")),
    "libllama": ("libllama.so", "src/CMakeFiles/llama.dir", ("libggml", "libggml-base", "libggml-cpu")),
}


@functools.cache
def libraries() -> pathlib.Path:
    """The folder of the libraries; skips where there is no build tree (an installed package is tested alone)."""
    if not (BUILD / "llama.cpp" / "src").is_dir():
        pytest.skip("needs the build tree: build/dev of `make build`, to link llama.cpp once more")
    folder = REPO / "build" / "foreign-llama"
    done = folder / "made"
    newest = str(max(path.stat().st_mtime_ns for path in (BUILD / "llama.cpp").rglob("*.o")))
    if done.is_file() and done.read_text(encoding="ascii") == newest:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for soname, objects, links in _LIBRARIES.values():
        files = sorted((BUILD / "llama.cpp" / objects).rglob("*.o"))
        link(folder / soname, soname, files, [folder / _LIBRARIES[name][0] for name in links])
    done.write_text(newest, encoding="ascii")
    return folder


def link(
    out: pathlib.Path, soname: str, files: Sequence[pathlib.Path], links: Sequence[pathlib.Path], *more: str
) -> None:
    """One shared library from objects, finding what it links beside itself."""
    subprocess.run(
        ["c++", "-shared", "-pthread", f"-Wl,-soname,{soname}", "-Wl,-rpath,$ORIGIN", *more, "-o", out, *files, *links,
         "-ldl"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip


def without(folder: pathlib.Path, *names: str) -> pathlib.Path:
    """A copy of the libraries in `folder` whose libllama does not export the functions `names`; its libllama.so."""
    shutil.copytree(libraries(), folder, dirs_exist_ok=True)
    script = folder / "hide.map"
    script.write_text("{ local: " + " ".join(f"{name};" for name in names) + " };", encoding="ascii")
    _, objects, links = _LIBRARIES["libllama"]
    out = folder / "libllama.so"
    files = sorted((BUILD / "llama.cpp" / objects).rglob("*.o"))
    link(out, out.name, files, [folder / _LIBRARIES[name][0] for name in links], f"-Wl,--version-script={script}")
    return out


def in_front(folder: pathlib.Path, source: str) -> pathlib.Path:
    """A copy of the libraries in `folder`, behind a libllama.so whose own functions (C source) come first."""
    shutil.copytree(libraries(), folder, dirs_exist_ok=True)
    behind = folder / "libbehind.so"  # linked anew: under its own name the front would need itself
    _, objects, links = _LIBRARIES["libllama"]
    files = sorted((BUILD / "llama.cpp" / objects).rglob("*.o"))
    link(behind, behind.name, files, [folder / _LIBRARIES[name][0] for name in links])
    code = folder / "front.c"
    code.write_text(source, encoding="ascii")
    out = folder / "libllama.so"
    command = ["cc", "-shared", "-fPIC", "-D_GNU_SOURCE", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", "-o", out, code]
    subprocess.run([*command, behind, "-ldl"], check=True, capture_output=True, text=True)
    return out


def with_loadable_backends(folder: pathlib.Path) -> pathlib.Path:
    """The libraries as a GGML_BACKEND_DL build has them: no library links libggml-cpu.so, ggml loads it.

    Two files are compiled again, by the commands of the build tree with the other definitions. Returns libllama.so.
    """
    base = libraries()
    folder.mkdir(parents=True)
    commands = json.loads((BUILD / "compile_commands.json").read_text(encoding="utf-8"))
    again: dict[str, list[pathlib.Path]] = {"libggml": [], "libggml-cpu": []}
    for name, source in (("libggml", "ggml-backend-reg.cpp"), ("libggml-cpu", "ggml-cpu.cpp")):
        entry = next(c for c in commands if c["file"].endswith("/" + source) and "ggml" in c["output"])
        command = [word for word in shlex.split(entry["command"]) if word not in ("-DGGML_USE_CPU", "-DGGML_USE_RPC")]
        out = folder / f"{source}.o"
        command[command.index("-o") + 1] = str(out)
        subprocess.run([*command, "-DGGML_BACKEND_DL"], cwd=entry["directory"], check=True, capture_output=True)
        again[name].append(out)
    shutil.copyfile(base / "libggml-base.so.0", folder / "libggml-base.so.0")
    for name, out_name in (("libggml", "libggml.so.0"), ("libggml-cpu", "libggml-cpu.so")):
        files = list((BUILD / "llama.cpp" / _LIBRARIES[name][1]).rglob("*.o"))
        kept = [path for path in files if path.name not in {made.name for made in again[name]}]
        link(folder / out_name, out_name, [*kept, *again[name]], [folder / "libggml-base.so.0"])
    out = folder / "libllama.so"
    files = sorted((BUILD / "llama.cpp" / _LIBRARIES["libllama"][1]).rglob("*.o"))
    link(out, out.name, files, [folder / "libggml.so.0", folder / "libggml-base.so.0"])
    return out


def _locked_sdist() -> str:
    lines = (REPO / "third_party" / "llama.lock").read_text(encoding="utf-8").splitlines()
    return next(line.split("=", 1)[1].strip() for line in lines if line.startswith("sdist ="))


@functools.cache
def package() -> pathlib.Path:
    """The folder with llama_cpp and its imports; skips where the package index cannot be reached."""
    sdist = _locked_sdist()
    folder = REPO / "build" / f"test-{sdist.replace('==', '-')}"
    if (folder / "llama_cpp" / "llama.py").is_file():
        return folder
    scratch = folder.with_suffix(f".{os.getpid()}")
    (scratch / "site").mkdir(parents=True)
    try:
        given = os.environ.get("MOESTREAM_LLAMA_SDIST")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        name = sdist.split("==")[0]
        download = [
            *pip,
            "download",
            "--no-deps",
            "--no-binary",
            name,
            "--no-build-isolation",
            "--dest",
            scratch,
            sdist,
        ]
        for command in (
            *([] if given else [download]),
            [*pip, "install", "--target", scratch / "site", "diskcache", "jinja2", "typing_extensions"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"needs llama-cpp-python: pip could not fetch it: {done.stderr.strip()[-300:]}")
        with tarfile.open(given or next(scratch.glob("*.tar.gz"))) as archive:
            for member in archive:
                parts = pathlib.PurePosixPath(member.name).parts
                if len(parts) > 2 and parts[1] == "llama_cpp" and member.isfile() and ".." not in parts:
                    member.name = "/".join(parts[1:])
                    archive.extract(member, scratch / "site")
        folder.parent.mkdir(exist_ok=True)
        try:
            (scratch / "site").rename(folder)
        except OSError:  # another process was first
            if not (folder / "llama_cpp" / "llama.py").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
