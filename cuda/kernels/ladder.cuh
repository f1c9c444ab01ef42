// The ladder: the steps by which one attention kernel of 2026 became what it is, kept runnable.
// Formula, contract and exactness are those of attention.cuh; what was improved stays undone here:
//
//   r46_base  S goes to shared memory, a warp takes a row at a time through the softmax, P goes
//             back over S; rows of S and P are not padded
//   r46       half the keys per tile, rows of S and P padded by 8 floats
//   r48       a warp owns 16 full rows, S and P stay in registers
//   r50       half the keys per tile again
//   r57       48 rows (of four warps the last only copies), K and V in two buffers each
//
// All of them mask element by element in every tile, compute tiles that are wholly masked for a
// warp, and walk a head's row tiles from the lightest to the heaviest before the next head's. Only
// r57 computes while it copies. At the end O passes as f32 over the planes, which is what counts in
// r50: 64 rows of 128 dims are 32,768 B, its planes 26,112 B.
//
// Grid: (heads, sequences, row tiles of the longest sequence), numbered anew with the tile as the
// fastest index. Rows past the end of a sequence are zeros and are not stored.
//
// Where this departs from the originals: r46 and its base had wmma's 16x16x16 fragments, here all
// use the mma of attention.cuh; only a partial tile's O went through shared memory; head dim 64 is
// new.
//
// With 32 keys per tile the register forms, r48 and r57, give the bits of attention.cuh. The others
// group the online softmax's sums by another tile (r46_base, r50) or over other lanes (r46).
#pragma once

#include "../core/reduce.cuh"
#include "attention_steps.cuh"

namespace attention {

enum class Variant { r46_base, r46, r48, r50, r57 };

constexpr const char* name_of(Variant variant) {
  constexpr const char* names[] = {"r46_base", "r46", "r48", "r50", "r57"};
  return names[int(variant)];
}

// A block's head and rows of a sequence, `rows` of them live; none where that is not positive.
struct RowTile {
  int head, row0, rows, position0, keys;

  __device__ RowTile(const Sequence& sequence, int tq) {
    const unsigned block = blockIdx.z * gridDim.x + blockIdx.x;
    head = block / gridDim.z;
    row0 = block % gridDim.z * tq;
    rows = min(tq, sequence.rows - row0);
    position0 = sequence.start + row0;
    keys = position0 + rows;
  }
};

// A band of accumulator fragments, its rows times `factor`, to a plane from [row][column] on.
template <int Fragments, int Rows, int Pitch>
__device__ __forceinline__ void store_band(float (&plane)[Rows][Pitch],
                                           const float (&x)[1][Fragments][4],
                                           const float (&factor)[2], int row, int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < Fragments; ++n)
      *reinterpret_cast<float2*>(&plane[row + half * 8 + lane / 4][column + n * 8 + lane % 4 * 2]) =
          make_float2(x[0][n][2 * half] * factor[half], x[0][n][2 * half + 1] * factor[half]);
}

// The first `rows` rows of O to global memory as fp16, 16 bytes a thread.
template <int Threads, int Rows, int HeadDim>
__device__ __forceinline__ void store_rows(__half* matrix, int64_t pitch,
                                           const float (&plane)[Rows][HeadDim], int rows) {
  constexpr int kChunks = HeadDim / 8;
  for (int chunk = threadIdx.x; chunk < rows * kChunks; chunk += Threads) {
    const int row = chunk / kChunks, column = chunk % kChunks * 8;
    const float4* from = reinterpret_cast<const float4*>(&plane[row][column]);
    const float4 a = from[0], b = from[1];
    *reinterpret_cast<uint4*>(matrix + row * pitch + column) =
        make_uint4(ptx::pack_halves(a.x, a.y), ptx::pack_halves(a.z, a.w),
                   ptx::pack_halves(b.x, b.y), ptx::pack_halves(b.z, b.w));
  }
}

