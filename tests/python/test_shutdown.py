"""The interpreter ends in many ways: with the scripted code, a clean stderr, in under two seconds (CASES S14)."""

from __future__ import annotations

import time

import pytest
from support import faults

DECODE = "model = opened(); context = model.context(256, n_threads=2); context.decode(PROMPT)\n"
BUSY = (
    DECODE
    + """
def loop():
    while True:
        context.decode(PROMPT, pos=0)
threading.Thread(target=loop, daemon={daemon}).start()
time.sleep(0.1)
"""
)
WAYS: dict[str, tuple[str, int]] = {
    "after_import": ("", 0),
    "after_load": ("model = opened()\n", 0),
    "after_context": ("model = opened(); context = model.context(64)\n", 0),
    "after_decode": (DECODE, 0),
    "after_close": (DECODE + "model.close()\n", 0),
    "after_context_close": (DECODE + "context.close()\n", 0),
    "sys_exit": (DECODE + "sys.exit(3)\n", 3),
    "sys_exit_in_generate": (DECODE + "for piece in context.generate([1, 2], 8, ignore_eog=True): sys.exit(4)\n", 4),
    "os_exit": (DECODE + "os._exit(5)\n", 5),
    "failed_read": (
        'model = opened(); context = model.context(64)\nfaults("pread:path=.gguf,min=4096,errno=5")\n'
        "try: context.decode([1])\nexcept ms.ReadError: pass\n",
        0,
    ),
    "failed_open": ("try: opened(cache=1)\nexcept MemoryError: pass\n", 0),
    "io_uring": (DECODE.replace("opened()", 'opened(io="auto", prefetch="on")'), 0),
    "cycle": (DECODE + "class A: pass\na = A(); a.a = a; a.c = context; del context, model, a\n", 0),
    "no_gc": (DECODE + "gc.disable()\nmodel.self = model\n", 0),
    "decode_in_a_daemon_thread": (BUSY.format(daemon=True), 0),
    "decode_in_a_daemon_thread_os_exit": (BUSY.format(daemon=True) + "os._exit(6)\n", 6),
    "decode_in_a_thread_sys_exit": (BUSY.format(daemon=True) + "sys.exit(7)\n", 7),
    # the sleep at exit runs last: the thread wakes up after that and finds its context freed
    "decode_in_a_daemon_thread_behind_the_end": (
        "import atexit; atexit.register(time.sleep, 0.6)\n"
        + BUSY.format(daemon=True).replace("pos=0)", "pos=0); time.sleep(0.3)"),
        0,
    ),
    "sigterm": (DECODE + "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(5)\n", -15),
    "atexit": ("import atexit\n" + DECODE + "atexit.register(lambda: context.decode([1]))\n", 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_interpreter_ends(way: str) -> None:
    code, status = WAYS[way]
    timed = "import time as _t, sys\n" + code.replace("sys.exit(", "print('T', _t.time(), flush=True) or sys.exit(")
    if "sys.exit" not in code:
        timed += "print('T', _t.time(), flush=True)\n" if way != "sigterm" else ""
    done = faults.run(timed, check=False, timeout=30)
    ended = time.time()
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    assert done.stderr == "", done.stderr
    stamps = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("T ")]
    assert not stamps or ended - stamps[-1] < 2, ended - stamps[-1]


def test_an_exception_ends_with_its_traceback_only() -> None:
    done = faults.run(DECODE + "raise RuntimeError('mine')\n", check=False)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("RuntimeError: mine"), done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
