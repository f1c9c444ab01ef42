// What a lane of gemv_int8.cuh holds of its rows of packed weights, type by type, as the integers
// that dp4a takes, four to a word. Bits within fields: quant/blocks.cuh; where fields lie:
// quant/planes.cuh.
#pragma once

#include <cstdint>

#include "../core/ptx.cuh"
#include "../quant/planes.cuh"
#include "../quant/unpack.cuh"

namespace gemv {

// N bytes of weights, aligned to them.
template <int N>
struct Words {
  uint32_t w[(N + 3) / 4];
};

// The two-byte fields of Rows neighbouring rows, by row.
template <int Rows>
struct Halves {
  Words<2 * Rows> bits;
  __device__ __forceinline__ void load(const uint8_t* from) { ptx::load_constant(bits.w, from); }
  __device__ __forceinline__ float operator[](int r) const {
    return quant::half_value(uint16_t(bits.w[r / 2] >> 16 * (r % 2)));
  }
};

// The four-byte fields of Rows neighbouring rows: two halves each.
template <int Rows>
struct Pairs {
  Words<4 * Rows> bits;
  __device__ __forceinline__ void load(const uint8_t* from) { ptx::load_constant(bits.w, from); }
  __device__ __forceinline__ float low(int r) const {
    return quant::half_value(uint16_t(bits.w[r]));
  }
  __device__ __forceinline__ float high(int r) const {
    return quant::half_value(uint16_t(bits.w[r] >> 16));
  }
};

// Where a lane's rows lie.
struct Place {
  const uint8_t* w;  // the tensor
  int64_t n, blocks;
  int row;  // the first one

  template <int Field, class Block>
  __device__ __forceinline__ const uint8_t* at(int r, uint32_t block) const {
    constexpr quant::Plane plane = quant::Planes<Block>::all[Field];
    return w + plane.place(n, blocks, row + r, block);
  }
};

// Mins: none; one for each group of 32, times the plane's sums; or one for each fold, times the
// exact sum of its 16 activations.
enum class Mins { none, group, fold };

// What a lane holds of Rows rows (2 or 4). Every type has
//   kUnits    units of a block
//   kFolds    scales of a unit; a fold's integers are summed up before they are scaled
//   kWords    of four weights in a fold
//   kBias     of the words
//   column(unit, fold)              of the fold's first weight within the block
//   load(place, block, unit)
//   words(r, unit, fold, words)     integers of row r, four to a word
//   scale(r, unit, fold)            of row r
//   min(r, unit, fold)              of row r: of the unit's group, or of the fold
template <class Block, int Rows>
struct Unit;

// 32 nibbles in 16 bytes: the low ones, then the high ones.
__device__ __forceinline__ void nibbles(const uint32_t (&q)[4], uint32_t (&words)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = q[i] & 0x0f0f0f0fu;
    words[4 + i] = q[i] >> 4 & 0x0f0f0f0fu;
  }
}

// Bits 4i ... 4i + 3 of `high` on top of the nibbles of word i.
__device__ __forceinline__ void fifth_bits(uint32_t high, uint32_t (&words)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) words[i] |= (high >> 4 * i & 15) * 0x02040810u & 0x10101010u;
}

// Signed bytes of the codebook for the nibbles of each word.
__device__ __forceinline__ void look_up(uint32_t (&words)[8]) {
#pragma unroll
  for (uint32_t& word : words) word = quant::codes(word) ^ 0x80808080u;
}

struct BlockUnit {  // a block of 32
  static constexpr int kUnits = 1, kFolds = 1, kWords = 8, kBias = 0;
  static constexpr Mins kMins = Mins::none;
  static __device__ __forceinline__ int column(uint32_t, int) { return 0; }
};

template <class Block, int Rows, int Bias>
struct NibbleUnit : BlockUnit {
  static constexpr int kBias = Bias;
  Words<16> q[Rows];
  Halves<Rows> d;
  __device__ __forceinline__ void load(const Place& at, uint32_t block, uint32_t) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) ptx::load_once(q[r].w, at.at<0, Block>(r, block));
    d.load(at.at<1, Block>(0, block));
  }
  __device__ __forceinline__ void words(int r, uint32_t, int, uint32_t (&words)[8]) const {
    nibbles(q[r].w, words);
  }
  __device__ __forceinline__ float scale(int r, uint32_t, int) const { return d[r]; }
};

template <int Rows>
struct Unit<quant::block_q4_0, Rows> : NibbleUnit<quant::block_q4_0, Rows, 8> {};

