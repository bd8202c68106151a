"""What a newcomer passes to the Python API: a bad value is an error that names it, and never ends the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import models

import moestream as ms

IDS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def model() -> Iterator[ms.Model]:
    with ms.Model(models.tiny()) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def context(model: ms.Model) -> Iterator[ms.Context]:
    """Two sequences in one buffer."""
    with model.context(64, n_threads=1, n_seq_max=2, kv_unified=True) as made:
        yield made


# ---- sequences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq", [-1, 2, 300, "a", None, 1.0, True])
def test_a_sequence_that_there_is_not_is_a_value_error(context: ms.Context, seq: Any) -> None:
    context.clear()
    context.decode(IDS)
    for call in (
        lambda: context.n_past(seq),
        lambda: context.seq_rm(seq),
        lambda: context.seq_cp(seq, 0),
        lambda: context.seq_cp(0, seq),
        lambda: context.seq_add(seq, 0, 1, 1),
        lambda: context.decode(IDS, seq_id=seq),
        lambda: context.generate("a", 2, seq_id=seq),
        lambda: context.generate(IDS, 2, seq_id=seq),
    ):
        with pytest.raises(ValueError, match=r"(seq_id|source|target) was .* from 0 to 1"):
            call()
    assert context.n_past() == 4


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda c: c.seq_rm(0, "a"), "p0"),
        (lambda c: c.seq_rm(0, 0, 2**31), "p1"),
        (lambda c: c.seq_cp(0, 1, -2), "p0"),
        (lambda c: c.seq_add(0, 0, 1, None), "delta"),
        (lambda c: c.decode(IDS, pos="0"), "pos"),
        (lambda c: c.decode(IDS, pos=5), "pos"),
        (lambda c: c.decode([[1], [1, 2]]), "tokens"),
    ],
)
def test_a_position_that_makes_no_sense_is_named(context: ms.Context, call: Any, name: str) -> None:
    context.clear()
    context.decode(IDS)
    with pytest.raises(ValueError, match=f"{name} w"):
        call(context)
    assert context.n_past() == 4


def test_a_part_of_a_sequence_is_copied_or_refused(model: ms.Model, context: ms.Context) -> None:
    context.clear()
    context.decode(IDS)
    context.seq_cp(0, 1, 0, 2)
    assert context.n_past(1) == 2
    for options in ({"kv_unified": False}, {}):
        with model.context(64, n_threads=1, n_seq_max=2, **options) as own:
            own.decode(IDS)
            for p0, p1 in ((1, 2), (0, 2), (2, -1), (0, 0)):
                with pytest.raises(ms.UnsupportedError, match="kv_unified"):
                    own.seq_cp(0, 1, p0, p1)
            assert own.n_past(1) == 0
            own.seq_cp(0, 1, 0, 4)
            assert own.n_past(1) == 4
            assert own.decode([5], seq_id=1).tobytes() == own.decode([5], seq_id=0).tobytes()


# ---- options of a context and of a model ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["i8", "i16", "i32", "f64", "q8_1", "count", "q4_K", "", 5])
def test_a_kv_type_that_llama_cpp_cannot_compute_with_is_refused(model: ms.Model, kind: Any) -> None:
    for name in ("type_k", "type_v"):
        with pytest.raises(ValueError, match=f"{name} was .* one of f32, f16"):
            model.context(64, n_threads=1, **{name: kind})


def test_the_kv_types_that_are_allowed_compute(model: ms.Model) -> None:
    for kind in ("F32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"):
        with model.context(64, n_threads=1, type_k=kind) as own:
            assert np.isfinite(own.decode(IDS)).all(), kind


def test_a_vocabulary_has_no_context() -> None:
    with ms.Model(models.tiny(), vocab_only=True) as words:
        assert words.tokenize("a")
        with pytest.raises(ms.UnsupportedError, match="vocab_only"):
            words.context(64)


@pytest.mark.parametrize(
    "options",
    [
        *({name: "x"} for name in ("embeddings", "kv_unified", "offload_kqv", "threadpool", "flash_attn")),
        {"embeddings": None},
        {"threadpool": 1},
        {"pooling": 5},
        {"n_ubatch": 0},
        {"n_ctx": -1},
        *(
            {"eval_callback": pair}
            for pair in (5, "ab", (1,), (1, 2, 3), (None, None), ("a", 1), (-1, 1), (1, 1.5), (0, 0))
        ),
    ],
)
def test_an_option_of_a_context_is_named(model: ms.Model, options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(options))} was"):
        model.context(**{"n_ctx": 64, "n_threads": 1, **options})


@pytest.mark.parametrize(
    "options",
    [
        *({name: "yes"} for name in ("strict", "cpu_moe", "progress", "vocab_only", "use_extra_bufts")),
        {"load_mode": ["mmap"]},
        {"main_gpu": 99999999999},
        {"main_gpu": "0"},
        {"devices": "CPU"},
        {"devices": [5]},
        {"tensor_split": "3,1"},
        {"tensor_split": ["3"]},
        {"tensor_split": [float("nan")]},
        {"tensor_split": 1},
        {"kv_overrides": [("a", 1)]},
        {"kv_overrides": {5: 1}},
        {"kv_overrides": {"a": 2**63}},
    ],
)
def test_an_option_of_a_model_is_named(options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(options))}"):
        ms.Model(models.tiny(), **options)


@pytest.mark.parametrize(
    "options",
    [
        *({"replay": ids} for ids in ([[[0]]], 5, np.zeros((1, 4, 2)), np.zeros((1, 4, 2), bool), "a")),
        {"replay": np.zeros((1, 4, 2), object)},
        {"replay": np.int32(5)},
        {"replay": np.zeros((4, 2), np.int32)},
        {"replay_recall": "1"},
        {"replay_recall": True},
        {"replay_recall": 0.5},
        {"io": []},
        {"dense": {}},
    ],
)
def test_an_option_of_streaming_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))} "):
        ms.Stream(**options)


def test_a_wrong_number_in_a_replay_is_named_with_its_place() -> None:
    ids = np.zeros((3, 4, 2), np.int32)
    ids[2, 1, 0] = 8
    with pytest.raises(ms.InvalidError, match=r"expert 8 at \[2, 1, 0\]; there are 8"):
        ms.Model(models.tiny(), stream=ms.Stream(cache="min", replay=ids))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda m, c: m.tokenize(5), "text was 5"),
        (lambda m, c: m.tokenize("a\udcff"), "text is no Unicode text"),
        (lambda m, c: m.detokenize("12"), "tokens was '12'"),
        (lambda m, c: m.detokenize([1.5]), r"token was 1\.5"),
        (lambda m, c: m.detokenize(np.array([1.5])), "token was"),
        (lambda m, c: m.token_to_piece("1"), "token was '1'"),
        (lambda m, c: m.is_eog(-1), "token -1 is not"),
        (lambda m, c: m.is_eog(2**40), "is not in the vocabulary"),
        (lambda m, c: m.apply_chat_template("x"), "messages was 'x'"),
        (lambda m, c: m.apply_chat_template(["x"]), "a message was 'x'"),
        (lambda m, c: m.apply_chat_template([], template=5), "template was 5"),
        (lambda m, c: c.generate("a", 2, stop=5), "stop was 5"),
        (lambda m, c: c.generate("a", 2, stop=[5]), r"stop was \[5\]"),
        (lambda m, c: c.generate("a", 2, ignore_eog="x"), "ignore_eog was 'x'"),
        (lambda m, c: c.generate("a", 2.0), r"max_tokens was 2\.0"),
        (lambda m, c: c.state_set("abc"), "state was 'abc'"),
        (lambda m, c: c.state_set(None), "state was None"),
        (lambda m, c: c.state_set(b"abc"), "state was not taken"),
    ],
)
def test_an_argument_of_a_call_is_named(model: ms.Model, context: ms.Context, call: Any, name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        call(model, context)


def test_a_state_may_be_any_bytes_and_a_token_any_integer(model: ms.Model, context: ms.Context) -> None:
    context.clear()
    context.decode(IDS)
    state = context.state_get()
    for same in (bytearray(state), memoryview(state), np.frombuffer(state, np.uint8)):
        context.clear()
        context.state_set(same)  # type: ignore[arg-type]
        assert context.n_past() == 4
    assert model.detokenize(np.array(IDS)) == model.detokenize(IDS)  # type: ignore[arg-type]
