// Rows picked from one array and set in another, token embeddings in, wanted rows out, and the
// product of one row with the whole table where that is the output matrix, too.
//
//   embed:  x[r] = scale * table[ids[r]]                      r < *rows, packed to f32
//   gather: x_out[r] = x[index[r]], a_out[r] = a[index[r]]    r < *wanted
//   logits: c[j] = sum over i of y[i] * table[j][i]           j < vocab, if *rows is not 0
//           y = x / sqrt(mean(x^2) + eps) * weight, in f32
//
// The table is unpacked as it is, not through fp16: embeddings start the residual stream, and
// nothing comes after logits that would average their errors out.
// Grid: embed and gather one block per row; threads stride over it 16 bytes at a time (every width
// is a multiple of 8). Bytes: embed a block read and 4 per element, gather 8 per element of x and 4
// of a. Logits: see below.
#pragma once

#include "../core/reduce.cuh"
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

#define LOGITS_PARAMS(P)                                         \
  P(const int32_t*, rows)  /* device count of live rows, 0, 1 */ \
  P(const float*, x)       /* [columns] */                       \
  P(const float*, weight)  /* [columns], of the output norm */   \
  P(const uint8_t*, table) /* [vocab][columns / block] blocks */ \
  P(float*, c)             /* [vocab] */                         \
  P(int32_t, columns)      /* kColumns at most */                \
  P(int32_t, vocab)                                              \
  P(float, eps)

#define LOGITS_PLANES(P, A)           \
  P(16, float4, y, [2][kColumns / 8]) \
  P(16, float, partial, [kThreads / 32])

// Every block normalises x for itself. Then a warp takes Rows rows of the table at a time, whose
// loads wait together, and a lane every 32nd unit of eight weights. Plane y: the first halves of
// all units, then the second halves, so that neighbouring lanes read neighbouring 16 bytes. Grid:
// any number of blocks; they stride over the table. Bytes: the packed table.
template <class Block, int Threads, int Rows, int Columns, int Blocks>
struct Logits {
  static constexpr int kThreads = Threads, kMinBlocks = Blocks, kColumns = Columns;
  static constexpr int kBlockUnits = Block::kElements / 8;
  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("op", "logits")
        .with("type", Block::kType)
        .with("block", Block::kElements)
        .with("bytes", sizeof(Block))
        .with("rows", kThreads / 32 * Rows)
        .with("columns", kColumns);
  }
  SPEC_PARAMS(LOGITS_PARAMS)
  SPEC_SMEM(LOGITS_PLANES)

  static __device__ void run(const Params& p) {
    if (*p.rows < 1) return;
    Smem& s = spec::shared<Smem>();
    normalise(p, s);
    const int lane = threadIdx.x % 32, units = p.columns / 8;
    const int64_t blocks = p.columns / Block::kElements;  // of a row
    const Block* const table = reinterpret_cast<const Block*>(p.table);
    const int step = gridDim.x * (kThreads / 32) * Rows;
    for (int row = (blockIdx.x * (kThreads / 32) + threadIdx.x / 32) * Rows; row < p.vocab;
         row += step) {
      const Block* in[Rows];
      float sum[Rows] = {};
#pragma unroll
      for (int r = 0; r < Rows; ++r) in[r] = table + min(row + r, p.vocab - 1) * blocks;
      for (int unit = lane; unit < units; unit += 32) {
        const float4 low = s.y[0][unit], high = s.y[1][unit];
        const float y[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
          float w[8];
          quant::unpack(in[r][unit / kBlockUnits], unit % kBlockUnits, w);
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[r] = fmaf(y[i], w[i], sum[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        const float whole = warp_sum(sum[r]);
        if (lane == r && row + r < p.vocab) p.c[row + r] = whole;
      }
    }
  }

  static __device__ __forceinline__ void normalise(const Params& p, Smem& s) {
    const float4* x = reinterpret_cast<const float4*>(p.x);
    const float4* weight = reinterpret_cast<const float4*>(p.weight);
    float squares = 0;
#pragma unroll 2
    for (int i = threadIdx.x; i < p.columns / 4; i += kThreads) squares += square(x[i]);
    const float mean = block_sum<kThreads>(squares, s.partial) / p.columns;
    const float scale = rsqrtf(mean + p.eps);
#pragma unroll 2
    for (int i = threadIdx.x; i < p.columns / 4; i += kThreads) {
      const float4 v = x[i], w = weight[i];
      s.y[i % 2][i / 2] =
          make_float4(v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w);
    }
    __syncthreads();
  }
};
