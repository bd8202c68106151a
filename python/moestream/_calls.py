"""The C side of one context, and how calls into it are made one at a time.

`ContextHandles` frees what a context owns, once and in order, and lets one call in while the others wait.
`in_helper_thread` keeps the main thread open to signals while C computes.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from moestream import _native_api as native
from moestream.errors import BusyError, ClosedError

if TYPE_CHECKING:
    from moestream.model import ModelHandles


def refuse_after_fork(pid: int) -> None:
    """Raises ClosedError in a child of the process that loaded: its threads are not there, and its reader is shared."""
    if pid != os.getpid():
        raise ClosedError("the model was loaded before this process was forked; load it again in the child")


class ContextHandles:
    """The hook, the llama_context and the threadpools of one context. Frees them once, in order."""

    def __init__(self, model: ModelHandles) -> None:
        null = native.ffi.NULL
        self.model = model
        self.pid = os.getpid()
        self.hook: Any = null
        self.context: Any = null
        self.pools: list[Any] = []
        self.abort_flag: Any = native.ffi.new("int32_t *")
        # Taken by `with` alone: between __enter__ of a lock made in C and the body no signal handler runs, so an
        # interrupt leaves it neither taken nor released twice.
        self._call_lock: Any = threading.RLock()
        self.closed = False
        self.at_exit = False  # the interpreter is ending; the call that is stopped for it ends its thread quietly
        self.entered = False  # counted among the users of the model

    def enter(self) -> None:
        """Holds the model open; `free` lets it go. Raises ClosedError where it is closed."""
        self.model.enter()
        self.entered = True

    def call_lock(self) -> Any:
        """The lock to hold over one call, as `with handles.call_lock(): context = handles.pointer()`. Raises BusyError
        inside a call of this context, ClosedError in a process forked since."""
        refuse_after_fork(self.pid)
        if self._call_lock._is_owned():
            raise BusyError("the context was called from inside one of its own calls")
        return self._call_lock

    def refuse_closed(self) -> None:
        """For whoever holds the lock. Raises ClosedError."""
        if self.closed:
            raise ClosedError("the context was used after it was closed")

    def pointer(self) -> Any:
        """The llama_context *, for whoever holds the lock. Raises ClosedError."""
        self.refuse_closed()
        return self.context

    def cancel(self) -> None:
        """Asks the call in flight, if any, to stop. Any thread, without the lock."""
        native._raw.ms_native_set_flag(self.abort_flag, 1)
        if not self.closed and self.hook != native.ffi.NULL:
            native.lib.moestream_context_cancel(self.hook)

    def free(self) -> None:
        """Waits for the call in flight, then frees. Raises BusyError inside a call of this context."""
        if self.pid != os.getpid():
            return  # freeing would wait for threads that were not forked along
        if self._call_lock._is_owned():
            raise BusyError("the context was closed from inside one of its own calls")
        with self._call_lock:
            if not self.closed:
                uninterrupted(self._free_now)

    def free_at_exit(self) -> None:
        """Stops the call in flight; frees, or leaks rather than frees under a call that does not end."""
        self.at_exit = True
        self.cancel()
        if self.pid == os.getpid() and not self._call_lock._is_owned() and self._call_lock.acquire(timeout=0.8):
            if not self.closed:
                self._free_now()  # a helper thread can no longer be counted on
            self._call_lock.release()

    def _free_now(self) -> None:
        lib, null = native.lib, native.ffi.NULL
        self.closed = True
        if self.context != null:
            lib.llama_free(self.context)
        for pool in self.pools:
            lib.ggml_threadpool_free(pool)
        if self.hook != null:
            lib.moestream_context_free(self.hook)
        self.context = self.hook = null
        self.pools = []
        if self.entered:
            self.entered = False
            self.model.leave()


class _Helper:
    """One thread for the calls of the main thread. It stays: a reader's kernel cancels what a thread that ended had
    asked for, and starting one for each token would cost more than the rest of the call."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="moestream-decode", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.jobs.get()()


_helper: _Helper | None = None


def _hand_over(job: Callable[[], None]) -> None:
    global _helper
    if _helper is None or _helper.pid != os.getpid():
        _helper = _Helper()
    _helper.jobs.put(job)


def in_helper_thread(work: Callable[[], int], cancel: Callable[[], None]) -> int:
    """Runs `work` in another thread while this one, the main thread, stays open to signals. An exception that a
    signal handler raises (Ctrl-C) cancels the work, waits for its end, and goes on from here.

    The waiting is done in C (SimpleQueue): an interrupt inside threading.Event or Condition, which are Python, leaves
    their lock taken or taken away. All that is decided here is noted by one append, which no interrupt can halve.
    """
    result: list[int] = []
    failed: list[BaseException] = []
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()
    # Who comes first decides whether the work runs: an interrupt may come before the thread has begun.
    first: list[str] = []

    def run() -> None:
        first.append("helper")
        if first[0] != "helper":
            return
        try:
            result.append(work())
        except BaseException as error:  # carried over to the waiting thread
            failed.append(error)
        finally:
            ended.put(None)

    handed_over: list[bool] = []
    interrupts: list[BaseException] = []

    def wait() -> None:
        if not handed_over:
            handed_over.append(True)
            _hand_over(run)
        if interrupts:
            cancel()
            first.append("waiter")
        while not (result or failed or first[:1] == ["waiter"]):
            with suppress(queue.Empty):
                ended.get(timeout=0.5)

    def wait_on() -> None:
        while True:
            try:
                return wait()
            except BaseException as error:
                interrupts.append(error)

    # Python looks for signals where a loop goes back, too, and that jump lies outside the loop's own try: one loop
    # around the other, so that an interrupt that comes at the inner jump does not leave the work behind uncancelled.
    while True:
        try:
            wait_on()
            break
        except BaseException as error:
            interrupts.append(error)
    if interrupts:
        raise interrupts[-1]
    if failed:
        raise failed[0]
    return result[0]


def uninterrupted(work: Callable[[], None]) -> None:
    """Runs `work`, which makes something in C and notes it in Python: in the main thread by way of the helper, since an
    interrupt between C's return and the note would lose what was made. The interrupt is raised afterwards."""
    if threading.current_thread() is not threading.main_thread():
        work()
        return

    def run() -> int:
        work()
        return 0

    in_helper_thread(run, lambda: None)
