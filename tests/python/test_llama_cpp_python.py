"""The adaptor for llama-cpp-python, on the real package and on two libllama: one that is not ours, and ours.

Each test is a fresh process, as a user's program would be. The reference is the same llama_cpp.Llama without us (but
for repacking, which gives other last digits).
"""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from support import foreign_llama

import moestream

RunPython = Callable[..., subprocess.CompletedProcess[str]]

HEAD = """
import ctypes, gc, json, sys
import moestream
from moestream import Stream
from moestream.integrations import llama_cpp_python as bridge
import llama_cpp

path = sys.argv[1]
OPTIONS = dict(n_ctx=128, n_batch=64, n_ubatch=32, n_threads=1, n_threads_batch=1, verbose=False, seed=1)

def resident(**more):
    with bridge.loading(use_extra_bufts=False):
        return llama_cpp.Llama(model_path=path, **{**OPTIONS, **more})

def streamed(cache="30%", stream=None, **more):
    with bridge.loading(stream=stream or Stream(cache=cache)):
        return llama_cpp.Llama(model_path=path, **{**OPTIONS, **more})

def complete(llm, prompt="Once upon a time there was", n=12):
    text = llm.create_completion(prompt, max_tokens=n, temperature=0)["choices"][0]["text"]
    return text, (llm.scores[: llm.n_tokens].tobytes() if llm.context_params and llm._logits_all else b"")

def maps():
    return sorted({line.split()[-1] for line in open("/proc/self/maps") if "libllama" in line or "libggml" in line})
"""


@pytest.fixture(scope="module", params=["foreign", "ours"])
def host(request: pytest.FixtureRequest, run_python: RunPython) -> Callable[..., Any]:
    """host(code, model): runs HEAD + code in a process where llama_cpp has this libllama; the JSON of its last line."""
    package = foreign_llama.package()
    ours = pathlib.Path(moestream.__file__).parent / "_lib"
    folder = foreign_llama.libraries() if request.param == "foreign" else ours

    def run(code: str, model: pathlib.Path, **options: Any) -> Any:
        env = {"PYTHONPATH": str(package), "LLAMA_CPP_LIB_PATH": str(folder)}
        done = run_python(HEAD + code, env=env, args=(str(model),), **options)
        host_result = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else None
        return host_result if options.get("check", True) else (host_result, done)

    run.is_foreign = request.param == "foreign"  # type: ignore[attr-defined]
    run.folder = folder  # type: ignore[attr-defined]
    return run


def test_completion_chat_state_and_embeddings_are_those_of_the_resident_model(
    host: Any, make_moe: Any, tiny_moe: Any
) -> None:
    got = host(
        """
a, b = resident(logits_all=True), streamed(logits_all=True)
chat = lambda llm: llm.create_chat_completion([{"role": "user", "content": "hi"}], max_tokens=6, temperature=0)
ask = lambda llm: llm.create_completion(" and", max_tokens=6, temperature=0, seed=3)["choices"][0]["text"]
out = {"completion": complete(a) == complete(b), "stats": bridge.stats(b)}
state = b.save_state()
before = ask(b)
b.load_state(state)
out["state"] = before == ask(b)
sample = lambda llm: llm.create_completion("x", max_tokens=8, temperature=0.9, seed=5)["choices"][0]["text"]
out["sampled"] = [sample(a), sample(b)]
out["chat"] = [chat(llm)["choices"][0]["message"]["content"] for llm in (a, b)]
a.close(); b.close()
a, b = resident(embedding=True), streamed(embedding=True)
out["embeddings"] = a.embed("hello world") == b.embed("hello world")
out["describe"] = bridge.describe(b)
out["maps"] = maps()
print(json.dumps(out))
""",
        tiny_moe("Q4_0"),
    )
    assert got["completion"] and got["state"] and got["embeddings"]
    assert got["sampled"][0] == got["sampled"][1] and got["chat"][0] == got["chat"][1]
    assert got["stats"]["n_hits"] > 0 and got["stats"]["n_misses"] > 0 and got["stats"]["n_fallback_tensors"] == 0
    assert got["describe"].startswith("streaming ")
    assert all(line.startswith(str(host.folder)) for line in got["maps"]), "one libllama, and it is the host's"


