"""Models that do other work than writing one text: encoders, and draft contexts for multi-token prediction.

Of llama.cpp's architectures nomic-bert-moe is the one encoder with experts; no encoder-decoder has any (T5 is dense),
so there is none to test.
"""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest
from support import archs, models, record
from support import compare as c
from support.compare import Row

import moestream as ms
from moestream import _native_api as native

VARIANTS = [c.Variant("min", "io_uring"), c.Variant("min", "pread", "off"), c.Variant(0.5)]
PACKAGE = pathlib.Path(ms.__file__).resolve().parent


def embeddings_of_a_batch(context: ms.Context, *, encode: bool) -> list[c.Array]:
    """Three texts of different lengths in one batch: one vector for each, pooled by llama.cpp."""
    lengths = (9, 1, 40)
    rows = [
        Row(token, pos, (seq,))
        for seq, n in enumerate(lengths)
        for pos, token in enumerate(c.tokens(n, context.model.n_vocab, seed=seq + 1))
    ]
    assert c.decode_rows(context, rows, encode=encode) == 0
    handle, n_embd = context._handles.context, context.model.n_embd
    return [c.floats(native.lib.llama_get_embeddings_seq(handle, seq), (n_embd,)) for seq in range(len(lengths))]


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_an_encoder_of_experts(pooling: str) -> None:
    def work(context: ms.Context) -> list[c.Array]:
        single = [context.embed(c.tokens(n, context.model.n_vocab)) for n in (1, 8, 64)]
        return [*single, *(v for e in (True, False) for v in embeddings_of_a_batch(context, encode=e))]

    options = (("embeddings", True), ("pooling", pooling), ("n_seq_max", 4), ("kv_unified", True))
    tally = c.Tally()
    with c.reference(archs.encoder_path()) as ref:
        settings = [c.Setting(n_threads, 64, 64, options=options) for n_threads in (1, 2)]
        c.compare(ref, "texts", work, settings, VARIANTS, tally)
    assert tally.evictions > 0
    assert tally.fallbacks == 0
    record.write("use", f"encoder (nomic-bert-moe), pooling {pooling}", True, "")


def test_a_draft_context_for_multi_token_prediction(tmp_path: pathlib.Path) -> None:
    """A target and an MTP context on one model decode in turn, as in speculative decoding: the same logits of both."""
    program = tmp_path / "nextn"
    source = models.REPO / "tests" / "support" / "nextn.c"
    flags = [f"-I{PACKAGE / 'include'}", f"-I{PACKAGE / 'include' / 'llama.cpp'}", f"-L{PACKAGE / '_lib'}"]
    libraries = ["-lmoestream", "-lllama", "-lm", f"-Wl,-rpath,{PACKAGE / '_lib'}"]
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-std=c11", source, *flags, *libraries, "-o", program], check=True)
    path = archs.nextn_path()

    def lines(*how: str) -> list[str]:
        done = subprocess.run([program, path, *how], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    resident, streamed = lines(), lines("stream")
    assert [line.split()[0] for line in resident] == ["target", "draft"]
    assert streamed[:2] == resident
    words = streamed[2].split()
    assert words[0] == "misses" and int(words[1]) > 0
    assert words[2] == "evictions" and int(words[3]) > 0
    record.write("use", "target and MTP draft context in turn (qwen35moe with a NextN layer)", True, "")
