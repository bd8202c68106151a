#!/usr/bin/env python3
"""Make models for tests, benchmarks and demonstrations.

    make_model.py demo [--experts 16]            the demo model (SmolLM2 as a Mixture of Experts), in the cache folder
    make_model.py synthetic OUT [--preset NAME]  random weights in any shape, see --help for every field
    make_model.py presets                        what the presets are, and how large

Works from a source tree as well as with moestream installed; nothing has to be compiled. The paths of the files made
go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
import types
from typing import Any


def _import_generators() -> tuple[Any, Any]:
    """moestream.demo and moestream.synthetic, without importing the compiled part of moestream."""
    package = pathlib.Path(__file__).resolve().parent.parent / "python" / "moestream"
    if package.is_dir() and "moestream" not in sys.modules:
        # The package's own __init__ loads libmoestream. These two modules do not need it, and a source tree that has
        # not been built does not have it: a stand-in package with the same path is enough.
        stand_in = types.ModuleType("moestream")
        stand_in.__path__ = [str(package)]
        sys.modules["moestream"] = stand_in
    from moestream import demo, synthetic

    return demo, synthetic


demo, synthetic = _import_generators()

_INTEGERS = {
    "n_layer": "layers",
    "n_embd": "width of the model",
    "n_ff": "width of one expert",
    "n_expert": "experts in each layer",
    "n_expert_used": "experts chosen for each token",
    "n_head": "attention heads",
    "n_head_kv": "key-value heads",
    "head_dim": "width of a head",
    "n_vocab": "size of the byte vocabulary, at least 259",
    "n_ctx": "context length the model says it was trained with",
    "n_ff_dense": "width of dense and shared FFNs (default twice --n-embd)",
    "n_layer_dense_lead": "leading layers without experts (dots1, hy_v3)",
    "seed": "another seed gives other weights",
    "alignment": "general.alignment, a power of two",
    "n_shards": "split into this many files, as gguf-split does",
}
_TEXTS = {
    "dense_type": "weight type of everything but the experts",
    "embedding_type": "weight type of the token embeddings (default --dense-type)",
    "output_type": "weight type of the output matrix (default --dense-type)",
    "name": "general.name",
}
_FLAGS = {
    "fused_gate_up": "gate and up in one tensor, ffn_gate_up_exps (hy_v3)",
    "share_blocks": "make the experts of one layer once and rotate them through the layers: fast for large models",
    "random_blocks": "random bits with sane scales instead of quantised random numbers: fast for large models",
    "first_shard_metadata_only": "the first shard has no tensors",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    made = commands.add_parser("demo", help="make the demo model, or check the one that is there")
    made.add_argument(
        "--experts", type=int, default=demo.DEFAULT_EXPERTS, help="experts in each layer (default %(default)s)"
    )
    made.add_argument("--cache-dir", type=pathlib.Path, help=f"folder of the model (default {demo.cache_folder()})")
    made.add_argument("--source", type=pathlib.Path, help=f"the dense {demo.SOURCE_FILE}, instead of fetching it")
    made.add_argument("--check", action="store_true", help="hash the whole file if it exists, not samples of it")

    out = commands.add_parser("synthetic", help="write a model with random weights")
    out.add_argument(
        "path", type=pathlib.Path, metavar="OUT", help="the GGUF to write; shards get -0000i-of-0000N in the name"
    )
    out.add_argument(
        "--preset", choices=synthetic.PRESETS, default="tiny", help="start from this shape (default %(default)s)"
    )
    out.add_argument("--arch", choices=synthetic.ARCHITECTURES, help="llama.cpp architecture")
    out.add_argument(
        "--expert-type",
        metavar="TYPE[,TYPE,TYPE]",
        help="weight type of the experts, or of gate, up and down; e.g. Q4_K or Q4_K,Q4_K,Q6_K",
    )
    out.add_argument(
        "--tensor-order", choices=("normal", "reversed", "shuffled"), help="order of the tensors in the file"
    )
    for field, text in _INTEGERS.items():
        out.add_argument(f"--{field.replace('_', '-')}", type=int, metavar="N", help=text)
    for field, text in _TEXTS.items():
        out.add_argument(f"--{field.replace('_', '-')}", metavar="TEXT", help=text)
    for field, text in _FLAGS.items():
        out.add_argument(f"--{field.replace('_', '-')}", action=argparse.BooleanOptionalAction, help=text)

    listed = commands.add_parser("presets", help="list the presets of `synthetic`")
    for sub in (made, out, listed):
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of paths")
    for sub in (made, out):
        sub.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _spec(args: argparse.Namespace) -> Any:
    changes = {
        field: getattr(args, field)
        for field in (*_INTEGERS, *_TEXTS, *_FLAGS, "arch", "tensor_order")
        if getattr(args, field) is not None
    }
    preset = synthetic.PRESETS[args.preset]
    if args.expert_type is not None:
        names = tuple(args.expert_type.split(","))
        if len(names) not in (1, 3):
            raise ValueError(f"--expert-type takes one type or three, not {len(names)}")
        n_layer = changes.get("n_layer", preset.n_layer)
        changes["expert_type"] = names[0] if len(names) == 1 else (names,) * n_layer
    return dataclasses.replace(preset, **changes)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    if args.command == "presets":
        return {
            name: {"arch": spec.arch, "tensor_bytes": spec.tensor_bytes(), "expert_bytes": spec.expert_bytes()}
            for name, spec in synthetic.PRESETS.items()
        }
    if args.command == "demo":
        path = demo.ensure_demo_model(
            args.experts, args.cache_dir, not args.quiet, check=args.check, source=args.source
        )
        files = [{"path": str(path), "bytes": path.stat().st_size}]
        return {"files": files, "seconds": time.perf_counter() - began}
    spec = _spec(args)
    written = synthetic.write_model(args.path, spec, progress=not args.quiet)
    return {
        "files": [{"path": str(file.path), "bytes": file.bytes, "sha256": file.sha256} for file in written],
        "seconds": time.perf_counter() - began,
        "recipe": spec.recipe(),
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status (0, or 1 with one line on stderr)."""
    args = _parser().parse_args(argv)
    try:
        result = _run(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"make_model.py: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(result))
    elif args.command == "presets":
        for name, facts in result.items():
            tensors, experts = facts["tensor_bytes"] / 1e9, facts["expert_bytes"] / 1e9
            print(f"{name:16} {facts['arch']:10} {tensors:6.2f} GB, of which experts {experts:.2f} GB")
    else:
        for file in result["files"]:
            print(file["path"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
