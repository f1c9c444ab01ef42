// Packed GGUF blocks to fp16: out[row0 + row_step * r][c] = weight (r, c). The row step interleaves
// two tensors (gate and up), the first row sets one below another (q, k, v).
//
// Rows of blocks follow each other without a gap, so the source is one array of blocks whatever the
// row length. A thread block takes kElements weights of it, of one row or of many: it copies their
// bytes to shared memory 16 at a time (a block of 18 or 210 bytes has no alignment in memory, a
// tile of them has: kElements is a multiple of eight blocks), then every thread unpacks eight
// weights and stores 16 bytes. A "unit" below is eight weights: rows hold a whole number of them,
// so none crosses a row.
//
// Grid: rows * columns / kElements blocks, rounded up; units are counted in 32 bits.
// Plane map: one tile of blocks. Bytes: a block read, and two written per weight.
#pragma once

#include "../core/live.cuh"
#include "../core/ptx.cuh"
#include "../core/spec.cuh"
#include "../quant/unpack.cuh"

#define DEQUANT_PARAMS(P)                                                         \
  P(const uint8_t*, source) /* [rows][columns / block] blocks, 16-byte aligned */ \
  P(__half*, out)           /* [...][columns], 16-byte aligned */                 \
  P(int32_t*, overflow)     /* lowest site out of fp16 range */                   \
  P(int32_t, rows)                                                                \
  P(int32_t, columns) /* whole blocks */                                          \
  P(int32_t, row0)                                                                \
  P(int32_t, row_step)                                                            \
  P(int32_t, site)

#define DEQUANT_PLANES(P, A) P(16, Block, blocks, [kElements / Block::kElements])

template <class Block, int Threads, int Elements>
struct Dequant {
  static constexpr int kThreads = Threads, kMinBlocks = 1, kElements = Elements;
  static constexpr int kUnits = kElements / 8, kBlockUnits = Block::kElements / 8;
  static_assert(kElements % (8 * Block::kElements) == 0, "tiles must start 16-byte aligned");
  static_assert(kThreads % kBlockUnits == 0 && kUnits % kThreads == 0,
                "whole turns of whole blocks");
  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("type", Block::kType)
        .with("block", Block::kElements)
        .with("bytes", sizeof(Block))
        .with("elements", kElements);
  }
  SPEC_PARAMS(DEQUANT_PARAMS)
  SPEC_SMEM(DEQUANT_PLANES)

  static __device__ void run(const Params& p) {
    Smem& s = spec::shared<Smem>();
    const uint32_t row_units = p.columns / 8, first = blockIdx.x * kUnits;
    const uint32_t units = min(p.rows * row_units - first, uint32_t(kUnits));

    const uint8_t* source = p.source + int64_t(first / kBlockUnits) * sizeof(Block);
    const int bytes = units / kBlockUnits * sizeof(Block);
    uint8_t* tile = reinterpret_cast<uint8_t*>(s.blocks);
#pragma unroll
    for (int start = 0; start < int(sizeof(s.blocks)); start += kThreads * 16) {
      const int at = start + threadIdx.x * 16;
      if (at + 16 <= bytes) {
        ptx::copy_async_16(tile + at, source + at, 16);
      } else {  // the end of the tensor; every block has an even number of bytes
        for (int i = at; i < bytes; i += 2)
          *reinterpret_cast<uint16_t*>(tile + i) = *reinterpret_cast<const uint16_t*>(source + i);
      }
    }
    ptx::copy_async_commit();

    const uint32_t row = (first + threadIdx.x) / row_units;
    uint32_t column = (first + threadIdx.x) % row_units;
    __half* out = p.out + ((p.row0 + int64_t(row) * p.row_step) * row_units + column) * 8;
    const int64_t skip = int64_t(p.row_step - 1) * p.columns;
    ptx::copy_async_wait<0>();
    __syncthreads();

    // A thread keeps its place within a block from one turn to the next.
    const uint32_t place = threadIdx.x % kBlockUnits, block = threadIdx.x / kBlockUnits;
#pragma unroll
    for (uint32_t turn = 0; turn < kUnits / kThreads; ++turn) {
      if (turn * kThreads + threadIdx.x >= units) return;
      float w[8];
      quant::unpack(s.blocks[turn * (kThreads / kBlockUnits) + block], place, w);
      store_checked(out, w, p.overflow, p.site);
      out += 8 * kThreads;
      for (column += kThreads; column >= row_units; column -= row_units) out += skip;
    }
  }
};
