// The same attention through Hopper's own instructions: TMA, wgmma, and warpgroups that take turns.
//
// Block: WGS consumer warpgroups of 64 rows each, and one that feeds them: one thread of it copies
// Q, K and V, a warp for each consumer writes its result. Blocks stay: each takes the next part of
// the schedule (schedule.cuh), longest first, when it begins the last key tile of the one before.
//
// Rows: `pack` heads that share K and V times 64 / pack tokens make the 64 rows of a warpgroup, row
// r being head r % pack of token r / pack. More heads in a tile mean fewer tokens, so less of it
// lies above the diagonal.
//
// A consumer walks its part from the diagonal down to older keys, in tiles of BN:
//   S(j) = Q K(j)^T is issued, then O += P(j+1) V(j+1); under both runs the softmax of S(j).
// The warpgroups issue in turns, so that one's softmax runs under the others' products. P needs no
// shuffle: the accumulator layout of S, rounded to fp16, is the operand layout of P V. Tiles that
// the causal edge or the window's edge crosses are masked; between them nothing is compared.
//
// Softmax: a row keeps its maximum until a score is kLazy above it in the exponent of 2, so that P
// stays below 2^kLazy; only then are O and the sum scaled. The decision is the row's own, its key
// tiles are counted from position 0, and a tile that is wholly masked changes no bit: so its result
// depends on BN and on where the schedule splits, but not on neighbours, tiles, chunks of a prompt
// or pack.
//
// Keys past the sequence's end are zeros of the copy or whatever the cache holds there: of K they
// are masked, of V set to zero in shared memory, since 0 * NaN is not 0. Keys before a window that
// share a key tile with its first are weighed with 0: they are the cache's, and finite.
//
// Planes: 64 dims of all rows of a tile are one box of the 128-byte swizzle, so head dims of 96
// take the room of 128. O leaves through a warpgroup's own rows of Q.
#pragma once

#include "../../core/ptx.cuh"
#include "../../core/spec.cuh"
#include "../../core/tma.cuh"
#include "../../core/wgmma.cuh"
#include "attention_parts.cuh"

#define ATTENTION_WGMMA_PARAMS(P)                                                                \
  P(spec::TensorMap, q)     /* [rows][heads][head dim], boxes 64 / pack x pack x 64, swizzled */ \
  P(spec::TensorMap, o_map) /* the same of o */                                                  \
  P(const attention::Part*, parts)                                                               \
  P(int32_t*, counters)    /* [2]: parts taken, blocks through; zero between launches */         \
  P(float*, partial)       /* O of split parts: [slots][warpgroups][registers][128] */           \
  P(float4*, partial_rows) /* their m and l: [slots][warpgroups][128] */                         \
  P(uint32_t*, arrived)    /* [groups][warpgroups], zero between launches */                     \
  P(__half*, o)            /* [rows][heads][head dim] */                                         \
  P(int32_t, box)          /* which of a sequence's pairs of maps has boxes of BN keys */        \
  P(int32_t, layer)                                                                              \
  P(int32_t, heads)                                                                              \
  P(int32_t, kv_heads)                                                                           \
  P(int32_t, pack)    /* 1, or heads / kv_heads; at most 64 */                                   \
  P(int32_t, inverse) /* 65536 / pack, rounded up: n / pack = n * inverse >> 16, n <= 64 */      \
  P(int32_t, window)  /* keys a row sees, itself included */                                     \
  P(float, scale)     /* of scores, times log2(e); Capped: see Consumer::bound */                \
  P(float, cap)

