"""Placement: CASES P2 to P16 that need one device only. The plan comes from the header; what happened comes from the
tensors' buffers, and the two are held against each other."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import pytest
from support import archs, models, rpc

import moestream as ms
from moestream import load_modes

EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")


def cpu_tensors(made: ms.Plan) -> list[str]:
    return [tensor.name for tensor in made.tensors if tensor.place == "CPU"]


def upstream_n_cpu_moe(made: ms.Plan, n: int) -> list[str]:
    """What upstream's --n-cpu-moe N puts on the CPU: one rule per block, searched in the name."""
    rules = [re.compile(rf"blk\.{i}\.ffn_(up|down|gate|gate_up)_(ch|)exps") for i in range(n)]
    return [tensor.name for tensor in made.tensors if any(rule.search(tensor.name) for rule in rules)]


# ---- P2, P3, P4: what a rule misses ------------------------------------------------------------------------


def test_p2_cpu_moe_takes_fused_tensors() -> None:
    made = ms.plan(models.named("fused_gate_up"), cpu_moe=True)
    assert {t.place for t in made.tensors if t.is_expert} == {"CPU"}
    assert any("gate_up" in name for name in cpu_tensors(made)) and made.warnings == ()


def test_p2_an_old_rule_is_warned_with_the_fused_tensor_it_misses() -> None:
    path = models.named("fused_gate_up")
    made = ms.plan(path, overrides={r"ffn_(up|down|gate)_exps": "CPU"})
    assert any("misses the fused tensor 'blk.1.ffn_gate_up_exps.weight'" in w for w in made.warnings), made.warnings
    both = ms.plan(path, overrides=[("gate_up_exps", "CPU"), (r"ffn_(up|down|gate)_exps", "CPU")])
    assert both.warnings == (), "another rule takes it to the same place"


def test_p3_a_rule_without_a_match_is_named_and_strict_raises_before_weights_are_read() -> None:
    path = models.tiny()
    made = ms.plan(path, overrides=[("ffn_typo_exps", "CPU")])
    assert any("'ffn_typo_exps'" in warning and "matches no tensor" in warning for warning in made.warnings)
    with pytest.raises(ms.InvalidError, match="ffn_typo_exps"):
        ms.plan(path, overrides=[("ffn_typo_exps", "CPU")], strict=True)
    before = own_reads()
    with pytest.raises(ms.InvalidError, match="ffn_typo_exps"):
        ms.Model(path, overrides=[("ffn_typo_exps", "CPU")], strict=True)
    assert own_reads() - before < made.expert_bytes // 4


@pytest.mark.parametrize("options", [{"cpu_moe": True}, {"n_cpu_moe": 2}])
def test_p3_a_dense_model_says_that_it_has_no_experts(options: dict[str, object]) -> None:
    made = ms.plan(models.named("dense_model"), **options)  # type: ignore[arg-type]
    assert any("no routed experts" in warning for warning in made.warnings)
    with ms.Model(models.named("dense_model"), **options) as model:  # type: ignore[arg-type]
        assert {t.place for t in model.placement().tensors} == {"DEFAULT"}


def test_a_rule_that_takes_shared_experts_along_is_warned() -> None:
    made = ms.plan(models.named("shared_experts"), overrides=[("exp", "CPU")])
    assert any("shared experts" in warning and "_shexp" in warning for warning in made.warnings)


@pytest.mark.parametrize("pattern", ["(?i)x", "(?<=x)exps", "(?P<n>x)", "(", "[", "a{2", "*", r"\1("])
def test_p4_a_pattern_that_the_engine_refuses_is_a_value_error_with_its_name(pattern: str) -> None:
    with pytest.raises(ValueError, match=re.escape(pattern)) as caught:
        ms.plan(models.tiny(), overrides=[("exps", "CPU"), (pattern, "CPU")])
    assert "rule 2" in str(caught.value)


