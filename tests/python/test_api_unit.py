"""Pieces of the Python package that need no model: sizes, options, rules, errors, text, derived declarations."""

from __future__ import annotations

import errno
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import cdef  # noqa: E402
from moestream import errors, host  # noqa: E402
from moestream._calls import in_helper_thread  # noqa: E402
from moestream.cli import build_parser, main  # noqa: E402
from moestream.placement import PlaceOptions, parse_overrides, split_rules  # noqa: E402
from moestream.sampling import SamplingOptions, TextStream  # noqa: E402
from moestream.sizes import format_bytes, parse_cache, parse_size  # noqa: E402
from moestream.stream import Stream, as_stream  # noqa: E402

# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("512MB", 512 * 10**6),
        ("1.5G", 3 * 2**29),
        ("4096", 4096),
        (" 2 kib ", 2048),
        (".5K", 512),
        ("0", 0),
        ("10b", 10),
        (123, 123),
        (2**62, 2**62),
    ],
)
def test_size_is_read_as_people_write_it(text: int | str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize(
    "bad",
    ["-1", "12XB", "nan", "inf", "", "1e9", "8 GiB GiB", "GiB", "0x10", "1,5G", -1, True, math.nan, None],
)
def test_nonsense_size_is_a_clear_value_error(bad: Any) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(bad)
    with pytest.raises(ValueError, match="cache was"):
        Stream(cache=bad)


def test_size_beyond_63_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="63"):
        parse_size("9000000000GiB")
    with pytest.raises(ValueError, match="63"):
        parse_size(2**63)


def test_share_of_the_experts_is_resolved_by_the_plan() -> None:
    size = parse_cache("25%")
    assert size.needs_plan
    assert size.resolve(full_cache_bytes=1001, min_cache_bytes=7) == 251
    assert parse_cache("100%").resolve(1001, 7) == 1001
    assert parse_cache("min").resolve(1001, 7) == 7
    assert parse_cache("AUTO").resolve(1001, 7) == 0
    assert not parse_cache("auto").is_none


def test_zero_means_that_nothing_is_kept() -> None:
    assert parse_cache(0).is_none
    assert parse_cache("0%").is_none
    assert not parse_cache("1%").is_none


@pytest.mark.parametrize("bad", ["101%", "-5%", "%", "nan%", "max"])
def test_nonsense_share_is_a_clear_value_error(bad: str) -> None:
    with pytest.raises(ValueError, match="cache was"):
        parse_cache(bad)


def test_bytes_are_shown_with_three_digits() -> None:
    assert [format_bytes(n) for n in (0, 1000, 1536, 250 * 2**20, 5.25 * 2**30)] == [
        *("0 B", "1000 B", "1.50 KiB", "250 MiB", "5.25 GiB")
    ]


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"io": "aio"},
        {"prefetch": True},
        {"dense": "gpu"},
        {"direct": None},
        {"queue_depth": 1025},
        {"queue_depth": -1},
        {"readers": 65},
        {"readers": 2.0},
        {"verify": "yes"},
        {"deadline_s": 0},
        {"deadline_s": math.nan},
        {"deadline_s": "60"},
    ],
)
def test_stream_option_out_of_range_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Stream(**options)


def test_stream_may_be_given_as_true_or_none() -> None:
    assert as_stream(None) is None
    assert as_stream(False) is None
    assert as_stream(True) == Stream()
    with pytest.raises(TypeError, match="stream"):
        as_stream("8GiB")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("a=CPU", [("a", "CPU")]),
        (" a = CPU , b=GPU0, ", [("a", "CPU"), ("b", "GPU0")]),
        (r"blk\.\d{1,2}\.ffn_.*_exps=CPU", [(r"blk\.\d{1,2}\.ffn_.*_exps", "CPU")]),
        ("x(?=y,z)=CPU,w=CPU", [("x(?=y,z)", "CPU"), ("w", "CPU")]),
        (r"[^,]\(a=CPU", [(r"[^,]\(a", "CPU")]),
        ("exps=RPC0[127.0.0.1:50152]", [("exps", "RPC0[127.0.0.1:50152]")]),
        ("", []),
    ],
)
def test_rule_text_is_cut_at_the_commas_between_rules(text: str, rules: list[tuple[str, str]]) -> None:
    assert parse_overrides(text) == rules