template <int Rows>
struct Unit<quant::block_iq4_nl, Rows> : NibbleUnit<quant::block_iq4_nl, Rows, 0> {
  __device__ __forceinline__ void words(int r, uint32_t, int, uint32_t (&words)[8]) const {
    nibbles(this->q[r].w, words);
    look_up(words);
  }
};

template <int Rows>
struct Unit<quant::block_q4_1, Rows> : BlockUnit {
  using Block = quant::block_q4_1;
  static constexpr Mins kMins = Mins::group;
  Words<16> q[Rows];
  Pairs<Rows> dm;
  __device__ __forceinline__ void load(const Place& at, uint32_t block, uint32_t) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) ptx::load_once(q[r].w, at.at<0, Block>(r, block));
    dm.load(at.at<1, Block>(0, block));
  }
  __device__ __forceinline__ void words(int r, uint32_t, int, uint32_t (&words)[8]) const {
    nibbles(q[r].w, words);
  }
  __device__ __forceinline__ float scale(int r, uint32_t, int) const { return dm.low(r); }
  __device__ __forceinline__ float min(int r, uint32_t, int) const { return -dm.high(r); }
};

template <int Rows>
struct Unit<quant::block_q5_0, Rows> : BlockUnit {
  using Block = quant::block_q5_0;
  static constexpr int kBias = 16;
  Words<16> q[Rows];
  Words<4> high[Rows];
  Halves<Rows> d;
  __device__ __forceinline__ void load(const Place& at, uint32_t block, uint32_t) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      ptx::load_once(q[r].w, at.at<0, Block>(r, block));
      ptx::load_once(high[r].w, at.at<1, Block>(r, block));
    }
    d.load(at.at<2, Block>(0, block));
  }
  __device__ __forceinline__ void words(int r, uint32_t, int, uint32_t (&words)[8]) const {
    nibbles(q[r].w, words);
    fifth_bits(high[r].w[0], words);
  }
  __device__ __forceinline__ float scale(int r, uint32_t, int) const { return d[r]; }
};

template <int Rows>
struct Unit<quant::block_q5_1, Rows> : BlockUnit {
  using Block = quant::block_q5_1;
  static constexpr Mins kMins = Mins::group;
  Words<16> q[Rows];
  Words<4> high[Rows];
  Pairs<Rows> dm;
  __device__ __forceinline__ void load(const Place& at, uint32_t block, uint32_t) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      ptx::load_once(q[r].w, at.at<0, Block>(r, block));
      ptx::load_once(high[r].w, at.at<1, Block>(r, block));
    }
    dm.load(at.at<2, Block>(0, block));
  }
  __device__ __forceinline__ void words(int r, uint32_t, int, uint32_t (&words)[8]) const {
    nibbles(q[r].w, words);
    fifth_bits(high[r].w[0], words);
  }
  __device__ __forceinline__ float scale(int r, uint32_t, int) const { return dm.low(r); }
  __device__ __forceinline__ float min(int r, uint32_t, int) const { return -dm.high(r); }
};

template <int Rows>
struct Unit<quant::block_q8_0, Rows> : BlockUnit {
  using Block = quant::block_q8_0;
  Words<16> q[Rows][2];
  Halves<Rows> d;
  __device__ __forceinline__ void load(const Place& at, uint32_t block, uint32_t) {
#pragma unroll
    for (int r = 0; r < Rows; ++r)
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::load_once(q[r][i].w, at.at<0, Block>(r, block) + 16 * i);
    d.load(at.at<1, Block>(0, block));
  }
  __device__ __forceinline__ void words(int r, uint32_t, int, uint32_t (&words)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = q[r][i / 4].w[i % 4];
  }
  __device__ __forceinline__ float scale(int r, uint32_t, int) const { return d[r]; }
};

