// The same GEMM for few rows of A, as a stream of W from device memory: acc = A * W^T, fp16 in, f32
// accumulation, any n, k a multiple of 8, live rows m read from device memory. Epilogues:
// gemm_base.cuh.
//
// The operands change places: BN rows of W are wgmma's 64 rows (of one or two warpgroups), BM rows
// of A its columns, of which there may be as few as 8: no product is wasted on rows that are not
// there.
//
// Block: BN / 64 warpgroups that multiply, and one warp of which one thread keeps a ring of Stages
// slots full with TMA copies. A slot is 16 KB of W, so that nearly all shared memory of a
// multiprocessor is W on its way. Each slot has two barriers: `full` counts the bytes of its boxes,
// `empty` the warps that have finished with it.
//
// Before it waits for the kernel before it, a block reads the count of live rows and W only: it
// fills the whole ring with W while kernels before it still run. All rings together hold a small W,
// and of any W what memory delivers during a short kernel.
//
// Grid: clusters of Split blocks along x. A cluster's unit of work is one tile of C. Without Split
// the grid is persistent: a block takes every (blocks in the grid)-th unit. With Split each block
// of a cluster sums a part of k of one tile, and the grid has a cluster for each unit that there
// can be. Units past the live ones are left out, but not those of the first row of tiles: which W a
// block loads first depends on nothing that it would have to wait for.
//
// Split: each warp's 16 rows of W have an owner among the blocks. The others write their sums into
// the owner's plane `partial`, and the owner adds them to its own in the order of the ranks: the
// same bits every run.
//
// A lane holds two neighbouring rows of C in one column, lanes four apart neighbouring columns.
// Eight lanes write 32 bytes of a row of C, or have L2 add to them: nothing waits for what was
// there, and each element gets one sum. Gate and up of one result are four lanes apart: of two rows
// of W eight apart, the lane with the gates takes the first pair, its partner the second.
//
// Planes: a and w in the layout of the 128-byte swizzle, to which copies and descriptors agree.
// Outside of the matrices TMA reads zeros. Rows of A past m that its buffer has are multiplied too;
// they reach rows of acc past m only, which are not stored.
//
// Bytes: 2 * n * k from memory if m <= BM, and 2 * (BM + BN) * k per tile from L2.
//
// A row of C depends on nothing but its row of A. Rows of the table without Split give the same
// bits; so do those with the same BN and Split.
#pragma once

#include "../../core/spec.cuh"
#include "../../core/tma.cuh"
#include "../../core/wgmma.cuh"
#include "../gemm_base.cuh"

#define GEMM_STREAM_PARAMS(P)                                                          \
  P(spec::TensorMap, a)   /* [at least rows][k], boxes of BM x BK, 128-byte swizzle */ \
  P(spec::TensorMap, w)   /* [n][k], boxes of BN x BK, the same */                     \
  P(const int32_t*, rows) /* device count of live rows */                              \
  P(Out*, c)              /* [rows][n], float; gated: [rows][n / 2], half */           \
  P(int32_t*, overflow)   /* gated: lowest site out of fp16 range */                   \
  P(int32_t, n)                                                                        \
  P(int32_t, k)                                                                        \
  P(int32_t, site)                                                                     \
  P(float, scale)

#define GEMM_STREAM_PLANES(P, A)                                 \
  P(1024, __half, w, [Stages][kBoxes][BN][BK])                   \
  P(1024, __half, a, [Stages][kBoxes][BM][BK])                   \
  P(16, float4, partial, [kOwned][kPeers][kFragments][kPartial]) \
  P(8, uint64_t, full, [Stages])                                 \
  P(8, uint64_t, empty, [Stages])                                \
  P(8, uint64_t, summed)

