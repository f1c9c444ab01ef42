// The same GEMM through Hopper's own instructions: acc = A * W^T, fp16 in, f32 accumulation, any n,
// k a multiple of 8, live rows m read from device memory. What becomes of a tile stands in
// gemm_wgmma_store.cuh and gemm_wgmma_qkv.cuh.
//
// Block: three warpgroups. One thread of the first keeps a ring of Stages slots full with TMA
// copies; the other two hold rows 0-63 and 64-127 of a BM x BN tile in registers and multiply from
// shared memory with wgmma, a slot (BK columns of k) at a time. Each slot has two barriers: `full`
// counts the bytes of its two boxes, `empty` the warps that have finished with it.
//
// Grid: clusters of Share * Split blocks along x. A cluster's unit of work is one tile, or with
// Share = 2 two tiles one above the other, for which each block loads half of the slot of W into
// both blocks. Without Split the grid is persistent, and gemm_division.cuh says what a cluster
// takes. With Split each block of a cluster sums a part of k of one tile, and the grid has a
// cluster for each unit that there can be. Clusters without work return.
//
// Split: each warp's 16 rows have an owner among the blocks. The others write their sums into the
// owner's shared memory, which no copy uses any more (plane `partial`), and the owner adds them in
// the order of the ranks: the same bits every run.
//
// Shared units (gemm_division.cuh): a block that has some steps of a tile, but not the first,
// leaves its sums in `sums`, and each of its warps raises its flag in `raised`. The same warp of
// the owner's block waits for those of all others, one after the other, adds their sums in that
// order, and lowers the flags for the next launch: the same bits every run.
//
// Before it waits for the kernel before it, a block reads the count of live rows and W only.
//
// Planes: a and w in the layout of the 128-byte swizzle, to which copies and descriptors agree.
// Outside of the matrices TMA reads zeros. Rows of A past m that its buffer has are multiplied too;
// they reach rows of acc past m only, which are not stored.
//
// Bytes: (BM + BN / Share) * k * 2 per tile from L2, for 2 * BM * BN * k flops. wgmma takes about
// BN * 4.4 cycles per slot, L2 delivers 40 to 53 bytes a cycle: from BN = 160 on wgmma is the
// limit.
//
// Rows without Split give the same bits, and a row of C depends on nothing but its row of A, where
// parts = 1. Where units are shared, sums are in an order that depends on the live rows, the tile
// and the grid.
#pragma once

#include "../../core/spec.cuh"
#include "../../core/tma.cuh"
#include "../../core/wgmma.cuh"
#include "gemm_division.cuh"
#include "gemm_wgmma_qkv.cuh"
#include "gemm_wgmma_store.cuh"

#define GEMM_WGMMA_PLANES(P, A)        \
  P(1024, __half, a, [Stages][BM][BK]) \
  P(1024, __half, w, [Stages][BN][BK]) \
  P(8, uint64_t, full, [Stages])       \
  P(8, uint64_t, empty, [Stages])      \
  P(8, uint64_t, drained)              \
  P(8, uint64_t, summed)               \
  P(4, Work, work)                     \
  A(w, float4, partial, [kOwned][kPeers][kFragments][32])

template <Epilogue E, int BN, int Stages, int Share, int Split>
struct GemmWgmma : GemmWgmmaStore<E, BN> {
  using Store = GemmWgmmaStore<E, BN>;
  using Params = typename Store::Params;
  using Accumulators = typename Store::Accumulators;
  static constexpr int BM = 128, BK = 64;
  static constexpr int kThreads = 384, kMinBlocks = 1;
  static constexpr bool kWaitsItself = true;
  static constexpr int kWarpgroup = 128, kWarps = 8;  // threads of a warpgroup; consuming warps
  static constexpr int kCluster = Share * Split;
  static constexpr int kUnitRows = BM * Share;
  static constexpr int kSlotBytes = (BM + BN) * BK * sizeof(__half);
  static constexpr int kFragments = Store::kFragments;
  // Split: the warps that a block finishes, at most, and the blocks that send it their sums.
  static constexpr int kOwned = Split > 1 ? (kWarps + Split - 1) / Split : 1;
  static constexpr int kPeers = Split > 1 ? Split - 1 : 1;
  static constexpr bool kDefers = is_half<E>;

