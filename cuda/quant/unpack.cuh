// Eight consecutive weights of a GGUF block as floats: unpack(block, unit, w) gives elements 8 unit
// ... 8 unit + 7. Formulas and bit layouts: blocks.cuh.
//
// Compiles for the host too, so that every format is checked without a GPU. Results are those of
// ggml's f32 arithmetic, bit for bit: scale, group scale and quant have at most 24 significant bits
// together, so their product is exact in f32 and a fused multiply-add rounds as a separate one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "blocks.cuh"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define QUANT_INLINE __device__ __forceinline__
#else
#define QUANT_INLINE inline
#endif

namespace quant {

QUANT_INLINE float float_of(uint32_t bits) {
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

QUANT_INLINE float half_value(uint16_t bits) {
#ifdef __CUDACC__
  return __half2float(__ushort_as_half(bits));
#else
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float x =
      std::ldexp(float(exponent ? fraction + 1024 : fraction), (exponent ? exponent : 1) - 25);
  if (exponent == 31) x = fraction ? NAN : INFINITY;
  return bits >> 15 ? -x : x;
#endif
}

// Four bytes picked from b:a (byte 0 is the lowest of a) by the nibbles of `selector`, each 0
// ... 7.
QUANT_INLINE uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDACC__
  return __byte_perm(a, b, selector);
#else
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i)
    picked |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return picked;
#endif
}

constexpr uint64_t kBytes = 0x0101010101010101;  // times n: n in each of eight bytes

// Bytes 8 index ... 8 index + 7 of a packed array.
template <class Word>
QUANT_INLINE uint64_t eight(const Word* packed, uint32_t index) {
  constexpr int kWords = 8 / sizeof(Word);
  uint64_t bytes = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    bytes |= uint64_t(packed[kWords * index + i]) << 8 * sizeof(Word) * i;
  return bytes;
}

// Unit 0 ... 3 of 32 nibbles in 16 bytes: the low ones, then the high ones.
template <class Word>
QUANT_INLINE uint64_t nibbles(const Word* packed, uint32_t unit) {
  return eight(packed, unit % 2) >> 4 * (unit / 2) & 0x0f * kBytes;
}

// Eight bits, one to each byte: four bits land at 0, 8, 16, 24 when multiplied by 1 + 2^7 + 2^14 +
// 2^21.
QUANT_INLINE uint64_t spread(uint32_t bits) {
  const uint32_t low = (bits & 15) * 0x204081u, high = (bits >> 4 & 15) * 0x204081u;
  return (uint64_t(high) << 32 | low) & kBytes;
}

// Byte i of q, less `bias`, as a float: n in the low bits of 2^23 makes 2^23 + n, so one permute
// and one exact subtraction do what extracting and converting would.
QUANT_INLINE float number(uint64_t q, int i, int bias) {
  return float_of(permute(uint32_t(q >> i / 4 * 32), 0x4b000000, 0x7440 + i % 4)) -
         float(0x800000 + bias);
}

// w = scale (q - bias) over the eight bytes of q.
QUANT_INLINE void scaled(float (&w)[8], float scale, uint64_t q, int bias) {
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = scale * number(q, i, bias);
}

// w = scale q - min.
QUANT_INLINE void shifted(float (&w)[8], float scale, uint64_t q, float min) {
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = scale * number(q, i, 0) - min;
}

QUANT_INLINE void unpack(const block_f32& b, int, float (&w)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = b.x[i];
}

QUANT_INLINE void unpack(const block_f16& b, int, float (&w)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = half_value(b.x[i]);
}

QUANT_INLINE void unpack(const block_bf16& b, int, float (&w)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) w[i] = float_of(uint32_t(b.x[i]) << 16);
}

QUANT_INLINE void unpack(const block_q4_0& b, uint32_t unit, float (&w)[8]) {
  scaled(w, half_value(b.d), nibbles(b.q, unit), 8);
}

QUANT_INLINE void unpack(const block_q4_1& b, uint32_t unit, float (&w)[8]) {
  shifted(w, half_value(b.d), nibbles(b.q, unit), -half_value(b.m));
}

// The fifth bits of a unit of q5_0 or q5_1, in place.
template <class Block>
QUANT_INLINE uint64_t fifth_bits(const Block& b, uint32_t unit) {
  return spread(b.high[unit / 2] >> 8 * (unit % 2)) << 4;
}

QUANT_INLINE void unpack(const block_q5_0& b, uint32_t unit, float (&w)[8]) {
  scaled(w, half_value(b.d), nibbles(b.q, unit) | fifth_bits(b, unit), 16);
}

QUANT_INLINE void unpack(const block_q5_1& b, uint32_t unit, float (&w)[8]) {
  shifted(w, half_value(b.d), nibbles(b.q, unit) | fifth_bits(b, unit), -half_value(b.m));
}

QUANT_INLINE void unpack(const block_q8_0& b, uint32_t unit, float (&w)[8]) {
  scaled(w, half_value(b.d), eight(b.q, unit) ^ 0x80 * kBytes, 128);
}

