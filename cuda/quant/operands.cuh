// Planes of packed weights (planes.cuh) as operand A of mma.m16n8k32, 8-bit integers, in steps of
// 128 elements of a row ("half" of a super-block of 256, or four blocks of 32).
//
// A lane's registers of such an operand are bytes 4 (l % 4) ... + 3 of rows l / 4 and l / 4 + 8, at
// 0 and at 16 of 32 bytes: what ldmatrix.x4 brings of 16 rows of 32 bytes. Quants stay packed until
// then. A group of 32 elements is taken out of such registers by a shift and a mask where possible;
// what is left of place value, or of an offset that a flipped top bit stands for, is a power of two
// in the group's scale:
//   w = scale[group] * operand (+ min[group])
//
// `fetch<G>` loads what group G needs and an earlier one has not loaded, `operand<G>` makes its
// registers, `scales` those of all groups of a row. Compiles for the host too.
#pragma once

#include <cstdint>

#include "planes.cuh"
#include "unpack.cuh"

namespace quant {

constexpr int kStep = 128;      // elements
constexpr int kStepGroups = 4;  // of 32, which share a scale of the activations

// What is subtracted besides: nothing; min[group] times the sum of the activations; or min (an
// integer, for every 16 elements) times a factor of the super-block.
enum class Min { none, sums, products };

// The raw bytes of 16 rows as a lane gets them; the source that `fetch` takes has
//   q(pair, registers), high(pair, registers): ldmatrix of 32-byte column `pair` of either plane
//   words(registers): 16 bytes of the second plane, of the lane's two rows
struct Raw {
  uint32_t q[4], high[8];
};

// A byte of a word as the float 2^23 + byte. `bias`: any word with an upper byte of 0x4b and a
// lowest of 0; one that the compiler does not know leaves it the selector as a constant.
QUANT_INLINE float biased(uint32_t word, int i, uint32_t bias) {
  return float_of(permute(word, bias, 0x7440 + i));
}
constexpr float kBias = 8388608.0f;

QUANT_INLINE uint32_t word_at(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }
QUANT_INLINE float half_at(const uint8_t* p) {
  return half_value(*reinterpret_cast<const uint16_t*>(p));
}

QUANT_PLACE uint32_t every(uint32_t byte) { return byte * 0x01010101u; }

// Shifts left, or right for a negative count.
template <int Bits>
QUANT_INLINE uint32_t shifted_by(uint32_t x) {
  if constexpr (Bits >= 0)
    return x << Bits;
  else
    return x >> -Bits;
}

// Where the planes of a type lie in a step: kRaw bytes of a row in the first plane, kHigh in the
// second (0: there is none); kHighWhole: the second is that of the whole super-block, both halves
// need it. Heads: one or two planes of scales.
template <class Block>
struct Operands;

// Blocks of 32 with 16 bytes of nibbles: byte i holds element i below and i + 16 above.
template <class Block>
struct Blocks32 {
  static constexpr bool kSuper = false, kHighWhole = false;
  static constexpr int kSub = 32, kRaw = 64, kHigh = 0;

  template <int G, class Source>
  static QUANT_INLINE void fetch(Raw& raw, const Source& source, int) {
    if constexpr (G % 2 == 0) source.q(G / 2, raw.q);
  }
};

// d of each block, times Factor; heads are [4][rows] of it.
template <int Denominator>
struct ScalesOfD {
  static QUANT_INLINE void scales(float (&s)[4], float (&)[4], const uint8_t* d, const uint8_t*,
                                  int rows, int row, int, uint32_t) {
#pragma unroll
    for (int g = 0; g < 4; ++g) s[g] = half_at(d + (g * rows + row) * 2) * (1.0f / Denominator);
  }
};
template <int Denominator>
struct ScalesOfDM {
  static QUANT_INLINE void scales(float (&s)[4], float (&m)[4], const uint8_t* dm, const uint8_t*,
                                  int rows, int row, int, uint32_t) {
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const uint32_t both = word_at(dm + (g * rows + row) * 4);
      s[g] = half_value(uint16_t(both)) * (1.0f / Denominator);
      m[g] = half_value(uint16_t(both >> 16));
    }
  }
};

template <>
struct Operands<block_q4_0> : Blocks32<block_q4_0>, ScalesOfD<16> {
  static constexpr bool kSigned = true;
  static constexpr Min kMin = Min::none;

  template <int G>
  static QUANT_INLINE void operand(uint32_t (&a)[4], const Raw& raw, int) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t q = raw.q[G % 2 * 2 + i];
      a[i] = (q << 4 & every(0xf0)) ^ every(0x80);
      a[i + 2] = (q & every(0xf0)) ^ every(0x80);
    }
  }
};

