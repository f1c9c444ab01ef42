// Scores of given tokens. Of each target t of a row x, whose largest logit is m:
//
//   log_probs[t] = x[token[t]] - m - log(sum of exp(x - m))
//
// and of the row's `top` likeliest tokens, best[t], the same as values[t]. Of equal logits the
// first is the likelier, as in NumPy, and a NaN than any number; a row that holds a NaN or +inf, or
// -inf alone, has NaN for log-probabilities.
//
// Grid: one block per row; a row without targets is not read. One pass over it: a thread strides
// 16 bytes at a time, and scales its sum when its maximum grows (Milakov and Gimelshein 2018,
// arXiv:1805.02867). A row may begin anywhere: vocabularies are odd. Bytes: 4 per element (twice
// where the sum is a NaN) and 8 + 8 * top per target; a thread has 16 * Loads in flight. The 441
// rows of 151,936 that 256 MiB hold, 268 MB and one wave, are expected to take 65 us of an H200.
//
// Threads' maxima are a tournament: its winner is the likeliest token. For each further one the
// winner's warp reads again what the winner had read, 1 / Threads of the row, and one barrier finds
// the next, which is expected to take 1.5 us.
#pragma once

#include "../core/reduce.cuh"
#include "../core/spec.cuh"

#define SCORES_PARAMS(P)                                                                  \
  P(const int32_t*, rows)   /* device count of live rows */                               \
  P(const float*, logits)   /* [rows][vocab] */                                           \
  P(const int32_t*, first)  /* [rows + 1] of each row's targets; ascending */             \
  P(const int32_t*, tokens) /* [targets], each below vocab; less than 0: the likeliest */ \
  P(float*, log_probs)      /* [targets] */                                               \
  P(int32_t*, best)         /* [targets][top], likeliest first */                         \
  P(float*, values)         /* [targets][top], log-probabilities of `best` */             \
  P(int32_t, vocab)                                                                       \
  P(int32_t, top) /* 1 to vocab */

#define SCORES_PLANES(P, A)              \
  P(16, float, partial, [kThreads / 32]) \
  P(16, uint64_t, keys, [2][kThreads / 32])

