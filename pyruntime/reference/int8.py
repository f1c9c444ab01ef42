"""The arithmetic of int8 products: quantized activations times packed weights.

Activations are int8 with a scale for every 32 values of a row (llama.cpp's q8_1). Weights keep the
integers of their GGUF blocks, with a scale for each group of 16 or 32 and, for some types, a min:
w = scale q - min. So a group's product is scale times an exact integer, less min times the sum of
the group's activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyruntime.gguf.types import by_name
from pyruntime.reference.functions import Array

GROUP = 32  # activations that share a scale
LARGEST = np.float32(127)
# Groups that reach less than SMALLEST are zeros; what is not finite or beyond LIMIT is an error.
SMALLEST, LIMIT = np.float32(2**-100), np.float32(2**100)
MAGIC = np.float32(1.5 * 2**23)  # bits 0x4b400000: an integer added to them adds to the number

CODEBOOK = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)  # of IQ4_NL and IQ4_XS


@dataclass(frozen=True)
class Quantized:
    """Rows of activations.

    Attributes:
        q: int8 [rows, k]. scales, sums: float32 [rows, k / 32]; sums are scale * sum of q, rounded
            to tf32.
    """

    q: NDArray[np.int8]
    scales: Array
    sums: Array

    @property
    def values(self) -> Array:
        """float32 [rows, k]: what the integers stand for."""
        wide: Array = np.repeat(self.scales, GROUP, axis=1) * self.q
        return wide


@dataclass(frozen=True)
class Parts:
    """Rows of weights, scale q - min.

    Attributes:
        q: int16 [n, k]. scales: float32 [n, groups], of k / groups weights each.
        mins: float32, shaped like scales; None for types without.
    """

    q: NDArray[np.int16]
    scales: Array
    mins: Array | None

    @property
    def values(self) -> Array:
        """float32 [n, k]: the weights."""
        size = self.q.shape[1] // self.scales.shape[1]
        weights: Array = np.repeat(self.scales, size, axis=1) * self.q.astype(np.float32)
        return weights if self.mins is None else weights - np.repeat(self.mins, size, axis=1)


def quantize_rows(x: NDArray[np.float32] | NDArray[np.float16]) -> Quantized:
    """Quantizes [rows, k], k a multiple of 32.

    A group's scale is its largest magnitude over 127, rounded to 16 significant bits, q the nearest
    integer (ties to even) to x times the scale's inverse. What does not fit counts as the nearest
    that does, NaN as 0.
    """
    rows, k = x.shape
    finite = np.where(np.isnan(x), np.float32(0), np.clip(x.astype(np.float32), -LIMIT, LIMIT))
    by_group = finite.reshape(rows, k // GROUP, GROUP)
    largest = np.abs(by_group).max(axis=2)
    scales = short(np.where(largest < SMALLEST, np.float32(0), largest))
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    q = np.clip(np.rint(by_group * inverse[..., None]), -LARGEST, LARGEST).astype(np.int8)
    sums = tf32(scales * q.sum(axis=2, dtype=np.int32).astype(np.float32))
    return Quantized(q.reshape(rows, k), scales, sums)


def fits(x: NDArray[np.float32] | NDArray[np.float16]) -> bool:
    """Whether all values are finite and within what is quantized."""
    return bool((np.abs(x.astype(np.float32)) <= LIMIT).all())


def short(largest: Array) -> Array:
    """largest / 127, the low eight bits of its mantissa rounded away (ties away from zero)."""
    return ((largest / LARGEST).view(np.uint32) + 0x80 & 0xFFFFFF00).astype(np.uint32).view("f4")


def tf32(x: Array) -> Array:
    """`x` with ten bits of mantissa: the nearest, ties away from zero."""
    return (x.view(np.uint32) + 0x1000 & 0xFFFFE000).astype(np.uint32).view("f4")


def device_scales(x: Quantized) -> Array:
    """{scale, -MAGIC * scale} as they lie on the device: float32 [k / 32, rows, 2]."""
    return np.stack([x.scales.T, -MAGIC * x.scales.T], axis=-1)


def product(x: Quantized, packed: NDArray[np.uint8], type_name: str) -> Array:
    """float32 [rows, n]: activations times the weights of packed rows [n, bytes of a row].

    Groups are added in float32 in the order of k; then the mins' part is subtracted. Of mins for 16
    weights (Q2_K) the sums are not rounded to tf32.
    """
    weights = parts(packed, type_name)
    rows, (n, k), groups = len(x.q), weights.q.shape, weights.scales.shape[1]
    size = k // groups
    left = x.q.astype(np.float32).reshape(rows, groups, size).transpose(1, 0, 2)
    right = weights.q.astype(np.float32).reshape(n, groups, size).transpose(1, 2, 0)
    scales = np.repeat(x.scales, GROUP // size, axis=1)
    out = np.zeros((rows, n), np.float32)
    for group in range(groups):
        whole = left[group] @ right[group]  # integers below 2^24
        out += scales[:, group, None] * whole * weights.scales[:, group]
    if weights.mins is None:
        return out
    sums = x.sums
    if size < GROUP:
        sums = scales * x.q.reshape(rows, groups, size).sum(2).astype(np.float32)
    return out - sums @ weights.mins.T


def parts(packed: NDArray[np.uint8], type_name: str) -> Parts:
    """Integers, scales and mins of packed rows [n, bytes of a row].

    Raises ValueError: a type without such products.
    """
    kind = by_name(type_name)
    if kind.name not in _BLOCKS:
        raise ValueError(f"no int8 products of {kind.name}; there are: {', '.join(_BLOCKS)}")
    n = len(packed)
    blocks = np.ascontiguousarray(packed).reshape(-1, kind.bytes)
    q, scales, mins = _BLOCKS[kind.name](blocks)
    scales = scales.astype(np.float32, copy=False).reshape(n, -1)
    return Parts(
        q.astype(np.int16).reshape(n, -1),
        scales,
        None if mins is None else mins.astype(np.float32, copy=False).reshape(n, -1),
    )


Block = tuple[NDArray[np.generic], Array, Array | None]  # integers, scales, mins by block
Bytes = NDArray[np.uint8]


def _half(blocks: Bytes, at: int) -> Array:
    """float32 [blocks, 1]: the fp16 number at a byte."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _fields(packed: Bytes, width: int, run: int) -> Bytes:
    """Fields of `width` bits of each byte: of `run` bytes all lowest ones, then the next ones."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    fields = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8((1 << width) - 1)
    return fields.reshape(len(packed), -1)


def _bits(blocks: Bytes, at: int) -> Bytes:
    """The 32 bits at a byte, from the lowest on."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")


