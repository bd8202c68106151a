"""The examples in C, ctypes, Node.js and Rust, against the installed package: the same logits as the Python API."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

import moestream

REPO = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = REPO / "examples"
PACKAGE = pathlib.Path(moestream.__file__).resolve().parent
LIBRARIES = PACKAGE / "_lib"

PYTHON_API = """
import sys
import numpy as np
import moestream

model = moestream.Model(sys.argv[1], n_cpu_moe=1, stream=moestream.Stream(cache="min", prefetch="off"),
                        use_extra_bufts=True)  # llama.cpp's own default, which the examples keep
context = model.context(512, n_batch=2048, n_ubatch=512, n_threads=1, n_threads_batch=1)
tokens, hash_ = [1, 2, 3, 4, 5, 6, 7, 8], 14695981039346656037
for step in range(8):
    logits = np.ascontiguousarray(context.decode(tokens)[-1])
    tokens = [int(logits.argmax())]
    for byte in logits.tobytes():
        hash_ = (hash_ ^ byte) * 1099511628211 % 2**64
    print("token", tokens[0])
print(f"logits {hash_:016x}")
"""


def need(*programs: str) -> list[str]:
    """Full names of programs; skips, which fails the run in CI, where one is missing."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(pathlib.Path.home() / ".cargo" / "bin")])
    found = [shutil.which(program, path=path) for program in programs]
    for program, name in zip(programs, found, strict=True):
        if name is None:
            pytest.skip(f"needs {program}: it is not installed")
    return [str(name) for name in found]


def output_of(*command: str | os.PathLike[str], **options: object) -> str:
    """Standard output of a command that has to succeed."""
    options = {"capture_output": True, "text": True, "timeout": 300, "check": False, **options}
    done = subprocess.run(command, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def results(output: str) -> list[str]:
    """The lines that are the same in every language."""
    return [line for line in output.splitlines() if line.startswith(("token ", "logits "))]


@pytest.fixture(scope="module")
def model(tiny_moe: Callable[..., pathlib.Path]) -> pathlib.Path:
    """F16 experts: no CPU of ours repacks them, so that the block in CPU memory has one kernel everywhere."""
    return tiny_moe("F16")


@pytest.fixture(scope="module")
def expected(model: pathlib.Path) -> list[str]:
    """What the Python API gives."""
    lines = results(output_of(sys.executable, "-c", PYTHON_API, model))
    assert len(lines) == 9
    return lines


def assert_same(output: str, expected: list[str]) -> None:
    """The same tokens and logits, with block 0 in CPU memory and the other three streamed."""
    assert results(output) == expected
    assert "experts of 3 layers" in output


def test_c_through_find_package(model: pathlib.Path, expected: list[str], tmp_path: pathlib.Path) -> None:
    (cmake,) = need("cmake")
    output_of(cmake, "-S", EXAMPLES / "c", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={PACKAGE}")
    output_of(cmake, "--build", tmp_path)
    assert_same(output_of(tmp_path / "stream", model), expected)


def test_c_through_pkg_config(model: pathlib.Path, expected: list[str], tmp_path: pathlib.Path) -> None:
    pkg_config, compiler = need("pkg-config", "cc")
    env = {**os.environ, "PKG_CONFIG_PATH": str(PACKAGE / "lib" / "pkgconfig")}
    flags = output_of(pkg_config, "--cflags", "--libs", "moestream", env=env).split()
    warnings = ["-std=c11", "-Wall", "-Wextra", "-Werror"]
    output_of(compiler, *warnings, EXAMPLES / "c" / "stream.c", *flags, "-o", tmp_path / "stream")
    assert_same(output_of(tmp_path / "stream", model), expected)


def test_ctypes(model: pathlib.Path, expected: list[str]) -> None:
    assert_same(output_of(sys.executable, EXAMPLES / "ctypes" / "stream.py", LIBRARIES, model), expected)


def test_rust(model: pathlib.Path, expected: list[str], tmp_path: pathlib.Path) -> None:
    (rustc,) = need("rustc")
    links = ["-L", LIBRARIES, "-l", "dylib=moestream", "-l", "dylib=llama", "-C", f"link-arg=-Wl,-rpath,{LIBRARIES}"]
    source = EXAMPLES / "rust" / "stream.rs"
    output_of(rustc, "--edition", "2021", "-D", "warnings", "-O", source, *links, "-o", tmp_path / "stream")
    assert_same(output_of(tmp_path / "stream", model), expected)


def test_node(model: pathlib.Path, expected: list[str]) -> None:
    node, npm = need("node", "npm")
    folder = REPO / "build" / "test-node"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "stream.mjs"):
        shutil.copyfile(EXAMPLES / "node" / name, folder / name)
    if not (folder / "node_modules" / "koffi").is_dir():
        command = [npm, "install", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            pytest.skip(f"needs koffi: npm could not install it: {done.stderr.strip()[-300:]}")
    assert_same(output_of(node, folder / "stream.mjs", LIBRARIES, model), expected)


def test_the_c_of_the_binding_page_compiles_and_links(tmp_path: pathlib.Path) -> None:
    """docs/bindings.md shows two pieces of C: as they are there, with what stands around them declared."""
    text = (REPO / "docs" / "bindings.md").read_text(encoding="utf-8")
    calls, own_structs = re.findall(r"^```c\n(.*?)^```", text, re.M | re.S)
    source = tmp_path / "page.c"
    source.write_text(
        f"""#include <llama.h>
#include <moestream.h>
void calls(void * handle, struct llama_batch batch);
void calls(void * handle, struct llama_batch batch) {{
{calls.replace("{ ... }", "{ return; }")}
(void) code;
}}
void own_structs(const char * path, moestream_params options, moestream_error err);
void own_structs(const char * path, moestream_params options, moestream_error err) {{
moestream * store;
moestream_context * hook;
struct llama_model * model;
struct llama_model_params params = llama_model_default_params();
struct llama_context_params cparams = llama_context_default_params();
{own_structs}
llama_init_from_model(model, cparams);
}}
int main(void) {{ return 0; }}
""",
        encoding="utf-8",
    )
    (compiler,) = need("cc")
    folders = ["-I", PACKAGE / "include", "-I", PACKAGE / "include" / "llama.cpp", "-L", LIBRARIES]
    output_of(compiler, "-std=c11", "-Wall", "-Werror", source, *folders, "-lmoestream", "-lllama",
              f"-Wl,-rpath,{LIBRARIES}", "-o", tmp_path / "page")  # fmt: skip


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("stream.*")), ids=lambda path: path.parent.name)
def test_an_example_is_short(path: pathlib.Path) -> None:
    assert 40 <= len(path.read_text(encoding="utf-8").splitlines()) <= 80