template <int Threads, int Loads>
struct Scores {
  static constexpr int kThreads = Threads, kWarps = Threads / 32;
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
  };

  // A row in units of 16 bytes, and what lies before and behind them. Thread t reads units t,
  // t + Threads, ..., and the t-th element before and behind.
  struct Row {
    const float* x;
    int vocab, before, units, behind;

    __device__ __forceinline__ Row(const float* x, int vocab) : x(x), vocab(vocab) {
      before = min(int(-(reinterpret_cast<uintptr_t>(x) / 4) % 4), vocab);
      units = (vocab - before) / 4;
      behind = before + 4 * units;
    }
    __device__ __forceinline__ float4 unit(int i) const {
      return reinterpret_cast<const float4*>(x + before)[i];
    }
    __device__ __forceinline__ int reader(int place) const {
      if (place < before) return place;
      return place < behind ? (place - before) / 4 % kThreads : place - behind;
    }
  };

  // What a thread reads of a row.
  static __device__ __forceinline__ Part read(const Row& row) {
    Part part;
    const auto take_one = [&](int place) {
      const float one[1] = {row.x[place]};
      part.take(one, [&](int) { return place; });
    };
    if (int(threadIdx.x) < row.before) take_one(threadIdx.x);
    for (int unit = threadIdx.x; unit < row.units; unit += kThreads * Loads) {
      float in[4 * Loads];
#pragma unroll
      for (int i = 0; i < Loads; ++i) {
        float4 v = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        if (unit + i * kThreads < row.units) v = row.unit(unit + i * kThreads);
        in[4 * i] = v.x, in[4 * i + 1] = v.y, in[4 * i + 2] = v.z, in[4 * i + 3] = v.w;
      }
      part.take(in, [&](int i) { return row.before + 4 * (unit + i / 4 * kThreads) + i % 4; });
    }
    if (row.behind + int(threadIdx.x) < row.vocab) take_one(row.behind + threadIdx.x);
    return part;
  }

  // An element of a row as a number that is larger the likelier its token is; 0: none.
  static __device__ __forceinline__ uint64_t key(float value, int place) {
    uint32_t bits = value == 0 ? 0 : __float_as_uint(value);
    if (value != value) bits = 0x7fc00000;
    bits = bits >> 31 ? ~bits : bits | 0x80000000;
    return uint64_t(bits) << 32 | ~uint32_t(place);
  }
  static __device__ __forceinline__ int place_of(uint64_t key) { return int(~uint32_t(key)); }
  static __device__ __forceinline__ float value_of(uint64_t key) {
    const uint32_t bits = key >> 32;
    return __uint_as_float(bits >> 31 ? bits & 0x7fffffff : ~bits);
  }

  // The largest key of a warp; every lane gets it.
  static __device__ __forceinline__ uint64_t warp_best(uint64_t key) {
    const uint32_t high = key >> 32, most = __reduce_max_sync(0xffffffffu, high);
    const uint32_t low = __reduce_max_sync(0xffffffffu, high == most ? uint32_t(key) : 0);
    return uint64_t(most) << 32 | low;
  }

  // The largest of what the warps found; every thread gets it. Calls take turns with two `keys`, so
  // that one barrier is enough.
  static __device__ __forceinline__ uint64_t block_best(uint64_t found, uint64_t* keys) {
    if (threadIdx.x % 32 == 0) keys[threadIdx.x / 32] = found;
    __syncthreads();
    return warp_best(keys[threadIdx.x % kWarps]);
  }

  // The largest key below `bound` of what `reader` reads of a row: of each `step`-th of its units
  // from the one at `from` on, and with the first of them of what is in no unit.
  static __device__ uint64_t best_below(const Row& row, int reader, int from, int step,
                                        uint64_t bound) {
    uint64_t best = 0;
    const auto take = [&](float value, int place) {
      const uint64_t own = key(value, place);
      if (own < bound && own > best) best = own;
    };
    for (int unit = reader + from * kThreads; unit < row.units; unit += step * kThreads) {
      const float4 v = row.unit(unit);
      const int place = row.before + 4 * unit;
      take(v.x, place), take(v.y, place + 1), take(v.z, place + 2), take(v.w, place + 3);
    }
    if (!from && reader < row.before) take(row.x[reader], reader);
    if (!from && row.behind + reader < row.vocab)
      take(row.x[row.behind + reader], row.behind + reader);
    return best;
  }

  static __device__ void run(const Params& p) {
    if (blockIdx.x >= *p.rows) return;
    const int begin = p.first[blockIdx.x], end = p.first[blockIdx.x + 1];
    if (begin == end) return;
    const Row row(p.logits + int64_t(blockIdx.x) * p.vocab, p.vocab);
    const Part part = read(row);

    Smem& s = spec::shared<Smem>();
    const int thread = threadIdx.x;
    uint64_t own = part.largest == -INFINITY ? best_below(row, thread, 0, 1, ~0ull)
                                             : key(part.largest, part.place);
    uint64_t found = warp_best(own), best = block_best(found, s.keys[0]);
    const float largest = value_of(best);
    const float sum = block_sum<kThreads>(
        part.sum * ptx::exp2_approx((part.largest - largest) * kLog2E), s.partial);
    if (sum != sum) {  // in every thread or in none
      own = best_below(row, thread, 0, 1, ~0ull);
      found = warp_best(own), best = block_best(found, s.keys[0]);
    }
    const float norm = logf(sum);
    for (int t = begin + thread; t < end; t += kThreads) {
      const int token = p.tokens[t];
      p.log_probs[t] = (token < 0 ? value_of(best) : row.x[token]) - largest - norm;
    }
    for (int n = 0;; ++n) {
      for (int t = begin + thread; t < end; t += kThreads) {
        p.best[int64_t(t) * p.top + n] = place_of(best);
        p.values[int64_t(t) * p.top + n] = value_of(best) - largest - norm;
      }
      if (n + 1 == p.top) break;
      const int reader = row.reader(place_of(best));
      if (reader / 32 == thread / 32) {
        const uint64_t next = warp_best(best_below(row, reader, thread % 32, 32, best));
        if (reader == thread) own = next;
        found = warp_best(own);
      }
      best = block_best(found, s.keys[(n + 1) % 2]);
    }
  }
};
