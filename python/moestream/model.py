"""A loaded model: placement and streaming options in, tokens, text and contexts out.

The C handles live in one object that frees them once, in the right order, whichever way a program ends. `close` waits
for the calls in flight; garbage collection and interpreter exit are only the net below it.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from moestream import _native_api as native
from moestream import checks, logs
from moestream._calls import refuse_after_fork, uninterrupted
from moestream.errors import ClosedError, InternalError, UnsupportedError
from moestream.load_modes import load_modes, locked_bytes, mode_used, set_load_mode
from moestream.placement import (
    ExpertLayers,
    Overrides,
    Placement,
    PlaceOptions,
    model_placement,
    open_store,
)
from moestream.progress import Progress, ProgressOption
from moestream.stats import stats_dict
from moestream.stream import Stream

if TYPE_CHECKING:
    from moestream.context import Context

KVOverrides = Mapping[str, int | float | bool | str]


class _Loading(threading.local):
    """What the progress callback of a load in this thread needs, and what it caught."""

    progress: Progress | None = None
    caught: BaseException | None = None


_loading = _Loading()


def _progress_failed(kind: Any, error: BaseException, traceback: Any) -> None:
    """An exception (Ctrl-C as well) inside the callback: the load is stopped, and raises it afterwards."""
    _loading.caught = error


def _progress_called(fraction: float, _user: Any) -> bool:
    if _loading.progress is not None:
        _loading.progress.update(fraction)
    return _loading.caught is None


native.ffi.def_extern(name="ms_native_progress", error=False, onerror=_progress_failed)(_progress_called)


class ModelHandles:
    """The store and the llama_model of one model, and how many users they have. Frees them once, in order."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        # C writes to these itself: an interrupt between its return and an assignment here would lose what it made.
        self.store_cell: Any = native.ffi.new("moestream **")
        self.model_cell: Any = native.ffi.new("struct llama_model **")
        self.keep: list[Any] = []  # arrays that C points into while the model lives
        # No lock, which an interrupt could leave taken: a list's append and pop are one step each, and who comes in
        # looks at _closing behind it, as who closes looks at the users behind setting that.
        self._users: list[None] = []
        self._closing = False
        self._left: queue.SimpleQueue[None] = queue.SimpleQueue()  # of users, while closing

    def enter(self) -> None:
        """Holds the handles open for one call or one context. Raises ClosedError once closing has begun, and in a
        process forked since."""
        refuse_after_fork(self.pid)
        self._users.append(None)
        if self._closing:
            self.leave()
            raise ClosedError("the model was used after it was closed")

    def leave(self) -> None:
        self._users.pop()
        if self._closing:
            self._left.put(None)

    @property
    def store(self) -> Any:
        """The moestream *, NULL before it is opened and after it is closed."""
        return self.store_cell[0]

    @property
    def model(self) -> Any:
        """The llama_model *, NULL before it is loaded and after it is freed."""
        return self.model_cell[0]

    @property
    def closing(self) -> bool:
        return self._closing

    def free(self, timeout: float | None = None) -> None:
        """Refuses new users, waits for those there are, frees. With a timeout (interpreter exit): leaks rather than
        frees under a call that does not end."""
        if self.pid != os.getpid():
            return  # the parent's
        self._closing = True
        until = None if timeout is None else time.monotonic() + timeout
        while self._users:
            if until is not None and time.monotonic() >= until:
                return
            with suppress(queue.Empty):  # several may wait for the same user to leave
                self._left.get(timeout=0.1)
        if timeout is None:
            uninterrupted(self._free_now)
        else:
            self._free_now()  # at exit a helper thread can no longer be counted on

    def _free_now(self) -> None:
        model, self.model_cell[0] = self.model, native.ffi.NULL
        store, self.store_cell[0] = self.store, native.ffi.NULL
        if model != native.ffi.NULL:
            native.lib.llama_model_free(model)
        if store != native.ffi.NULL:
            err = native.new_error()
            native.check(native.lib.moestream_close(store, err), err)
        self.keep.clear()


def _free_at_exit(handles: ModelHandles) -> None:
    handles.free(timeout=0.2)  # contexts went first, and took their time


