// What the GEMM engines have in common: their epilogues, and the walk over the tiles of C.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../core/live.cuh"
#include "../core/ptx.cuh"

//   f32     C[r][j]  = scale * acc[r][j]
//   add     C[r][j] += scale * acc[r][j]
//   swiglu  C[r][i]  = fp16(scale * silu(acc[r][2i]) * acc[r][2i + 1]), W rows gate0, up0, gate1...
enum class Epilogue { f32, add, swiglu };

constexpr const char* name_of(Epilogue e) {
  return e == Epilogue::f32 ? "f32" : e == Epilogue::add ? "add" : "swiglu";
}

template <Epilogue E>
using OutputOf = std::conditional_t<E == Epilogue::swiglu, __half, float>;

__device__ __forceinline__ float swiglu(float gate, float up) {
  constexpr float kLog2E = 1.44269504f;
  return __fdividef(gate, 1.0f + ptx::exp2_approx(-kLog2E * gate)) * up;
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
