// The work list of an attention kernel, once per forward pass, from what is live: every sequence's
// rows in tiles, counted from its end (a partial tile then holds the rows that see the fewest
// keys), longest first over all sequences.
//
// Where that leaves multiprocessors idle (few rows, many keys), the key tiles of all row tiles of
// all columns, laid end to end, are cut into as many equal pieces as there are workers. Longest
// first then pairs what is left of one row tile with what is left of another.
//
// One block. A tile's length in key tiles is worked out anew wherever it is needed, which is
// cheaper than keeping it. Lengths are sorted by counting, in at most kBuckets classes; the order
// within a class is left to chance: it has no influence on any result.
#pragma once

#include "../../core/live.cuh"
#include "../../core/spec.cuh"
#include "attention_parts.cuh"

#define SCHEDULE_PARAMS(P)                                                            \
  P(const Live*, live)                                                                \
  P(const Sequence*, sequences)                                                       \
  P(attention::Part*, parts) /* [all parts of all columns, and workers] */            \
  P(int32_t, max_split)      /* parts that tiles may be split into in all; 0: none */ \
  P(int32_t, rows)           /* of a tile */                                          \
  P(int32_t, keys)           /* of a key tile */                                      \
  P(int32_t, window)         /* keys a row sees, itself included */                   \
  P(int32_t, columns)        /* heads, or K/V heads, that each part is done for */    \
  P(int32_t, kv_heads)                                                                \
  P(int32_t, key_bytes) /* of a key and its value, one head */                        \
  P(int32_t, workers)   /* blocks that work at a time */

#define SCHEDULE_PLANES(P, A)                \
  P(16, int32_t, tiles_before, [kSequences]) \
  P(16, int32_t, keys_before, [kThreads])    \
  P(16, int32_t, bucket, [kBuckets])         \
  P(16, int32_t, scan, [32])                 \
  P(16, int32_t, longest)                    \
  P(16, int32_t, work)                       \
  P(16, int32_t, large)                      \
  P(16, int32_t, slots)                      \
  P(16, int32_t, groups)

template <int Threads>
struct Schedule {
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr bool kHoldsNext = true;
  static constexpr int kSequences = 4096;  // that `live` may hold
  static constexpr int kBuckets = 1024;
  static constexpr int kLeast = 3;  // key tiles of a piece: fewer are left with their neighbours
  static constexpr int kPieceCost = 3;  // of a piece beside its key tiles, in key tiles
  static constexpr int64_t kSectionBytes = 40 << 20;  // of K and V that L2 keeps beside all else
  static_assert(Threads == kBuckets);
  static constexpr spec::Tile tile() { return spec::Tile{}.with("sequences", kSequences); }
  SPEC_PARAMS(SCHEDULE_PARAMS)
  SPEC_SMEM(SCHEDULE_PLANES)

  using Part = attention::Part;
  struct Tile {
    int sequence, row, first, last;
    __device__ __forceinline__ int length() const { return last - first; }
  };