class Model:
    """A model loaded by llama.cpp, with its routed experts where the options put them.

    Args:
        path: a GGUF file, or the first shard of a split one.
        stream: Stream(...) or True streams the routed experts from the file; None loads as llama.cpp does.
        n_gpu_layers: blocks whose dense weights go to devices; -1 for all.
        cpu_moe: keep all routed experts in CPU memory.
        n_cpu_moe: keep the routed experts of the first N blocks in CPU memory.
        cpu_moe_layers: keep the routed experts of these blocks in CPU memory, for example [0, 1, 24, 25] where two
            devices hold 24 blocks each.
        expert_layers: places for the routed experts of blocks: {"RPC0[host:port]": [0, 1], "STREAM": range(2, 8)}.
        overrides: rules tried before all of those: pairs (pattern, place), a dict, or "pattern=PLACE,pattern=PLACE".
        progress: True draws a bar on stderr while loading; a function is called with the fraction done.
        load_mode: "auto", "none", "mmap", "mlock", "mmap+mlock" or "dio", as llama.cpp names them. Streaming sets
            its own and takes only "auto" or "mmap". The attribute `load_mode` says which one was really used.
        use_extra_bufts: let llama.cpp repack weights it keeps in CPU memory, which moves the last digits of the
            logits. None: False when streaming, llama.cpp's default otherwise.
        devices: names of the ggml devices to use; None for llama.cpp's choice.
        split_mode: "none", "layer", "row" or "tensor": how several devices share the model.
        main_gpu: the device for everything with split_mode "none".
        tensor_split: share of the model per device.
        kv_overrides: metadata values to use instead of the file's.
        strict: raise where a rule matches nothing, or anything else deserves a warning, before weights are read.
        vocab_only: load only the vocabulary.

    Raises:
        ReadError, TruncatedError, FormatError: the file; FileMissingError is a FileNotFoundError.
        InvalidError, ValueError, TypeError: an option that makes no sense, named.
        UnsupportedError: streaming asked for a model without experts, or a reader that is refused here.
        OutOfMemoryError: a cache below the minimum (the number is in the message), or memory was refused.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        stream: Stream | bool | None = None,
        n_gpu_layers: int = 0,
        cpu_moe: bool = False,
        n_cpu_moe: int = 0,
        cpu_moe_layers: Iterable[int] | None = None,
        expert_layers: ExpertLayers = None,
        overrides: Overrides = None,
        progress: ProgressOption = False,
        load_mode: str = "auto",
        use_extra_bufts: bool | None = None,
        devices: Sequence[str] | None = None,
        split_mode: Literal["none", "layer", "row", "tensor"] | None = None,
        main_gpu: int | None = None,
        tensor_split: Sequence[float] | None = None,
        kv_overrides: KVOverrides | None = None,
        strict: bool = False,
        vocab_only: bool = False,
    ) -> None:
        for name, value in {"strict": strict, "vocab_only": vocab_only}.items():
            checks.switch(name, value)
        checks.switch("use_extra_bufts", use_extra_bufts, or_none=True)
        if not callable(progress):
            checks.switch("progress", progress)
        self._handles = ModelHandles()
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, _free_at_exit, self._handles)
        self._options = PlaceOptions.of(
            stream=stream,
            n_gpu_layers=n_gpu_layers,
            cpu_moe=cpu_moe,
            n_cpu_moe=n_cpu_moe,
            cpu_moe_layers=cpu_moe_layers,
            overrides=overrides,
            expert_layers=expert_layers,
        )
        if self._options.stream is not None and load_mode not in ("auto", "mmap"):
            raise ValueError(f"load_mode was {load_mode!r}; a streamed model is loaded with its own, leave it at auto")
        if self._options.stream is not None and vocab_only:
            raise ValueError("vocab_only and stream were both given; a vocabulary has no experts to stream")
        if self._options.stream is not None and use_extra_bufts is None:
            use_extra_bufts = False
        native.bind()
        checks.one_of("load_mode", load_mode, load_modes())
        logs.forget()
        self.path = os.fsdecode(native.encode_path(path))
        try:
            self.plan = open_store(self.path, self._options, self._handles.store_cell, strict=strict)
            params = self._model_params(
                load_mode, use_extra_bufts, devices, split_mode, main_gpu, tensor_split, kv_overrides, vocab_only
            )
            locked = locked_bytes()
            self._load(params, progress)
        except BaseException:
            self._finalizer()
            logs.drain()
            raise
        model = self._handles.model
        # Streaming sets its own mode; the mapping is not read then.
        self.load_mode: str = (
            "mmap" if self.streaming else mode_used(self.placement(), load_mode, self.path, locked_bytes() > locked)
        )
        self._vocab = native.lib.llama_model_get_vocab(model)
        self.n_vocab: int = native.lib.llama_vocab_n_tokens(self._vocab)
        self.n_layer: int = native.lib.llama_model_n_layer(model)
        self.n_embd: int = native.lib.llama_model_n_embd(model)
        self.n_ctx_train: int = native.lib.llama_model_n_ctx_train(model)
        self.n_expert: int = self.plan.n_expert
        self.vocab_only = vocab_only
        logs.drain()

    # ---- loading ----------------------------------------------------------------------------------------------------

    def _model_params(
        self,
        load_mode: str,
        use_extra_bufts: bool | None,
        devices: Sequence[str] | None,
        split_mode: str | None,
        main_gpu: int | None,
        tensor_split: Sequence[float] | None,
        kv_overrides: KVOverrides | None,
        vocab_only: bool,
    ) -> Any:
        ffi, lib, keep = native.ffi, native.lib, self._handles.keep
        params = ffi.new("struct llama_model_params *", lib.llama_model_default_params())
        fields = {name for name, _ in ffi.typeof("struct llama_model_params").fields}
        params.n_gpu_layers = self._options.n_gpu_layers
        params.vocab_only = vocab_only
        if load_mode != "auto":
            set_load_mode(params, fields, load_mode)
        if use_extra_bufts is not None:
            if "use_extra_bufts" not in fields:
                raise UnsupportedError("use_extra_bufts: this llama.cpp has no such option")
            params.use_extra_bufts = use_extra_bufts
        if devices is not None:
            params.devices = _device_list(devices, keep)
        if split_mode is not None:
            params.split_mode = native.enumerator(
                "split_mode", f"LLAMA_SPLIT_MODE_{str(split_mode).upper()}", split_mode
            )
        if main_gpu is not None:
            params.main_gpu = checks.whole("main_gpu", main_gpu, -1, 2**31 - 1)
        if tensor_split is not None:
            most = lib.llama_max_devices()
            given = checks.listed("tensor_split", tensor_split, f"up to {most} shares, 0 or more")
            if len(given) > most:
                raise ValueError(f"tensor_split has {len(given)} shares; there are at most {most} devices")
            given = [checks.real("tensor_split", share, 0, 1e30, "a list of numbers") for share in given]
            shares = ffi.new("float[]", [*given, *[0.0] * (most - len(given))])
            keep.append(shares)
            params.tensor_split = shares
        if kv_overrides is not None:
            params.kv_overrides = _kv_override_list(kv_overrides, keep)
        params.progress_callback = native._raw.ms_native_progress
        return params

    def _load(self, params: Any, progress: ProgressOption) -> None:
        err = native.new_error()
        shown = Progress(progress, "loading")
        _loading.progress, _loading.caught = shown, None
        try:
            status = native.lib.moestream_load_model(self._handles.store, self._handles.model_cell, params, err)
        finally:
            caught, _loading.progress, _loading.caught = _loading.caught, None, None
            shown.close()
        if caught is not None:
            raise caught
        native.check(status, err, self.path)

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for calls in flight, closes the contexts, frees the model, ends the store. Calling it again is fine."""
        if not self._finalizer.alive:
            return
        for context in list(self._contexts):
            context.close()
        self._handles.free()
        self._finalizer.detach()
        logs.forget()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._handles.closing else self.describe()
        return f"<moestream.Model {Path(self.path).name}: {state}>"

    @contextmanager
    def _using(self) -> Iterator[Any]:
        """The llama_model pointer, held open."""
        self._handles.enter()
        try:
            yield self._handles.model
        finally:
            self._handles.leave()

    # ---- contexts ---------------------------------------------------------------------------------------------------

    def context(self, n_ctx: int | None = None, **options: Any) -> Context:
        """A context to decode in; options as for moestream.Context."""
        from moestream.context import Context

        return Context(self, n_ctx, **options)

    @property
    def streaming(self) -> bool:
        """Whether routed experts are streamed from the file."""
        return self._options.stream is not None

    # ---- text -------------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The tokens of a text.

        Args:
            add_special: begin and end as the model was trained to (usually with its BOS token).
            parse_special: read "<|im_end|>" and the like as control tokens instead of as plain text.

        Raises:
            TypeError: not a str. ValueError: a str that was read from bytes that are not UTF-8.
        """
        raw = checks.utf8("text", text)
        ffi, lib = native.ffi, native.lib
        with self._using():
            size = len(raw) + 2
            for _ in range(2):
                out = ffi.new("int32_t[]", size)
                n = lib.llama_tokenize(self._vocab, raw, len(raw), out, size, add_special, parse_special)
                if n >= 0:
                    return list(out[0:n])
                if n == -(2**31):
                    break
                size = -n
        raise InternalError(f"llama.cpp could not tokenise a text of {len(raw)} bytes")

    def detokenize(self, tokens: Sequence[int], remove_special: bool = False, unparse_special: bool = False) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD.

        Raises:
            TypeError: not a list of whole numbers. ValueError: a token outside the vocabulary.
        """
        ids = checks.token_list(tokens, self.n_vocab)
        ffi, lib = native.ffi, native.lib
        with self._using():
            array, size = ffi.new("int32_t[]", ids), 8 * len(ids) + 16
            for _ in range(2):
                buf = ffi.new("char[]", size)
                n = lib.llama_detokenize(self._vocab, array, len(ids), buf, size, remove_special, unparse_special)
                if n >= 0:
                    return bytes(ffi.buffer(buf, n)).decode("utf-8", "replace")
                size = -n
        raise InternalError(f"llama.cpp could not turn {len(ids)} tokens into text")

    def token_to_piece(self, token: int, special: bool = True) -> bytes:
        """The bytes a token stands for (not always whole characters); control tokens give b"" without `special`."""
        (number,) = checks.token_list([token], self.n_vocab)
        with self._using():
            return self._piece(number, special)

    def _piece(self, token: int, special: bool) -> bytes:
        """token_to_piece for a caller that has checked and holds the model."""
        ffi, lib, size = native.ffi, native.lib, 64
        for _ in range(2):
            buf = ffi.new("char[]", size)
            n = lib.llama_token_to_piece(self._vocab, token, buf, size, 0, special)
            if n >= 0:
                return bytes(ffi.buffer(buf, n))
            size = -n
        raise InternalError(f"llama.cpp could not turn token {token} into text")

    def is_eog(self, token: int) -> bool:
        """Whether a token ends a generation. ValueError: a token outside the vocabulary."""
        (number,) = checks.token_list([token], self.n_vocab)
        with self._using():
            return bool(native.lib.llama_vocab_is_eog(self._vocab, number))

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja text), None if it has none."""
        with self._using() as model:
            pointer = native.lib.llama_model_chat_template(model, native.ffi.NULL)
            return None if pointer == native.ffi.NULL else native.text(pointer)

    def apply_chat_template(
        self, messages: Iterable[Mapping[str, str]], add_assistant: bool = True, template: str | None = None
    ) -> str:
        """The prompt for a conversation, through llama.cpp's template support (no Jinja engine: known templates only).

        Args:
            messages: {"role": ..., "content": ...} each.
            add_assistant: end with what opens the assistant's turn.
            template: use this template, or the name of one that llama.cpp knows, instead of the model's.

        Raises:
            UnsupportedError: the model has no template, or not one that llama.cpp knows.
            ValueError: a message without role or content. TypeError: no list of messages, or no text as template.
        """
        given = checks.listed("messages", messages, '{"role": text, "content": text}')
        if template is not None:
            checks.utf8("template", template)
        ffi = native.ffi
        rows, keep, size = [], [], 256
        for message in given:
            parts = [message.get(name) for name in ("role", "content")] if isinstance(message, Mapping) else [None]
            if not all(isinstance(part, str) for part in parts):
                raise ValueError(f'a message was {checks.shown(message)}; it is {{"role": text, "content": text}}')
            pair = [ffi.new("char[]", checks.utf8("a message", part)) for part in parts]
            keep += pair
            size += 2 * (len(pair[0]) + len(pair[1]))
            rows.append({"role": pair[0], "content": pair[1]})
        chosen = template or self.chat_template
        if chosen is None:
            raise UnsupportedError("the model has no chat template; give one, or use a plain prompt")
        array = ffi.new("struct llama_chat_message[]", rows)
        for _ in range(2):
            buf = ffi.new("char[]", size)
            n = native.lib.llama_chat_apply_template(chosen.encode("utf-8"), array, len(rows), add_assistant, buf, size)
            if n < 0:
                raise UnsupportedError("llama.cpp does not know this chat template; pass template= or a plain prompt")
            if n <= size:
                return bytes(ffi.buffer(buf, n)).decode("utf-8", "replace")
            size = n
        raise InternalError("llama.cpp could not apply the chat template")

    # ---- what it is, what it does -----------------------------------------------------------------------------------

    @property
    def desc(self) -> str:
        """llama.cpp's short description: architecture, size, quantisation."""
        with self._using() as model:
            return _filled(lambda buf, n: native.lib.llama_model_desc(model, buf, n))

    @property
    def meta(self) -> dict[str, str]:
        """The file's metadata as text (arrays are not included)."""
        lib = native.lib
        with self._using() as model:
            return {
                _filled(lambda b, n, i=i: lib.llama_model_meta_key_by_index(model, i, b, n)): _filled(
                    lambda b, n, i=i: lib.llama_model_meta_val_str_by_index(model, i, b, n)
                )
                for i in range(lib.llama_model_meta_count(model))
            }

    def placement(self) -> Placement:
        """Where each tensor is: the rule that won, the planned place and the buffer type that really holds it."""
        with self._using() as model:
            return model_placement(model, self.plan)

    def describe(self) -> str:
        """One line that says what is on: layers, bytes, reader, direct or not, and why."""
        with self._using():
            return native.text(native.lib.moestream_describe(self._handles.store))

    def stats(self) -> dict[str, Any]:
        """Totals of the expert store since it was opened: the fields of moestream_stats, and `hit_rate`."""
        with self._using():
            stats = native.new_struct("moestream_stats")
            native.check(native.lib.moestream_get_stats(self._handles.store, stats))
            return stats_dict(stats)

    def choices(self) -> dict[str, str]:
        """What streaming chose and why: "io", "direct", "queue_depth", "prefetch", each as "value: reason". Empty for a
        model that is not streamed."""
        with self._using():
            buf = native.ffi.new("char[]", 1000)
            native.lib.moestream_choices(self._handles.store, buf, len(buf))
            lines = native.ffi.string(buf).decode("utf-8", "replace").splitlines()
        return dict(line.split("=", 1) for line in lines)

    def resize(self, cache: int | str) -> None:
        """Changes the cache size between calls; shrinking gives memory back at once.

        Raises:
            OutOfMemoryError: below the minimum, or memory was refused. BusyError: a call is running.
            ValueError: not a size, or "auto". UnsupportedError: the model is not streamed.
        """
        from moestream.sizes import parse_cache

        size = parse_cache(cache)
        if not self.streaming:
            raise UnsupportedError("the model is not streamed; it has no cache")
        if size.kind == "auto" or size.is_none:
            raise ValueError(f"cache was {cache!r}; give a size to change to")
        err = native.new_error()
        with self._using():
            n_bytes = size.resolve(self.plan.full_cache_bytes, self.plan.min_cache_bytes)
            native.check(native.lib.moestream_resize(self._handles.store, n_bytes, err), err)
        logs.drain()


