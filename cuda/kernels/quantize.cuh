// Activations to int8, a scale for each group of 32 values of a row, alone or folded into what
// makes them. Nothing is written in f32 or fp16 besides, unless a row of the table says `Copy`.
//
//   quantize   from fp16
//   norm       x / sqrt(mean(x^2) + eps) * weight, from the f32 residual stream
//   residual   the same after x += branch / sqrt(mean(branch^2) + eps) * post
//   gated      silu(gate) * up or gelu(gate) * up, in f32, from fp16
//
// For a group d = max |x| / 127, rounded to 16 significant bits, q = rint(x / d); scales holds
// {d, -M d} with M = 1.5 * 2^23, of whose bits an integer product may be counted on: that product
// as a float is fma(M + product, d, -M d), exactly up to its one rounding. sums holds d * sum of q
// as tf32.
//
// Four neighbouring lanes have a group, eight values each. With Rows = 8 the eight groups of a warp
// belong to eight rows: each writes whole sectors of scales and sums, which are group-major.
//
// Grid: norm and residual one block per Rows rows; the others (rows / Rows, columns / kColumns).
// Where there are few rows, a norm's threads hold one, eight values each: it is read once, and the
// weights, which lie in no cache by then, are asked for before the kernel before has ended.
// Rows past the live ones are neither read nor written. Bytes per element: what is read (2, 4, 12
// with 4 written, 4), 1 and 12 / 32.
#pragma once

#include "../core/live.cuh"
#include "../core/reduce.cuh"
#include "../core/spec.cuh"
#include "gemm_base.cuh"

#define QUANTIZED_PARAMS(P)                                             \
  P(int8_t*, q)         /* [rows][columns] */                           \
  P(float2*, scales)    /* [columns / 32][stride] */                    \
  P(float*, sums)       /* [columns / 32][stride] */                    \
  P(int32_t*, overflow) /* lowest site of values out of range */        \
  P(int32_t, columns)   /* a multiple of 32 */                          \
  P(int32_t, stride)    /* rows that scales and sums have places for */ \
  P(int32_t, site)

#define QUANTIZE_PARAMS(P)                                \
  P(const int32_t*, rows) /* device count of live rows */ \
  P(const __half*, x)     /* [rows][columns] */           \
  QUANTIZED_PARAMS(P)

#define QUANTIZE_NORM_PARAMS(P)                            \
  P(const int32_t*, rows) /* device count of live rows */  \
  P(const float*, x)      /* [rows][columns] */            \
  P(const float*, weight) /* [columns] */                  \
  P(__half*, y)           /* [rows][columns], with Copy */ \
  P(float, eps)                                            \
  QUANTIZED_PARAMS(P)

#define QUANTIZE_RESIDUAL_PARAMS(P)                        \
  P(const int32_t*, rows) /* device count of live rows */  \
  P(const float*, branch) /* [rows][columns] */            \
  P(const float*, post)   /* [columns] */                  \
  P(float*, x)            /* [rows][columns] */            \
  P(const float*, weight) /* [columns] */                  \
  P(__half*, y)           /* [rows][columns], with Copy */ \
  P(float, eps)                                            \
  QUANTIZED_PARAMS(P)

#define QUANTIZE_GATED_PARAMS(P)                           \
  P(const int32_t*, rows) /* device count of live rows */  \
  P(const __half*, gate)  /* [rows][columns] */            \
  P(const __half*, up)    /* [rows][columns] */            \
  P(__half*, y)           /* [rows][columns], with Copy */ \
  QUANTIZED_PARAMS(P)

#define QUANTIZE_PLANES(P, A) P(16, float, partial, [2][kThreads / 32])

constexpr float kMagic = 12582912.0f;  // M
constexpr float kLargestQuant = 127.0f;
constexpr float kQuantizedLimit = 0x1p100f;  // beyond it M d might be infinite
constexpr float kQuantizedZero = 0x1p-100f;  // groups below it are zeros

// A lane's place among the rows and groups of its warp.
template <int Rows>
struct QuantizeLane {
  static_assert(Rows == 1 || Rows == 2 || Rows == 4 || Rows == 8);
  static constexpr int kGroups = 8 / Rows;  // side by side in a warp
  int row, group, part;                     // within the block's rows; its warp's groups; a group