def _q4_0(b: Bytes) -> Block:
    return _fields(b[:, 2:], 4, 16).astype(np.int16) - 8, _half(b, 0), None


def _q4_1(b: Bytes) -> Block:
    return _fields(b[:, 4:], 4, 16), _half(b, 0), -_half(b, 2)


def _q5_0(b: Bytes) -> Block:
    q = _fields(b[:, 6:], 4, 16) | _bits(b, 2) << 4
    return q.astype(np.int16) - 16, _half(b, 0), None


def _q5_1(b: Bytes) -> Block:
    return _fields(b[:, 8:], 4, 16) | _bits(b, 4) << 4, _half(b, 0), -_half(b, 2)


def _q8_0(b: Bytes) -> Block:
    return b[:, 2:].view(np.int8), _half(b, 0), None


def _q2_k(b: Bytes) -> Block:
    scales = b[:, :16]
    return _fields(b[:, 16:80], 2, 32), _half(b, 80) * (scales & 15), _half(b, 82) * (scales >> 4)


def _q3_k(b: Bytes) -> Block:
    q = _fields(b[:, 32:96], 2, 32) | _fields(b[:, :32], 1, 32) << 2
    low, high = _fields(b[:, 96:104], 4, 8), _fields(b[:, 104:108], 2, 4)
    scales = (low | high << 4).astype(np.float32) - 32
    return q.astype(np.int16) - 4, _half(b, 108) * scales, None


def _k_scales(b: Bytes) -> tuple[Array, Array]:
    """Scales and mins of the eight groups of a Q4_K or Q5_K block."""
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=1)
    mins = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=1)
    return _half(b, 0) * scales, _half(b, 2) * mins


def _q4_k(b: Bytes) -> Block:
    return _fields(b[:, 16:], 4, 32), *_k_scales(b)


def _q5_k(b: Bytes) -> Block:
    return _fields(b[:, 48:], 4, 32) | _fields(b[:, 16:48], 1, 32) << 4, *_k_scales(b)


def _q6_k(b: Bytes) -> Block:
    q = _fields(b[:, :128], 4, 64) | _fields(b[:, 128:192], 2, 32) << 4
    return q.astype(np.int16) - 32, _half(b, 208) * b[:, 192:208].view(np.int8), None


def _iq4_nl(b: Bytes) -> Block:
    return CODEBOOK[_fields(b[:, 2:], 4, 16)], _half(b, 0), None


def _iq4_xs(b: Bytes) -> Block:
    low = (b[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    high = (b[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1, 8)
    scales = (low | high << 4).astype(np.float32) - 32
    return CODEBOOK[_fields(b[:, 8:], 4, 16)], _half(b, 0) * scales, None


_BLOCKS: dict[str, Callable[[Bytes], Block]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}  # fmt: skip
TYPES = tuple(_BLOCKS)
