"""Speed of streaming against upstream's ways of running the same model: paired, interleaved runs in separate processes.

    python bench/streaming.py --preset qwen3-30b --dir /some/disk --trace qwen.route.csv --out bench/results/NAME.json
    python bench/streaming.py --model PATH --memory-limit 8GiB --cache 5GiB --variants "stream,upstream mmap"

Variants (--list names them): streamed in several ways, and upstream mmap and resident, the first under the same memory
limit. A preset is a synthetic model of a real one's measures, made if it is not there.

Without --trace tokens are random, and so is the routing. With --trace the experts are those of a recorded routing, in
every variant: in streamed ones in place of the ids of the operation, in upstream's by an eval callback that writes the
same ids (replay_ids.c, compiled with cc). Then there is no router to predict with, so reading ahead is told the
recorded experts at a stated recall. Published figures for next-layer prediction are 0.7 to 0.9.

The page cache is dropped before each run (root). The disk is measured in every round. The bound is what no streaming
engine can beat: a token takes at least the resident time, and at least the bytes that a cache of that size has to read
(those of the run without reading ahead, where there is one) at the disk's rate. Prints a markdown table and writes all
runs as JSON. Never asserts a time: machines differ, only ratios within one run of this program mean something.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import traces

from moestream import bench, synthetic
from moestream.sizes import parse_size
from moestream.stream import Stream


@dataclass(frozen=True)
class Variant:
    """One way to run the model. `options` are Stream options on top of the common ones."""

    mode: str = "stream"
    options: dict[str, Any] = field(default_factory=dict)
    limited: bool = True
    recall: float = 0.8
    n_seq: int = 1
    idle_s: float = 0.0  # between the load and the prompt, as while somebody types
    warm: bool = False  # with the list of an earlier run
    without_ahead: str = ""  # the variant that reads what this cache has to read, and nothing more


OFF = {"prefetch": "off"}
VARIANTS: dict[str, Variant] = {
    "stream": Variant(without_ahead="stream without read-ahead"),
    "stream, recall 0.7": Variant(recall=0.7, without_ahead="stream without read-ahead"),
    "stream, recall 0.9": Variant(recall=0.9, without_ahead="stream without read-ahead"),
    "stream without read-ahead": Variant(options=OFF),
    "stream by pread": Variant(options={"io": "pread"}, without_ahead="stream without read-ahead"),
    "stream by pread without read-ahead": Variant(options={"io": "pread", **OFF}),
    "stream, 10 % cache": Variant(options={"cache": "10%"}, without_ahead="stream, 10 % cache without read-ahead"),
    "stream, 10 % cache without read-ahead": Variant(options={"cache": "10%", **OFF}),
    "stream, no cache": Variant(options={"cache": 0}),
    "stream, 10 % cache, recall 0.9": Variant(
        options={"cache": "10%"}, recall=0.9, without_ahead="stream, 10 % cache without read-ahead"
    ),
    "stream, 10 % cache, four sequences": Variant(options={"cache": "10%"}, n_seq=4),
    "stream, 1 % cache": Variant(options={"cache": "1%"}),
    "stream, 1 % cache, four sequences": Variant(options={"cache": "1%"}, n_seq=4),
    "stream, after 8 s": Variant(options=OFF, idle_s=8),
    "stream, warm start, after 8 s": Variant(options=OFF, idle_s=8, warm=True),
    "stream, all in cache": Variant(options={"cache": "100%"}, limited=False, recall=0.0),
    "upstream mmap": Variant("mmap"),
    "upstream resident": Variant("resident", limited=False),
    "upstream resident, repacked": Variant("repack", limited=False),
}


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the variants and end")
    parser.add_argument("--model", type=Path, help="GGUF to measure")
    parser.add_argument("--preset", choices=sorted(synthetic.PRESETS), help="synthetic model, made in --dir if absent")
    parser.add_argument("--dir", type=Path, default=Path("models"), help="where presets are kept (default: models)")
    parser.add_argument("--layers", type=int, help="cut the preset to so many layers")
    parser.add_argument("--prompt-twice", action="store_true", help="compute all a second time, timed apart")
    parser.add_argument("--trace", type=Path, help="recorded routing (see traces.py)")
    parser.add_argument(
        "--variants",
        default="stream,stream without read-ahead,upstream mmap,upstream resident",
        help="comma-separated names; 'stream, recall 0.7' and the like with ; between names",
    )
    parser.add_argument("--cache", default="5GiB", help="cache of the streamed variants that name none")
    parser.add_argument("--memory-limit", default="8GiB", help="memory cgroup of the limited variants; 'none' for none")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--mmap-tokens", type=int, default=8, help="tokens in the mmap variant, which is slow")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--out", type=Path, help="JSON file for all runs")
    return parser.parse_args()


def model_path(args: argparse.Namespace, trace: traces.Trace | None) -> Path:
    """The model to measure, made if it is a preset that is not there; with a trace it uses as many experts."""
    if args.model is not None:
        return Path(args.model)
    if args.preset is None:
        sys.exit("give --model or --preset")
    spec, name = synthetic.PRESETS[args.preset], args.preset
    if trace is not None and trace.ids.shape[2] != spec.n_expert_used:
        spec = replace(spec, n_expert_used=trace.ids.shape[2])
        name = f"{name}-{spec.n_expert_used}-used"
    if args.layers is not None:
        spec = replace(spec, n_layer=args.layers)
        name = f"{name}-{args.layers}-layers"
    path = args.dir / f"{name}.gguf"
    if not path.exists():
        args.dir.mkdir(parents=True, exist_ok=True)
        synthetic.write_model(path, spec, progress=True)
    return Path(path)


def compile_replay(folder: Path) -> Path:
    """The eval callback for upstream's modes, as a shared library."""
    import moestream

    include = Path(moestream.__file__).parent / "include" / "llama.cpp"
    library = folder / "replay_ids.so"
    source = Path(__file__).with_name("replay_ids.c")
    subprocess.run(
        [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", f"-I{include}", source, "-o", library], check=True
    )
    return library


def replay_files(trace: traces.Trace, folder: Path) -> dict[int, Path]:
    """The recording as arrays on disk, by number of sequences: these are as many places of the same recording."""
    out = {}
    for n_seq in {variant.n_seq for variant in VARIANTS.values()}:
        n, decode = len(trace.ids), trace.ids[trace.n_prompt :]
        steps = [
            decode[(i + seq * len(decode) // n_seq) % len(decode)] for i in range(len(decode)) for seq in range(n_seq)
        ]
        ids = trace.ids if n_seq == 1 else np.concatenate([trace.ids[: trace.n_prompt], np.stack(steps)])
        assert n_seq > 1 or len(ids) == n
        out[n_seq] = folder / f"replay-{n_seq}.npy"
        np.save(out[n_seq], ids)
    return out


def run(
    args: argparse.Namespace, path: Path, names: list[str], trace: traces.Trace | None, folder: Path
) -> tuple[dict[str, list[dict[str, Any]]], list[float]]:
    """Every variant once a round, and the disk's rate. The order is another one in each round: on a virtual machine,
    memory that a large process has left has to be fetched from the host again, and the run behind it pays for that.
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    limit = None if args.memory_limit == "none" else parse_size(args.memory_limit, "--memory-limit")
    disk: list[float] = []
    disk_job = {"path": str(path), "mode": "disk", "stream": bench.options_json(Stream(cache="min"))}
    replays = replay_files(trace, folder) if trace is not None else {}
    library = compile_replay(folder) if trace is not None else None
    for repeat in range(args.repeats):
        bench.drop_caches()
        disk.append(float(bench.run_worker(disk_job, None)["disk_read_bytes_per_s"]))
        for name in random.Random(repeat).sample(names, len(names)):
            variant = VARIANTS[name]
            slow = variant.mode == "mmap"
            job = {
                "path": str(path),
                "mode": variant.mode,
                "prompt_tokens": min(args.prompt_tokens, args.mmap_tokens) if slow else args.prompt_tokens,
                "tokens": args.mmap_tokens if slow else args.tokens,
                "n_threads": args.threads,
                "n_ubatch": args.ubatch,
                "n_seq": variant.n_seq,
                "seed": 1,
                "prompt_twice": args.prompt_twice,
                "stream": bench.options_json(Stream(**{"cache": args.cache, **variant.options})),
            }
            if trace is not None:
                job.update(
                    replay=str(replays[variant.n_seq]), replay_recall=variant.recall, replay_library=str(library)
                )
            if variant.warm:
                job["stream"]["warm_start"] = str(folder / "warm.txt")
                if not (folder / "warm.txt").exists():
                    bench.run_worker(job, name)  # the run before
            job["idle_s"] = variant.idle_s
            bench.drop_caches()
            with bench.memory_cgroup(limit if variant.limited else None) as procs:
                answer = bench.run_worker({**job, "cgroup_procs": procs}, name)
                answer.update(bench.cgroup_use(procs))
            runs[name].append(answer)
            print(
                f"{name} {repeat + 1}/{args.repeats}: {answer['tok_per_s']:.2f} tokens/s, prompt "
                f"{answer['prefill_s']:.2f} s, load {answer['load_s']:.2f} s",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    return runs, disk


def median(runs: list[dict[str, Any]], key: str) -> float:
    """Median of one number over the runs of a variant."""
    return statistics.median(float(run[key]) for run in runs)


def report(runs: dict[str, list[dict[str, Any]]], disk: float) -> list[dict[str, Any]]:
    """One row per variant: medians, and fractions of the bounds of decode, prefill and load."""
    resident = runs.get("upstream resident")
    rows = []
    for name, answers in runs.items():
        row: dict[str, Any] = {"variant": name}
        for key in ("tok_per_s", "prefill_tok_per_s", "prefill_s", "load_s", "major_faults_per_token"):
            row[key] = median(answers, key)
        if resident and answers[0]["prefill_again_s"] is not None:
            row["decode_to_resident"] = row["tok_per_s"] / median(resident, "tok_per_s")
            row["prefill_again_to_resident"] = median(resident, "prefill_again_s") / median(answers, "prefill_again_s")
        row["peak_rss_gib"] = median(answers, "peak_rss_bytes") / 2**30
        if "read_bytes_per_token" in answers[0]:
            row["hit_rate"] = median(answers, "hit_rate")
            row["read_mib_per_token"] = median(answers, "read_bytes_per_token") / 2**20
            row["stall_ms_per_token"] = median(answers, "stall_ms_per_token")
            row["prefill_reads_per_slice"] = median(answers, "prefill_reads") / answers[0]["n_slices"]
            row["load_bound_s"] = answers[0]["load_dense_bytes"] / disk
            needed = runs.get(VARIANTS[name].without_ahead) or answers
            if resident and VARIANTS[name].n_seq == 1:
                seconds = max(1 / median(resident, "tok_per_s"), median(needed, "read_bytes_per_token") / disk)
                row["bound_tok_per_s"] = 1 / seconds
                row["fraction_of_bound"] = row["tok_per_s"] * seconds
                seconds = max(median(resident, "prefill_s"), median(needed, "prefill_read_bytes") / disk)
                row["prefill_fraction_of_bound"] = seconds / row["prefill_s"]
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as markdown."""
    head = (
        "| variant | tokens/s | of the bound | prompt tokens/s | of the bound | load s | hits | MiB/token | peak GiB |"
    )
    lines = [head, "|---" * 9 + "|"]
    for row in rows:
        share = f"{row['fraction_of_bound']:.2f}" if "fraction_of_bound" in row else ""
        prefill = f"{row['prefill_fraction_of_bound']:.2f}" if "fraction_of_bound" in row else ""
        hits = f"{100 * row['hit_rate']:.1f} %" if "hit_rate" in row else ""
        read = f"{row['read_mib_per_token']:.0f}" if "read_mib_per_token" in row else ""
        lines.append(
            f"| {row['variant']} | {row['tok_per_s']:.2f} | {share} | {row['prefill_tok_per_s']:.1f} | {prefill} "
            f"| {row['load_s']:.2f} | {hits} | {read} | {row['peak_rss_gib']:.2f} |"
        )
    return "\n".join(lines)


def processor() -> str:
    """The processor's name, as the kernel tells it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def main() -> int:
    """Runs the benchmark."""
    args = options()
    if args.list:
        print("\n".join(VARIANTS))
        return 0
    if os.geteuid() != 0:
        sys.exit("root is needed: the page cache is dropped before each run, and memory limits are set")
    separator = ";" if ";" in args.variants else ","
    names = [name.strip() for name in args.variants.split(separator)]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        sys.exit(f"unknown variants {', '.join(unknown)}; there are: {'; '.join(VARIANTS)}")
    trace = traces.read(args.trace) if args.trace else None
    path = model_path(args, trace)
    with tempfile.TemporaryDirectory() as folder:
        runs, disk = run(args, path, names, trace, Path(folder))
    rows = report(runs, statistics.median(disk))
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "model": path.name,
        "model_bytes": path.stat().st_size,
        "machine": {
            "cpu_count": os.cpu_count(),
            "processor": processor(),
            "kernel": platform.release(),
        },
        "command": "python bench/streaming.py "
        + " ".join(Path(arg).name if "/" in arg else arg for arg in sys.argv[1:]),
        "routing": f"{trace.name}, {len(trace.ids)} tokens" if trace else "random tokens",
        "page_cache": "dropped before each run",
        "memory_limit": args.memory_limit,
        "disk_read_bytes_per_s": disk,
        "rows": rows,
        "runs": runs,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"disk: {', '.join(f'{rate / 2**20:.0f}' for rate in disk)} MiB/s")
    print(table(rows))
    for row in rows:
        if "decode_to_resident" in row:
            print(
                f"{row['variant']}: decode {row['decode_to_resident']:.3f} of resident, the prompt a second time "
                f"{row['prefill_again_to_resident']:.3f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
