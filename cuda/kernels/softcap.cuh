// Capped logits (Gemma 2, arXiv:2408.00118, section 2), in place: x = cap tanh(x / cap).
// Grid: (rows, pieces of Threads * Each columns). A row may begin anywhere: vocabularies are odd.
// Bytes: 8 per element.
#pragma once

#include "../core/spec.cuh"

#define SOFTCAP_PARAMS(P)                                 \
  P(const int32_t*, rows) /* device count of live rows */ \
  P(float*, x)            /* [rows][columns] */           \
  P(int32_t, columns)                                     \
  P(float, cap) /* positive */

template <int Threads, int Each>
struct Softcap {
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr spec::Tile tile() { return spec::Tile{}.with("columns", Threads * Each); }
  SPEC_PARAMS(SOFTCAP_PARAMS)
  SPEC_NO_SMEM

  static __device__ void run(const Params& p) {
    const int row = blockIdx.x;
    if (row >= *p.rows) return;
    float* x = p.x + int64_t(row) * p.columns;
    const float inverse = 1.0f / p.cap;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const int64_t column = (int64_t(blockIdx.y) * Each + i) * kThreads + threadIdx.x;
      if (column < p.columns) x[column] = p.cap * tanhf(x[column] * inverse);
    }
  }
};