  __device__ __forceinline__ QuantizeLane()
      : row(threadIdx.x / 4 % Rows), group(threadIdx.x % 32 / 4 / Rows), part(threadIdx.x % 4) {}
};

__device__ __forceinline__ void widen(const uint4& packed, float (&x)[8]) {
  const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(pairs[i]));
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

// Stores a group of a row, of which each of four lanes has eight values. All lanes of the warp call
// it; those without `live` store nothing.
template <class Params>
__device__ __forceinline__ void store_group(const Params& p, const float (&x)[8], int64_t row,
                                            int group, int part, bool live) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = ptx::max_or_nan(largest, fabsf(x[i]));
  largest = ptx::max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  largest = ptx::max_or_nan(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  float d = __uint_as_float((__float_as_uint(largest / kLargestQuant) + 0x80) & 0xffffff00u);
  if (largest < kQuantizedZero) d = 0;
  const float inverse = d > 0 ? 1.0f / d : 0.0f;
  // rint by adding M: the low bytes of the sums are the integers. None is beyond 127, as d is less
  // than a largest / 127 by 2^-16 of it at most.
  uint32_t bits[8], words[2];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    bits[i] = __float_as_uint(__fadd_rn(__fmul_rn(x[i], inverse), kMagic));
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t low = __byte_perm(bits[4 * i], bits[4 * i + 1], 0x0040);
    const uint32_t high = __byte_perm(bits[4 * i + 2], bits[4 * i + 3], 0x0040);
    words[i] = __byte_perm(low, high, 0x5410);
    sum = __dp4a(int(words[i]), 0x01010101, sum);
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  if (!live) return;
  *reinterpret_cast<uint2*>(p.q + row * p.columns + group * 32 + part * 8) =
      make_uint2(words[0], words[1]);
  const int64_t place = int64_t(group) * p.stride + row;
  if (part == 0) p.scales[place] = make_float2(d, -kMagic * d);
  if (part == 1)
    p.sums[place] = __uint_as_float((__float_as_uint(d * float(sum)) + 0x1000) & 0xffffe000u);
  if (part == 2 && !(largest <= kQuantizedLimit)) atomicMin(p.overflow, p.site);
}

template <int Threads, int Rows, int Loads>
struct Quantize {
  using Lane = QuantizeLane<Rows>;
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr int kColumns = Threads / 32 * Loads * Lane::kGroups * 32;
  static constexpr spec::Tile tile() {
    return spec::Tile{}.with("op", "quantize").with("rows", Rows).with("columns", kColumns);
  }
  SPEC_PARAMS(QUANTIZE_PARAMS)
  SPEC_NO_SMEM

  static __device__ void run(const Params& p) {
    const Lane lane;
    const int64_t row = int64_t(blockIdx.x) * Rows + lane.row;
    const int first = blockIdx.y * (kColumns / 32) + threadIdx.x / 32 * (Loads * Lane::kGroups);
    const int groups = p.columns / 32;
    const bool live = row < *p.rows;
    uint4 in[Loads];
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      const int group = first + i * Lane::kGroups + lane.group;
      in[i] = make_uint4(0, 0, 0, 0);
      if (live && group < groups)
        in[i] = *reinterpret_cast<const uint4*>(p.x + row * p.columns + group * 32 + lane.part * 8);
    }
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      const int group = first + i * Lane::kGroups + lane.group;
      float x[8];
      widen(in[i], x);
      store_group(p, x, row, group, lane.part, live && group < groups);
    }
  }
};