def test_a_pattern_that_could_exhaust_the_stack_is_refused() -> None:
    with pytest.raises(ValueError, match="pattern of 200000 bytes"):
        ms.plan(models.tiny(), overrides=[("(" * 100_000 + ")" * 100_000, "CPU")])
    assert ms.plan(models.tiny(), overrides=[("(" * 512 + ")" * 512, "CPU")]).rules[0].n_matched > 0


# ---- P5, P7, P8, P15: n_cpu_moe ----------------------------------------------------------------------------


def test_p5_more_blocks_than_there_are_is_cpu_moe_and_no_slower() -> None:
    path = models.named("wide_48_layers")
    everything = ms.plan(path, cpu_moe=True)
    for n in (48, 999, 10**9, 10**30):
        began = time.perf_counter()
        made = ms.plan(path, n_cpu_moe=n)
        assert time.perf_counter() - began < 0.5, "a rule per block would be noticed here"
        assert made.bytes_by_place == everything.bytes_by_place and len(made.rules) == 1
        assert (made.warnings != ()) == (n > 48), made.warnings


def test_p7_the_users_rules_come_first_in_their_order_then_ours() -> None:
    path = models.tiny()
    rules = [(r"blk\.0\.ffn_up_exps", "DEFAULT"), (r"blk\.0\.ffn_(up|down)_exps", "CPU"), ("nothing", "CPU")]
    made = ms.plan(path, overrides=rules, n_cpu_moe=1, stream=True)
    assert [rule.origin for rule in made.rules] == ["rules", "rules", "rules", "n_cpu_moe", "stream", "dense"]
    assert [(rule.pattern, rule.place) for rule in made.rules[:3]] == rules
    won = {tensor.name: tensor.rule for tensor in made.tensors}
    assert won["blk.0.ffn_up_exps.weight"] == 0 and won["blk.0.ffn_down_exps.weight"] == 1
    assert won["blk.0.ffn_gate_exps.weight"] == 3 and won["blk.1.ffn_up_exps.weight"] == 4
    assert won["token_embd.weight"] == 5


def test_p7_cpu_moe_and_n_cpu_moe_together_are_cpu_moe_with_a_note() -> None:
    made = ms.plan(models.tiny(), cpu_moe=True, n_cpu_moe=1)
    assert len(cpu_tensors(made)) == 12 and [rule.origin for rule in made.rules] == ["cpu_moe"]
    assert any("cpu_moe" in warning and "n_cpu_moe" in warning for warning in made.warnings)


def test_p8_first_blocks_only_and_routed_experts_only() -> None:
    made = ms.plan(models.named("shared_experts"), n_cpu_moe=2)
    names = cpu_tensors(made)
    assert len(names) == 6 and all(EXPERTS.search(name) and name.startswith(("blk.0.", "blk.1.")) for name in names)


def test_p8_leading_dense_blocks_are_said_with_the_first_that_has_experts() -> None:
    path = models.named("leading_dense")
    for n, moved in ((1, 0), (2, 0), (3, 3)):
        made = ms.plan(path, n_cpu_moe=n)
        assert len(cpu_tensors(made)) == moved and made.first_moe_layer == 2
        said = [warning for warning in made.warnings if "first block with routed experts is 2" in warning]
        assert len(said) == (moved == 0), made.warnings


def test_a_block_that_the_model_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match="names block 4, the model has blocks 0 to 3"):
        ms.plan(models.tiny(), cpu_moe_layers=[0, 4])
    with pytest.raises(ValueError, match="names block 9, the model has blocks 0 to 3"):
        ms.plan(models.tiny(), expert_layers={"CPU": [9]})


def test_a_block_in_two_places_is_an_error() -> None:
    with pytest.raises(ValueError, match="block 1 in 'CPU' and in 'DEFAULT'"):
        ms.plan(models.tiny(), expert_layers={"CPU": [0, 1], "DEFAULT": range(1, 3)})