def _filled(call: Any) -> str:
    """The text a C function writes into a buffer and returns the length of; "" on failure."""
    size = 256
    for _ in range(2):
        buf = native.ffi.new("char[]", size)
        n = call(buf, size)
        if n < size:
            return native.text(buf) if n >= 0 else ""
        size = n + 1
    return native.text(buf)


def device_names() -> list[str]:
    """Names of the ggml devices there are, "CPU" among them."""
    lib = native.lib
    return [
        native.text(lib.ggml_backend_dev_name(lib.ggml_backend_dev_get(i))) for i in range(lib.ggml_backend_dev_count())
    ]


def _device_list(names: Sequence[str], keep: list[Any]) -> Any:
    ffi, lib = native.ffi, native.lib
    found = []
    for name in checks.listed("devices", names, "names such as ['CUDA0']"):
        device = lib.ggml_backend_dev_by_name(checks.utf8("devices: a name", name))
        if device == ffi.NULL:
            raise ValueError(f"device {name!r} was not found; there are {', '.join(device_names())}")
        found.append(device)
    keep.append(ffi.new("ggml_backend_dev_t[]", [*found, ffi.NULL]))
    return keep[-1]


def _kv_override_list(overrides: KVOverrides, keep: list[Any]) -> Any:
    ffi, lib = native.ffi, native.lib
    if not isinstance(overrides, Mapping):
        raise TypeError(f"kv_overrides was {checks.shown(overrides)}; it is a mapping of metadata keys to values")
    array = ffi.new("struct llama_model_kv_override[]", len(overrides) + 1)  # the last one, empty, ends the list
    for row, (key, value) in zip(array, overrides.items(), strict=False):
        raw = checks.utf8("kv_overrides: a key", key)
        if not 0 < len(raw) < 128:
            raise ValueError(f"kv_overrides: the key {key!r} has {len(raw)} bytes; 1 to 127 are allowed")
        row.key = raw
        if isinstance(value, bool):
            row.tag, row.val_bool = lib.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            row.tag, row.val_i64 = lib.LLAMA_KV_OVERRIDE_TYPE_INT, value
        elif isinstance(value, float):
            row.tag, row.val_f64 = lib.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
        elif isinstance(value, str) and len(value.encode()) < 128:
            row.tag, row.val_str = lib.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()
        else:
            raise ValueError(
                f"kv_overrides: the value of {key!r} was {checks.shown(value)}; int, float, bool or a short text"
            )
    keep.append(array)
    return array


__all__ = ["Model", "device_names"]
