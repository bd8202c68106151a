"""Placement on a second device: ggml's RPC backend on loopback. Where tensors are is asserted from their buffers, and
logits with every placement equal the CPU-only run (the server's kernels are this machine's CPU kernels)."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from support import models, rpc

import moestream as ms

TOKENS = [1, 5, 9, 200, 33, 7, 8, 12, 400, 2, 77, 31, 90, 250, 3]
N_THREADS = 2  # attention splits its work by thread, so both ends have as many


@pytest.fixture(scope="module")
def server() -> Iterator[rpc.Server]:
    with rpc.Server(n_threads=N_THREADS) as running:
        yield running


@pytest.fixture(scope="module")
def device(server: rpc.Server) -> Iterator[str]:
    """The buffer type of the second device; it is gone again when the server is."""
    before = ms.device_names()
    (name,) = ms.add_rpc_server(server.endpoint)
    assert name in ms.device_names()
    assert ms.add_rpc_server(server.endpoint) == [name], "adding a server again must not make it a second device"
    assert ms.device_names().count(name) == 1
    yield f"{name}[{server.endpoint}]"
    ms.remove_rpc_server(server.endpoint)
    assert ms.device_names() == before


def run(path: pathlib.Path, **options: object) -> tuple[ms.Placement, np.ndarray]:
    """Where the tensors were, and the logits of a prompt in pieces of 4 and of two single tokens."""
    options = {"use_extra_bufts": False, **options}
    with ms.Model(path, **options) as model:  # type: ignore[arg-type]
        placed = model.placement()
        with model.context(64, n_ubatch=4, n_threads=N_THREADS, flash_attn=False) as context:
            rows = [context.decode(TOKENS, logits="all"), *(context.decode([token])[None, :] for token in (3, 141))]
        assert placed.misplaced == (), "what happened is not what was planned"
        assert sum(placed.bytes_by_place.values()) == sum(tensor.bytes for tensor in model.plan.tensors)
    return placed, np.concatenate([row.reshape(-1, row.shape[-1]) for row in rows])


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    return run(models.tiny(), n_gpu_layers=0, devices=[])[1]


def experts_by_buffer(placed: ms.Placement) -> dict[str | None, int]:
    """How many expert matrices each buffer type holds."""
    counts: dict[str | None, int] = {}
    for tensor in placed.tensors:
        if tensor.is_expert:
            kind = "CPU" if tensor.buffer_type == "CPU_Mapped" else tensor.buffer_type
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def test_without_rules_every_expert_is_on_the_device(device: str, reference: np.ndarray) -> None:
    placed, logits = run(models.tiny(), n_gpu_layers=-1)
    assert experts_by_buffer(placed) == {device: 12}
    assert (logits == reference).all()


@pytest.mark.parametrize(
    ("options", "on_cpu"),
    [
        ({"cpu_moe": True}, 12),
        ({"n_cpu_moe": 2}, 6),
        ({"overrides": [(r"blk\.3\..*_exps", "CPU")]}, 3),
        ({"cpu_moe_layers": [0, 3]}, 6),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_p1_as_many_expert_tensors_on_the_cpu_as_asked_and_no_others(
    device: str, reference: np.ndarray, options: dict[str, object], on_cpu: int
) -> None:
    placed, logits = run(models.tiny(), n_gpu_layers=-1, **options)
    counts = experts_by_buffer(placed)
    assert counts.get("CPU", 0) == on_cpu
    assert counts.get(device, 0) == 12 - on_cpu
    others = {t.buffer_type for t in placed.tensors if not t.is_expert and t.layer is not None}
    assert others == {device}, "attention and router stay on the device"
    assert (logits == reference).all()


@pytest.mark.parametrize("by", ["device", "buffer type"])
def test_experts_of_chosen_layers_go_to_the_device_and_the_rest_stays(
    device: str, reference: np.ndarray, by: str
) -> None:
    place = device.split("[")[0] if by == "device" else device
    placed, logits = run(models.tiny(), n_gpu_layers=0, expert_layers={place: [1, 2]})
    assert experts_by_buffer(placed) == {"CPU": 6, device: 6}
    assert (logits == reference).all()


@pytest.mark.parametrize("n_gpu_layers", [0, -1])
def test_experts_partly_on_an_rpc_host_partly_in_memory_partly_streamed(
    device: str, reference: np.ndarray, n_gpu_layers: int
) -> None:
    stream = ms.Stream(cache="min")
    placed, logits = run(
        models.tiny(), n_gpu_layers=n_gpu_layers, stream=stream, expert_layers={device: [0, 1], "CPU": [2]}
    )
    assert experts_by_buffer(placed) == {device: 6, "CPU": 3, "MOESTREAM": 3}
    assert (logits == reference).all()


def test_all_experts_streamed_while_dense_weights_are_on_the_device(device: str, reference: np.ndarray) -> None:
    placed, logits = run(models.tiny(), n_gpu_layers=-1, stream=ms.Stream(cache="min"))
    assert experts_by_buffer(placed) == {"MOESTREAM": 12}
    assert {t.buffer_type for t in placed.tensors if not t.is_expert and t.layer is not None} == {device}
    assert (logits == reference).all()


def test_p2_cpu_moe_leaves_no_fused_expert_on_the_device(device: str) -> None:
    path = models.named("fused_gate_up")
    wanted = run(path, n_gpu_layers=0, devices=[])[1]
    placed, logits = run(path, n_gpu_layers=-1, cpu_moe=True)
    assert set(experts_by_buffer(placed)) == {"CPU"}
    assert any("gate_up" in tensor.name for tensor in placed.tensors if tensor.is_expert)
    assert (logits == wanted).all()


def test_p6_the_string_form_takes_a_device_with_a_port(device: str) -> None:
    made = ms.plan(models.tiny(), overrides=f"exps={device}, ")
    assert made.expert_bytes_by_place == {device: made.expert_bytes}


def test_p10_two_hundred_loads_after_everything_was_dropped_place_alike(device: str) -> None:
    """Strings and arrays handed to C outlive Python's references; in a fresh process with a server of its own."""
    code = """
    import gc, sys
    import moestream as ms
    path, endpoint = sys.argv[1:]
    name, = ms.add_rpc_server(endpoint)
    wanted = None
    for i in range(200):
        rules = [("".join(["blk", r"\\.3\\.", ".*_exps"]), "".join(["C", "PU"])),
                 (r"blk\\.2\\..*_exps", f"{name}[{endpoint}]")]
        model = ms.Model(path, n_gpu_layers=-1, n_cpu_moe=1, overrides=rules, devices=["".join([name])],
                         tensor_split=[1.0], kv_overrides={"general.description": "x" * 100})
        del rules
        gc.collect()
        junk = [bytes([i % 256]) * n for n in (16, 24, 32, 48, 64, 128, 256) for _ in range(50)]
        found = [(t.name, t.buffer_type) for t in model.placement().tensors]
        wanted = wanted or found
        assert found == wanted, i
        assert sum("_exps" in n and b.startswith("CPU") for n, b in found) == 6
        model.close()
    print("alike")
    """
    with rpc.Server() as own:
        done = models.run_python(code, args=(str(models.tiny()), own.endpoint), timeout=100)
    assert done.stdout.strip() == "alike"


