// What device code takes for granted of CUDA, on the host.
//
// A kernel is compiled for the host with this file before it, and with the files in core/ beside it
// in place of those of the same names in cuda/core. grid.hpp runs its threads.
//
// Arithmetic is IEEE's, without contraction; mma adds exact products up. A store is seen at once,
// by copies and tensor cores, too: fences do nothing.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define __CUDA_ARCH__ EMULATED  // from here on: the toolkit's headers are for the host

#undef __shared__
#define __shared__  // the block that runs has all of it: spec::raw
#ifndef __global__
#define __global__
#endif
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

using std::max;
using std::min;

#include "grid.hpp"

// ---- What CUDA offers device code.

inline void __syncthreads() { emulated::arrive(emulated::block->meeting); }
inline void __syncwarp(uint32_t = ~0u) { emulated::exchange("", 0); }
inline void __threadfence() {}

template <class T>
T __shfl_sync(uint32_t, T x, int lane) {
  return emulated::from_lane<T>(emulated::exchange(&x, sizeof(T)), lane % 32);
}
template <class T>
T __shfl_xor_sync(uint32_t, T x, int mask) {
  return emulated::from_lane<T>(emulated::exchange(&x, sizeof(T)), (threadIdx.x % 32) ^ mask);
}
template <class T>
T __shfl_down_sync(uint32_t, T x, int by) {
  const int lane = threadIdx.x % 32;
  return emulated::from_lane<T>(emulated::exchange(&x, sizeof(T)),
                                lane + by < 32 ? lane + by : lane);
}
template <class T>
T __shfl_up_sync(uint32_t, T x, int by) {
  const int lane = threadIdx.x % 32;
  return emulated::from_lane<T>(emulated::exchange(&x, sizeof(T)), lane >= by ? lane - by : lane);
}
template <class T>
T __reduce_max_sync(uint32_t, T x) {
  const auto all = emulated::exchange(&x, sizeof(T));
  for (int i = 0; i < 32; ++i) x = max(x, emulated::from_lane<T>(all, i));
  return x;
}
inline uint32_t __ballot_sync(uint32_t, int x) {
  const auto all = emulated::exchange(&x, sizeof(x));
  uint32_t found = 0;
  for (int i = 0; i < 32; ++i) found |= uint32_t(emulated::from_lane<int>(all, i) != 0) << i;
  return found;
}
inline int __any_sync(uint32_t mask, int x) { return __ballot_sync(mask, x) != 0; }
inline int __all_sync(uint32_t mask, int x) { return __ballot_sync(mask, x) == ~0u; }

template <class T>
T atomicAdd(T* at, T x) {
  return std::exchange(*at, *at + x);
}
template <class T>
T atomicMin(T* at, T x) {
  return std::exchange(*at, min(*at, x));
}
template <class T>
T atomicMax(T* at, T x) {
  return std::exchange(*at, max(*at, x));
}
inline unsigned atomicInc(unsigned* at, unsigned last) {
  return std::exchange(*at, *at >= last ? 0 : *at + 1);
}

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }

inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline int __float2int_rn(float x) { return int(nearbyintf(x)); }

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint32_t __umulhi(uint32_t x, uint32_t y) { return uint64_t(x) * y >> 32; }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = uint64_t(y) << 32 | x;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i)
    found |= uint32_t(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return found;
}
inline int __dp4a(int x, int y, int sum) {
  for (int i = 0; i < 4; ++i) sum += int8_t(x >> 8 * i) * int8_t(y >> 8 * i);
  return sum;
}

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, T x) {
  *p = x;
}