def test_layers_by_place_come_before_n_cpu_moe_and_streaming() -> None:
    made = ms.plan(models.tiny(), expert_layers={"DEFAULT": iter([0])}, cpu_moe_layers=[0, 1], stream=True)
    per_layer = {row.layer: row.experts for row in made.layers}
    assert [set(per_layer[il]) for il in range(4)] == [{"DEFAULT"}, {"CPU"}, {"STREAM"}, {"STREAM"}]


def test_p15_blocks_behind_the_last_layer_count_and_nothing_throws(tmp_path: pathlib.Path) -> None:
    """MTP blocks: tensors of blk.4 and blk.5 in a model whose metadata says four layers."""
    path = tmp_path / "mtp.gguf"
    write_mtp_header(path, n_layer=4, n_mtp=2)
    on_cpu = 0
    for n in range(6 + 2 + 1):
        made = ms.plan(path, n_cpu_moe=n)
        assert cpu_tensors(made) == upstream_n_cpu_moe(made, n)
        assert made.bytes_by_place.get("CPU", 0) >= on_cpu
        on_cpu = made.bytes_by_place.get("CPU", 0)
    assert on_cpu == made.expert_bytes == 6 * 3 * 2 * 32 * 32 * 4


def write_mtp_header(path: pathlib.Path, n_layer: int, n_mtp: int) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "glm4moe")
    writer.add_block_count(n_layer)
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    for il in range(n_layer + n_mtp):
        for part in ("gate", "up", "down"):
            writer.add_tensor(f"blk.{il}.ffn_{part}_exps.weight", np.zeros((2, 32, 32), np.float32))
        writer.add_tensor(f"blk.{il}.attn_norm.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Split and fused tensors, chexps, shared experts, leading dense blocks, MTP blocks, top-1, no experts.
SWEPT = ("qwen3moe", "deepseek2", "deepseek4", "glm4moe", "gpt-oss", "grovemoe", "hunyuan-moe", "hy_v3")
SWEPT += ("llama4", "qwen2moe", "smallthinker", "ernie4_5")


@pytest.mark.parametrize("arch", SWEPT)
def test_n_cpu_moe_is_upstreams_rule_from_0_to_layers_plus_2(arch: str) -> None:
    """No exception, bytes only grow, the same tensors as --n-cpu-moe."""
    path = archs.path(arch)
    made = ms.plan(path)
    blocks = 1 + max(t.layer for t in made.tensors if t.layer is not None)
    on_cpu = 0
    for n in range(max(made.n_layer, blocks) + 3):
        made = ms.plan(path, n_cpu_moe=n)
        assert cpu_tensors(made) == upstream_n_cpu_moe(made, n), n
        now = made.bytes_by_place.get("CPU", 0)
        assert now >= on_cpu, n
        on_cpu = now
    assert cpu_tensors(ms.plan(path, cpu_moe=True)) == cpu_tensors(made)
    assert {t.place for t in made.tensors if t.is_expert} <= {"CPU"}


# ---- P6: the string form -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (r"blk\.\d{1,2}\.ffn_.*_exps=CPU", [(r"blk\.\d{1,2}\.ffn_.*_exps", "CPU")]),
        (r"^blk\.(?=[02]\.).*exps=CPU", [(r"^blk\.(?=[02]\.).*exps", "CPU")]),
        (r" blk\.1\..*exps = CPU , exps=DEFAULT , ", [(r"blk\.1\..*exps", "CPU"), ("exps", "DEFAULT")]),
        ("[,=]x=CPU,a(b,c)=CPU", [("[,=]x", "CPU"), ("a(b,c)", "CPU")]),
        (",", []),
    ],
)
def test_p6_the_string_form(text: str, rules: list[tuple[str, str]]) -> None:
    assert [(r.pattern, r.place) for r in ms.plan(models.tiny(), overrides=text).rules] == rules


def test_p6_string_list_and_dict_mean_the_same() -> None:
    text = r"blk\.\d{1,2}\.ffn_up_exps=CPU,blk\.1\..*=DEFAULT"
    pairs = [(r"blk\.\d{1,2}\.ffn_up_exps", "CPU"), (r"blk\.1\..*", "DEFAULT")]
    plans = [ms.plan(models.tiny(), overrides=form) for form in (text, pairs, dict(pairs))]
    assert plans[0].tensors == plans[1].tensors == plans[2].tensors


