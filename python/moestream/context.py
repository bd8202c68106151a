"""A context: tokens in, logits and text out. One call at a time; another thread waits for it.

A failed call leaves the context as it was before it, so that a retry is right. Logits are copied once, out of
llama.cpp's buffer, because the next call overwrites that buffer; `generate` samples in place and copies nothing.

Interrupts: prompts, and everything that may wait for a disk, are decoded in a helper thread while the main thread
waits, so Ctrl-C stops them between two nodes of the graph or while reads are awaited. A single token of a resident
model is decoded in the calling thread, and Ctrl-C acts after it (see `_decode_batch`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from moestream import _native_api as native
from moestream import advice, checks, context_options, logs
from moestream._calls import ContextHandles, in_helper_thread, one_call, uninterrupted
from moestream.errors import (
    ClosedError,
    ContextFullError,
    InternalError,
    InvalidError,
    UnsupportedError,
)
from moestream.generation import Generation
from moestream.sampling import SamplingOptions, TextStream
from moestream.stats import stats_dict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from moestream.model import Model

    FloatArray = npt.NDArray[np.float32]

Tokens = Sequence[int] | Any  # a sequence of ints or a one-dimensional integer numpy array


class Context:
    """Decoding state of one model: its KV cache, threads and outputs.

    Args:
        model: a loaded Model; it stays open as long as the context is.
        n_ctx: tokens of context; None for 4096 or what the model was trained with, if less; 0 for all of the latter.
        n_batch: most tokens given to llama.cpp at once (longer input is split).
        n_ubatch: most tokens computed at once.
        n_threads: compute threads for single tokens; None for the physical cores available to this process.
        n_threads_batch: compute threads for prompts; None for the same.
        n_seq_max: independent sequences.
        embeddings: also compute embeddings.
        pooling: "none", "mean", "cls", "last", "rank"; None for the model's own.
        flash_attn: True, False, or None for llama.cpp's choice.
        type_k, type_v: storage type of the KV cache: "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1" or
            "iq4_nl"; None for llama.cpp's choice.
        kv_unified: share one buffer among the sequences; None for llama.cpp's choice.
        offload_kqv: keep the KV cache on the device; None for llama.cpp's choice.
        threadpool: give the context threads that live as long as it does (llama.cpp's own tools do the same).
        eval_callback: llama.cpp's cb_eval and its user data, addresses of a C function and of its state (None for no
            state), each an int or a cffi pointer; both live as long as the context. Streaming asks it, too.

    Raises:
        ValueError, TypeError: an option that makes no sense, named. InternalError: llama.cpp refused, and said why.
        UnsupportedError: the model has a vocabulary only (vocab_only), or this llama.cpp has no such option.
    """

    def __init__(
        self,
        model: Model,
        n_ctx: int | None = None,
        *,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        n_seq_max: int = 1,
        embeddings: bool = False,
        pooling: str | None = None,
        flash_attn: bool | None = None,
        type_k: str | None = None,
        type_v: str | None = None,
        kv_unified: bool | None = None,
        offload_kqv: bool | None = None,
        threadpool: bool = True,
        eval_callback: tuple[Any, Any] | None = None,
    ) -> None:
        if model.vocab_only:
            raise UnsupportedError("the model was loaded with vocab_only; it has no weights to decode with")
        self.model = model
        sizes = context_options.sizes(
            model.n_ctx_train, n_ctx, n_batch, n_ubatch, n_threads, n_threads_batch, n_seq_max
        )
        checks.switch("embeddings", embeddings)
        checks.switch("threadpool", threadpool)
        choices = {"flash_attn": flash_attn, "kv_unified": kv_unified, "offload_kqv": offload_kqv}
        for name, value in choices.items():
            checks.switch(name, value, or_none=True)
        self._handles = ContextHandles(model._handles)
        self._finalizer = weakref.finalize(self, self._handles.free_at_exit)
        try:
            params = context_options.make_params(
                {**sizes, "embeddings": embeddings, "kv_unified": kv_unified, "offload_kqv": offload_kqv},
                type_k=type_k,
                type_v=type_v,
                pooling=pooling,
                flash_attn=flash_attn,
                eval_callback=eval_callback,
                abort_flag=self._handles.abort_flag,
            )
            self._callback = eval_callback  # has to live as long as the context
            # Each sequence has a buffer of its own then, and llama.cpp ends the process if asked to copy a part of one.
            self._separate = sizes["n_seq_max"] > 1 and not getattr(params, "kv_unified", True)
            uninterrupted(lambda: self._create(params, sizes["n_threads"], sizes["n_threads_batch"], threadpool))
        except BaseException:
            self._handles.free()
            self._finalizer.detach()
            logs.drain()
            raise
        self._read_sizes(embeddings)
        self._make_batch()
        self._lost: str | None = None
        self.advised = False
        model._contexts.add(self)
        logs.drain()

    # ---- making it --------------------------------------------------------------------------------------------------

    def _create(self, params: Any, n_threads: int, n_threads_batch: int, threadpool: bool) -> None:
        ffi, lib, handles = native.ffi, native.lib, self._handles
        err = native.new_error()
        handles.enter()
        if self.model.streaming:
            out = ffi.new("moestream_context **")
            native.check(lib.moestream_context_init(out, handles.model.store, params, err), err)
            handles.hook = out[0]
        handles.context = lib.llama_init_from_model(handles.model.model, params[0])
        if handles.context == ffi.NULL:
            said = logs.last_llama_error()
            raise InternalError(f"llama.cpp did not make the context: {said or 'it did not say why'}")
        if not threadpool:
            return
        if handles.hook != ffi.NULL:
            native.check(
                lib.moestream_context_attach(handles.hook, handles.context, n_threads, n_threads_batch, err), err
            )
        else:
            self._attach_pools(n_threads, n_threads_batch)

    def _attach_pools(self, n_threads: int, n_threads_batch: int) -> None:
        """A resident context gets what a streamed one gets, so that the two are comparable."""
        ffi, lib, handles = native.ffi, native.lib, self._handles
        try:
            new, default, attach = (
                lib.ggml_threadpool_new,
                lib.ggml_threadpool_params_default,
                lib.llama_attach_threadpool,
            )
        except AttributeError:  # this llama.cpp makes its threads itself
            return
        for n in dict.fromkeys((n_threads, n_threads_batch)):
            params = ffi.new("struct ggml_threadpool_params *", default(n))
            pool = new(params)
            if pool == ffi.NULL:
                raise InternalError(f"ggml could not start {n} threads")
            handles.pools.append(pool)
        attach(handles.context, handles.pools[0], handles.pools[-1])

    def _read_sizes(self, embeddings: bool) -> None:
        lib, pointer = native.lib, self._handles.context
        self.n_ctx: int = lib.llama_n_ctx(pointer)
        self.n_batch: int = lib.llama_n_batch(pointer)
        self.n_ubatch: int = lib.llama_n_ubatch(pointer)
        self.n_seq_max: int = lib.llama_n_seq_max(pointer)
        self.n_threads: int = lib.llama_n_threads(pointer)
        self.n_threads_batch: int = lib.llama_n_threads_batch(pointer)
        self._embeddings = embeddings
        self._memory = lib.llama_get_memory(pointer)
        try:
            self._n_ctx_seq: int | None = lib.llama_n_ctx_seq(pointer)
            if lib.llama_model_is_recurrent(self._handles.model.model):
                self._n_ctx_seq = None  # its state does not grow with the text
        except AttributeError:
            self._n_ctx_seq = None

    def _make_batch(self) -> None:
        import numpy as np

        ffi, n = native.ffi, self.n_batch
        self._seq_cell = ffi.new("int32_t *")
        arrays = {
            "token": ffi.new("int32_t[]", n),
            "pos": ffi.new("int32_t[]", n),
            "n_seq_id": ffi.new("int32_t[]", [1] * n),
            "seq_id": ffi.new("int32_t *[]", [self._seq_cell] * n),
            "logits": ffi.new("int8_t[]", n),
        }
        self._batch_arrays = arrays  # C reads them in each call
        self._batch = ffi.new("struct llama_batch *", arrays)
        self._token = np.frombuffer(ffi.buffer(arrays["token"]), dtype=np.int32)
        self._pos = np.frombuffer(ffi.buffer(arrays["pos"]), dtype=np.int32)
        self._wants = np.frombuffer(ffi.buffer(arrays["logits"]), dtype=np.int8)

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for the call in flight and frees the context. Calling it again is fine.

        Raises:
            BusyError: called from inside one of its own calls.
        """
        if self._finalizer.alive:
            self._handles.free()
            self._finalizer.detach()
            logs.forget()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def cancel(self) -> None:
        """Asks the running decode, if any, to stop; it then raises ClosedError in its own thread. Any thread."""
        self._handles.cancel()

    # ---- decoding ---------------------------------------------------------------------------------------------------

    @one_call
    def decode(
        self,
        tokens: Tokens,
        *,
        pos: int | None = None,
        seq_id: int = 0,
        logits: Literal["last", "all", "none"] = "last",
    ) -> FloatArray:
        """Runs the model over tokens and returns their logits.

        Args:
            tokens: token numbers, one or more; more than n_batch are given to llama.cpp in pieces.
            pos: position of the first one; None continues the sequence. A smaller position than that first drops
                what the sequence holds from there on.
            seq_id: the sequence, 0 to n_seq_max - 1.
            logits: for which tokens.

        Returns:
            float32 [n_outputs, n_vocab], the caller's own copy; n_outputs is 1, len(tokens) or 0.

        Raises:
            ValueError: no tokens, a token outside the vocabulary, a position behind a gap.
            ContextFullError: no room for them. ReadError and others: see the errors module.
            After any of these the context is as it was (dropped positions stay dropped); if llama.cpp cannot take
            back a part (recurrent models), the next call says so until `clear()`.
        """
        import numpy as np

        if logits not in ("last", "all", "none"):
            raise ValueError(f'logits was {logits!r}; it is "last", "all" or "none"')
        ids = self._checked_tokens(tokens)
        n_outputs = {"last": 1, "all": len(ids), "none": 0}[logits]
        pointer = self._handles.context
        out = np.empty((n_outputs, self.model.n_vocab), dtype=np.float32)
        done = 0

        def copy(n: int) -> None:
            nonlocal done
            if n:
                out[done : done + n] = self._view(native.lib.llama_get_logits(pointer), n, self.model.n_vocab)
                done += n

        self._decode(ids, pos, seq_id, logits, copy)
        return out

    def _decode(
        self, ids: Any, pos: int | None, seq_id: int, logits: str, each: Callable[[int], None] | None = None
    ) -> None:
        """decode() without its result; the caller holds the call. `each` is told the outputs of every piece."""
        import numpy as np

        start = self._start(pos, seq_id, len(ids))
        lib, hook = native.lib, self._handles.hook
        if hook != native.ffi.NULL:
            if len(ids) > self.n_ubatch and not self.advised:
                advice.long_prompt(self, len(ids))
            # a cancel() that came when the last call had just ended
            lib.moestream_context_status(hook, native.ffi.NULL)
            lib.moestream_context_begin_call(hook)
        native._raw.ms_native_set_flag(self._handles.abort_flag, 0)
        self._seq_cell[0] = seq_id
        try:
            for begin in range(0, len(ids), self.n_batch):
                n = min(self.n_batch, len(ids) - begin)
                self._token[:n] = ids[begin : begin + n]
                self._pos[:n] = np.arange(start + begin, start + begin + n, dtype=np.int32)
                self._wants[:n] = logits == "all"
                last = begin + n == len(ids)
                if last and logits == "last":
                    self._wants[n - 1] = 1
                self._batch.n_tokens = n
                self._raise_for(self._decode_batch(n), start + begin, n)
                if each is not None:
                    each(n if logits == "all" else int(last and logits == "last"))
            logs.drain()
        except BaseException:
            self._take_back(seq_id, start)
            logs.drain(explained=True)
            raise

    def _start(self, pos: int | None, seq_id: int, n: int) -> int:
        if self._lost is not None:
            raise InvalidError(f"{self._lost}; call clear() before decoding again")
        seq_id = self._checked_seq(seq_id)
        n_past = native.lib.llama_memory_seq_pos_max(self._memory, seq_id) + 1
        start = n_past if pos is None else checks.whole("pos", pos, 0, n_past, " (the tokens that the sequence holds)")
        if self._n_ctx_seq is not None and start + n > self._n_ctx_seq:
            raise ContextFullError(
                f"{n} tokens did not fit at position {start}: the context holds {self._n_ctx_seq} per sequence"
            )
        if start < n_past and not native.lib.llama_memory_seq_rm(self._memory, seq_id, start, -1):
            raise UnsupportedError(f"this model cannot go back to position {start}; clear() and start again")
        return start

    def _decode_batch(self, n: int) -> int:
        """llama_decode of what is in the batch arrays.

        The one place that decides how a decode can be interrupted. Python runs its signal handlers in the main
        thread between bytecodes, which a call into C holds up. So where the call may take long, a helper thread makes
        it and the main thread waits, ready for Ctrl-C; a single token from memory is over before anybody would notice.
        """
        handles = self._handles
        in_memory = n == 1 and handles.hook == native.ffi.NULL
        if in_memory or threading.current_thread() is not threading.main_thread():
            return int(native.lib.llama_decode(handles.context, self._batch[0]))
        return in_helper_thread(lambda: int(native.lib.llama_decode(handles.context, self._batch[0])), self.cancel)

    def _raise_for(self, result: int, start: int, n: int) -> None:
        """Raises for what llama_decode returned; the store's reason goes first, whatever it returned."""
        handles = self._handles
        if result and handles.at_exit:
            raise SystemExit
        if handles.hook != native.ffi.NULL:
            err = native.new_error()
            native.check(native.lib.moestream_context_status(handles.hook, err), err, self.model.path)
        if result == 0:
            return
        if result == 1:
            raise ContextFullError(
                f"{n} tokens did not fit at position {start}: the context holds {self.n_ctx} for all sequences"
            )
        if result == 2:
            raise ClosedError("the decode was cancelled")
        said = logs.last_llama_error()
        raise InternalError(f"llama_decode returned {result}: {said or 'llama.cpp did not say why'}")

    def _take_back(self, seq_id: int, start: int) -> None:
        """Drops what a failed call left: its reason, if nobody asked for it, and its part of the KV cache."""
        # until it is known to be otherwise, should an interrupt come
        self._lost = f"a failed call left sequence {seq_id} in a state that this model cannot take back"
        if self._handles.hook != native.ffi.NULL:
            native.lib.moestream_context_status(self._handles.hook, native.ffi.NULL)
        if native.lib.llama_memory_seq_rm(self._memory, seq_id, start, -1):
            self._lost = None

    def _checked_tokens(self, tokens: Tokens) -> Any:
        return checks.token_array(tokens, self.model.n_vocab)

    def _checked_seq(self, seq_id: Any, name: str = "seq_id") -> int:
        """A sequence that there is; llama.cpp ends the process for one that there is not."""
        return checks.whole(name, seq_id, 0, self.n_seq_max - 1, "" if self.n_seq_max > 1 else " (n_seq_max is 1)")

    def _view(self, pointer: Any, rows: int, columns: int) -> Any:
        """llama.cpp's own float buffer as an array; valid until the next call."""
        import numpy as np

        if pointer == native.ffi.NULL:
            raise InternalError("llama.cpp gave no output for the call")
        return np.frombuffer(native.ffi.buffer(pointer, rows * columns * 4), dtype=np.float32).reshape(rows, columns)

    # ---- text -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Tokens,
        max_tokens: int = 256,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        seq_id: int = 0,
        parse_special: bool = False,
        special: bool = False,
        ignore_eog: bool = False,
    ) -> Generation:
        """Continues a prompt, piece by piece: `for piece in context.generate("Once"): print(piece, end="")`.

        Args:
            prompt: text, or tokens. It is added to what the sequence holds (`clear()` first for a fresh start); text
                gets the model's BOS token only where the sequence is empty.
            max_tokens: the most tokens to make.
            temperature, top_k, top_p, min_p, seed: see SamplingOptions; the default takes the most likely token.
            stop: texts at which the output ends; they are not part of it.
            parse_special: read "<|im_end|>" and the like in the prompt as control tokens.
            special: show control tokens in the output.
            ignore_eog: go on after a token that ends a generation.

        Returns:
            An iterator over pieces of str; see Generation for what else it knows. The last token it made is not in
            the KV cache.

        Raises:
            ValueError: an option that makes no sense, an empty prompt. The errors of decode, while iterating.
        """
        options = SamplingOptions(temperature, top_k, top_p, min_p, seed)
        checks.whole("max_tokens", max_tokens, 1, 2**31 - 1)
        seq_id = self._checked_seq(seq_id)
        switches = {"parse_special": parse_special, "special": special, "ignore_eog": ignore_eog}
        for name, value in switches.items():
            checks.switch(name, value)
        if isinstance(prompt, str):
            prompt = self.model.tokenize(prompt, add_special=self.n_past(seq_id) == 0, parse_special=parse_special)
        ids = self._checked_tokens(prompt)
        return Generation(self, ids, max_tokens, options, TextStream(stop), seq_id, special, ignore_eog)

    def chat(
        self,
        messages: Iterable[Mapping[str, str]],
        max_tokens: int = 256,
        *,
        template: str | None = None,
        **options: Any,
    ) -> Generation:
        """Answers a conversation: applies the chat template, clears sequence 0, generates. Options as for generate."""
        text = self.model.apply_chat_template(messages, template=template)
        self.clear()
        return self.generate(text, max_tokens, parse_special=True, **options)

    @one_call
    def embed(self, prompt: str | Tokens) -> FloatArray:
        """Embeddings of a text or of tokens; sequence 0 is cleared before and after.

        Returns:
            float32 [1, n_embd] with pooling, [n_tokens, n_embd] without (pooling="none").

        Raises:
            UnsupportedError: the context was made without embeddings=True.
            ValueError: no tokens; with pooling, more of them than n_ubatch.
        """
        if not self._embeddings:
            raise UnsupportedError("this context computes no embeddings; make it with embeddings=True")
        lib = native.lib
        ids = self._checked_tokens(self.model.tokenize(prompt) if isinstance(prompt, str) else prompt)
        pointer = self._handles.context
        pooled = int(lib.llama_pooling_type(pointer)) != int(lib.LLAMA_POOLING_TYPE_NONE)
        if len(ids) > (self.n_ubatch if pooled else self.n_batch):
            raise ValueError(f"{len(ids)} tokens are too many to embed at once with this n_ubatch and n_batch")
        self._clear()
        self._decode(ids, None, 0, "all")
        if pooled:
            out = self._view(lib.llama_get_embeddings_seq(pointer, 0), 1, self.model.n_embd).copy()
        else:
            out = self._view(lib.llama_get_embeddings(pointer), len(ids), self.model.n_embd).copy()
        self._clear()
        array: FloatArray = out
        return array

    # ---- memory -----------------------------------------------------------------------------------------------------

    @one_call
    def n_past(self, seq_id: int = 0) -> int:
        """Tokens that a sequence holds (one more than its largest position). ValueError: no such sequence."""
        seq_id = self._checked_seq(seq_id)
        return int(native.lib.llama_memory_seq_pos_max(self._memory, seq_id)) + 1

    @one_call
    def clear(self) -> None:
        """Forgets all sequences."""
        self._clear()

    def _clear(self) -> None:
        native.lib.llama_memory_clear(self._memory, True)
        self._lost = None

    @one_call
    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Drops positions p0 to p1 - 1 (-1: from the start, to the end) of one sequence. False where the model cannot.

        Raises:
            ValueError: a sequence that there is not (`clear` drops all), or no positions.
        """
        seq_id, (p0, p1) = self._checked_seq(seq_id), _positions(p0, p1)
        return bool(native.lib.llama_memory_seq_rm(self._memory, seq_id, p0, p1))

    @one_call
    def seq_cp(self, source: int, target: int, p0: int = -1, p1: int = -1) -> None:
        """Gives sequence `target` the positions p0 to p1 - 1 of `source`.

        Raises:
            ValueError: a sequence that there is not, or no positions.
            UnsupportedError: a part of a sequence, in a context whose sequences have buffers of their own.
        """
        source, target = self._checked_seq(source, "source"), self._checked_seq(target, "target")
        p0, p1 = _positions(p0, p1)
        lib, memory = native.lib, self._memory
        if self._separate and source != target:
            first, last = lib.llama_memory_seq_pos_min(memory, source), lib.llama_memory_seq_pos_max(memory, source)
            if p0 > max(first, 0) or 0 <= p1 <= last:
                raise UnsupportedError(
                    f"p0={p0}, p1={p1} is a part of sequence {source}; without kv_unified=True only all of it "
                    "can be copied"
                )
            p0 = p1 = -1
        lib.llama_memory_seq_cp(memory, source, target, p0, p1)

    @one_call
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Moves positions p0 to p1 - 1 by delta.

        Raises:
            ValueError: a sequence that there is not, or no positions.
            UnsupportedError: the model's memory cannot shift.
        """
        seq_id, (p0, p1) = self._checked_seq(seq_id), _positions(p0, p1)
        checks.whole("delta", delta, -(2**30), 2**30)
        if not native.lib.llama_memory_can_shift(self._memory):
            raise UnsupportedError("the memory of this model cannot shift positions")
        native.lib.llama_memory_seq_add(self._memory, seq_id, p0, p1, delta)

    @one_call
    def state_get(self) -> bytes:
        """The whole state (KV cache and last outputs) as bytes for `state_set` of an equal context."""
        ffi, lib = native.ffi, native.lib
        pointer = self._handles.context
        size = lib.llama_state_get_size(pointer)
        buf = ffi.new("uint8_t[]", size)
        return bytes(ffi.buffer(buf, lib.llama_state_get_data(pointer, buf, size)))

    @one_call
    def state_set(self, state: bytes) -> None:
        """Puts back what `state_get` gave.

        Raises:
            InvalidError: not a state of such a context. TypeError: no bytes.
        """
        try:
            raw = memoryview(state).cast("B")
        except TypeError:
            raise TypeError(f"state was {checks.shown(state)}; it is the bytes that state_get gave") from None
        ffi, lib = native.ffi, native.lib
        pointer = self._handles.context
        if not raw or lib.llama_state_set_data(pointer, ffi.from_buffer("uint8_t[]", raw), len(raw)) == 0:
            said = logs.last_llama_error()
            raise InvalidError(f"the state was not taken: {said or 'it is not one of a context like this'}")
        self._lost = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the state to a file."""
        Path(path).write_bytes(self.state_get())

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Reads the state from a file that `save` wrote."""
        self.state_set(Path(path).read_bytes())

    # ---- statistics -------------------------------------------------------------------------------------------------

    @one_call
    def stats(self) -> dict[str, Any]:
        """What streaming did: {"streaming": bool, "call": {...}, "total": {...}}.

        `call` is the last decode, or the last token of a generation; `total` everything since the context was made.
        Fields as in moestream_stats (bytes, nanoseconds), with `hit_rate`. Both are empty without streaming.
        """
        hook = self._handles.hook
        if hook == native.ffi.NULL:
            return {"streaming": False, "call": {}, "total": {}}
        call, total = native.new_struct("moestream_stats"), native.new_struct("moestream_stats")
        native.check(native.lib.moestream_context_get_stats(hook, call, total))
        return {"streaming": True, "call": stats_dict(call), "total": stats_dict(total)}


def _positions(p0: Any, p1: Any) -> tuple[int, int]:
    """A range of positions; -1 is the start, or the end."""
    return checks.whole("p0", p0, -1, 2**31 - 1), checks.whole("p1", p1, -1, 2**31 - 1)


__all__ = ["Context", "Generation"]
