// Sums over rows of fp16, from which means over the tokens of a prompt are made:
//
//   sums[i] = x[first] + ... + x[first + rows - 1],  (first, rows) = spans[i],  i < *count
//
// In float32 and in an order that the number of rows alone decides: a lane adds every kLanes-th
// row, then lanes are added. Grid: (spans, pieces of kColumns columns). Bytes: 2 per element of x,
// 4 per element of the sums. The 8,192 rows of 3584 of one long prompt, 59 MB that 56 blocks read,
// are expected to take 25 us of an H200; many prompts keep all of it busy.
#pragma once

#include "../core/spec.cuh"

#define POOL_PARAMS(P)                                    \
  P(const int32_t*, count) /* device count of spans */    \
  P(const int32_t*, spans) /* [count][first row, rows] */ \
  P(const __half*, x)      /* [...][columns] */           \
  P(float*, sums)          /* [count][columns] */         \
  P(int32_t, columns)      /* a multiple of 8 */

#define POOL_PLANES(P, A) P(16, float, partial, [kThreads / 32][kColumns])

template <int Threads>
struct Pool {
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr int kColumns = 64, kUnits = kColumns / 8, kLanes = kThreads / kUnits;
  static constexpr spec::Tile tile() { return spec::Tile{}.with("columns", kColumns); }
  SPEC_PARAMS(POOL_PARAMS)
  SPEC_SMEM(POOL_PLANES)

  static __device__ void run(const Params& p) {
    const int64_t i = blockIdx.x;
    if (i >= *p.count) return;
    const int first = p.spans[2 * i], rows = p.spans[2 * i + 1];
    const int unit = threadIdx.x % kUnits, lane = threadIdx.x / kUnits;
    const int column0 = blockIdx.y * kColumns, column = column0 + 8 * unit;
    float sums[8] = {};
    if (column < p.columns) {
      const __half* x = p.x + int64_t(first) * p.columns + column;
#pragma unroll 4
      for (int row = lane; row < rows; row += kLanes) {
        const uint4 packed = *reinterpret_cast<const uint4*>(x + int64_t(row) * p.columns);
        const __half2* pairs = reinterpret_cast<const __half2*>(&packed);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = __half22float2(pairs[j]);
          sums[2 * j] += pair.x;
          sums[2 * j + 1] += pair.y;
        }
      }
    }
    Smem& s = spec::shared<Smem>();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int offset = kUnits; offset < 32; offset *= 2)
        sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], offset);
      if (threadIdx.x % 32 < kUnits) s.partial[threadIdx.x / 32][8 * unit + j] = sums[j];
    }
    __syncthreads();
    const int own = column0 + threadIdx.x;
    if (threadIdx.x >= kColumns || own >= p.columns) return;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; ++warp) sum += s.partial[warp][threadIdx.x];
    p.sums[i * p.columns + own] = sum;
  }
};
