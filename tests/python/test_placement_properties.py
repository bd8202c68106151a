"""Properties of placement: random rule lists against a short reference in Python, random strings to the parser.

The reference uses `re` on the model's tensor names, so patterns are drawn from what ECMAScript and `re` read alike.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import models

import moestream as ms
from moestream.placement import parse_overrides

MODELS = ("leading_dense", "fused_gate_up", "gpt_oss_like", "shared_experts", "four_shards")
ROUTED = r"ffn_(up|down|gate|gate_up)_(ch|)exps"
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


# ---- the reference -----------------------------------------------------------------------------------------


def reference(
    names: list[str], rules: list[tuple[str, str]], n_cpu_moe: int, layers: list[int], cpu_moe: bool, stream: bool
) -> dict[str, str] | None:
    """Where each tensor goes; None where the list is refused (STREAM for what cannot be streamed)."""
    chain = [(re.compile(pattern).search, place) for pattern, place in rules]
    if cpu_moe:
        chain.append((re.compile(rf"\.{ROUTED}").search, "CPU"))
    else:
        blocks = {*range(min(n_cpu_moe, 1000)), *layers}
        chain += [(re.compile(rf"^blk\.{block}\.{ROUTED}").search, "CPU") for block in sorted(blocks)]
    if stream:
        chain.append((re.compile(rf"^blk\.\d+\.{ROUTED}\.weight$").search, "STREAM"))
        chain.append((re.compile(".").search, "CPU_ANON"))
    placed = {}
    for name in names:
        placed[name] = next((place for search, place in chain if search(name)), "DEFAULT")
        if placed[name] == "STREAM" and not re.search(rf"^blk\.\d+\.{ROUTED}\.weight$", name):
            return None
    return placed


# ---- strategies --------------------------------------------------------------------------------------------

ATOMS = st.sampled_from(
    [
        *("blk", "ffn", "exps", "shexp", "attn", "norm", "weight", "bias", "up", "down", "gate", "gate_up", "inp"),
        *(r"\.", ".", "_", r"\d", r"\w", r"[0-3]", "[a-z]", "[^_]", "(up|down)", "(?:gate|up)", "(ch|)", "0", "1", "2"),
        *(".*", r"\d+", "[a-z_]+", r"(?=exps)", r"(?!bias)", "(?=.*exps)", "(?!.*norm)", r"\b", "x{0,2}", r"\d{1,2}"),
    ]
)
PATTERNS = st.builds(
    lambda start, atoms, end: start + "".join(atoms) + end,
    st.sampled_from(["", "^", r"^blk\."]),
    st.lists(ATOMS, min_size=1, max_size=6),
    st.sampled_from(["", "$", r"\.weight$", "|exps"]),
)


@QUICK
@given(
    model=st.sampled_from(MODELS),
    rules=st.lists(st.tuples(PATTERNS, st.sampled_from(["CPU", "DEFAULT", "STREAM"])), max_size=6),
    n_cpu_moe=st.integers(0, 6) | st.just(10**9),
    layers=st.lists(st.integers(0, 3), max_size=3),
    cpu_moe=st.booleans(),
    stream=st.booleans(),
)
def test_any_rule_list_places_every_tensor_as_the_reference_does(
    model: str, rules: list[tuple[str, str]], n_cpu_moe: int, layers: list[int], cpu_moe: bool, stream: bool
) -> None:
    if not stream:
        rules = [(pattern, "CPU" if place == "STREAM" else place) for pattern, place in rules]
    options = {"overrides": rules, "n_cpu_moe": n_cpu_moe, "cpu_moe_layers": layers, "cpu_moe": cpu_moe}
    names = [tensor.name for tensor in ms.plan(models.named(model)).tensors]
    wanted = reference(names, rules, n_cpu_moe, layers, cpu_moe, stream)
    if wanted is None:
        with pytest.raises(ms.InvalidError, match="only the weights of routed experts can be streamed"):
            ms.plan(models.named(model), stream=stream, **options)  # type: ignore[arg-type]
        return
    made = ms.plan(models.named(model), stream=stream, **options)  # type: ignore[arg-type]
    assert {tensor.name: tensor.place for tensor in made.tensors} == wanted
    for i, rule in enumerate(made.rules):
        won = [tensor for tensor in made.tensors if tensor.rule == i]
        assert (rule.n_matched, rule.bytes) == (len(won), sum(tensor.bytes for tensor in won))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rules=st.lists(st.tuples(PATTERNS, st.sampled_from(["CPU", "DEFAULT", "STREAM"])), max_size=4), stream=st.booleans()
)
def test_what_llama_cpp_does_with_the_list_is_what_was_planned(rules: list[tuple[str, str]], stream: bool) -> None:
    """The list as llama.cpp gets it, DEFAULT rules folded in, by the buffers of the loaded model."""
    rules = [(pattern, "CPU" if place == "STREAM" else place) for pattern, place in rules]
    try:
        with ms.Model(models.tiny(), overrides=rules, stream=ms.Stream(cache="min") if stream else None) as model:
            placed = model.placement()
    except ms.UnsupportedError as error:
        assert "nothing of" in str(error)  # every expert was placed elsewhere
        return
    assert placed.misplaced == ()
    assert sum(placed.bytes_by_buffer_type.values()) == model.plan.expert_bytes + model.plan.dense_bytes
    if stream:
        by_default = [tensor for tensor in placed.tensors if tensor.place in ("DEFAULT", "CPU")]
        assert all(str(tensor.buffer_type).startswith("CPU") for tensor in by_default), "DEFAULT was not kept"


# ---- random strings ----------------------------------------------------------------------------------------

RULE_TEXT = st.text(alphabet=r"abk.019()[]{}|?*+^$\=,:<>!-_ CPUST" + "é\n", max_size=40)


@QUICK
@given(text=RULE_TEXT | st.text(max_size=30))
@example(text="=")
@example(text="((((=CPU")
@example(text="a\\=CPU")
@example(text="[[:alpha:]]+=CPU,[[.a.]]=CPU,[[=a=]]=CPU,[z-a]=CPU")
@example(text="é{1,}=CPU")
@example(text="\ud800=CPU")
def test_any_text_is_a_plan_or_a_value_error(text: str) -> None:
    """The parser, and the engine behind it."""
    try:
        rules = parse_overrides(text)
    except ValueError:
        return
    assert all(pattern and place for pattern, place in rules)
    try:
        made = ms.plan(models.tiny(), overrides=text)
    except ValueError as error:
        assert str(error)
        return
    assert [(rule.pattern, rule.place) for rule in made.rules] == rules


@QUICK
@given(rules=st.lists(st.tuples(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=12)), max_size=4))
def test_any_pairs_are_a_plan_or_a_value_error(rules: list[tuple[str, str]]) -> None:
    try:
        made = ms.plan(models.tiny(), overrides=rules)
    except ValueError as error:
        assert str(error)
        return
    assert [rule.pattern for rule in made.rules] == [pattern for pattern, _ in rules]


@QUICK
@given(rules=st.lists(st.tuples(PATTERNS, st.sampled_from(["CPU", "DEFAULT", "RPC0[127.0.0.1:50152]"])), max_size=5))
def test_the_string_form_gives_back_the_pairs(rules: list[tuple[str, str]]) -> None:
    text = ", ".join(f"{pattern}={place}" for pattern, place in rules)
    assert parse_overrides(text) == rules