template <Epilogue E, int BM, int BN, int Stages, int Split>
struct GemmStream {
  static constexpr int BK = 64;            // columns of k in a box
  static constexpr int kBoxes = 128 / BN;  // of each matrix in a slot, side by side along k
  static constexpr int kDepth = kBoxes * BK;
  static constexpr int kConsumers = 2 * BN;  // threads that multiply
  static constexpr int kWarps = kConsumers / 32;
  static constexpr int kThreads = kConsumers + 32, kMinBlocks = 1;
  static constexpr bool kWaitsItself = true;
  static constexpr int kSlotBytes = kBoxes * (BM + BN) * BK * sizeof(__half);
  static constexpr int kFragments = BM / 8;  // of 8 rows of A; 4 accumulators of a lane in each
  // Split: the warps that a block finishes, at most, the blocks that send it their sums, and the
  // lanes that do (without Split the plane is a token).
  static constexpr int kOwned = Split > 1 ? (kWarps + Split - 1) / Split : 1;
  static constexpr int kPeers = Split > 1 ? Split - 1 : 1;
  static constexpr int kPartial = Split > 1 ? 32 : 1;
  static constexpr bool kGated = is_gated<E>;
  using Out = OutputOf<E>;

  static_assert(BN == 64 || BN == 128);
  static_assert(Split <= kWarps, "every block of a cluster finishes a warp's rows");

  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("epilogue", name_of(E))
        .with("engine", "stream")
        .with("bm", BM)
        .with("bn", BN)
        .with("bk", BK)
        .with("boxes", kBoxes)
        .with("stages", Stages)
        .with("split", Split)
        .with("cluster", Split);
  }
  SPEC_PARAMS(GEMM_STREAM_PARAMS)
  SPEC_SMEM(GEMM_STREAM_PLANES)

  // What a block has to do; everything here is the same for all of its threads.
  struct Work {
    int steps, across, first, rank;  // slots of k per tile; column tiles; first unit

    __device__ __forceinline__ explicit Work(const Params& p)
        : steps(((p.k + kDepth - 1) / kDepth + Split - 1) / Split),
          across((p.n + BN - 1) / BN),
          first(blockIdx.x / Split),
          rank(blockIdx.x % Split) {}

    __device__ __forceinline__ int units(int m) const { return max(1, (m + BM - 1) / BM) * across; }
    __device__ __forceinline__ TilePlace tile(int unit) const {
      return {unit / across * BM, unit % across * BN};
    }
    // The column of k where a step begins. Steps past the end of k multiply zeros.
    __device__ __forceinline__ int depth(int step) const { return (rank * steps + step) * kDepth; }
    // The first slots of W, which no kernel writes, of a unit that is live whatever m is.
    __device__ __forceinline__ int early() const { return first < across ? min(steps, Stages) : 0; }
  };

  struct Ring {
    int slot = 0, phase = 0;
    __device__ __forceinline__ void advance() {
      if (++slot == Stages) {
        slot = 0;
        phase ^= 1;
      }
    }
    __device__ __forceinline__ int previous() const { return slot == 0 ? Stages - 1 : slot - 1; }
  };

  template <int Rows>
  static __device__ __forceinline__ void load(__half (&to)[kBoxes][Rows][BK],
                                              const spec::TensorMap* map, uint32_t full, int k,
                                              int row) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      ptx::tensor_load(ptx::shared_address(to[box]), map, full, k + box * BK, row);
  }

  // By the thread that copies, alone: it need not wait for the others.
  static __device__ __forceinline__ void start(const Params& p, Smem& s, const Work& work) {
    for (int slot = 0; slot < Stages; ++slot) {
      ptx::barrier_init(ptx::shared_address(&s.full[slot]), 1);
      ptx::barrier_init(ptx::shared_address(&s.empty[slot]), kWarps);
    }
    if constexpr (Split > 1) ptx::barrier_init(ptx::shared_address(&s.summed), 1);
    ptx::fence_barrier_init();
    ptx::fence_async_proxy();
#pragma unroll 1
    for (int step = 0; step < work.early(); ++step) {
      const uint32_t full = ptx::shared_address(&s.full[step]);
      ptx::barrier_expect(full, kSlotBytes);
      load(s.w[step], &p.w, full, work.depth(step), work.first * BN);
    }
    if constexpr (Split > 1) {  // the partial sums to come, before anybody may send one
      const int owned = (kWarps - work.rank + Split - 1) / Split;
      ptx::barrier_expect(ptx::shared_address(&s.summed), owned * sizeof(s.partial[0]));
    }
  }

  static __device__ __forceinline__ void produce(const Params& p, Smem& s, const Work& work,
                                                 int units) {
    Ring ring;
    int early = work.early();
    for (int unit = work.first; unit < units; unit += gridDim.x / Split) {
      const TilePlace place = work.tile(unit);
#pragma unroll 1
      for (int step = 0; step < work.steps; ++step, --early, ring.advance()) {
        const uint32_t full = ptx::shared_address(&s.full[ring.slot]);
        if (early <= 0) {
          // The first time round, the phase before the first counts as over.
          ptx::barrier_wait(ptx::shared_address(&s.empty[ring.slot]), ring.phase ^ 1);
          ptx::barrier_expect(full, kSlotBytes);
          load(s.w[ring.slot], &p.w, full, work.depth(step), place.column);
        }
        load(s.a[ring.slot], &p.a, full, work.depth(step), place.row);
      }
    }
  }

  static __device__ __forceinline__ void release(Smem& s, int slot) {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::shared_address(&s.empty[slot]));
  }

  using Accumulators = float[BM / 2];

  // Starts the product of the ring's slot; returns when the one before it is over, and releases
  // that one's slot.
  static __device__ __forceinline__ void multiply(Smem& s, Ring& ring, Accumulators& d,
                                                  int warpgroup, bool first) {
    ptx::barrier_wait(ptx::shared_address(&s.full[ring.slot]), ring.phase);
    ptx::wgmma_fence();
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const uint64_t w =
          ptx::wgmma_operand(ptx::shared_address(s.w[ring.slot][box][warpgroup * 64]));
      const uint64_t a = ptx::wgmma_operand(ptx::shared_address(s.a[ring.slot][box]));
#pragma unroll
      for (int i = 0; i < BK / 16; ++i)
        ptx::Wgmma<BM>::mma(d, w + 2 * i, a + 2 * i, !(first && box == 0 && i == 0));
    }
    ptx::wgmma_commit();
    if (!first) {
      ptx::wgmma_wait<1>();
      release(s, ring.previous());
    }
    ring.advance();
  }

  // Split: this warp's sums to its rows' owner, or as the owner those of all ranks into d.
  static __device__ __forceinline__ void gather(Smem& s, Accumulators& d, int warp, int rank) {
    const int lane = threadIdx.x % 32, owner = warp % Split;
    ptx::cluster_wait();  // every block of the cluster has initialised its barriers
    if (owner != rank) {
      const int sender = rank < owner ? rank : rank - 1;
      const uint32_t plane = ptx::shared_address(&s.partial[warp / Split][sender][0][lane]);
      const uint32_t to = ptx::map_to_rank(plane, owner);
      const uint32_t summed = ptx::map_to_rank(ptx::shared_address(&s.summed), owner);
#pragma unroll
      for (int j = 0; j < kFragments; ++j)
        ptx::store_async(to + j * sizeof(s.partial[0][0][0]), summed, d[j * 4], d[j * 4 + 1],
                         d[j * 4 + 2], d[j * 4 + 3]);
      return;
    }
    ptx::barrier_wait_cluster(ptx::shared_address(&s.summed), 0);
#pragma unroll
    for (int sender = 0; sender < kPeers; ++sender)
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        const float4 v = s.partial[warp / Split][sender][j][lane];
        d[j * 4] += v.x;
        d[j * 4 + 1] += v.y;
        d[j * 4 + 2] += v.z;
        d[j * 4 + 3] += v.w;
      }
  }

  // f32 and add: visits the place in C of each of a lane's accumulators that has one. `place`: the
  // warp's first row and column.
  template <class Visit>
  static __device__ __forceinline__ void each(const Params& p, int m, TilePlace place,
                                              Visit&& visit) {
    const int lane = threadIdx.x % 32;
    const int row = place.row + lane % 4 * 2, column = place.column + lane / 4;
    Out* const c = p.c + int64_t(row) * p.n + column;
#pragma unroll
    for (int i = 0; i < BM / 2; ++i) {
      const int down = i / 4 * 8 + i % 2, right = i / 2 % 2 * 8;
      if (row + down < m && column + right < p.n) visit(i, c + int64_t(down) * p.n + right);
    }
  }

  static __device__ __forceinline__ void store_gated(const Params& p, const Accumulators& d, int m,
                                                     TilePlace place) {
    const int lane = threadIdx.x % 32;
    const bool up_here = lane & 4, second = lane & 8;
    const int row = place.row + lane % 4 * 2;
    const int column = place.column / 2 + (up_here ? 4 : 0) + lane / 16 * 2;
    Out* const c = p.c + int64_t(row + second) * (p.n / 2) + column;
    bool fit = true;
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
      float value[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = d[j * 4 + i], high = d[j * 4 + 2 + i];
        const float theirs = __shfl_xor_sync(0xffffffffu, up_here ? low : high, 4);
        value[i] = gated<E>(up_here ? theirs : low, up_here ? high : theirs) * p.scale;
        fit &= fits_half(value[i]) || row + j * 8 + i >= m;
      }
      // Lanes eight apart have neighbouring columns of the same two rows: one writes the first row,
      // its partner the second.
      const uint32_t mine = ptx::pack_halves(value[0], value[1]);
      const uint32_t theirs = __shfl_xor_sync(0xffffffffu, mine, 8);
      const uint32_t word =
          second ? __byte_perm(theirs, mine, 0x7632) : __byte_perm(mine, theirs, 0x5410);
      if (row + second + j * 8 < m && place.column < p.n)
        *reinterpret_cast<uint32_t*>(c + int64_t(j) * 8 * (p.n / 2)) = word;
    }
    if (!fit) atomicMin(p.overflow, p.site);
  }

  static __device__ __forceinline__ void consume(const Params& p, Smem& s, const Work& work, int m,
                                                 int units) {
    const int warp = threadIdx.x / 32, warpgroup = warp / 4;
    Ring ring;
    Accumulators d;
    for (int unit = work.first; unit < units; unit += gridDim.x / Split) {
      TilePlace place = work.tile(unit);
      place.column += warp * 16;
      multiply(s, ring, d, warpgroup, true);
#pragma unroll 1
      for (int step = 1; step < work.steps; ++step) multiply(s, ring, d, warpgroup, false);
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(d);
      release(s, ring.previous());
      if constexpr (Split > 1) {
        gather(s, d, warp, work.rank);
        if (warp % Split != work.rank) return;  // it was the only unit
      }
      if constexpr (kGated)
        store_gated(p, d, m, place);
      else
        each(p, m, place, [&](int i, Out* there) {
          if constexpr (E == Epilogue::add)
            ptx::add_float(there, p.scale * d[i]);
          else
            *there = p.scale * d[i];
        });
    }
  }

  static __device__ __forceinline__ void run(const Params& p) {
    const int m = *p.rows;  // on its way while the first copies start
    Smem& s = spec::shared<Smem>();
    const Work work(p);
    if (threadIdx.x == kConsumers) start(p, s, work);
    __syncthreads();
    const int units = work.units(m);
    if (work.first >= units) {  // the whole cluster does
      ptx::dependency_wait();
      return;
    }
    if constexpr (Split > 1) ptx::cluster_arrive();  // the wait is where the sums go out
    ptx::dependency_wait();
    if (threadIdx.x < kConsumers) {
      consume(p, s, work, m, units);
    } else {
      if (threadIdx.x == kConsumers) produce(p, s, work, units);
      if constexpr (Split > 1) {
        __syncwarp();
        ptx::cluster_wait();
      }
    }
  }
};