@pytest.mark.parametrize("bad", ["a", "=CPU", "a=", "a=CPU,b", "x(?=y)"])
def test_rule_without_its_place_is_named(bad: str) -> None:
    with pytest.raises(ValueError, match="override") as caught:
        parse_overrides(bad)
    assert split_rules(bad)[-1] in str(caught.value)


def test_rules_may_be_pairs_or_a_dict() -> None:
    assert parse_overrides([("a", "CPU"), ("b", "GPU0")]) == [("a", "CPU"), ("b", "GPU0")]
    assert parse_overrides({"a": "CPU"}) == [("a", "CPU")]
    for bad in (["a=CPU"], [("a",)], [("a", 1)], [("", "CPU")], [("a\0", "CPU")]):
        with pytest.raises(ValueError, match="override"):
            parse_overrides(bad)  # type: ignore[arg-type]


def place_options(**changed: Any) -> PlaceOptions:
    options: dict[str, Any] = {
        "stream": None,
        "n_gpu_layers": 0,
        "cpu_moe": False,
        "n_cpu_moe": 0,
        "cpu_moe_layers": None,
        "overrides": None,
    }
    return PlaceOptions.of(**{**options, **changed})


def test_placement_options_reach_the_c_struct() -> None:
    options = place_options(
        stream=Stream(cache="1MiB", io="pread", readers=3, deadline_s=1.5),
        n_cpu_moe=10**12,
        cpu_moe_layers=[3, 5],
        overrides="a=CPU,b=STREAM",
    )
    params, keep = options.to_c(options.resolve_cache("unused"))
    assert params.cache_bytes == 2**20
    assert params.n_readers == 3
    assert params.deadline_ms == 1500
    assert params.n_cpu_moe == 2**31 - 1
    assert [params.cpu_moe_layers[i] for i in range(params.n_cpu_moe_layers)] == [3, 5]
    assert params.n_rules == 2
    assert keep


@pytest.mark.parametrize(
    "bad", [{"n_cpu_moe": -1}, {"cpu_moe_layers": [-1]}, {"n_gpu_layers": 1.5}, {"n_cpu_moe": True}]
)
def test_placement_option_out_of_range_is_named(bad: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(bad))):
        place_options(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 1.1},
        {"min_p": "x"},
        {"seed": 2**32 - 1},
    ],
)
def test_sampling_option_out_of_range_is_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingOptions(**bad)


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "builtin"),
    [
        (errors.INVALID, ValueError),
        (errors.NOMEM, MemoryError),
        (errors.IO, OSError),
        (errors.EOF, OSError),
        (errors.FORMAT, ValueError),
        (errors.UNSUPPORTED, RuntimeError),
        (errors.BUSY, RuntimeError),
        (errors.CLOSED, RuntimeError),
        (errors.CORRUPT, RuntimeError),
        (errors.INTERNAL, RuntimeError),
        (-99, RuntimeError),
    ],
)
def test_each_status_is_a_builtin_as_well(status: int, builtin: type[Exception]) -> None:
    error = errors.from_status(status, "it went wrong at 5", 5, "a.gguf")
    assert isinstance(error, errors.MoestreamError)
    assert isinstance(error, builtin)
    assert str(error) == "it went wrong at 5"
    assert (error.status, error.os_errno) == (status, 5)


def test_read_error_has_what_os_error_has() -> None:
    error = errors.from_status(errors.IO, "a read failed", errno.EIO, "a.gguf")
    assert isinstance(error, errors.ReadError)
    assert (error.errno, error.filename, error.strerror) == (errno.EIO, "a.gguf", "a read failed")
    with pytest.raises(FileNotFoundError):
        raise errors.from_status(errors.IO, "no such file", errno.ENOENT, "a.gguf")


