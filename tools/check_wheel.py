#!/usr/bin/env python3
"""Checks the wheel: its contents, that it is one binary for all Pythons, and that it runs without a compiler.

    python tools/check_wheel.py [--wheel FILE | --build-dir build/dev] [--python python3.13] [--demo]

Without --wheel it makes one from the build tree with pip (nothing is compiled if the tree is up to date). Then: tag and
contents; size; auditwheel (which manylinux it fits), abi3audit; a fresh virtual environment of another Python, with a
PATH that has no compiler, in which a small model is made, streamed and compared with the resident one. --demo runs
`moestream demo` there as well. Everything is kept out of the source tree, in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WANTED = (
    r"moestream/_native\.abi3\.so",
    r"moestream/_lib/libmoestream\.so",
    r"moestream/_lib/libllama\.so",
    r"moestream/_lib/libggml-base\.so\.ms-[0-9a-f]+",
    r"moestream/_lib/libggml-cpu.*\.so.*",
    r"moestream/include/moestream\.h",
    r"moestream/include/llama\.cpp/llama\.h",
    r"moestream/lib/pkgconfig/moestream\.pc",
    r"moestream/lib/cmake/moestream/moestreamConfig\.cmake",
    r"moestream/licenses/LICENSE\.llama\.cpp",
    r"moestream/integrations/llama_cpp_python\.py",
    r"moestream/py\.typed",
)
UNWANTED = (r".*__pycache__.*", r"(?!moestream/licenses/).*\.(c|o|a|cpp)$", r"tests/.*", r".*libllama-common.*")

TRY = """
import json, pathlib, subprocess, sys
import moestream
from moestream import synthetic
path = pathlib.Path(sys.argv[1]) / "small.gguf"
synthetic.write_model(path, synthetic.Spec(expert_type="Q4_K"))
command = [sys.executable, "-m", "moestream", "verify", str(path), "--tokens", "8", "--json"]
done = subprocess.run(command, capture_output=True, text=True, check=True)
out = {"verify": json.loads(done.stdout), "python": sys.version.split()[0]}
out["features"] = moestream.features()
out["cpu"] = [pathlib.Path(item["path"]).name for item in moestream.libraries() if "libggml-cpu" in item["path"]]
print(json.dumps(out))
"""

# What ggml asks each CPU backend of a portable build: 0 where this machine cannot run it, the higher the better.
SCORES = """
import ctypes, json, pathlib, sys
backends = pathlib.Path(sys.argv[1]).glob("libggml-cpu-*.so")
print(json.dumps({path.name: ctypes.CDLL(str(path)).ggml_backend_score() for path in backends}))
"""


class Failed(Exception):
    """A check that did not hold; the message says which and with what."""


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Output of a command; Failed, with what it said, if it does not succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=cwd, check=False)
    if done.returncode != 0:
        raise Failed(f"{' '.join(str(word) for word in command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def make(build: Path, out: Path) -> Path:
    """A wheel from a build tree."""
    print(f"wheel: building from {build}", flush=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, ROOT, "--wheel-dir", out, "-C", f"build-dir={build}")
    return next(out.glob("*.whl"))


def check_contents(wheel: Path) -> None:
    """Tag, files that must and must not be there, links (a wheel keeps none), sizes."""
    if not re.search(r"-cp310-abi3-(many)?linux.*\.whl$", wheel.name):
        raise Failed(f"{wheel.name} is not tagged cp310-abi3-linux")
    with zipfile.ZipFile(wheel) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
    for pattern in WANTED:
        if not any(re.fullmatch(pattern, name) for name in entries):
            raise Failed(f"{wheel.name} has nothing like {pattern}")
    for pattern in UNWANTED:
        found = [name for name in entries if re.fullmatch(pattern, name)]
        if found:
            raise Failed(f"{wheel.name} has {found[:3]}, which belong elsewhere")
    links = [name for name, entry in entries.items() if (entry.external_attr >> 16) & 0o170000 == 0o120000]
    if links:
        raise Failed(f"{wheel.name} has symbolic links: {links}")
    unpacked = sum(entry.file_size for entry in entries.values())
    print(
        f"wheel: {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB, {unpacked / 1e6:.1f} MB unpacked, "
        f"{len(entries)} files"
    )


def check_audits(wheel: Path, work: Path) -> None:
    """auditwheel and abi3audit, in an environment of their own."""
    tools = work / "tools"
    run(sys.executable, "-m", "venv", tools)
    run(tools / "bin" / "pip", "install", "--quiet", "auditwheel", "abi3audit")
    shown = " ".join(run(tools / "bin" / "auditwheel", "show", wheel).split())
    fits = re.search(r'consistent with the following platform tag: "([^"]+)"', shown)
    if fits is None:
        raise Failed(f"auditwheel: {shown}")
    print(f"wheel: auditwheel: {fits.group(1)}")
    run(tools / "bin" / "abi3audit", "--strict", wheel)
    print("wheel: abi3audit: no violation of the stable ABI of Python 3.10")


def other_python() -> str:
    """A Python of another minor version than this one."""
    found = []
    for minor in range(14, 9, -1):
        name = f"python3.{minor}"
        pyenv = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"))
        found += [str(path) for path in pyenv] or [path for path in [shutil.which(name)] if path]
    for python in found:
        version = subprocess.run(
            [python, "-c", "import sys; print(sys.version_info.minor)"], capture_output=True, text=True
        )
        if version.returncode == 0 and int(version.stdout) != sys.version_info.minor:
            return python
    raise Failed("no Python of another version was found: give one with --python")


def check_fresh(wheel: Path, python: str, work: Path, demo: bool) -> None:
    """Installs the wheel alone, and streams a model, where no compiler is in reach."""
    fresh = work / "fresh"
    run(python, "-m", "venv", fresh)
    empty = work / "bin"
    empty.mkdir()
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MOESTREAM_LIBLLAMA")}
    env["PATH"] = f"{fresh / 'bin'}:{empty}"
    for tool in ("cc", "gcc", "c++", "g++", "clang", "make", "cmake", "ninja"):
        if shutil.which(tool, path=env["PATH"]):
            raise Failed(f"{tool} is in reach of the fresh environment")
    run(fresh / "bin" / "python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:", wheel, env=env)
    said = json.loads(run(fresh / "bin" / "python", "-c", TRY, work, env=env, cwd=Path("/")).splitlines()[-1])
    if not said["verify"]["identical"]:
        raise Failed(f"streamed and resident differ: {said['verify']}")
    print(f"wheel: Python {said['python']}, no compiler: identical for {said['verify']['tokens']} tokens, "
          f"{said['features']['libllama'].rsplit('/', 3)[1:]}")  # fmt: skip
    libraries = Path(said["features"]["libllama"]).parent
    scores = json.loads(run(fresh / "bin" / "python", "-c", SCORES, libraries, env=env).splitlines()[-1])
    if scores:
        best = max(scores, key=lambda name: int(scores[name]))
        if said["cpu"] != [best]:
            raise Failed(f"{said['cpu']} was loaded, of {scores}")
        print(f"wheel: {best} was chosen of {len(scores)}, {sum(map(bool, scores.values()))} of which run here")
    if demo:
        print(run(fresh / "bin" / "moestream", "demo", env=env, cwd=Path("/"))[-3000:])


def main() -> int:
    """Command line: 0 where everything holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "dev")
    parser.add_argument(
        "--python", help="interpreter of the fresh environment; another version than this one is looked for"
    )
    parser.add_argument("--no-audit", action="store_true", help="leave out auditwheel and abi3audit")
    parser.add_argument("--demo", action="store_true", help="also run moestream demo")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="moestream-wheel-") as name:
            work = Path(name)
            wheel = options.wheel or make(options.build_dir.absolute(), work)
            check_contents(wheel)
            if not options.no_audit:
                check_audits(wheel, work)
            check_fresh(wheel, options.python or other_python(), work, options.demo)
    except Failed as problem:
        print(f"check_wheel: error: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
