// Flash attention with everything between the two products in registers: for each row at position p
//
//   O = softmax(scale Q K^T over the keys 0..p) V
//
// over key tiles, with the running maximum m and sum l of the online softmax (Milakov and
// Gimelshein 2018; FlashAttention-2's loop order): m' = max(m, S), P = exp(S - m'), l and O times
// exp(m - m'), l += sum(P), O += P V; at the end O / l.
//
// Grid: (heads, sequences, row tiles of the longest sequence). Row tiles are counted from the end
// of a sequence, so the longest ones start first over all heads, and a partial tile is the one with
// the fewest keys. A warp owns TQ / warps full rows, in bands of 16 (one mma). In an accumulator
// fragment lane l holds, per 8 columns, columns 2 (l % 4) and + 1 of rows l / 4 and l / 4 + 8: a
// row's maximum is a butterfly over 4 lanes, and two neighbouring score fragments are the A operand
// of P V as they stand. K [key][dim] is its own col-major B operand (ldmatrix), V [key][dim] a
// row-major one (ldmatrix.trans).
//
// Planes: q (at the end o, a warp's own rows), k, v; rows padded by 16 bytes, so that the eight
// rows of an 8x8 matrix lie in different banks. One buffer each: V(j) loads under Q K(j)^T, K(j+1)
// under the softmax and P V(j).
//
// A row's result does not depend on its tile, its neighbours or where a continuation was cut: key
// tiles are counted from position 0, and a tile that is wholly masked for a row changes no bit of
// it.
//
// Bytes: Q and O once, K and V once per row tile (from L2 mostly). Keys past the last one that a
// tile needs are zeros in shared memory, whatever the cache holds there.
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

#define ATTENTION_PLANES(P, A)    \
  P(16, __half, q, [TQ][kPitch])  \
  A(q, __half, o, [TQ][kPitch])   \
  P(16, __half, k, [TKV][kPitch]) \
  P(16, __half, v, [TKV][kPitch])

template <int HeadDim, int TQ, int TKV, int Threads>
struct Attention {
  static constexpr int kPitch = HeadDim + 8;
  static constexpr int kChunks = HeadDim / 8;                 // 16-byte pieces of a row
  static constexpr int kWarpRows = TQ / (Threads / 32);       // rows of a warp
  static constexpr int kBands = kWarpRows / 16;               // row fragments of a warp
  static constexpr int kKeys = TKV / 8, kDims = HeadDim / 8;  // column fragments of S and of O
  static_assert(kBands * 16 * (Threads / 32) == TQ && TKV % 16 == 0 && HeadDim % 16 == 0);
  // As many blocks as the registers allow: the accumulators, and 48 for all else, spill nowhere.
  static constexpr int kAccumulators = kBands * (kKeys + kDims) * 4;
  static constexpr int kThreads = Threads;
  static constexpr int kMinBlocks = 65536 / ((kAccumulators + 48) * Threads);
  static constexpr spec::Tile tile() {
    return spec::Tile{}.with("hd", HeadDim).with("tq", TQ).with("tkv", TKV);
  }
  SPEC_PARAMS(ATTENTION_PARAMS)
  SPEC_SMEM(ATTENTION_PLANES)

  using Scores = float[kBands][kKeys][4];
  using Output = float[kBands][kDims][4];
  using PerRow = float[kBands][2];  // of rows lane / 4 and lane / 4 + 8 of each band

