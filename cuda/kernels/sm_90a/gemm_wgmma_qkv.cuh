// The epilogue qkv: from the sums of the q,k,v product to attention's inputs, as rope.cuh does it
// from float32, bit for bit: add the bias, rotate q and k by position, store q for attention and k
// and v in an fp16 cache.
//
// Columns are paired (rotary.cuh): of a group of 32 columns a lane has, in each of its two rows,
// four pairs one after the other. It reads their cosines and sines 16 bytes at a time, for all
// heads that are turned alike once, and writes 8 bytes (NeoX) or 16 (interleaved), as the cache and
// attention want them; four lanes write whole sectors of 32 bytes.
//
// Places of rows and what the first group needs are read while the tile is summed, what a further
// group needs while the one before it is turned and stored.
#pragma once

#include "../../core/spec.cuh"
#include "../gemm_base.cuh"
#include "../rotary.cuh"
#include "gemm_wgmma_store.cuh"

#define GEMM_WGMMA_QKV_PARAMS(P)                                                           \
  P(spec::TensorMap, a)   /* [at least rows][k], boxes of BM x BK, 128-byte swizzle */     \
  P(spec::TensorMap, w)   /* [n][k], boxes of BN / Share x BK, the same */                 \
  P(const int32_t*, rows) /* device count of live rows */                                  \
  P(const Sequence*, sequences)                                                            \
  P(const int32_t*, sequence_of) /* [rows] index into sequences */                         \
  P(const int32_t*, positions)   /* [rows] */                                              \
  P(const float*, bias)          /* [n] by heads and elements, or null (then any pairs) */ \
  P(const float*, cosines)       /* [positions][head_dim / 2] */                           \
  P(const float*, sines)         /* [positions][head_dim / 2] */                           \
  P(__half*, q)                  /* [rows][heads][head_dim] */                             \
  P(int32_t*, overflow)          /* lowest site out of fp16 range */                       \
  P(int32_t, n)                  /* (heads + 2 kv_heads) head_dim */                       \
  P(int32_t, k)                                                                            \
  P(int32_t, layer)                                                                        \
  P(int32_t, heads)                                                                        \
  P(int32_t, kv_heads)                                                                     \
  P(int32_t, head_dim)                                                                     \
  P(int32_t, interleaved)                                                                  \
  P(int32_t, alike)                                                                        \
  P(int32_t, site)    /* of q; k and v follow */                                           \
  P(float*, sums)     /* of shared units: [blocks][BM * BN] */                             \
  P(int32_t*, raised) /* [blocks][8], zero between launches */                             \
  P(int32_t, parts)   /* see gemm_division.cuh; 1: nothing is shared */

template <int BN>
struct GemmWgmmaStore<Epilogue::qkv, BN> {
  static constexpr int kFragments = BN / 8, kGroups = BN / rotary::kGroup;
  static_assert(BN % rotary::kGroup == 0);
  using Accumulators = float[BN / 2];
  SPEC_PARAMS(GEMM_WGMMA_QKV_PARAMS)

  enum Part { kQ, kK, kV };
  static __device__ __forceinline__ Part part_of(const Params& p, int head) {
    return head < p.heads ? kQ : head < p.heads + p.kv_heads ? kK : kV;
  }
  static __device__ __forceinline__ int lane_pair(const rotary::Group& group) {
    return group.pair + threadIdx.x % 4 * 4;
  }
  static __device__ __forceinline__ float4 four(const float* from) {
    return *reinterpret_cast<const float4*>(from);
  }

  // A row of the product: its position, where its head 0 of q, K and V goes, and the elements from
  // one head to the next.
  struct Row {
    bool live;
    int position, sequence, apart;
    __half *q, *k, *v;
  };

  // What four pairs are turned by in both rows, once for all heads that are turned alike.
  struct Angles {
    float4 cosine[2], sine[2];