// r46_base and r46: S and P in shared memory. A pair of warps has 16 rows; each computes half of
// their keys of S and half of their dims of O.
#define SHARED_SCORES_PLANES(P, A)                             \
  P(16, __half, q, [TQ][kPitch])                               \
  A(q, float, o, [TQ][HeadDim])                                \
  P(16, __half, k, [TKV][kPitch])                              \
  P(16, __half, v, [TKV][kPitch])                              \
  P(16, float, s, [TQ][TKV + Pad])                             \
  A(s, __half, p, [TQ][2 * (TKV + Pad)]) /* row r over S's */  \
  P(16, float, m, [TQ])                  /* running maximum */ \
  P(16, float, l, [TQ])                  /* running sum */     \
  P(16, float, alpha, [TQ])              /* exp(m - m') of the tile */

template <Variant V, int HeadDim, int TQ, int TKV, int Threads, int Pad>
struct SharedScores {
  static constexpr int kPitch = HeadDim + kPad, kWarps = Threads / 32;
  static constexpr int kKeys = TKV / 16, kDims = HeadDim / 16;  // fragments of a warp's half
  static constexpr int kOwn = TKV / 32;                         // keys of a lane in the softmax
  static_assert(kWarps * 8 == TQ && TQ <= Threads && TKV % 32 == 0 && HeadDim % 32 == 0);
  static constexpr int kThreads = Threads;
  static constexpr int kMinBlocks = 3;  // of 80 registers
  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("variant", name_of(V))
        .with("hd", HeadDim)
        .with("tq", TQ)
        .with("tkv", TKV);
  }
  SPEC_PARAMS(ATTENTION_PARAMS)
  SPEC_SMEM(SHARED_SCORES_PLANES)

  static __device__ void run(const Params& p) {
    if (blockIdx.y >= p.live->sequences) return;
    const Sequence sequence = p.sequences[blockIdx.y];
    const RowTile t(sequence, TQ);
    if (t.rows <= 0) return;
    const Operands<HeadDim> at(p, sequence, t.head, t.row0);
    const int lane = threadIdx.x % 32, warp = warp_index(), half = warp % 2;
    const int first = warp / 2 * 16, row = first + lane / 4;  // and row + 8
    const float log2_scale = p.scale * kLog2E;

    Smem& s = spec::shared<Smem>();
    float o[1][kDims][4] = {};
    if (threadIdx.x < TQ) {
      s.m[threadIdx.x] = -FLT_MAX;
      s.l[threadIdx.x] = 0;
    }
    load_rows<kThreads>(s.q, at.q, at.pitch, 0, t.rows);
    for (int key0 = 0; key0 < t.keys; key0 += TKV) {
      load_rows<kThreads>(s.k, at.k + key0 * int64_t(HeadDim), HeadDim, 0, t.keys - key0);
      load_rows<kThreads>(s.v, at.v + key0 * int64_t(HeadDim), HeadDim, 0, t.keys - key0);
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
      __syncthreads();
      float scores[1][kKeys][4] = {};
      multiply_keys(scores, s.q, s.k, first, half * (TKV / 2));
      store_band(s.s, scores, {1, 1}, first, half * (TKV / 2));
      __syncthreads();
      for (int r = warp; r < TQ; r += kWarps) softmax(s, r, t.position0 - key0, log2_scale);
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kDims; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[0][n][i] *= s.alpha[row + i / 2 * 8];
#pragma unroll
      for (int key = 0; key < TKV; key += 16) {
        uint32_t a[1][4];
        ptx::load_matrix_x4(a[0], &s.p()[first + lane % 16][key + lane / 16 * 8]);
        multiply_values(o, a, s.v, key, half * (HeadDim / 2));
      }
      __syncthreads();  // nobody reads the tile any more
    }
    store_band(s.o(), o, {1 / s.l[row], 1 / s.l[row + 8]}, first, half * (HeadDim / 2));
    __syncthreads();
    store_rows<kThreads>(at.o, at.pitch, s.o(), t.rows);
  }
  // O lies below what is still read while it is written.
  static_assert(TQ * HeadDim * sizeof(float) <= offsetof(Smem, s));

  // One row of S to P by the whole warp; `ahead` is the position of row 0 less that of key 0.
  static __device__ void softmax(Smem& s, int row, int ahead, float log2_scale) {
    const int lane = threadIdx.x % 32;
    const float before = s.m[row];
    float x[kOwn], highest = before, added = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int key = lane * kOwn + i;
      x[i] = key > ahead + row ? -INFINITY : s.s[row][key];
      highest = fmaxf(highest, x[i]);
    }
    highest = warp_max(highest);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      x[i] = ptx::exp2_approx((x[i] - highest) * log2_scale);
      added += x[i];
    }
    added = warp_sum(added);
    __syncwarp();  // every lane has read the row of S: P takes its place