def test_errors_survive_pickling() -> None:
    error = errors.from_status(errors.IO, "a read failed", errno.EIO, "a.gguf")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.errno, copy.filename) == (type(error), str(error), errno.EIO, "a.gguf")


# ---- text -----------------------------------------------------------------------------------------------------------


def test_a_character_is_shown_once_it_is_whole() -> None:
    text = TextStream()
    raw = "né 你好".encode()
    shown = [text.push(raw[i : i + 1]) for i in range(len(raw))]
    assert "".join(shown) + text.finish() == "né 你好"
    assert all("\ufffd" not in piece for piece in shown)
    assert TextStream().push(b"\xff") == "\ufffd"


def test_what_may_become_a_stop_text_is_held_back() -> None:
    text = TextStream(["STOP", "END"])
    assert text.push(b"go ST") == "go "
    assert text.push(b"AND E") == "STAND "
    assert text.push(b"ND more") == ""
    assert text.stopped_at == "END"
    assert text.push(b"x") + text.finish() == ""


def test_held_text_is_shown_when_no_stop_came() -> None:
    text = TextStream("STOP")
    assert text.push(b"no ST") + text.finish() == "no ST"
    assert text.stopped_at is None
    with pytest.raises(ValueError, match="stop"):
        TextStream([""])


# ---- threads --------------------------------------------------------------------------------------------------------


