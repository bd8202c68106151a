"""Speed of streaming against upstream's ways of running the same model: paired, interleaved runs in separate processes.

    python bench/streaming.py --model PATH --memory-limit 8GiB --cache 5GiB --out bench/results/NAME.json
    python bench/streaming.py --preset qwen3-30b --dir /some/disk ...        makes the synthetic model first

Variants: streamed; the same without reading ahead; with pread; with every expert in the cache; upstream
mmap under the same memory limit; upstream resident. Random tokens, the same in every variant. The page cache is dropped
before each run (root). Prints a markdown table, writes all runs as JSON. Never asserts a time: machines differ, only
ratios within one run of this program mean something.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moestream import bench, synthetic
from moestream.sizes import parse_size
from moestream.stream import Stream

# name -> (mode, stream options on top of the common ones, runs under the memory limit)
VARIANTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "stream": ("stream", {}, True),
    "stream without read-ahead": ("stream", {"prefetch": "off"}, True),
    "stream by pread": ("stream", {"io": "pread"}, True),
    "stream with all in cache": ("stream", {"cache": "100%"}, False),
    "upstream mmap": ("mmap", {}, True),
    "upstream resident": ("resident", {}, False),
}


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF to measure")
    parser.add_argument("--preset", choices=sorted(synthetic.PRESETS), help="synthetic model, made in --dir if absent")
    parser.add_argument("--dir", type=Path, default=Path("models"), help="where presets are kept (default: models)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated names")
    parser.add_argument("--cache", default="5GiB", help="cache of the streamed variants")
    parser.add_argument("--memory-limit", default="8GiB", help="memory cgroup of the limited variants; 'none' for none")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--mmap-tokens", type=int, default=8, help="tokens in the mmap variant, which is slow")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--ubatch", type=int, default=512)
    parser.add_argument("--out", type=Path, help="JSON file for all runs")
    return parser.parse_args()


def model_path(args: argparse.Namespace) -> Path:
    """The model to measure, made if it is a preset that is not there."""
    if args.model is not None:
        return Path(args.model)
    if args.preset is None:
        sys.exit("give --model or --preset")
    path = args.dir / f"{args.preset}.gguf"
    if not path.exists():
        args.dir.mkdir(parents=True, exist_ok=True)
        synthetic.write_model(path, synthetic.PRESETS[args.preset], progress=True)
    return Path(path)


def run(args: argparse.Namespace, path: Path, names: list[str], limit: int | None) -> dict[str, list[dict[str, Any]]]:
    """Every variant once a round, in turn."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repeat in range(args.repeats):
        for name in names:
            mode, extra, limited = VARIANTS[name]
            job = {
                "path": str(path),
                "mode": mode,
                "prompt_tokens": args.prompt_tokens if mode != "mmap" else min(args.prompt_tokens, args.mmap_tokens),
                "tokens": args.tokens if mode != "mmap" else args.mmap_tokens,
                "n_threads": args.threads,
                "n_ubatch": args.ubatch,
                "seed": 1,
                "stream": asdict(Stream(**{"cache": args.cache, **extra})),
            }
            bench.drop_caches()
            with bench.memory_cgroup(limit if limited else None) as procs:
                answer = bench.run_worker({**job, "cgroup_procs": procs}, name)
            runs[name].append(answer)
            print(
                f"{name} {repeat + 1}/{args.repeats}: {answer['tok_per_s']:.2f} tokens/s", file=sys.stderr, flush=True
            )
    return runs


def median(runs: list[dict[str, Any]], key: str) -> float:
    """Median of one number over the runs of a variant."""
    return statistics.median(float(run[key]) for run in runs)


def report(runs: dict[str, list[dict[str, Any]]], disk: float) -> list[dict[str, Any]]:
    """One row per variant: medians, and the fraction of the bound of this variant's own reads."""
    resident = median(runs["upstream resident"], "tok_per_s") if runs.get("upstream resident") else None
    rows = []
    for name, answers in runs.items():
        row: dict[str, Any] = {"variant": name}
        for key in ("tok_per_s", "prefill_tok_per_s", "load_s"):
            row[key] = median(answers, key)
        row["peak_rss_gib"] = median(answers, "peak_rss_bytes") / 2**30
        if "read_bytes_per_token" in answers[0]:
            row["hit_rate"] = median(answers, "hit_rate")
            row["read_mib_per_token"] = median(answers, "read_bytes_per_token") / 2**20
            row["stall_ms_per_token"] = median(answers, "stall_ms_per_token")
            if resident:
                seconds = max(1 / resident, median(answers, "read_bytes_per_token") / disk)
                row["bound_tok_per_s"] = 1 / seconds
                row["fraction_of_bound"] = row["tok_per_s"] * seconds
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as markdown."""
    head = "| variant | tokens/s | of the bound | prefill tokens/s | load s | hits | MiB/token read | peak GiB |"
    lines = [head, "|---" * 8 + "|"]
    for row in rows:
        share = f"{row['fraction_of_bound']:.2f}" if "fraction_of_bound" in row else ""
        hits = f"{100 * row['hit_rate']:.1f} %" if "hit_rate" in row else ""
        read = f"{row['read_mib_per_token']:.0f}" if "read_mib_per_token" in row else ""
        lines.append(
            f"| {row['variant']} | {row['tok_per_s']:.2f} | {share} | {row['prefill_tok_per_s']:.1f} "
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
    if os.geteuid() != 0:
        sys.exit("root is needed: the page cache is dropped before each run, and memory limits are set")
    names = [name.strip() for name in args.variants.split(",")]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        sys.exit(f"unknown variants {', '.join(unknown)}; there are: {', '.join(VARIANTS)}")
    path = model_path(args)
    limit = None if args.memory_limit == "none" else parse_size(args.memory_limit, "--memory-limit")
    disk_job = {"path": str(path), "mode": "disk", "stream": asdict(Stream(cache="min"))}
    bench.drop_caches()
    disk = [float(bench.run_worker(disk_job, None)["disk_read_bytes_per_s"])]
    runs = run(args, path, names, limit)
    disk.append(float(bench.run_worker(disk_job, None)["disk_read_bytes_per_s"]))
    rows = report(runs, statistics.mean(disk))
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "model": path.name,
        "model_bytes": path.stat().st_size,
        "machine": {
            "cpu_count": os.cpu_count(),
            "processor": processor(),
            "kernel": platform.release(),
        },
        "command": "python bench/streaming.py " + " ".join(arg for arg in sys.argv[1:] if not arg.startswith("/")),
        "page_cache": "dropped before each run",
        "memory_limit_bytes": limit,
        "disk_read_bytes_per_s": disk,
        "rows": rows,
        "runs": runs,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"disk: {disk[0] / 2**20:.0f} MiB/s before, {disk[1] / 2**20:.0f} MiB/s after the runs")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