def test_models_come_and_go_two_at_once_and_the_functions_are_given_back(host: Any, tiny_moe: Any) -> None:
    got = host(
        """
low = llama_cpp.llama_cpp
originals = {name: getattr(low, name) for name in ("llama_model_load_from_file", "llama_decode", "llama_free")}
want = complete(resident(logits_all=True))
out = {"same": []}
for round in range(2):
    one, two = streamed("min", logits_all=True), streamed("60%", logits_all=True)
    out["same"] += [complete(one) == want, complete(two) == want, complete(one) == want]
    try:
        bridge.uninstall()
    except moestream.BusyError as error:
        out["busy"] = str(error)
    del one
    gc.collect()
    out["same"].append(complete(two, n=12) == want)
    del two
    gc.collect()
bridge.uninstall()
out["back"] = all(getattr(low, name) is function for name, function in originals.items())
out["back"] = out["back"] and llama_cpp.llama_decode is originals["llama_decode"] and not bridge.is_installed()
plain = llama_cpp.Llama(model_path=path, **OPTIONS)
out["plain"] = len(complete(plain)[0]) > 0
print(json.dumps(out))
""",
        tiny_moe("Q8_0"),
    )
    assert all(got["same"]) and len(got["same"]) == 8
    assert got["back"] and got["plain"] and "2 model(s)" in got["busy"]


def test_split_files_stream_too(host: Any, request: pytest.FixtureRequest) -> None:
    got = host(
        """
print(json.dumps(complete(resident(logits_all=True)) == complete(streamed("min", logits_all=True))))
""",
        request.getfixturevalue("four_shards"),
    )
    assert got is True


def test_ggml_calls_native_code_and_the_load_reads_no_expert(host: Any, tiny_moe: Any) -> None:
    got = host(
        """
low = llama_cpp.llama_cpp
seen = {}
bridge.install()
real = bridge._installed.real["llama_init_from_model"]
def spy(model, params):
    seen.update(eval=ctypes.cast(params.cb_eval, ctypes.c_void_p).value, offload=params.op_offload,
                abort=ctypes.cast(params.abort_callback, ctypes.c_void_p).value)
    return real(model, params)
bridge._installed.real["llama_init_from_model"] = spy
count = lambda: int(open("/proc/self/io").read().split("rchar: ")[1].split()[0])
before = count()
llm = streamed()
read = count() - before
plan = bridge.plan(llm)
address = lambda f: int(moestream.ffi.cast("uintptr_t", f()))
lib = moestream.lib
print(json.dumps({
    "native": (seen["eval"], seen["abort"])
    == (address(lib.moestream_eval_callback), address(lib.moestream_abort_callback)),
    "offload": seen["offload"], "read": read, "experts": plan.expert_bytes, "dense": plan.dense_bytes,
    "features": bridge.features(),
}))
""",
        tiny_moe("F32", n_expert=32),
    )
    assert got["native"] and got["offload"] is False
    assert got["features"]["load_from_file_ptr"] and got["features"]["load_policy"] is not host.is_foreign
    # headers, dense weights twice, and what a buffered FILE reads beyond them at each seek
    assert got["read"] < got["experts"] / 5


def test_placement_without_streaming(host: Any, tiny_moe: Any) -> None:
    got = host(
        """
want = complete(resident(logits_all=True))
out = {}
for name, options in {"cpu_moe": dict(cpu_moe=True), "n_cpu_moe": dict(n_cpu_moe=2),
                      "overrides": dict(overrides=r"blk\\.3\\..*_exps=CPU")}.items():
    llm = bridge.load(path, use_extra_bufts=False, **options, **OPTIONS, logits_all=True)
    out[name] = [complete(llm) == want, sum(t.place == "CPU" for t in bridge.plan(llm).tensors)]
    del llm
for name, options in {"strict": dict(overrides=[("nothing_like_it", "CPU")], strict=True),
                      "unknown": dict(overrides=[("exps", "NOWHERE")])}.items():
    try:
        bridge.load(path, **options, **OPTIONS)
    except ValueError as error:
        out[name] = str(error)
print(json.dumps(out))
""",
        tiny_moe("Q8_0"),
    )
    assert got["cpu_moe"] == [True, 12] and got["n_cpu_moe"] == [True, 6] and got["overrides"] == [True, 3]
    assert "nothing_like_it" in got["strict"] and "NOWHERE" in got["unknown"]


