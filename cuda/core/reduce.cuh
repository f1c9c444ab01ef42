// Reductions: of four squares, over a warp and over a block.
#pragma once

__device__ __forceinline__ float square(float4 v) {
  return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}

// Sum over a block of `Threads` threads; `partial` is a plane of Threads / 32 floats. Every thread
// gets it.
template <int Threads>
__device__ __forceinline__ float block_sum(float v, float* partial) {
  v = warp_sum(v);
  __syncthreads();  // an earlier use of `partial` is over
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Threads / 32; ++i) sum += partial[i];
  return sum;
}