def test_a_tied_embedding_is_reported_once_and_its_copy_apart(device: str, tmp_path: pathlib.Path) -> None:
    """The file's tensor stays with the host; the second one, for the output, is on the device, outside the sums."""
    source = models.tiny()
    tied = tmp_path / "tied.gguf"
    without_output(source, tied)
    with ms.Model(tied, n_gpu_layers=-1) as model:
        placed = model.placement()
        rows = [tensor for tensor in placed.tensors if tensor.name == "token_embd.weight"]
        assert [(row.place, row.buffer_type) for row in rows] == [("DEFAULT", "CPU_Mapped"), (None, device)]
        file_bytes = sum(tensor.bytes for tensor in model.plan.tensors)
        assert sum(placed.bytes_by_buffer_type.values()) == file_bytes


def without_output(source: pathlib.Path, out: pathlib.Path) -> None:
    """A copy of a GGUF without its output.weight."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, "qwen3moe")
    for name, found in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = found.types[0]
            sub_type = found.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, found.contents(), kind, sub_type)
    for tensor in reader.tensors:
        if tensor.name != "output.weight":
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_removed_server_is_no_device_and_the_others_stay(server: rpc.Server, device: str) -> None:
    names = ms.device_names()
    with rpc.Server() as other:
        (second,) = ms.add_rpc_server(other.endpoint)
        assert ms.device_names() == [*names, second]
        ms.remove_rpc_server(other.endpoint)
    assert ms.device_names() == names
    assert ms.add_rpc_server(server.endpoint) == [device.split("[")[0]]
    with pytest.raises(ValueError, match="was not added"):
        ms.remove_rpc_server(other.endpoint)


def test_nobody_at_the_endpoint_is_an_error_and_not_an_abort() -> None:
    with pytest.raises(ms.ReadError, match=r"no RPC server answered at 127\.0\.0\.1:"):
        ms.add_rpc_server(f"127.0.0.1:{rpc.free_port()}")


def test_another_server_at_the_endpoint_is_an_error_and_not_an_abort() -> None:
    """Something that answers, but not in our protocol, ends the process in ggml; here it is an exception."""
    talker = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
        "while True:\n c = s.accept()[0]; c.sendall(b'HTTP/1.0 400 no\\r\\n\\r\\n' * 8); c.close()"
    )
    with subprocess.Popen([sys.executable, "-c", talker], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            with pytest.raises(ms.UnsupportedError, match=rf"127.0.0.1:{port} is not an RPC server of this llama.cpp"):
                ms.add_rpc_server(f"127.0.0.1:{port}")
        finally:
            process.kill()


@pytest.mark.parametrize("endpoint", ["", "localhost", ":1", "host:", "host:0", "host:65536", "host:x", "h\0st:1"])
def test_an_endpoint_that_makes_no_sense_is_a_value_error(endpoint: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        ms.add_rpc_server(endpoint)


def test_the_command_line_plans_with_an_rpc_server() -> None:
    with rpc.Server() as own:
        done = subprocess.run(
            [sys.executable, "-m", "moestream", "plan", str(models.tiny()), "--json", "--no-stream", "--rpc",
             own.endpoint, "--expert-layers", f"RPC0[{own.endpoint}]=0,2-3"],
            capture_output=True, text=True, env=dict(os.environ), timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["rules"][0]["n_matched"] == 9 and made["rules"][0]["place"] == f"RPC0[{own.endpoint}]"
    assert made["warnings"] == []


def test_the_server_is_gone_after_the_tests(server: rpc.Server) -> None:
    with rpc.Server() as own:
        pid = own.pid
    assert not pathlib.Path(f"/proc/{pid}").exists()