  static __device__ void run(const Params& p) {
    if (blockIdx.y >= p.live->sequences) return;
    const Sequence sequence = p.sequences[blockIdx.y];
    const int row0 = sequence.rows - (int(blockIdx.z) + 1) * TQ;  // negative in a partial tile
    if (row0 <= -TQ) return;
    const int keys = sequence.start + row0 + TQ;  // that the last row sees, itself included
    const int head = blockIdx.x, kv_head = head / (p.heads / p.kv_heads);
    const int64_t cached =
        (int64_t(p.layer) * p.kv_heads + kv_head) * sequence.capacity * int64_t(HeadDim);
    const __half *k = sequence.k + cached, *v = sequence.v + cached;
    const int64_t pitch = int64_t(p.heads) * HeadDim;
    const int64_t rows_at = (int64_t(sequence.row0) + row0) * pitch + int64_t(head) * HeadDim;
    // From lane 0, so that the compiler knows that branches on it do not split the warp.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int first = warp * kWarpRows;              // the warp's rows in the tile
    const float log2_scale = p.scale * 1.44269504f;  // exp(scale x) = 2^(log2_scale x)

    Smem& s = spec::shared<Smem>();
    Output o = {};
    PerRow top, sum = {};
    // Finite: minus infinity less itself would make a wholly masked row NaN.
    for (auto& band : top) band[0] = band[1] = -FLT_MAX;

    load_rows(s.q, p.q + rows_at, pitch, -row0, TQ);
    load_rows(s.k, k, HeadDim, 0, keys);
    ptx::copy_async_commit();
    for (int left = keys; left > 0; left -= TKV) {
      const int ahead = left - TQ + first;      // of the tile's first key, the warp's first row
      const bool seen = ahead + kWarpRows > 0;  // by any row of the warp
      ptx::copy_async_wait<0>();
      __syncthreads();  // K is here, and nobody reads the last V any more
      load_rows(s.v, v, HeadDim, 0, left);
      v += TKV * HeadDim;
      ptx::copy_async_commit();
      Scores scores = {};
      if (seen) multiply_keys(scores, s.q, s.k, first);
      ptx::copy_async_wait<0>();
      __syncthreads();  // V is here, and nobody reads K any more
      k += TKV * HeadDim;
      if (left > TKV) load_rows(s.k, k, HeadDim, 0, left - TKV);
      ptx::copy_async_commit();
      if (!seen) continue;
      if (ahead < TKV - 1) mask(scores, ahead);
      softmax(scores, o, top, sum, log2_scale);
      multiply_values(o, scores, s.v);
    }
    store(o, sum, s.o(), p.o + rows_at, pitch, first, -row0);
  }

  // Rows [begin, end) of a matrix in global memory to a plane; its other rows become zeros.
  template <int Rows>
  static __device__ void load_rows(__half (&plane)[Rows][kPitch], const __half* matrix,
                                   int64_t pitch, int begin, int end) {
    constexpr int kLanes = kChunks % 8 ? 4 : 8;  // threads of a row
    constexpr int kStep = kThreads / kLanes;     // rows at a time
    static_assert(kChunks % kLanes == 0 && Rows % kStep == 0);
    const int column = threadIdx.x % kLanes * 8;
#pragma unroll
    for (int i = 0; i < Rows; i += kStep) {
      const int row = i + threadIdx.x / kLanes, bytes = begin <= row && row < end ? 16 : 0;
#pragma unroll
      for (int j = 0; j < HeadDim; j += kLanes * 8)
        ptx::copy_async_16(&plane[row][column + j], matrix + row * pitch + column + j, bytes);
    }
  }

