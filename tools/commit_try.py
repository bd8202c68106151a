#!/usr/bin/env python3
"""What tools/commit_matrix.py runs for each release, in a process of its own: the real llama_cpp.Llama, streamed.

    PYTHONPATH=SDIST LLAMA_CPP_LIB_PATH=LIBRARIES python tools/commit_try.py MODEL.gguf SMALL_F16.gguf SPLIT.gguf

Prints one line of JSON: what each check found, what the library offers, and the hash of the logits that the examples
print for the small model, here of the resident one. It streams through moestream.integrations.llama_cpp_python only,
builds nothing, and knows nothing of releases.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import llama_cpp

import moestream
from moestream.integrations import llama_cpp_python as bridge

THREADS = {"n_threads": 1, "n_threads_batch": 1}
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 32, **THREADS, "verbose": False, "seed": 1}
PROMPTS = ("The capital of France is", " ".join(["one two three"] * 8))
FNV_START, FNV_PRIME = 14695981039346656037, 1099511628211


def completion(llm: Any, prompt: str = PROMPTS[0], n: int = 12) -> str:
    """The text that follows a prompt, chosen greedily."""
    return str(llm.create_completion(prompt, max_tokens=n, temperature=0)["choices"][0]["text"])


def texts(llm: Any) -> list[Any]:
    """Two completions with every logit of prompt and answer, and the answer in a chat."""
    out: list[Any] = []
    for prompt in PROMPTS:
        out += [completion(llm, prompt), llm.scores[: llm.n_tokens].tobytes()]
    chat = llm.create_chat_completion([{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0)
    return [*out, chat["choices"][0]["message"]["content"]]


def example_hash(path: str) -> str:
    """The last line of the programs in examples/, from a resident model: FNV-1a over the logits of eight steps."""
    options = {**OPTIONS, "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512}
    llm = llama_cpp.Llama(model_path=path, logits_all=True, **options)
    tokens, value = [1, 2, 3, 4, 5, 6, 7, 8], FNV_START
    for _ in range(8):
        llm.eval(tokens)
        logits = llm.scores[llm.n_tokens - 1]
        tokens = [int(logits.argmax())]
        for byte in logits.tobytes():
            value = (value ^ byte) * FNV_PRIME % 2**64
    return f"logits {value:016x}"


def main() -> None:
    """The checks, in the order in which a user would do these things."""
    path, small, split = sys.argv[1:4]
    checks: dict[str, bool] = {}
    reference = example_hash(small)
    untouched = llama_cpp.Llama(model_path=path, **OPTIONS)  # as it is without us: it repacks some weights
    plain = [completion(untouched, prompt) for prompt in PROMPTS]
    del untouched
    gc.collect()

    def resident(**more: Any) -> Any:
        return bridge.load(path, use_extra_bufts=False, **OPTIONS, **more)

    def streamed(cache: str = "30%", **more: Any) -> Any:
        return bridge.load(path, stream=moestream.Stream(cache=cache), **OPTIONS, **more)

    llm = resident(logits_all=True)
    want = texts(llm)
    del llm
    llm = resident(embedding=True)
    vectors = llm.embed("hello world")
    del llm
    for time in ("once", "twice"):  # loaded, used and dropped, two times in one process
        llm = streamed(logits_all=True)
        got = texts(llm)
        stats = bridge.stats(llm)
        checks[f"logits, {time}"] = got == want
        checks[f"text as without us, {time}"] = got[0:4:2] == plain
        checks[f"hits and reads, {time}"] = stats["n_hits"] > 0 and stats["n_reads"] > 0
        del llm
        gc.collect()
        bridge.uninstall()  # raises while a model is open
        checks[f"gone after del, {time}"] = not bridge.is_installed()
    llm, other = streamed(embedding=True), streamed("60%", logits_all=True)
    checks["embeddings"] = llm.embed("hello world") == vectors
    checks["two models at once"] = completion(other) == want[0]
    checks["embeddings beside another model"] = llm.embed("hello world") == vectors
    del llm, other
    llm = bridge.load(split, use_extra_bufts=False, logits_all=True, **OPTIONS)
    want = texts(llm)
    ways: dict[str, dict[str, Any]] = {
        "split files": {"stream": moestream.Stream(cache="min")},
        "cpu_moe": {"cpu_moe": True, "use_extra_bufts": False},
        "n_cpu_moe and overrides, streamed": {"n_cpu_moe": 1, "overrides": r"blk\.2\..*_exps=CPU", "stream": True},
    }
    for name, how in ways.items():
        llm = bridge.load(split, logits_all=True, **how, **OPTIONS)
        checks[name] = texts(llm) == want
        if "n_cpu_moe" in how:
            places = {tensor.layer: tensor.place for tensor in bridge.plan(llm).tensors if tensor.is_expert}
            checks["places"] = places == {0: "CPU", 1: "STREAM", 2: "CPU", 3: "STREAM"}
    features = bridge.features()
    del llm
    gc.collect()
    bridge.uninstall()
    print(json.dumps({"checks": checks, "features": features, "example": reference, "text": plain[0]}))


if __name__ == "__main__":
    main()
