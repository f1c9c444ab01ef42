// Packed tensors as products with int8 activations read them: the fields of GGUF blocks, each in a
// plane of its own, so that all of a field is aligned and lies as it is read. Bits within a field
// are the file's (blocks.cuh), and all planes together have as many bytes.
//
// Planes of values are row-major, [n][blocks of a row][bytes]; planes of scales ("heads") are
// block-major, [blocks of a row][n][bytes], so that the scales of a tile's rows lie side by side.
// They follow each other in the order of `all`. n is a multiple of kPlaneRows: then every plane,
// and in a head plane every block, starts 16-byte aligned.
#pragma once

#include <cstdint>

#include "blocks.cuh"

#ifdef __CUDACC__
#define QUANT_PLACE __host__ __device__ constexpr
#else
#define QUANT_PLACE constexpr
#endif

namespace quant {

constexpr int kPlaneRows = 16;  // rows of a tensor are a multiple of this

struct Plane {
  int at;      // first byte of the field in a GGUF block
  int bytes;   // of the field
  int before;  // bytes of a block in the planes before this one
  bool head;   // block-major

  // First byte of the plane in a tensor of `n` rows of `blocks` blocks.
  QUANT_PLACE int64_t start(int64_t n, int64_t blocks) const { return n * blocks * before; }

  // First byte of a block's field.
  QUANT_PLACE int64_t place(int64_t n, int64_t blocks, int64_t row, int64_t block) const {
    return start(n, blocks) + (head ? block * n + row : row * blocks + block) * bytes;
  }
};

template <class Block>
struct Planes;

template <int Bytes>
struct PlanesOfD {
  static constexpr Plane q{2, Bytes, 0, false}, d{0, 2, Bytes, true};
  static constexpr Plane all[2] = {q, d};
};
template <>
struct Planes<block_q4_0> : PlanesOfD<16> {};
template <>
struct Planes<block_iq4_nl> : PlanesOfD<16> {};
template <>
struct Planes<block_q8_0> : PlanesOfD<32> {};

template <>
struct Planes<block_q4_1> {
  static constexpr Plane q{4, 16, 0, false}, dm{0, 4, 16, true};
  static constexpr Plane all[2] = {q, dm};
};

template <>
struct Planes<block_q5_0> {
  static constexpr Plane q{6, 16, 0, false}, high{2, 4, 16, false}, d{0, 2, 20, true};
  static constexpr Plane all[3] = {q, high, d};
};

template <>
struct Planes<block_q5_1> {
  static constexpr Plane q{8, 16, 0, false}, high{4, 4, 16, false}, dm{0, 4, 20, true};
  static constexpr Plane all[3] = {q, high, dm};
};

template <>
struct Planes<block_q2_k> {
  static constexpr Plane q{16, 64, 0, false}, scales{0, 16, 64, true}, dm{80, 4, 80, true};
  static constexpr Plane all[3] = {q, scales, dm};
};

template <>
struct Planes<block_q3_k> {
  static constexpr Plane q{32, 64, 0, false}, high{0, 32, 64, false};
  static constexpr Plane scales{96, 12, 96, true}, d{108, 2, 108, true};
  static constexpr Plane all[4] = {q, high, scales, d};
};

// `head`: d, dmin and the scales
template <>
struct Planes<block_q4_k> {
  static constexpr Plane q{16, 128, 0, false}, head{0, 16, 128, true};
  static constexpr Plane all[2] = {q, head};
};

template <>
struct Planes<block_q5_k> {
  static constexpr Plane q{48, 128, 0, false}, high{16, 32, 128, false}, head{0, 16, 160, true};
  static constexpr Plane all[3] = {q, high, head};
};

template <>
struct Planes<block_q6_k> {
  static constexpr Plane low{0, 128, 0, false}, high{128, 64, 128, false};
  static constexpr Plane scales{192, 16, 192, true}, d{208, 2, 208, true};
  static constexpr Plane all[4] = {low, high, scales, d};
};

// `head`: d, scales_high, scales_low
template <>
struct Planes<block_iq4_xs> {
  static constexpr Plane q{8, 128, 0, false}, head{0, 8, 128, true};
  static constexpr Plane all[2] = {q, head};
};

// Whether the planes of a type hold every byte of a block once.
template <class Block>
constexpr bool planes_are_whole() {
  bool held[sizeof(Block)] = {};
  int before = 0;
  for (const Plane& plane : Planes<Block>::all) {
    if (plane.before != before) return false;
    before += plane.bytes;
    for (int i = plane.at; i < plane.at + plane.bytes; ++i) {
      if (i >= int(sizeof(Block)) || held[i]) return false;
      held[i] = true;
    }
  }
  return before == int(sizeof(Block));
}

}  // namespace quant
