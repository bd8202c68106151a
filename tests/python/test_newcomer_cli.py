"""What a newcomer types: the command line answers in one line that names the option, and without a traceback.

First as a function of this process, then as a program with closed streams, other encodings and an interrupt.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support import models

import moestream as ms
from moestream import bench, synthetic
from moestream.cli import main


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command, run in this process."""
    try:
        status = main(list(words))
    except SystemExit as ended:  # argparse's own
        status = int(str(ended.code))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


@pytest.mark.parametrize(
    "words",
    [
        "run --threads 0",
        "run --tokens 0",
        "run --temperature nan",
        "run --top-p 2",
        "run --min-p -1",
        "run --top-k -1",
        "run --seed -1",
        "run --ubatch 0",
        "run --ctx -1",
        "run --main-gpu 99999999999",
        "run --tensor-split x",
        "run --n-cpu-moe -1",
        "run --queue-depth 5000",
        "run --cache 12XB",
        "run --cpu-moe-layers 3-1",
        "run --expert-layers CPU=3-1",
        "run --no-stream --stream",
        "run --system a --raw",
        "verify --prompt-tokens 4 --prompt a",
        "verify --tokens 0",
        "bench -t 0",
        "bench --tokens 0",
        "bench --repeats 1.5",
    ],
)
def test_a_bad_value_names_the_option_before_the_file_is_opened(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *options = words.split()
    prompt = ["-p", "a"] if command == "run" else []
    status, out, err = said(capsys, command, "no.gguf", *prompt, *options)
    option = next(word for word in reversed(options) if word.startswith("-") and not word.lstrip("-").isdigit())
    assert (status, out) == (2, "")
    assert option in err and "no.gguf" not in err and err.count("\n") == 1, err


@pytest.mark.parametrize(("option", "text"), [("--stop", ""), ("--stop", "\udcff"), ("-p", "\udcff")])
def test_texts_are_not_empty_and_utf8(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = said(capsys, "run", "no.gguf", option, text)
    assert status == 2
    assert option in err and ("empty" if not text else "UTF-8") in err


def test_stream_is_a_place_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(models.tiny())
    for rule in (("--expert-layers", "STREAM=0-1"), ("-ot", r"blk\.0\..*exps=STREAM")):
        for more in ((), ("--stream",), ("--strict",)):
            status, out, err = said(capsys, "plan", path, "--json", *rule, *more)
            assert (status, err) == (0, "")
            assert json.loads(out)["bytes_by_place"]["STREAM"] == ms.plan(path).expert_bytes
        assert said(capsys, "plan", path, "--no-stream", *rule)[0] == 2
    words = ("-p", "a", "-n", "2", "-t", "1", "--ctx", "64", "--cache", "min")
    status, out, err = said(capsys, "run", path, "-ot", r"blk\.0\..*exps=STREAM", "--json", *words)
    assert status == 0, err
    assert json.loads(out)["stats"]["streaming"]


def test_plan_and_run_agree_on_what_is_streamed(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(models.tiny())
    run = ("run", path, "-p", "a", "-n", "2", "-t", "1", "--ctx", "64", "--json")
    for words, status, text in (
        (("--cpu-moe",), 0, "not streamed"),
        (("--stream", "--cpu-moe"), 2, "leave out --stream"),
        (("--io", "pread", "--cpu-moe"), 2, "leave out --io"),
        (("--cache", "1B"), 1, "too small: this model needs at least"),
        (("--cache", "1%"), 1, "too small: this model needs at least"),
    ):
        for command in (("plan", path), run):
            found, _, err = said(capsys, *command, *words)
            assert found == status and text in err, (command, words, err)
    for command in ("verify", "bench"):
        status, _, err = said(capsys, command, path, "--cache", "1B")
        assert status == 1 and "too small" in err


def test_a_dense_model_is_answered_alike(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(models.named("dense_model"))
    for words in (("verify",), ("bench",), ("plan", "--stream"), ("run", "-p", "a", "--cache", "min")):
        status, out, err = said(capsys, words[0], path, *words[1:])
        assert (status, out) == (1, "") and "experts" in err and "to stream" in err, err


def test_metadata_that_promises_experts_is_not_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(synthetic, "_check", lambda spec: None)
    path = str(models.make(synthetic.Spec(arch="dots1", n_head_kv=4, n_layer_dense_lead=4), "all-dense"))
    assert ms.plan(path).n_expert == 8 and ms.plan(path).expert_bytes == 0
    assert "nothing to stream" in said(capsys, "info", path)[1]
    assert said(capsys, "plan", path)[0] == 0
    status, out, err = said(capsys, "run", path, "-p", "a", "-n", "2", "-t", "1", "--ctx", "64", "--json")
    assert status == 0, err
    assert not json.loads(out)["stats"]["streaming"]


def test_rules_are_counted_alike(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "plan", str(models.tiny()), "-ot", r"blk\.0\..*exps=CPU,typo=CPU", "--tensors")
    assert "rule 1 (rules): blk" in out[1] and "rule 2, 'typo'" in out[2] and "rule 0" not in out[1]
    assert "rule 1\n" in out[1]


def test_a_memory_limit_that_is_too_small_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = said(capsys, "bench", str(models.tiny()), "--memory-limit", "1B")
    assert status == 2 and "--memory-limit was 1B, which is too small" in err
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(bench.subprocess, "Popen", Killed)
    with pytest.raises(ms.OutOfMemoryError, match="mmap run was killed: its memory limit"):
        bench.run_worker({"mode": "mmap", "cgroup_procs": "x"}, "mmap")
    with pytest.raises(ms.InternalError, match="signal 9"):
        bench.run_worker({"mode": "mmap"}, "mmap")


class Killed:
    """A process that a memory limit has killed."""

    returncode = -9

    def __init__(self, *_: object, **__: object) -> None: ...

    def communicate(self, _: str) -> tuple[str, None]:
        return "", None


# ---- as a program ---------------------------------------------------------------------------------------------------


def shell(text: str, *words: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """A command of a shell: "$@" is `moestream WORDS`."""
    command = [sys.executable, "-m", "moestream", *words]
    return subprocess.run(["sh", "-c", text, "sh", *command], capture_output=True, timeout=60, check=False, **options)


RUN = ("run", "-n", "2", "-t", "1", "--ctx", "64", "--cache", "min")


@pytest.mark.parametrize(
    ("text", "words", "status"),
    [
        ('"$@" >&-', (*RUN, "-p", "a"), 0),
        ('"$@" 2>&-', (*RUN, "-p", "a"), 0),
        ('"$@" <&-', (*RUN, "-p", "a"), 0),
        ('"$@" <&- >&- 2>&-', (*RUN, "-p", "a"), 0),
        ('"$@" 2>&-', ("plan", "--threads"), 2),
        ('"$@" <&-', RUN, 2),
        ('"$@" </dev/null', RUN, 2),
        ("printf 'caf\\351' | \"$@\"", RUN, 2),
        ("printf 'caf\\303\\251' | PYTHONIOENCODING=ascii \"$@\"", RUN, 0),
        ('PYTHONIOENCODING=ascii "$@"', (*RUN, "-p", "\u00e9", "--stop", "\u00e9"), 0),
    ],
)
def test_closed_streams_and_other_encodings_give_no_traceback(text: str, words: tuple[str, ...], status: int) -> None:
    done = shell(text, words[0], str(models.tiny()), *words[1:])
    assert done.returncode == status, done
    assert b"Traceback" not in done.stdout + done.stderr, done
    if "351" in text:
        assert b"the prompt on stdin is not UTF-8" in done.stderr
    if status == 2 and words is RUN and "351" not in text:
        assert b"stdin was empty" in done.stderr


def test_what_the_terminal_cannot_show_is_escaped(tmp_path: pathlib.Path) -> None:
    (tmp_path / "\u00e9.gguf").symlink_to(models.tiny())
    done = shell('PYTHONIOENCODING=ascii "$@"', "info", str(tmp_path / "\u00e9.gguf"))
    assert done.returncode == 0 and b"\\xe9.gguf: 4 blocks" in done.stdout, done


def test_an_interrupt_during_the_imports_ends_quietly(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = """
    import sys
    where = sys.argv.pop()
    from moestream_program import main
    class Interrupted:
        def find_spec(self, name, path=None, target=None):
            if name == where:
                raise KeyboardInterrupt
    sys.meta_path.insert(0, Interrupted())
    sys.exit(main())
    """
    for where in ("moestream", "moestream.cli"):
        done = run_python(code, check=False, args=(where,))
        assert (done.returncode, done.stdout, done.stderr) == (130, "", ""), where
