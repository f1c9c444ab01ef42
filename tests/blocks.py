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
