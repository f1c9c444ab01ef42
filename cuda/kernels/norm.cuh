// RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, from the f32 residual stream to fp16 GEMM input.
// Grid: one block per row; threads stride over the columns, four at a time (16 bytes in, 8 out).
// Bytes: 6 per element (the second reading of x is from L1).
#pragma once

#include "../core/live.cuh"
#include "../core/reduce.cuh"
#include "../core/spec.cuh"

#define NORM_PARAMS(P)                                        \
  P(const int32_t*, rows) /* device count of live rows */     \
  P(const float*, x)      /* [rows][columns] */               \
  P(const float*, weight) /* [columns] */                     \
  P(__half*, y)           /* [rows][columns] */               \
  P(int32_t*, overflow)   /* lowest site out of fp16 range */ \
  P(int32_t, columns)     /* a multiple of 4 */               \
  P(int32_t, site)                                            \
  P(float, eps)

#define NORM_PLANES(P, A) P(16, float, partial, [kThreads / 32])

template <int Threads>
struct Norm {
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr spec::Tile tile() { return spec::Tile{}; }
  SPEC_PARAMS(NORM_PARAMS)
  SPEC_SMEM(NORM_PLANES)

  static __device__ void run(const Params& p) {
    const int64_t row = blockIdx.x;
    if (row >= *p.rows) return;
    const float4* x = reinterpret_cast<const float4*>(p.x + row * p.columns);
    const float4* weight = reinterpret_cast<const float4*>(p.weight);
    __half* y = p.y + row * p.columns;
    float squares = 0;
#pragma unroll 2  // 32 registers: eight blocks to a multiprocessor
    for (int i = threadIdx.x; i < p.columns / 4; i += kThreads) {
      const float4 v = x[i];
      squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    Smem& s = spec::shared<Smem>();
    const float mean = block_sum<kThreads>(squares, s.partial) / p.columns;
    const float scale = rsqrtf(mean + p.eps);
#pragma unroll 2
    for (int i = threadIdx.x; i < p.columns / 4; i += kThreads) {
      const float4 v = x[i], w = weight[i];
      const float out[4] = {v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z,
                            v.w * scale * w.w};
      store_checked(y + 4 * i, out, p.overflow, p.site);
    }
  }
};
