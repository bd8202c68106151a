"""The fault rig for whole Python processes: builds preload/faults.c once and runs code under it.

`run(code, script)` runs code in a fresh process that has `faults(script)` (replace the script, "" ends the faults) and
`seen(rule)` at hand, and `opened`, `reference` and `steps` from the prelude below. See preload/faults.c for scripts.
`opened` uses the engine that `run(io=...)` names; under io_uring its reads are watched, too (preload/uring.c).
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest
from support import models

HERE = pathlib.Path(__file__).resolve().parent

PRELUDE = """
import ctypes, errno, gc, logging, os, signal, sys, threading, time
import numpy as np
import moestream as ms
sys.path.insert(0, {tests!r})
from support import models
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(message)s")
_lib = ctypes.CDLL(None)
def faults(script):
    _lib.ms_faults_set(script.encode())
def seen(rule):
    _lib.ms_faults_seen.restype = ctypes.c_longlong
    return _lib.ms_faults_seen(rule)
def read_bytes(rule):
    _lib.ms_faults_bytes.restype = ctypes.c_longlong
    return _lib.ms_faults_bytes(rule)
TINY = models.tiny()
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
def opened(path=TINY, **options):
    options = {{"cache": "min", "io": {io!r}, "prefetch": "off", **options}}
    return ms.Model(path, stream=ms.Stream(**options))
def steps(context, n=4, start=PROMPT):
    out = [context.decode(start)]
    for i in range(n):
        out.append(context.decode([7 + i]))
    return out
def reference(path=TINY, n=4, n_threads=2):
    with ms.Model(path, use_extra_bufts=False) as model, model.context(256, n_threads=n_threads) as context:
        return steps(context, n)
def same(a, b):
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b))
"""


def library() -> pathlib.Path:
    """The compiled preload library, made anew when its source changes. RuntimeError without a C compiler."""
    sources = sorted((HERE / "preload").glob("*.[ch]"))
    folder = models.model_folder().parent / "support"
    out = folder / f"faults-{hashlib.sha256(b''.join(s.read_bytes() for s in sources)).hexdigest()[:12]}.so"
    if not out.exists():
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            raise RuntimeError("the fault rig needs a C compiler, as the package itself does")
        folder.mkdir(parents=True, exist_ok=True)
        fresh = out.with_suffix(f".{os.getpid()}")
        code = [str(source) for source in sources if source.suffix == ".c"]
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(fresh), *code, "-ldl", "-pthread"], check=True)
        fresh.rename(out)
    return out


def prelude(io: str = "pread") -> str:
    """What every process under the rig begins with; `opened` reads with `io`."""
    return PRELUDE.format(tests=str(HERE.parent), io=io)


@functools.cache
def why_no_uring_faults() -> str:
    """ "" where reads through io_uring can be made to fail, else why not, in the words of a registered skip."""
    code = """
import ctypes, moestream as ms
from support import models
try:
    ms.Model(models.tiny(), stream=ms.Stream(cache="min", io="io_uring")).close()
except ms.MoestreamError as error:
    print("needs io_uring:", error)
else:
    watched = ctypes.CDLL(None).ms_faults_uring()
    print("" if watched else "needs io_uring: its calls cannot be watched (that takes x86-64, seccomp, Linux 6.10)")
"""
    environment = {"MS_FAULTS_URING": "1", "PYTHONPATH": str(HERE.parent)}
    return models.run_python(code, env=environment, preload=library()).stdout.strip()


def run(
    code: str,
    script: str = "",
    *,
    io: str = "pread",
    timeout: float = 60.0,
    check: bool = True,
    launcher: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs the prelude and `code` under the rig. `launcher` goes in front of the interpreter (no_io_uring.py ERRNO...).

    Skips, saying why, if `io` is "io_uring" and its reads cannot be made to fail here.
    """
    text = prelude(io) + textwrap.dedent(code)
    if not launcher:
        watch = None
        if io == "io_uring":
            watch = "1"
            if why_no_uring_faults():
                pytest.skip(why_no_uring_faults())
        environment = {"MS_FAULTS": script, "MS_FAULTS_URING": watch}
        return models.run_python(text, env=environment, preload=library(), timeout=timeout, check=check)
    done = subprocess.run(
        [*launcher, sys.executable, "-X", "faulthandler", "-c", text], capture_output=True, text=True, timeout=timeout,
        env={**os.environ, "MS_FAULTS": script, "LD_PRELOAD": str(library())}, check=False,
    )  # fmt: skip
    assert not check or done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def without_io_uring(errno_name: str = "EPERM", call: str = "") -> tuple[str, ...]:
    """A launcher that refuses io_uring, or one of its calls (setup, enter, register), with an errno."""
    only = ("--call", call) if call else ()
    return (sys.executable, str(HERE / "no_io_uring.py"), "--errno", errno_name, *only)