template <>
struct Operands<block_q4_1> : Blocks32<block_q4_1>, ScalesOfDM<1> {
  static constexpr bool kSigned = false;
  static constexpr Min kMin = Min::sums;

  template <int G>
  static QUANT_INLINE void operand(uint32_t (&a)[4], const Raw& raw, int) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t q = raw.q[G % 2 * 2 + i];
      a[i] = q & every(0x0f);
      a[i + 2] = q >> 4 & every(0x0f);
    }
  }
};

// The fifth bits of a block are a word of its own: four of them, those of the lane's bytes, are
// spread to the tops of four bytes; nibbles below them.
template <class Block>
struct Blocks32Fifth : Blocks32<Block> {
  static constexpr int kHigh = 16;

  template <int G, class Source>
  static QUANT_INLINE void fetch(Raw& raw, const Source& source, int half) {
    Blocks32<Block>::template fetch<G>(raw, source, half);
    if constexpr (G == 0) source.words(raw.high);
  }

  template <int G, uint32_t Flip>
  static QUANT_INLINE void tops(uint32_t (&a)[4], const Raw& raw, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t q = raw.q[G % 2 * 2 + i], bits = raw.high[4 * i + G] >> lane % 4 * 4;
      constexpr uint32_t kSpread = 1u << 7 | 1u << 14 | 1u << 21 | 1u << 28;
      a[i] = (q << 3 & every(0x78)) ^ Flip;
      a[i + 2] = (q >> 1 & every(0x78)) ^ Flip;
      a[i] ^= (bits & 15) * kSpread & every(0x80);
      a[i + 2] ^= (bits >> 16 & 15) * kSpread & every(0x80);
    }
  }
};

template <>
struct Operands<block_q5_0> : Blocks32Fifth<block_q5_0>, ScalesOfD<8> {
  static constexpr bool kSigned = true;
  static constexpr Min kMin = Min::none;

  template <int G>
  static QUANT_INLINE void operand(uint32_t (&a)[4], const Raw& raw, int lane) {
    tops<G, every(0x80)>(a, raw, lane);
  }
};

template <>
struct Operands<block_q5_1> : Blocks32Fifth<block_q5_1>, ScalesOfDM<8> {
  static constexpr bool kSigned = false;
  static constexpr Min kMin = Min::sums;

  template <int G>
  static QUANT_INLINE void operand(uint32_t (&a)[4], const Raw& raw, int lane) {
    tops<G, 0>(a, raw, lane);
  }
};

template <>
struct Operands<block_q8_0> : ScalesOfD<1> {
  static constexpr bool kSuper = false, kSigned = true, kHighWhole = false;
  static constexpr int kSub = 32, kRaw = 128, kHigh = 0;
  static constexpr Min kMin = Min::none;

  template <int G, class Source>
  static QUANT_INLINE void fetch(Raw& raw, const Source& source, int) {
    source.q(G, raw.q);
  }
  template <int G>
  static QUANT_INLINE void operand(uint32_t (&a)[4], const Raw& raw, int) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = raw.q[i];
  }
};

// The codebook's values for the eight nibbles of a word: those below, those above. A permute picks
// among eight bytes by the low three bits of four nibbles: look in both halves, choose by the top.
QUANT_INLINE void looked_up(uint32_t q, uint32_t& below, uint32_t& above) {
  constexpr uint32_t kFlip = every(0x80);  // codebook_word adds 128
  constexpr uint32_t kWords[4] = {codebook_word(0) ^ kFlip, codebook_word(1) ^ kFlip,
                                  codebook_word(2) ^ kFlip, codebook_word(3) ^ kFlip};
  const uint32_t index = q & 0x77777777u, top = (q >> 1 & 0x44444444u) | 0x32103210u;
  uint32_t found[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t four = index >> 16 * i & 0xffff;
    found[i] = permute(permute(kWords[0], kWords[1], four), permute(kWords[2], kWords[3], four),
                       top >> 16 * i & 0xffff);
  }
  below = permute(found[0], found[1], 0x6420);
  above = permute(found[0], found[1], 0x7531);
}

template <>
struct Operands<block_iq4_nl> : Blocks32<block_iq4_nl>, ScalesOfD<1> {
  static constexpr bool kSigned = true;
  static constexpr Min kMin = Min::none;

  template <int G>
  static QUANT_INLINE void operand(uint32_t (&a)[4], const Raw& raw, int) {
#pragma unroll
    for (int i = 0; i < 2; ++i) looked_up(raw.q[G % 2 * 2 + i], a[i], a[i + 2]);
  }
};