#define ATTENTION_WGMMA_PLANES(P, A)                \
  P(1024, __half, q, [QStages][kPlanes][kRows][64]) \
  P(1024, __half, k, [Stages][kPlanes][BN][64])     \
  P(1024, __half, v, [Stages][kPlanes][BN][64])     \
  P(8, uint64_t, full_q, [QStages])                 \
  P(8, uint64_t, empty_q, [QStages])                \
  P(8, uint64_t, staged, [QStages][WGS])            \
  P(8, uint64_t, full_k, [Stages])                  \
  P(8, uint64_t, empty_k, [Stages])                 \
  P(8, uint64_t, full_v, [Stages])                  \
  P(8, uint64_t, empty_v, [Stages])                 \
  P(16, attention::Part, part, [QStages])           \
  P(4, int32_t, writes, [QStages][WGS])

namespace attention {

template <int HeadDim, int WGS, int BN, int Stages, int QStages, bool Capped, int Blocks,
          int ProducerRegisters, int ConsumerRegisters>
struct Wgmma {
  static constexpr int kThreads = 128 * (WGS + 1), kMinBlocks = Blocks;
  static constexpr bool kWaitsItself = true;
  static constexpr int kRows = 64 * WGS;
  static constexpr int kPlanes = (HeadDim + 63) / 64;   // of 64 dims
  static constexpr bool kSplits = HeadDim * WGS < 512;  // else the sums want too many registers
  static constexpr float kFar = 1024;
  static constexpr int kLazy = 8;  // P reaches 2^8, far inside fp16
  static_assert(HeadDim % 16 == 0 && BN % 16 == 0);

  static constexpr spec::Tile tile() {
    return spec::Tile{}
        .with("variant", "wgmma")
        .with("hd", HeadDim)
        .with("tq", kRows)
        .with("tkv", BN)
        .with("warpgroups", WGS)
        .with("blocks", Blocks)
        .with("splits", int(kSplits))
        .with("cap", int(Capped));
  }
  SPEC_PARAMS(ATTENTION_WGMMA_PARAMS)
  SPEC_SMEM(ATTENTION_WGMMA_PLANES)

  static constexpr uint32_t kQPlane = kRows * 128, kPlane = BN * 128;  // bytes
  static constexpr uint32_t kTileBytes = kPlanes * kPlane;

  static __device__ __forceinline__ uint32_t at(const void* p) { return ptx::shared_address(p); }
  // The token of a warpgroup's row, how many it has, and how many of the tile's come before those
  // of warpgroup `wg`.
  static __device__ __forceinline__ int token_of(const Params& p, int row) {
    return row * p.inverse >> 16;
  }
  static __device__ __forceinline__ int tokens_of(const Params& p) { return token_of(p, 64); }
  static __device__ __forceinline__ int tokens_before(const Params& p, int wg) {
    return wg * tokens_of(p);
  }

  // One thread. V follows K by a tile, the order in which the consumers ask: they are done with the
  // last V of a part before they begin the next.
  struct Producer {
    const Params& p;
    Smem& s;
    const Part* part;
    int row, column, first, last, kv_head;  // of it
    const spec::TensorMap* wanted;          // its maps, of K and of V
    const spec::TensorMap* maps = nullptr;  // those in use
    uint32_t q_count = 0, k_count = 0;
    int v_tile = -1, v_head = 0;  // that is still owed

    __device__ __forceinline__ Producer(const Params& p, Smem& s) : p(p), s(s) {}

    // The first part, and its maps: may come before the wait, see spec.cuh.
    __device__ __forceinline__ void start() {
      ptx::prefetch_map(&p.q);
      read(blockIdx.x);
      if (last > 0) acquire();
      ptx::prefetch_map(&p.o_map);
    }
    __device__ __forceinline__ void read(int number) {
      part = p.parts + number;
      const int4 low = __ldcg(reinterpret_cast<const int4*>(part));
      const int4 high = __ldcg(reinterpret_cast<const int4*>(part) + 1);
      wanted = reinterpret_cast<const spec::TensorMap*>(int64_t(low.y) << 32 | uint32_t(low.x)) +
               2 * p.box;
      row = low.z;
      column = low.w;
      first = high.x;
      last = high.y;
      kv_head = high.z;
    }
    // A sequence's maps, made known to the copy engine.
    __device__ __forceinline__ void acquire() {
      maps = wanted;
      ptx::acquire_map(maps);
      ptx::acquire_map(maps + 1);
      ptx::prefetch_map(maps);
      ptx::prefetch_map(maps + 1);
    }