@pytest.mark.parametrize("text", ["exps", "exps=", "=CPU", "a=CPU,b", r"blk\.\d{1,2}", "(?=exps)"])
def test_p6_a_rule_without_a_place_is_a_value_error_with_its_name(text: str) -> None:
    with pytest.raises(ValueError, match="not of the form pattern=PLACE"):
        ms.plan(models.tiny(), overrides=text)


def test_p6_an_unknown_place_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown place 'CUDA9'; there are: CPU, STREAM, DEFAULT"):
        ms.plan(models.tiny(), overrides="exps=CUDA9")


# ---- P9: the list ------------------------------------------------------------------------------------------


def many_rules(n: int) -> list[tuple[str, str]]:
    return [(f"never{i}", "CPU") for i in range(n - 1)] + [("exps", "CPU")] * (n > 0)


@pytest.mark.parametrize("n", [0, 1, 4095])
def test_p9_up_to_4095_rules_load(n: int) -> None:
    with ms.Model(models.tiny(), overrides=many_rules(n)) as model:
        rules = ms.lib.moestream_overrides(model._handles.store)
        assert (rules == ms.ffi.NULL) == (n == 0), "no rules are no list, not an empty one"
        if n:
            assert rules[n - 1].pattern != ms.ffi.NULL and rules[n].pattern == ms.ffi.NULL
            assert rules[n].buft == ms.ffi.NULL
        assert len(cpu_tensors(model.plan)) == (12 if n else 0)
        assert model.placement().misplaced == ()


def test_p9_one_more_is_an_error_ours_included() -> None:
    with pytest.raises(ValueError, match=r"4096 placement rules were given, llama\.cpp takes at most 4095"):
        ms.plan(models.tiny(), overrides=many_rules(4096))
    with pytest.raises(ValueError, match="more than 4095 placement rules"):
        ms.plan(models.tiny(), overrides=many_rules(4095), n_cpu_moe=1)


def test_p9_rules_that_only_keep_the_default_are_no_list() -> None:
    with ms.Model(models.tiny(), overrides=[("exps", "DEFAULT")]) as model:
        assert ms.lib.moestream_overrides(model._handles.store) == ms.ffi.NULL


def test_a_default_rule_cannot_refer_back_to_a_group() -> None:
    with pytest.raises(ValueError, match="refers back to a group"):
        ms.plan(models.tiny(), overrides=[(r"(f)\1n", "DEFAULT"), ("exps", "CPU")])
    assert ms.plan(models.tiny(), overrides=[(r"(f)\1n", "CPU")]).rules[0].n_matched > 0


# ---- P11, P12: biases, repacking ---------------------------------------------------------------------------


def test_p11_expert_biases_are_never_streamed_and_shared_experts_stay_with_dense_weights() -> None:
    for name, part in (("gpt_oss_like", "_exps.bias"), ("shared_experts", "_shexp")):
        made = ms.plan(models.named(name), stream=True)
        found = {t.place for t in made.tensors if part in t.name}
        assert found == {"CPU_ANON"} == {t.place for t in made.tensors if t.name.startswith("output")}
    with pytest.raises(ValueError, match="only the weights of routed experts can be streamed"):
        ms.plan(models.named("gpt_oss_like"), stream=True, overrides={"_exps": "STREAM"})


def test_p11_cpu_moe_takes_expert_biases_along_as_upstream_does() -> None:
    names = cpu_tensors(ms.plan(models.named("gpt_oss_like"), cpu_moe=True))
    assert any(name.endswith("_exps.bias") for name in names)


