"""The weight types of GGUF: their block layouts, and random weights in each of them.

What it does: names every weight type that ggml's CPU matmul takes, and makes tensors of it with a given standard
deviation. Where the gguf package has a quantiser, values are drawn and quantised, as a real model's are; for the
other types, and on request for all (`random_blocks`, much faster), the block's bytes are random and only its scales
are set, so that every bit pattern of the type occurs.

Guarantees: the same key gives the same bytes on every machine and numpy version (only bit generator streams are
used, which numpy keeps fixed, and elementwise float32 arithmetic). Every value is finite.

Never: needs llama.cpp, or keeps state between calls.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import quantize

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Rows of a tensor that are quantised at a time. Bounds the memory of the gguf package's quantisers, the hungriest
# of which (MXFP4) holds some hundred bytes per weight.
_QUANTIZE_WEIGHTS = 1 << 18
# Random scales are spread over these multiples of the nominal one, so that a block read from the wrong place shows
# in the result. Their root mean square is 1.02.
_SCALE_STEPS = np.array([0.65, 0.75, 0.85, 0.95, 1.05, 1.15, 1.25, 1.35], dtype=np.float32)
# Root mean square of the sixteen E2M1 values as ggml stores them, doubled: 0, 1, 2, 3, 4, 6, 8, 12 and negatives.
_E2M1_RMS = math.sqrt((0 + 1 + 4 + 9 + 16 + 36 + 64 + 144) / 8)


@dataclass(frozen=True)
class BlockType:
    """One weight type.

    `id` is its number in GGUF, `weights` and `bytes` the size of a block. `scales` lists where a block keeps its
    fp16 scales: (byte offset, multiple of the nominal scale); the multiples of offsets and minima are chosen so that
    random blocks have mean zero. `unit_rms` is the root mean square of random blocks whose nominal scale is 1.
    `quantizer` says whether the gguf package can quantise to it, `signed` that random blocks take scales of both
    signs: these types are lopsided (-8 to 7, -1 to 2), and a mean far from zero would make all tokens look alike.
    """

    name: str
    id: int
    weights: int
    bytes: int
    scales: tuple[tuple[int, float], ...] = ()
    unit_rms: float = 1.0
    quantizer: bool = False
    signed: bool = False

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Packed bytes of a tensor of this shape (numpy order). ValueError if a row is not whole blocks."""
        if shape[-1] % self.weights:
            raise ValueError(f"rows of {shape[-1]} weights are not whole {self.name} blocks of {self.weights}")
        return math.prod(shape) // self.weights * self.bytes


BLOCK_TYPES: dict[str, BlockType] = {
    entry.name: entry
    for entry in (
        BlockType("F32", 0, 1, 4, quantizer=True),
        BlockType("F16", 1, 1, 2, quantizer=True),
        BlockType("BF16", 30, 1, 2, quantizer=True),
        BlockType("Q1_0", 41, 128, 18, ((0, 1.0),), 1.0),
        BlockType("Q2_0", 42, 64, 18, ((0, 1.0),), 1.225, signed=True),
        BlockType("Q4_0", 2, 32, 18, ((0, 1.0),), 4.64, quantizer=True, signed=True),
        BlockType("Q4_1", 3, 32, 20, ((0, 1.0), (2, -7.5)), 4.6, quantizer=True),
        BlockType("Q5_0", 6, 32, 22, ((0, 1.0),), 9.25, quantizer=True, signed=True),
        BlockType("Q5_1", 7, 32, 24, ((0, 1.0), (2, -15.5)), 9.24, quantizer=True),
        BlockType("Q8_0", 8, 32, 34, ((0, 1.0),), 73.9, quantizer=True),
        BlockType("Q2_K", 10, 256, 84, ((80, 1.0), (82, 1.5)), 13.9),
        BlockType("Q3_K", 11, 256, 110, ((108, 1.0),), 43.3),
        BlockType("Q4_K", 12, 256, 144, ((0, 1.0), (2, 7.5)), 259.0),
        BlockType("Q5_K", 13, 256, 176, ((0, 1.0), (2, 15.5)), 524.0),
        BlockType("Q6_K", 14, 256, 210, ((208, 1.0),), 1364.0),
        BlockType("IQ1_S", 19, 256, 50, ((0, 1.0),), 7.17),
        BlockType("IQ1_M", 29, 256, 56, (), 7.18),
        BlockType("IQ2_XXS", 16, 256, 66, ((0, 1.0),), 53.5),
        BlockType("IQ2_XS", 17, 256, 74, ((0, 1.0),), 56.0),
        BlockType("IQ2_S", 22, 256, 82, ((0, 1.0),), 56.5),
        BlockType("IQ3_XXS", 18, 256, 98, ((0, 1.0),), 142.0),
        BlockType("IQ3_S", 21, 256, 110, ((0, 1.0),), 140.0),
        BlockType("IQ4_NL", 20, 32, 18, ((0, 1.0),), 67.4, signed=True),
        BlockType("IQ4_XS", 23, 256, 136, ((0, 1.0),), 1243.0),
        BlockType("TQ1_0", 34, 256, 54, ((52, 1.0),), 0.818, quantizer=True),
        BlockType("TQ2_0", 35, 256, 66, ((64, 1.0),), 1.225, quantizer=True, signed=True),
        BlockType("MXFP4", 39, 32, 17, quantizer=True),
        BlockType("NVFP4", 40, 64, 36),
    )
}