    __device__ __forceinline__ void load(const __half* to, const spec::TensorMap* map,
                                         const uint64_t* full, int head, int key) {
      ptx::barrier_expect(at(full), kTileBytes);
#pragma unroll
      for (int i = 0; i < kPlanes; ++i)
        ptx::tensor_load(at(to) + i * kPlane, map, at(full), 64 * i, key, head);
    }
    // Of the `number`-th tile, if it is owed.
    __device__ __forceinline__ void load_v(uint32_t number) {
      if (v_tile < 0) return;
      const int i = number % Stages;
      ptx::barrier_wait(at(&s.empty_v[i]), (number / Stages & 1) ^ 1);
      load(&s.v[i][0][0][0], maps + 1, &s.full_v[i], v_head, v_tile * BN);
      v_tile = -1;
    }

    // Q of a part.
    __device__ __forceinline__ void begin() {
      if (QStages == 1)
        load_v(k_count - 1);  // without it the consumers do not come to the end of Q
      const int stage = q_count % QStages;
      ptx::barrier_wait(at(&s.empty_q[stage]), (q_count / QStages & 1) ^ 1);
      const int tokens = tokens_of(p);
      ptx::barrier_expect(at(&s.full_q[stage]),
                          kPlanes * WGS * 128 * tokens * p.pack + uint32_t(sizeof(Part)));
      ptx::bulk_load(at(&s.part[stage]), part, sizeof(Part), at(&s.full_q[stage]));
#pragma unroll
      for (int w = 0; w < WGS; ++w, row += tokens)
#pragma unroll
        for (int i = 0; i < kPlanes; ++i)
          ptx::tensor_load(at(&s.q[stage][i][64 * w][0]), &p.q, at(&s.full_q[stage]), 64 * i,
                           column * p.pack, row);
      ++q_count;
    }
    __device__ __forceinline__ void run() {
      while (last > 0) {
        const int head = p.layer * p.kv_heads + kv_head;
        int tile = last - 1, taken = 0;
        begin();
        if (wanted != maps) {
          load_v(k_count - 1);
          acquire();
        }
#pragma unroll 1
        for (; tile >= first; --tile) {
          // Late, so that the busy take no more work; the answer is for after the loop.
          if (tile == first) taken = ptx::fetch_increment(p.counters);
          const int i = k_count % Stages;
          ptx::barrier_wait(at(&s.empty_k[i]), (k_count / Stages & 1) ^ 1);
          load(&s.k[i][0][0][0], maps, &s.full_k[i], head, tile * BN);
          load_v(k_count++ - 1);
          v_tile = tile;
          v_head = head;
        }
        read(gridDim.x + taken);
      }
      load_v(k_count - 1);
      const int stage = q_count % QStages;  // nothing follows
      ptx::barrier_wait(at(&s.empty_q[stage]), (q_count / QStages & 1) ^ 1);
      s.part[stage].last = 0;
      ptx::barrier_arrive(at(&s.full_q[stage]));
      if (ptx::fetch_increment(p.counters + 1) == int(gridDim.x) - 1)
        p.counters[0] = p.counters[1] = 0;  // for the next launch
    }
  };