template <Epilogue E, int Threads, int Rows, int Loads, bool Copy>
struct QuantizeGated {
  using Lane = QuantizeLane<Rows>;
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr int kColumns = Threads / 32 * Loads * Lane::kGroups * 32;
  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("op", "gated")
        .with("activation", E == Epilogue::swiglu ? "silu" : "gelu")
        .with("rows", Rows)
        .with("columns", kColumns)
        .with("copy", int(Copy));
  }
  SPEC_PARAMS(QUANTIZE_GATED_PARAMS)
  SPEC_NO_SMEM

  static __device__ void run(const Params& p) {
    const Lane lane;
    const int64_t row = int64_t(blockIdx.x) * Rows + lane.row;
    const int first = blockIdx.y * (kColumns / 32) + threadIdx.x / 32 * (Loads * Lane::kGroups);
    const int groups = p.columns / 32;
    const bool live = row < *p.rows;
    uint4 gates[Loads], ups[Loads];
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      const int group = first + i * Lane::kGroups + lane.group;
      gates[i] = ups[i] = make_uint4(0, 0, 0, 0);
      if (live && group < groups) {
        const int64_t at = row * p.columns + group * 32 + lane.part * 8;
        gates[i] = *reinterpret_cast<const uint4*>(p.gate + at);
        ups[i] = *reinterpret_cast<const uint4*>(p.up + at);
      }
    }
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      const int group = first + i * Lane::kGroups + lane.group;
      const bool here = live && group < groups;
      float x[8], up[8];
      widen(gates[i], x);
      widen(ups[i], up);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = gated<E>(x[j], up[j]);
      if constexpr (Copy)
        if (here)
          store_checked(p.y + row * p.columns + group * 32 + lane.part * 8, x, p.overflow, p.site);
      store_group(p, x, row, group, lane.part, here);
    }
  }
};

// Sums over the warps that share a row; `partial` has a place for each warp of the block. Gives the
// sum of row `row` of the block. A second use takes another `partial`.
template <int Threads, int Rows>
__device__ __forceinline__ float row_sum(float v, float (&partial)[Threads / 32], int row) {
  constexpr int kEach = Threads / 32 / Rows;
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += partial[row * kEach + i];
  return sum;
}

// What is normalised and quantized last, by all lanes, from the sum of the squares of lane.row.
template <int Threads, int Rows, bool Copy, class Params>
__device__ __forceinline__ void quantize_normed(const Params& p, float squares) {
  using Lane = QuantizeLane<Rows>;
  constexpr int kStep = Threads / 32 * Lane::kGroups;
  const Lane lane;
  const int64_t row = int64_t(blockIdx.x) * Rows + lane.row;
  const bool live = row < *p.rows;
  const int groups = p.columns / 32;
  const float scale = rsqrtf(squares / p.columns + p.eps);
  const float4* const in = reinterpret_cast<const float4*>(p.x + row * p.columns);
  const float4* const weight = reinterpret_cast<const float4*>(p.weight);
#pragma unroll 2
  for (int first = threadIdx.x / 32 * Lane::kGroups; first < groups; first += kStep) {
    const int group = first + lane.group, at = group * 8 + lane.part * 2;
    const bool here = live && group < groups;
    float x[8] = {};
    if (here) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 v = in[at + i], w = weight[at + i];
        x[4 * i] = v.x * scale * w.x;
        x[4 * i + 1] = v.y * scale * w.y;
        x[4 * i + 2] = v.z * scale * w.z;
        x[4 * i + 3] = v.w * scale * w.w;
      }
      if constexpr (Copy) store_checked(p.y + row * p.columns + 4 * at, x, p.overflow, p.site);
    }
    store_group(p, x, row, group, lane.part, here);
  }
}

// Where a thread sums squares: its warp's row, and its place among the warps of that row.
template <int Threads, int Rows>
struct SquaresLane {
  static constexpr int kStep = Threads / Rows;
  static_assert(kStep % 32 == 0, "whole warps");
  int64_t row;
  int first;

  __device__ __forceinline__ SquaresLane()
      : row(int64_t(blockIdx.x) * Rows + threadIdx.x / kStep), first(threadIdx.x % kStep) {}
};

template <int Threads, int Rows, bool Copy>
struct QuantizeNorm {
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr spec::Tile tile() {
    return spec::Tile{}.with("op", "norm").with("rows", Rows).with("copy", int(Copy));
  }
  SPEC_PARAMS(QUANTIZE_NORM_PARAMS)
  SPEC_SMEM(QUANTIZE_PLANES)

  static __device__ void run(const Params& p) {
    const int rows = *p.rows;
    if (int64_t(blockIdx.x) * Rows >= rows) return;
    Smem& s = spec::shared<Smem>();
    const SquaresLane<Threads, Rows> lane;
    float squares = 0;
    if (lane.row < rows) {
      const float4* const x = reinterpret_cast<const float4*>(p.x + lane.row * p.columns);
#pragma unroll 4
      for (int i = lane.first; i < p.columns / 4; i += lane.kStep) squares += square(x[i]);
    }
    squares = row_sum<Threads, Rows>(squares, s.partial[0], QuantizeLane<Rows>{}.row);
    quantize_normed<Threads, Rows, Copy>(p, squares);
  }
};