template <>
struct Operands<block_iq4_xs> : Blocks32<block_iq4_xs> {
  static constexpr bool kSuper = true, kSigned = true;
  static constexpr Min kMin = Min::none;

  template <int G>
  static QUANT_INLINE void operand(uint32_t (&a)[4], const Raw& raw, int) {
#pragma unroll
    for (int i = 0; i < 2; ++i) looked_up(raw.q[G % 2 * 2 + i], a[i], a[i + 2]);
  }

  static QUANT_INLINE void scales(float (&s)[4], float (&)[4], const uint8_t* head, const uint8_t*,
                                  int, int row, int half, uint32_t bias) {
    const uint32_t first = word_at(head + row * 8), low = word_at(head + row * 8 + 4) >> 16 * half;
    const uint32_t high = first >> (16 + 8 * half);
    const float d = half_value(uint16_t(first));
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const uint32_t scale = (low >> 4 * g & 15) | (high >> 2 * g & 3) << 4;
      s[g] = d * (biased(scale, 0, bias) - (kBias + 32));
    }
  }
};

// d, dmin and 6-bit scales and mins of q4_k and q5_k. Odd groups, which have the high nibbles, are
// OddDenominator times as large.
template <int OddDenominator>
struct Scales6 {
  static QUANT_INLINE void scales(float (&s)[4], float (&m)[4], const uint8_t* head, const uint8_t*,
                                  int, int row, int half, uint32_t bias) {
    struct alignas(16) Words {
      uint32_t d, low, mins, more;
    };
    const Words w = *reinterpret_cast<const Words*>(head + row * 16);
    const uint32_t scale =
        half ? (w.more & every(0x0f)) | (w.low >> 2 & every(0x30)) : w.low & every(0x3f);
    const uint32_t min =
        half ? (w.more >> 4 & every(0x0f)) | (w.mins >> 2 & every(0x30)) : w.mins & every(0x3f);
    const float d = half_value(uint16_t(w.d)), dmin = -half_value(uint16_t(w.d >> 16));
    // (2^23 + n) d - 2^23 d, exact before it is rounded, and n d has few bits.
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const float factor = g % 2 ? d * (1.0f / OddDenominator) : d;
      s[g] = fmaf(biased(scale, g, bias), factor, -kBias * factor);
      m[g] = fmaf(biased(min, g, bias), dmin, -kBias * dmin);
    }
  }
};

// Bytes 32j ... 32j + 31 hold group 2j below and 2j + 1 above, of which the latter stays in place.
template <>
struct Operands<block_q4_k> : Scales6<16> {
  static constexpr bool kSuper = true, kSigned = false, kHighWhole = false;
  static constexpr int kSub = 32, kRaw = 64, kHigh = 0;
  static constexpr Min kMin = Min::sums;

  template <int G, class Source>
  static QUANT_INLINE void fetch(Raw& raw, const Source& source, int) {
    if constexpr (G % 2 == 0) source.q(G / 2, raw.q);
  }
  template <int G>
  static QUANT_INLINE void operand(uint32_t (&a)[4], const Raw& raw, int) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = raw.q[i] & every(G % 2 ? 0xf0 : 0x0f);
  }
};

template <>
struct Operands<block_q5_k> : Scales6<8> {
  static constexpr bool kSuper = true, kSigned = false, kHighWhole = true;
  static constexpr int kSub = 32, kRaw = 64, kHigh = 32;
  static constexpr Min kMin = Min::sums;

  template <int G, class Source>
  static QUANT_INLINE void fetch(Raw& raw, const Source& source, int half) {
    if constexpr (G % 2 == 0) source.q(G / 2, raw.q);
    if constexpr (G == 0) {
      uint32_t high[4];
      source.high(0, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) raw.high[i] = half ? high[i] : high[i] << 4;  // bits 4 + G
    }
  }
  template <int G>
  static QUANT_INLINE void operand(uint32_t (&a)[4], const Raw& raw, int) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if constexpr (G % 2)
        a[i] = (raw.q[i] >> 1 & every(0x78)) | (raw.high[i] << (3 - G) & every(0x80));
      else
        a[i] = (raw.q[i] & every(0x0f)) | (raw.high[i] >> G & every(0x10));
  }
};

// Group t of a half: nibble t / 2 of bytes 32 (t % 2) ..., bits 2t, 2t + 1 of the high bytes.
template <>
struct Operands<block_q6_k> {
  static constexpr bool kSuper = true, kSigned = true, kHighWhole = false;
  static constexpr int kSub = 16, kRaw = 64, kHigh = 32;
  static constexpr Min kMin = Min::none;

