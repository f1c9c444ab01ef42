// A K/V cache of e4m3: sign, four exponent bits of bias 7, three mantissa bits, no infinities, NaN
// as 0x7f and 0xff, and 448 as the largest number (OCP 8-bit Floating Point Specification, section
// 5). A row of the cache is one head of one token: codes and one scale, a number being code *
// scale. pyruntime/reference/e4m3.py states the same in NumPy, bit for bit.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "ptx.cuh"

namespace e4m3 {

// As ::Sequence, for such a cache. Scales lie as the rows do: [layer][kv head][position].
struct Sequence {
  int32_t row0, rows, start, capacity;
  uint8_t* k;
  uint8_t* v;
  float* k_scale;
  float* v_scale;
};

constexpr float kLargest = 448.0f;

// The largest magnitude of a row, as its scale is made from it: not less than fp16's smallest
// number, so that nothing is divided by zero.
__device__ __forceinline__ float row_reach(float largest) { return fmaxf(largest, 0x1p-24f); }

// The nearest code, ties to even; beyond +-448 that of 448. One instruction from sm_89 on, a
// function of the toolkit's before.
__device__ __forceinline__ uint8_t encode(float x) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

// Four codes times a scale, as fp16. Moved by one bit the code's exponent and mantissa are those of
// an fp16 number 2^-8 as large, subnormals too; NaN, which no row holds, would become 480.
__device__ __forceinline__ uint2 widen(uint32_t codes, float scale) {
  const float factor = 256.0f * scale;
  uint32_t pairs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t high = __byte_perm(codes, 0, i ? 0x3424 : 0x1404);  // each in its half's top
    const uint32_t moved = (high & 0x80008000u) | ((high & 0x7f007f00u) >> 1);
    const float2 x = __half22float2(reinterpret_cast<const __half2&>(moved));
    pairs[i] = ptx::pack_halves(factor * x.x, factor * x.y);
  }
  return make_uint2(pairs[0], pairs[1]);
}

}  // namespace e4m3
