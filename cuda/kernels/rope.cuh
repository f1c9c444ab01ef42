// From the fused q,k,v product to attention's inputs: add the bias, normalise q and k per head
// where the model does (Qwen3), rotate q and k by position, and store q for attention and k, v into
// the cache.
//
// The rotation: rotary.cuh, t = position * inverse frequency [pair]. A pair is (2i, 2i + 1) in
// `interleaved` models (Llama) and (i, i + head_dim / 2) otherwise (NeoX). A GEMM with the epilogue
// `qkv` does all this itself. Grid: (rows, groups of kThreads / 32 heads); one warp per head, q
// heads first, then k, then v. Bytes: 4 read and 2 written per element, of an e4m3 cache 1 per
// element of k and v and 4 per head of a row.
#pragma once

#include "../core/e4m3.cuh"
#include "../core/live.cuh"
#include "../core/reduce.cuh"
#include "../core/spec.cuh"
#include "rotary.cuh"

#define ROPE_PARAMS(P)                                                         \
  P(const Live*, live)                                                         \
  P(const typename Cached::Prompt*, sequences)                                 \
  P(const int32_t*, sequence_of) /* [rows] index into sequences */             \
  P(const int32_t*, positions)   /* [rows] */                                  \
  P(const float*, qkv)           /* [rows][(heads + 2 kv_heads) head_dim] */   \
  P(const float*, bias)          /* [(heads + 2 kv_heads) head_dim] or null */ \
  P(const float*, q_norm)        /* [head_dim] or null */                      \
  P(const float*, k_norm)        /* [head_dim] or null */                      \
  P(const float*, cosines)       /* [positions][head_dim / 2] */               \
  P(const float*, sines)         /* [positions][head_dim / 2] */               \
  P(__half*, q)                  /* [rows][heads][head_dim] */                 \
  P(int32_t*, overflow)          /* lowest site out of fp16 range */           \
  P(int32_t, layer)                                                            \
  P(int32_t, heads)                                                            \
  P(int32_t, kv_heads)                                                         \
  P(int32_t, head_dim)                                                         \
  P(int32_t, interleaved)                                                      \
  P(int32_t, alike) /* 0, or columns of qkv are paired: rotary.cuh */          \
  P(int32_t, site)  /* of q; k and v follow */                                 \
  P(float, eps)

// What the cache holds, and the sequence list that says where it is.
namespace cached {
struct f16 {
  using Prompt = Sequence;
  static constexpr bool kScaled = false;
  static constexpr const char* kName = "f16";
};
struct e4m3 {
  using Prompt = ::e4m3::Sequence;
  static constexpr bool kScaled = true;
  static constexpr const char* kName = "e4m3";
};
}  // namespace cached

template <class Cached, int MaxHeadDim, int Threads>
struct Rope {
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr int kPairs = MaxHeadDim / 64;  // pairs per lane
  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("kv", Cached::kName)
        .with("max_head_dim", MaxHeadDim)
        .with("heads", Threads / 32);
  }
  SPEC_PARAMS(ROPE_PARAMS)
  SPEC_NO_SMEM

  static __device__ void run(const Params& p) {
    const int row = blockIdx.x, lane = threadIdx.x % 32;
    const int head = blockIdx.y * (kThreads / 32) + threadIdx.x / 32;
    if (row >= p.live->rows || head >= p.heads + 2 * p.kv_heads) return;
    const int part = head < p.heads ? 0 : head < p.heads + p.kv_heads ? 1 : 2;  // q, k, v
    const int half = p.head_dim / 2;
    const int step = p.interleaved ? 2 : 1, apart = p.interleaved ? 1 : half;
    const int64_t width = int64_t(p.heads + 2 * p.kv_heads) * p.head_dim;
    const float* in = p.qkv + row * width;
    const float* bias = p.bias ? p.bias + int64_t(head) * p.head_dim : nullptr;
    const float* norm = part == 0 ? p.q_norm : part == 1 ? p.k_norm : nullptr;

    float a[kPairs], b[kPairs], squares = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = lane + 32 * i, at = pair * step;
      const bool inside = pair < half;
      const int first =
          p.alike ? rotary::paired_column(head, pair, p.head_dim, p.alike) : head * p.head_dim + at;
      const int second = first + (p.alike ? 1 : apart);
      a[i] = inside ? in[first] + (bias ? bias[at] : 0.0f) : 0.0f;
      b[i] = inside ? in[second] + (bias ? bias[at + apart] : 0.0f) : 0.0f;
      squares += a[i] * a[i] + b[i] * b[i];
    }
    const float scale = norm ? rsqrtf(warp_sum(squares) / p.head_dim + p.eps) : 1.0f;

    const int position = p.positions[row];
    bool fit = true;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = lane + 32 * i, at = pair * step;
      if (pair >= half) break;
      float& x = a[i];
      float& y = b[i];
      if (norm) {
        x *= scale * norm[at];
        y *= scale * norm[at + apart];
      }
      if (part != 2) {
        const int64_t angle = int64_t(position) * half + pair;
        rotary::turn(x, y, p.cosines[angle], p.sines[angle]);
      }
      fit &= fits_half(x) & fits_half(y);
    }
    if (!fit) atomicMin(p.overflow, p.site + part);

    // store(i, at): puts a[i] or b[i] at element `at` of the row.
    const auto each = [&](auto store) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int pair = lane + 32 * i, at = pair * step;
        if (pair >= half) break;
        store(at, a[i]);
        store(at + apart, b[i]);
      }
    };
    if (part == 0) {
      __half* out = p.q + (int64_t(row) * p.heads + head) * p.head_dim;
      each([&](int at, float x) { out[at] = __float2half_rn(x); });
      return;
    }
    const typename Cached::Prompt to = p.sequences[p.sequence_of[row]];
    const int kv_head = head - p.heads - (part == 2 ? p.kv_heads : 0);
    const int64_t slot = (int64_t(p.layer) * p.kv_heads + kv_head) * to.capacity + position;
    auto* out = (part == 1 ? to.k : to.v) + slot * p.head_dim;
    if constexpr (Cached::kScaled) {
      float largest = 0;  // lanes and pairs without elements hold zeros
#pragma unroll
      for (int i = 0; i < kPairs; ++i) largest = fmaxf(largest, fmaxf(fabsf(a[i]), fabsf(b[i])));
      const float reach = e4m3::row_reach(warp_max(largest));
      const float inverse = e4m3::kLargest / reach;
      each([&](int at, float x) { out[at] = e4m3::encode(x * inverse); });
      if (lane == 0) (part == 1 ? to.k_scale : to.v_scale)[slot] = reach / e4m3::kLargest;
    } else {
      each([&](int at, float x) { out[at] = __float2half_rn(x); });
    }
  }
};
