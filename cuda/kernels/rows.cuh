// Rows picked from one array and set in another: token embeddings in, wanted rows out.
//
//   embed:  x[r] = scale * table[ids[r]]                      r < *rows, packed to f32
//   gather: x_out[r] = x[index[r]], a_out[r] = a[index[r]]    r < *wanted
//
// Embeddings are unpacked as they are, not through fp16: they start the residual stream.
// Grid: one block per row; threads stride over it 16 bytes at a time (every width is a multiple of
// 8). Bytes: embed a block read and 4 per element, gather 8 per element of x and 4 of a.
#pragma once

#include "../core/spec.cuh"
#include "../quant/unpack.cuh"

#define EMBED_PARAMS(P)                                               \
  P(const int32_t*, rows)  /* device count of live rows */            \
  P(const int32_t*, ids)   /* [rows] */                               \
  P(const uint8_t*, table) /* [vocabulary][columns / block] blocks */ \
  P(float*, x)             /* [rows][columns] */                      \
  P(int32_t, columns)                                                 \
  P(float, scale)

template <class Block, int Threads>
struct Embed {
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr int kBlockUnits = Block::kElements / 8;  // a unit is eight weights
  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("op", "embed")
        .with("type", Block::kType)
        .with("block", Block::kElements)
        .with("bytes", sizeof(Block));
  }
  SPEC_PARAMS(EMBED_PARAMS)
  SPEC_NO_SMEM

  static __device__ void run(const Params& p) {
    const int64_t row = blockIdx.x;
    if (row >= *p.rows) return;
    const int units = p.columns / 8;
    const Block* in = reinterpret_cast<const Block*>(p.table) +
                      int64_t(p.ids[row]) * (p.columns / Block::kElements);
    float4* out = reinterpret_cast<float4*>(p.x + row * p.columns);
    for (int unit = threadIdx.x; unit < units; unit += kThreads) {
      float w[8];
      quant::unpack(in[unit / kBlockUnits], unit % kBlockUnits, w);
#pragma unroll
      for (float& value : w) value *= p.scale;
      out[2 * unit] = make_float4(w[0], w[1], w[2], w[3]);
      out[2 * unit + 1] = make_float4(w[4], w[5], w[6], w[7]);
    }
  }
};

#define GATHER_PARAMS(P)                                   \
  P(const int32_t*, wanted) /* device count */             \
  P(const int32_t*, index)  /* [wanted] rows of x and a */ \
  P(const float*, x)        /* [...][columns] */           \
  P(float*, x_out)          /* [wanted][columns] */        \
  P(const __half*, a)       /* [...][width] */             \
  P(__half*, a_out)         /* [wanted][width] */          \
  P(int32_t, columns)                                      \
  P(int32_t, width)

template <int Threads>
struct Gather {
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr spec::Tile tile() { return spec::Tile{}.with("op", "gather"); }
  SPEC_PARAMS(GATHER_PARAMS)
  SPEC_NO_SMEM

  template <class T>
  static __device__ void copy(const T* in, T* out, int64_t from, int64_t to, int width) {
    const uint4* source = reinterpret_cast<const uint4*>(in + from * width);
    uint4* target = reinterpret_cast<uint4*>(out + to * width);
    for (int i = threadIdx.x; i < width * int(sizeof(T)) / 16; i += kThreads) target[i] = source[i];
  }

  static __device__ void run(const Params& p) {
    const int row = blockIdx.x;
    if (row >= *p.wanted) return;
    const int from = p.index[row];
    copy(p.x, p.x_out, from, row, p.columns);
    copy(p.a, p.a_out, from, row, p.width);
  }
};