// Unit u: bytes 16u ... 16u + 15 of q, half of group 2j below and of group 2j + 1 above, j = u / 2.
// The unit also takes care of the min of group u.
template <class Block, int Rows>
struct KUnit {
  static constexpr int kUnits = 8, kFolds = 2, kWords = 4, kBias = 0;
  static constexpr Mins kMins = Mins::group;
  Words<16> q[Rows], head[Rows];
  static __device__ __forceinline__ int column(uint32_t unit, int fold) {
    return unit / 2 * 64 + fold * 32 + unit % 2 * 16;
  }
  template <int Head>
  __device__ __forceinline__ void load_head(const Place& at, uint32_t block, uint32_t unit) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      ptx::load_once(q[r].w, at.at<0, Block>(r, block) + 16 * unit);
      ptx::load_constant(head[r].w, at.at<Head, Block>(r, block));
    }
  }
  __device__ __forceinline__ void words(int r, uint32_t, int fold, uint32_t (&words)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = q[r].w[i] >> 4 * fold & 0x0f0f0f0fu;
  }
  // Bits: blocks.cuh. The scales of groups 2j and 2j + 1 side by side.
  __device__ __forceinline__ float scale(int r, uint32_t unit, int fold) const {
    const uint32_t j = unit / 2, shift = 16 * (j % 2);
    const uint32_t first = head[r].w[1] >> shift, third = head[r].w[3] >> shift;
    const uint32_t both = j < 2 ? first & 0x3f3fu : (third & 0x0f0fu) | (first >> 2 & 0x3030u);
    return quant::half_value(uint16_t(head[r].w[0])) * float(int(both >> 8 * fold & 63));
  }
  __device__ __forceinline__ float min(int r, uint32_t unit, int) const {
    const uint32_t shift = 8 * (unit % 4);
    const uint32_t second = head[r].w[2] >> shift, third = head[r].w[3] >> shift;
    const uint32_t min = unit < 4 ? second & 63 : (third >> 4 & 15) | (second >> 2 & 48);
    return quant::half_value(uint16_t(head[r].w[0] >> 16)) * float(int(min));
  }
};

template <int Rows>
struct Unit<quant::block_q4_k, Rows> : KUnit<quant::block_q4_k, Rows> {
  __device__ __forceinline__ void load(const Place& at, uint32_t block, uint32_t unit) {
    this->template load_head<1>(at, block, unit);
  }
};

template <int Rows>
struct Unit<quant::block_q5_k, Rows> : KUnit<quant::block_q5_k, Rows> {
  Words<16> high[Rows];
  __device__ __forceinline__ void load(const Place& at, uint32_t block, uint32_t unit) {
    this->template load_head<2>(at, block, unit);
#pragma unroll
    for (int r = 0; r < Rows; ++r)
      ptx::load_constant(high[r].w, at.at<1, quant::block_q5_k>(r, block) + unit % 2 * 16);
  }
  __device__ __forceinline__ void words(int r, uint32_t unit, int fold,
                                        uint32_t (&words)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t fifth = high[r].w[i] >> (unit / 2 * 2 + fold) & 0x01010101u;
      words[i] = (this->q[r].w[i] >> 4 * fold & 0x0f0f0f0fu) | fifth << 4;
    }
  }
};

// Unit u: bytes 16u ... 16u + 15 of `low`: half u / 4, and of it elements 32t + 16h ..., t = a
// below and a + 2 above, a = u / 2 % 2, h = u % 2.
template <int Rows>
struct Unit<quant::block_q6_k, Rows> {
  using Block = quant::block_q6_k;
  static constexpr int kUnits = 8, kFolds = 2, kWords = 4, kBias = 32;
  static constexpr Mins kMins = Mins::none;
  Words<16> low[Rows], high[Rows];
  Words<8> scales[Rows];
  Halves<Rows> d;
  static __device__ __forceinline__ int column(uint32_t unit, int fold) {
    return unit / 4 * 128 + fold * 64 + unit % 4 * 16;
  }
  __device__ __forceinline__ void load(const Place& at, uint32_t block, uint32_t unit) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      ptx::load_once(low[r].w, at.at<0, Block>(r, block) + 16 * unit);
      ptx::load_constant(high[r].w, at.at<1, Block>(r, block) + unit / 4 * 32 + unit % 2 * 16);
      ptx::load_constant(scales[r].w, at.at<2, Block>(r, block) + unit / 4 * 8);
    }
    d.load(at.at<3, Block>(0, block));
  }
  __device__ __forceinline__ void words(int r, uint32_t unit, int fold,
                                        uint32_t (&words)[4]) const {
    const uint32_t a = unit / 2 % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = high[r].w[i] >> 2 * a;  // those of t = a, and four further up of a + 2
      words[i] =
          (low[r].w[i] >> 4 * fold & 0x0f0f0f0fu) | ((fold ? bits : bits << 4) & 0x30303030u);
    }
  }
  __device__ __forceinline__ float scale(int r, uint32_t unit, int fold) const {
    return d[r] * float(int(scales[r].w[fold] << (24 - 8 * (unit % 4))) >> 24);
  }
};

// Unit u: bytes 16u ... 16u + 15 of q: half u / 2, and of it elements 32t + 16h ..., h = u % 2, of
// all t.
template <class Block, int Rows>
struct PairsUnit {
  static constexpr int kUnits = 4, kFolds = 4, kWords = 4, kBias = 0;
  Words<16> q[Rows];
  static __device__ __forceinline__ int column(uint32_t unit, int fold) {
    return unit / 2 * 128 + fold * 32 + unit % 2 * 16;
  }
};

