// What changes from call to call, kept in device memory so that a launch never depends on it.
#pragma once

#include <cstdint>

#include "cuda_fp16.h"
#include "spec.cuh"

// One prompt (or its continuation): its rows in the activations and its place in a K/V cache.
// Cache layout: [layer][kv head][position][head dim], fp16, `capacity` positions.
struct Sequence {
  int32_t row0, rows;  // rows [row0, row0 + rows) of the activations belong to this sequence
  int32_t start;       // position of its first row: so many tokens were in the cache before
  int32_t capacity;    // positions per kv head in its cache
  __half* k;
  __half* v;
  // Where kernels copy K and V by tensor maps: a map of K and one of V for each height of box, in
  // the order of heights. [layer * kv heads][capacity][head dim], boxes of height x 64, 128-byte
  // swizzle. Null where no kernel does.
  const spec::TensorMap* maps;
};

struct Live {
  int32_t rows;       // activation rows in use
  int32_t sequences;  // entries of the sequence list
  int32_t wanted;     // rows whose logits are wanted
  int32_t overflow;   // lowest site out of fp16's range; INT32_MAX while there is none
};

// False beyond the largest fp16 number, for infinities and for NaN.
__device__ __forceinline__ bool fits_half(float x) { return fabsf(x) <= 65504.0f; }

// Rounds to fp16. A value out of its range (or NaN) leaves its site's number in `overflow`, if
// lowest.
__device__ __forceinline__ __half checked_half(float x, int32_t* overflow, int32_t site) {
  if (!fits_half(x)) atomicMin(overflow, site);
  return __float2half_rn(x);
}

// The same for N values, stored at once at `out`, which is aligned to their 2 N bytes.
template <int N>
__device__ __forceinline__ void store_checked(__half* out, const float (&x)[N], int32_t* overflow,
                                              int32_t site) {
  struct alignas(2 * N) {
    uint32_t pairs[N / 2];
  } packed;
  bool fit = true;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    fit &= fits_half(x[i]) & fits_half(x[i + 1]);
    const __half2 h = __floats2half2_rn(x[i], x[i + 1]);
    packed.pairs[i / 2] = reinterpret_cast<const uint32_t&>(h);
  }
  if (!fit) atomicMin(overflow, site);
  *reinterpret_cast<decltype(packed)*>(out) = packed;
}
