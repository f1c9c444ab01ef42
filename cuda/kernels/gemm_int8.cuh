// Products of packed weights with int8 activations on tensor cores, through mma.sync of 8-bit
// integers:
//   acc[t][r] = sum over groups g of w[r][g] d[g][t] isum (+ min[r][g] sums[g][t])
// isum: the exact sum over a group of 32 or 16 elements of quant times activation; w, min: scales
// of the weights; d, sums: those of the activations for 32 elements. In ascending g, float32.
//   f32  C[t][column + r]  = scale * acc      f16  the same in fp16      add  += scale * acc
//
// Weights are operand A (quant/operands.cuh), tokens operand B. A warp has 32 rows of weights and
// kTokens tokens. The integers are accumulated onto M = 3 2^22, as bits of a float: read as one,
// the result is M + isum exactly, and the fold without a conversion is
//   acc = fma(fma(M + isum, d, -M d), w, acc)
// with d and -M d side by side in memory. Mins are products of tf32: 4 groups times [the upper bits
// of min | what is left of it], so that min counts exactly.
//
// Grid: x = token tiles * row tiles for the most tokens there can be; blocks past the live tiles
// return.
//
// Block: (BN / 32) x (BM / kTokens) x Split warps. Split warps take every Split-th step of k each,
// and their sums are added up in order. Three blocks to a multiprocessor hide more of each other's
// waits than two do: what only copies need is kept in shared memory for that. Where there are two,
// it is kept in registers, and two blocks of most types fit the 100 KB of sm_86, 89 and 120.
//
// A slot of the ring holds Split steps of 128 elements. Rows past n or m are not copied, or others
// in their place: what shared memory holds there only gets into results that are not stored.
// Columns past k are zeros.
//
// Before it waits for the kernel before it, a block reads the count of live rows and weights only.
//
// Bytes: (BM k + BN k w) per tile from L2, w bytes a weight, for 2 BM BN k operations.
#pragma once

#include "../core/imma.cuh"
#include "../core/live.cuh"
#include "../core/ptx.cuh"
#include "../core/spec.cuh"
#include "../quant/operands.cuh"
#include "gemm_base.cuh"

#define GEMM_INT8_PARAMS(P)                                                    \
  P(const int32_t*, rows) /* device count of live rows of x */                 \
  P(const int8_t*, x)     /* [rows][k], 16-byte aligned like all arrays */     \
  P(const float*, scales) /* [k / 32][stride][2]: d, -M d */                   \
  P(const float*, sums)   /* [k / 32][stride]: tf32 of d times the sum of x */ \
  P(const uint8_t*, w)    /* planes of [n][k] */                               \
  P(void*, c)             /* [rows][width], float; f16: half */                \
  P(int32_t*, overflow)   /* f16: lowest site out of fp16 range */             \
  P(int32_t, n)           /* a multiple of 16 */                               \
  P(int32_t, k)           /* whole blocks */                                   \
  P(int32_t, stride)      /* tokens: rows rounded up to 64 */                  \
  P(int32_t, width)                                                            \
  P(int32_t, column)                                                           \
  P(int32_t, epilogue) /* 0: f32, 1: f16, 2: add */                            \
  P(int32_t, site)                                                             \
  P(float, scale)

#define GEMM_INT8_PLANES(P, A)                \
  P(1024, uint8_t, x, [Stages][kX])           \
  P(1024, uint8_t, w, [Stages][kW])           \
  P(16, uint8_t, factors, [Stages][kFactors]) \
  P(16, float, own, [kWarps][kOwn])           \
  P(16, uint8_t, sources, [kSourceBytes])     \
  A(x, float, parts, [kWarps][kFragments][32][4])

// Rows of planes in shared memory: 16-byte chunks of eight rows, exclusive-ored with the row's
// place so that ldmatrix of a chunk column meets all banks.
template <int RowBytes>
__device__ __forceinline__ constexpr uint32_t chunk_place(uint32_t row, uint32_t chunk) {
  constexpr uint32_t kRows = RowBytes < 128 ? 128 / RowBytes : 1;  // of a line of all banks
  constexpr uint32_t kChunks = RowBytes / 16;
  return row * RowBytes + (chunk ^ row / kRows % kChunks) * 16;
}

template <class Block, int BM, int BN, int Split, int Stages, int Blocks, int CopyBytes, bool Lever>
struct GemmInt8 {
  using Of = quant::Operands<Block>;
  using Planes = quant::Planes<Block>;
  // Blocks that a multiprocessor is to hold. Of large tiles only sm_90a has both shared memory for
  // three and a use for them: of sm_100 pairs of floats need registers.
#if __CUDA_ARCH__ == 900
  static constexpr int kBlocks = Blocks;
#else
  static constexpr int kBlocks = Split == 1 && Blocks > 2 ? 2 : Blocks;
#endif
  // A warp's most tokens. Of sm_120 ptxas moves what a warp of 64 does so far ahead that it spills,
  // unless branches are in its way; and with scales for 16 it does even then. Nor is it of use
  // where two such blocks do not fit a multiprocessor: a block with half the tokens to a warp has
  // as many warps as they have.
#if __CUDA_ARCH__ >= 1200
  static constexpr bool kTwice = Of::kRaw + Of::kHigh <= (Of::kMin == quant::Min::none ? 80 : 64);
  static constexpr int kMostTokens = Of::kSub == 32 && kTwice ? 64 : 32;
  static constexpr bool kBranches = BM >= 64 && kMostTokens == 64;
#else
  static constexpr int kMostTokens = BM >= 128 && Blocks > 1 ? 128 : 64;
  static constexpr bool kBranches = false;
#endif
  static constexpr int kTokens = BM < kMostTokens ? BM : kMostTokens, kPairs = kTokens / 16;
  // Whether registers are left for loads ahead (see `fence`), and besides for pointers: of sm_90a
  // it is registers that blocks lack, and not shared memory.
  static constexpr bool kRoomy = kTokens == 64 && BM == 64 && Split == 1 && kBlocks == 2;
  static constexpr bool kPaired = ptx::kPairedFloats && Split == 1;
#if __CUDA_ARCH__ == 900
  static constexpr bool kKept = false;
#else
  static constexpr bool kKept = kRoomy && !kPaired;
#endif
  static constexpr int kWarpsM = BN / 32, kWarpsN = BM / kTokens;
  static constexpr int kWarps = kWarpsM * kWarpsN * Split;
  static constexpr int kThreads = 32 * kWarps, kMinBlocks = kThreads > 128 ? 1 : kBlocks;
  static constexpr bool kWaitsItself = true;
  static_assert(BN % 32 == 0 && BM % kTokens == 0 && kTokens % 16 == 0);

