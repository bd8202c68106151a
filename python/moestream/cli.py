"""The command line: run, info, plan, verify, bench, doctor, demo.

Results go to stdout (text, or one JSON object with --json), everything else to stderr. Exit status: 0 fine, 1 it did
not work (or verify found a difference), 2 the command line made no sense, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from moestream import _native_api as native
from moestream import bench, doctor, host, verify
from moestream.cli_options import (
    UsageError,
    add_context_options,
    add_load_options,
    add_place_options,
    add_stream_options,
    chosen_stream,
    context_arguments,
    expert_plan,
    load_arguments,
    place_arguments,
    real,
    some_text,
    unicode_text,
    whole,
)
from moestream.errors import ContextFullError, FormatError, MoestreamError
from moestream.generation import Generation
from moestream.logs import set_log_level
from moestream.model import Model
from moestream.placement import Plan
from moestream.sizes import format_bytes
from moestream.stream import Stream

DEMO_PROMPT = "Describe a walk along the sea in one paragraph."


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the list of 40 options above it would hide what was wrong."""

    def error(self, message: str) -> NoReturn:
        """Says what made no sense, and ends the program with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(prog="moestream", description="Run Mixture-of-Experts models larger than memory on llama.cpp.")
    parser.add_argument("--version", action="store_true", help="show version and llama.cpp commit, and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, text: str, needs_model: bool = True) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        if needs_model:
            made.add_argument("model", metavar="MODEL", help="GGUF file, or the first shard of a split one")
        made.add_argument("--json", action="store_true", help="print one JSON object")
        made.add_argument("--verbose", "-v", action="store_true", help="show llama.cpp's log as well")
        return made

    run = command("run", "Continue a prompt, or answer it with the model's chat template.")
    _add_run_options(run)
    add_stream_options(run)
    add_place_options(run)
    add_load_options(run)
    add_context_options(run)
    run.set_defaults(call=cmd_run)

    info = command("info", "Show what a model is made of, from its header.")
    info.set_defaults(call=cmd_info)

    made = command("plan", "Show where each tensor would go, without reading weights.")
    made.add_argument("--tensors", action="store_true", help="list every tensor")
    made.add_argument("--layers", action="store_true", help="list every block")
    add_stream_options(made)
    add_place_options(made)
    made.set_defaults(call=cmd_plan)

    check = command("verify", "Compare streamed with resident, bit for bit.")
    verify.add_options(check)
    check.set_defaults(call=verify.command)

    speed = command("bench", "Measure streamed, resident and mmap side by side.")
    bench.add_options(speed)
    speed.set_defaults(call=bench.command)

    facts = command("doctor", "Say what this machine allows, and what would help.", needs_model=False)
    doctor.add_options(facts)
    facts.set_defaults(call=doctor.command)

    demo = command("demo", "Make the demo model and stream a paragraph from it.", needs_model=False)
    demo.add_argument(
        "--experts", type=whole(2, 1024), default=16, metavar="N", help="experts of the demo model (default: 16)"
    )
    demo.add_argument("--cache-dir", metavar="DIR", help="where the demo model is kept")
    demo.add_argument("--prompt", "-p", type=unicode_text, default=DEMO_PROMPT, help="what to ask")
    demo.add_argument("--tokens", "-n", type=whole(1), default=160, metavar="N", help="most tokens to make")
    add_stream_options(demo, switch=False)
    demo.set_defaults(call=cmd_demo)
    return parser


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", "-p", type=unicode_text, metavar="TEXT", help="the prompt (default: stdin)")
    template = parser.add_mutually_exclusive_group()
    template.add_argument("--system", type=unicode_text, metavar="TEXT", help="system message for the chat template")
    template.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    parser.add_argument("--tokens", "-n", type=whole(1), default=256, metavar="N", help="most tokens to make")
    parser.add_argument("--temperature", type=real(0), default=0.0, metavar="T", help="0 takes the likeliest token")
    parser.add_argument("--top-k", type=whole(0), default=0, metavar="K")
    parser.add_argument("--top-p", type=real(0, 1), default=1.0, metavar="P")
    parser.add_argument("--min-p", type=real(0, 1), default=0.0, metavar="P")
    parser.add_argument("--seed", type=whole(0, 2**32 - 2), metavar="N")
    parser.add_argument(
        "--stop", type=some_text, action="append", default=[], metavar="TEXT", help="end the output here; may repeat"
    )


# ---- commands -------------------------------------------------------------------------------------------------------


def cmd_run(args: argparse.Namespace) -> int:
    """moestream run"""
    prompt = read_prompt() if args.prompt is None else args.prompt
    placed = place_arguments(args)
    stream, made = chosen_stream(args, placed)
    note_not_streamed(args, stream, made)
    started = time.monotonic()
    with Model(args.model, stream=stream, progress=show_bars(args), **placed, **load_arguments(args)) as model:
        load_s = time.monotonic() - started
        if not args.json:
            note(model.describe())
        with model.context(**context_arguments(args)) as context:
            sampling = {
                name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
            }
            if args.system and model.chat_template is None:
                note("the model has no chat template; --system is not used")
            if args.raw or model.chat_template is None:
                generation = context.generate(prompt, args.tokens, **sampling)
            else:
                messages = [{"role": "system", "content": args.system}] if args.system else []
                messages.append({"role": "user", "content": prompt})
                generation = context.chat(messages, args.tokens, **sampling)
            text = show_pieces(generation, quiet=args.json)
            report = generation_report(generation, text, context.stats(), load_s)
    if args.json:
        print_json(report)
    else:
        note(speed_line(report))
    return 0


def read_prompt() -> str:
    """The prompt on stdin. Raises UsageError where there is none."""
    if sys.stdin.isatty():
        raise UsageError("give a prompt with -p TEXT, or on stdin")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        prompt = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on stdin is not UTF-8 ({error.reason} at byte {error.start})") from None
    if not prompt:
        raise UsageError("stdin was empty; give a prompt with -p TEXT, or on stdin")
    return prompt


def note_not_streamed(args: argparse.Namespace, stream: Stream | None, made: Plan) -> None:
    """Says that a model with experts is loaded without streaming, where nobody asked for that."""
    if stream is None and args.stream is None and made.expert_bytes:
        note("not streamed: the placement rules keep all experts elsewhere")


def cmd_info(args: argparse.Namespace) -> int:
    """moestream info"""
    made = expert_plan(args.model)
    facts = made.as_dict(tensors=False)
    facts["n_tensors"] = len(made.tensors)
    types: dict[str, int] = {}
    for tensor in made.tensors:
        types[tensor.type] = types.get(tensor.type, 0) + tensor.bytes
    facts["bytes_by_type"] = types
    del facts["rules"], facts["bytes_by_place"]
    if args.json:
        print_json(facts)
        return 0
    print(f"{made.path}: {made.n_layer} blocks, {len(made.tensors)} tensors in {made.n_files} file(s)")
    if made.expert_bytes:
        print(f"experts: {made.n_expert} per block, {made.n_expert_used} used per token", end="")
        print(f", from block {made.first_moe_layer} on" if made.first_moe_layer else "")
        print(f"routed experts: {format_bytes(made.expert_bytes)}, other weights: {format_bytes(made.dense_bytes)}")
        print(f"cache: at least {format_bytes(made.min_cache_bytes)}, useful from {format_bytes(made.cycle_bytes)}")
        print(f"       (one token's experts), everything in {format_bytes(made.full_cache_bytes)}")
        for item in made.classes:
            print(f"  {item.n_experts} experts in {item.n_layers} block(s): {format_bytes(item.slot_bytes)} each")
    else:
        print(f"a dense model, {format_bytes(made.dense_bytes)}: there is nothing to stream")
    print("types: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(types.items())))
    return 0


def cmd_plan(args: argparse.Namespace) -> int:
    """moestream plan"""
    placed = place_arguments(args)
    stream, made = chosen_stream(args, placed)
    note_not_streamed(args, stream, made)
    if args.json:
        print_json(made.as_dict())
        return 0
    print_plan(made, args.tensors, args.layers)
    return 0


def print_plan(made: Plan, tensors: bool, layers: bool) -> None:
    """A plan for people."""
    experts, dense = made.expert_bytes_by_place, made.dense_bytes_by_place
    for place, size in sorted(made.bytes_by_place.items(), key=lambda item: -item[1]):
        parts = f"experts {format_bytes(experts.get(place, 0))}, other weights {format_bytes(dense.get(place, 0))}"
        print(f"{place:12} {format_bytes(size):>10}  ({parts})")
    if layers:
        for row in made.layers:
            name = "outside blocks" if row.layer is None else f"block {row.layer}"
            sides = [("experts", row.experts), ("other", row.dense)]
            texts = [f"{side} {format_bytes(n)} {place}" for side, held in sides for place, n in held.items()]
            print(f"{name:14}  " + ", ".join(texts))
    for i, rule in enumerate(made.rules, 1):  # as errors and warnings count them
        print(f"rule {i} ({rule.origin}): {rule.pattern} -> {rule.place}: {rule.n_matched} tensors, ", end="")
        print(format_bytes(rule.bytes))
    for warning in made.warnings:
        note(f"warning: {warning}")
    if tensors:
        for tensor in made.tensors:
            rule_text = "" if tensor.rule is None else f"  rule {tensor.rule + 1}"
            print(f"{tensor.name:40} {tensor.type:8} {format_bytes(tensor.bytes):>10}  {tensor.place}{rule_text}")


def cmd_demo(args: argparse.Namespace) -> int:
    """moestream demo"""
    from moestream.cli_options import given_stream_options
    from moestream.demo import ensure_demo_model

    folder = Path(args.cache_dir) if args.cache_dir else None
    path = ensure_demo_model(experts=args.experts, cache_dir=folder, progress=True)
    stream = Stream(**{"cache": "25%", **given_stream_options(args)})
    started = time.monotonic()
    with Model(path, stream=stream, progress=show_bars(args)) as model:
        load_s = time.monotonic() - started
        note(f"{path}: {format_bytes(model.plan.expert_bytes)} of experts, cache {stream.cache}")
        note(model.describe())
        with model.context(n_ctx=2048) as context:
            generation = context.chat([{"role": "user", "content": args.prompt}], args.tokens)
            text = show_pieces(generation, quiet=args.json)
            report = generation_report(generation, text, context.stats(), load_s)
        report["model"] = str(path)
        report["expert_bytes"] = model.plan.expert_bytes
        report["dense_bytes"] = model.plan.dense_bytes
    if args.json:
        print_json(report)
        return 0
    total = report["stats"]["total"]
    print(f"\nexperts on disk   {format_bytes(report['expert_bytes'])}, cache {format_bytes(total['cache_bytes'])}")
    print(
        f"read              {format_bytes(total['read_bytes'])} in {total['n_reads']} reads by {total['io']}, ", end=""
    )
    print("past the page cache" if total["direct"] else "through the page cache")
    print(f"found in cache    {percent(total['hit_rate'])} of {total['n_hits'] + total['n_misses']} experts used")
    print(f"waited for disk   {total['stall_ns'] / 1e9:.2f} s of {report['prompt_s'] + report['decode_s']:.2f} s")
    print(f"peak memory       {format_bytes(report['peak_rss_bytes'])}")
    print(f"speed             {speed_text(report)}")
    return 0


# ---- showing --------------------------------------------------------------------------------------------------------


def show_bars(args: argparse.Namespace) -> bool:
    """Bars are drawn on a terminal, and not beside JSON."""
    return sys.stderr.isatty() and not args.json


def show_pieces(generation: Generation, quiet: bool) -> str:
    """Prints pieces as they come (unless quiet); returns the whole text."""
    pieces = []
    for piece in generation:
        pieces.append(piece)
        if not quiet:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if not quiet:
        print(flush=True)
    return "".join(pieces)


def generation_report(generation: Generation, text: str, stats: dict[str, Any], load_s: float) -> dict[str, Any]:
    """The numbers of one generation, as `run --json` and `demo --json` print them."""
    n, n_prompt = len(generation.tokens), len(generation.prompt_tokens)
    return {
        "text": text,
        "n_prompt_tokens": n_prompt,
        "n_tokens": n,
        "stop_reason": generation.stop_reason,
        "seed": generation.seed,
        "load_s": load_s,
        "prompt_s": generation.prompt_s,
        "decode_s": generation.decode_s,
        "prompt_tok_per_s": n_prompt / generation.prompt_s if generation.prompt_s else None,
        # The first token comes out of the prompt's own decode.
        "tok_per_s": (n - 1) / generation.decode_s if n > 1 and generation.decode_s else None,
        "peak_rss_bytes": host.peak_rss(),
        "stats": stats,
    }


def speed_text(report: dict[str, Any]) -> str:
    """Prompt and generation speed in words."""
    prompt, made = report["prompt_tok_per_s"], report["tok_per_s"]
    text = f"prompt {report['n_prompt_tokens']} tokens"
    text += f" at {prompt:.1f}/s" if prompt else ""
    return text + f", {report['n_tokens']} tokens" + (f" at {made:.1f}/s" if made else "")


def speed_line(report: dict[str, Any]) -> str:
    """The line on stderr after `run`."""
    line = speed_text(report)
    total = report["stats"]["total"]
    if total:
        line += f"; {percent(total['hit_rate'])} of experts from cache, {format_bytes(total['read_bytes'])} read"
        line += f", {total['stall_ns'] / 1e6:.0f} ms waiting"
    return line + f"; peak memory {format_bytes(report['peak_rss_bytes'])}"


def percent(rate: float | None) -> str:
    """A share for people."""
    return "none" if rate is None else f"{100 * rate:.1f} %"


def note(line: str) -> None:
    """A line on stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    json.dump(value, sys.stdout, indent=1)
    print(flush=True)


# ---- entry ----------------------------------------------------------------------------------------------------------


def prepare_streams() -> None:
    """Makes stdin, stdout and stderr fit to be used: one that is closed (>&-) reads and writes nothing, and its number
    is not given to the next file that is opened; a character that the terminal cannot show is shown escaped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 (stays open)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    prepare_streams()
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.version:
        info = native.build_info()
        print(json.dumps(info))
        return 0
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    logging.basicConfig(format="moestream: %(levelname)s: %(name)s: %(message)s", stream=sys.stderr)
    if args.verbose:
        logging.getLogger("moestream").setLevel(logging.INFO)
        set_log_level("info")
    try:
        status: int = args.call(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; nothing more can be said to them, and Python must not try at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UsageError, MoestreamError, OSError, MemoryError, ValueError) as error:
        note(f"moestream {args.command}: {error}")
        # A ValueError is about the options, but for those that tell of a file or of the length of a prompt.
        about_options = isinstance(error, (UsageError, ValueError)) and not isinstance(
            error, (FormatError, ContextFullError)
        )
        return 2 if about_options else 1


if __name__ == "__main__":
    sys.exit(main())