// Two bits per element, in halves of 128 elements: q2_k, the low bits of q3_k, the high ones of
// q6_k.
template <class Word>
QUANT_INLINE uint64_t pairs(const Word* packed, uint32_t unit) {
  const uint32_t half = unit / 16, t = unit / 4 % 4;
  return eight(packed, 4 * half + unit % 4) >> 2 * t & 0x03 * kBytes;
}

QUANT_INLINE void unpack(const block_q2_k& b, uint32_t unit, float (&w)[8]) {
  const int group = b.scales[unit / 2];
  shifted(w, half_value(b.d) * float(group & 15), pairs(b.q, unit),
          half_value(b.dmin) * float(group >> 4));
}

QUANT_INLINE void unpack(const block_q3_k& b, uint32_t unit, float (&w)[8]) {
  const uint32_t group = unit / 2;
  const int low = b.scales[group % 8] >> 4 * (group / 8) & 15;
  const int high = b.scales[8 + group % 4] >> 2 * (group / 4) & 3;
  const uint64_t third = eight(b.high, unit % 4) >> unit / 4 & kBytes;
  scaled(w, half_value(b.d) * float((low | high << 4) - 32), pairs(b.q, unit) | third << 2, 4);
}

// Scale and min of a group of q4_k or q5_k.
template <class Block>
QUANT_INLINE void group_scale(const Block& b, uint32_t group, float& scale, float& min) {
  const uint32_t shift = 8 * (group % 4);
  const uint32_t s0 = b.scales[0] >> shift, s1 = b.scales[1] >> shift, s2 = b.scales[2] >> shift;
  const uint32_t s = group < 4 ? s0 & 63 : (s2 & 15) | (s0 >> 2 & 48);
  const uint32_t m = group < 4 ? s1 & 63 : (s2 >> 4 & 15) | (s1 >> 2 & 48);
  scale = half_value(b.d) * float(s);
  min = half_value(b.dmin) * float(m);
}

// Low four bits of a unit of q4_k or q5_k: two groups share 32 bytes.
template <class Block>
QUANT_INLINE uint64_t low_nibbles(const Block& b, uint32_t unit) {
  return eight(b.q, 4 * (unit / 8) + unit % 4) >> 4 * (unit / 4 % 2) & 0x0f * kBytes;
}

QUANT_INLINE void unpack(const block_q4_k& b, uint32_t unit, float (&w)[8]) {
  float scale, min;
  group_scale(b, unit / 4, scale, min);
  shifted(w, scale, low_nibbles(b, unit), min);
}

QUANT_INLINE void unpack(const block_q5_k& b, uint32_t unit, float (&w)[8]) {
  float scale, min;
  group_scale(b, unit / 4, scale, min);
  const uint64_t fifth = eight(b.high, unit % 4) >> unit / 4 & kBytes;
  shifted(w, scale, low_nibbles(b, unit) | fifth << 4, min);
}

QUANT_INLINE void unpack(const block_q6_k& b, uint32_t unit, float (&w)[8]) {
  const uint32_t half = unit / 16, t = unit / 4 % 4;
  const uint64_t low = eight(b.low, 8 * half + 4 * (t % 2) + unit % 4) >> 4 * (t / 2);
  scaled(w, half_value(b.d) * float(b.scales[unit / 2]),
         (low & 0x0f * kBytes) | pairs(b.high, unit) << 4, 32);
}

// The non-linear steps of iq4_nl and iq4_xs (ggml-common.h, kvalues_iq4nl).
constexpr int8_t kCodebook[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};

QUANT_INLINE constexpr uint32_t codebook_word(int i) {
  uint32_t word = 0;
  for (int k = 0; k < 4; ++k) word |= uint32_t(kCodebook[4 * i + k] + 128) << 8 * k;
  return word;
}

// The codebook's values plus 128 for four bytes 0 ... 15. A permute picks among eight bytes: look
// in both halves of the codebook, then choose by the index's top bit.
QUANT_INLINE uint32_t codes(uint32_t index) {
  constexpr uint32_t kWords[4] = {codebook_word(0), codebook_word(1), codebook_word(2),
                                  codebook_word(3)};
  const uint32_t packed = permute(index | index >> 4, 0, 0x4420);  // an index per nibble
  const uint32_t below = permute(kWords[0], kWords[1], packed & 0x7777);
  const uint32_t above = permute(kWords[2], kWords[3], packed & 0x7777);
  return permute(below, above, 0x3210 | (packed & 0x8888) >> 1);
}

QUANT_INLINE uint64_t codes(uint64_t index) {
  return uint64_t(codes(uint32_t(index >> 32))) << 32 | codes(uint32_t(index));
}

QUANT_INLINE void unpack(const block_iq4_nl& b, uint32_t unit, float (&w)[8]) {
  scaled(w, half_value(b.d), codes(nibbles(b.q, unit)), 128);
}

QUANT_INLINE void unpack(const block_iq4_xs& b, uint32_t unit, float (&w)[8]) {
  const uint32_t group = unit / 4;
  const int scale =
      int((b.scales_low >> 4 * group & 15) | (b.scales_high >> 2 * group & 3) << 4) - 32;
  scaled(w, half_value(b.d) * float(scale), codes(nibbles(b.q + 2 * group, unit % 4)), 128);
}

}  // namespace quant