  static_assert(Share == 1 || (Share == 2 && Split == 1));
  static_assert(BN % 16 == 0 && BN <= 256);

  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("epilogue", name_of(E))
        .with("engine", "wgmma")
        .with("bm", BM)
        .with("bn", BN)
        .with("bk", BK)
        .with("stages", Stages)
        .with("share", Share)
        .with("split", Split)
        .with("cluster", kCluster);
  }
  // What a block has to do. It lies in shared memory: the accumulators leave few registers.
  struct Work {
    Division division;
    int m, down, across;  // live rows; units one above the other and side by side
    int rank;

    __device__ __forceinline__ Work(const Params& p, int live)
        : Work(p, live, (live + kUnitRows - 1) / kUnitRows, (p.n + BN - 1) / BN) {}
    __device__ __forceinline__ Work(const Params& p, int live, int down, int across)
        : division(down * across, ((p.k + BK - 1) / BK + Split - 1) / Split, blockIdx.x / kCluster,
                   gridDim.x / kCluster, Split > 1 ? 1 : p.parts),
          m(live),
          down(down),
          across(across),
          rank(blockIdx.x % kCluster) {}

    // This block's tile of a unit.
    __device__ __forceinline__ TilePlace tile(int unit) const {
      TilePlace place = place_of<kUnitRows, BN>(unit, down, across);
      if constexpr (Share > 1) place.row += rank * BM;
      return place;
    }
    // Of k, where a step of this block begins. Steps past the end of k multiply zeros.
    __device__ __forceinline__ int column(int step) const {
      return (Split > 1 ? rank * division.steps + step : step) * BK;
    }
  };

  SPEC_SMEM(GEMM_WGMMA_PLANES)
  static_assert(sizeof(typename Smem::partial_plane) <= sizeof(Smem::w));

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

  static __device__ __forceinline__ void load_w(const Params& p, Smem& s, int slot, int column,
                                                int k, int rank) {
    const uint32_t to = ptx::shared_address(s.w[slot]), full = ptx::shared_address(&s.full[slot]);
    if constexpr (Share == 1) {
      ptx::tensor_load(to, &p.w, full, k, column);
    } else {
      const int part = rank * (BN / Share);
      ptx::tensor_load_multicast(to + part * BK * sizeof(__half), &p.w, full, k, column + part,
                                 (1 << Share) - 1);
    }
  }

  // The first slots of W, which no kernel writes: they need not wait for the kernel before.
  static __device__ __forceinline__ int early_steps(const Division& division) {
    const int unit = division.start();
    return min(division.last(unit) - division.first(unit), Stages);
  }
  static __device__ __forceinline__ void load_early(const Params& p, Smem& s) {
    const Work work = s.work;
    const int unit = work.division.start(), first = work.division.first(unit);
    const int column = work.tile(unit).column, count = early_steps(work.division);
    for (int i = 0; i < count; ++i) {
      ptx::barrier_expect(ptx::shared_address(&s.full[i]), kSlotBytes);
      load_w(p, s, i, column, work.column(first + i), work.rank);
    }
  }

  static __device__ __forceinline__ void produce(const Params& p, Smem& s) {
    const Work work = s.work;
    const Division& division = work.division;
    Ring ring;
    int early = early_steps(division);
    for (int unit = division.start(); unit < division.units; unit = division.next(unit)) {
      const TilePlace place = work.tile(unit);
      const int last = division.last(unit);
      for (int step = division.first(unit); step < last; ++step, --early, ring.advance()) {
        const int k = work.column(step);
        const uint32_t full = ptx::shared_address(&s.full[ring.slot]);
        if (early <= 0) {
          // The first time round, the phase before the first counts as over.
          ptx::barrier_wait(ptx::shared_address(&s.empty[ring.slot]), ring.phase ^ 1);
          ptx::barrier_expect(full, kSlotBytes);
        }
        ptx::tensor_load(ptx::shared_address(s.a[ring.slot]), &p.a, full, k, place.row);
        if (early <= 0) load_w(p, s, ring.slot, place.column, k, work.rank);
      }
    }
  }

  // A slot goes back to every block whose copies fill it.
  static __device__ __forceinline__ void release(Smem& s, int slot) {
    const int lane = threadIdx.x % 32;
    const uint32_t empty = ptx::shared_address(&s.empty[slot]);
    if constexpr (Share == 1) {
      if (lane == 0) ptx::barrier_arrive(empty);
    } else {
      if (lane < Share) ptx::barrier_arrive_remote(ptx::map_to_rank(empty, lane));
    }
  }

  // Starts the product of the ring's slot; returns when the one before it is over, and releases
  // that one's slot.
  static __device__ __forceinline__ void multiply(Smem& s, Ring& ring, Accumulators& d,
                                                  int warpgroup, bool first) {
    ptx::barrier_wait(ptx::shared_address(&s.full[ring.slot]), ring.phase);
    const uint64_t a = ptx::wgmma_operand(ptx::shared_address(s.a[ring.slot][warpgroup * BM / 2]));
    const uint64_t w = ptx::wgmma_operand(ptx::shared_address(s.w[ring.slot]));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < BK / 16; ++i)
      ptx::Wgmma<BN>::mma(d, a + 2 * i, w + 2 * i, !(first && i == 0));
    ptx::wgmma_commit();
    if (!first) {
      ptx::wgmma_wait<1>();
      release(s, ring.previous());
    }
    ring.advance();
  }

  // The first of a tile's `steps`, two groups of the tile before written under each.
  template <int G, class Halves>
  static __device__ __forceinline__ void multiply_and_store(const Params& p, Smem& s, Ring& ring,
                                                            Accumulators& d, int warpgroup,
                                                            int steps, int m, const Halves& out,
                                                            bool pending) {
    if constexpr (G < Store::kGroups) {
      if (G / 2 < steps) multiply(s, ring, d, warpgroup, G == 0);
      if (pending) {
        Store::template store_group<G>(p, out, m);
        if constexpr (G + 1 < Store::kGroups) Store::template store_group<G + 1>(p, out, m);
      }
      multiply_and_store<G + 2>(p, s, ring, d, warpgroup, steps, m, out, pending);
    }
  }

  // Split: this warp's sums to its rows' owner, or as the owner those of all ranks into d.
  static __device__ __forceinline__ void gather(Smem& s, Accumulators& d, int warp, int rank) {
    const int lane = threadIdx.x % 32, owner = warp % Split;
    ptx::cluster_wait();  // every block of the cluster has initialised its barriers
    // This warpgroup is past its last product: the owners may have its block's shared memory.
    if (lane < Split && lane != rank)
      ptx::barrier_arrive_remote(ptx::map_to_rank(ptx::shared_address(&s.drained), lane));
    if (owner != rank) {
      ptx::barrier_wait(ptx::shared_address(&s.drained), 0);
      const int sender = rank < owner ? rank : rank - 1;
      const uint32_t plane = ptx::shared_address(&s.partial()[warp / Split][sender][0][lane]);
      const uint32_t to = ptx::map_to_rank(plane, owner);
      const uint32_t summed = ptx::map_to_rank(ptx::shared_address(&s.summed), owner);
#pragma unroll
      for (int j = 0; j < kFragments; ++j)
        ptx::store_async(to + j * sizeof(s.partial()[0][0][0]), summed, d[j * 4], d[j * 4 + 1],
                         d[j * 4 + 2], d[j * 4 + 3]);
      return;
    }
    ptx::barrier_wait_cluster(ptx::shared_address(&s.summed), 0);
#pragma unroll
    for (int sender = 0; sender < kPeers; ++sender)
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        const float4 v = s.partial()[warp / Split][sender][j][lane];
        d[j * 4] += v.x;
        d[j * 4 + 1] += v.y;
        d[j * 4 + 2] += v.z;
        d[j * 4 + 3] += v.w;
      }
  }

  // Shared units: where a warp of a block leaves its sums, a lane's 16 bytes, and its flag.
  static __device__ __forceinline__ float* sums_of(const Params& p, int block, int warp) {
    return p.sums + ((int64_t(block) * kWarps + warp) * kFragments * 32 + threadIdx.x % 32) * 4;
  }
  static __device__ __forceinline__ int32_t* flag_of(const Params& p, int block, int warp) {
    return p.raised + block * kWarps + warp;
  }
  enum Flag { kLowered, kMoreFollow, kLast };

  // This warp's sums, for the tile's owner.
  static __device__ __forceinline__ void leave(const Params& p, const Accumulators& d, int warp,
                                               bool last) {
    float* const to = sums_of(p, blockIdx.x, warp);
#pragma unroll
    for (int j = 0; j < kFragments; ++j)
      ptx::store_floats(to + j * 128, {d[j * 4], d[j * 4 + 1], d[j * 4 + 2], d[j * 4 + 3]});
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      ptx::store_release(flag_of(p, blockIdx.x, warp), last ? kLast : kMoreFollow);
  }

  // As the owner: adds to this warp's sums what the blocks with further steps leave.
  static __device__ __forceinline__ void collect(const Params& p, Accumulators& d, int warp) {
    int block = blockIdx.x, flag;
    do {
      block -= kCluster;
      if (threadIdx.x % 32 == 0) {
        do flag = ptx::load_acquire(flag_of(p, block, warp));
        while (flag == kLowered);
        *flag_of(p, block, warp) = kLowered;
      }
      flag = __shfl_sync(0xffffffffu, flag, 0);
      const float4* const from = reinterpret_cast<float4*>(sums_of(p, block, warp));
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        const float4 v = __ldcg(from + j * 32);
        d[j * 4] += v.x;
        d[j * 4 + 1] += v.y;
        d[j * 4 + 2] += v.z;
        d[j * 4 + 3] += v.w;
      }
    } while (flag != kLast);
  }

  // After the last step of a segment: whether the tile is this block's, and then its sums are
  // whole.
  static __device__ __forceinline__ bool complete(const Params& p, const Division& division,
                                                  int unit, Accumulators& d, int warp) {
    const bool last = division.last(unit) == division.steps;
    if (division.first(unit)) {
      leave(p, d, warp, last);
      return false;
    }
    if (!last) collect(p, d, warp);
    return true;
  }

  static __device__ __forceinline__ void consume(const Params& p, Smem& s, const Work& work) {
    const int warp = threadIdx.x / 32 - kWarpgroup / 32, warpgroup = warp / 4;
    const auto rows_of_warp = [&](int unit) {
      TilePlace place = work.tile(unit);
      place.row += warp * 16;
      return place;
    };
    const Division& division = work.division;
    const int m = work.m;
    Ring ring;
    Accumulators d;
    if constexpr (Split > 1) {
      const int rank = work.rank, steps = division.steps;
      const bool owner = warp % Split == rank;
      const TilePlace place = rows_of_warp(division.cluster);
      typename Store::Ahead ahead(p, owner ? m : 0, place);
      multiply(s, ring, d, warpgroup, true);
      ahead.follow(p, place);
      for (int step = 1; step < steps; ++step) multiply(s, ring, d, warpgroup, false);
      ptx::wgmma_wait<0>();
      ptx::named_barrier<kWarpgroup>(1 + warpgroup);
      gather(s, d, warp, rank);
      if (owner) Store::finish(p, d, m, place, ahead);
    } else if constexpr (kDefers) {
      typename Store::Halves out;
      bool pending = false;
      for (int unit = division.start(); unit < division.units; unit = division.next(unit)) {
        const int steps = division.last(unit) - division.first(unit);
        multiply_and_store<0>(p, s, ring, d, warpgroup, steps, m, out, pending);
        for (int step = (Store::kGroups + 1) / 2; step < steps; ++step)
          multiply(s, ring, d, warpgroup, false);
        ptx::wgmma_wait<0>();
        release(s, ring.previous());
        pending = complete(p, division, unit, d, warp);
        if (pending) Store::round(p, d, m, rows_of_warp(unit), out);
      }
      if (pending) Store::template store_from<0>(p, out, m);
    } else {
      for (int unit = division.start(); unit < division.units; unit = division.next(unit)) {
        const TilePlace place = rows_of_warp(unit);
        typename Store::Ahead ahead(p, division.first(unit) ? 0 : m, place);
        multiply(s, ring, d, warpgroup, true);
        ahead.follow(p, place);
        const int steps = division.last(unit) - division.first(unit);
        for (int step = 1; step < steps; ++step) multiply(s, ring, d, warpgroup, false);
        ptx::wgmma_wait<0>();
        release(s, ring.previous());
        if (complete(p, division, unit, d, warp)) Store::finish(p, d, m, place, ahead);
      }
    }
  }

  static __device__ __forceinline__ void run(const Params& p) {
    Smem& s = spec::shared<Smem>();
    if (threadIdx.x < Stages) {
      ptx::barrier_init(ptx::shared_address(&s.full[threadIdx.x]), 1);
      ptx::barrier_init(ptx::shared_address(&s.empty[threadIdx.x]), kWarps * Share);
      if (Split > 1 && threadIdx.x == 0) {
        ptx::barrier_init(ptx::shared_address(&s.drained), kWarps * kPeers);
        ptx::barrier_init(ptx::shared_address(&s.summed), 1);
      }
      ptx::fence_barrier_init();
      ptx::fence_async_proxy();
    } else if (threadIdx.x == 32) {
      ptx::prefetch_map(&p.w);
      ptx::prefetch_map(&p.a);
    } else if (threadIdx.x == 64) {
      s.work = Work(p, *p.rows);
    }
    __syncthreads();
    const Work& work = s.work;
    if (work.division.start() >= work.division.units) {  // the whole cluster does
      ptx::dependency_wait();
      return;
    }
    if (Split > 1 && threadIdx.x == 0) {  // the partial sums to come, before anybody may send one
      const int rank = blockIdx.x % kCluster, owned = (kWarps - rank + Split - 1) / Split;
      ptx::barrier_expect(ptx::shared_address(&s.summed),
                          owned * sizeof(typename Smem::partial_plane) / kOwned);
    }
    if constexpr (kCluster > 1) ptx::cluster_arrive();
    if constexpr (Share > 1) ptx::cluster_wait();  // with Split, when the sums go out
    if (threadIdx.x == 0) load_early(p, s);
    __syncwarp();  // before its other lanes wait
    ptx::dependency_wait();
    if (threadIdx.x < kWarpgroup) {
      ptx::lower_registers<40>();
      if (threadIdx.x == 0) produce(p, s);
      if constexpr (Split > 1) {
        __syncwarp();
        ptx::cluster_wait();
      }
    } else {
      ptx::raise_registers<232>();
      consume(p, s, work);
    }
    if constexpr (Share > 1) {  // nobody leaves while its peer may write to it or arrive there
      __syncwarp();
      ptx::cluster_arrive();
      ptx::cluster_wait();
    }
  }
};
