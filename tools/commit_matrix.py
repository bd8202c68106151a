#!/usr/bin/env python3
"""Which llama.cpp commits this moestream works with: builds each one from the source distributions of llama-cpp-python,
runs the real llama_cpp.Llama with those libraries, streamed and not, and prints one row of a table for each.

    python tools/commit_matrix.py 0.3.34                 # one release: what CI does
    python tools/commit_matrix.py --all                  # all of RELEASES: what a person does, half an hour and more
    python tools/commit_matrix.py --all --write          # and puts the table into docs/support.md

A row says: does llama.cpp of that commit build; does everything in tools/commit_try.py come out the same streamed as
resident, the installed moestream driving a library it was not built for; and does a shim that is built for that commit
(MOESTREAM_LLAMA_DIR) give the same logits, in examples/ctypes. Everything is kept in a work folder (--work) and not
made again. It never builds in the source tree, and installs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moestream import synthetic
from moestream.demo import ensure_demo_model

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- commits:begin (tools/commit_matrix.py) -->", "<!-- commits:end -->"

# Releases of llama-cpp-python, oldest first.
RELEASES = ("0.3.16", "0.3.20", "0.3.24", "0.3.34", "0.3.36")

FEATURES = ("load_from_file_ptr", "tensor_map", "params_match")

CMAKE_OPTIONS = [
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_OPENMP=ON", "-DLLAMA_CURL=OFF"),
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "TOOLS", "EXAMPLES", "SERVER", "COMMON", "APP")),
]


@dataclass
class Row:
    """What was seen of one release."""

    release: str
    commit: str = "?"
    date: str = "?"
    llama_builds: str = "no"
    identical: str = "no"
    shim_runs: str = "no"
    features: list[str] = field(default_factory=list)
    checks: dict[str, bool] = field(default_factory=dict)
    text: str = ""
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether everything held."""
        return (self.llama_builds, self.identical, self.shim_runs) == ("yes", "yes", "yes")


class Failed(Exception):
    """A step that did not succeed; its output is in the log named in the message."""


def run(log: Path, *command: str | Path, env: dict[str, str] | None = None) -> str:
    """Output of a command, which is kept in `log` as well; Failed if it does not succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=env, check=False)
    log.write_text(" ".join(str(word) for word in command) + "\n" + done.stdout + done.stderr, encoding="utf-8")
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise Failed(f"{log.name}: {' '.join(last)[:160]}")
    return done.stdout


def unpack(release: str, work: Path) -> Path:
    """The unpacked source distribution of a release, downloaded with pip."""
    tree = work / f"llama_cpp_python-{release}"
    if (tree / "vendor" / "llama.cpp" / "CMakeLists.txt").is_file():
        return tree
    archive = work / f"llama_cpp_python-{release}.tar.gz"
    if not archive.is_file():
        name = "llama-cpp-python"
        options = ["--no-deps", "--no-binary", name, "--no-build-isolation", "--dest", str(work)]
        run(work / f"{release}-download.log", sys.executable, "-m", "pip", "download", *options, f"{name}=={release}")
    with tarfile.open(archive) as tar:
        for member in tar:
            if (member.isfile() or member.isdir()) and ".." not in Path(member.name).parts:
                tar.extract(member, work)
    return tree


def commit_of(tree: Path) -> tuple[str, str]:
    """Commit and date of the llama.cpp in a source distribution, which carries a shallow repository."""
    repository = tree / ".git" / "modules" / "vendor" / "llama.cpp"
    command = ["git", f"--git-dir={repository}", "log", "-1", "--format=%H %cs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.fullmatch(r"([0-9a-f]{40}) (\S+)", done.stdout.strip())
    return (found.group(1), found.group(2)) if found else ("?", "?")


def imports(work: Path) -> Path:
    """What llama_cpp imports, in a folder of its own."""
    folder = work / "imports"
    if not (folder / "jinja2").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        run(work / "imports.log", *pip, "diskcache", "jinja2", "typing_extensions")
    return folder


def build_llama(release: str, tree: Path, work: Path, jobs: int) -> Path:
    """libllama.so of a release, built the plain way."""
    build = work / f"{release}-llama"
    library = build / "bin" / "libllama.so"
    if not library.is_file():
        llama = tree / "vendor" / "llama.cpp"
        run(work / f"{release}-configure.log", "cmake", "-S", llama, "-B", build, "-G", "Ninja", *CMAKE_OPTIONS)
        run(work / f"{release}-build.log", "cmake", "--build", build, "-j", str(jobs), "--target", "llama")
    return library


def build_shim(release: str, tree: Path, library: Path, work: Path, jobs: int) -> Path:
    """A folder with a libmoestream.so that is built for the llama.cpp of a release, and links to that release's."""
    shim = work / f"{release}-shim"
    options = [f"-DMOESTREAM_LLAMA_DIR={tree / 'vendor' / 'llama.cpp'}", "-DMOESTREAM_BUILD_PYTHON=OFF"]
    options.append(f"-DPython_EXECUTABLE={sys.executable}")
    run(work / f"{release}-shim-configure.log", "cmake", "-S", ROOT, "-B", shim, "-G", "Ninja", *options)
    run(work / f"{release}-shim.log", "cmake", "--build", shim, "-j", str(jobs), "--target", "moestream")
    folder = work / f"{release}-together"
    folder.mkdir(exist_ok=True)
    for file in (shim / "_lib" / "libmoestream.so", library):
        link = folder / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file)
    return folder


