"""`moestream bench`: streamed, resident and mmap on the same work, in separate processes, interleaved.

The work: a prompt of random tokens, then random tokens one by one (the same in every mode, seeded), so no mode gets
an easier text. `resident` reads everything into memory (no mmap), `mmap` maps the file as llama.cpp does by default;
neither repacks, which would take as much memory again as the experts have. The bound is what no streaming engine can
beat: one token takes at least the resident time, and at least the bytes read for it at the disk's own rate, measured
on the model file with the reader, block size and depth of the stream.

Each run is this module as its own process (`python -m moestream.bench`), told what to do by one JSON line on stdin.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

MODES = ("stream", "resident", "mmap")
DISK_BYTES = 2 * 1024**3
LEAST_MEMORY = 32 * 1024**2


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    from moestream.cli_options import add_compute_options, add_stream_options, whole

    parser.add_argument("--modes", default="stream,resident,mmap", metavar="LIST", help="of stream, resident, mmap")
    parser.add_argument("--prompt-tokens", type=whole(1), default=128, metavar="N", help="random tokens in the prompt")
    parser.add_argument("--tokens", "-n", type=whole(1), default=64, metavar="N", help="tokens decoded one by one")
    parser.add_argument(
        "--repeats", type=whole(1), default=1, metavar="N", help="runs of each mode; the median is reported"
    )
    add_compute_options(parser)
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N", help="seed of the tokens")
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="run stream and mmap in a memory cgroup of this size, page cache dropped before each (needs root)",
    )
    parser.add_argument("--drop-caches", action="store_true", help="drop the page cache before every run (needs root)")
    add_stream_options(parser, switch=False)


def command(args: argparse.Namespace) -> int:
    """Runs the command."""
    from moestream.cli import note, print_json
    from moestream.cli_options import UsageError, given_stream_options, refuse_small_cache
    from moestream.errors import UnsupportedError
    from moestream.placement import plan
    from moestream.sizes import parse_size
    from moestream.stream import Stream

    modes = list(dict.fromkeys(mode.strip() for mode in args.modes.split(",") if mode.strip()))
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise UsageError(f"--modes was {args.modes!r}; it is a list of {', '.join(MODES)}")
    limit = parse_size(args.memory_limit, "--memory-limit") if args.memory_limit is not None else None
    if limit is not None and limit < LEAST_MEMORY:
        raise UsageError(
            f"--memory-limit was {args.memory_limit}, which is too small: Python and llama.cpp alone take "
            f"{LEAST_MEMORY >> 20} MiB"
        )
    if (limit or args.drop_caches) and os.geteuid() != 0:
        raise UsageError("--memory-limit and --drop-caches need root")
    stream = Stream(**given_stream_options(args))
    if "stream" in modes:
        # What is wrong with the model or the options is said before anything runs.
        made = plan(args.model, stream=stream)
        if not made.expert_bytes:
            raise UnsupportedError(
                f"{args.model} has no experts; there is nothing to stream (--modes resident,mmap measures the others)"
            )
        refuse_small_cache(stream, made)
    work = {
        "path": args.model,
        "prompt_tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "n_threads": args.threads,
        "n_ubatch": args.ubatch,
        "seed": args.seed,
        "stream": options_json(stream),
    }
    result = measure(work, modes, args.repeats, limit, args.drop_caches, note)
    if args.json:
        print_json(result)
    else:
        print_report(result)
    return 0


def options_json(stream: Any) -> dict[str, Any]:
    """Stream options as JSON can hold them; a recorded routing goes by its file (job["replay"])."""
    options = asdict(stream)
    del options["replay"], options["replay_recall"]
    return options


def measure(
    work: dict[str, Any], modes: list[str], repeats: int, limit: int | None, drop: bool, note: Any
) -> dict[str, Any]:
    """All runs, interleaved, and what follows from them."""
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    disk = None
    if "stream" in modes:
        note("disk: reading slices of the model file")
        disk = run_worker({**work, "mode": "disk"}, None)["disk_read_bytes_per_s"]
    for repeat in range(repeats):
        for mode in modes:
            limited = limit if mode in ("stream", "mmap") else None
            dropped = drop or limited is not None
            if dropped:
                drop_caches()
            with memory_cgroup(limited) as procs:
                run = run_worker({**work, "mode": mode, "cgroup_procs": procs}, mode)
            run["cache_state"] = "dropped" if dropped else "as found"
            runs[mode].append(run)
            note(f"{mode} {repeat + 1}/{repeats}: {run['tok_per_s']:.2f} tokens/s")
    result: dict[str, Any] = {
        "model": work["path"],
        "prompt_tokens": work["prompt_tokens"],
        "tokens": work["tokens"],
        "repeats": repeats,
        "memory_limit_bytes": limit,
        "disk_read_bytes_per_s": disk,
        "modes": {mode: summary(runs[mode]) for mode in modes},
        "bound_tok_per_s": None,
        "fraction_of_bound": None,
    }
    streamed, resident = result["modes"].get("stream"), result["modes"].get("resident")
    if streamed and resident and disk:
        seconds = max(1 / resident["tok_per_s"], streamed["read_bytes_per_token"] / disk)
        result["bound_tok_per_s"] = 1 / seconds
        result["fraction_of_bound"] = streamed["tok_per_s"] * seconds
    return result


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median speed, and the speeds of all."""
    ordered = sorted(runs, key=lambda run: float(run["tok_per_s"]))
    middle = dict(ordered[(len(ordered) - 1) // 2])
    middle["tok_per_s_runs"] = [run["tok_per_s"] for run in runs]
    middle["prefill_tok_per_s"] = statistics.median_low(run["prefill_tok_per_s"] for run in runs)
    middle["load_s"] = statistics.median_low(run["load_s"] for run in runs)
    return middle


def run_worker(job: dict[str, Any], mode: str | None) -> dict[str, Any]:
    """One run in its own process; its answer is the last line of its stdout.

    Raises:
        OutOfMemoryError: it was killed, as its memory limit does. InternalError: it died of another signal, which is
        named, or reported an error.
    """
    from moestream.errors import InternalError, OutOfMemoryError

    worker = subprocess.Popen(
        [sys.executable, "-m", "moestream.bench"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        out, _ = worker.communicate(json.dumps(job) + "\n")
    except BaseException:
        worker.kill()
        worker.wait()
        raise
    lines = out.strip().splitlines()
    if worker.returncode == -signal.SIGKILL and job.get("cgroup_procs"):
        raise OutOfMemoryError(f"the {mode or job['mode']} run was killed: its memory limit is too small for it")
    if worker.returncode < 0:
        raise InternalError(f"the {mode or job['mode']} run was killed by signal {-worker.returncode}")
    answer: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": f"it ended with {worker.returncode}"}
    if "error" in answer:
        raise InternalError(f"the {mode or job['mode']} run failed: {answer['error']}")
    return answer


def drop_caches() -> None:
    """Empties the page cache (root only)."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")


@contextmanager
def memory_cgroup(limit: int | None) -> Iterator[str | None]:
    """A memory cgroup of its own, v1 or v2, without swap; gives the file a process writes its number to.

    Raises:
        UnsupportedError: there is no memory controller that can be used, with what was tried.
    """
    from moestream import host
    from moestream.errors import UnsupportedError

    if limit is None:
        yield None
        return
    mounted = host.cgroup_root("memory")
    if mounted is None:
        raise UnsupportedError("--memory-limit: no cgroup memory controller is mounted here")
    root, version = mounted
    group = root / f"moestream-bench-{os.getpid()}"
    try:
        if version == 2 and "memory" not in (root / "cgroup.subtree_control").read_text(encoding="ascii").split():
            (root / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
        group.mkdir()
        settings = {"memory.max": limit, "memory.swap.max": 0}
        if version == 1:
            settings = {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}
        for i, (name, value) in enumerate(settings.items()):
            if i == 0 or (group / name).exists():
                (group / name).write_text(str(value), encoding="ascii")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        raise UnsupportedError(f"--memory-limit: the cgroup {group} could not be made: {error}") from error
    try:
        yield str(group / "cgroup.procs")
    finally:
        for _ in range(50):  # the kernel needs a moment after the last process has ended
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def cgroup_use(procs: str | None) -> dict[str, int]:
    """What a memory cgroup of ours has seen: its peak in bytes, and how often its limit was reached. {} without one."""
    if procs is None:
        return {}
    group = Path(procs).parent
    if (group / "memory.max_usage_in_bytes").exists():
        files = {"cgroup_peak_bytes": "memory.max_usage_in_bytes", "cgroup_limit_hits": "memory.failcnt"}
        return {name: int((group / file).read_text(encoding="ascii")) for name, file in files.items()}
    found = {}
    if (group / "memory.peak").exists():  # Linux 5.19
        found["cgroup_peak_bytes"] = int((group / "memory.peak").read_text(encoding="ascii"))
    events = dict(line.split() for line in (group / "memory.events").read_text(encoding="ascii").splitlines())
    return {**found, "cgroup_limit_hits": int(events["max"])}


# ---- the worker -----------------------------------------------------------------------------------------------------


def worker_main() -> int:
    """Reads one job from stdin, does it, prints the answer as JSON."""
    job = json.loads(sys.stdin.readline())
    from moestream.errors import MoestreamError

    try:
        if job.get("cgroup_procs"):
            # Before llama.cpp is loaded, so that all of it counts.
            Path(job["cgroup_procs"]).write_text(str(os.getpid()), encoding="ascii")
        answer = _measure_disk(job) if job["mode"] == "disk" else _measure_mode(job)
    except (MoestreamError, OSError, ValueError, MemoryError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    except KeyboardInterrupt:  # the terminal told the whole group; the parent says what there is to say
        return 130
    print(json.dumps(answer), flush=True)
    return 0


def _measure_disk(job: dict[str, Any]) -> dict[str, Any]:
    from moestream.disk import slice_rate
    from moestream.stream import Stream

    return {"disk_read_bytes_per_s": slice_rate(job["path"], Stream(**{**job["stream"], "cache": "min"}), DISK_BYTES)}


def _replay_state(job: dict[str, Any], ids: Any) -> tuple[tuple[int, int], Any]:
    """llama.cpp's eval callback for a recorded routing in a model that is not streamed, and what lives with it."""
    import ctypes

    import numpy as np

    library = ctypes.CDLL(job["replay_library"])
    state = np.zeros(8, np.int64)  # struct replay of bench/replay_ids.c
    state[0] = ids.ctypes.data
    state[1:4] = ids.shape
    callback = ctypes.cast(library.replay_eval, ctypes.c_void_p).value
    return (callback or 0, state.ctypes.data), (library, state, ids)


def _decode_step(context: Any, tokens: Sequence[int], pos: int) -> None:
    """One token of each sequence. More than one sequence has to be batched by hand."""
    from moestream import _native_api as native
    from moestream.errors import InternalError

    if len(tokens) == 1:
        context.decode(tokens)
        return
    ffi, lib = native.ffi, native.lib
    batch = ffi.new("struct llama_batch *", lib.llama_batch_init(len(tokens), 0, 1))
    try:
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos, 1, 1
            batch.seq_id[i][0] = i
        batch.n_tokens = len(tokens)
        result = lib.llama_decode(context._handles.context, batch[0])
        err = native.new_error()
        if context._handles.hook != ffi.NULL:
            native.check(lib.moestream_context_status(context._handles.hook, err), err)
        if result != 0:
            raise InternalError(f"llama_decode returned {result}")
    finally:
        lib.llama_batch_free(batch[0])


def _measure_mode(job: dict[str, Any]) -> dict[str, Any]:
    """The job's prompt, then its tokens one by one (one of each sequence, with n_seq above 1)."""
    import numpy as np

    from moestream import host
    from moestream.model import Model
    from moestream.stream import Stream

    ids = np.load(job["replay"]) if job.get("replay") else None
    stream = Stream(**job["stream"], replay=ids, replay_recall=job.get("replay_recall", 0.0))
    modes: dict[str, dict[str, Any]] = {
        "stream": {"stream": stream},
        "resident": {"load_mode": "none", "use_extra_bufts": False},
        "repack": {"load_mode": "none", "use_extra_bufts": True},
        "mmap": {"load_mode": "mmap", "use_extra_bufts": False},
    }
    n_prompt, n, n_seq = job["prompt_tokens"], job["tokens"], job.get("n_seq", 1)
    context_options: dict[str, Any] = {"n_ubatch": job["n_ubatch"], "n_threads": job["n_threads"], "n_seq_max": n_seq}
    if n_seq > 1:
        context_options["kv_unified"] = True
    if ids is not None and job["mode"] != "stream":
        context_options["eval_callback"], _alive = _replay_state(job, ids)
    started = time.monotonic()
    with Model(job["path"], **modes[job["mode"]]) as model:
        load_s = time.monotonic() - started
        tokens = np.random.default_rng(job["seed"]).integers(0, model.n_vocab, n_prompt + n * n_seq)
        n_ctx = (n_prompt + n) * n_seq
        with model.context(n_ctx, n_batch=max(n_prompt, job["n_ubatch"]), **context_options) as context:
            time.sleep(job.get("idle_s", 0.0))
            started = time.monotonic()
            context.decode(tokens[:n_prompt])
            prefill_s = time.monotonic() - started
            prompt = context.stats()["total"]
            prefill_again_s = None
            if job.get("prompt_twice"):
                for token in tokens[n_prompt:]:  # so that the tokens below find their experts in the cache
                    context.decode([token])
                context.clear()
                started = time.monotonic()
                context.decode(tokens[:n_prompt])
                prefill_again_s = time.monotonic() - started
            for seq in range(1, n_seq):
                context.seq_cp(0, seq)
            before, faults = context.stats()["total"], resource.getrusage(resource.RUSAGE_SELF).ru_majflt
            took = []
            for i, step in enumerate(tokens[n_prompt:].reshape(n, n_seq).tolist()):
                started = time.monotonic()
                _decode_step(context, step, n_prompt + i)
                took.append(time.monotonic() - started)
            after = context.stats()["total"]
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
        answer: dict[str, Any] = {
            "tok_per_s": n * n_seq / sum(took),
            "prefill_tok_per_s": n_prompt / prefill_s,
            "prefill_s": prefill_s,
            "prefill_again_s": prefill_again_s,
            "load_s": load_s,
            "token_ms_median": 1000 * statistics.median(took),
            "token_ms_max": 1000 * max(took),
            "major_faults_per_token": faults / (n * n_seq),
            "n_threads": job["n_threads"] or host.physical_cores(),
            "peak_rss_bytes": host.peak_rss(),
            "described": model.describe(),
            "choices": model.choices() if model.streaming else {},
        }
        if before:
            answer.update(_streaming_numbers(before, after, n * n_seq))
            answer.update(prefill_read_bytes=prompt["read_bytes"], prefill_reads=prompt["n_reads"])
            answer["prefill_stall_s"] = prompt["stall_ns"] * 1e-9
            answer["n_slices"] = sum(1 for t in model.plan.tensors if t.place == "STREAM") * model.plan.n_expert
            answer["load_dense_bytes"] = model.stats()["load_dense_bytes"]
    return answer


def _streaming_numbers(before: dict[str, Any], after: dict[str, Any], n: int) -> dict[str, Any]:
    """What streaming did in the tokens that were decoded one by one."""

    def grown(name: str) -> int:
        return int(after[name] - before[name])

    used = grown("n_hits") + grown("n_misses")
    return {
        "hit_rate": grown("n_hits") / used if used else None,
        "read_bytes_per_token": grown("read_bytes") / n,
        "stall_ms_per_token": grown("stall_ns") / 1e6 / n,
        "compute_ms_per_token": grown("compute_ns") / 1e6 / n,
        "prefetch_bytes_per_token": grown("prefetch_bytes") / n,
        "cache_bytes": after["cache_bytes"],
        "io": after["io"],
        "direct": after["direct"],
    }


def print_report(result: dict[str, Any]) -> None:
    """The numbers for people."""
    from moestream.sizes import format_bytes

    print(f"{'mode':10} {'tokens/s':>9} {'prefill/s':>10} {'load s':>7} {'peak memory':>12}  page cache")
    for mode, run in result["modes"].items():
        print(
            f"{mode:10} {run['tok_per_s']:9.2f} {run['prefill_tok_per_s']:10.1f} {run['load_s']:7.2f} "
            f"{format_bytes(run['peak_rss_bytes']):>12}  {run['cache_state']}"
        )
    streamed = result["modes"].get("stream")
    if streamed:
        rate = streamed["hit_rate"]
        print(
            f"stream: {'no experts used' if rate is None else f'{100 * rate:.1f} % hits'}, "
            f"{format_bytes(streamed['read_bytes_per_token'])} read and {streamed['stall_ms_per_token']:.1f} ms waited "
            f"per token; disk {format_bytes(result['disk_read_bytes_per_s'])}/s"
        )
    if result["bound_tok_per_s"]:
        print(f"bound: {result['bound_tok_per_s']:.2f} tokens/s; reached {100 * result['fraction_of_bound']:.0f} %")


if __name__ == "__main__":
    sys.exit(worker_main())
