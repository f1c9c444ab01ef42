// The steps that attention kernels are made of: staging rows, the two products, masking, and the
// online softmax (Milakov and Gimelshein 2018) in registers.
//
// A warp works on bands of 16 rows (one mma). In an accumulator fragment lane l holds, per 8
// columns, columns 2 (l % 4) and + 1 of rows l / 4 and l / 4 + 8: a row's maximum is a butterfly
// over 4 lanes, and two neighbouring score fragments are the A operand of P V as they stand.
// K [key][dim] is its own col-major B operand (ldmatrix), V [key][dim] a row-major one
// (ldmatrix.trans). Staged rows are padded by 16 bytes, so that the eight rows of an 8x8 matrix lie
// in different banks.
//
// Every score is a chain of m16n8k16 products in ascending dim, every output one in ascending key:
// kernels with the same key tile and the same softmax give the same bits.
#pragma once

#include <cfloat>

#include "../core/live.cuh"
#include "../core/ptx.cuh"
#include "../core/spec.cuh"

#define ATTENTION_PARAMS(P)                         \
  P(const Live*, live)                              \
  P(const Sequence*, sequences)                     \
  P(const __half*, q) /* [rows][heads][head dim] */ \
  P(__half*, o)       /* [rows][heads][head dim] */ \
  P(int32_t, layer)                                 \
  P(int32_t, heads)                                 \
  P(int32_t, kv_heads) /* a divisor of heads */     \
  P(float, scale)      /* positive */

// Of kernels that also take windows and caps, see attention.cuh.
#define ATTENTION_WINDOW_PARAMS(P)                                         \
  ATTENTION_PARAMS(P)                                                      \
  P(int32_t, window) /* keys that a row sees, its own included, at most */ \
  P(float, softcap)  /* of scores, positive; read by rows with Cap alone */

namespace attention {

constexpr int kPad = 8;  // of a staged row
constexpr float kLog2E = 1.44269504f;

// Where one head's matrices begin: q and o at a row of the sequence, k and v at position 0.
template <int HeadDim>
struct Operands {
  const __half *k, *v, *q;
  __half* o;
  int64_t pitch;  // from a row of q and o to the next

  template <class Params>
  __device__ Operands(const Params& p, const Sequence& sequence, int head, int row) {
    const int kv_head = head / (p.heads / p.kv_heads);
    const int64_t cached =
        (int64_t(p.layer) * p.kv_heads + kv_head) * sequence.capacity * int64_t(HeadDim);
    k = sequence.k + cached;
    v = sequence.v + cached;
    pitch = int64_t(p.heads) * HeadDim;
    const int64_t at = (int64_t(sequence.row0) + row) * pitch + int64_t(head) * HeadDim;
    q = p.q + at;
    o = p.o + at;
  }
};

// This warp's number: from lane 0, so that the compiler knows that branches on it do not split the
// warp.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
}

// Rows [begin, end) of a matrix in global memory to a plane; its other rows become zeros.
template <int Threads, int Rows, int Pitch>
__device__ __forceinline__ void load_rows(__half (&plane)[Rows][Pitch], const __half* matrix,
                                          int64_t pitch, int begin, int end) {
  constexpr int kHeadDim = Pitch - kPad, kChunks = kHeadDim / 8;
  constexpr int kLanes = kChunks % 8 ? 4 : 8;  // threads of a row
  constexpr int kStep = Threads / kLanes;      // rows at a time
  static_assert(kChunks % kLanes == 0 && Rows % kStep == 0);
  const int column = threadIdx.x % kLanes * 8;
#pragma unroll
  for (int i = 0; i < Rows; i += kStep) {
    const int row = i + threadIdx.x / kLanes, bytes = begin <= row && row < end ? 16 : 0;
#pragma unroll
    for (int j = 0; j < kHeadDim; j += kLanes * 8)
      ptx::copy_async_16(&plane[row][column + j], matrix + row * pitch + column + j, bytes);
  }
}

// S = Q K^T, of the rows from `row` and the keys from `key` on.
template <int Bands, int Keys, int Rows, int Tile, int Pitch>
__device__ __forceinline__ void multiply_keys(float (&scores)[Bands][Keys][4],
                                              const __half (&q)[Rows][Pitch],
                                              const __half (&k)[Tile][Pitch], int row, int key) {
  static_assert(Keys % 2 == 0);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int dim = 0; dim < Pitch - kPad; dim += 16) {
    uint32_t a[Bands][4];
#pragma unroll
    for (int band = 0; band < Bands; ++band)
      ptx::load_matrix_x4(a[band], &q[row + band * 16 + lane % 16][dim + lane / 16 * 8]);
#pragma unroll
    for (int n = 0; n < Keys; n += 2) {
      uint32_t b[4];  // keys 8n..: dims 0-7, 8-15; keys 8n + 8..: dims 0-7, 8-15
      ptx::load_matrix_x4(b, &k[key + n * 8 + lane % 8 + lane / 16 * 8][dim + lane / 8 % 2 * 8]);
#pragma unroll
      for (int band = 0; band < Bands; ++band) {
        ptx::mma_16816(scores[band][n], a[band], b[0], b[1]);
        ptx::mma_16816(scores[band][n + 1], a[band], b[2], b[3]);
      }
    }
  }
}

