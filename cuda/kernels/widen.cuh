// One layer of an e4m3 cache as fp16, so that attention reads it as it reads any cache:
//
//   to[kv head][p][d] = fp16(from[layer][kv head][p][d] * scale[layer][kv head][p])
//
// for K and V of every sequence and its positions p < start + rows; what lies beyond is neither
// read nor written. Grid: (x, 2 kv_heads, sequences), K's heads before V's; the blocks of one head
// share its positions in turns, so that x is free and the live lengths decide who works. A thread
// widens kLoads pieces of 16 codes a turn. Bytes: 1 read and 2 written per element, 4 read per row.
#pragma once

#include "../core/e4m3.cuh"
#include "../core/live.cuh"
#include "../core/spec.cuh"

#define WIDEN_PARAMS(P)                                           \
  P(const Live*, live)                                            \
  P(const e4m3::Sequence*, stored) /* [sequences] */              \
  P(const Sequence*, sequences)    /* [sequences] of one layer */ \
  P(int32_t, layer)                /* of the stored cache */      \
  P(int32_t, kv_heads)                                            \
  P(int32_t, head_dim) /* a multiple of 16 */

template <int Threads, int Loads>
struct Widen {
  static constexpr int kThreads = Threads, kMinBlocks = 1, kLoads = Loads, kPiece = 16;
  static constexpr spec::Tile tile() {
    return spec::Tile{}.with("elements", kThreads * kLoads * kPiece).with("piece", kPiece);
  }
  SPEC_PARAMS(WIDEN_PARAMS)
  SPEC_NO_SMEM

  static __device__ void run(const Params& p) {
    if (int(blockIdx.z) >= p.live->sequences) return;
    const e4m3::Sequence from = p.stored[blockIdx.z];
    const Sequence to = p.sequences[blockIdx.z];
    const bool is_v = int(blockIdx.y) >= p.kv_heads;
    const int head = blockIdx.y - (is_v ? p.kv_heads : 0);
    const int64_t row0 = (int64_t(p.layer) * p.kv_heads + head) * from.capacity;

    const int pieces = p.head_dim / kPiece, rows = kThreads / pieces;  // of a row; of a load
    const int row = threadIdx.x / pieces, column = threadIdx.x % pieces * kPiece;
    if (row >= rows) return;
    const uint8_t* codes = (is_v ? from.v : from.k) + row0 * p.head_dim + column;
    const float* scales = (is_v ? from.v_scale : from.k_scale) + row0;
    __half* out = (is_v ? to.v : to.k) + int64_t(head) * to.capacity * p.head_dim + column;

    const int64_t end = int64_t(from.start) + from.rows, turn = kLoads * rows;
    for (int64_t first = blockIdx.x * turn + row; first < end; first += gridDim.x * turn) {
      uint4 in[kLoads];
      float scale[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int64_t position = first + i * rows;
        if (position >= end) break;
        in[i] = *reinterpret_cast<const uint4*>(codes + position * p.head_dim);
        scale[i] = scales[position];
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int64_t position = first + i * rows;
        if (position >= end) break;
        const uint2 a = e4m3::widen(in[i].x, scale[i]), b = e4m3::widen(in[i].y, scale[i]);
        const uint2 c = e4m3::widen(in[i].z, scale[i]), d = e4m3::widen(in[i].w, scale[i]);
        uint4* to_piece = reinterpret_cast<uint4*>(out + position * p.head_dim);
        to_piece[0] = make_uint4(a.x, a.y, b.x, b.y);
        to_piece[1] = make_uint4(c.x, c.y, d.x, d.y);
      }
    }
  }
};