  template <int G, class Source>
  static QUANT_INLINE void fetch(Raw& raw, const Source& source, int) {
    source.q(G % 2, raw.q);
    if constexpr (G == 0) {
      uint32_t high[4];
      source.high(0, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) raw.high[i] = high[i];
    }
  }
  template <int G>
  static QUANT_INLINE void operand(uint32_t (&a)[4], const Raw& raw, int) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = (shifted_by < G<2 ? 2 : -2>(raw.q[i]) & every(0x3c)) ^ every(0x80);
      a[i] = low ^ (raw.high[i] << (6 - 2 * G) & every(0xc0));
    }
  }
  static QUANT_INLINE void scales(float (&s)[8], float (&)[4], const uint8_t* scales,
                                  const uint8_t* d, int, int row, int half, uint32_t bias) {
    const float quarter = half_at(d + row * 2) * 0.25f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = word_at(scales + row * 16 + half * 8 + i / 4 * 4) ^ every(0x80);
      s[i] = quarter * (biased(word, i % 4, bias) - (kBias + 128));
    }
  }
};

// Group t of a half: bits 2t, 2t + 1 of its 32 bytes, bit 4 half + t of the high bytes.
template <>
struct Operands<block_q3_k> {
  static constexpr bool kSuper = true, kSigned = true, kHighWhole = true;
  static constexpr int kSub = 16, kRaw = 32, kHigh = 32;
  static constexpr Min kMin = Min::none;

  template <int G, class Source>
  static QUANT_INLINE void fetch(Raw& raw, const Source& source, int half) {
    if constexpr (G == 0) {
      uint32_t high[4];
      source.q(0, raw.q);
      source.high(0, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) raw.high[i] = half ? high[i] : high[i] << 4;  // bits 4 + G
    }
  }
  template <int G>
  static QUANT_INLINE void operand(uint32_t (&a)[4], const Raw& raw, int) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = (shifted_by<5 - 2 * G>(raw.q[i]) & every(0x60)) ^ every(0x80);
      a[i] = low ^ (raw.high[i] << (3 - G) & every(0x80));
    }
  }
  static QUANT_INLINE void scales(float (&s)[8], float (&)[4], const uint8_t* scales,
                                  const uint8_t* d, int, int row, int half, uint32_t bias) {
    const uint32_t high = word_at(scales + row * 12 + 8) >> 4 * half;
    const float part = half_at(d + row * 2) * (1.0f / 32);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t low = word_at(scales + row * 12 + i / 4 * 4) >> 4 * half & every(0x0f);
      const uint32_t word = low | ((i < 4 ? high << 4 : high << 2) & every(0x30));
      s[i] = part * (biased(word, i % 4, bias) - (kBias + 32));
    }
  }
};

// Group t of a half: bits 2t, 2t + 1 of its 32 bytes, which stay in place. The mins are an operand
// of their own: `min_words` has each four times in a word, and gives what they are multiplied by.
template <>
struct Operands<block_q2_k> {
  static constexpr bool kSuper = true, kSigned = false, kHighWhole = false;
  static constexpr int kSub = 16, kRaw = 32, kHigh = 0;
  static constexpr Min kMin = Min::products;

  template <int G, class Source>
  static QUANT_INLINE void fetch(Raw& raw, const Source& source, int) {
    if constexpr (G == 0) source.q(0, raw.q);
  }
  template <int G>
  static QUANT_INLINE void operand(uint32_t (&a)[4], const Raw& raw, int) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = raw.q[i] & every(3u << 2 * G);
  }
  static QUANT_INLINE void scales(float (&s)[8], float (&)[4], const uint8_t* scales,
                                  const uint8_t* dm, int, int row, int half, uint32_t bias) {
    const float d = half_at(dm + row * 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = word_at(scales + row * 16 + half * 8 + i / 4 * 4) & every(0x0f);
      s[i] = d * (1.0f / (1 << i / 2 * 2)) * (biased(word, i % 4, bias) - kBias);
    }
  }
  static QUANT_INLINE float min_words(uint32_t (&m)[8], const uint8_t* scales, const uint8_t* dm,
                                      int row, int half) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = word_at(scales + row * 16 + half * 8 + i / 4 * 4) >> 4 & every(0x0f);
      m[i] = permute(word, 0, i % 4 * 0x1111);
    }
    return -half_at(dm + row * 4 + 2);
  }
};

}  // namespace quant
