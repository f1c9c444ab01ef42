// RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, from the f32 residual stream to fp16 GEMM input.
// Grid: one block per row; block: kThreads threads stride over the columns. Bytes: 6 per element.
#pragma once

#include "../core/live.cuh"
#include "../core/reduce.cuh"
#include "../core/spec.cuh"

#define NORM_PARAMS(P)       \
  P(const int32_t*, rows)    /* device count of live rows */ \
  P(const float*, x)         /* [rows][columns] */ \
  P(const float*, weight)    /* [columns] */ \
  P(__half*, y)              /* [rows][columns] */ \
  P(int32_t*, overflow)      /* lowest site out of fp16 range */ \
  P(int32_t, columns)        \
  P(int32_t, site)           \
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
    const float* x = p.x + row * p.columns;
    __half* y = p.y + row * p.columns;
    float squares = 0;
    for (int c = threadIdx.x; c < p.columns; c += kThreads) squares += x[c] * x[c];
    Smem& s = spec::shared<Smem>();
    const float mean = block_sum<kThreads>(squares, s.partial) / p.columns;
    const float scale = rsqrtf(mean + p.eps);
    for (int c = threadIdx.x; c < p.columns; c += kThreads)
      y[c] = checked_half(x[c] * scale * p.weight[c], p.overflow, p.site);
  }
};