  // One warp: what consumer `w` has staged goes to global memory, whole tiles by TMA.
  static __device__ __forceinline__ void write_results(const Params& p, Smem& s, int w) {
    const int lane = threadIdx.x % 32, before = tokens_before(p, w);
    for (uint32_t count = 0;; ++count) {
      const int stage = count % QStages, parity = count / QStages & 1;
      ptx::barrier_wait(at(&s.full_q[stage]), parity);
      const Part part = s.part[stage];
      if (part.last == 0) return;
      ptx::barrier_wait(at(&s.staged[stage][w]), parity);
      const uint32_t from = at(&s.q[stage][0][64 * w][0]);
      const int token = part.token + before, row = part.row + before;  // the first
      if (s.writes[stage][w]) {
        if (token >= 0) {
          if (lane == 0) {
#pragma unroll
            for (int i = 0; i < kPlanes; ++i)
              ptx::tensor_store(&p.o_map, from + i * kQPlane, 64 * i, part.column * p.pack, row);
            ptx::tensor_store_wait();
          }
        } else {
          constexpr int kChunks = HeadDim / 8;
          for (int i = lane; i < tokens_of(p) * p.pack * kChunks; i += 32) {
            const int line = i / kChunks, chunk = i % kChunks, t = token_of(p, line);
            if (token + t < 0) continue;
            const uint4 v = ptx::load_shared(from + chunk / 8 * kQPlane + line * 128 +
                                             (((chunk % 8) ^ (line % 8)) << 4));
            __half* const o =
                p.o +
                (int64_t(row + t) * p.heads + part.column * p.pack + line - t * p.pack) * HeadDim;
            *reinterpret_cast<uint4*>(o + chunk * 8) = v;
          }
        }
      }
      ptx::barrier_arrive(at(&s.empty_q[stage]));
    }
  }

  struct Consumer {
    const Params& p;
    Smem& s;
    const int wg, lane, warp;  // warp of the warpgroup
    float scores[BN / 2], o[HeadDim / 2];
    uint32_t probabilities[BN / 4];
    float top[2], sum[2];  // a row's maximum; this lane's share of its sum
    float shift[2];        // what is added to its scaled scores: see `settle_top`
    float shrink[2];
    bool rescale, far;  // of the warp: whether O must be scaled; whether any row's top is far
    uint32_t q_count = 0, k_count = 0, v_count = 0;

    __device__ __forceinline__ Consumer(const Params& p, Smem& s, int wg)
        : p(p), s(s), wg(wg), lane(threadIdx.x % 32), warp(threadIdx.x / 32 % 4) {}

    __device__ __forceinline__ void begin_turn() {
      if constexpr (WGS > 1) ptx::named_barrier<256>(1 + wg);
    }
    __device__ __forceinline__ void end_turn() {
      if constexpr (WGS > 1) ptx::named_arrive<256>(1 + (wg == WGS - 1 ? 0 : wg + 1));
    }
    __device__ __forceinline__ void release(const uint64_t* empty) {
      if (lane == 0) ptx::barrier_arrive(at(empty));
    }
    __device__ __forceinline__ void wait_k() {
      ptx::barrier_wait(at(&s.full_k[k_count % Stages]), k_count / Stages & 1);
    }
    __device__ __forceinline__ void wait_v() {
      ptx::barrier_wait(at(&s.full_v[v_count % Stages]), v_count / Stages & 1);
    }
    __device__ __forceinline__ void done_k() {
      release(&s.empty_k[k_count % Stages]);
      ++k_count;
    }
    __device__ __forceinline__ void done_v() {
      release(&s.empty_v[v_count % Stages]);
      ++v_count;
    }

    __device__ __forceinline__ void issue_scores(int stage) {
      const uint64_t q = ptx::wgmma_operand(at(&s.q[stage][0][64 * wg][0]));
      const uint64_t k = ptx::wgmma_operand(at(&s.k[k_count % Stages][0][0][0]));
#pragma unroll
      for (int i = 0; i < HeadDim / 16; ++i)
        ptx::Wgmma<BN>::mma(scores, q + i / 4 * (kQPlane >> 4) + i % 4 * 2,
                            k + i / 4 * (kPlane >> 4) + i % 4 * 2, i != 0);
      ptx::wgmma_commit();
    }
    __device__ __forceinline__ void issue_values() {
      const uint64_t v = ptx::wgmma_operand_transposed(at(&s.v[v_count % Stages][0][0][0]), kPlane);
#pragma unroll
      for (int i = 0; i < BN / 16; ++i)
        ptx::WgmmaRegisters<HeadDim>::mma(o, probabilities + 4 * i, v + i * (2048 >> 4));
      ptx::wgmma_commit();
    }

