"""A generation under way: prompt, sample, decode, and pieces of text as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from moestream import _native_api as native
from moestream._calls import one_call
from moestream.sampling import Sampler, SamplingOptions, TextStream

if TYPE_CHECKING:
    from moestream.context import Context

StopReason = Literal["length", "eog", "stop", "closed"]


class Generation(Iterator[str]):
    """A generation under way: an iterator over pieces of text (whole characters; a piece may be empty for no token).

    Attributes:
        prompt_tokens: the prompt, as tokens.
        tokens: the tokens made so far.
        stop_reason: None while it runs, then "length", "eog" (the model ended it), "stop" or "closed".
        seed: the seed in use, None at temperature 0.
        prompt_s, decode_s: seconds spent on the prompt and on the tokens after it.
    """

    def __init__(
        self,
        context: Context,
        prompt: Any,
        max_tokens: int,
        options: SamplingOptions,
        text: TextStream,
        seq_id: int,
        special: bool,
        ignore_eog: bool,
    ) -> None:
        self._context, self._text, self._seq_id = context, text, seq_id
        self._max_tokens, self._special, self._ignore_eog = max_tokens, special, ignore_eog
        self._handles = context._handles
        self._sampler: Sampler | None = Sampler(options)
        self._pending: Any = prompt
        self.prompt_tokens: list[int] = [int(token) for token in prompt]
        self.tokens: list[int] = []
        self.stop_reason: StopReason | None = None
        self.seed: int | None = self._sampler.seed
        self.prompt_s = 0.0
        self.decode_s = 0.0

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        while self.stop_reason is None:
            raw, ended = self._step()
            piece = self._text.push(raw)
            if self._text.stopped_at is not None:
                ended = "stop"
            elif ended is None and len(self.tokens) >= self._max_tokens:
                ended = "length"
            if ended is not None:
                piece += self._text.finish()
                if self.stop_reason is None:  # close() may have come meanwhile
                    self._end(ended)
            if piece:
                return piece
        raise StopIteration

    @one_call
    def _step(self) -> tuple[bytes, StopReason | None]:
        """Decodes what is pending, chooses the next token: its bytes, and whether it ends the generation."""
        context, model, sampler = self._context, self._context.model, self._sampler
        if sampler is None:
            return b"", None  # closed meanwhile
        started = time.monotonic()
        if self._pending is not None:  # None: an interrupt came behind the decode
            context._decode(self._pending, None, self._seq_id, "last")
            self._pending = None
        token = sampler.sample(self._handles.context)
        took = time.monotonic() - started
        if self.tokens:
            self.decode_s += took
        else:
            self.prompt_s += took
        self._pending = [token]
        if native.lib.llama_vocab_is_eog(model._vocab, token) and not self._ignore_eog:
            return b"", "eog"
        self.tokens.append(token)
        return model._piece(token, self._special), None

    def _end(self, reason: StopReason) -> None:
        """The sampler goes with its last reference: a step in another thread may still use it."""
        self.stop_reason = reason
        self._sampler = None

    def close(self) -> None:
        """Ends the generation."""
        if self.stop_reason is None:
            self._end("closed")

    @property
    def text(self) -> str:
        """All that is left, in one string."""
        return "".join(self)