template <int Rows>
struct Unit<quant::block_q2_k, Rows> : PairsUnit<quant::block_q2_k, Rows> {
  using Block = quant::block_q2_k;
  static constexpr Mins kMins = Mins::fold;
  Words<8> scales[Rows];  // of the half
  Pairs<Rows> dm;
  __device__ __forceinline__ void load(const Place& at, uint32_t block, uint32_t unit) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      ptx::load_once(this->q[r].w, at.at<0, Block>(r, block) + 16 * unit);
      ptx::load_constant(scales[r].w, at.at<1, Block>(r, block) + unit / 2 * 8);
    }
    dm.load(at.at<2, Block>(0, block));
  }
  __device__ __forceinline__ void words(int r, uint32_t, int fold, uint32_t (&words)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = this->q[r].w[i] >> 2 * fold & 0x03030303u;
  }
  __device__ __forceinline__ uint32_t group(int r, uint32_t unit, int fold) const {
    return scales[r].w[fold / 2] >> (16 * (fold % 2) + 8 * (unit % 2));
  }
  __device__ __forceinline__ float scale(int r, uint32_t unit, int fold) const {
    return dm.low(r) * float(int(group(r, unit, fold) & 15));
  }
  __device__ __forceinline__ float min(int r, uint32_t unit, int fold) const {
    return dm.high(r) * float(int(group(r, unit, fold) >> 4 & 15));
  }
};

template <int Rows>
struct Unit<quant::block_q3_k, Rows> : PairsUnit<quant::block_q3_k, Rows> {
  using Block = quant::block_q3_k;
  static constexpr int kBias = 4;
  static constexpr Mins kMins = Mins::none;
  Words<16> high[Rows];
  Words<4> scales[Rows][3];
  Halves<Rows> d;
  __device__ __forceinline__ void load(const Place& at, uint32_t block, uint32_t unit) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      ptx::load_once(this->q[r].w, at.at<0, Block>(r, block) + 16 * unit);
      ptx::load_constant(high[r].w, at.at<1, Block>(r, block) + unit % 2 * 16);
#pragma unroll
      for (int i = 0; i < 3; ++i)
        ptx::load_constant(scales[r][i].w, at.at<2, Block>(r, block) + 4 * i);
    }
    d.load(at.at<3, Block>(0, block));
  }
  __device__ __forceinline__ void words(int r, uint32_t unit, int fold,
                                        uint32_t (&words)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t third = high[r].w[i] >> (unit / 2 * 4 + fold) & 0x01010101u;
      words[i] = (this->q[r].w[i] >> 2 * fold & 0x03030303u) | third << 2;
    }
  }
  // Group 8 half + 2 fold + h: bits as in blocks.cuh.
  __device__ __forceinline__ float scale(int r, uint32_t unit, int fold) const {
    const uint32_t half = unit / 2, byte = fold % 2 * 2 + unit % 2;
    const uint32_t low = scales[r][fold / 2].w[0] >> (8 * byte + 4 * half) & 15;
    const uint32_t top = scales[r][2].w[0] >> (8 * byte + 4 * half + fold / 2 * 2) & 3;
    return d[r] * float(int(low | top << 4) - 32);
  }
};

// Unit u: group u.
template <int Rows>
struct Unit<quant::block_iq4_xs, Rows> {
  using Block = quant::block_iq4_xs;
  static constexpr int kUnits = 8, kFolds = 1, kWords = 8, kBias = 0;
  static constexpr Mins kMins = Mins::none;
  Words<16> q[Rows];
  Words<8> head[Rows];
  static __device__ __forceinline__ int column(uint32_t unit, int) { return 32 * unit; }
  __device__ __forceinline__ void load(const Place& at, uint32_t block, uint32_t unit) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      ptx::load_once(q[r].w, at.at<0, Block>(r, block) + 16 * unit);
      ptx::load_constant(head[r].w, at.at<1, Block>(r, block));
    }
  }
  __device__ __forceinline__ void words(int r, uint32_t, int, uint32_t (&words)[8]) const {
    nibbles(q[r].w, words);
    look_up(words);
  }
  __device__ __forceinline__ float scale(int r, uint32_t unit, int) const {
    const uint32_t low = head[r].w[1] >> 4 * unit & 15;
    const uint32_t top = head[r].w[0] >> (16 + 2 * unit) & 3;
    return quant::half_value(uint16_t(head[r].w[0])) * float(int(low | top << 4) - 32);
  }
};

}  // namespace gemv