def examine(release: str, work: Path, model: Path, jobs: int) -> Row:
    """One row: build llama.cpp, run the adaptor on it, build the shim for it, run that."""
    row = Row(release)
    try:
        tree = unpack(release, work)
        row.commit, row.date = commit_of(tree)
        library = build_llama(release, tree, work, jobs)
        row.llama_builds = "yes"
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join([str(tree), str(imports(work))])
        env["LLAMA_CPP_LIB_PATH"] = str(library.parent)
        small, split = small_models(work)
        script = ROOT / "tools" / "commit_try.py"
        said = run(work / f"{release}-try.log", sys.executable, script, model, small, split, env=env)
        found = json.loads(said.splitlines()[-1])
        row.checks, row.text = found["checks"], found["text"]
        row.identical = "yes" if all(row.checks.values()) else "no"
        row.problem = ", ".join(name for name, held in row.checks.items() if not held)
        row.features = [f"buffer layout {found['features']['buffer_layout']}"]
        row.features += [name for name in FEATURES if found["features"].get(name)]
        folder = build_shim(release, tree, library, work, jobs)
        example = ROOT / "examples" / "ctypes" / "stream.py"
        printed = run(work / f"{release}-example.log", sys.executable, example, folder, small).splitlines()[-1]
        row.shim_runs = "yes" if printed == found["example"] else "no"
        if row.shim_runs == "no":
            row.problem += f" the example printed {printed}, resident {found['example']}"
    except (Failed, OSError, tarfile.TarError) as problem:
        row.problem = str(problem)
    return row


def table(rows: list[Row]) -> str:
    """The rows as a table in Markdown."""
    head = "| llama-cpp-python | llama.cpp commit | date | llama.cpp builds | identical | shim for it runs | features |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for row in rows:
        rest = "; ".join(filter(None, [", ".join(row.features), row.problem.replace("|", "/")])) or "-"
        cells = (row.release, row.commit[:9], row.date, row.llama_builds, row.identical, row.shim_runs, rest)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(rows: list[Row]) -> None:
    """Puts the table between the marks of docs/support.md, or at its end."""
    text = SUPPORT.read_text(encoding="utf-8") if SUPPORT.is_file() else "# What is supported\n"
    block = f"{BEGIN}\n{table(rows)}\n{END}"
    if BEGIN in text and END in text:
        text = text[: text.index(BEGIN)] + block + text[text.index(END) + len(END) :]
    else:
        text = text.rstrip("\n") + f"\n\n## commits\n\n{block}\n"
    SUPPORT.write_text(text, encoding="utf-8")


def small_models(work: Path) -> tuple[Path, Path]:
    """For the example, with F16 experts, which no CPU repacks and have one kernel; and a model in three files."""
    small, split = work / "small-f16.gguf", work / "small-00001-of-00003.gguf"
    if not split.is_file():
        synthetic.write_model(small, synthetic.Spec(arch="llama", expert_type="F16"))
        synthetic.write_model(work / "small.gguf", synthetic.Spec(arch="llama", expert_type="Q4_K", n_shards=3))
    return small, split


def main() -> int:
    """Command line: 0 where everything held for every release asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("releases", nargs="*", help="releases of llama-cpp-python")
    parser.add_argument("--all", action="store_true", help=f"all of {', '.join(RELEASES)}")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "commits", help="what is downloaded and built")
    parser.add_argument("--model", type=Path, help="a GGUF with experts; without it, the demo model")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="put the table into docs/support.md")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    releases = list(RELEASES) if options.all else options.releases
    if not releases:
        parser.error("name releases of llama-cpp-python, or say --all")
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    model = options.model.absolute() if options.model else ensure_demo_model()
    rows = []
    for release in releases:
        print(f"commit_matrix: {release} ...", file=sys.stderr, flush=True)
        rows.append(examine(release, work, model, options.jobs))
        print(f"commit_matrix: {release}: {asdict(rows[-1])}", file=sys.stderr, flush=True)
    print(json.dumps([asdict(row) for row in rows], indent=1) if options.json else table(rows))
    if options.write:
        write(rows)
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
