"""Operands of int8 products (cuda/quant/operands.cuh, compiled for the host) against the blocks."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from blocks import EXPONENT_BYTES, block_of, planes, random_blocks
from compilers import cxx
from numpy.typing import NDArray

from pyruntime.reference import int8

ROOT = Path(__file__).parents[2]
STEP = 128  # elements
# One step after the other, 16 rows at a time, by 32 lanes in turn: element e of 32 of group g is
# in the registers of lane 4 (row % 8) + e % 16 / 4. `q` gets scale times operand, `mins` what is
# added for each element.
SOURCE = """
#include "cuda/quant/operands.cuh"
template <class Block>
struct Rows {
  using Of = quant::Operands<Block>;
  using Planes = quant::Planes<Block>;
  const uint8_t* w;
  long n, blocks;
  int row, step, lane;

  // The first block of a step and, of a plane, the first byte that it has there of a row.
  long block() const { return Of::kSuper ? step / 2 : 4 * step; }
  const uint8_t* plane(int index, int row) const {
    return w + Planes::all[index].place(n, blocks, row, block());
  }
  void matrices(const uint8_t* (Rows::*from)(int) const, int pair, uint32_t (&r)[4]) const {
    for (int i = 0; i < 4; ++i)
      r[i] = quant::word_at((this->*from)(row + lane / 4 + i % 2 * 8) + pair * 32 + i / 2 * 16 +
                            lane % 4 * 4);
  }
  const uint8_t* raw(int at) const { return plane(0, at) + (Of::kSuper ? step % 2 * Of::kRaw : 0); }
  const uint8_t* second(int at) const {
    return plane(1, at) + (Of::kSuper && !Of::kHighWhole ? step % 2 * Of::kHigh : 0);
  }
  void q(int pair, uint32_t (&r)[4]) const { matrices(&Rows::raw, pair, r); }
  void high(int pair, uint32_t (&r)[4]) const { matrices(&Rows::second, pair, r); }
  void words(uint32_t (&r)[8]) const {
    for (int i = 0; i < 8; ++i)
      r[i] = quant::word_at(second(row + lane / 4 + i / 4 * 8) + i % 4 * 4);
  }

  template <int G>
  void group(quant::Raw& raw, float* q, float* mins) const {
    constexpr int kFirst = 1 + (Of::kHigh > 0), kHeads = sizeof(Planes::all) / sizeof(quant::Plane);
    uint32_t a[4];
    Of::template fetch<G>(raw, *this, step % 2);
    Of::template operand<G>(a, raw, lane);
    for (int i = 0; i < 16; ++i) {
      const int at = row + lane / 4 + i / 4 % 2 * 8, e = i / 8 * 16 + lane % 4 * 4 + i % 4;
      const uint8_t byte = a[i / 4] >> i % 4 * 8;
      float scales[quant::kStep / Of::kSub], min[4] = {};
      const uint8_t *head0 = plane(kFirst, 0), *head1 = plane(kHeads - 1, 0);
      Of::scales(scales, min, head0, head1, n, at, step % 2, 0x4b400000);
      const int sub = (G * 32 + e) / Of::kSub;
      const long to = at * blocks * Block::kElements + step * quant::kStep + G * 32 + e;
      q[to] = scales[sub] * (Of::kSigned ? int8_t(byte) : byte);
      mins[to] = Of::kMin == quant::Min::sums ? min[G] : 0;
      if constexpr (Of::kMin == quant::Min::products) {
        uint32_t words[8];
        const float factor = Of::min_words(words, head0, head1, at, step % 2);
        mins[to] = factor * uint8_t(words[sub] >> e % 4 * 8);
      }
    }
  }
};

template <class Block>
void all(const uint8_t* w, long n, long blocks, float* q, float* mins) {
  for (int row = 0; row < n; row += 16)
    for (int step = 0; step < blocks * Block::kElements / quant::kStep; ++step)
      for (int lane = 0; lane < 32; ++lane) {
        const Rows<Block> rows{w, n, blocks, row, step, lane};
        quant::Raw raw;
        rows.template group<0>(raw, q, mins);
        rows.template group<1>(raw, q, mins);
        rows.template group<2>(raw, q, mins);
        rows.template group<3>(raw, q, mins);
      }
}
#define TYPE(type)                                                                              \\
  extern "C" void all_##type(const uint8_t* w, long n, long blocks, float* q, float* mins) {    \\
    all<quant::block_##type>(w, n, blocks, q, mins);                                            \\
  }
""" + "".join(f"TYPE({name.lower()})\n" for name in int8.TYPES)


@pytest.fixture(scope="module")
def operands(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The operands of all types as a shared library."""
    folder = tmp_path_factory.mktemp("operands")
    (folder / "operands.cpp").write_text(SOURCE)
    command = [cxx(), "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    command += ["-shared", "-fPIC", f"-I{ROOT}", "-o", "operands.so", "operands.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "operands.so"))


def assert_operands(library: ctypes.CDLL, name: str, packed: NDArray[np.uint8]) -> None:
    """Scales times operands, and mins, of blocks [n, blocks of a row, bytes] are the weights'."""
    n, blocks, _ = packed.shape
    w, columns = planes(name, packed), blocks * block_of(name)[0]
    q, mins = np.full((2, n, columns), np.nan, np.float32)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (w, q, mins)]
    getattr(library, f"all_{name.lower()}")(
        pointers[0], ctypes.c_long(n), ctypes.c_long(blocks), *pointers[1:]
    )
    parts = int8.parts(packed.reshape(n, -1), name)
    size = columns // parts.scales.shape[1]
    np.testing.assert_array_equal(q, np.repeat(parts.scales, size, axis=1) * parts.q)
    less = np.zeros_like(parts.scales) if parts.mins is None else parts.mins
    np.testing.assert_array_equal(mins, -np.repeat(less, size, axis=1))


@pytest.mark.parametrize("name", int8.TYPES)
def test_any_bits(operands: ctypes.CDLL, name: str) -> None:
    blocks = 10 * STEP // block_of(name)[0]
    packed = random_blocks(name, 48 * blocks, np.random.default_rng(0))
    assert_operands(operands, name, packed.reshape(48, blocks, -1))


@pytest.mark.parametrize("name", int8.TYPES)
def test_extreme_scales(operands: ctypes.CDLL, name: str) -> None:
    blocks = 10 * STEP // block_of(name)[0]
    packed = random_blocks(name, 48 * blocks, np.random.default_rng(1))
    for i, byte in enumerate((0x00, 0x80, 0x01, 0x81, 0x7B, 0xFB)):  # as of unpack
        packed[i::6, EXPONENT_BYTES[name]] = byte
    assert_operands(operands, name, packed.reshape(48, blocks, -1))
