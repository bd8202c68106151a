#!/usr/bin/env python3
"""Which llama.cpp commits this moestream works with: builds each one from the source distributions of llama-cpp-python,
runs the real llama_cpp.Llama with those libraries, streamed and not, and prints one row of a table for each.

    python tools/commit_matrix.py 0.3.36                 # one release: what CI can do
    python tools/commit_matrix.py --all                  # all of RELEASES: what a person does, half an hour and more
    python tools/commit_matrix.py --all --write          # and puts the table into docs/support.md

A row says: does llama.cpp of that commit build, does the shim build against its headers, and is the streamed text, with
every logit, the resident one, with the installed moestream driving a library it was not built for. Everything is kept
in a work folder (--work) and not made again. It never builds in the source tree, and installs nothing.
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

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- commits:begin (tools/commit_matrix.py) -->", "<!-- commits:end -->"

# Releases of llama-cpp-python, oldest first. 0.3.16 is older than what is supported: it shows where the end is.
RELEASES = ("0.3.16", "0.3.20", "0.3.24", "0.3.34", "0.3.36")

CMAKE_OPTIONS = [
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_OPENMP=ON", "-DLLAMA_CURL=OFF"),
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "TOOLS", "EXAMPLES", "SERVER", "COMMON", "APP")),
]

COMPARE = """
import gc, json, sys
import moestream
from moestream.integrations import llama_cpp_python as bridge
import llama_cpp

OPTIONS = dict(n_ctx=256, n_batch=64, n_ubatch=32, n_threads=1, n_threads_batch=1, verbose=False, seed=1)

def results(**how):
    out = []
    with bridge.loading(**how):
        llm = llama_cpp.Llama(model_path=sys.argv[1], logits_all=True, **OPTIONS)
    for prompt in ("Once upon a time there was", " ".join(["one two three"] * 8)):
        text = llm.create_completion(prompt, max_tokens=16, temperature=0)["choices"][0]["text"]
        out.append([text, hash(llm.scores[: llm.n_tokens].tobytes())])
    chat = llm.create_chat_completion([{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0)
    out.append(chat["choices"][0]["message"]["content"])
    stats = bridge.stats(llm) if "stream" in how else None
    del llm
    gc.collect()
    with bridge.loading(**how):
        llm = llama_cpp.Llama(model_path=sys.argv[1], embedding=True, **OPTIONS)
    out.append(llm.embed("hello world"))
    if stats is not None:
        other = bridge.load(sys.argv[1], **how, logits_all=True, **OPTIONS)
        other.create_completion("two at once", max_tokens=4, temperature=0)
        out.append(llm.embed("hello world") == out[-1])
    return out, stats

features = bridge.features()
resident, _ = results(use_extra_bufts=False)
streamed, stats = results(stream=moestream.Stream(cache="30%"))
two_at_once = streamed.pop()
gc.collect()
bridge.uninstall()
print(json.dumps({"identical": resident == streamed, "two": two_at_once, "features": features,
                  "hits": stats["n_hits"], "reads": stats["n_reads"]}))
"""


@dataclass
class Row:
    """What was seen of one release."""

    release: str
    commit: str = "?"
    date: str = "?"
    llama_builds: str = "no"
    shim_builds: str = "no"
    identical: str = "no"
    features: list[str] = field(default_factory=list)
    problem: str = ""


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


def examine(release: str, work: Path, model: Path, jobs: int) -> Row:
    """One row: build llama.cpp, build the shim against it, run both ways."""
    row = Row(release)
    try:
        tree = unpack(release, work)
        row.commit, row.date = commit_of(tree)
        llama, build = tree / "vendor" / "llama.cpp", work / f"{release}-llama"
        library = next(build.glob("bin/libllama.so"), None)
        if library is None:
            run(work / f"{release}-configure.log", "cmake", "-S", llama, "-B", build, "-G", "Ninja", *CMAKE_OPTIONS)
            run(work / f"{release}-build.log", "cmake", "--build", build, "-j", str(jobs), "--target", "llama")
            library = next(build.glob("bin/libllama.so"))
        row.llama_builds = "yes"
        shim = work / f"{release}-shim"
        options = [
            f"-DMOESTREAM_LLAMA_DIR={llama}",
            "-DMOESTREAM_BUILD_PYTHON=OFF",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        run(work / f"{release}-shim-configure.log", "cmake", "-S", ROOT, "-B", shim, "-G", "Ninja", *options)
        run(work / f"{release}-shim.log", "cmake", "--build", shim, "-j", str(jobs), "--target", "moestream")
        row.shim_builds = "yes"
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join([str(tree), str(imports(work))])
        env["LLAMA_CPP_LIB_PATH"] = str(library.parent)
        found = json.loads(
            run(work / f"{release}-run.log", sys.executable, "-c", COMPARE, model, env=env).splitlines()[-1]
        )
        used = found["hits"] > 0 and found["reads"] > 0
        row.identical = "yes" if found["identical"] and found["two"] and used else "no"
        have = found["features"]
        row.features = [f"buffer layout {have['buffer_layout']}"]
        row.features += [name for name in ("load_from_file_ptr", "tensor_map", "params_match") if have.get(name)]
    except (Failed, OSError, StopIteration, tarfile.TarError) as problem:
        row.problem = str(problem)
    return row


def table(rows: list[Row]) -> str:
    """The rows as a table in Markdown."""
    head = "| llama-cpp-python | llama.cpp commit | date | llama.cpp builds | shim builds | identical | features |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for row in rows:
        rest = ", ".join(row.features) or row.problem.replace("|", "/") or "-"
        cells = (row.release, row.commit[:9], row.date, row.llama_builds, row.shim_builds, row.identical, rest)
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


def default_model(work: Path) -> Path:
    """A small model with experts of a type that llama.cpp has special kernels for."""
    path = work / "model.gguf"
    if not path.is_file():
        from moestream import synthetic

        synthetic.write_model(path, synthetic.Spec(arch="llama", expert_type="Q4_K"))
    return path


def main() -> int:
    """Command line: 0 where every release asked for, from the oldest supported on, is identical."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("releases", nargs="*", help="releases of llama-cpp-python")
    parser.add_argument("--all", action="store_true", help=f"all of {', '.join(RELEASES)}")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "commits", help="what is downloaded and built")
    parser.add_argument("--model", type=Path, help="a GGUF with experts; a small one is made otherwise")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help="put the table into docs/support.md")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    releases = list(RELEASES) if options.all else options.releases
    if not releases:
        parser.error("name releases of llama-cpp-python, or say --all")
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    model = options.model.absolute() if options.model else default_model(work)
    rows = []
    for release in releases:
        print(f"commit_matrix: {release} ...", file=sys.stderr, flush=True)
        rows.append(examine(release, work, model, options.jobs))
        print(f"commit_matrix: {release}: {asdict(rows[-1])}", file=sys.stderr, flush=True)
    print(json.dumps([asdict(row) for row in rows], indent=1) if options.json else table(rows))
    if options.write:
        write(rows)
    return 0 if all(row.identical == "yes" for row in rows if row.release != "0.3.16") else 1


if __name__ == "__main__":
    sys.exit(main())