// Minus infinity where `hidden(row, key)`, both counted from the first key; the first row is at the
// position `ahead` of that of the first key.
template <int Bands, int Keys, class Hidden>
__device__ __forceinline__ void mask_where(float (&scores)[Bands][Keys][4], int ahead,
                                           Hidden&& hidden) {
  const int row = ahead + threadIdx.x % 32 / 4, key = threadIdx.x % 4 * 2;
#pragma unroll
  for (int band = 0; band < Bands; ++band)
#pragma unroll
    for (int n = 0; n < Keys; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (hidden(row + band * 16 + i / 2 * 8, key + n * 8 + i % 2))
          scores[band][n][i] = -INFINITY;
}

// Where the key comes after the row.
template <int Bands, int Keys>
__device__ __forceinline__ void mask(float (&scores)[Bands][Keys][4], int ahead) {
  mask_where(scores, ahead, [](int row, int key) { return key > row; });
}

// Or `window` or more before it; as an unsigned number, what lies behind it is beyond any window.
template <int Bands, int Keys>
__device__ __forceinline__ void mask(float (&scores)[Bands][Keys][4], int ahead, int window) {
  mask_where(scores, ahead,
             [&](int row, int key) { return uint32_t(row - key) >= uint32_t(window); });
}

// Scores to tanh(scale x), where `log2_scale` is 2 scale / ln 2: tanh(y) = 1 - 2 / (1 + e^2y). Off
// by 2^-21 or so at most, everywhere: tanh.approx would be by 2^-11.
template <int Bands, int Keys>
__device__ __forceinline__ void squash(float (&scores)[Bands][Keys][4], float log2_scale) {
#pragma unroll
  for (int band = 0; band < Bands; ++band)
#pragma unroll
    for (int n = 0; n < Keys; ++n)
#pragma unroll
      for (float& x : scores[band][n])
        x = 1.0f - __fdividef(2.0f, 1.0f + ptx::exp2_approx(x * log2_scale));
}

// A running maximum (`top`) and sum per row, for rows lane / 4 and lane / 4 + 8 of each band. The
// sum is this lane's own share of the row.
template <int Bands>
struct Softmax {
  float top[Bands][2], sum[Bands][2];

  __device__ __forceinline__ Softmax() : sum{} {
    // Finite: minus infinity less itself would make a wholly masked row NaN.
    for (auto& band : top) band[0] = band[1] = -FLT_MAX;
  }

  // Scores to probabilities relative to the running maximum; O and the running sum follow it.
  template <int Keys, int Dims>
  __device__ __forceinline__ void step(float (&scores)[Bands][Keys][4], float (&o)[Bands][Dims][4],
                                       float log2_scale) {
#pragma unroll
    for (int band = 0; band < Bands; ++band)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = top[band][half];
#pragma unroll
        for (int n = 0; n < Keys; ++n)
          highest = fmaxf(highest, fmaxf(scores[band][n][2 * half], scores[band][n][2 * half + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
        const float shrink = ptx::exp2_approx((top[band][half] - highest) * log2_scale);
        top[band][half] = highest;
        float added = 0;
#pragma unroll
        for (int n = 0; n < Keys; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            // The difference first: exactly 1 at the maximum, however large the scores.
            scores[band][n][i] = ptx::exp2_approx((scores[band][n][i] - highest) * log2_scale);
            added += scores[band][n][i];
          }
        sum[band][half] = fmaf(sum[band][half], shrink, added);
#pragma unroll
        for (int n = 0; n < Dims; ++n) {
          o[band][n][2 * half] *= shrink;
          o[band][n][2 * half + 1] *= shrink;
        }
      }
  }

  // 1 / the row's sum.
  __device__ __forceinline__ float share(int band, int half) const {
    float total = sum[band][half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    return 1.0f / total;
  }
};

// Probabilities of 16 keys, score fragments n and n + 1, as the A operand of P V.
template <int Bands, int Keys>
__device__ __forceinline__ void pack(uint32_t (&a)[Bands][4], const float (&p)[Bands][Keys][4],
                                     int n) {
#pragma unroll
  for (int band = 0; band < Bands; ++band)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &p[band][n + i / 2][i % 2 * 2];
      a[band][i] = ptx::pack_halves(pair[0], pair[1]);
    }
}

// O += P V over the 16 keys from `key` on, of the dims from `dim` on.
template <int Bands, int Dims, int Tile, int Pitch>
__device__ __forceinline__ void multiply_values(float (&o)[Bands][Dims][4],
                                                const uint32_t (&p)[Bands][4],
                                                const __half (&v)[Tile][Pitch], int key, int dim) {
  static_assert(Dims % 2 == 0);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 0; d < Dims; d += 2) {
    uint32_t b[4];  // dims 8d..: keys 0-7, 8-15; dims 8d + 8..: keys 0-7, 8-15
    ptx::load_matrix_x4_transposed(b, &v[key + lane % 16][dim + d * 8 + lane / 16 * 8]);
#pragma unroll
    for (int band = 0; band < Bands; ++band) {
      ptx::mma_16816(o[band][d], p[band], b[0], b[1]);
      ptx::mma_16816(o[band][d + 1], p[band], b[2], b[3]);
    }
  }
}

// The same for all keys of a tile, P in registers.
template <int Bands, int Keys, int Dims, int Tile, int Pitch>
__device__ __forceinline__ void multiply_values(float (&o)[Bands][Dims][4],
                                                const float (&p)[Bands][Keys][4],
                                                const __half (&v)[Tile][Pitch]) {
#pragma unroll
  for (int n = 0; n < Keys; n += 2) {
    uint32_t a[Bands][4];
    pack(a, p, n);
    multiply_values(o, a, v, n * 8, 0);
  }
}

}  // namespace attention