def test_what_cannot_stream_is_refused_and_leaves_nothing(
    host: Any, tiny_moe: Any, request: pytest.FixtureRequest
) -> None:
    got = host(
        """
dense = sys.argv[1]
out = {}
def attempt(name, **options):
    try:
        streamed(**options)
    except Exception as error:
        out[name] = [type(error).__name__, str(error)]
attempt("mlock", use_mlock=True)
attempt("cache", cache="1")
path = path + ".missing"
attempt("missing")
gc.collect()
bridge.uninstall()
print(json.dumps(out))
""",
        tiny_moe("Q8_0"),
    )
    assert got["mlock"][0] == "InvalidError" and "use_mlock" in got["mlock"][1]
    assert got["cache"][0] == "OutOfMemoryError" and "at least" in got["cache"][1]
    assert got["missing"][0] == "ValueError"
    dense = host(
        """
try:
    streamed()
except moestream.UnsupportedError as error:
    print(json.dumps(str(error)))
""",
        request.getfixturevalue("dense_model"),
    )
    assert "no routed experts" in dense


def test_nonsense_is_named_and_leaves_nothing(host: Any, tiny_moe: Any) -> None:
    got = host(
        """
out = {}
def attempt(name, **options):
    try:
        bridge.load(path, **{**OPTIONS, **options})
        out[name] = ["no error", ""]
    except Exception as error:
        out[name] = [type(error).__name__, str(error)]
attempt("typo", n_cpu_mo=3)
attempt("stream", stream="8GiB")
attempt("blocks", cpu_moe_layers=3)
attempt("no such block", expert_layers={"CPU": [99]}, stream=True)
attempt("overrides", overrides=5)
attempt("places", expert_layers=7)
gc.collect()
bridge.install()
bridge.install()
bridge.uninstall()
bridge.uninstall()
for name, what in {"none": None, "text": "x"}.items():
    try:
        bridge.stats(what)
    except ValueError as error:
        out[name] = [type(error).__name__, str(error)]
print(json.dumps(out))
""",
        tiny_moe("Q8_0"),
    )
    wanted = {
        "typo": ("TypeError", "n_cpu_mo; did you mean n_cpu_moe?"),
        "stream": ("TypeError", "stream was '8GiB'"),
        "blocks": ("ValueError", "cpu_moe_layers was 3"),
        "no such block": ("InvalidError", "expert_layers names block 99"),
        "overrides": ("ValueError", "overrides was 5"),
        "places": ("ValueError", "expert_layers was 7"),
        "none": ("ValueError", "not loaded inside loading"),
        "text": ("ValueError", "not loaded inside loading"),
    }
    assert set(got) == set(wanted)
    for name, (kind, words) in wanted.items():
        assert got[name][0] == kind and words in got[name][1], (name, got[name])


def test_a_warning_is_seen_though_llama_cpp_is_silent_while_it_loads(host: Any, tiny_moe: Any) -> None:
    _, done = host(
        """
import logging
logging.basicConfig(format="%(name)s: %(message)s")
with bridge.loading(overrides=[("nothing_like_it", "CPU")]):
    llama_cpp.Llama(model_path=path, **OPTIONS)
print("1")
""",
        tiny_moe("Q8_0"),
        check=False,
    )
    assert done.returncode == 0 and "moestream: " in done.stderr and "nothing_like_it" in done.stderr, done.stderr