  static constexpr int kGroups = quant::kStepGroups;
  static constexpr int kScales = quant::kStep / Of::kSub;  // of a row of weights in a step
  static constexpr bool kSums = Of::kMin == quant::Min::sums;
  static constexpr bool kProducts = Of::kMin == quant::Min::products;
  static constexpr bool kTail = !Of::kSuper || Split > 2;  // whether k may end within a slot
  // Whether heads are copied and read once for both turns of a super-block.
  static constexpr bool kOnce = kKept && Of::kSuper && !kProducts;

  // Blocks of a row in a slot, and what a step takes of a row of the second plane.
  static constexpr int kStepBlocks = Of::kSuper ? 1 : 4;  // a super-block is shared by two steps
  static constexpr int kSlotBlocks = Of::kSuper ? (Split + 1) / 2 : 4 * Split;
  static constexpr int kHighParts = Of::kHighWhole ? kSlotBlocks : Split;

  // Bytes of a slot.
  static constexpr int kX = Split * BM * 128;
  static constexpr int kRawBytes = Split * BN * Of::kRaw;
  static constexpr int kHighBytes = kHighParts * BN * Of::kHigh;
  static constexpr int kHeads = sizeof(Planes::all) / sizeof(quant::Plane) - 1 - (Of::kHigh > 0);
  static constexpr int kFirstHead = 1 + (Of::kHigh > 0), kLastHead = kFirstHead + kHeads - 1;
  static constexpr int kHead0Row = Planes::all[kFirstHead].bytes;
  static constexpr int kHead1Row = kHeads > 1 ? Planes::all[kLastHead].bytes : 0;
  static constexpr int kHead0Bytes = kSlotBlocks * BN * kHead0Row;
  static constexpr int kHead1Bytes = kSlotBlocks * BN * kHead1Row;
  static constexpr int kW = kRawBytes + kHighBytes + kHead0Bytes + kHead1Bytes;
  static constexpr int kScaleRow = BM * 8;
  static constexpr int kScaleBytes = Split * kGroups * kScaleRow;
  static constexpr int kFactors = kScaleBytes + (kSums ? Split * BM * kGroups * 4 : 0);
  // Of each warp: four times M, scales[kScales][32], then mins. Those that are multiplied by sums
  // are an operand of an mma: the upper bits of those of each row, 16 bytes, then what is left.
  static constexpr int kScalesPlace = 4, kMinsPlace = kScalesPlace + 32 * kScales;
  static constexpr int kMinsPart = 3 * 40 + 32;  // see mins_place
  static constexpr int kMinFloats = kSums ? 2 * kMinsPart : kProducts ? 32 * (kScales + 1) : 0;
  static constexpr int kOwn = kMinsPlace + kMinFloats;
  // Scales of a row that lie side by side: as many as a group has, or two where registers are left
  // for those of the next group.
  static constexpr int kBeside = kScales > kGroups || kKept ? 2 : 1;
  static constexpr int kFragments = 2 * kTokens / 8;

  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("type", Block::kType)
        .with("bm", BM)
        .with("bn", BN)
        .with("split", Split)
        .with("stages", Stages)
        .with("copy", CopyBytes)
        .with("block", Block::kElements)
        .with("bytes", sizeof(Block))
        .with("sub", Of::kSub)
        .with("n", quant::kPlaneRows)
        .with("lever", Lever);
  }
  SPEC_PARAMS(GEMM_INT8_PARAMS)

  static constexpr int kM = 0x4b400000;
  using Accumulators = float[2][kTokens / 8][4];

  // The mma gives lane l rows l / 4 and l / 4 + 8 of two fragments. Which row of weights feeds
  // them is free: fragment row f of a warp's 32 is row 4 (f % 8) + f / 8, so that a lane has four
  // rows that follow each other. f is a sum of a thread's and of a constant without common bits.
  static constexpr __host__ __device__ int row_of(int f) {
    return f / 32 * 32 + f % 8 * 4 + f % 32 / 8;
  }

  // Where the mins of a row of a warp's 32 lie, in floats. Of eight rows side by side, which lanes
  // store, and of eight fragment rows, which ldmatrix reads, no two are in the same banks.
  static constexpr __host__ __device__ int mins_place(int row) {
    return row % 4 * 40 + row / 4 * 4;
  }

  // A value that the compiler keeps, for want of a way to compute it anew in a loop: from the lane
  // itself.
  static __device__ __forceinline__ uint32_t kept(uint32_t x) {
    return __shfl_sync(0xffffffffu, x, threadIdx.x % 32);
  }

  // ---- Copies: chunks of 16 bytes, the chunk of a row fastest, then rows, then parts of the slot.

  struct Place {
    int row0, token0;  // of the tile
    int rows, tokens;  // that there are from there on
    int row_blocks;    // blocks of a row of weights
  };

  // A thread's chunks of Parts x Rows rows of RowBytes. Row r of a part comes from row `Of(r)` of
  // the tile; what is past the end comes from the last one.
  // Where pointers are kept in registers, one serves two chunks (`kOfOne`), half a row apart.
  template <int Rows, int RowBytes, int Parts>
  struct Chunks {
    static constexpr int kOfOne = kKept && RowBytes >= 64 ? 2 : 1;
    static constexpr int kInRow = RowBytes / 16 / kOfOne, kAll = Parts * Rows * kInRow;
    static constexpr int kCount = (kAll + kThreads - 1) / kThreads;
    static_assert(kThreads % kInRow == 0 || kCount == 1);
    // Chunk i of a thread is its first one's row and part plus these, which have no bits in common.
    static constexpr __device__ int row(int i) { return i * kThreads / kInRow % Rows; }
    static constexpr __device__ int part(int i) { return i * kThreads / (kInRow * Rows); }
    static __device__ int chunk() { return threadIdx.x % kInRow; }
    // Eight threads have chunks in all banks (see chunk_place): with half a row each, they need
    // rows that differ in the bit which swaps the halves.
    static __device__ int row() {
      const int row = threadIdx.x / kInRow % Rows;
      if constexpr (kOfOne == 1) return row;
      constexpr int kRows = 128 / (kOfOne == 1 ? 128 : RowBytes);
      return row ^ ((row / kRows ^ row / 4) & 1) * (kRows + 4);
    }
    static __device__ int part() { return threadIdx.x / (kInRow * Rows); }
    static __device__ bool has(int i) {
      return (i + 1) * kThreads <= kAll || i * kThreads + threadIdx.x < kAll;
    }
  };

  // Where a thread's chunks come from in the first slot; those of later slots lie `index` times as
  // many bytes further. Pointers are as many registers as would be missed: they are kept in shared
  // memory, two to a load. `mine`: 16 bytes for each thread before.
  template <int Count>
  struct SharedSources {
    static constexpr int kPairs = (Count + 1) / 2;
    uint32_t pairs;  // of the first thread

    __device__ explicit SharedSources(uint32_t place) : pairs(place) {}
    __device__ void set(int i, const uint8_t* source) {
      ptx::store_shared_pointer(pairs + (i / 2 * kThreads + threadIdx.x) * 16 + i % 2 * 8, source);
    }
    // All are loaded before the first copy: they wait together, and ptxas pads between the two.
    __device__ __forceinline__ void load(const uint8_t* (&source)[Count], uint32_t mine) const {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const uint8_t *first, *second;
        ptx::load_shared_pointers(first, second, pairs + mine + pair * kThreads * 16);
        source[2 * pair] = first;
        if (2 * pair + 1 < Count) source[2 * pair + 1] = second;
      }
    }
  };

  // The same in registers, of which a warp has more to spare if it shares k with others, or if
  // there are two blocks; those blocks need their shared memory, and their pointers advance.
  template <int Count>
  struct KeptSources {
    static constexpr int kPairs = 0;
    const uint8_t* all[Count];

    __device__ explicit KeptSources(uint32_t) {}
    __device__ void set(int i, const uint8_t* source) { all[i] = source; }
    __device__ __forceinline__ void load(const uint8_t* (&source)[Count], uint32_t) const {
#pragma unroll
      for (int i = 0; i < Count; ++i) source[i] = all[i];
    }
    __device__ __forceinline__ void advance(uint32_t bytes) {
#pragma unroll
      for (int i = 0; i < Count; ++i) all[i] += bytes;
    }
  };
  template <int Count>
  using Sources = std::conditional_t<kKept, KeptSources<Count>, SharedSources<Count>>;

  // Copiers. Where k may end within a slot, they get how much there is from its begin on, and an
  // address to name for what is past that: zeros.

  // Rows that lie apart: of raw weights (`Permuted`) and of activations.
  template <int Rows, int RowBytes, int Parts, bool Permuted>
  struct RowCopy : Chunks<Rows, RowBytes, Parts> {
    using Base = Chunks<Rows, RowBytes, Parts>;
    static constexpr int kSources = Base::kCount;
    using Loaded = const uint8_t* [kSources];
    Sources<kSources> from;
    static constexpr int kSourcePairs = Sources<kSources>::kPairs;
    uint32_t to[Base::kOfOne];  // places of the first chunks in a slot

    __device__ RowCopy(uint32_t sources, const uint8_t* tile, int present, int row_bytes)
        : from(sources) {
      const int first = Base::row(), part = Base::part();
      to[0] = kept(chunk_place<RowBytes>(first, Base::chunk()) + part * Rows * RowBytes);
      if constexpr (Base::kOfOne == 2) to[1] = kept(to[0] ^ Base::kInRow * 16);
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        const int row = Permuted ? row_of(first) + row_of(Base::row(i)) : first + Base::row(i);
        from.set(i, tile + int64_t(min(row, present - 1)) * row_bytes +
                        (part + Base::part(i)) * RowBytes + Base::chunk() * 16);
      }
    }

    // To where chunks are after `index` times `Bytes`.
    template <int Bytes>
    static __device__ __forceinline__ void go(Loaded& all, uint32_t index) {
#pragma unroll
      for (int i = 0; i < kSources; ++i) all[i] = ptx::address_of(all[i], index, Bytes);
    }
    template <int Ahead, int Copied = 16>
    __device__ __forceinline__ void copy(const Loaded& all, uint32_t slot, int left,
                                         const uint8_t* safe) const {
#pragma unroll
      for (int chunk = 0; chunk < kSources * Base::kOfOne; ++chunk) {
        const int i = chunk / Base::kOfOne, j = chunk % Base::kOfOne, more = j * Base::kInRow * 16;
        const uint8_t* source = all[i];
        if (!Base::has(i)) return;
        const uint32_t there =
            slot + to[j] + Base::row(i) * RowBytes + Base::part(i) * Rows * RowBytes;
        const int at = (Base::part() + Base::part(i)) * RowBytes + Base::chunk() * 16 + more;
        const bool live = !kTail || at < left;
        source = live ? source + (Ahead + more) : safe;
        if constexpr (Copied == 16) {
          ptx::copy_async_16(there, source, live ? 16 : 0);
        } else {
#pragma unroll
          for (int byte = 0; byte < 16; ++byte)
            ptx::store_shared_byte(there + byte, live ? source[byte] : 0);
        }
      }
    }
  };

  // 16 bytes of each row, 4 for each of four blocks: rows are no better aligned.
  template <int Rows, int Parts>
  struct WordCopy {
    static constexpr int kAll = Parts * Rows * 4, kSources = kAll / kThreads;
    static_assert(kAll % kThreads == 0);
    using Loaded = const uint8_t* [kSources];
    Sources<kSources> from;
    static constexpr int kSourcePairs = Sources<kSources>::kPairs;

    __device__ WordCopy(uint32_t sources, const uint8_t* tile, int present, int row_bytes)
        : from(sources) {
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        const int word = i * kThreads + threadIdx.x, row = row_of(word / 4 % Rows);
        from.set(i, tile + int64_t(min(row, present - 1)) * row_bytes + word / (4 * Rows) * 16 +
                        word % 4 * 4);
      }
    }
    template <int Bytes>
    static __device__ __forceinline__ void go(Loaded& all, uint32_t index) {
#pragma unroll
      for (int i = 0; i < kSources; ++i) all[i] = ptx::address_of(all[i], index, Bytes);
    }
    template <int Ahead>
    __device__ __forceinline__ void copy(const Loaded& all, uint32_t slot, int left,
                                         const uint8_t* safe) const {
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        const uint8_t* source = all[i] + Ahead;
        const int word = i * kThreads + threadIdx.x;
        const bool live = word / (4 * Rows) * 16 + word % 4 * 4 < left;
        ptx::copy_async_4(slot + word * 4, live ? source : safe, live ? 4 : 0);
      }
    }
  };

  // What lies side by side for all rows of a tile, for each block or group: heads and factors of
  // activations. `Unit` bytes at a time: 16, or 4 that become columns of four groups. Of the latter
  // a kept pointer serves two, half a part apart: a part has places for whole tiles.
  template <int Bytes, int Parts, int Unit, bool Apart = false>
  struct SideCopy {
    static constexpr int kOfOne = kKept && Unit == 4 ? 2 : 1;
    static constexpr int kInPart = Bytes / Unit / kOfOne, kAll = Parts * kInPart;
    static constexpr int kCount = (kAll + kThreads - 1) / kThreads;
    static_assert(Unit == 16 || kThreads % kInPart == 0);
    using Loaded = const uint8_t* [kCount];
    std::conditional_t<Split == 1, Sources<kCount>, KeptSources<kCount>> from;
    static constexpr int kSourcePairs = decltype(from)::kPairs;
    uint32_t column_to;  // a thread's first column

    static __device__ int part(int i) { return (i * kThreads + threadIdx.x) / kInPart; }
    static __device__ int unit(int i) { return (i * kThreads + threadIdx.x) % kInPart; }
    static constexpr __host__ __device__ int column(int part) {
      return part / 4 * kOfOne * kInPart * 16 + part % 4 * 4;
    }

    __device__ SideCopy(uint32_t sources, const void* tile, int present_bytes, int64_t stride)
        : from(sources) {
      if constexpr (Unit == 4) column_to = kept(unit(0) * 16 + column(part(0)));
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        from.set(i, static_cast<const uint8_t*>(tile) + part(i) * stride +
                        min(unit(i), (present_bytes - 1) / Unit) * Unit);
    }
    __device__ __forceinline__ void copy(const Loaded& loaded, uint32_t mine, uint32_t slot,
                                         int index, uint32_t stride, int left,
                                         const uint8_t* safe) const {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint8_t* source = kKept ? loaded[i] : ptx::address_of(loaded[i], index, stride);
        const bool live = !kTail || part(i) < left;
        const int more = Unit == 16 ? i * kThreads * 16 : column(i * kThreads / kInPart);
        if (kTail && !live) source = safe;
        if ((i + 1) * kThreads > kAll && i * kThreads + threadIdx.x >= kAll) return;
        if constexpr (Apart)
#pragma unroll
          for (int word = 0; word < 4; ++word)
            ptx::copy_async_4(slot + mine + more + word % 2 * 8 + word / 2 * 4,
                              source + (live ? word * 4 : 0), live ? 4 : 0);
        else if constexpr (Unit == 16)
          ptx::copy_async_16(slot + mine + more, source, live ? 16 : 0);
        else
#pragma unroll
          for (int j = 0; j < kOfOne; ++j)
            ptx::copy_async_4(slot + column_to + more + j * kInPart * 16, source + j * kInPart * 4,
                              live ? 4 : 0);
      }
    }
  };

  struct None {
    static constexpr int kSources = 0, kSourcePairs = 0;
    struct Loaded {};
    template <int>
    static __device__ void go(Loaded&, uint32_t) {}
    struct {
      __device__ void load(Loaded&, uint32_t) const {}
      __device__ void advance(uint32_t) {}
    } from;
    __device__ None(uint32_t, const uint8_t*, int, int) {}
    __device__ None(uint32_t, const void*, int, int64_t) {}
  };

  template <int Index>
  static __device__ const uint8_t* plane_of(const Params& p, const Place& place) {
    constexpr quant::Plane plane = Planes::all[Index];
    return p.w + plane.place(p.n, place.row_blocks, place.row0, 0);
  }
  template <int Index>
  static __device__ int row_bytes_of(const Place& place) {
    constexpr quant::Plane plane = Planes::all[Index];
    return place.row_blocks * plane.bytes;
  }

  using RawCopy = RowCopy<BN, Of::kRaw, Split, true>;
  using HighCopy = std::conditional_t<
      Of::kHigh == 0, None,
      std::conditional_t<Of::kHigh == 16, WordCopy<BN, kHighParts>,
                         RowCopy<BN, (Of::kHigh > 16 ? Of::kHigh : 32), kHighParts, true>>>;
  using ActivationCopy = RowCopy<BM, 128, Split, false>;
  static constexpr int kHighAt = RawCopy::kSourcePairs;
  static constexpr int kActivationsAt = kHighAt + HighCopy::kSourcePairs;
  using Head0Copy = SideCopy<BN * kHead0Row, kSlotBlocks, 16>;
  using Head1Copy =
      std::conditional_t<(kHeads > 1), SideCopy<BN * kHead1Row, kSlotBlocks, 16>, None>;
  using ScaleCopy = SideCopy<kScaleRow, Split * kGroups, 16, kPaired>;
  using SumCopy = std::conditional_t<kSums, SideCopy<BM * 4, Split * kGroups, 4>, None>;
  static constexpr int kHead0At = kActivationsAt + ActivationCopy::kSourcePairs;
  static constexpr int kHead1At = kHead0At + Head0Copy::kSourcePairs;
  static constexpr int kScalesAt = kHead1At + Head1Copy::kSourcePairs;
  static constexpr int kSumsAt = kScalesAt + ScaleCopy::kSourcePairs;
  // What only the end needs, then pairs of pointers for each thread.
  static constexpr int kSourceBytes = 16 + (kSumsAt + SumCopy::kSourcePairs) * kThreads * 16;

  SPEC_SMEM(GEMM_INT8_PLANES)

  // All copies of a slot. If one step is a slot, two turns have a super-block.
  struct Copies {
    static constexpr int kTurns = Of::kSuper && Split == 1 ? 2 : 1;
    static constexpr int kHighStep = Of::kHighWhole ? kHighParts * Of::kHigh : Split * Of::kHigh;
    uint32_t mine;  // bytes of the threads before
    RawCopy raw;
    HighCopy high;
    Head0Copy head0;
    Head1Copy head1;
    ActivationCopy x;
    ScaleCopy scales;
    SumCopy sums;

    __device__ Copies(const Params& p, const Place& place, uint32_t sources)
        : mine(kept(threadIdx.x * 16)),
          raw(sources, plane_of<0>(p, place), place.rows, row_bytes_of<0>(place)),
          high(sources + kHighAt * kThreads * 16, plane_of<1>(p, place), place.rows,
               row_bytes_of<1>(place)),
          head0(sources + kHead0At * kThreads * 16, plane_of<kFirstHead>(p, place),
                place.rows * kHead0Row, p.n * kHead0Row),
          head1(sources + kHead1At * kThreads * 16, plane_of<kLastHead>(p, place),
                place.rows * kHead1Row, p.n * kHead1Row),
          x(sources + kActivationsAt * kThreads * 16,
            reinterpret_cast<const uint8_t*>(p.x) + int64_t(place.token0) * p.k, place.tokens, p.k),
          scales(sources + kScalesAt * kThreads * 16, p.scales + int64_t(place.token0) * 2,
                 place.tokens * 8, int64_t(p.stride) * 8),
          sums(sources + kSumsAt * kThreads * 16, p.sums + place.token0, place.tokens * 4,
               int64_t(p.stride) * 4) {}

    // Addresses of rows that lie apart, and those of what lies side by side.
    struct Rows {
      typename RawCopy::Loaded raw;
      typename HighCopy::Loaded high;
      typename ActivationCopy::Loaded x;
    };
    struct Sides {
      typename Head0Copy::Loaded head0;
      typename Head1Copy::Loaded head1;
      typename ScaleCopy::Loaded scales;
      typename SumCopy::Loaded sums;
    };
    __device__ __forceinline__ void load(Rows& rows, int index) const {
      raw.from.load(rows.raw, mine), high.from.load(rows.high, mine);
      x.from.load(rows.x, mine);
      go(rows, index);
    }
    static __device__ __forceinline__ void go(Rows& rows, int index) {
      RawCopy::template go<kTurns * Split * Of::kRaw>(rows.raw, index);
      HighCopy::template go<Of::kHighWhole ? kHighStep : kTurns * kHighStep>(rows.high, index);
      ActivationCopy::template go<kTurns * Split * 128>(rows.x, index);
    }
    __device__ __forceinline__ void load(Sides& sides) const {
      head0.from.load(sides.head0, mine), head1.from.load(sides.head1, mine);
      scales.from.load(sides.scales, mine), sums.from.load(sides.sums, mine);
    }

    // Kept pointers, from what turn `Half` of a super-block copies to what the turn after it does.
    template <int Half>
    __device__ __forceinline__ void advance(Rows& rows, const Params& p) {
      scales.from.advance(Split * kGroups * 8 * p.stride);
      sums.from.advance(Split * kGroups * 4 * p.stride);
      if constexpr (Half == kTurns - 1) {
        go(rows, 1);
        head0.from.advance(kSlotBlocks * kHead0Row * p.n);
        head1.from.advance(kSlotBlocks * kHead1Row * p.n);
      }
    }

    // `Half`: which turn of its super-block this is; 2: the first of the next one's, and the
    // addresses are those of this one.
    template <int Half>
    __device__ __forceinline__ void copy_weights(const Rows& rows, const Sides& from,
                                                 const Params& p, const Place& place, int turn,
                                                 uint32_t slot) const {
      raw.template copy<Half * Of::kRaw, CopyBytes>(
          rows.raw, slot, row_bytes_of<0>(place) - turn * Split * Of::kRaw, p.w);
      if constexpr (Of::kHigh > 0)
        high.template copy<Of::kHighWhole ? Half / 2 * kHighStep : Half * Of::kHigh>(
            rows.high, slot + kRawBytes, row_bytes_of<1>(place) - turn * kHighStep, p.w);
      if constexpr (kOnce && Half == 1) return;
      const int index = turn / kTurns, left = place.row_blocks - index * kSlotBlocks;
      const uint32_t heads = slot + kRawBytes + kHighBytes;
      head0.copy(from.head0, mine, heads, index, kSlotBlocks * kHead0Row * p.n, left, p.w);
      if constexpr (kHeads > 1)
        head1.copy(from.head1, mine, heads + kHead0Bytes, index, kSlotBlocks * kHead1Row * p.n,
                   left, p.w);
    }

    template <int Half>
    __device__ __forceinline__ void copy_activations(const Rows& rows, const Sides& from,
                                                     const Params& p, int turn, uint32_t slot,
                                                     uint32_t factors) const {
      const auto* safe = reinterpret_cast<const uint8_t*>(p.x);
      x.template copy<Half * 128>(rows.x, slot, p.k - turn * Split * 128, safe);
      const int left = p.k / 32 - turn * Split * kGroups;
      scales.copy(from.scales, mine, factors, turn, Split * kGroups * 8 * p.stride, left, safe);
      if constexpr (kSums)  // those of four groups of a token side by side: an operand of an mma
        sums.copy(from.sums, mine, factors + kScaleBytes, turn, Split * kGroups * 4 * p.stride,
                  left, safe);
    }
  };

  // ---- Products.
  // Where in the tile a lane works.
  struct Work {
    int warp, lane, part, warp_row, warp_token;

    __device__ explicit Work(int thread)
        : warp(thread / 32),
          lane(thread % 32),
          part(warp / (kWarpsM * kWarpsN)),
          warp_row(warp % kWarpsM * 32),
          warp_token(warp / kWarpsM % kWarpsN * kTokens) {}
  };

  // And its places in slot 0 of shared memory.
  struct Lane : Work {
    using Work::lane, Work::part, Work::warp_row, Work::warp_token;
    uint32_t x, raw, high, high_words, scale, sum, min;

    __device__ explicit Lane(Smem& s) : Work(threadIdx.x) {
      const int token = warp_token + lane / 16 * 8 + lane % 8, f = warp_row + lane % 16;
      x = kept(ptx::shared_address(s.x) + part * BM * 128 + chunk_place<128>(token, lane / 8 % 2));
      const uint32_t w = ptx::shared_address(s.w);
      raw = kept(w + part * BN * Of::kRaw + chunk_place<Of::kRaw>(f, lane / 16));
      const int high_part = Of::kHighWhole ? part / 2 : part;
      const uint32_t second = w + kRawBytes + high_part * BN * Of::kHigh;
      if constexpr (Of::kHigh >= 32) high = kept(second + chunk_place<Of::kHigh>(f, lane / 16));
      if constexpr (Of::kHigh == 16) high_words = kept(second + (warp_row + lane / 4) * 16);
      const uint32_t factors = ptx::shared_address(s.factors);
      scale = kept(factors + part * kGroups * kScaleRow + (warp_token + lane % 4 * 2) * 8);
      sum = kept(factors + kScaleBytes + (part * BM + warp_token + lane / 16 * 8 + lane % 8) * 16);
      if constexpr (kSums)  // of ldmatrix's row lane % 8 of the first or second eight, of a half
        min = kept(ptx::shared_address(s.own[threadIdx.x / 32] + kMinsPlace +
                                       mins_place(lane % 8 * 4 + lane / 8 % 2) +
                                       lane / 16 * kMinsPart));
    }
  };

  // What `fetch` loads from: 16 of the warp's rows.
  struct RawSource {
    const Lane& at;
    uint32_t w_slot;
    int i;
    __device__ __forceinline__ void q(int pair, uint32_t (&r)[4]) const {
      ptx::load_matrix_x4(r, (at.raw ^ pair * 32) + w_slot + i * 16 * Of::kRaw);
    }
    __device__ __forceinline__ void high(int pair, uint32_t (&r)[4]) const {
      ptx::load_matrix_x4(r, (at.high ^ pair * 32) + w_slot + i * 16 * Of::kHigh);
    }
    __device__ __forceinline__ void words(uint32_t (&r)[8]) const {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 four = ptx::load_shared(at.high_words + w_slot + (i * 16 + half * 8) * 16);
        r[4 * half] = four.x, r[4 * half + 1] = four.y;
        r[4 * half + 2] = four.z, r[4 * half + 3] = four.w;
      }
    }
  };

  // What is loaded after it is not loaded before: ptxas would fetch more ahead than fits registers.
  // Where registers are left, every other is left out: each is an instruction, and loads wait less.
  static __device__ __forceinline__ void fence() { __syncwarp(); }

  // The same after group G. `kBranches`: ptxas must believe that M may be 0, and then moves nothing
  // over the branch, of which two suffice for super-blocks.
  template <int G>
  static __device__ __forceinline__ void fence_group(uint4& magic, const float* own) {
    if constexpr (kBranches && (!Of::kSuper || G % 2 == 0)) {
      magic = ptx::load_shared(ptx::shared_address(own));
      if (magic.x == 0) ptx::trap();
    }
    if constexpr (!kKept) fence();
  }

  // Scales and mins of a row in a step.
  struct Scales {
    float scales[kScales], mins[kGroups];
  };

  // One step of a warp; `half` of the super-block, if there is one. `second` (`kOnce`): scales of
  // its second half, which the first one makes.
  static __device__ __forceinline__ void multiply(Accumulators& acc, Smem& s, const Lane& at,
                                                  int slot, int half, Scales& second) {
    const uint32_t w_slot = slot * kW, x_slot = slot * kX, f_slot = slot * kFactors;
    float* own = s.own[threadIdx.x / 32];
    // Without a load ptxas makes M anew in the registers of each mma's result, for sm_80 at least;
    // a wide warp has no registers to keep it otherwise.
    uint4 magic = make_uint4(kM, kM, kM, kM);
    if constexpr (kTokens <= 64) magic = ptx::load_shared(ptx::shared_address(own));

    {  // The scales of a row, each lane one.
      const int block = Of::kSuper ? at.part / 2 : at.part * 4;
      const uint8_t* head0 = s.w[0] + w_slot + kRawBytes + kHighBytes + block * BN * kHead0Row;
      const uint8_t* head1 = s.w[0] + w_slot + kW - kHead1Bytes + block * BN * kHead1Row;
      const int row = at.warp_row + at.lane;
      Scales mine = second;
      if (!kOnce || half == 0)
        Of::scales(mine.scales, mine.mins, head0, head1, BN, row, half, magic.x);
      if (kOnce && half == 0)
        Of::scales(second.scales, second.mins, head0, head1, BN, row, 1, magic.x);
      const auto& [scales, mins] = mine;
#pragma unroll
      for (int i = 0; i < kScales; i += kBeside) {
        float* there = own + kScalesPlace + i * 32 + at.lane * kBeside;
        if constexpr (kBeside == 2)
          *reinterpret_cast<float2*>(there) = make_float2(scales[i], scales[i + 1]);
        else
          *there = scales[i];
      }
      if constexpr (kSums) {
        float upper[kGroups];
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
          upper[g] = __uint_as_float(__float_as_uint(mins[g]) & 0xffffe000u);
        float* min = own + kMinsPlace + mins_place(at.lane);
        *reinterpret_cast<float4*>(min) = make_float4(upper[0], upper[1], upper[2], upper[3]);
        *reinterpret_cast<float4*>(min + kMinsPart) = make_float4(
            mins[0] - upper[0], mins[1] - upper[1], mins[2] - upper[2], mins[3] - upper[3]);
      }
      if constexpr (kProducts) {
        uint32_t words[kScales];
        own[kMinsPlace + kScales * 32 + at.lane] = Of::min_words(words, head0, head1, row, half);
#pragma unroll
        for (int i = 0; i < kScales; ++i)
          own[kMinsPlace + i * 32 + at.lane] = __uint_as_float(words[i]);
      }
    }
    __syncwarp();
    const float4* mine =
        reinterpret_cast<const float4*>(own + kScalesPlace) + at.lane / 4 * kBeside;
    float4 minus;
    const float4* products = reinterpret_cast<const float4*>(own + kMinsPlace) + at.lane / 4;
    if constexpr (kProducts) minus = products[kScales * 8];

    quant::Raw raw[2];
    float w[2][4];
    if constexpr (!kKept) fence();
    group<0>(acc, at, raw, w, mine, products, magic, minus, w_slot, x_slot, f_slot, half);
    fence_group<0>(magic, own);
    group<1>(acc, at, raw, w, mine, products, magic, minus, w_slot, x_slot, f_slot, half);
    fence_group<1>(magic, own);
    group<2>(acc, at, raw, w, mine, products, magic, minus, w_slot, x_slot, f_slot, half);
    fence_group<2>(magic, own);
    group<3>(acc, at, raw, w, mine, products, magic, minus, w_slot, x_slot, f_slot, half);
  }

  template <int G>
  static __device__ __forceinline__ void group(Accumulators& acc, const Lane& at,
                                               quant::Raw (&raw)[2], float (&w)[2][4],
                                               const float4* mine, const float4* products,
                                               const uint4& magic, const float4& minus,
                                               uint32_t w_slot, uint32_t x_slot, uint32_t f_slot,
                                               int half) {
    // When they take the fewest registers, as ptxas has it.
    constexpr bool kMins = kSums && G == (Split == 1 ? 0 : kGroups - 1);
    constexpr int kParts = 32 / Of::kSub;
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RawSource source{at, w_slot, i};
      Of::template fetch<G>(raw[i], source, half);
      Of::template operand<G>(a[i], raw[i], at.lane);
    }
    constexpr int kFirst = kParts < kBeside ? G % 2 : 0;  // of w
    if constexpr (kBeside == 1) {
      const float4 four = mine[G * 8];
      w[0][0] = four.x, w[0][1] = four.y, w[0][2] = four.z, w[0][3] = four.w;
    } else if constexpr (kFirst == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 four = mine[G * kParts / 2 * 16 + i];
        w[0][2 * i] = four.x, w[1][2 * i] = four.y;
        w[0][2 * i + 1] = four.z, w[1][2 * i + 1] = four.w;
      }
    }
    uint32_t mins[2][4];
    if constexpr (kMins) {
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::load_matrix_x4(mins[i], at.min + i * mins_place(2) * 4);
    }
    uint32_t m[2][4];
    float less[4];
    if constexpr (kProducts) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const float4 four = products[(G * 2 + part) * 8];
        m[0][2 * part] = __float_as_uint(four.x), m[0][2 * part + 1] = __float_as_uint(four.y);
        m[1][2 * part] = __float_as_uint(four.z), m[1][2 * part + 1] = __float_as_uint(four.w);
      }
      less[0] = minus.x, less[1] = minus.y, less[2] = minus.z, less[3] = minus.w;
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (pair % (kRoomy ? 2 : 1) == 0 && pair) fence();
      uint32_t b[4];
      ptx::load_matrix_x4(b, (at.x ^ G * 32) + x_slot + pair * 16 * 128);
