"""Wrong, missing, doubled and oddly placed libraries: refused by name, or the right one is used (CASES B1 to B7)."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from support import foreign_llama

import moestream

RunPython = Callable[..., subprocess.CompletedProcess[str]]

REPO = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = pathlib.Path(moestream.__file__).resolve().parent
LIBRARIES = PACKAGE / "_lib"

# A libllama whose context parameters are 8 bytes longer from some field on, of a commit that is not the one built for.
OTHER_COMMIT = """
#include <dlfcn.h>
#include <string.h>
typedef struct { char byte[160]; } real_params;
typedef struct { char byte[168]; } longer_params;
longer_params llama_context_default_params(void);
longer_params llama_context_default_params(void) {
    real_params (*get)(void) = (real_params (*)(void)) dlsym(RTLD_NEXT, "llama_context_default_params");
    real_params p = get();
    longer_params longer;
    memset(&longer, 0, sizeof(longer));
    memcpy(longer.byte, p.byte, 16);
    memcpy(longer.byte + 24, p.byte + 16, sizeof(p.byte) - 16);
    return longer;
}
const char * ggml_commit(void);
const char * ggml_commit(void) { return "af6528e-dirty"; }
"""

TRY_A_MODEL = """
import sys, moestream
try:
    model = moestream.Model(sys.argv[1], stream=True)
    print("loaded", model.context(64, n_threads=1).decode([1, 2, 3]).shape)
except moestream.MoestreamError as error:
    print(type(error).__name__, error)
