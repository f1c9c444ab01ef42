// What the GEMM engines have in common: their epilogues, and the walk over the tiles of C.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../core/live.cuh"
#include "../core/ptx.cuh"

//   f32     C[r][j]  = scale * acc[r][j]
//   f16     the same in fp16
//   add     C[r][j] += scale * acc[r][j]
//   swiglu  C[r][i]  = fp16(scale * silu(acc[r][2i]) * acc[r][2i + 1]), W rows gate0, up0, gate1...
//   geglu   the same with gelu in place of silu
//   qkv     C = acc + bias, of which q and k are rotated; K and V go to the cache (sm_90a alone)
enum class Epilogue { f32, f16, add, swiglu, geglu, qkv };

constexpr const char* name_of(Epilogue e) {
  constexpr const char* names[] = {"f32", "f16", "add", "swiglu", "geglu", "qkv"};
  return names[int(e)];
}

template <Epilogue E>
constexpr bool is_gated = E == Epilogue::swiglu || E == Epilogue::geglu;

// Whose results are fp16, in the order of C's columns.
template <Epilogue E>
constexpr bool is_half = is_gated<E> || E == Epilogue::f16;

template <Epilogue E>
using OutputOf = std::conditional_t<is_half<E>, __half, float>;

// silu(g) = g / (1 + e^-g). gelu is the one by tanh, g / 2 (1 + tanh(t)) = g / (1 + e^-2t) with
// t = sqrt(2 / pi) (g + 0.044715 g^3) (arXiv:1606.08415, section 2), as Gemma was trained with.
template <Epilogue E>
__device__ __forceinline__ float gated(float gate, float up) {
  static_assert(is_gated<E>);
  constexpr float kLog2E = 1.44269504f;
  float power = -kLog2E * gate;
  if constexpr (E == Epilogue::geglu)
    power *= 1.59576912f + 1.59576912f * 0.044715f * gate * gate;  // 2 sqrt(2 / pi)
  return __fdividef(gate, 1.0f + ptx::exp2_approx(power)) * up;
}

// Tiles are walked in bands of kBandRows rows, down the band before the next column tile, so that
// the blocks at work at a time share their rows of A and W in L2.
constexpr int kBandRows = 2048;

struct TilePlace {
  int row, column;  // of its first element
};

// Where tile number `tile` of the `down` x `across` tiles of Rows x Columns lies.
template <int Rows, int Columns>
__device__ __forceinline__ TilePlace place_of(uint32_t tile, int down, int across) {
  constexpr int kBand = kBandRows / Rows;
  const int band = tile / (kBand * across) * kBand;
  const int in_band = tile - band * across, height = min(kBand, down - band);
  return {(band + in_band % height) * Rows, in_band / height * Columns};
}