#pragma unroll
      for (int j = 2 * pair; j < 2 * pair + 2; ++j) {
        const uint4 bits = ptx::load_shared(at.scale + f_slot + G * kScaleRow + j * 64);
        float d[2], minus_md[2];  // of the two tokens
        d[0] = __uint_as_float(bits.x), d[1] = __uint_as_float(kPaired ? bits.y : bits.z);
        minus_md[0] = __uint_as_float(kPaired ? bits.z : bits.y);
        minus_md[1] = __uint_as_float(bits.w);
        const auto fold = [&](float (&c)[4], const int (&sum)[4], float first, float second) {
#pragma unroll
          for (int x = 0; x < 4; x += 2) {
            const float w = x == 0 ? first : second;
            float t[2], all[2];
            ptx::fma_pair<kPaired>(t, __int_as_float(sum[x]), __int_as_float(sum[x + 1]), d[0],
                                   d[1], minus_md[0], minus_md[1]);
            ptx::fma_pair<kPaired>(all, t[0], t[1], w, w, c[x], c[x + 1]);
            c[x] = all[0], c[x + 1] = all[1];
          }
        };
        const uint32_t b0 = b[j % 2 * 2], b1 = b[j % 2 * 2 + 1];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          int sum[4];
          if constexpr (kParts == 1) {
            ptx::imma_16832<Of::kSigned>(sum, a[i], b0, b1, magic);
            fold(acc[i][j], sum, w[kFirst][2 * i], w[kFirst][2 * i + 1]);
          } else {
            ptx::imma_16816<Of::kSigned>(sum, a[i][0], a[i][1], b0, magic);
            fold(acc[i][j], sum, w[0][2 * i], w[0][2 * i + 1]);
            ptx::imma_16816<Of::kSigned>(sum, a[i][2], a[i][3], b1, magic);
            fold(acc[i][j], sum, w[1][2 * i], w[1][2 * i + 1]);
          }
          if constexpr (kProducts) {
            ptx::imma_16832<false>(sum, m[i], b0, b1, magic);
            fold(acc[i][j], sum, less[2 * i], less[2 * i + 1]);
          }
        }
      }
      if constexpr (kMins) {
        if constexpr (!kRoomy) fence();
        if constexpr (kTokens > 64) fence();  // with one of them ptxas spills
        uint32_t sums[4];                     // twice the same of either eight tokens
        ptx::load_matrix_x4(sums, at.sum + f_slot + pair * 16 * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          ptx::mma_1688(acc[i][2 * pair], mins[i], sums[0], sums[1]);
          ptx::mma_1688(acc[i][2 * pair + 1], mins[i], sums[2], sums[3]);
        }
      }
    }
  }

  static __device__ void run(const Params& p) {
    const int m = *p.rows;
    const int token_tiles = (m + BM - 1) / BM, row_tiles = (p.n + BN - 1) / BN;
    if (blockIdx.x >= token_tiles * row_tiles) {
      ptx::dependency_wait();
      return;
    }
    const auto [token0, row0] = place_of<BM, BN>(blockIdx.x, token_tiles, row_tiles);
    const Place place{row0, token0, p.n - row0, m - token0, p.k / Block::kElements};

    Smem& s = spec::shared<Smem>();
    // It is only needed again at the end, long after the next __syncthreads.
    if (Split == 1 && threadIdx.x == 0)
      *reinterpret_cast<int4*>(s.sources) =
          make_int4(place.row0, place.token0, place.rows, place.tokens);
    const uint32_t x = ptx::shared_address(s.x), w = ptx::shared_address(s.w);
    const uint32_t factors = ptx::shared_address(s.factors);
    constexpr int kSlot = Split * quant::kStep;  // columns of k
    Copies copies(p, place, ptx::shared_address(s.sources) + 16);
    constexpr int kAhead = Stages - 1;
    static_assert(!kKept || Stages <= 2, "pointers are one slot ahead");
    static_assert(Copies::kTurns == 1 || Stages <= 2, "a slot is always the same half");
    // Weights, which no kernel writes, need not wait for the kernel before.
#pragma unroll
    for (int turn = 0; turn < kAhead; ++turn) {
      typename Copies::Rows rows;
      typename Copies::Sides sides;
      copies.load(rows, turn), copies.load(sides);
      if (turn * kSlot < p.k)
        copies.template copy_weights<0>(rows, sides, p, place, turn, w + turn * kW);
    }
    ptx::dependency_wait();
    typename Copies::Rows kept;  // what is copied next, if pointers are kept
    if constexpr (kKept) copies.load(kept, 0);
#pragma unroll
    for (int turn = 0; turn < kAhead; ++turn) {
      typename Copies::Rows rows;
      typename Copies::Sides sides;
      copies.load(rows, turn), copies.load(sides);
      if (turn * kSlot < p.k)
        copies.template copy_activations<0>(rows, sides, p, turn, x + turn * kX,
                                            factors + turn * kFactors);
      ptx::copy_async_commit();  // the first group has all of these weights
      if constexpr (kKept) copies.template advance<0>(kept, p);
    }

    if (threadIdx.x % 32 < kScalesPlace)
      s.own[threadIdx.x / 32][threadIdx.x % 32] = __int_as_float(kM);
    const Lane at(s);
    Accumulators acc = {};
    Scales second;
    const auto turn_of = [&](int turn, int slot, int next, int half, auto copied_half,
                             const typename Copies::Rows* held) {
      if constexpr (Stages > 1) ptx::copy_async_wait<(Stages > 1 ? Stages - 2 : 0)>();
      __syncthreads();
      constexpr int kHalf = decltype(copied_half)::value;
      // Where there is the first half of a super-block, there is the second.
      if ((kKept && kHalf == 1) || (turn + kAhead) * kSlot < p.k) {
        typename Copies::Rows rows;
        typename Copies::Sides sides;
        if (!held) copies.load(rows, (turn + kAhead) / Copies::kTurns - kHalf / 2);
        copies.load(sides);
        copies.template copy_weights<kHalf>(held ? *held : rows, sides, p, place, turn + kAhead,
                                            w + next * kW);
        copies.template copy_activations<kHalf>(held ? *held : rows, sides, p, turn + kAhead,
                                                x + next * kX, factors + next * kFactors);
      }
      if constexpr (kKept) copies.template advance<kHalf>(kept, p);
      ptx::copy_async_commit();
      if constexpr (Stages == 1) {
        ptx::copy_async_wait<0>();
        __syncthreads();
      }
      multiply(acc, s, at, slot, half, second);
    };
    const typename Copies::Rows* held = kKept ? &kept : nullptr;
    if constexpr (Copies::kTurns == 2) {
#pragma unroll 1
      for (int turn = 0; turn * kSlot < p.k; turn += 2) {
        constexpr int kNext = kKept ? (1 + kAhead) % 2 : 1 + kAhead;
        turn_of(turn, 0, kAhead, 0, std::integral_constant<int, kAhead>(), held);
        turn_of(turn + 1, kAhead, 0, 1, std::integral_constant<int, kNext>(), held);
      }
    } else {
      int slot = 0, next = kAhead;
#pragma unroll 1
      for (int turn = 0; turn * kSlot < p.k; ++turn) {
        turn_of(turn, slot, next, (turn * Split + at.part) % 2, std::integral_constant<int, 0>(),
                held);
        slot = slot + 1 == Stages ? 0 : slot + 1;
        next = next + 1 == Stages ? 0 : next + 1;
      }
    }
    const Work work(ptx::thread_again());
    if constexpr (Split > 1) {
      store_parts(p, s, work, acc, place);
    } else {
      const uint4 all = ptx::load_shared(ptx::shared_address(s.sources));
      const Place there{int(all.x), int(all.y), int(all.z), int(all.w)};
      constexpr int kCount = kTokens / 8 < 4 ? kTokens / 8 : 4;
#pragma unroll
      for (int j = 0; j < kTokens / 8; j += kCount) store<kCount>(p, work, acc, j, there);
    }
  }

  // Adds up the parts of k in order; a warp stores every Split-th fragment.
  static __device__ __forceinline__ void store_parts(const Params& p, Smem& s, const Work& at,
                                                     Accumulators& acc, const Place& place) {
    __syncthreads();
    auto& parts = s.parts();
    const int warp = at.warp, first = warp % (kWarpsM * kWarpsN);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j)
        *reinterpret_cast<float4*>(parts[warp][i * (kTokens / 8) + j][at.lane]) =
            make_float4(acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]);
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn * Split < kTokens / 8; ++turn) {
      const int j = turn * Split + at.part;
      if (j >= kTokens / 8) break;
      float sum[2][1][4] = {};
#pragma unroll
      for (int part = 0; part < Split; ++part)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int x = 0; x < 4; ++x)
            sum[i][0][x] +=
                parts[first + part * kWarpsM * kWarpsN][i * (kTokens / 8) + j][at.lane][x];
      store<1>(p, at, sum, j, place);
    }
  }

  // Fragments j ... j + Count - 1 of both halves: of each token four rows that follow each other.
  template <int Count, int Columns>
  static __device__ __forceinline__ void store(const Params& p, const Work& at,
                                               const float (&acc)[2][Columns][4], int j,
                                               const Place& place) {
    const int row = at.warp_row + at.lane / 4 * 4;
    if (row >= place.rows) return;
    const int token = at.warp_token + j * 8 + at.lane % 4 * 2;
    const int64_t first = int64_t(place.token0) * p.width + p.column + place.row0 + row;
    const auto each = [&](auto&& visit) {
#pragma unroll
      for (int x = 0; x < Count; ++x)
#pragma unroll
        for (int y = 0; y < 2; ++y) {
          const int mine = token + x * 8 + y, from = Columns == Count ? x : j + x;
          if (mine < place.tokens)
            visit(2 * x + y, first + int64_t(mine) * p.width,
                  make_float4(p.scale * acc[0][from][y], p.scale * acc[0][from][2 + y],
                              p.scale * acc[1][from][y], p.scale * acc[1][from][2 + y]));
        }
    };
    if (p.epilogue == 1) {
      bool fit = true;
      each([&](int, int64_t there, const float4& v) {
        fit &= fits_half(v.x) & fits_half(v.y) & fits_half(v.z) & fits_half(v.w);
        ptx::store_words(static_cast<__half*>(p.c) + there, ptx::pack_halves(v.x, v.y),
                         ptx::pack_halves(v.z, v.w));
      });
      if (!fit) atomicMin(p.overflow, p.site);
    } else if (p.epilogue == 0) {
      each([&](int, int64_t there, const float4& v) {
        ptx::store_floats(static_cast<float*>(p.c) + there, v);
      });
    } else {
      float4 before[2 * Count];  // all loads before the first store: they wait together
      each([&](int i, int64_t there, const float4&) {
        before[i] = *reinterpret_cast<const float4*>(static_cast<const float*>(p.c) + there);
      });
      each([&](int i, int64_t there, const float4& v) {
        const float4& b = before[i];
        ptx::store_floats(static_cast<float*>(p.c) + there,
                          make_float4(b.x + v.x, b.y + v.y, b.z + v.z, b.w + v.w));
      });
    }
  }
};