def test_p12_repacked_experts_are_reported_per_buffer_type_and_never_streamed_into() -> None:
    path = models.named("mixtral")
    with ms.Model(path, cpu_moe=True, load_mode="none", use_extra_bufts=True) as model:
        placed = model.placement()
        held = placed.bytes_by_buffer_type
        assert sum(held.values()) == sum(t.bytes for t in model.plan.tensors) and placed.misplaced == ()
        repacked = {t.buffer_type for t in placed.tensors if t.is_expert}
        assert all(name is not None and name.startswith("CPU") for name in repacked)
    with ms.Model(path, cpu_moe=True, load_mode="none", use_extra_bufts=False) as model:
        assert {t.buffer_type for t in model.placement().tensors if t.is_expert} == {"CPU"}
    with ms.Model(path, stream=True, use_extra_bufts=True) as model:
        assert {t.buffer_type for t in model.placement().tensors if t.is_expert} == {"MOESTREAM"}


# ---- P13: load modes ---------------------------------------------------------------------------------------


def test_p13_the_names_are_the_librarys() -> None:
    names = load_modes.load_modes()
    assert set(names) == {"auto", "none", "mmap", "mlock", "mmap+mlock", "dio"}
    for name, value in names.items():
        assert ms.ffi.string(ms.lib.llama_load_mode_name(value)).decode() == name


@pytest.mark.parametrize("mode", ["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"])
def test_p13_every_mode_reports_the_one_used(mode: str) -> None:
    with ms.Model(models.tiny(), load_mode=mode, use_extra_bufts=False) as model:
        held = {t.buffer_type for t in model.placement().tensors}
        assert held == ({"CPU_Mapped"} if "mmap" in mode or mode == "auto" else {"CPU"})
        assert model.load_mode in {
            "auto": {"mmap"}, "dio": {"dio", "none"}, "mlock": {"mlock", "none"}, "mmap+mlock": {"mmap+mlock", "mmap"},
        }.get(mode, {mode})  # fmt: skip


def test_p13_locked_memory_is_reported_only_where_it_is_locked() -> None:
    code = """
    import os, resource, sys
    import moestream as ms
    ms.features()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    if os.getuid() == 0:  # whom the limit does not bind
        os.setgroups([])
        os.setuid(65534)
    with ms.Model(sys.argv[1], load_mode="mmap+mlock") as model:
        print(model.load_mode)
    """
    with tempfile.TemporaryDirectory() as folder:  # another user has to be able to read it
        pathlib.Path(folder).chmod(0o755)
        copy = shutil.copy(models.tiny(), folder)
        done = models.run_python(code, args=(copy,))
    assert done.stdout.strip() == "mmap"
    assert "no memory was locked" in done.stderr


def test_p13_contradictions_are_errors() -> None:
    path = models.tiny()
    for mode in ("none", "mlock", "mmap+mlock", "dio"):
        with pytest.raises(ValueError, match="load_mode"):
            ms.Model(path, stream=True, load_mode=mode)
    with pytest.raises(ValueError, match="it is one of auto, none, mmap"):
        ms.Model(path, load_mode="MMAP")
    with pytest.raises(ValueError, match="STREAM, but streaming is off"):
        ms.plan(path, overrides={"exps": "STREAM"})
    with pytest.raises(ms.UnsupportedError, match=r"nothing of .* is left to stream"):
        ms.Model(path, stream=True, cpu_moe=True)
    with ms.Model(path, stream=True) as model:
        assert model.load_mode == "mmap"


