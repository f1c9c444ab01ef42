// Small kernels that exercise what a cubin says about itself. Built by make.py; NVRTC builds it
// without TILE, the kernel that carries this package's contract.
#ifdef TILE
#include "../../../cuda/core/spec.cuh"

#define TILE_PARAMS(P) \
  P(const float*, x)   \
  P(float*, y)         \
  P(int32_t, columns)

// `small` leaves a hole before `rows`; `tail` reuses the memory of `rows` and is longer.
#define TILE_PLANES(P, A)        \
  P(16, float, small, [3])       \
  P(128, __half, rows, [64][40]) \
  A(rows, float, tail, [32][48])

template <int Threads>
struct Tile {
  static constexpr int kThreads = Threads, kMinBlocks = 2;
  static constexpr spec::Tile tile() { return spec::Tile{}.with("rows", 64); }
  SPEC_PARAMS(TILE_PARAMS)
  SPEC_SMEM(TILE_PLANES)
  static __device__ void run(const Params& p) {
    Smem& s = spec::shared<Smem>();
    if (threadIdx.x < 3) s.small[threadIdx.x] = p.x[threadIdx.x];
    s.rows[threadIdx.x % 64][threadIdx.x % 40] = __float2half(p.x[threadIdx.x]);
    __syncthreads();
    p.y[threadIdx.x] = s.small[threadIdx.x % 3] + __half2float(s.rows[0][threadIdx.x % 40]);
    __syncthreads();
    s.tail()[threadIdx.x % 32][0] = p.y[threadIdx.x];
    __syncthreads();
    p.y[threadIdx.x] += s.tail()[0][0] + p.columns;
  }
};
KERNEL(tile_t128, Tile<128>)
#endif

__constant__ float table[100];

extern "C" __global__ void plain(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= table[i % 100];
}

extern "C" __global__ void __launch_bounds__(256, 2) fixed_shared(float* x, int n, double d) {
  __shared__ float s[100];
  s[threadIdx.x % 100] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[(threadIdx.x + n) % 100] + d;
}

extern "C" __global__ void __launch_bounds__(128) chosen_shared(float* x) {
  extern __shared__ float chosen[];
  chosen[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  asm volatile("bar.sync 5;");
  x[threadIdx.x] = chosen[threadIdx.x ^ 1];
}

// Spills of 4 and 8 bytes: 32 registers for 56 live values.
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float2* x, double2* y) {
  float2 v[20];
  double2 w[4];
#pragma unroll
  for (int i = 0; i < 20; i++) v[i] = x[threadIdx.x + i * 1024];
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = y[threadIdx.x + i * 1024];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 20; i++) x[threadIdx.x + i * 1024] = {v[(i + 3) % 20].y, v[i].x};
#pragma unroll
  for (int i = 0; i < 4; i++) y[threadIdx.x + i * 1024] = w[3 - i];
}

// A stack that is no spill: an indexed local array.
extern "C" __global__ void local_array(float* x, int n) {
  float a[16];
  for (int i = 0; i < 16; i++) a[i * n & 15] = x[i];
  x[threadIdx.x] = a[n & 15];
}

__noinline__ __device__ float helper(float v, int n) {
  float a[8];
  for (int i = 0; i < 8; i++) a[i] = v * i;
  return a[n & 7];
}
extern "C" __global__ void calling(float* x, int n) { x[threadIdx.x] = helper(x[threadIdx.x], n); }

struct Wide {
  int v[1500];
};
extern "C" __global__ void wide_params(const __grid_constant__ Wide b, int i, int* o) {
  o[0] = b.v[i];
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __cluster_dims__(2, 1, 1) clustered(int* o) { o[0] = 1; }
#endif