def block_type(name: str) -> BlockType:
    """The type called `name` (as ggml spells it, upper case). ValueError, with the known names, if there is none."""
    try:
        return BLOCK_TYPES[name]
    except KeyError:
        raise ValueError(f"unknown weight type {name!r}; known: {', '.join(BLOCK_TYPES)}") from None


def _bits(key: str) -> np.random.PCG64:
    # A 128-bit digest of a readable key is the whole state: independent streams without a registry of numbers.
    return np.random.PCG64(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little"))


def random_bytes(key: str, n_bytes: int) -> Bytes:
    """`n_bytes` uniform random bytes, a pure function of `key`."""
    words = _bits(key).random_raw((n_bytes + 7) // 8)
    return words.astype("<u8", copy=False).view(np.uint8)[:n_bytes]


def unit_noise(key: str, shape: tuple[int, ...]) -> Floats:
    """float32 noise of mean 0 and variance 1, close to normal (a sum of four uniform bytes), a function of `key`."""
    n = math.prod(shape)
    sums = random_bytes(key, 4 * n).reshape(4, n).sum(axis=0, dtype=np.uint16)
    # The variance of one uniform byte is (256^2 - 1) / 12.
    scale = np.float32(1.0 / math.sqrt(4 * (256**2 - 1) / 12))
    values: Floats = sums.astype(np.float32)
    values -= np.float32(4 * 127.5)
    values *= scale
    return values.reshape(shape)


def uniform_noise(key: str, shape: tuple[int, ...]) -> Floats:
    """float32 noise of mean 0 and variance 1, uniform over 256 values: four times cheaper than `unit_noise`."""
    values = random_bytes(key, math.prod(shape)).astype(np.float32)
    values -= np.float32(127.5)
    values *= np.float32(1.0 / math.sqrt((256**2 - 1) / 12))
    return values.reshape(shape)


def pack(values: Floats, kind: BlockType) -> Bytes:
    """`values` (float32, contiguous rows of whole blocks) in the packed form of `kind`, as flat uint8.

    ValueError for types that the gguf package cannot quantise to.
    """
    if not kind.quantizer:
        raise ValueError(f"there is no quantiser for {kind.name}")
    rows = values.reshape(-1, values.shape[-1])
    step = max(1, _QUANTIZE_WEIGHTS // rows.shape[1])
    parts = [quantize(rows[i : i + step], GGMLQuantizationType(kind.id)) for i in range(0, len(rows), step)]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts])


def random_weights(key: str, kind: BlockType, shape: tuple[int, ...], rms: float, *, random_blocks: bool) -> Bytes:
    """Packed random weights with root mean square about `rms`, as flat uint8 of `kind.nbytes(shape)` bytes.

    Types without a quantiser always get random blocks; float types never do (random bits would hold NaN).
    """
    if kind.weights == 1 or (kind.quantizer and not random_blocks):
        return pack(unit_noise(key, shape) * np.float32(rms), kind)
    return _random_blocks(key, kind, kind.nbytes(shape) // kind.bytes, rms)


def _random_blocks(key: str, kind: BlockType, n_blocks: int, rms: float) -> Bytes:
    blocks = random_bytes(key, n_blocks * kind.bytes).reshape(n_blocks, kind.bytes).copy()
    choice = random_bytes(key + "/scales", n_blocks)
    step = choice & 7
    if kind.name == "MXFP4":
        # E8M0: ggml multiplies the doubled values by 2^(e - 128). One of two neighbouring powers per block.
        exponent = 128 + math.floor(math.log2(rms / _E2M1_RMS)) + (step & 1)
        blocks[:, 0] = exponent.clip(1, 254).astype(np.uint8)
    elif kind.name == "NVFP4":
        # UE4M3, one byte for each 16 weights; ggml halves it to undo the doubled values.
        for group in range(4):
            blocks[:, group] = _ue4m3(np.float32(2 * rms / _E2M1_RMS) * _SCALE_STEPS[(step + group) & 7])
    elif kind.name == "IQ1_M":
        # The fp16 scale lies in the top nibbles of four words, lowest nibble first.
        scale = (_SCALE_STEPS * np.float32(rms / kind.unit_rms)).astype(np.float16).view(np.uint16)[step]
        words = blocks[:, 48:56].copy().view("<u2")
        for i in range(4):
            words[:, i] = (words[:, i] & 0x0FFF) | (((scale >> (4 * i)) & 0xF) << 12)
        blocks[:, 48:56] = words.view(np.uint8)
    else:
        for offset, factor in kind.scales:
            scale = (_SCALE_STEPS * np.float32(factor * rms / kind.unit_rms)).astype("<f2")
            blocks[:, offset : offset + 2] = scale.view(np.uint8).reshape(-1, 2)[step]
            if kind.signed:  # bit 15 of the little-endian fp16 is its sign
                blocks[:, offset + 1] ^= (choice & 8) << 4
    flat: Bytes = blocks.reshape(-1)
    return flat


def _ue4m3(value: Floats) -> Bytes:
    """Unsigned E4M3 (bias 7), rounded down, never zero and never the NaN pattern."""
    mantissa, exponent = np.frexp(value)  # value = mantissa * 2^exponent, mantissa in [0.5, 1)
    biased = exponent.astype(np.int32) + 6
    normal = (biased << 3) | ((mantissa * 2 - 1) * 8).astype(np.int32)
    subnormal = (value * np.float32(512)).astype(np.int32)
    code: Bytes = np.where(biased > 0, normal, subnormal).clip(1, 0x7E).astype(np.uint8)
    return code