"""


def built_for() -> str:
    """The commit this moestream was built for."""
    return str(moestream.build_info()["llama_commit"])


# ---- B1, B2: another llama.cpp ---------------------------------------------------------------------------------------


def test_b1_another_commit_with_other_structs_is_refused_with_both_named(
    tiny_moe: Callable[..., pathlib.Path], tmp_path: pathlib.Path, run_python: RunPython
) -> None:
    other = foreign_llama.in_front(tmp_path / "other", OTHER_COMMIT)
    done = run_python(TRY_A_MODEL, env={"MOESTREAM_LIBLLAMA": str(other)}, args=(str(tiny_moe("Q8_0")),))
    assert done.stdout.startswith("UnsupportedError "), done.stdout
    for part in (built_for(), "af6528e", str(other), "llama_context_params"):
        assert part in done.stdout


def test_b1_a_library_that_is_no_llama_is_refused(
    tiny_moe: Callable[..., pathlib.Path], tmp_path: pathlib.Path, run_python: RunPython
) -> None:
    source, empty = tmp_path / "empty.c", tmp_path / "libllama.so"
    source.write_text("int nothing = 1;\n", encoding="ascii")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", empty, source], check=True)
    model = str(tiny_moe("Q8_0"))
    for path, words in ((empty, "CPU backend"), (tmp_path / "absent.so", "could not load")):
        done = run_python(TRY_A_MODEL, env={"MOESTREAM_LIBLLAMA": str(path)}, args=(model,))
        assert "Error " in done.stdout and words in done.stdout and str(path) in done.stdout


def test_b1_a_shorter_and_a_longer_struct_of_a_caller() -> None:
    lib, ffi = moestream.lib, moestream.ffi
    err = ffi.new("moestream_error *")
    err.struct_size = ffi.sizeof("moestream_error")
    whole = ffi.sizeof("moestream_params")
    memory = ffi.new("unsigned char[]", whole + 16)
    params, plan = ffi.cast("moestream_params *", memory), ffi.new("moestream_plan **")
    for size, tail, status in (
        (whole - 8, 0, lib.MOESTREAM_ERR_IO),  # an older caller: what it does not know is zero
        (whole + 16, 0, lib.MOESTREAM_ERR_IO),  # a newer caller that sets nothing new
        (whole + 16, 1, lib.MOESTREAM_ERR_UNSUPPORTED),
        (0, 0, lib.MOESTREAM_ERR_INVALID),
    ):
        params.struct_size = size
        memory[whole + 15] = tail
        assert lib.moestream_plan_open(plan, b"/nonexistent.gguf", params, err) == status, (size, tail)
    assert "struct_size" in ffi.string(err.message).decode()


def test_b2_a_missing_function_takes_only_its_feature_away(
    tiny_moe: Callable[..., pathlib.Path], tmp_path: pathlib.Path, run_python: RunPython
) -> None:
    hidden = foreign_llama.without(tmp_path / "hidden", "llama_model_load_from_file_ptr", "llama_state_seq_get_data")
    done = run_python(
        """
        import json, sys, moestream
        model = moestream.Model(sys.argv[1], stream=True)
        lib, ffi = moestream.lib, moestream.ffi
        err = ffi.new("moestream_error *")
        err.struct_size = ffi.sizeof("moestream_error")
        out = {"features": moestream.features(), "decode": model.context(64, n_threads=1).decode([1, 2]).shape[1]}
        try:
            lib.llama_state_seq_get_data
        except moestream.MissingFunctionError as error:
            out["python"] = str(error)
        store = model._handles.store
        status = lib.moestream_load_file(store, ffi.new("void **"), err)
        out["c"] = [status == lib.MOESTREAM_ERR_UNSUPPORTED, ffi.string(err.message).decode()]
        print(json.dumps(out))
        """,
        env={"MOESTREAM_LIBLLAMA": str(hidden)},
        args=(str(tiny_moe("Q8_0")),),
    )
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["features"]["load_from_file_ptr"] is False and got["decode"] > 0
    assert "llama_state_seq_get_data" in got["python"]
    assert got["c"][0] and "llama_model_load_from_file_ptr" in got["c"][1]


def test_b2_a_function_nothing_works_without_is_named(
    tiny_moe: Callable[..., pathlib.Path], tmp_path: pathlib.Path, run_python: RunPython
) -> None:
    hidden = foreign_llama.without(tmp_path / "hidden", "llama_attach_threadpool")
    done = run_python(TRY_A_MODEL, env={"MOESTREAM_LIBLLAMA": str(hidden)}, args=(str(tiny_moe("Q8_0")),))
    assert done.stdout.startswith("UnsupportedError ")
    assert "llama_attach_threadpool" in done.stdout and built_for() in done.stdout


# ---- B3: two ggml in one process -------------------------------------------------------------------------------------


def test_b3_a_second_ggml_in_the_process_is_listed_and_not_used(
    tiny_moe: Callable[..., pathlib.Path], run_python: RunPython
) -> None:
    stale = foreign_llama.libraries()
    code = """
        import ctypes, hashlib, json, sys
        if sys.argv[2]:
            ctypes.CDLL(sys.argv[2], ctypes.RTLD_GLOBAL if sys.argv[3] else ctypes.RTLD_LOCAL)
        import moestream
        model = moestream.Model(sys.argv[1], stream=moestream.Stream(cache="min"))
        logits = model.context(64, n_threads=1, n_threads_batch=1).decode([1, 2, 3, 4, 5])
        print(json.dumps([hashlib.sha256(logits.tobytes()).hexdigest(), moestream.libraries(),
                          moestream.features()["libllama"]]))
        """
    model = str(tiny_moe("Q4_K"))
    results = {}
    for name, first, everywhere in (("alone", "", ""), ("local", stale, ""), ("global", stale, "1")):
        library = str(first / "libllama.so") if first else ""
        env = {"LD_LIBRARY_PATH": str(stale)}  # a stale one in the search path must not be found either
        results[name] = json.loads(run_python(code, env=env, args=(model, library, everywhere)).stdout.splitlines()[-1])
    for name, (digest, libraries, used) in results.items():
        assert digest == results["alone"][0], name
        assert used == str(LIBRARIES / "libllama.so")
        bound = [item["path"] for item in libraries if item["bound"]]
        assert bound == [used]
        copies = [item["path"] for item in libraries if "libggml-base" in item["path"]]
        assert len(copies) == (1 if name == "alone" else 2), libraries


def test_import_loads_no_llama(run_python: RunPython) -> None:
    done = run_python("import moestream; print(moestream.libraries(), moestream.build_info()['llama_commit'])")
    assert "libllama" not in done.stdout and built_for() in done.stdout


# ---- B4: backends that are loaded at run time ------------------------------------------------------------------------


def test_b4_backends_load_from_the_library_s_folder_whatever_the_working_directory(
    tiny_moe: Callable[..., pathlib.Path], tmp_path: pathlib.Path, run_python: RunPython
) -> None:
    library = foreign_llama.with_loadable_backends(tmp_path / "with spaces")
    model = str(tiny_moe("Q8_0"))
    code = "import os\nos.chdir('/')\n" + TRY_A_MODEL
    done = run_python(code, env={"MOESTREAM_LIBLLAMA": str(library)}, args=(model,))
    assert done.stdout.startswith("loaded "), done.stdout
    (library.parent / "libggml-cpu.so").unlink()
    done = run_python(TRY_A_MODEL, env={"MOESTREAM_LIBLLAMA": str(library)}, args=(model,))
    assert done.stdout.startswith("UnsupportedError ") and "libggml-cpu" in done.stdout and str(library) in done.stdout


# ---- B5: the header --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["c", "c++"])
def test_b5_the_header_compiles_alone(language: str) -> None:
    compiler, standard = ("cc", "-std=c11") if language == "c" else ("c++", "-std=c++17")
    command = [compiler, "-x", language, standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"]
    include = f"-I{PACKAGE / 'include'}"
    subprocess.run([*command, include, REPO / "cmake" / "header_alone.c"], check=True)


def test_b5_the_library_exports_what_the_header_declares() -> None:
    command = [sys.executable, REPO / "tools" / "check_symbols.py", "--lib-dir", LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- B6: my own tree -------------------------------------------------------------------------------------------------


def configure(build: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    """CMake's configuration of this source tree, with no way to a package index."""
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake: it is not installed")
    command = ["cmake", "-S", REPO, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *options]
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull}
    env.pop("MOESTREAM_LLAMA_DIR", None)
    python = [f"-DPython_EXECUTABLE={sys.executable}", "-DMOESTREAM_BUILD_PYTHON=OFF"]
    return subprocess.run([*command, *python], capture_output=True, text=True, env=env, check=False)


