// Scores of given tokens. Of each target t of a row x, whose largest logit is m:
//
//   log_probs[t] = x[token[t]] - m - log(sum of exp(x - m)),  greedy[t] = token[t] is the argmax
//
// As in NumPy, the first of equal logits is the argmax, a NaN before any number; and a row that
// holds a NaN or +inf, or -inf alone, has NaN for log-probabilities.
//
// Grid: one block per row; a row without targets is not read. One pass over it: a thread strides
// 16 bytes at a time, and scales its sum when its maximum grows (Milakov and Gimelshein 2018,
// arXiv:1805.02867). A row may begin anywhere: vocabularies are odd. Bytes: 4 per element (twice
// where a NaN is looked for, as the sum is one) and 16 per target; a thread has 16 * Loads in
// flight. The 441 rows of 151,936 that 256 MiB hold, 268 MB and one wave, are expected to take 65
// us of an H200.
#pragma once

#include "../core/reduce.cuh"
#include "../core/spec.cuh"

#define SCORES_PARAMS(P)                                                      \
  P(const int32_t*, rows)   /* device count of live rows */                   \
  P(const float*, logits)   /* [rows][vocab] */                               \
  P(const int32_t*, first)  /* [rows + 1] of each row's targets; ascending */ \
  P(const int32_t*, tokens) /* [targets], each below vocab */                 \
  P(float*, log_probs)      /* [targets] */                                   \
  P(int32_t*, greedy)       /* [targets], 0 or 1 */                           \
  P(int32_t, vocab)

#define SCORES_PLANES(P, A)              \
  P(16, float, partial, [kThreads / 32]) \
  P(16, float, largest, [kThreads / 32]) \
  P(16, int32_t, places, [kThreads / 32])

template <int Threads, int Loads>
struct Scores {
  static constexpr int kThreads = Threads, kNowhere = 0x7fffffff;
#if __CUDA_ARCH__ >= 1200
  static constexpr int kMinBlocks = 1536 / kThreads;  // all that a multiprocessor runs
#else
  static constexpr int kMinBlocks = 2048 / kThreads;
#endif
  static constexpr float kLog2E = 1.44269504f;
  static constexpr spec::Tile tile() { return spec::Tile{}; }
  SPEC_PARAMS(SCORES_PARAMS)
  SPEC_SMEM(SCORES_PLANES)

  // Of some numbers: the largest, its first place, and the sum of exp(x - base). Base is the
  // largest, or 0 while that is -inf. A NaN among them is in the sum alone.
  struct Part {
    float largest = -INFINITY, base = 0, sum = 0;
    int place = 0;

    // Takes in N numbers, whose places `at(i)` ascend and lie behind those before.
    template <int N, class At>
    __device__ __forceinline__ void take(const float (&x)[N], At at) {
      float top = x[0];
#pragma unroll
      for (int i = 1; i < N; ++i) top = fmaxf(top, x[i]);
      if (top > largest) {  // seldom: about log(length) times
        sum *= ptx::exp2_approx((largest - top) * kLog2E);
        largest = base = top;
#pragma unroll
        for (int i = N - 1; i >= 0; --i)
          if (x[i] == top) place = at(i);
      }
      float e[N];
#pragma unroll
      for (int i = 0; i < N; ++i) e[i] = ptx::exp2_approx((x[i] - base) * kLog2E);
#pragma unroll
      for (int width = 1; width < N; width *= 2)
#pragma unroll
        for (int i = 0; i < N; i += 2 * width) e[i] += e[i + width];
      sum += e[0];
    }

    __device__ __forceinline__ void keep_first(float other, int at) {
      if (other > largest || (other == largest && at < place)) {
        largest = other;
        place = at;
      }
    }
  };

  // What a thread reads of a row.
  static __device__ __forceinline__ Part read(const float* x, int vocab) {
    const int before = min(int(-(reinterpret_cast<uintptr_t>(x) / 4) % 4), vocab);
    const int units = (vocab - before) / 4, behind = before + 4 * units;
    const float4* aligned = reinterpret_cast<const float4*>(x + before);
    Part part;
    const auto take_one = [&](int place) {
      const float one[1] = {x[place]};
      part.take(one, [&](int) { return place; });
    };
    if (int(threadIdx.x) < before) take_one(threadIdx.x);
    for (int unit = threadIdx.x; unit < units; unit += kThreads * Loads) {
      float in[4 * Loads];
#pragma unroll
      for (int i = 0; i < Loads; ++i) {
        float4 v = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        if (unit + i * kThreads < units) v = aligned[unit + i * kThreads];
        in[4 * i] = v.x, in[4 * i + 1] = v.y, in[4 * i + 2] = v.z, in[4 * i + 3] = v.w;
      }
      part.take(in, [&](int i) { return before + 4 * (unit + i / 4 * kThreads) + i % 4; });
    }
    if (behind + int(threadIdx.x) < vocab) take_one(behind + threadIdx.x);
    return part;
  }

  // The first NaN of a row, or kNowhere; every thread gets it.
  static __device__ int first_nan(const float* x, int vocab, int32_t* places) {
    int place = kNowhere;
    for (int i = vocab - 1 - threadIdx.x; i >= 0; i -= kThreads)
      if (x[i] != x[i]) place = i;
    place = __reduce_min_sync(0xffffffffu, place);
    __syncthreads();  // an earlier use of `places` is over
    if (threadIdx.x % 32 == 0) places[threadIdx.x / 32] = place;
    __syncthreads();
    for (int i = 0; i < kThreads / 32; ++i) place = min(place, places[i]);
    return place;
  }

  static __device__ void run(const Params& p) {
    const int64_t row = blockIdx.x;
    if (row >= *p.rows) return;
    const int begin = p.first[row], end = p.first[row + 1];
    if (begin == end) return;
    const float* x = p.logits + row * p.vocab;
    Part part = read(x, p.vocab);

    Smem& s = spec::shared<Smem>();
    const float own = part.largest;
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
      const float other = __shfl_xor_sync(0xffffffffu, part.largest, offset);
      part.keep_first(other, __shfl_xor_sync(0xffffffffu, part.place, offset));
    }
    if (threadIdx.x % 32 == 0) {
      s.largest[threadIdx.x / 32] = part.largest;
      s.places[threadIdx.x / 32] = part.place;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) part.keep_first(s.largest[i], s.places[i]);
    const float largest = part.largest;
    part.sum *= ptx::exp2_approx((own - largest) * kLog2E);
    const float sum = block_sum<kThreads>(part.sum, s.partial);
    int best = part.place;
    if (sum != sum) {  // in every thread or in none
      const int nan = first_nan(x, p.vocab, s.places);
      if (nan != kNowhere) best = nan;
    }
    const float norm = logf(sum);
    for (int t = begin + threadIdx.x; t < end; t += kThreads) {
      const int token = p.tokens[t];
      p.log_probs[t] = x[token] - largest - norm;
      p.greedy[t] = token == best;
    }
  }
};
