"""Command line options that several commands share, and what they mean to the Python API.

A value that makes no sense is refused by the parser, which names the option, before anything is loaded.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from moestream import checks
from moestream.errors import OutOfMemoryError, UnsupportedError
from moestream.placement import Plan, plan, refuse_warnings
from moestream.sizes import parse_cache
from moestream.stream import Stream


class UsageError(Exception):
    """Options that do not go together; one line, exit status 2."""


_STREAM_OPTIONS = (
    "cache",
    "io",
    "direct",
    "dense",
    "prefetch",
    "queue_depth",
    "readers",
    "verify_slices",
    "warm_start",
)


# ---- values ---------------------------------------------------------------------------------------------------------


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """The type of an option that is a whole number from `least` to `most`."""

    def read(text: str) -> int:
        try:
            return checks.whole("it", int(text), least, most)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}") from None

    return read


def real(least: float, most: float = math.inf) -> Callable[[str], float]:
    """The type of an option that is a number from `least` to `most`; nan and inf are none."""
    end = "on" if math.isinf(most) else f"to {most:g}"

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most or math.isinf(number):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} {end}")
        return number

    return read


def unicode_text(text: str) -> str:
    """The type of an option that is any text."""
    try:
        checks.utf8("it", text)
    except ValueError:
        raise argparse.ArgumentTypeError("the text is not UTF-8") from None
    return text


def some_text(text: str) -> str:
    """The type of an option that is a text, and not an empty one."""
    if not text:
        raise argparse.ArgumentTypeError("the text is empty")
    return unicode_text(text)


def _cache(text: str) -> str:
    try:
        parse_cache(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


# ---- options --------------------------------------------------------------------------------------------------------


def add_stream_options(parser: argparse.ArgumentParser, switch: bool = True) -> None:
    """--cache and the rest of Stream; with `switch` also --stream and --no-stream."""
    group = parser.add_argument_group("streaming (on by default for a model with experts)")
    if switch:
        choice = group.add_mutually_exclusive_group()
        choice.add_argument(
            "--stream", action="store_const", const=True, default=None, help="stream the routed experts"
        )
        choice.add_argument("--no-stream", action="store_const", const=False, dest="stream", help="do not stream them")
    group.add_argument(
        "--cache", type=_cache, metavar="SIZE", help='memory for experts: "8GiB", "25%%", "min", 0, "auto" (default)'
    )
    group.add_argument("--io", choices=["auto", "io_uring", "pread"], help="reader (default: auto)")
    group.add_argument("--direct", choices=["auto", "on", "off"], help="bypass the page cache (default: auto)")
    group.add_argument("--dense", choices=["anon", "mmap"], help="where other CPU weights live (default: anon)")
    group.add_argument("--prefetch", choices=["auto", "on", "off"], help="read ahead (default: auto)")
    group.add_argument("--queue-depth", type=whole(0, 1024), metavar="N", help="reads in flight; 0: a good number")
    group.add_argument("--readers", type=whole(0, 64), metavar="N", help="threads of the pread reader; 0: a few")
    group.add_argument("--warm-start", metavar="FILE", help="read the experts of the last run again after the load")
    group.add_argument(
        "--verify-slices", action="store_true", default=None, help="compare each slice with its checksum on every use"
    )


def add_place_options(parser: argparse.ArgumentParser) -> None:
    """n_gpu_layers, cpu_moe and the override rules."""
    group = parser.add_argument_group("placement")
    group.add_argument("--n-gpu-layers", "-ngl", type=int, default=0, metavar="N", help="blocks on devices; -1 for all")
    group.add_argument("--cpu-moe", action="store_true", help="all routed experts in CPU memory")
    group.add_argument(
        "--n-cpu-moe", type=whole(0), default=0, metavar="N", help="experts of the first N blocks in CPU memory"
    )
    group.add_argument(
        "--override", "-ot", action="append", metavar="PATTERN=PLACE", help="rule tried before the others; may repeat"
    )
    group.add_argument(
        "--cpu-moe-layers", type=_numbers, metavar="LIST", help='experts of these blocks in CPU memory: "0,1,24-27"'
    )
    group.add_argument(
        "--expert-layers",
        action="append",
        type=_layers_of_place,
        metavar="PLACE=LIST",
        help='experts of these blocks in this place: "RPC0[host:port]=0-3"; may repeat',
    )
    group.add_argument("--rpc", metavar="SERVERS", help="host:port of ggml RPC servers to use, with commas between")
    group.add_argument("--strict", action="store_true", help="what deserves a warning is an error")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """How llama.cpp reads the file and shares the model out over devices."""
    group = parser.add_argument_group("loading, as in llama.cpp")
    group.add_argument("--load-mode", metavar="MODE", help="auto, none, mmap, mlock, mmap+mlock, dio (default: auto)")
    group.add_argument("--device", metavar="NAMES", help="devices to use, with commas between (default: all)")
    group.add_argument("--split-mode", choices=["none", "layer", "row", "tensor"], help="how devices share the model")
    group.add_argument(
        "--main-gpu", type=whole(-1), metavar="I", help="the device for everything with --split-mode none"
    )
    group.add_argument("--tensor-split", type=_shares, metavar="LIST", help='share of each device: "3,1"')


def _numbers(text: str) -> list[int]:
    """Block numbers: "0,1,24-27"."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first) > 9 or len(last) > 9:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of block numbers such as 0,1,24-27")
        end = int(last) if dash else int(first)
        if end < int(first):
            raise argparse.ArgumentTypeError(
                f"{part.strip()!r} is a range without blocks; the smaller number comes first"
            )
        if end - int(first) > 100_000:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is a range of too many blocks")
        found += range(int(first), end + 1)
    return found


