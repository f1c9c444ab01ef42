// RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight, from the f32 residual stream to fp16 GEMM input.
// And, where a branch is normalised before it joins the stream (Gemma), with what comes next:
//
//   x += branch / sqrt(mean(branch^2) + eps) * post,  then y from x as above
//
// Grid: one block per row; threads stride over the columns, four at a time (16 bytes in, 8 out).
// Bytes: 6 per element, or 14 (the second readings are from L1 or L2).
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
    for (int i = threadIdx.x; i < p.columns / 4; i += kThreads) squares += square(x[i]);
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

#define NORM_RESIDUAL_PARAMS(P)                               \
  P(const int32_t*, rows) /* device count of live rows */     \
  P(const float*, branch) /* [rows][columns] */               \
  P(const float*, post)   /* [columns] */                     \
  P(float*, x)            /* [rows][columns] */               \
  P(const float*, weight) /* [columns] */                     \
  P(__half*, y)           /* [rows][columns] */               \
  P(int32_t*, overflow)   /* lowest site out of fp16 range */ \
  P(int32_t, columns)     /* a multiple of 4 */               \
  P(int32_t, site)                                            \
  P(float, eps)

template <int Threads>
struct NormResidual {
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr spec::Tile tile() { return spec::Tile{}.with("op", "residual"); }
  SPEC_PARAMS(NORM_RESIDUAL_PARAMS)
  SPEC_SMEM(NORM_PLANES)

  static __device__ void run(const Params& p) {
    const int64_t row = blockIdx.x;
    if (row >= *p.rows) return;
    const float4* branch = reinterpret_cast<const float4*>(p.branch + row * p.columns);
    const float4* post = reinterpret_cast<const float4*>(p.post);
    const float4* weight = reinterpret_cast<const float4*>(p.weight);
    float4* x = reinterpret_cast<float4*>(p.x + row * p.columns);
    __half* y = p.y + row * p.columns;
    Smem& s = spec::shared<Smem>();
    float squares = 0;
#pragma unroll 2  // 32 registers: eight blocks to a multiprocessor
    for (int i = threadIdx.x; i < p.columns / 4; i += kThreads) squares += square(branch[i]);
    float scale = rsqrtf(block_sum<kThreads>(squares, s.partial) / p.columns + p.eps);
    squares = 0;
#pragma unroll 2
    for (int i = threadIdx.x; i < p.columns / 4; i += kThreads) {
      const float4 b = branch[i], w = post[i];
      float4 v = x[i];
      v = {v.x + b.x * scale * w.x, v.y + b.y * scale * w.y, v.z + b.z * scale * w.z,
           v.w + b.w * scale * w.w};
      squares += square(v);
      x[i] = v;
    }
    scale = rsqrtf(block_sum<kThreads>(squares, s.partial) / p.columns + p.eps);
#pragma unroll 2
    for (int i = threadIdx.x; i < p.columns / 4; i += kThreads) {  // each its own elements
      const float4 v = x[i], w = weight[i];
      const float out[4] = {v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z,
                            v.w * scale * w.w};
      store_checked(y + 4 * i, out, p.overflow, p.site);
    }
  }
};