# ---- P14: sums, speed, and what is read --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["four_shards", "gpt_oss_like", "shared_experts", "fused_gate_up", "mixed_projections"]
)
@pytest.mark.parametrize("stream", [None, True])
def test_p14_plan_and_placement_sum_to_the_tensor_bytes_of_the_file(name: str, stream: bool | None) -> None:
    import gguf

    path = models.named(name)
    in_file = sum(int(t.n_bytes) for shard in models.all_shards(path) for t in gguf.GGUFReader(shard).tensors)
    with ms.Model(path, stream=stream, n_cpu_moe=2) as model:
        made, placed = model.plan, model.placement()
        assert {t.name: t.place for t in made.tensors} == {t.name: t.place for t in placed.tensors if t.place}
        assert placed.misplaced == ()
    for sums in (made.bytes_by_place, made.bytes_by_layer, placed.bytes_by_place, placed.bytes_by_buffer_type):
        assert sum(sums.values()) == in_file
    assert sum(made.expert_bytes_by_place.values()) == made.expert_bytes
    assert sum(made.dense_bytes_by_place.values()) == made.dense_bytes
    rows = made.layers
    assert sum(sum(row.experts.values()) + sum(row.dense.values()) for row in rows) == in_file
    assert rows[-1].layer is None and not rows[-1].experts
    assert sum(rule.bytes for rule in made.rules) + sum(t.bytes for t in made.tensors if t.rule is None) == in_file


def test_p14_a_plan_of_48_layers_takes_less_than_50_ms() -> None:
    """The best of several: a busy machine delays a run, it does not slow the code."""
    path = models.named("wide_48_layers")
    ms.plan(path)
    best = 1.0
    for _ in range(10):
        began = time.perf_counter()
        made = ms.plan(path, stream=True, n_cpu_moe=7)
        best = min(best, time.perf_counter() - began)
    assert len(made.tensors) > 540 and best < 0.050, f"{best * 1000:.1f} ms"


def own_reads() -> int:
    """Bytes this process got from read calls so far."""
    return int(re.search(r"rchar: (\d+)", pathlib.Path("/proc/self/io").read_text())[1])  # type: ignore[index]


def test_p14_planning_never_reads_the_data(tmp_path: pathlib.Path) -> None:
    """A copy with the header of a real model and a hole for its data gives the same plan, and what read calls gave is
    little more than the header."""
    source = models.named("wide_48_layers")
    made = ms.plan(source)
    begin = min(t.offset for t in made.tensors)
    hollow = tmp_path / "hollow.gguf"
    with source.open("rb") as whole, hollow.open("wb") as out:
        out.write(whole.read(begin))
        out.truncate(source.stat().st_size)
    ms.plan(hollow)
    before = own_reads()
    again = ms.plan(hollow, stream=True, n_cpu_moe=1)
    read = own_reads() - before
    assert [t.name for t in again.tensors] == [t.name for t in made.tensors]
    assert read < begin + 65536 < made.expert_bytes // 100, f"{read} bytes were read, the header has {begin}"


# ---- llama_get_cpu_buffer_type -----------------------------------------------------------------------------


def test_the_cpu_buffer_type_is_the_loaded_libggmls_from_python() -> None:
    cpu = ctypes.CDLL(str(bundled("libggml-cpu")))  # the file is loaded already: this is the same library
    base = cpu.ggml_backend_cpu_buffer_type
    base.restype = ctypes.c_void_p
    assert int(ms.ffi.cast("uintptr_t", ms.get_cpu_buffer_type())) == base()
    assert int(ms.ffi.cast("uintptr_t", ms.lib.llama_get_cpu_buffer_type())) == base()
    assert ms.ffi.string(ms.lib.ggml_backend_buft_name(ms.get_cpu_buffer_type())) == b"CPU"


def test_the_cpu_buffer_type_is_the_loaded_libggmls_from_ctypes() -> None:
    code = """
    import ctypes, sys
    ours, ggml = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(sys.argv[2])
    for function in (ours.llama_get_cpu_buffer_type, ggml.ggml_backend_cpu_buffer_type):
        function.restype = ctypes.c_void_p
    assert ours.llama_get_cpu_buffer_type() == ggml.ggml_backend_cpu_buffer_type() != None
    print("same")
    """
    done = models.run_python(code, args=(str(bundled("libmoestream")), str(bundled("libggml-cpu"))))
    assert done.stdout.strip() == "same"


