"""Every block format of cuda/quant, compiled for the host, against gguf's NumPy dequantizers."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"

# Byte offsets of a block's fp16 fields: the only bytes that are not valid whatever they hold.
HALVES: dict[str, tuple[int, ...]] = {
    "F32": (),
    "F16": (),
    "BF16": (),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
TYPES = list(HALVES)
PLAIN = ("F32", "F16", "BF16")

SOURCE = (
    '#include "cuda/quant/unpack.cuh"\n'
    + """
template <class Block>
void all(const Block* blocks, long count, float* out) {
  for (long b = 0; b < count; ++b)
    for (int unit = 0; unit < Block::kElements / 8; ++unit, out += 8)
      quant::unpack(blocks[b], unit, *reinterpret_cast<float(*)[8]>(out));
}
#define UNPACK(type)                                                                    \\
  extern "C" void unpack_##type(const quant::block_##type* blocks, long count, float* out) { \\
    all(blocks, count, out);                                                            \\
  }                                                                                     \\
  extern "C" int elements_##type() { return quant::block_##type::kElements; }           \\
  extern "C" int bytes_##type() { return sizeof(quant::block_##type); }                 \\
  extern "C" const char* name_##type() { return quant::block_##type::kType; }
"""
    + "".join(f"UNPACK({t.lower()})\n" for t in TYPES)
)


@pytest.fixture(scope="module")
def unpacker(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The unpack functions as a shared library."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile cuda/quant/unpack.cuh with")
    folder = tmp_path_factory.mktemp("unpack")
    (folder / "unpack.cpp").write_text(SOURCE)
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    command += ["-shared", "-fPIC", f"-I{ROOT}", "-o", "unpack.so", "unpack.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "unpack.so"))
    for name in TYPES:
        getattr(library, f"name_{name.lower()}").restype = ctypes.c_char_p
    return library


def unpack(library: ctypes.CDLL, name: str, packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Weights of `packed` (whole blocks, any shape) as float32 [elements]."""
    type_name = name.lower()
    size = getattr(library, f"bytes_{type_name}")()
    count = packed.size // size
    out = np.full(count * getattr(library, f"elements_{type_name}")(), np.nan, np.float32)
    # The plain blocks are declared 16-byte aligned; NumPy's allocations are.
    blocks = np.ascontiguousarray(packed)
    getattr(library, f"unpack_{type_name}")(
        blocks.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_long(count),
        out.ctypes.data_as(ctypes.c_void_p),
    )
    return out


def assert_same_bits(got: NDArray[np.float32], packed: NDArray[np.uint8], name: str) -> None:
    """`got` equals gguf's float32 values bit for bit, the sign of zero included."""
    want = gguf.quants.dequantize(packed, GGMLQuantizationType[name]).ravel()
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", TYPES)
def test_block_is_the_one_of_the_format(unpacker: ctypes.CDLL, name: str) -> None:
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    group = 8 if name in PLAIN else 1
    assert getattr(unpacker, f"elements_{name.lower()}")() == elements * group
    assert getattr(unpacker, f"bytes_{name.lower()}")() == size * group
    assert getattr(unpacker, f"name_{name.lower()}")() == name.lower().encode()


@pytest.mark.parametrize("name", TYPES)
def test_every_bit_pattern(unpacker: ctypes.CDLL, name: str) -> None:
    rng = np.random.default_rng(TYPES.index(name))
    size = getattr(unpacker, f"bytes_{name.lower()}")()
    blocks = rng.integers(0, 256, (2000, size), np.uint8)
    for offset in HALVES[name]:  # any finite scale: zeros of both signs, subnormals, the largest
        scales = rng.integers(0, 1 << 16, len(blocks), np.uint16)
        scales[scales & 0x7C00 == 0x7C00] ^= 0x4000
        scales[:4] = 0x0000, 0x8000, 0x0001, 0xFBFF
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if name in PLAIN:  # NaN payloads are nobody's business
        item = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}[name]
        exponent = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[name]
        values = blocks.view(item)
        values[(values & exponent) == exponent] = exponent  # infinities
    assert_same_bits(unpack(unpacker, name, blocks), blocks, name)


GOLDEN_FILES = sorted(GOLDEN.glob("tiny-llama-*.gguf"))


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda p: p.stem)
def test_real_blocks(unpacker: ctypes.CDLL, path: Path) -> None:
    for tensor in gguf.GGUFReader(path).tensors:
        packed = np.array(tensor.data).view(np.uint8)
        assert_same_bits(
            unpack(unpacker, tensor.tensor_type.name, packed), packed, tensor.tensor_type.name
        )
