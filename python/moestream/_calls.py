"""The C side of one context, and how calls into it are made one at a time.

`ContextHandles` frees what a context owns, once and in order; `one_call` lets one call in while the others wait.
`in_helper_thread` keeps the main thread open to signals while C computes.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from moestream import _native_api as native
from moestream.errors import BusyError, ClosedError

if TYPE_CHECKING:
    from moestream.model import ModelHandles

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


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
        self.lock: Any = threading.RLock()  # held over each call, by one_call
        self.closed = False
        self.at_exit = False  # the interpreter is ending; the call that is stopped for it ends its thread quietly
        self.entered = False  # counted among the users of the model

    def enter(self) -> None:
        """Holds the model open; `free` lets it go. Raises ClosedError where it is closed."""
        self.model.enter()
        self.entered = True

    def refuse_nested(self) -> None:
        """Raises BusyError inside a call of this context, ClosedError in a process forked since."""
        refuse_after_fork(self.pid)
        if self.lock._is_owned():
            raise BusyError("the context was called from inside one of its own calls")

    def refuse_closed(self) -> None:
        """For whoever holds the lock. Raises ClosedError; ends a thread that goes on while the interpreter ends."""
        if self.closed and self.at_exit and threading.current_thread() is not threading.main_thread():
            raise SystemExit  # a daemon thread: nobody is left to read its traceback
        if self.closed:
            raise ClosedError("the context was used after it was closed")

    def cancel(self) -> None:
        """Asks the call in flight, if any, to stop. Any thread, without the lock: the flag lives as long as this, and C
        asks it between operations and while it waits for a read."""
        native._raw.ms_native_set_flag(self.abort_flag, 1)

    def free(self) -> None:
        """Waits for the call in flight, then frees. Raises BusyError inside a call of this context."""
        if self.pid != os.getpid():
            return  # freeing would wait for threads that were not forked along
        if self.lock._is_owned():
            raise BusyError("the context was closed from inside one of its own calls")
        try:
            self.lock.acquire()
            if not self.closed:
                uninterrupted(self._free_now)
        finally:
            try:  # noqa: SIM105 (suppress is Python: an interrupt in it would come before the release)
                self.lock.release()
            except RuntimeError:  # an interrupt came while it was waited for
                pass

    def free_at_exit(self) -> None:
        """Stops the call in flight; frees, or leaks rather than frees under a call that does not end. At the end of the
        interpreter, when a helper thread can no longer be counted on, and when nobody holds the context any more."""
        self.at_exit = True
        self.cancel()
        if self.pid != os.getpid() or self.lock._is_owned() or not self.lock.acquire(timeout=0.8):
            return
        try:
            if not self.closed:
                self._free_now()
        finally:
            try:  # noqa: SIM105 (suppress is Python: an interrupt in it would come before the release)
                self.lock.release()
            except RuntimeError:  # an interrupt came while it was waited for
                pass

    def _free_now(self) -> None:
        """Each step whatever becomes of the others: an interrupt may come behind any of them."""
        lib, null = native.lib, native.ffi.NULL
        self.closed = True
        context, self.context = self.context, null
        hook, self.hook = self.hook, null
        pools, self.pools = self.pools, []
        try:
            if context != null:
                lib.llama_free(context)
        finally:
            try:
                for pool in pools:
                    lib.ggml_threadpool_free(pool)
            finally:
                try:
                    if hook != null:
                        lib.moestream_context_free(hook)
                finally:
                    if self.entered:
                        self.entered = False
                        self.model.leave()


def one_call(method: Callable[Concatenate[Any, Parameters], Result]) -> Callable[Concatenate[Any, Parameters], Result]:
    """A method that is one call of the context behind `self._handles`: it waits for the one before.

    It raises BusyError inside another call, ClosedError on a closed context.

    The lock is released by try and finally, not by `with`: Python 3.14 looks for signals between a lock's __enter__ and
    the body (its issue 148874), and an interrupt there would leave it taken for good.
    """

    @functools.wraps(method)
    def call(self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        handles: ContextHandles = self._handles
        handles.refuse_nested()
        try:
            handles.lock.acquire()
            handles.refuse_closed()
            return method(self, *args, **kwargs)
        finally:
            try:  # noqa: SIM105 (suppress is Python: an interrupt in it would come before the release)
                handles.lock.release()
            except RuntimeError:  # an interrupt came while it was waited for
                pass

    return call


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
    # (A third one within the same microseconds could.)
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
