"""Where fields of blocks lie in planes (cuda/quant/planes.cuh, compiled for the host)."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from blocks import FIELDS, planes, random_blocks
from compilers import cxx

ROOT = Path(__file__).parents[2]
SOURCE = """
#include <cstring>
#include "cuda/quant/planes.cuh"
template <class Block>
void all(const char* from, long n, long blocks, char* to) {
  static_assert(quant::planes_are_whole<Block>());
  for (const quant::Plane& plane : quant::Planes<Block>::all)
    for (long row = 0; row < n; ++row)
      for (long b = 0; b < blocks; ++b)
        std::memcpy(to + plane.place(n, blocks, row, b),
                    from + (row * blocks + b) * sizeof(Block) + plane.at, plane.bytes);
}
template <class Block>
int aligned(long n, long blocks) {
  for (const quant::Plane& plane : quant::Planes<Block>::all)
    if (plane.start(n, blocks) % 16 || (plane.head && n * plane.bytes % 16)) return 0;
  return 1;
}
#define TYPE(type)                                                                      \\
  extern "C" void repack_##type(const char* from, long n, long blocks, char* to) {      \\
    all<quant::block_##type>(from, n, blocks, to);                                      \\
  }                                                                                     \\
  extern "C" int aligned_##type(long n, long blocks) {                                  \\
    return aligned<quant::block_##type>(n, blocks);                                     \\
  }
""" + "".join(f"TYPE({name.lower()})\n" for name in FIELDS)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The layout as a shared library."""
    folder = tmp_path_factory.mktemp("planes")
    (folder / "planes.cpp").write_text(SOURCE)
    command = [cxx(), "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{ROOT}"]
    subprocess.run([*command, "-o", "planes.so", "planes.cpp"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "planes.so"))


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(("n", "blocks"), [(16, 1), (16, 3), (48, 5), (256, 2)])
def test_layout(layout: ctypes.CDLL, name: str, n: int, blocks: int) -> None:
    packed = random_blocks(name, n * blocks, np.random.default_rng(n)).reshape(n, blocks, -1)
    out = np.zeros(packed.size, np.uint8)
    pointer, long = ctypes.c_void_p, ctypes.c_long
    getattr(layout, f"repack_{name.lower()}")(
        pointer(packed.ctypes.data), long(n), long(blocks), pointer(out.ctypes.data)
    )
    np.testing.assert_array_equal(out, planes(name, packed))
    assert getattr(layout, f"aligned_{name.lower()}")(long(n), long(blocks))
