// GGUF blocks to planes (quant/planes.cuh): rows [first, first + rows) of a tensor of n rows, from
// the file's bytes to their places among the bytes of the whole tensor.
//
// A thread block takes kBlocks blocks, of one row or of many: it copies their bytes to shared
// memory 16 at a time, and from there each field in the widest stores that its plane is aligned to.
//
// Grid: rows * blocks of a row / kBlocks, rounded up. Bytes: each read once and written once.
#pragma once

#include "../core/ptx.cuh"
#include "../core/spec.cuh"
#include "../quant/planes.cuh"

#define REPACK_PARAMS(P)                                                          \
  P(const uint8_t*, source) /* [rows][row_blocks] GGUF blocks, 16-byte aligned */ \
  P(uint8_t*, out)          /* all planes of the tensor, 16-byte aligned */       \
  P(int32_t, rows)                                                                \
  P(int32_t, row_blocks)                                                          \
  P(int32_t, first)                                                               \
  P(int32_t, n)

#define REPACK_PLANES(P, A) P(16, Block, blocks, [kBlocks])

template <class Block, int Threads, int Blocks>
struct Repack {
  static constexpr int kThreads = Threads, kMinBlocks = 1, kBlocks = Blocks;
  static_assert(kBlocks % 8 == 0, "tiles must start 16-byte aligned");
  static_assert(quant::planes_are_whole<Block>());
  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("type", Block::kType)
        .with("block", Block::kElements)
        .with("bytes", sizeof(Block))
        .with("blocks", kBlocks)
        .with("n", quant::kPlaneRows);
  }
  SPEC_PARAMS(REPACK_PARAMS)
  SPEC_SMEM(REPACK_PLANES)

  template <int Field>
  static __device__ void put(const Params& p, const Smem& s, int64_t first, int blocks) {
    constexpr quant::Plane plane = quant::Planes<Block>::all[Field];
    constexpr int kUnit = plane.bytes % 16 == 0  ? 16
                          : plane.bytes % 8 == 0 ? 8
                          : plane.bytes % 4 == 0 ? 4
                                                 : 2;
    constexpr int kUnits = plane.bytes / kUnit;
    struct alignas(kUnit) Unit {
      uint16_t pairs[kUnit / 2];
    };
    for (int i = threadIdx.x; i < blocks * kUnits; i += kThreads) {
      const int block = i / kUnits, unit = i % kUnits;
      const auto* from = reinterpret_cast<const uint16_t*>(
          reinterpret_cast<const uint8_t*>(&s.blocks[block]) + plane.at + unit * kUnit);
      Unit packed;
#pragma unroll
      for (int j = 0; j < kUnit / 2; ++j) packed.pairs[j] = from[j];
      const int64_t row = (first + block) / p.row_blocks;
      const int64_t at =
          plane.place(p.n, p.row_blocks, p.first + row, first + block - row * p.row_blocks);
      *reinterpret_cast<Unit*>(p.out + at + unit * kUnit) = packed;
    }
  }

  static __device__ void run(const Params& p) {
    Smem& s = spec::shared<Smem>();
    const int64_t first = int64_t(blockIdx.x) * kBlocks;
    const int blocks = min(int64_t(p.rows) * p.row_blocks - first, int64_t(kBlocks));
    const uint8_t* source = p.source + first * sizeof(Block);
    uint8_t* tile = reinterpret_cast<uint8_t*>(s.blocks);
    const int bytes = blocks * sizeof(Block);
    for (int at = threadIdx.x * 16; at + 16 <= bytes; at += kThreads * 16)
      ptx::copy_async_16(tile + at, source + at, 16);
    ptx::copy_async_commit();
    // The end of the tensor, 2 bytes a thread: every block has an even number of them.
    const int last = bytes / 16 * 16 + threadIdx.x * 2;
    if (last < bytes)
      *reinterpret_cast<uint16_t*>(tile + last) = *reinterpret_cast<const uint16_t*>(source + last);
    ptx::copy_async_wait<0>();
    __syncthreads();
    constexpr int kFields = sizeof(quant::Planes<Block>::all) / sizeof(quant::Plane);
    put<0>(p, s, first, blocks);
    put<1>(p, s, first, blocks);
    if constexpr (kFields > 2) put<2>(p, s, first, blocks);
    if constexpr (kFields > 3) put<3>(p, s, first, blocks);
  }
};