def test_a_read_that_fails_raises_and_names_the_file(host: Any, tiny_moe: Any, tmp_path: pathlib.Path) -> None:
    model = tmp_path / "cut.gguf"
    model.write_bytes(tiny_moe("F32").read_bytes())
    got = host(
        """
llm = streamed(stream=Stream(cache="min", direct="off", io="pread", prefetch="off"))
first = complete(llm, n=2)[0]
import os
whole, was = open(path, "rb").read(), os.stat(path)
open(path, "r+b").truncate(len(whole) // 4)
try:
    complete(llm, prompt="something else entirely", n=20)
    out = ["nothing", ""]
except moestream.ReadError as error:
    out = [type(error).__name__, str(error)]
open(path, "r+b").write(whole)
os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))  # nothing was written, as far as one can see
llm.reset()
print(json.dumps([*out, first == complete(llm, n=2)[0]]))
""",
        model,
    )
    assert got[0] in ("TruncatedError", "ReadError") and "cut.gguf" in got[1]
    assert got[2], "right again once the file is as it was"


def test_structs_that_do_not_fit_the_library_are_refused_before_anything_is_called(host: Any, tiny_moe: Any) -> None:
    got = host(
        """
low = llama_cpp.llama_cpp
class OlderModel(ctypes.Structure):
    _fields_ = [f for f in low.llama_model_params._fields_ if f[0] != "lazy_mode"]
class OlderContext(ctypes.Structure):
    _fields_ = [f for f in low.llama_context_params._fields_ if f[0] != "n_rs_seq"]
called = []
out = []
for name, cls in (("llama_model_params", OlderModel), ("llama_context_params", OlderContext)):
    kept = getattr(low, name)
    setattr(low, name, cls)
    real = low.llama_model_load_from_file
    low.llama_model_load_from_file = lambda *a: called.append(a)
    try:
        streamed()
    except moestream.UnsupportedError as error:
        out.append(str(error))
    setattr(low, name, kept)
    low.llama_model_load_from_file = real
print(json.dumps([out, len(called), len(complete(streamed())[0]) > 0]))
""",
        tiny_moe("Q8_0"),
    )
    (model, context), calls, after = got
    assert "llama_model_params." in model and "libllama.so" in model and llama_version() in model
    assert "llama_context_params." in context and calls == 0 and after


def test_a_release_that_loads_by_another_name_is_refused(host: Any, tiny_moe: Any) -> None:
    got = host(
        """
internals = sys.modules["llama_cpp._internals"]
kept = internals.LlamaModel.__init__
def older(self, *, path_model, params, verbose=True):
    self.model = llama_cpp.llama_load_model_from_file(path_model.encode(), params)
internals.LlamaModel.__init__ = older
try:
    streamed()
except moestream.UnsupportedError as error:
    out = str(error)
internals.LlamaModel.__init__ = kept
print(json.dumps([out, bridge.is_installed(), len(complete(streamed())[0]) > 0]))
""",
        tiny_moe("Q8_0"),
    )
    assert "llama_model_load_from_file" in got[0] and "0.3.16" in got[0] and got[1:] == [False, True]


def llama_version() -> str:
    """The release of llama-cpp-python that is tested."""
    return foreign_llama.package().name.rsplit("-", 1)[1]


def test_a_callback_of_the_caller_is_still_called(host: Any, tiny_moe: Any) -> None:
    got = host(
        """
low = llama_cpp.llama_cpp
with bridge.loading(stream=True):
    mp = low.llama_model_default_params()
    model = low.llama_model_load_from_file(path.encode(), mp)
names = []
@low.ggml_backend_sched_eval_callback
def watch(tensor, ask, user):
    names.append(ask)
    return False
cp = low.llama_context_default_params()
cp.cb_eval = watch
ctx = low.llama_init_from_model(model, cp)
tokens = (ctypes.c_int32 * 3)(1, 2, 3)
code = low.llama_decode(ctx, low.llama_batch_get_one(tokens, 3))
ops = bridge.stats(model)["n_ops"]
low.llama_free(ctx); low.llama_model_free(model)
bridge.uninstall()
print(json.dumps([code, ops, len(names)]))
""",
        tiny_moe("Q8_0"),
    )
    assert got[0] == 0 and got[1] == 12 and got[2] > 12


def test_a_program_that_just_ends_ends_quietly(host: Any, tiny_moe: Any) -> None:
    _, done = host(
        """
llm = streamed()
complete(llm, n=2)
print("1")
""",
        tiny_moe("Q8_0"),
        check=False,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Error" not in done.stderr, done.stderr