  // Tile `index` over all sequences.
  static __device__ __forceinline__ Tile tile_at(const Params& p, const Smem& s, int sequences,
                                                 int index) {
    int low = 0, high = sequences;  // the last sequence that begins at or before the index
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (s.tiles_before[middle] <= index ? low : high) = middle;
    }
    const Sequence& q = p.sequences[low];
    const int row = q.rows - (index - s.tiles_before[low] + 1) * p.rows;
    const int64_t oldest = int64_t(q.start) + max(row, 0) - p.window + 1;
    return {low, row, oldest > 0 ? int(oldest / p.keys) : 0,
            (q.start + row + p.rows - 1) / p.keys + 1};
  }

  // Exclusive sum over the block; `total` to all.
  static __device__ __forceinline__ int sum_before(Smem& s, int value, int& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += other;
    }
    __syncthreads();  // readers of the sums of a call before
    if (lane == 31) s.scan[warp] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) before += s.scan[w];
      total += s.scan[w];
    }
    return before + sum - value;
  }

  // K/V heads worked on at a time: a divisor of all whose keys and values L2 can keep.
  static __device__ __forceinline__ int section(const Params& p, int64_t cached) {
    int heads = p.kv_heads;
    while (heads > 1 && (p.kv_heads % heads || heads * cached * 1024 * p.key_bytes > kSectionBytes))
      --heads;
    return heads;
  }

  // Key tiles of a piece if cutting is worth it, else 0.
  static __device__ __forceinline__ int piece_of(const Params& p, const Smem& s, int tiles) {
    const int64_t all = int64_t(s.work) * p.columns;
    // Tiles longer than half of the longest are done in full rounds, at worst.
    const int rounds = (s.large * p.columns + p.workers - 1) / p.workers;
    const int64_t whole = max(int64_t(rounds) * s.longest, all / p.workers);
    // Adding up a tile's pieces takes its last one about a key tile's time for each: more pieces
    // than the root of its length cost more time than they save.
    const int piece =
        max(max(int((all + p.workers - 1) / p.workers), kLeast), int(sqrtf(float(s.longest))));
    const bool fits = tiles <= kThreads && tiles * p.columns + p.workers <= p.max_split;
    return fits && piece + kPieceCost < whole ? piece : 0;
  }

  // Visits the pieces of [begin, end) between multiples of `piece`: first, last, index, number.
  template <class Visit>
  static __device__ __forceinline__ void each_piece(int begin, int end, int piece, Visit&& visit) {
    int low = (begin + kLeast + piece - 1) / piece, high = (end - kLeast) / piece;  // cuts
    const int number = max(high - low + 1, 0) + 1;
    for (int i = 0, from = begin; i < number; ++i) {
      const int to = i == number - 1 ? end : (low + i) * piece;
      visit(from - begin, to - begin, i, number);
      from = to;
    }
  }

  // Where something of this length goes in the order of lengths: after a first pass that counts.
  static __device__ __forceinline__ int32_t* bucket_of(Smem& s, int length) {
    return &s.bucket[kBuckets - 1 - length / (s.longest / kBuckets + 1)];
  }
  static __device__ __forceinline__ void scan_buckets(Smem& s) {
    __syncthreads();
    int count;
    const int before = sum_before(s, s.bucket[threadIdx.x], count);
    s.bucket[threadIdx.x] = before;
    __syncthreads();
  }

  // All parts of whole tiles; a section's K/V heads are done before the next section's.
  static __device__ __forceinline__ void write_tiles(const Params& p, Smem& s, int sequences,
                                                     int tiles, int wide) {
    for (int i = threadIdx.x; i < tiles; i += kThreads)
      atomicAdd(bucket_of(s, tile_at(p, s, sequences, i).length()), 1);
    scan_buckets(s);
    for (int i = threadIdx.x; i < tiles; i += kThreads) {
      const Tile t = tile_at(p, s, sequences, i);
      const int at = atomicAdd(bucket_of(s, t.length()), 1);
      for (int column = 0; column < p.columns; ++column) {
        const int section = column / wide;
        p.parts[(section * (tiles - 1) + at) * wide + column] =
            part(p, t, column, t.first, t.last, 1, 0, 0, 0);
      }
    }
  }

  // All pieces of all tiles; the number of pieces.
  static __device__ __forceinline__ int write_pieces(const Params& p, Smem& s, int sequences,
                                                     int tiles, int piece) {
    int total;
    const int own = threadIdx.x < tiles ? tile_at(p, s, sequences, threadIdx.x).length() : 0;
    s.keys_before[threadIdx.x] = sum_before(s, own, total);
    __syncthreads();
    const auto each = [&](auto&& visit) {
      for (int i = threadIdx.x; i < tiles * p.columns; i += kThreads) {
        const int column = i / tiles;
        const Tile t = tile_at(p, s, sequences, i - column * tiles);
        visit(t, column, column * total + s.keys_before[i - column * tiles]);
      }
    };
    each([&](const Tile& t, int, int begin) {
      each_piece(begin, begin + t.length(), piece,
                 [&](int first, int last, int, int) { atomicAdd(bucket_of(s, last - first), 1); });
    });
    scan_buckets(s);
    each([&](const Tile& t, int column, int begin) {
      int slot = 0, group = 0;
      each_piece(begin, begin + t.length(), piece, [&](int first, int last, int i, int number) {
        if (i == 0 && number > 1) {
          slot = atomicAdd(&s.slots, number);
          group = atomicAdd(&s.groups, 1);
        }
        p.parts[atomicAdd(bucket_of(s, last - first), 1)] =
            part(p, t, column, t.first + first, t.first + last, number, i, slot, group);
      });
    });
    __syncthreads();
    return s.bucket[kBuckets - 1];
  }

  static __device__ __forceinline__ Part part(const Params& p, const Tile& t, int column, int first,
                                              int last, int parts, int index, int slot, int group) {
    const Sequence& q = p.sequences[t.sequence];
    return {
        q.maps, q.row0 + t.row,  column,           first, last,  column / (p.columns / p.kv_heads),
        t.row,  q.start + t.row, q.start + q.rows, parts, index, slot,
        group};
  }

  static __device__ void run(const Params& p) {
    Smem& s = spec::shared<Smem>();
    const int sequences = min(p.live->sequences, kSequences);
    s.bucket[threadIdx.x] = 0;
    if (threadIdx.x == 0) s.longest = s.work = s.large = s.slots = s.groups = 0;

    int tiles = 0;
    int64_t cached = 0;
    for (int begin = 0; begin < sequences; begin += kThreads) {
      const int i = begin + threadIdx.x;
      const int own = i < sequences ? (p.sequences[i].rows + p.rows - 1) / p.rows : 0;
      int total;
      const int before = sum_before(s, own, total);
      if (i < sequences) s.tiles_before[i] = tiles + before;
      tiles += total;
      // In units of 1024 keys, so that a million sequences' worth of keys fits.
      sum_before(s, own ? (p.sequences[i].start + p.sequences[i].rows + 1023) >> 10 : 0, total);
      cached += total;
    }
    __syncthreads();
    int longest = 0, work = 0;
    for (int i = threadIdx.x; i < tiles; i += kThreads) {
      const int length = tile_at(p, s, sequences, i).length();
      longest = max(longest, length);
      work += length;
    }
    atomicMax(&s.longest, longest);
    atomicAdd(&s.work, work);
    __syncthreads();
    int large = 0;
    for (int i = threadIdx.x; i < tiles; i += kThreads)
      large += 2 * tile_at(p, s, sequences, i).length() > s.longest;
    atomicAdd(&s.large, large);
    __syncthreads();

    const int piece = piece_of(p, s, tiles);
    int count = tiles * p.columns;
    if (piece)
      count = write_pieces(p, s, sequences, tiles, piece);
    else
      write_tiles(p, s, sequences, tiles, section(p, cached) * (p.columns / p.kv_heads));
    // Whoever asks for more than there is, and every worker does once, finds an end.
    for (int i = threadIdx.x; i < p.workers; i += kThreads) p.parts[count + i] = {};
  }
};
