// Products of a few quantized rows (quantize.cuh) with packed weights (quant/planes.cuh) by dp4a:
// acc[t][row] = sum over k of x[t] * w[row], for up to Tokens live rows t.
//
//   f32  c[t][column + row]  = scale * acc
//   f16  the same in fp16
//   add  c[t][column + row] += scale * acc
//
// A warp has a tile of RowLanes * Rows rows of weights and, of each, 32 / RowLanes units side by
// side at a time: a unit is 16 bytes of a plane of values (q8_0: 32) and what belongs to them.
// Every lane has a unit of each of its Rows rows at once, whose loads wait together, and reads the
// activations that belong to it once for all of them. `split` neighbouring warps share the
// units of a tile, taking turns; their sums are added in the order of the warps. Row lanes are as
// many as make a tile's heads whole sectors.
//
// A block loads its first units before it waits for the kernel before: no kernel writes weights.
//
// Products of integers are counted on top of the bits of M = 1.5 * 2^23, so that as a float they
// are M + product: d (M + product) - M d is what the activations' scales are kept for. Weights with
// a bias (q - 8 ...) are multiplied without it; bias times the sum of the activations is subtracted
// from M before.
//
// Grid: n / (rows of all tiles of a block), rounded up. Bytes: the packed weights, once.
#pragma once

#include "../core/live.cuh"
#include "../core/ptx.cuh"
#include "../core/spec.cuh"
#include "gemv_units.cuh"

#define GEMV_INT8_PARAMS(P)                                                               \
  P(const int8_t*, q)      /* [rows][blocks * block], and what belongs to them: */        \
  P(const float2*, scales) /* [groups of 32][stride] */                                   \
  P(const float*, sums)    /* [groups of 32][stride] */                                   \
  P(const uint8_t*, w)     /* planes of [n][blocks] blocks */                             \
  P(const int32_t*, rows)  /* device count of live rows, Tokens at most */                \
  P(void*, c)              /* [rows][width], float; f16: half */                          \
  P(int32_t*, overflow)    /* f16: lowest site out of fp16 range */                       \
  P(int32_t, stride)                                                                      \
  P(int32_t, n)                                                                           \
  P(int32_t, blocks)                                                                      \
  P(int32_t, split)    /* neighbouring warps that share a tile's units, a power of two */ \
  P(int32_t, epilogue) /* 0 f32, 1 f16, 2 add */                                          \
  P(int32_t, column)                                                                      \
  P(int32_t, width)                                                                       \
  P(int32_t, site)                                                                        \
  P(float, scale)

#define GEMV_INT8_PLANES(P, A) P(16, float, partial, [kWarps][Tokens][kTile])