template <int Threads, bool Copy>
struct QuantizeNormHeld {
  static constexpr int kThreads = Threads, kMinBlocks = 1, kHeld = 8 * Threads;
  static constexpr bool kWaitsItself = true;
  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("op", "norm")
        .with("rows", 1)
        .with("held", kHeld)  // columns at most
        .with("copy", int(Copy));
  }
  SPEC_PARAMS(QUANTIZE_NORM_PARAMS)
  SPEC_SMEM(QUANTIZE_PLANES)

  static __device__ void run(const Params& p) {
    Smem& s = spec::shared<Smem>();
    const int64_t row = blockIdx.x;
    const int first = 8 * threadIdx.x;
    const bool here = first < p.columns;
    float4 weights[2] = {}, in[2] = {};
    if (here) {
#pragma unroll
      for (int i = 0; i < 2; ++i) weights[i] = reinterpret_cast<const float4*>(p.weight + first)[i];
    }
    // As in gemv_int8: the weights are asked for first, and not waited for.
    __syncwarp();
    const int rows = *static_cast<const volatile int32_t*>(p.rows);
    ptx::dependency_wait();
    if (row >= rows) return;
    if (here) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        in[i] = reinterpret_cast<const float4*>(p.x + row * p.columns + first)[i];
    }
    const float squares = row_sum<Threads, 1>(square(in[0]) + square(in[1]), s.partial[0], 0);
    const float scale = rsqrtf(squares / p.columns + p.eps);
    float x[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[4 * i] = in[i].x * scale * weights[i].x;
      x[4 * i + 1] = in[i].y * scale * weights[i].y;
      x[4 * i + 2] = in[i].z * scale * weights[i].z;
      x[4 * i + 3] = in[i].w * scale * weights[i].w;
    }
    if constexpr (Copy)
      if (here) store_checked(p.y + row * p.columns + first, x, p.overflow, p.site);
    store_group(p, x, row, threadIdx.x / 4, threadIdx.x % 4, here);
  }
};

template <int Threads, int Rows, bool Copy>
struct QuantizeResidual {
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr spec::Tile tile() {
    return spec::Tile{}.with("op", "residual").with("rows", Rows).with("copy", int(Copy));
  }
  SPEC_PARAMS(QUANTIZE_RESIDUAL_PARAMS)
  SPEC_SMEM(QUANTIZE_PLANES)

  static __device__ void run(const Params& p) {
    const int rows = *p.rows;
    if (int64_t(blockIdx.x) * Rows >= rows) return;
    Smem& s = spec::shared<Smem>();
    const SquaresLane<Threads, Rows> lane;
    const bool live = lane.row < rows;
    const float4* const branch = reinterpret_cast<const float4*>(p.branch + lane.row * p.columns);
    const float4* const post = reinterpret_cast<const float4*>(p.post);
    float4* const x = reinterpret_cast<float4*>(p.x + lane.row * p.columns);
    float squares = 0;
    if (live) {
#pragma unroll 4
      for (int i = lane.first; i < p.columns / 4; i += lane.kStep) squares += square(branch[i]);
    }
    squares = row_sum<Threads, Rows>(squares, s.partial[0], threadIdx.x / lane.kStep);
    const float scale = rsqrtf(squares / p.columns + p.eps);
    squares = 0;
    if (live) {
#pragma unroll 2
      for (int i = lane.first; i < p.columns / 4; i += lane.kStep) {
        const float4 b = branch[i], w = post[i];
        float4 v = x[i];
        v = {v.x + b.x * scale * w.x, v.y + b.y * scale * w.y, v.z + b.z * scale * w.z,
             v.w + b.w * scale * w.w};
        squares += square(v);
        x[i] = v;
      }
    }
    // Its barrier shows every thread's x to the block.
    squares = row_sum<Threads, Rows>(squares, s.partial[1], QuantizeLane<Rows>{}.row);
    quantize_normed<Threads, Rows, Copy>(p, squares);
  }
};