  // S = Q K^T for the warp's rows.
  static __device__ void multiply_keys(Scores& scores, const __half (&q)[TQ][kPitch],
                                       const __half (&k)[TKV][kPitch], int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int dim = 0; dim < HeadDim; dim += 16) {
      uint32_t a[kBands][4];
#pragma unroll
      for (int band = 0; band < kBands; ++band)
        ptx::load_matrix_x4(a[band], &q[first + band * 16 + lane % 16][dim + lane / 16 * 8]);
#pragma unroll
      for (int n = 0; n < kKeys; n += 2) {
        uint32_t b[4];  // keys 8n..: dims 0-7, 8-15; keys 8n + 8..: dims 0-7, 8-15
        ptx::load_matrix_x4(b, &k[n * 8 + lane % 8 + lane / 16 * 8][dim + lane / 8 % 2 * 8]);
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
          ptx::mma_16816(scores[band][n], a[band], b[0], b[1]);
          ptx::mma_16816(scores[band][n + 1], a[band], b[2], b[3]);
        }
      }
    }
  }

  // Minus infinity where the key comes after the row; the warp's first row is at the position
  // `ahead` of that of the tile's first key.
  static __device__ void mask(Scores& scores, int ahead) {
    const int row = ahead + threadIdx.x % 32 / 4, key = threadIdx.x % 4 * 2;
#pragma unroll
    for (int band = 0; band < kBands; ++band)
#pragma unroll
      for (int n = 0; n < kKeys; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (key + n * 8 + i % 2 > row + band * 16 + i / 2 * 8) scores[band][n][i] = -INFINITY;
  }

  // Scores to probabilities relative to the running maximum; O and the running sum follow it. The
  // sum stays this lane's own share until the end.
  static __device__ void softmax(Scores& scores, Output& o, PerRow& top, PerRow& sum,
                                 float log2_scale) {
#pragma unroll
    for (int band = 0; band < kBands; ++band)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = top[band][half];
#pragma unroll
        for (int n = 0; n < kKeys; ++n)
          highest = fmaxf(highest, fmaxf(scores[band][n][2 * half], scores[band][n][2 * half + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
        const float shrink = ptx::exp2_approx((top[band][half] - highest) * log2_scale);
        top[band][half] = highest;
        float added = 0;
#pragma unroll
        for (int n = 0; n < kKeys; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            // The difference first: exactly 1 at the maximum, however large the scores.
            scores[band][n][i] = ptx::exp2_approx((scores[band][n][i] - highest) * log2_scale);
            added += scores[band][n][i];
          }
        sum[band][half] = fmaf(sum[band][half], shrink, added);
#pragma unroll
        for (int n = 0; n < kDims; ++n) {
          o[band][n][2 * half] *= shrink;
          o[band][n][2 * half + 1] *= shrink;
        }
      }
  }

  // O += P V for the warp's rows.
  static __device__ void multiply_values(Output& o, const Scores& p,
                                         const __half (&v)[TKV][kPitch]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kKeys; n += 2) {
      uint32_t a[kBands][4];
#pragma unroll
      for (int band = 0; band < kBands; ++band)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = &p[band][n + i / 2][i % 2 * 2];
          a[band][i] = ptx::pack_halves(pair[0], pair[1]);
        }
#pragma unroll
      for (int d = 0; d < kDims; d += 2) {
        uint32_t b[4];  // dims 8d..: keys 0-7, 8-15; dims 8d + 8..: keys 0-7, 8-15
        ptx::load_matrix_x4_transposed(b, &v[n * 8 + lane % 16][d * 8 + lane / 16 * 8]);
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
          ptx::mma_16816(o[band][d], a[band], b[0], b[1]);
          ptx::mma_16816(o[band][d + 1], a[band], b[2], b[3]);
        }
      }
    }
  }

  // O / l as fp16 through the warp's rows of the plane to global rows from `begin` on, 16 bytes a
  // lane.
  static __device__ void store(const Output& o, const PerRow& sum, __half (&plane)[TQ][kPitch],
                               __half* matrix, int64_t pitch, int first, int begin) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int band = 0; band < kBands; ++band)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[band][half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const float share = 1.0f / total;
        __half* row = plane[first + band * 16 + half * 8 + lane / 4];
#pragma unroll
        for (int n = 0; n < kDims; ++n) {
          const float* pair = &o[band][n][2 * half];
          *reinterpret_cast<uint32_t*>(&row[n * 8 + lane % 4 * 2]) =
              ptx::pack_halves(pair[0] * share, pair[1] * share);
        }
      }
    __syncwarp();
    for (int chunk = lane; chunk < kWarpRows * kChunks; chunk += 32) {
      const int row = first + chunk / kChunks, column = chunk % kChunks * 8;
      if (row >= begin)
        *reinterpret_cast<uint4*>(matrix + row * pitch + column) =
            *reinterpret_cast<const uint4*>(&plane[row][column]);
    }
  }
};