    __device__ __forceinline__ void read(const Params& p, const rotary::Group& group,
                                         const Row (&rows)[2]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (part_of(p, group.head()) == kV) {
          cosine[i] = {1, 1, 1, 1};
          sine[i] = {};
          continue;
        }
        const int64_t angle = int64_t(rows[i].position) * (p.head_dim / 2) + lane_pair(group);
        cosine[i] = four(p.cosines + angle);
        sine[i] = four(p.sines + angle);
      }
    }
  };

  // The bias of four pairs.
  struct Bias {
    float4 a, b;
    __device__ __forceinline__ void read(const Params& p, const rotary::Group& group) {
      a = b = {};
      if (!p.bias) return;
      const float* const bias = p.bias + group.head() * p.head_dim + lane_pair(group);
      a = four(bias);
      b = four(bias + p.head_dim / 2);
    }
  };

  // What is read before a tile is summed; `follow`: once its first product has been started.
  struct Ahead {
    Row rows[2];
    Angles angles;
    Bias bias;

    __device__ __forceinline__ Ahead(const Params& p, int m, TilePlace place) : rows{} {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = place.row + threadIdx.x % 32 / 4 + i * 8;
        rows[i].live = row < m;
        if (!rows[i].live) continue;
        rows[i].position = p.positions[row];
        rows[i].sequence = p.sequence_of[row];
      }
    }
    __device__ __forceinline__ void follow(const Params& p, TilePlace place) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!rows[i].live) continue;
        const Sequence& to = p.sequences[rows[i].sequence];
        const int64_t slot = int64_t(p.layer) * p.kv_heads * to.capacity + rows[i].position;
        const int64_t row = place.row + threadIdx.x % 32 / 4 + i * 8;
        rows[i].apart = to.capacity * p.head_dim;
        rows[i].q = p.q + row * p.heads * p.head_dim;
        rows[i].k = to.k + slot * p.head_dim;
        rows[i].v = to.v + slot * p.head_dim;
      }
      const rotary::Group group(place.column, p.head_dim, p.alike);
      angles.read(p, group, rows);
      bias.read(p, group);
    }
  };

  // Sums in a group: those of a lane's rows r and r + 8, each with the pairs' first and second
  // elements.
  using Pairs = float[2][2][4];

  static __device__ __forceinline__ void finish(const Params& p, const Accumulators& d, int,
                                                TilePlace place, Ahead& ahead) {
    rotary::Group group(place.column, p.head_dim, p.alike);
    Bias bias[2] = {ahead.bias};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (place.column + g * rotary::kGroup >= p.n) return;
      const rotary::Group here = group;
      group.advance(p.head_dim, p.alike);
      const bool more = g + 1 < kGroups && place.column + (g + 1) * rotary::kGroup < p.n;
      if (more) bias[(g + 1) % 2].read(p, group);
      Pairs x;
      turn(&d[g * 16], bias[g % 2], ahead.angles, x);
      if (more && group.which == 0) ahead.angles.read(p, group, ahead.rows);
      store(p, x, ahead.rows, here);
    }
  }

  static __device__ __forceinline__ void turn(const float* d, const Bias& bias,
                                              const Angles& angles, Pairs& x) {
    const float a[4] = {bias.a.x, bias.a.y, bias.a.z, bias.a.w};
    const float b[4] = {bias.b.x, bias.b.y, bias.b.z, bias.b.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 c = angles.cosine[i], s = angles.sine[i];
      const float cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
      for (int f = 0; f < 4; ++f) {
        x[i][0][f] = d[f * 4 + i * 2] + a[f];
        x[i][1][f] = d[f * 4 + i * 2 + 1] + b[f];
        rotary::turn(x[i][0][f], x[i][1][f], cosine[f], sine[f]);
      }
    }
  }

  static __device__ __forceinline__ void store(const Params& p, const Pairs& x,
                                               const Row (&rows)[2], const rotary::Group& group) {
    const Part part = part_of(p, group.head());
    const int head = group.head() - (part == kQ ? 0 : part == kK ? p.heads : p.heads + p.kv_heads);
    const int pair = lane_pair(group);
    bool fit = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto& [a, b] = x[i];
      bool mine = true;
#pragma unroll
      for (int f = 0; f < 4; ++f) mine &= fits_half(a[f]) & fits_half(b[f]);
      fit &= mine | !rows[i].live;
      const int apart = part == kQ ? p.head_dim : rows[i].apart;
      __half* const to = part == kQ ? rows[i].q : part == kK ? rows[i].k : rows[i].v;
      __half* const out = to + int64_t(head) * apart;
      if (!rows[i].live) continue;
      if (p.interleaved) {
        ptx::store_words(out + 2 * pair, ptx::pack_halves(a[0], b[0]), ptx::pack_halves(a[1], b[1]),
                         ptx::pack_halves(a[2], b[2]), ptx::pack_halves(a[3], b[3]));
      } else {
        ptx::store_words(out + pair, ptx::pack_halves(a[0], a[1]), ptx::pack_halves(a[2], a[3]));
        ptx::store_words(out + p.head_dim / 2 + pair, ptx::pack_halves(b[0], b[1]),
                         ptx::pack_halves(b[2], b[3]));
      }
    }
    if (!fit) atomicMin(p.overflow, p.site + part);
  }
};