template <class Block, int Tokens, int Warps, int RowLanes, int Rows, int Blocks>
struct GemvInt8 {
  using Unit = gemv::Unit<Block, Rows>;
  static constexpr int kThreads = 32 * Warps, kMinBlocks = Blocks, kWarps = Warps;
  static constexpr int kTile = RowLanes * Rows, kLanes = 32 / RowLanes;
  static constexpr bool kWaitsItself = true;
  static_assert(quant::kPlaneRows % kTile == 0, "tiles are whole");
  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("type", Block::kType)
        .with("tokens", Tokens)
        .with("block", Block::kElements)
        .with("bytes", sizeof(Block))
        .with("units", Unit::kUnits)
        .with("lanes", kLanes)
        .with("rows", kTile)
        .with("n", quant::kPlaneRows);
  }
  SPEC_PARAMS(GEMV_INT8_PARAMS)
  SPEC_SMEM(GEMV_INT8_PLANES)

  static constexpr int kMagic = 0x4b400000;  // M's bits

  using Sums = float[Tokens * Rows];  // [token][row]

  // What belongs to a unit of weights of one token's activations.
  struct Given {
    uint32_t x[Unit::kFolds][Unit::kWords];
    float2 d[Unit::kFolds];  // {d, -M d}
    float sum;

    __device__ __forceinline__ void load(const Params& p, int token, int fold, uint32_t first) {
#pragma unroll
      for (int i = 0; i < Unit::kWords / 4; ++i) {
        const uint4 v = *reinterpret_cast<const uint4*>(
            p.q + uint32_t(token * p.blocks * Block::kElements + first + 16 * i));
        x[fold][4 * i] = v.x, x[fold][4 * i + 1] = v.y;
        x[fold][4 * i + 2] = v.z, x[fold][4 * i + 3] = v.w;
      }
      d[fold] = p.scales[first / 32 * p.stride + token];
    }
    __device__ __forceinline__ void load_sum(const Params& p, int token, uint32_t group) {
      sum = p.sums[group * p.stride + token];
    }
  };

  // Whether all that belongs to a unit is asked for at once, before the first of it is used.
  static constexpr bool kAhead = Tokens <= 2;

  // What one unit adds; `last` is the last live token, which stands in for those that are not.
  static __device__ __forceinline__ void add(const Params& p, const Unit& unit, uint32_t block,
                                             uint32_t u, int last, Sums& sums) {
    const uint32_t column = block * Block::kElements, group = column / 32 + u;
    Given given[Tokens];
    if constexpr (kAhead) {
#pragma unroll
      for (int t = 0; t < Tokens; ++t) {
#pragma unroll
        for (int fold = 0; fold < Unit::kFolds; ++fold)
          given[t].load(p, min_of(t, last), fold, column + Unit::column(u, fold));
        if constexpr (Unit::kMins == gemv::Mins::group)
          given[t].load_sum(p, min_of(t, last), group);
      }
      ptx::keep_order();
    }
#pragma unroll
    for (int fold = 0; fold < Unit::kFolds; ++fold) {
      uint32_t w[Rows][Unit::kWords];
      float scale[Rows], min[Rows];
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        unit.words(r, u, fold, w[r]);
        scale[r] = unit.scale(r, u, fold);
        if constexpr (Unit::kMins == gemv::Mins::fold) min[r] = unit.min(r, u, fold);
      }
#pragma unroll
      for (int t = 0; t < Tokens; ++t) {
        if constexpr (!kAhead)
          given[t].load(p, min_of(t, last), fold, column + Unit::column(u, fold));
        const auto& x = given[t].x[fold];
        const float2 d = given[t].d[fold];
        int whole = 0;
        if constexpr (Unit::kBias || Unit::kMins == gemv::Mins::fold) {
#pragma unroll
          for (int i = 0; i < Unit::kWords; ++i) whole = __dp4a(int(x[i]), 0x01010101, whole);
        }
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
          int product = kMagic - Unit::kBias * whole;
#pragma unroll
          for (int i = 0; i < Unit::kWords; ++i) product = __dp4a(int(w[r][i]), int(x[i]), product);
          float& sum = sums[t * Rows + r];
          sum = fmaf(fmaf(__int_as_float(product), d.x, d.y), scale[r], sum);
          if constexpr (Unit::kMins == gemv::Mins::fold)
            sum = fmaf(-fmaf(__int_as_float(kMagic + whole), d.x, d.y), min[r], sum);
        }
      }
    }
    if constexpr (Unit::kMins == gemv::Mins::group) {
      float min[Rows];
#pragma unroll
      for (int r = 0; r < Rows; ++r) min[r] = unit.min(r, u, 0);
#pragma unroll
      for (int t = 0; t < Tokens; ++t) {
        if constexpr (!kAhead) given[t].load_sum(p, min_of(t, last), group);
#pragma unroll
        for (int r = 0; r < Rows; ++r)
          sums[t * Rows + r] = fmaf(-given[t].sum, min[r], sums[t * Rows + r]);
      }
    }
  }

  // A single token's does not wait for the count: it is there even if it is not live.
  static __device__ __forceinline__ int min_of(int t, int last) {
    return Tokens == 1 || t < last ? t : last;
  }

  // Sums over the lanes of a row, `Offset` and fewer apart. While a lane has more than one sum it
  // gives away those of one half of them and keeps the other half. `first` becomes the number of
  // its first one, `Count` of which stay.
  template <int Count, int Offset>
  static __device__ __forceinline__ void gather(float* sums, int lane, int& first, float* out) {
    if constexpr (Offset == 0) {
#pragma unroll
      for (int i = 0; i < Count; ++i) out[i] = sums[i];
    } else if constexpr (Count == 1) {
      float one[1] = {sums[0] + __shfl_xor_sync(0xffffffffu, sums[0], Offset)};
      gather<1, Offset / 2>(one, lane, first, out);
    } else {
      constexpr int kHalf = Count / 2;
      const bool upper = lane & Offset;
      float half[kHalf];
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float given = upper ? sums[i] : sums[kHalf + i];
        const float kept = upper ? sums[kHalf + i] : sums[i];
        half[i] = kept + __shfl_xor_sync(0xffffffffu, given, Offset);
      }
      if (upper) first += kHalf;
      gather<kHalf, Offset / 2>(half, lane, first, out);
    }
  }

  static __device__ __forceinline__ void store(const Params& p, float acc, int token, int row) {
    const int64_t at = int64_t(token) * p.width + p.column + row;
    const float value = p.scale * acc;
    if (p.epilogue == 1)
      static_cast<__half*>(p.c)[at] = checked_half(value, p.overflow, p.site);
    else if (p.epilogue == 2)
      ptx::add_float(static_cast<float*>(p.c) + at, value);
    else
      static_cast<float*>(p.c)[at] = value;
  }

  static __device__ void run(const Params& p) {
    Smem& s = spec::shared<Smem>();
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t split = p.split, shift = __ffs(split) - 1, tiles = kWarps >> shift;
    const int block_row = blockIdx.x * tiles * kTile;
    const int row = block_row + (warp >> shift) * kTile;
    const gemv::Place at{p.w, p.n, p.blocks, row + int(lane / kLanes * Rows)};
    const uint32_t units = row < p.n ? p.blocks * Unit::kUnits : 0, step = kLanes * split;
    uint32_t u = (warp & (split - 1)) * kLanes + lane % kLanes;
    Unit unit;
    if (u < units) unit.load(at, u / Unit::kUnits, u % Unit::kUnits);
    // Keeps the compiler from asking for the count first, and from waiting for it before the
    // weights are asked for.
    __syncwarp();
    const int count = *static_cast<const volatile int32_t*>(p.rows), live = min(count, Tokens);
    ptx::dependency_wait();
    if (Tokens > 1 && live < 1) return;

    Sums sums = {};
    while (u < units) {
      add(p, unit, u / Unit::kUnits, u % Unit::kUnits, live - 1, sums);
      u += step;
      if (u < units) unit.load(at, u / Unit::kUnits, u % Unit::kUnits);
    }
    constexpr int kSums = Tokens * Rows, kKept = kSums > kLanes ? kSums / kLanes : 1;
    float kept[kKept];
    int first = 0;
    gather<kSums, kLanes / 2>(sums, lane, first, kept);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int token = (first + i) / Rows, r = (first + i) % Rows;
      s.partial[warp][token][lane / kLanes * Rows + r] = kept[i];  // equal in lanes that share it
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < tiles * kTile * live; i += kThreads) {
      const uint32_t tile = i / kTile % tiles, token = i / (kTile * tiles), r = i % kTile;
      float acc = 0;
      for (uint32_t j = 0; j < split; ++j) acc += s.partial[tile * split + j][token][r];
      const int to = block_row + tile * kTile + r;
      if (to < p.n) store(p, acc, token, to);
    }
  }
};