def test_helper_thread_gives_back_result_and_error() -> None:
    assert in_helper_thread(lambda: 7, lambda: None) == 7
    with pytest.raises(ZeroDivisionError):
        in_helper_thread(lambda: 1 // 0, lambda: None)


def test_interrupt_cancels_the_work_and_waits_for_its_end() -> None:
    """interrupt_main only sets the flag that a signal sets, and the waiting thread meets it where its wait runs out:
    in the first run of the code and in later ones (which Python has specialised) at different instructions."""
    program = """
import _thread, threading, time
from moestream._calls import in_helper_thread

for delay in (0.0, 0.0, 0.01, 0.6, 0.0, 0.0):
    stop, ended = threading.Event(), threading.Event()

    def work() -> int:
        time.sleep(delay)
        _thread.interrupt_main()
        stop.wait(30)
        ended.set()
        return 0

    try:
        in_helper_thread(work, stop.set)
    except KeyboardInterrupt:
        print("interrupted", ended.is_set())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.splitlines() == ["interrupted True"] * 6


# ---- derived declarations -------------------------------------------------------------------------------------------

SMALL_LLAMA = """
#ifndef LLAMA_H
#define LLAMA_H
#ifdef __cplusplus
extern "C" {
#endif
    enum llama_color { LLAMA_RED, LLAMA_BLUE = 1 << 3, /* old: LLAMA_GREEN = 2, */ };
    typedef struct llama_box_i * llama_box_t;
    struct llama_batch { // one batch
        int32_t n;      // a comment; with a semicolon
        enum llama_color color;
        bool mask[LLAMA_MOST];
    };
    LLAMA_API llama_box_t llama_decode(const struct llama_batch * b);
    DEPRECATED(LLAMA_API void llama_set_warmup(struct llama_model * m, bool on), "not (any) more");
    LLAMA_API DEPRECATED(int llama_encode(void), "no");
    static inline int helper(void) { return 1; }
    LLAMA_API enum llama_unknown llama_vocab_type(void);
#ifdef __cplusplus
}
#endif
#endif
"""


@pytest.fixture
def small_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cdef, "REQUIRED_FUNCTIONS", ["llama_decode"])
    monkeypatch.setattr(
        cdef, "OPTIONAL_FUNCTIONS", ["llama_set_warmup", "llama_encode", "llama_vocab_type", "llama_gone"]
    )
    monkeypatch.setattr(cdef, "OPEN_STRUCTS", frozenset(["llama_batch"]))


@pytest.mark.usefixtures("small_lists")
def test_functions_come_with_the_types_they_need() -> None:
    found = cdef.llama_cdef([SMALL_LLAMA])
    assert found.functions == ("llama_decode", "llama_set_warmup", "llama_encode")
    assert "enum llama_color { LLAMA_RED, LLAMA_BLUE, ... };" in found.text
    assert "struct llama_batch { int32_t n; enum llama_color color; bool mask[...]; ...; };" in found.text
    assert "typedef struct llama_box_i * llama_box_t;" in found.text
    assert "helper" not in found.text
    assert "GREEN" not in found.text


@pytest.mark.usefixtures("small_lists")
def test_what_a_commit_lacks_is_left_out_by_name() -> None:
    # llama_vocab_type is there, but its type is not.
    assert cdef.llama_cdef([SMALL_LLAMA]).left_out == ("llama_vocab_type", "llama_gone")
    with pytest.raises(cdef.HeaderError, match="llama_decode"):
        cdef.llama_cdef([SMALL_LLAMA.replace("llama_decode(", "llama_process(")])


def test_committed_declarations_are_those_of_the_header() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "cdef.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_header_without_marks_or_with_macros_is_refused() -> None:
    with pytest.raises(cdef.HeaderError, match="marks"):
        cdef.moestream_cdef("int f(void);")
    with pytest.raises(cdef.HeaderError, match="plain"):
        cdef.moestream_cdef("/* cdef:begin */\n#define X 1\n/* cdef:end */")


def test_names_of_the_python_api_hold_the_header_s_numbers() -> None:
    header = (ROOT / "csrc" / "include" / "moestream.h").read_text(encoding="utf-8")
    numbers = {name: int(value) for name, value in re.findall(r"MOESTREAM_ERR_(\w+)\s*=\s*(-\d+)", header)}
    assert numbers
    assert {name: getattr(errors, name) for name in numbers} == numbers


# ---- package and command line ---------------------------------------------------------------------------------------


def test_import_prints_nothing_and_loads_neither_llama_nor_numpy() -> None:
    script = (
        "import sys, moestream\n"
        "assert 'numpy' not in sys.modules\n"
        "assert 'libllama' not in open('/proc/self/maps').read()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_unknown_function_is_named_before_any_call() -> None:
    import moestream

    with pytest.raises(AttributeError, match="llama_no_such_thing"):
        _ = moestream.lib.llama_no_such_thing
    assert not hasattr(moestream.lib, "ggml_no_such_thing")


@pytest.mark.parametrize("command", ["run", "info", "plan", "verify", "bench", "doctor", "demo"])
def test_every_command_has_help_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([command, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["run", "no.gguf", "-p", "x", "--cache", "12XB"],
        ["bench", "no.gguf", "--modes", "fast"],
        ["bench", "no.gguf", "--tokens", "0"],
        ["verify", "no.gguf", "--cache", "-1"],
    ],
)
def test_nonsense_on_the_command_line_is_one_line_and_status_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(words)
    except SystemExit as ended:  # argparse's own
        status = int(str(ended.code))
    assert status in (1, 2)
    if words[0] == "bench":
        assert status == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert err.strip()


def test_host_facts_are_sane() -> None:
    assert 1 <= host.physical_cores() <= len(host.allowed_cpus())
    assert 0 < host.memory_available() <= host.memory_total()
    assert 0 < host.rss() <= host.peak_rss()
    limit = host.cgroup_memory()
    assert limit is None or limit[0] > 0


def test_the_exceptions_are_listed_once() -> None:
    import moestream as ms

    text = (ROOT / "docs" / "streaming.md").read_text(encoding="utf-8")
    kinds = [name for name in ms.__all__ if name.endswith("Error") and name != "MoestreamError"]
    assert [name for name in kinds if text.count(f"\n| `{name}`") != 1] == []
    fields = ms.Stream.__dataclass_fields__
    assert [name for name in fields if f"`{name}`" not in text] == []