#pragma unroll
    for (int i = 0; i < kOwn; ++i) s.p()[row][lane * kOwn + i] = __float2half_rn(x[i]);
    if (lane == 0) {
      const float alpha = ptx::exp2_approx((before - highest) * log2_scale);
      s.m[row] = highest;
      s.l[row] = fmaf(s.l[row], alpha, added);
      s.alpha[row] = alpha;
    }
  }
};

// r48, r50 and r57: a warp owns 16 rows, with S, P and O in registers.
#define REGISTER_SCORES_PLANES(P, A)       \
  P(16, __half, q, [TQ][kPitch])           \
  A(q, float, o, [TQ][HeadDim])            \
  P(16, __half, k, [Buffers][TKV][kPitch]) \
  P(16, __half, v, [Buffers][TKV][kPitch])

template <Variant V, int HeadDim, int TQ, int TKV, int Threads, int Buffers>
struct RegisterScores {
  static constexpr int kPitch = HeadDim + kPad;
  static constexpr int kKeys = TKV / 8, kDims = HeadDim / 8;
  static_assert(TQ % 16 == 0 && TQ <= Threads / 2 && TKV % 16 == 0 && HeadDim % 16 == 0);
  static_assert(Buffers == 1 || Buffers == 2);
  static constexpr int kThreads = Threads;
  static constexpr int kMinBlocks = 4;  // of 128 registers
  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("variant", name_of(V))
        .with("hd", HeadDim)
        .with("tq", TQ)
        .with("tkv", TKV);
  }
  SPEC_PARAMS(ATTENTION_PARAMS)
  SPEC_SMEM(REGISTER_SCORES_PLANES)

  static __device__ void run(const Params& p) {
    if (blockIdx.y >= p.live->sequences) return;
    const Sequence sequence = p.sequences[blockIdx.y];
    const RowTile t(sequence, TQ);
    if (t.rows <= 0) return;
    const Operands<HeadDim> at(p, sequence, t.head, t.row0);
    const int first = warp_index() * 16;                    // the warp's rows in the tile
    const bool computes = TQ == Threads / 2 || first < TQ;  // a warp without rows only copies
    const float log2_scale = p.scale * kLog2E;

    Smem& s = spec::shared<Smem>();
    float o[1][kDims][4] = {};
    Softmax<1> softmax;
    const auto stage = [&](int key0) {
      if (key0 >= t.keys) return;
      const int buffer = key0 / TKV % Buffers;
      load_rows<kThreads>(s.k[buffer], at.k + key0 * int64_t(HeadDim), HeadDim, 0, t.keys - key0);
      load_rows<kThreads>(s.v[buffer], at.v + key0 * int64_t(HeadDim), HeadDim, 0, t.keys - key0);
      ptx::copy_async_commit();
    };

    load_rows<kThreads>(s.q, at.q, at.pitch, 0, t.rows);
    stage(0);
    for (int key0 = 0; key0 < t.keys; key0 += TKV) {
      const int buffer = key0 / TKV % Buffers;
      ptx::copy_async_wait<0>();
      __syncthreads();  // the tile is here, and nobody reads the one before any more
      if (Buffers == 2) stage(key0 + TKV);
      if (computes) {
        float scores[1][kKeys][4] = {};
        multiply_keys(scores, s.q, s.k[buffer], first, 0);
        mask(scores, t.position0 + first - key0);
        softmax.step(scores, o, log2_scale);
        multiply_values(o, scores, s.v[buffer]);
      }
      if (Buffers == 1) {
        __syncthreads();  // nobody reads the tile any more
        stage(key0 + TKV);
      }
    }
    if (Buffers == 2) __syncthreads();  // likewise
    if (computes) store_band(s.o(), o, {softmax.share(0, 0), softmax.share(0, 1)}, first, 0);
    __syncthreads();
    store_rows<kThreads>(at.o, at.pitch, s.o(), t.rows);
  }
};

}  // namespace attention
