"""Command line options that several commands share, and what they mean to the Python API."""

from __future__ import annotations

import argparse
from typing import Any

from moestream.placement import Plan, plan
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


def add_stream_options(parser: argparse.ArgumentParser, switch: bool = True) -> None:
    """--cache and the rest of Stream; with `switch` also --stream and --no-stream."""
    group = parser.add_argument_group("streaming (on by default for a model with experts)")
    if switch:
        group.add_argument(
            "--stream", action=argparse.BooleanOptionalAction, default=None, help="stream the routed experts or not"
        )
    group.add_argument("--cache", metavar="SIZE", help='memory for experts: "8GiB", "25%%", "min", "auto" (default)')
    group.add_argument("--io", choices=["auto", "io_uring", "pread"], help="reader (default: auto)")
    group.add_argument("--direct", choices=["auto", "on", "off"], help="bypass the page cache (default: auto)")
    group.add_argument("--dense", choices=["anon", "mmap"], help="where other CPU weights live (default: anon)")
    group.add_argument("--prefetch", choices=["auto", "on", "off"], help="read ahead (default: auto)")
    group.add_argument("--queue-depth", type=int, metavar="N", help="reads in flight, 1 to 1024")
    group.add_argument("--readers", type=int, metavar="N", help="threads of the pread reader, 1 to 64")
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
        "--n-cpu-moe", type=int, default=0, metavar="N", help="experts of the first N blocks in CPU memory"
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
    group.add_argument("--main-gpu", type=int, metavar="I", help="the device for everything with --split-mode none")
    group.add_argument("--tensor-split", type=_shares, metavar="LIST", help='share of each device: "3,1"')


def _numbers(text: str) -> list[int]:
    """Block numbers: "0,1,24-27"."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first) > 9 or len(last) > 9:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of block numbers such as 0,1,24-27")
        end = int(last) if dash else int(first)
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
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 3,1") from None


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
    group.add_argument("--ctx", type=int, metavar="N", help="tokens of context")
    group.add_argument("--batch", type=int, default=2048, metavar="N", help="most tokens given at once")
    group.add_argument("--ubatch", type=int, default=512, metavar="N", help="most tokens computed at once")
    group.add_argument("--threads", "-t", type=int, metavar="N", help="compute threads (default: physical cores)")


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


def chosen_stream(args: argparse.Namespace, made: Plan) -> Stream | None:
    """What to stream with: what was asked for, else on where the model has experts.

    Raises:
        UsageError: streaming options together with --no-stream.
    """
    options = given_stream_options(args)
    if args.stream is False:
        if options:
            names = ", ".join("--" + name.replace("_", "-") for name in options)
            raise UsageError(f"{names} cannot be used with --no-stream")
        return None
    if args.stream or options or made.n_expert:
        return Stream(**options)
    return None


def expert_plan(path: str) -> Plan:
    """The plan of a streamed load where the model has experts, of a plain one otherwise."""
    made = plan(path)
    return plan(path, stream=Stream()) if made.n_expert else made


def context_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Context options as arguments of Model.context."""
    return {"n_ctx": args.ctx, "n_batch": args.batch, "n_ubatch": args.ubatch, "n_threads": args.threads}