    // This lane's two rows are those of tokens `token(0)` and `token(8)` after the warpgroup's
    // first.
    __device__ __forceinline__ int token(int below) const {
      return token_of(p, warp * 16 + lane / 4 + below);
    }

    // Capped: s -> cap tanh(scale s / cap), both times log2(e). tanh(x) = 1 - 2 / (1 + e^2x).
    __device__ __forceinline__ void bound() {
      if constexpr (Capped) {
#pragma unroll
        for (float& x : scores)
          x = fmaf(-2.0f * p.cap, ptx::reciprocal_approx(1.0f + ptx::exp2_approx(x * p.scale)),
                   p.cap);
      }
    }
    __device__ __forceinline__ float scale() const { return Capped ? 1.0f : p.scale; }

    // Minus infinity where a row does not see the key: one past its own position, or, with
    // `Windowed`, one that is too old.
    template <bool Windowed>
    __device__ __forceinline__ void mask(int position, int tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int newest = position + token(8 * half) - tile * BN - 2 * (lane % 4);
        const int oldest = newest - p.window;  // the first that it does not see any more
#pragma unroll
        for (int j = 0; j < BN / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (8 * j + e > newest || (Windowed && 8 * j + e <= oldest))
              scores[4 * j + 2 * half + e] = -INFINITY;
      }
    }

    // exp(s - top) is 2^(scale s - scale top) with one rounding of scale top, which is seen in a
    // result from about kFar on; from there on the difference comes first, exactly. A soft-cap
    // keeps scores below.
    __device__ __forceinline__ bool is_far(int r) const {
      return !Capped && fabsf(top[r] * scale()) > kFar;
    }
    __device__ __forceinline__ void settle_top() {
      far = __any_sync(0xffffffffu, is_far(0) || is_far(1));
#pragma unroll
      for (int r = 0; r < 2; ++r) shift[r] = is_far(r) ? 0.0f : -top[r] * scale();
    }
    // Whether a row's maximum has to follow one of its scores.
    __device__ __forceinline__ bool exceeds(int r, float score) const {
      return fmaf(score, scale(), shift[r]) > kLazy;
    }
    __device__ __forceinline__ bool exceeds_exactly(int r, float score) const {
      return is_far(r) ? (score - top[r]) * scale() > kLazy : exceeds(r, score);
    }

    // Scores to probabilities; what O must be scaled by is left in `rescale` and `shrink`.
    template <bool First>
    __device__ __forceinline__ void softmax() {
      float x[2], y[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        x[r] = fmaxf(scores[2 * r], scores[2 * r + 1]);
        y[r] = fmaxf(scores[2 * r + 4], scores[2 * r + 5]);
      }
#pragma unroll
      for (int j = 2; j < BN / 8; j += 2)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          x[r] = fmaxf(x[r], fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
          y[r] = fmaxf(y[r], fmaxf(scores[4 * j + 2 * r + 4], scores[4 * j + 2 * r + 5]));
        }
#pragma unroll
      for (int r = 0; r < 2; ++r) x[r] = fmaxf(x[r], y[r]);
      if (First) {
        top[0] = top[1] = kNothing;
        sum[0] = sum[1] = 0;
        rescale = true;
      } else {
        rescale = far || __any_sync(0xffffffffu, exceeds(0, x[0]) || exceeds(1, x[1]));
      }
      if (rescale) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          x[r] = fmaxf(x[r], __shfl_xor_sync(0xffffffffu, x[r], 1));
          x[r] = fmaxf(x[r], __shfl_xor_sync(0xffffffffu, x[r], 2));
          const float before = top[r];
          if (First)
            top[r] = fmaxf(x[r], kNothing);
          else if (exceeds_exactly(r, x[r]))
            top[r] = x[r];
          if (!First) {
            shrink[r] = ptx::exp2_approx((before - top[r]) * scale());  // 1 where nothing moved
            sum[r] *= shrink[r];
          }
        }
        settle_top();
      }
      if (far) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float less = is_far(r) ? top[r] : 0.0f;
#pragma unroll
          for (int j = 0; j < BN / 8; ++j) {
            scores[4 * j + 2 * r] -= less;
            scores[4 * j + 2 * r + 1] -= less;
          }
        }
      }
      float more[2] = {};
