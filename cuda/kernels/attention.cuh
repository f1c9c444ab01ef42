// Flash attention with everything between the two products in registers: for each row at position p
//
//   O = softmax(scale Q K^T over the keys 0..p) V
//
// over key tiles (FlashAttention-2's loop order), with the running maximum m and sum l of the
// online softmax: m' = max(m, S), P = exp(S - m'), l and O times exp(m - m'), l += sum(P),
// O += P V; at the end O / l. A row sees the last `window` of its keys, its own included
// (a huge number: all of them). With Cap the scores are softcap tanh(scale / softcap Q K^T) (Gemma
// 2).
//
// Grid: (heads, sequences, row tiles of the longest sequence). Row tiles are counted from the end
// of a sequence, so the longest ones start first over all heads, and a partial tile is the one with
// the fewest keys. A warp owns TQ / warps full rows, in bands of 16.
//
// Planes: q (at the end o, a warp's own rows), k, v. One buffer each: V(j) loads under Q K(j)^T,
// K(j+1) under the softmax and P V(j).
//
// A row's result does not depend on its tile, its neighbours or where a continuation was cut: key
// tiles are counted from position 0, and a tile that is wholly masked for a row changes no bit of
// it. The first tile loaded is that of the first key that a row of the block sees.
//
// Bytes: Q and O once, K and V once per row tile (from L2 mostly). Values of keys that no row of
// the block sees are zeros in shared memory, whatever the cache holds there.
#pragma once

#include "attention_steps.cuh"

#define ATTENTION_PLANES(P, A)    \
  P(16, __half, q, [TQ][kPitch])  \
  A(q, __half, o, [TQ][kPitch])   \
  P(16, __half, k, [TKV][kPitch]) \
  P(16, __half, v, [TKV][kPitch])

namespace attention {

template <int HeadDim, int TQ, int TKV, int Threads, bool Cap = false>
struct Fast {
  static constexpr int kPitch = HeadDim + kPad;
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
    return spec::Tile{}
        .with("variant", "fast")
        .with("hd", HeadDim)
        .with("tq", TQ)
        .with("tkv", TKV)
        .with("cap", int(Cap));
  }
  SPEC_PARAMS(ATTENTION_WINDOW_PARAMS)
  SPEC_SMEM(ATTENTION_PLANES)

  using Scores = float[kBands][kKeys][4];
  using Output = float[kBands][kDims][4];

  static __device__ void run(const Params& p) {
    if (blockIdx.y >= p.live->sequences) return;
    const Sequence sequence = p.sequences[blockIdx.y];
    const int row0 = sequence.rows - (int(blockIdx.z) + 1) * TQ;  // negative in a partial tile
    if (row0 <= -TQ) return;
    const int keys = sequence.start + row0 + TQ;  // up to the last row's own
    const int begin = max(sequence.start + max(row0, 0) - p.window + 1, 0);  // the first one seen
    const int skipped = begin / TKV * TKV;
    const Operands<HeadDim> at(p, sequence, blockIdx.x, row0);
    const __half* k = at.k + skipped * int64_t(HeadDim);
    const __half* v = at.v + skipped * int64_t(HeadDim);
    const int first = warp_index() * kWarpRows;  // the warp's rows in the tile
    // exp(scale x) = 2^(log2_scale x), and with Cap of x as it is squashed.
    const float log2_scale = (Cap ? p.softcap : p.scale) * kLog2E;
    const float to_tanh = Cap ? 2 * kLog2E * p.scale / p.softcap : 0;

    Smem& s = spec::shared<Smem>();
    Output o = {};
    Softmax<kBands> softmax;

    load_rows<kThreads>(s.q, at.q, at.pitch, -row0, TQ);
    load_rows<kThreads>(s.k, k, HeadDim, 0, keys - skipped);
    ptx::copy_async_commit();
    for (int left = keys - skipped; left > 0; left -= TKV) {
      const int ahead = left - TQ + first;  // of the tile's first key, the warp's first row
      // By any row of the warp; and by all of them, every key.
      const bool seen = ahead + kWarpRows > 0 && ahead - TKV + 1 < p.window;
      const bool whole = ahead >= TKV - 1 && ahead + kWarpRows <= p.window;
      ptx::copy_async_wait<0>();
      __syncthreads();  // K is here, and nobody reads the last V any more
      load_rows<kThreads>(s.v, v, HeadDim, begin - keys + left, left);
      v += TKV * HeadDim;
      ptx::copy_async_commit();
      Scores scores = {};
      if (seen) multiply_keys(scores, s.q, s.k, first, 0);
      ptx::copy_async_wait<0>();
      __syncthreads();  // V is here, and nobody reads K any more
      k += TKV * HeadDim;
      if (left > TKV) load_rows<kThreads>(s.k, k, HeadDim, 0, left - TKV);
      ptx::copy_async_commit();
      if (!seen) continue;
      if constexpr (Cap) squash(scores, to_tanh);
      if (!whole) mask(scores, ahead, p.window);
      softmax.step(scores, o, log2_scale);
      multiply_values(o, scores, s.v);
    }
    store(o, softmax, s.o(), at.o, at.pitch, first, -row0);
  }

  // O / l as fp16 through the warp's rows of the plane to global rows from `begin` on, 16 bytes a
  // lane.
  static __device__ void store(const Output& o, const Softmax<kBands>& softmax,
                               __half (&plane)[TQ][kPitch], __half* matrix, int64_t pitch,
                               int first, int begin) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int band = 0; band < kBands; ++band)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float share = softmax.share(band, half);
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

}  // namespace attention
