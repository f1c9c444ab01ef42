"""Random packed blocks of every GGUF weight type that the package reads."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

# The bytes of a block that hold the sign and exponent of a float. All other bits may be anything.
EXPONENT_BYTES: dict[str, tuple[int, ...]] = {
    "F32": (3,),
    "F16": (1,),
    "BF16": (1,),
    "Q4_0": (1,),
    "Q4_1": (1, 3),
    "Q5_0": (1,),
    "Q5_1": (1, 3),
    "Q8_0": (1,),
    "Q2_K": (81, 83),
    "Q3_K": (109,),
    "Q4_K": (1, 3),
    "Q5_K": (1, 3),
    "Q6_K": (209,),
    "IQ4_NL": (1,),
    "IQ4_XS": (1,),
}
TYPES = list(EXPONENT_BYTES)
# Fields of a block, each in a plane of its own when repacked: first byte, bytes, and whether the
# plane is block-major.
FIELDS: dict[str, tuple[tuple[int, int, bool], ...]] = {
    "Q4_0": ((2, 16, False), (0, 2, True)),
    "Q4_1": ((4, 16, False), (0, 4, True)),
    "Q5_0": ((6, 16, False), (2, 4, False), (0, 2, True)),
    "Q5_1": ((8, 16, False), (4, 4, False), (0, 4, True)),
    "Q8_0": ((2, 32, False), (0, 2, True)),
    "Q2_K": ((16, 64, False), (0, 16, True), (80, 4, True)),
    "Q3_K": ((32, 64, False), (0, 32, False), (96, 12, True), (108, 2, True)),
    "Q4_K": ((16, 128, False), (0, 16, True)),
    "Q5_K": ((48, 128, False), (16, 32, False), (0, 16, True)),
    "Q6_K": ((0, 128, False), (128, 64, False), (192, 16, True), (208, 2, True)),
    "IQ4_NL": ((2, 16, False), (0, 2, True)),
    "IQ4_XS": ((8, 128, False), (0, 8, True)),
}


def block_of(name: str) -> tuple[int, int]:
    """(weights, bytes) of a block of type `name`."""
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return weights, size


def random_blocks(name: str, count: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random bytes [count, bytes], with floats below 2: without the exponent's top bit.

    So all weights lie within fp16's range.
    """
    blocks = rng.integers(0, 256, (count, block_of(name)[1]), np.uint8)
    blocks[:, EXPONENT_BYTES[name]] &= 0xBF
    return blocks


def dequantized(name: str, packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What gguf's NumPy code makes of whole blocks: float32 [weights]."""
    weights: NDArray[np.float32] = gguf.quants.dequantize(
        packed.reshape(-1, block_of(name)[1]), GGMLQuantizationType[name]
    )
    return weights.ravel()


def planes(name: str, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blocks [n, blocks of a row, bytes] as planes, one after another: [all bytes]."""
    fields = []
    for at, count, block_major in FIELDS[name]:
        field = packed[:, :, at : at + count]
        fields.append((field.transpose(1, 0, 2) if block_major else field).ravel())
    return np.concatenate(fields)