#pragma unroll
      for (int j = 0; j < BN / 8; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& low = scores[4 * j + 2 * r];
          float& high = scores[4 * j + 2 * r + 1];
          low = ptx::exp2_approx(fmaf(low, scale(), shift[r]));
          high = ptx::exp2_approx(fmaf(high, scale(), shift[r]));
          sum[r] += low;
          more[r] += high;
        }
      sum[0] += more[0];
      sum[1] += more[1];
    }
    __device__ __forceinline__ void pack() {
#pragma unroll
      for (int i = 0; i < BN / 4; ++i)
        probabilities[i] = ptx::pack_halves(scores[2 * i], scores[2 * i + 1]);
    }
    __device__ __forceinline__ void scale_output() {
      if (!rescale) return;
#pragma unroll
      for (int j = 0; j < HeadDim / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[4 * j + i] *= shrink[i / 2];
    }

    enum Mask { kNone, kCausal, kWindow };
    template <Mask M>
    __device__ __forceinline__ void step(int position, int stage, int tile) {
      wait_k();
      begin_turn();
      ptx::wgmma_settle(scores);
      ptx::wgmma_settle(o);
      ptx::wgmma_settle(probabilities);
      ptx::wgmma_fence();
      issue_scores(stage);
      wait_v();
      issue_values();
      end_turn();
      ptx::wgmma_wait<1>();
      ptx::wgmma_settle(scores);
      done_k();
      bound();
      if (M != kNone) mask<M == kWindow>(position, tile);
      softmax<false>();
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(o);
      ptx::wgmma_settle(probabilities);
      done_v();
      scale_output();
      pack();
    }
    // A tile of which this warpgroup sees nothing: it passes through the rings and the turns. A
    // slot goes when all lanes have seen it full: later ones would wait for the next but one.
    __device__ __forceinline__ void skip() {
      wait_k();
      __syncwarp();
      done_k();
      begin_turn();
      end_turn();
      wait_v();
      __syncwarp();
      done_v();
    }

    // Zeros instead of the last `dirty` keys of the V tile to come.
    __device__ __forceinline__ void clean(int dirty) {
      wait_v();
      const uint32_t v = at(&s.v[v_count % Stages][0][0][0]) + (BN - dirty) * 128;
      for (int i = threadIdx.x % 128; i < dirty * 8; i += 128)
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane)
          ptx::store_shared_zero(v + plane * kPlane + i * 16);
      ptx::fence_async_proxy();
      ptx::named_barrier<128>(1 + WGS + wg);
    }

    // Tiles [bottom, tile], the first that any row sees on top; its last `dirty` keys, if any, are
    // past the end of the sequence.
    __device__ __forceinline__ void walk(int stage, int position, int newest, int tile, int bottom,
                                         int dirty) {
      // Tiles [clear, edge) hold no key that any row does not see.
      const int edge = max(position + 1, 0) / BN, oldest = newest - p.window;
      const int clear = oldest < 0 ? bottom : max(oldest / BN + 1, bottom);
      wait_k();
      begin_turn();
      ptx::wgmma_settle(scores);
      ptx::wgmma_fence();
      issue_scores(stage);
      end_turn();
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(scores);
      done_k();
      bound();
      if (tile < clear)
        mask<true>(position, tile);
      else if (tile >= edge)
        mask<false>(position, tile);
      softmax<true>();
      pack();
#pragma unroll
      for (float& x : o) x = 0;
      if (dirty > 0) clean(dirty);
      --tile;
      for (; tile >= max(edge, clear); --tile) step<kCausal>(position, stage, tile);
      for (; tile >= clear; --tile) step<kNone>(position, stage, tile);
      for (; tile >= bottom; --tile) step<kWindow>(position, stage, tile);
      wait_v();
      ptx::wgmma_settle(o);
      ptx::wgmma_settle(probabilities);
      ptx::wgmma_fence();
      issue_values();
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(o);
      done_v();
    }

    // Leaves this part's sums, and takes up those of all parts if it is the last to come.
    __device__ __forceinline__ bool merge(const Part& part) {
      const int thread = threadIdx.x % 128;
      const auto place = [&](int i) { return int64_t(part.slot + i) * WGS + wg; };
      float* const own = p.partial + place(part.index) * (HeadDim / 2 * 128) + thread;
#pragma unroll
      for (int i = 0; i < HeadDim / 2; ++i) __stcg(own + i * 128, o[i]);
      __stcg(p.partial_rows + place(part.index) * 128 + thread,
             float4{top[0], top[1], sum[0], sum[1]});
      __threadfence();
      ptx::named_barrier<128>(1 + WGS + wg);
      // One thread hears whether this part is the last; the others from where it will be said
      // again.
      volatile int32_t* const last = &s.writes[(q_count - 1) % QStages][wg];
      if (lane == 0 && warp == 0)
        *last = atomicInc(p.arrived + part.group * WGS + wg, part.parts - 1) == part.parts - 1;
      ptx::named_barrier<128>(1 + WGS + wg);
      if (!*last) return false;
      __threadfence();
      top[0] = top[1] = kNothing;
      for (int i = 0; i < part.parts; ++i) {
        const float4 rows = __ldcg(p.partial_rows + place(i) * 128 + thread);
        top[0] = fmaxf(top[0], rows.x);
        top[1] = fmaxf(top[1], rows.y);
      }
      sum[0] = sum[1] = 0;
#pragma unroll
      for (float& x : o) x = 0;
      for (int i = 0; i < part.parts; ++i) {
        const float4 rows = __ldcg(p.partial_rows + place(i) * 128 + thread);
        const float weight[2] = {ptx::exp2_approx((rows.x - top[0]) * scale()),
                                 ptx::exp2_approx((rows.y - top[1]) * scale())};
        sum[0] = fmaf(weight[0], rows.z, sum[0]);
        sum[1] = fmaf(weight[1], rows.w, sum[1]);
        const float* const from = p.partial + place(i) * (HeadDim / 2 * 128) + thread;
#pragma unroll
        for (int j = 0; j < HeadDim / 2; ++j) {
          o[j] = fmaf(weight[j / 2 % 2], __ldcg(from + j * 128), o[j]);
          if (j % 32 == 31) __syncwarp();  // or all loads want a register at once
        }
      }
      return true;
    }

    // O / sum as fp16 over this warp's rows of Q. A sibling may still multiply its own: a warp's
    // part of a product reads no other rows of A.
    __device__ __forceinline__ void stage_output(int stage) {
      float share[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float total = sum[r];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        share[r] = total > 0 ? 1.0f / total : 0.0f;
      }
      const int row = warp * 16 + lane % 16;
      const uint32_t to = at(&s.q[stage][0][64 * wg][0]) + row * 128;
#pragma unroll
      for (int j = 0; j < HeadDim / 16; ++j) {
        const int chunk = 2 * j + lane / 16;
        const float* const d = &o[8 * j];
        ptx::store_matrix_x4(to + (j >> 2) * kQPlane + (((chunk % 8) ^ (row % 8)) << 4),
                             ptx::pack_halves(d[0] * share[0], d[1] * share[0]),
                             ptx::pack_halves(d[2] * share[1], d[3] * share[1]),
                             ptx::pack_halves(d[4] * share[0], d[5] * share[0]),
                             ptx::pack_halves(d[6] * share[1], d[7] * share[1]));
      }
      ptx::fence_async_proxy();
    }

    // Key tiles of the next part end here; 0: there is none.
    __device__ __forceinline__ int next(int& stage) {
      stage = q_count % QStages;
      ptx::barrier_wait(at(&s.full_q[stage]), q_count / QStages & 1);
      ++q_count;
      return s.part[stage].last;
    }

    __device__ __forceinline__ void run() {
      if (WGS > 1 && wg == WGS - 1) ptx::named_arrive<256>(1);  // the first warpgroup goes first
      const int tokens = tokens_of(p), before = tokens_before(p, wg);
      int stage;
      int last = next(stage);
      while (last > 0) {
        const Part& part = s.part[stage];
        const int first = part.first, position = part.position + before;
        const int newest = position + tokens - 1;
        const bool empty = part.token + before + tokens <= 0;
        const int bottom = max(first, max(position - p.window + 1, 0) / BN);
        const int top_tile = empty ? first - 1 : newest / BN;
        int tile = last - 1;
        for (; tile > top_tile && tile >= first; --tile) skip();
        if (tile >= bottom) {
          const int dirty = tile == last - 1 ? last * BN - part.end : 0;
          walk(stage, position, newest, tile, bottom, dirty);
          tile = bottom - 1;
        } else {
          top[0] = top[1] = kNothing;
          sum[0] = sum[1] = 0;
#pragma unroll
          for (float& x : o) x = 0;
        }
        for (; tile >= first; --tile) skip();
        bool writes = !empty;
        if constexpr (kSplits)
          if (!empty && part.parts > 1) writes = merge(part);
        if (writes) stage_output(stage);
        if (warp == 0 && lane == 0) s.writes[stage][wg] = writes;
        ptx::barrier_arrive(at(&s.staged[stage][wg]));
        last = next(stage);
      }
      if (WGS > 1 && wg == 0) ptx::named_barrier<256>(1);  // the turn that the last one passed on
    }
  };

  static constexpr float kNothing =
      -1e30f;  // the maximum of no scores; finite, so that less itself it is 0

  static __device__ void run(const Params& p) {
    Smem& s = spec::shared<Smem>();
    const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
    Producer producer(p, s);
    if (threadIdx.x == 0) {
      producer.start();
    } else if (threadIdx.x == 32) {
      // Every thread that has read a part arrives: its own reads come before what is written next.
      for (int i = 0; i < QStages; ++i) {
        ptx::barrier_init(at(&s.full_q[i]), 1);
        ptx::barrier_init(at(&s.empty_q[i]), 32 * WGS);
        for (int w = 0; w < WGS; ++w) ptx::barrier_init(at(&s.staged[i][w]), 128);
      }
      for (int i = 0; i < Stages; ++i) {
        ptx::barrier_init(at(&s.full_k[i]), 1);
        ptx::barrier_init(at(&s.full_v[i]), 1);
        ptx::barrier_init(at(&s.empty_k[i]), 4 * WGS);
        ptx::barrier_init(at(&s.empty_v[i]), 4 * WGS);
      }
      ptx::fence_barrier_init();
      ptx::fence_async_proxy();
    }
    __syncthreads();
    if (group == 0) {
      ptx::lower_registers<ProducerRegisters>();
      const int w = int(threadIdx.x) / 32;
      if (threadIdx.x == 0) {
        ptx::dependency_wait();
        producer.run();
      } else {
        ptx::dependency_wait();
        if (w >= 1 && w <= WGS) write_results(p, s, w - 1);
      }
      __syncwarp();
    } else {
      ptx::raise_registers<ConsumerRegisters>();
      ptx::dependency_wait();
      Consumer(p, s, group - 1).run();
    }
  }
};

}  // namespace attention
