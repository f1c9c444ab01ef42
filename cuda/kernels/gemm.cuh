// Tensor-core GEMM: acc[r][j] = sum over i of A[r][i] * W[j][i], fp16 in, f32 accumulation, any n,
// k a multiple of 8, live rows m read from device memory, through mma.sync. Epilogues and the walk
// over the tiles: gemm_base.cuh.
//
// Grid: x = row tiles * column tiles for the most rows there can be; blocks past the live tiles
// return.
//
// Block: WarpsM x WarpsN warps, each with a (BM / WarpsM) x (BN / WarpsN) accumulator in registers.
//
// Planes: a ring of Stages slots, each BM rows of A and BN rows of W by BK columns, filled by
// cp.async. Rows past m or n and columns past k become zeros; nothing outside A and W is addressed.
//
// Before it waits for the kernel before it, a block reads the count of live rows and W only.
//
// Bytes: (BM + BN) * k * 2 per tile from L2, for 2 * BM * BN * k flops.
//
// Every accumulator is a chain of m16n8k16 products in ascending k, whatever the row of the table:
// all of this engine's rows give the same bits, and a row of C depends on nothing but its row of A.
#pragma once

#include "../core/spec.cuh"
#include "gemm_base.cuh"

#define GEMM_PARAMS(P)                                                       \
  P(const int32_t*, rows) /* device count of live rows */                    \
  P(const __half*, a)     /* [rows][k], 16-byte aligned like w and c */      \
  P(const __half*, w)     /* [n][k] */                                       \
  P(Out*, c)              /* [rows][n], float; gated: [rows][n / 2], half */ \
  P(int32_t*, overflow)   /* gated: lowest site out of fp16 range */         \
  P(int32_t, n)                                                              \
  P(int32_t, k)                                                              \
  P(int32_t, site)                                                           \
  P(float, scale)

#define GEMM_PLANES(P, A)              \
  P(1024, __half, a, [Stages][BM][BK]) \
  P(1024, __half, w, [Stages][BN][BK])

template <Epilogue E, int BM, int BN, int BK, int Stages, int WarpsM, int WarpsN, int Blocks>
struct Gemm {
  static constexpr int kThreads = 32 * WarpsM * WarpsN, kMinBlocks = Blocks;
  static constexpr bool kWaitsItself = true;
  static constexpr int kWarpRows = BM / WarpsM, kWarpColumns = BN / WarpsN;
  static constexpr int kChunks = BK / 8;   // 16-byte chunks of a tile row: the unit of every copy
  static constexpr int kSlices = BK / 16;  // mma depths of a stage
  static constexpr int kRowBytes = BK * sizeof(__half);
  // Consecutive columns that a lane holds (see `column`): 16 bytes of output if the warp has them.
  static constexpr bool kGated = is_gated<E>;
  static constexpr int kMost = kGated ? 16 : is_half<E> ? 8 : 4;
  static constexpr int kRun = kWarpColumns < 4 * kMost ? kWarpColumns / 4 : kMost;
  static constexpr int kRunOut = kGated ? kRun / 2 : kRun;
  using Out = OutputOf<E>;

