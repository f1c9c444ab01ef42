"""The numbers of an e4m3 K/V cache, bit for bit as the kernels store and read them.

e4m3 has a sign, four exponent bits of bias 7 and three mantissa bits; no infinities, a NaN of each
sign (0x7f, 0xff), and 448 as its largest number (OCP 8-bit Floating Point Specification, section
5). A row of a cache is one head of one token: codes, and one scale, the row's largest magnitude
over 448. So a row depends on nothing but itself, however a prompt was cut.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pyruntime.reference.functions import Array

Codes = NDArray[np.uint8]

LARGEST = np.float32(448)
# Rows that reach less than fp16's smallest number are scaled as if they did: nothing divides by 0.
FLOOR = np.float32(2**-24)


def _numbers() -> Array:
    exponent, mantissa = np.divmod(np.arange(128), 8)
    positive = np.where(exponent, 8 + mantissa, 2 * mantissa) * 2.0 ** (exponent - 10)
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


NUMBERS = _numbers()  # of every code; a subnormal is mantissa * 2^-9


def encode(x: Array) -> Codes:
    """The nearest e4m3 number of each float32 (ties to even); beyond ±448 that, NaN for NaN."""
    nan = np.isnan(x)
    magnitude = np.where(nan, np.float32(0), np.minimum(np.abs(x), LARGEST))
    bits = magnitude.view(np.uint32)
    # 20 mantissa bits fewer, and another bias; below 2^-6 a fixed step of 2^-9.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - np.uint32((127 - 7) << 3)
    small = np.rint(magnitude * np.float32(2**9)).astype(np.uint32)
    codes = np.where(magnitude < 2**-6, small, normal)
    sign = (np.signbit(x) << 7).astype(np.uint32)
    return (np.where(nan, 0x7F, codes) | sign).astype(np.uint8)


def quantize(rows: Array) -> tuple[Codes, Array]:
    """Codes, shaped as the float32 rows [..., head dim], and scales, float32 [...]."""
    largest = np.maximum(np.abs(rows).max(axis=-1), FLOOR)
    return encode(rows * (LARGEST / largest)[..., None]), largest / LARGEST


def widen(codes: Codes, scales: Array) -> Array:
    """The float32 numbers that `quantize` kept of its rows."""
    wide: Array = NUMBERS[codes] * scales[..., None]
    return wide