def test_the_cpu_buffer_type_is_the_loaded_libggmls_from_c(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "t.c"
    source.write_text(
        '#include <dlfcn.h>\n#include <stdio.h>\n#include "moestream.h"\n'
        "int main(int c, char ** v) {\n"
        "    void * ours = llama_get_cpu_buffer_type(), * theirs, * (*f)(void);\n"
        "    void * ggml = dlopen(v[c - 1], RTLD_NOW | RTLD_NOLOAD);\n"
        '    *(void **) &f = ggml ? dlsym(ggml, "ggml_backend_cpu_buffer_type") : 0;\n'
        "    theirs = f ? f() : 0;\n"
        '    return ours && ours == theirs ? puts("same") < 0 : 1;\n}\n'
    )
    library = bundled("libmoestream")
    program = tmp_path / "t"
    subprocess.run(
        [os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Werror", f"-I{models.REPO / 'csrc' / 'include'}", source,
         "-o", program, library, f"-Wl,-rpath,{library.parent}", "-ldl"],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program, bundled("libggml-cpu")], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "same"


def test_upstreams_libllama_does_not_define_the_cpu_buffer_type() -> None:
    for name in ("libllama", "libggml", "libggml-base", "libggml-cpu"):
        library = ctypes.CDLL(str(bundled(name)))
        if name != "libllama":
            assert "llama_get_cpu_buffer_type" not in defined_symbols(bundled(name))
            continue
        assert not hasattr(library, "llama_get_cpu_buffer_type")
        assert "llama_get_cpu_buffer_type" not in defined_symbols(bundled(name))
        assert "llama_model_load_from_file" in defined_symbols(bundled(name))


def bundled(name: str) -> pathlib.Path:
    """A library of the package, as it is mapped."""
    return next(iter(sorted(rpc.library_folder().glob(name + ".so*"))))


def defined_symbols(path: pathlib.Path) -> set[str]:
    listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines()}


# ---- pass-through and the command line ---------------------------------------------------------------------


def test_options_of_llama_cpp_are_passed_through_or_named_in_the_error() -> None:
    path = models.tiny()
    with ms.Model(
        path,
        devices=[],
        split_mode="none",
        main_gpu=-1,
        tensor_split=[1.0],
        kv_overrides={"qwen3moe.context_length": 77},
    ) as model:
        assert model.n_ctx_train == 77
    for options, said in (
        ({"devices": ["CUDA9"]}, "CUDA9"),
        ({"split_mode": "diagonal"}, "split_mode"),
        ({"tensor_split": [1.0] * 999}, "tensor_split"),
        ({"kv_overrides": {"k": [1]}}, "kv_overrides"),
    ):
        with pytest.raises(ValueError, match=said):
            ms.Model(path, **options)  # type: ignore[arg-type]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moestream", *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_plan_command_shows_places_rules_layers_and_warnings() -> None:
    path = str(models.tiny())
    done = command("plan", path, "--n-cpu-moe", "1", "-ot", r"blk\.3\..*_exps=CPU,typo=CPU", "--layers", "--tensors")
    assert done.returncode == 0, done.stderr
    assert "experts" in done.stdout and "block 3" in done.stdout and "outside blocks" in done.stdout
    assert "STREAM" in done.stdout and "n_cpu_moe" in done.stdout
    assert "typo" in done.stderr
    strict = command("plan", path, "-ot", "typo=CPU", "--strict")
    assert strict.returncode != 0 and "typo" in strict.stderr and "Traceback" not in strict.stderr


def test_the_plan_command_in_json_has_the_fields_of_a_plan() -> None:
    done = command("plan", str(models.tiny()), "--json", "--cpu-moe-layers", "0,2-3", "--no-stream")
    made = json.loads(done.stdout)
    assert made["rules"][0]["origin"] == "cpu_moe_layers" and made["rules"][0]["n_matched"] == 9
    assert sum(made["bytes_by_place"].values()) == made["expert_bytes"] + made["dense_bytes"]
    assert [row["layer"] for row in made["layers"]] == [0, 1, 2, 3, None]
    assert command("plan", str(models.tiny()), "--cpu-moe-layers", "0-x").returncode == 2