def _layers_of_place(text: str) -> tuple[str, list[int]]:
    place, equals, layers = text.rpartition("=")
    if not equals or not place.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form PLACE=LIST")
    return place.strip(), _numbers(layers)


def _shares(text: str) -> list[float]:
    return [real(0)(share) for share in text.split(",")]


def load_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Loading options that were given, as arguments of Model."""
    given = {
        "load_mode": args.load_mode,
        "devices": None if args.device is None else [name.strip() for name in args.device.split(",")],
        "split_mode": args.split_mode,
        "main_gpu": args.main_gpu,
        "tensor_split": args.tensor_split,
    }
    return {name: value for name, value in given.items() if value is not None}


def add_context_options(parser: argparse.ArgumentParser) -> None:
    """Sizes of the context and numbers of threads."""
    group = parser.add_argument_group("context")
    group.add_argument(
        "--ctx", type=whole(0), metavar="N", help="tokens of context; 0: as many as the model was made for"
    )
    group.add_argument("--batch", type=whole(1), default=2048, metavar="N", help="most tokens given at once")
    add_compute_options(group)


def add_compute_options(parser: argparse._ActionsContainer) -> None:
    """--ubatch and --threads."""
    parser.add_argument("--ubatch", type=whole(1), default=512, metavar="N", help="most tokens computed at once")
    parser.add_argument(
        "--threads", "-t", type=whole(1, 512), metavar="N", help="compute threads (default: physical cores)"
    )


def given_stream_options(args: argparse.Namespace) -> dict[str, Any]:
    """The streaming options that were written on the command line, as arguments of Stream."""
    given = {name: getattr(args, name, None) for name in _STREAM_OPTIONS}
    options = {name: value for name, value in given.items() if value is not None}
    if "verify_slices" in options:
        options["verify"] = options.pop("verify_slices")
    return options


def place_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Placement options as arguments of Model and plan; makes the RPC servers' devices known first."""
    from moestream.placement import parse_overrides
    from moestream.rpc import add_rpc_server

    for endpoint in (args.rpc or "").split(","):
        if endpoint.strip():
            add_rpc_server(endpoint.strip())
    expert_layers: dict[str, list[int]] = {}
    for place, layers in args.expert_layers or []:
        expert_layers.setdefault(place, []).extend(layers)
    rules = [rule for text in args.override or [] for rule in parse_overrides(text)]
    return {
        "n_gpu_layers": args.n_gpu_layers,
        "cpu_moe": args.cpu_moe,
        "n_cpu_moe": args.n_cpu_moe,
        "cpu_moe_layers": args.cpu_moe_layers,
        "expert_layers": expert_layers or None,
        "overrides": rules,
        "strict": args.strict,
    }


def chosen_stream(args: argparse.Namespace, placed: dict[str, Any]) -> tuple[Stream | None, Plan]:
    """What to stream with, and the plan of that load: as asked for, else streaming where experts are left for it.

    A rule that sends tensors to STREAM asks for it as --stream and the options of streaming do.

    Raises:
        UsageError: streaming options together with --no-stream, or rules that leave nothing of what is to be streamed.
        UnsupportedError: streaming asked for a model without experts. OutOfMemoryError: the cache is too small.
        The errors of placement.plan.
    """
    options = given_stream_options(args)
    if args.stream is False:
        if options:
            raise UsageError(f"{_names(options)} cannot be used with --no-stream")
        return None, plan(args.model, **placed)
    places = {place for _, place in placed["overrides"]}.union(placed["expert_layers"] or ())
    asked = bool(args.stream or options or "STREAM" in places)
    asking = _names(options, *(["--stream"] if args.stream else [])) or "the rule to STREAM"
    stream = Stream(**options)
    made = plan(args.model, stream=stream, **{**placed, "strict": False})
    if made.stream_bytes:
        if placed["strict"]:
            refuse_warnings(made)
        refuse_small_cache(stream, made)
        return stream, made
    if asked and not made.expert_bytes:
        raise UnsupportedError(f"{args.model} has no routed experts to stream; leave out {asking}")
    if asked:
        raise UsageError(
            f"nothing is left to stream: the placement rules keep all experts elsewhere; leave out {asking}, or the "
            "rules that do (`moestream plan` without it shows them)"
        )
    return None, plan(args.model, **placed)


def _names(options: dict[str, Any], *others: str) -> str:
    names = {"verify": "verify_slices"}
    return ", ".join([*others, *("--" + names.get(name, name).replace("_", "-") for name in options)])


def refuse_small_cache(stream: Stream, made: Plan) -> None:
    """Says before a load what it would say.

    Raises:
        OutOfMemoryError: a cache below the least that this plan takes, with both numbers.
    """
    size = stream.cache_size
    if size.kind in ("bytes", "percent") and not size.is_none:
        n_bytes = size.resolve(made.full_cache_bytes, made.min_cache_bytes)
        if n_bytes < made.min_cache_bytes:
            raise OutOfMemoryError(
                f"a cache of {stream.cache} is too small: this model needs at least {made.min_cache_bytes} bytes "
                '("min"), or 0, which keeps nothing'
            )


def expert_plan(path: str) -> Plan:
    """The plan of a streamed load where the model has experts, of a plain one otherwise."""
    made = plan(path)
    return plan(path, stream=Stream()) if made.expert_bytes else made


def context_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Context options as arguments of Model.context."""
    return {"n_ctx": args.ctx, "n_batch": args.batch, "n_ubatch": args.ubatch, "n_threads": args.threads}