  static_assert(kSlices % 2 == 0, "fragments alternate between two buffers");
  static_assert(kWarpRows % 16 == 0 && kWarpColumns % (4 * kRun) == 0);

  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("epilogue", name_of(E))
        .with("engine", "mma")
        .with("bm", BM)
        .with("bn", BN)
        .with("bk", BK)
        .with("stages", Stages);
  }
  SPEC_PARAMS(GEMM_PARAMS)
  SPEC_SMEM(GEMM_PLANES)

  // The mma gives lane l columns 2 * (l % 4) and + 1 of each 8-wide fragment. Which rows of W feed
  // those columns is free: column i of the warp's j-th fragment is this column of its tile, so that
  // kRun / 2 fragments give a lane kRun consecutive columns.
  static constexpr __host__ __device__ int column(int j, int i) {
    return j / (kRun / 2) * 4 * kRun + i / 2 * kRun + j % (kRun / 2) * 2 + i % 2;
  }

  // Byte offset of a chunk in a tile. ldmatrix reads one chunk column of eight rows at a time: for
  // A (Run = 2) eight consecutive rows, for W (Run = kRun) columns 0 to 7 of a fragment. The
  // exclusive or with the row's place among its eight spreads them over all banks. Each bit of the
  // offset is an exclusive or of bits of row and chunk, so a step in either is one operation.
  template <int Run>
  static constexpr __host__ __device__ uint32_t place(uint32_t row, uint32_t chunk) {
    const uint32_t i = row / Run % 4 * 2 + row % 2;
    return row * kRowBytes + (chunk ^ (kRowBytes == 64 ? i / 2 : i)) * 16;
  }

  // A thread's share of a tile's copy: its chunk of every kPass-th row.
  template <int Rows, int Run>
  struct Share {
    static constexpr int kPass = kThreads / kChunks;
    static constexpr int kCopies = Rows / kPass;
    static_assert(kThreads % kChunks == 0 && Rows % kPass == 0);

    const __half* source;      // its chunk of the tile's first row; moves along k
    uint32_t offset[kCopies];  // elements from there to its rows; those past the end give the last
    int rows;                  // rows that the matrix has from its first row on
    uint32_t target;           // shared address of its first chunk in slot 0

    __device__ Share(const __half* matrix, int row0, int end, int k, int chunk, uint32_t plane) {
      const int first = threadIdx.x / kChunks;
      rows = end - row0 - first;
      source = matrix + int64_t(row0) * k + min(chunk, k / 8 - 1) * 8;
      target = plane + place<Run>(first, chunk);
#pragma unroll
      for (int i = 0; i < kCopies; ++i)
        offset[i] = (first + min(i * kPass, rows - 1)) * uint32_t(k);
    }

    __device__ void copy(uint32_t slot, bool live) const {
      const int present = live ? rows : 0;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        constexpr uint32_t kInRow = kRowBytes - 1;
        const uint32_t there = place<Run>(i * kPass, 0);
        const uint32_t address =
            (target ^ (there & kInRow)) + (there & ~kInRow) + slot * Rows * kRowBytes;
        ptx::copy_async_16(address, source + offset[i], i * kPass < present ? 16 : 0);
      }
    }
  };

  struct Fragments {
    uint32_t a[kWarpRows / 16][4], w[kWarpColumns / 16][4];

    // The addresses are the lane's, in slice 0 of a slot.
    __device__ void load(uint32_t a_address, uint32_t w_address, int slice) {
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i)
        ptx::load_matrix_x4(a[i], (a_address ^ slice * 32) + place<2>(16 * i, 0));
#pragma unroll
      for (int j = 0; j < kWarpColumns / 16; ++j)
        ptx::load_matrix_x4(w[j], (w_address ^ slice * 32) + column(2 * j, 0) * kRowBytes);
    }
  };
  using Accumulators = float[kWarpRows / 16][kWarpColumns / 8][4];

  static __device__ void run(const Params& p) {
    const int m = *p.rows;
    const int row_tiles = (m + BM - 1) / BM, column_tiles = (p.n + BN - 1) / BN;
    if (blockIdx.x >= row_tiles * column_tiles) {
      ptx::dependency_wait();
      return;
    }
    const auto [row0, column0] = place_of<BM, BN>(blockIdx.x, row_tiles, column_tiles);

    Smem& s = spec::shared<Smem>();
    const int chunks = p.k / 8, steps = (p.k + BK - 1) / BK;
    int chunk = threadIdx.x % kChunks;  // of the next step to copy
    Share<BM, 2> a(p.a, row0, m, p.k, chunk, ptx::shared_address(s.a));
    Share<BN, kRun> w(p.w, column0, p.n, p.k, chunk, ptx::shared_address(s.w));
    // Copies a matrix's share of the step that is `ahead` of the next one to copy.
    const auto fill = [&](auto& share, int slot, int ahead) {
      const int at = chunk + ahead * kChunks;
      share.copy(slot, at < chunks);
      share.source += at + kChunks < chunks ? BK : 0;
    };
    // W, which no kernel writes, need not wait for the kernel before.
#pragma unroll
    for (int stage = 0; stage < Stages - 1; ++stage)
      if (stage < steps) fill(w, stage, stage);
    ptx::dependency_wait();
#pragma unroll
    for (int stage = 0; stage < Stages - 1; ++stage) {
      if (stage < steps) fill(a, stage, stage);
      ptx::copy_async_commit();  // the first group has all of these W
    }
    chunk += min(steps, Stages - 1) * kChunks;
    int filled = Stages - 1;
    auto fill_next = [&] {
      fill(a, filled, 0);
      fill(w, filled, 0);
      filled = filled + 1 == Stages ? 0 : filled + 1;
      chunk += kChunks;
    };

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_row = warp / WarpsN * kWarpRows, warp_column = warp % WarpsN * kWarpColumns;
    const uint32_t a_lane = ptx::shared_address(s.a) + place<2>(warp_row + lane % 16, lane / 16);
    const uint32_t w_lane = ptx::shared_address(s.w) +
                            place<kRun>(warp_column + column(lane / 16, lane % 8), lane / 8 % 2);
    Accumulators c = {};
    Fragments fragments[2];
    ptx::copy_async_wait<Stages - 2>();
    __syncthreads();
    fragments[0].load(a_lane, w_lane, 0);
    int slot = 0;
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        if (slice == kSlices - 1) {  // this slot has been read; the next slice is in the next slot
          ptx::copy_async_wait<Stages - 2>();
          __syncthreads();
          slot = slot + 1 == Stages ? 0 : slot + 1;
        }
        fragments[(slice + 1) % 2].load(a_lane + slot * BM * kRowBytes,
                                        w_lane + slot * BN * kRowBytes, (slice + 1) % kSlices);
        if (slice == 0) {
          if (step + Stages - 1 < steps) fill_next();
          ptx::copy_async_commit();
        }
        multiply(c, fragments[slice % 2]);
      }
    }
    // Only logits have rows of any length (odd vocabularies); other rows are later GEMMs' inputs.
    if (E != Epilogue::f32 || p.n % kRunOut == 0)
      store<kRunOut>(p, c, m, row0 + warp_row, column0 + warp_column);
    else
      store<1>(p, c, m, row0 + warp_row, column0 + warp_column);
  }

  static __device__ void multiply(Accumulators& c, const Fragments& f) {
#pragma unroll
    for (int i = 0; i < kWarpRows / 16; ++i)
#pragma unroll
      for (int j = 0; j < kWarpColumns / 8; ++j)
        ptx::mma_16816(c[i][j], f.a[i], f.w[j / 2][j % 2 * 2], f.w[j / 2][j % 2 * 2 + 1]);
  }

  // Each lane stores kLaneOut outputs per row of its fragments, `Width` of them at a time.
  template <int Width>
  static __device__ void store(const Params& p, const Accumulators& c, int m, int row0,
                               int column0) {
    struct alignas(Width * sizeof(Out)) Piece {
      Out out[Width];
    };
    constexpr int kLaneOut = kWarpColumns / 4 * kRunOut / kRun;
    const int columns = p.n * kRunOut / kRun;
    const int lane = threadIdx.x % 32;
    row0 += lane / 4;
    column0 = column0 * kRunOut / kRun + lane % 4 * kRunOut;
    bool fit = true;
#pragma unroll
    for (int i = 0; i < kWarpRows / 16; ++i) {
      const auto each = [&](auto&& visit) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int x = 0; x < kLaneOut; x += Width) {
            const int row = row0 + i * 16 + half * 8;
            const int column = column0 + x / kRunOut * 4 * kRunOut + x % kRunOut;
            if (row < m && column < columns)
              visit(half, x, reinterpret_cast<Piece*>(p.c + int64_t(row) * columns + column));
          }
      };
      Piece piece[2][kLaneOut / Width];
      if (E == Epilogue::add)  // all loads before the first store: they wait together
        each([&](int half, int x, const Piece* there) { piece[half][x / Width] = *there; });
      each([&](int half, int x, Piece* there) {
        Piece& mine = piece[half][x / Width];
#pragma unroll
        for (int y = 0; y < Width; ++y) finish(p, c[i], half, x + y, mine.out[y], fit);
        *there = mine;
      });
    }
    if (!fit) atomicMin(p.overflow, p.site);
  }

  // Output x of a lane in row `half` of the two rows that it has in each fragment.
  static __device__ void finish(const Params& p, const float (&c)[kWarpColumns / 8][4], int half,
                                int x, Out& out, bool& fit) {
    if constexpr (kGated) {
      const float value = gated<E>(c[x][half * 2], c[x][half * 2 + 1]) * p.scale;
      fit &= fits_half(value);
      out = __float2half_rn(value);
    } else {
      const float scaled = p.scale * c[x / 2][half * 2 + x % 2];
      if constexpr (is_half<E>) {
        fit &= fits_half(scaled);
        out = __float2half_rn(scaled);
      } else {
        out = E == Epilogue::add ? out + scaled : scaled;
      }
    }
  }
};
