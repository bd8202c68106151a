"""`moestream verify`: the streamed model against the resident one, bit for bit.

The resident model runs first: the prompt with all its logits, then greedy tokens. Every row of logits is written to a
temporary file. The model is closed, the streamed one decodes the same tokens, and each row is compared as bits. So
only one model is in memory at a time, and the streamed run is never led astray by its own tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from moestream import host
from moestream.cli_options import (
    add_compute_options,
    add_stream_options,
    given_stream_options,
    refuse_small_cache,
    some_text,
    whole,
)
from moestream.errors import UnsupportedError
from moestream.model import Model
from moestream.placement import plan
from moestream.progress import Progress
from moestream.stream import Stream

if TYPE_CHECKING:
    from moestream.context import FloatArray

DEFAULT_PROMPT = "The experts of this model are read from the disk when the router chooses them, and then"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--tokens", "-n", type=whole(1), default=64, metavar="N", help="greedy tokens to compare")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", "-p", type=some_text, default=DEFAULT_PROMPT, metavar="TEXT")
    prompt.add_argument("--prompt-tokens", type=whole(1), metavar="N", help="a prompt of N random tokens instead")
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N", help="seed of the random prompt")
    add_compute_options(parser)
    parser.add_argument(
        "--reference",
        choices=["auto", "resident", "mmap"],
        default="auto",
        help="how the other model is loaded: resident in memory, or mapped; auto by its size",
    )
    add_stream_options(parser, switch=False)


def command(args: argparse.Namespace) -> int:
    """Runs the command: 0 identical, 1 not."""
    from moestream.cli import print_json, show_bars

    result = verify(
        args.model,
        tokens=args.tokens,
        prompt=args.prompt if args.prompt_tokens is None else args.prompt_tokens,
        stream=Stream(**given_stream_options(args)),
        n_ubatch=args.ubatch,
        n_threads=args.threads,
        reference=args.reference,
        seed=args.seed,
        progress=show_bars(args),
    )
    if args.json:
        print_json(result)
    else:
        print(_sentence(result))
    return 0 if result["identical"] else 1


def verify(
    path: str,
    *,
    tokens: int = 64,
    prompt: str | int = DEFAULT_PROMPT,
    stream: Stream | None = None,
    n_ubatch: int = 512,
    n_threads: int | None = None,
    reference: str = "auto",
    seed: int = 1,
    progress: bool = False,
) -> dict[str, Any]:
    """Compares all logits of a streamed run with those of a resident one.

    Args:
        path: the model.
        tokens: greedy tokens after the prompt.
        prompt: text, or a number of random tokens.
        reference: "resident", "mmap", or "auto": mapped only where the model does not fit into free memory.

    Returns:
        identical; tokens (rows of logits compared, prompt included, are n_rows); first_difference: None or
        {"token", "in_prompt", "index", "resident", "streamed"}; and what the comparison was made with.

    Raises:
        UnsupportedError: the model has no experts. OutOfMemoryError: the cache is too small. The errors of Model and
        Context.
    """
    if tokens < 1:
        raise ValueError(f"tokens was {tokens}; compare at least one")
    stream = stream or Stream()
    made = plan(path, stream=stream)
    if not made.expert_bytes:
        raise UnsupportedError(f"{path} has no experts; there is nothing to stream and compare")
    refuse_small_cache(stream, made)
    if reference == "auto":
        needed = made.expert_bytes + made.dense_bytes
        reference = "resident" if needed < 0.8 * _memory_free() else "mmap"
    sizes: dict[str, Any] = {"n_ubatch": n_ubatch, "n_threads": n_threads}
    with tempfile.TemporaryFile(prefix="moestream-verify-") as rows:
        load_mode = {"resident": "none", "mmap": "mmap"}[reference]
        with Model(path, load_mode=load_mode, use_extra_bufts=False) as model:
            ids = _prompt_tokens(model, prompt, seed)
            greedy: list[int] = []
            with Progress(progress, "resident") as bar:
                for row in _rows(model, ids, tokens, greedy, teach=False, **sizes):
                    rows.write(row.tobytes())
                    bar.update(len(greedy) / tokens)
        rows.seek(0)
        with Model(path, stream=stream, progress=progress) as model:
            described = model.describe()
            with Progress(progress, "streamed") as bar:
                difference, n_rows = _compare(model, ids, tokens, greedy, rows, bar, **sizes)
            stats = model.stats()
    return {
        "identical": difference is None,
        "tokens": tokens,
        "first_difference": difference,
        "prompt_tokens": len(ids),
        "n_rows": n_rows,
        "reference": reference,
        "described": described,
        "stats": stats,
    }


def _memory_free() -> int:
    free = host.memory_available()
    limit = host.cgroup_memory()
    return min(free, limit[0] - limit[1]) if limit else free


def _prompt_tokens(model: Model, prompt: str | int, seed: int) -> list[int]:
    import numpy as np

    if isinstance(prompt, str):
        ids = model.tokenize(prompt)
        if not ids:
            raise ValueError("the prompt is empty")
        return ids
    if prompt < 1:
        raise ValueError(f"the prompt was to have {prompt} tokens; it needs at least one")
    return [int(i) for i in np.random.default_rng(seed).integers(0, model.n_vocab, prompt)]


def _rows(
    model: Model,
    ids: list[int],
    n: int,
    greedy: list[int],
    *,
    teach: bool,
    n_ubatch: int,
    n_threads: int | None,
) -> Iterator[FloatArray]:
    """Blocks of logits: the prompt's in pieces of a few hundred rows, then one per token. With `teach` the tokens
    are those in `greedy`; otherwise they are chosen and appended to it."""
    piece = max(n_ubatch, 256)
    with model.context(len(ids) + n, n_batch=max(piece, n_ubatch), n_ubatch=n_ubatch, n_threads=n_threads) as context:
        block = None
        for begin in range(0, len(ids), piece):
            block = context.decode(ids[begin : begin + piece], logits="all")
            yield block
        assert block is not None
        for i in range(n):
            if not teach:
                greedy.append(int(block[-1].argmax()))
            block = context.decode([greedy[i]])
            yield block


def _compare(
    model: Model, ids: list[int], n: int, greedy: list[int], rows: IO[bytes], bar: Progress, **sizes: Any
) -> tuple[dict[str, Any] | None, int]:
    """The first difference, if any, and how many rows were looked at."""
    import numpy as np

    seen = 0
    for block in _rows(model, ids, n, greedy, teach=True, **sizes):
        expected = np.frombuffer(rows.read(block.nbytes), dtype=np.float32).reshape(block.shape)
        # As bits: == would call two NaN different and 0.0 equal to -0.0.
        wrong = np.argwhere(block.view(np.uint32) != expected.view(np.uint32))
        if len(wrong):
            row, index = (int(i) for i in wrong[0])
            at = seen + row
            return {
                "token": at if at < len(ids) else at - len(ids),
                "in_prompt": at < len(ids),
                "index": index,
                "resident": float(expected[row, index]),
                "streamed": float(block[row, index]),
                "n_different_in_row": int((wrong[:, 0] == row).sum()),
            }, at + 1
        seen += len(block)
        bar.update(seen / (len(ids) + n))
    return None, seen


def _sentence(result: dict[str, Any]) -> str:
    made = f"{result['prompt_tokens']} prompt and {result['tokens']} generated tokens"
    if result["identical"]:
        return f"identical: {made}, every logit of {result['n_rows']} rows equal bit for bit\n{result['described']}"
    first = result["first_difference"]
    where = "prompt token" if first["in_prompt"] else "generated token"
    print(result["described"], file=sys.stderr)
    return (
        f"DIFFERENT at {where} {first['token']}, logit {first['index']}: "
        f"resident {first['resident']!r}, streamed {first['streamed']!r} ({first['n_different_in_row']} in this row)"
    )
