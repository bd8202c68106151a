"""Write GGUF files tensor by tensor, without ever holding more than one chunk of one tensor.

What it does: turns key-values and a list of tensors, whose bytes are made on demand, into one GGUF file. Header,
key-values and tensor table go through the public `gguf.GGUFWriter`; the data behind them is streamed here, because
that writer wants whole tensors in memory.

Guarantees: a file under its final name is complete. The bytes go to a new file with an unguessable name in the
same folder, are flushed to the disk, and only then renamed; after any failure that file is removed. The SHA-256 in
the result is of the bytes as they were written.

Never: reads the model back, decides what a model contains, or writes outside the folder of its target.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from ._block_types import BlockType

TEMP_PREFIX = ".moestream-"
TEMP_SUFFIX = ".tmp"
# Room left on the disk beyond the file itself, so that writing a model never fills it to the last block.
DISK_RESERVE_BYTES = 256 << 20

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class KeyValue:
    """One GGUF key-value pair; `item` is the element type where `type` is an array."""

    key: str
    value: Any
    type: GGUFValueType
    item: GGUFValueType | None = None

    @classmethod
    def u32(cls, key: str, value: int) -> KeyValue:
        """A 32-bit unsigned value, the type llama.cpp wants for counts and lengths."""
        return cls(key, value, GGUFValueType.UINT32)

    @classmethod
    def u16(cls, key: str, value: int) -> KeyValue:
        """A 16-bit unsigned value, the type of split.no and split.count."""
        return cls(key, value, GGUFValueType.UINT16)

    @classmethod
    def i32(cls, key: str, value: int) -> KeyValue:
        """A 32-bit signed value, the type of split.tensors.count."""
        return cls(key, value, GGUFValueType.INT32)

    @classmethod
    def f32(cls, key: str, value: float) -> KeyValue:
        """A 32-bit float."""
        return cls(key, value, GGUFValueType.FLOAT32)

    @classmethod
    def boolean(cls, key: str, value: bool) -> KeyValue:
        """A boolean."""
        return cls(key, value, GGUFValueType.BOOL)

    @classmethod
    def text(cls, key: str, value: str) -> KeyValue:
        """A UTF-8 string."""
        return cls(key, value, GGUFValueType.STRING)

    @classmethod
    def array(cls, key: str, value: Sequence[Any], item: GGUFValueType) -> KeyValue:
        """An array whose elements are of type `item`."""
        return cls(key, list(value), GGUFValueType.ARRAY, item)


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is going to be written.

    `shape` is in numpy's order (the contiguous row last, the reverse of ggml's `ne`). `chunks` returns the packed
    bytes in order, in pieces of any size, each a contiguous uint8 array; it is called once.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    chunks: Callable[[], Iterable[Bytes]]

    @property
    def nbytes(self) -> int:
        """Packed size in bytes, without padding."""
        return self.type.nbytes(self.shape)


@dataclass(frozen=True)
class WrittenFile:
    """A finished file: where it lies, its size in bytes and the SHA-256 (hex) of its contents."""

    path: pathlib.Path
    bytes: int
    sha256: str


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `value`."""
    return (value + alignment - 1) // alignment * alignment


def require_free_space(folder: pathlib.Path, bytes_needed: int, what: str) -> None:
    """Raise OSError(ENOSPC), with both numbers in the message, unless `folder` has room for `bytes_needed`."""
    free = shutil.disk_usage(folder).free
    if free < bytes_needed + DISK_RESERVE_BYTES:
        message = (
            f"{what} needs {bytes_needed / 1e9:.2f} GB (and {DISK_RESERVE_BYTES / 1e9:.2f} GB to spare), "
            f"but only {free / 1e9:.2f} GB are free"
        )
        raise OSError(errno.ENOSPC, message, str(folder))


@contextlib.contextmanager
def _temporary(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new empty file beside `target` under an unguessable name; removed on the way out if it is still there."""
    temp = target.parent / f"{TEMP_PREFIX}{target.name}.{secrets.token_hex(16)}{TEMP_SUFFIX}"
    # O_EXCL: never through a link or onto a file that somebody placed there. The mode obeys the user's umask.
    os.close(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666))
    try:
        yield temp
    finally:
        temp.unlink(missing_ok=True)


def _write_head(path: pathlib.Path, kv: Sequence[KeyValue], tensors: Sequence[TensorSource], alignment: int) -> None:
    writer = GGUFWriter(path, arch="")
    # The writer adds the architecture by itself; the later shards of a split model carry none.
    writer.kv_data[0].clear()
    for item in kv:
        writer.add_key_value(item.key, item.value, item.type, sub_type=item.item)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for tensor in tensors:
        # A plain float dtype beside a raw type makes the writer take the shape as elements. Types newer than the
        # installed gguf package are passed as their number, which is all that reaches the file.
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, cast(GGMLQuantizationType, tensor.type.id)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def write_gguf(
    path: pathlib.Path,
    kv: Sequence[KeyValue],
    tensors: Sequence[TensorSource],
    *,
    alignment: int = 32,
    on_bytes: Callable[[int], object] | None = None,
) -> WrittenFile:
    """Write one GGUF file and rename it to `path`.

    `alignment` is a power of two of at least 8 (general.alignment is written unless it is 32). `on_bytes` is told
    how many bytes of weights were added, after each chunk. Raises ValueError if a tensor's chunks do not sum
    to its size, OSError if the disk refuses.
    """
    if alignment < 8 or alignment & (alignment - 1):
        raise ValueError(f"alignment {alignment} is not a power of two of at least 8")
    with _temporary(path) as temp:
        _write_head(temp, kv, tensors, alignment)
        digest = hashlib.sha256()
        with temp.open("r+b", buffering=0) as file:
            digest.update(file.read())
            size = file.tell()

            def put(data: Bytes | bytes) -> None:
                nonlocal size
                view = memoryview(data if isinstance(data, bytes) else data.data).cast("B")
                digest.update(view)
                done = 0
                while done < len(view):  # an unbuffered write may be short; large ones are, at 2 GiB
                    done += file.write(view[done:])
                size += len(view)

            put(bytes(align_up(size, alignment) - size))
            for tensor in tensors:
                before = size
                for chunk in tensor.chunks():
                    put(chunk)
                    if on_bytes is not None:
                        on_bytes(chunk.nbytes)
                if size - before != tensor.nbytes:
                    raise ValueError(f"{tensor.name}: {size - before} bytes were made of {tensor.nbytes}")
                put(bytes(align_up(size, alignment) - size))
            os.fsync(file.fileno())
        temp.replace(path)
    return WrittenFile(path, size, digest.hexdigest())
