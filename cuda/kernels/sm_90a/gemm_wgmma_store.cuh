// What becomes of a tile's sums under all epilogues but qkv (gemm_base.cuh), and the parameters of
// their kernels. A warp has 16 rows of a tile, a lane the accumulators that
// core/wgmma.cuh says.
//
// f32 and add write from the accumulators after a tile, while the copies for the next one are on
// their way; what add has to read of C is under way before it is needed. The others round to fp16,
// the gated ones half as many columns: their results wait in BN / 4 or BN / 8 registers and are
// written while the tensor cores are at the next tile.
#pragma once

#include "../../core/spec.cuh"
#include "../gemm_base.cuh"

#define GEMM_WGMMA_PARAMS(P)                                                           \
  P(spec::TensorMap, a)   /* [at least rows][k], boxes of BM x BK, 128-byte swizzle */ \
  P(spec::TensorMap, w)   /* [n][k], boxes of BN / Share x BK, the same */             \
  P(const int32_t*, rows) /* device count of live rows */                              \
  P(Out*, c)              /* [rows][n], float or half; gated: [rows][n / 2], half */   \
  P(int32_t*, overflow)   /* half: lowest site out of fp16 range */                    \
  P(int32_t, n)                                                                        \
  P(int32_t, k)                                                                        \
  P(int32_t, site)                                                                     \
  P(float, scale)                                                                      \
  P(float*, sums)     /* of shared units: [blocks][BM * BN] */                         \
  P(int32_t*, raised) /* [blocks][8], zero between launches */                         \
  P(int32_t, parts)   /* see gemm_division.cuh; 1: nothing is shared */

template <Epilogue E, int BN>
struct GemmWgmmaStore {
  static constexpr int kFragments = BN / 8;  // of 8 columns; 4 accumulators of a lane in each
  using Accumulators = float[BN / 2];
  using Out = OutputOf<E>;
  SPEC_PARAMS(GEMM_WGMMA_PARAMS)

  // f32 and add: the warp's 16 rows from `place` on, a batch of 16-column pairs of fragments at a
  // time. Of such a pair a lane with an even number takes four columns of the first fragment, its
  // neighbour four of the second: visit(pair, half, live, where they lie in C) for rows r and r
  // + 8.
  static constexpr int kPairs = kFragments / 2, kBatch = 4;
  template <class Visit>
  static __device__ __forceinline__ void each_of_batch(const Params& p, int m, TilePlace place,
                                                       int first, Visit&& visit) {
    const int lane = threadIdx.x % 32, row = place.row + lane / 4;
    const int column = place.column + lane % 2 * 8 + lane % 4 / 2 * 4;
    Out* const c = p.c + int64_t(row) * p.n + column;
#pragma unroll
    for (int j = first; j < first + kBatch && j < kPairs; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        visit(j, half, row + half * 8 < m && column + j * 16 < p.n,
              c + int64_t(half) * 8 * p.n + j * 16);
  }

  // add: what C held before, a batch of it. The first is read before the tile is summed, each other
  // one while the batch before it is added and stored.
  struct Before {
    float4 c[kBatch][2];
    __device__ __forceinline__ void read(const Params& p, int m, TilePlace place, int first) {
      each_of_batch(p, m, place, first, [&](int j, int half, bool live, const Out* there) {
        if (live) c[j - first][half] = *reinterpret_cast<const float4*>(there);
      });
    }
  };

  // What is read before a tile is summed; `follow`: once its first product has been started.
  struct Ahead {
    Before before[2];
    __device__ __forceinline__ Ahead(const Params& p, int m, TilePlace place) {
      if constexpr (E == Epilogue::add) before[0].read(p, m, place, 0);
    }
    __device__ __forceinline__ void follow(const Params&, TilePlace) {}
  };

  static __device__ __forceinline__ void store(const Params& p, const Accumulators& d, int m,
                                               TilePlace place, Ahead& ahead) {
    const int lane = threadIdx.x % 32;
    if (E == Epilogue::f32 && p.n % 4) {  // rows of no whole 16-byte units: odd vocabularies
#pragma unroll
      for (int i = 0; i < BN / 2; ++i) {
        const int r = place.row + lane / 4 + i / 2 % 2 * 8;
        const int column = place.column + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (r < m && column < p.n) p.c[int64_t(r) * p.n + column] = p.scale * d[i];
      }
      return;
    }
    const bool odd = lane % 2;
#pragma unroll
    for (int first = 0; first < kPairs; first += kBatch) {
      const int turn = first / kBatch % 2;
      if constexpr (E == Epilogue::add)
        if (first + kBatch < kPairs) ahead.before[turn ^ 1].read(p, m, place, first + kBatch);
      each_of_batch(p, m, place, first, [&](int j, int half, bool live, Out* there) {
        const float* const own = &d[j * 8 + half * 2];
        const float2 low = {own[0], own[1]}, high = {own[4], own[5]};
        const float x = __shfl_xor_sync(0xffffffffu, odd ? low.x : high.x, 1);
        const float y = __shfl_xor_sync(0xffffffffu, odd ? low.y : high.y, 1);
        float4 v = odd ? float4{x, y, high.x, high.y} : float4{low.x, low.y, x, y};
        v = {p.scale * v.x, p.scale * v.y, p.scale * v.z, p.scale * v.w};
        if constexpr (E == Epilogue::add) {
          const float4 b = ahead.before[turn].c[j - first][half];
          v = {b.x + v.x, b.y + v.y, b.z + v.z, b.w + v.w};
        }
        if (live) ptx::store_floats(there, v);
      });
    }
  }

  // A lane's results in fp16, two to a word. Gated: one column of each fragment, rows r and r + 8
  // in one word. f16: two columns, a word for row r and one for r + 8.
  static constexpr int kWords = is_gated<E> ? 1 : 2;  // of a fragment
  struct Halves {
    uint32_t words[kFragments][kWords];
    TilePlace place;
  };

  static __device__ __forceinline__ void round(const Params& p, const Accumulators& d, int m,
                                               TilePlace place, Halves& out) {
    bool fit[2] = {true, true};
    const auto checked = [&](float value, int half) {
      fit[half] &= fits_half(value);
      return value;
    };
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
      const float* const own = &d[j * 4];
      if constexpr (is_gated<E>) {
        out.words[j][0] = ptx::pack_halves(checked(gated<E>(own[0], own[1]) * p.scale, 0),
                                           checked(gated<E>(own[2], own[3]) * p.scale, 1));
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          out.words[j][half] = ptx::pack_halves(checked(own[half * 2] * p.scale, half),
                                                checked(own[half * 2 + 1] * p.scale, half));
      }
    }
    out.place = place;
    const int row = place.row + threadIdx.x % 32 / 4;
    if ((!fit[0] && row < m) || (!fit[1] && row + 8 < m)) atomicMin(p.overflow, p.site);
  }