def llama_tree() -> pathlib.Path:
    """The source tree of the pinned llama.cpp that the build used."""
    for path in (REPO / "third_party" / "llama.cpp", REPO / "build" / f"_llama-{built_for()}"):
        if (path / "CMakeLists.txt").is_file():
            return path
    pytest.skip("needs the build tree: the sources of llama.cpp")


def listing(tree: pathlib.Path) -> dict[str, int]:
    """Every file with its time of change."""
    return {str(path): path.stat().st_mtime_ns for path in tree.rglob("*") if path.is_file()}


def test_b6_my_own_tree_one_option_no_network_spaces_and_nothing_written_into_it(tmp_path: pathlib.Path) -> None:
    tree = tmp_path / "my llama.cpp"
    tree.symlink_to(llama_tree())
    before = listing(tree.resolve())
    build = tmp_path / "the build"
    done = configure(build, f"-DMOESTREAM_LLAMA_DIR={tree}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MOESTREAM_LLAMA_DIR" in done.stdout and built_for()[:7] in done.stdout
    made = subprocess.run(
        ["cmake", "--build", build, "--target", "moestream"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr
    assert built_for().encode() in (build / "_lib" / "libmoestream.so").read_bytes()
    assert listing(tree.resolve()) == before


def test_b6_an_installed_llama_is_used_where_it_is(
    tiny_moe: Callable[..., pathlib.Path], tmp_path: pathlib.Path
) -> None:
    prefix = tmp_path / "usr local"
    shutil.copytree(foreign_llama.libraries(), prefix / "lib")
    shutil.copytree(PACKAGE / "include" / "llama.cpp", prefix / "include")
    done = configure(tmp_path / "build", f"-DMOESTREAM_LLAMA_DIR={prefix}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(prefix / "lib" / "libllama.so") in done.stdout
    command = ["cmake", "--build", tmp_path / "build", "--target", "moestream"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr
    library = tmp_path / "build" / "_lib"
    bind = """
import ctypes, json, sys
ms = ctypes.CDLL(sys.argv[1])
text = ctypes.create_string_buffer(10000)
status = ms.moestream_bind(None, None)
ms.moestream_libraries(text, 10000)
print(status, [item["path"] for item in json.loads(text.value) if item["bound"]])
"""
    run = [sys.executable, "-c", bind, library / "libmoestream.so"]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"0 ['{prefix}/lib/libllama.so']"
    for file in (prefix / "lib").iterdir():  # the example loads all from one folder
        (library / file.name).symlink_to(file)
    example = REPO / "examples" / "ctypes" / "stream.py"
    outputs = []
    for folder in (LIBRARIES, library):
        run = [sys.executable, example, folder, tiny_moe("F16")]
        outputs.append(subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert outputs[0] == outputs[1] and outputs[0].startswith("logits ")


# ---- B7: what is missing, and what to do -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-DMOESTREAM_URING=ON", "-DMS_URING_LIBRARY="), ("liburing-dev", "MOESTREAM_URING=OFF")),
        (("-DMOESTREAM_LLAMA_DIR={empty}",), ("has no include/llama.h", "MOESTREAM_LLAMA_DIR")),
        (("-DMOESTREAM_URING=MAYBE",), ("AUTO, ON and OFF",)),
    ],
    ids=["no liburing", "no llama.cpp", "nonsense"],
)
def test_b7_a_build_that_lacks_something_says_what(
    options: tuple[str, ...], words: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "empty").mkdir()
    done = configure(tmp_path / "build", *(option.replace("{empty}", str(tmp_path / "empty")) for option in options))
    text = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0
    assert all(word in text for word in words), text


def test_b7_without_a_compiler_the_setup_names_it(tmp_path: pathlib.Path) -> None:
    for tool in ("bash", "dirname", "id", "env", "python3", "git", "mktemp"):
        found = shutil.which(tool)
        if found is not None:
            (tmp_path / tool).symlink_to(found)
    done = subprocess.run(
        [shutil.which("bash") or "bash", REPO / "tools" / "setup_env", tmp_path / "venv"],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and "gcc" in done.stderr and "install" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_b7_without_pip_or_with_one_that_fails_the_fetch_says_what_to_do(tmp_path: pathlib.Path) -> None:
    bare = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    fetch = [bare / "bin" / "python", REPO / "tools" / "fetch_llama.py", "--dest", tmp_path / "llama"]
    env = {"PATH": str(bare / "bin"), "HOME": str(tmp_path)}
    none = subprocess.run(fetch, env=env, capture_output=True, text=True, check=False)
    assert none.returncode != 0 and "has no pip" in none.stderr and "MOESTREAM_LLAMA_DIR" in none.stderr
    old = bare / "bin" / "pip3"  # an old pip refuses an option that it does not know, with status 2
    old.write_text("#!/bin/sh\necho 'no such option' >&2\nexit 2\n", encoding="ascii")
    old.chmod(0o755)
    failed = subprocess.run(
        fetch, env={**env, "PATH": f"{bare / 'bin'}:/bin"}, capture_output=True, text=True, check=False
    )
    assert failed.returncode != 0 and "could not download" in failed.stderr and "status 2" in failed.stderr
    assert not (tmp_path / "llama").exists()


# ---- Windows: porting stays a small step ---------------------------------------------------------------------------


def test_the_shim_s_sources_compile_for_windows_but_for_what_is_listed() -> None:
    command = [sys.executable, REPO / "tools" / "check_windows.py", "--llama", llama_tree()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
