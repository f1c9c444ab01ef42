"""Every block format of cuda/quant, compiled for the host, against gguf's NumPy dequantizers."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from blocks import EXPONENT_BYTES, TYPES, block_of, dequantized, random_blocks
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
GOLDEN_FILES = sorted((ROOT / "tests/data/golden").glob("tiny-llama-*.gguf"))

SOURCE = """
#include "cuda/quant/unpack.cuh"
template <class Block>
void all(const Block* blocks, long count, float (*out)[8]) {
  for (long b = 0; b < count; ++b)
    for (int unit = 0; unit < Block::kElements / 8; ++unit) quant::unpack(blocks[b], unit, *out++);
}
#define UNPACK(type)                                                                         \\
  extern "C" void unpack_##type(const quant::block_##type* blocks, long count, float* out) { \\
    all(blocks, count, reinterpret_cast<float(*)[8]>(out));                                  \\
  }                                                                                          \\
  extern "C" int weights_##type() { return quant::block_##type::kElements; }                 \\
  extern "C" int bytes_##type() { return sizeof(quant::block_##type); }                      \\
  extern "C" const char* name_##type() { return quant::block_##type::kType; }
""" + "".join(f"UNPACK({name.lower()})\n" for name in TYPES)


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
    return ctypes.CDLL(str(folder / "unpack.so"))


def unpack(library: ctypes.CDLL, name: str, packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Weights of `packed` (whole blocks, 16-byte aligned) as float32."""
    count = packed.size // getattr(library, f"bytes_{name.lower()}")()
    weights = getattr(library, f"weights_{name.lower()}")()
    out = np.full(count * weights, np.nan, np.float32)
    getattr(library, f"unpack_{name.lower()}")(
        ctypes.c_void_p(packed.ctypes.data), ctypes.c_long(count), ctypes.c_void_p(out.ctypes.data)
    )
    return out


def assert_unpacks(library: ctypes.CDLL, name: str, packed: NDArray[np.uint8]) -> None:
    """Equal to gguf's values bit for bit, the sign of zero included."""
    got = unpack(library, name, packed)
    np.testing.assert_array_equal(got.view(np.uint32), dequantized(name, packed).view(np.uint32))


@pytest.mark.parametrize("name", TYPES)
def test_block_is_the_one_of_the_format(unpacker: ctypes.CDLL, name: str) -> None:
    weights, size = block_of(name)
    group = 8 if weights == 1 else 1
    type_name = getattr(unpacker, f"name_{name.lower()}")
    type_name.restype = ctypes.c_char_p
    assert type_name() == name.lower().encode()
    assert getattr(unpacker, f"weights_{name.lower()}")() == weights * group
    assert getattr(unpacker, f"bytes_{name.lower()}")() == size * group


@pytest.mark.parametrize("name", TYPES)
def test_any_bits(unpacker: ctypes.CDLL, name: str) -> None:
    assert_unpacks(unpacker, name, random_blocks(name, 4000, np.random.default_rng(0)))


@pytest.mark.parametrize("name", TYPES)
def test_extreme_scales(unpacker: ctypes.CDLL, name: str) -> None:
    blocks = random_blocks(name, 4000, np.random.default_rng(1))
    # High bytes of zeros of both signs, subnormals, the largest number; an infinity where plain.
    for i, byte in enumerate((0x00, 0x80, 0x01, 0x81, 0x7B, 0xFB)):
        blocks[i::6, EXPONENT_BYTES[name]] = byte
    assert_unpacks(unpacker, name, blocks)


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
def test_real_blocks(unpacker: ctypes.CDLL, path: Path) -> None:
    for tensor in gguf.GGUFReader(path).tensors:
        assert_unpacks(unpacker, tensor.tensor_type.name, np.array(tensor.data).view(np.uint8))