  // Four words of each of the four lanes that share a row change places: word i of lane j goes to
  // word j of lane i.
  static __device__ __forceinline__ void transpose(uint32_t (&x)[4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
      const bool upper = lane & bit;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & bit) continue;
        const uint32_t theirs = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + bit], bit);
        x[i] = upper ? theirs : x[i];
        x[i + bit] = upper ? x[i + bit] : theirs;
      }
    }
  }

  // Group G of four fragments: each of the four lanes that share a row writes one of them.
  static constexpr int kGroups = (kFragments + 3) / 4;
  template <int G>
  static __device__ __forceinline__ void store_group(const Params& p, const Halves& out, int m) {
    const int lane = threadIdx.x % 32;
    uint32_t x[kWords][4];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[w][i] = G * 4 + i < kFragments ? out.words[min(G * 4 + i, kFragments - 1)][w] : 0;
      transpose(x[w]);
    }
    constexpr int kLess = is_gated<E> ? 2 : 1;  // columns of acc to one of C
    const int fragment = G * 4 + lane % 4, row = out.place.row + lane / 4, width = p.n / kLess;
    const int column = (out.place.column + fragment * 8) / kLess;
    if (fragment >= kFragments || column >= width) return;
    Out* const c = p.c + int64_t(row) * width + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + half * 8 >= m) continue;
      Out* const there = c + int64_t(half) * 8 * width;
      if constexpr (is_gated<E>) {
        const int bytes = half ? 0x7632 : 0x5410;
        ptx::store_words(there, __byte_perm(x[0][0], x[0][1], bytes),
                         __byte_perm(x[0][2], x[0][3], bytes));
      } else {
        ptx::store_words(there, x[half][0], x[half][1], x[half][2], x[half][3]);
      }
    }
  }
  template <int G>
  static __device__ __forceinline__ void store_from(const Params& p, const Halves& out, int m) {
    if constexpr (G < kGroups) {
      store_group<G>(p, out, m);
      store_from<G + 1>(p, out, m);
    }
  }

  static __device__ __forceinline__ void finish(const Params& p, const Accumulators& d, int m,
                                                TilePlace place, Ahead& ahead) {
    if constexpr (is_half<E>) {
      Halves out;
      round(p, d, m, place, out);
      store_from<0>(p, out, m);
    } else {
      store(p, d, m, place, ahead);
    }
  }
};
