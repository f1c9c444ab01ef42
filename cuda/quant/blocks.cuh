// The packed blocks of GGUF tensors, byte for byte as in a file (ggml-common.h, little-endian).
//
// A tensor is an array of blocks, row after row; a row is a whole number of blocks. Packed bytes
// are declared as the widest integer that the block's size keeps aligned, so that eight of them are
// read in as few loads as possible. fp16 fields are kept as bits, for compilers without a half
// type. The plain types count as blocks of eight, the unit in which weights are unpacked.
#pragma once

#include <cstdint>

namespace quant {

struct alignas(16) block_f32 {
  static constexpr char kType[] = "f32";
  static constexpr int kElements = 8;
  float x[8];
};
static_assert(sizeof(block_f32) == 32);

struct alignas(16) block_f16 {
  static constexpr char kType[] = "f16";
  static constexpr int kElements = 8;
  uint16_t x[8];
};
static_assert(sizeof(block_f16) == 16);

struct alignas(16) block_bf16 {
  static constexpr char kType[] = "bf16";
  static constexpr int kElements = 8;
  uint16_t x[8];
};
static_assert(sizeof(block_bf16) == 16);

// w = d (q - 8); byte i of q holds element i below and element i + 16 above.
struct block_q4_0 {
  static constexpr char kType[] = "q4_0";
  static constexpr int kElements = 32;
  uint16_t d;
  uint16_t q[8];
};
static_assert(sizeof(block_q4_0) == 18);

// w = d q + m; nibbles as in q4_0.
struct block_q4_1 {
  static constexpr char kType[] = "q4_1";
  static constexpr int kElements = 32;
  uint16_t d, m;
  uint32_t q[4];
};
static_assert(sizeof(block_q4_1) == 20);

// w = d (q - 16); nibbles as in q4_0, bit i of `high` is the fifth bit of element i.
struct block_q5_0 {
  static constexpr char kType[] = "q5_0";
  static constexpr int kElements = 32;
  uint16_t d;
  uint16_t high[2];
  uint16_t q[8];
};
static_assert(sizeof(block_q5_0) == 22);

// w = d q + m; bits as in q5_0.
struct block_q5_1 {
  static constexpr char kType[] = "q5_1";
  static constexpr int kElements = 32;
  uint16_t d, m;
  uint16_t high[2];
  uint64_t q[2];
};
static_assert(sizeof(block_q5_1) == 24);

// w = d q; q are signed bytes.
struct block_q8_0 {
  static constexpr char kType[] = "q8_0";
  static constexpr int kElements = 32;
  uint16_t d;
  uint16_t q[16];
};
static_assert(sizeof(block_q8_0) == 34);

// w = d scale q - dmin min, 16 groups of 16; a group's byte holds its scale below and its min
// above. Half h (128 elements) has bytes 32h ... 32h + 31 of q; element 32t + l of it is bits 2t,
// 2t + 1 of byte l.
struct block_q2_k {
  static constexpr char kType[] = "q2_k";
  static constexpr int kElements = 256;
  uint8_t scales[16];
  uint32_t q[16];
  uint16_t d, dmin;
};
static_assert(sizeof(block_q2_k) == 84);

// w = d scale (q - 4), 16 groups of 16; low two bits of q as in q2_k, bit t of byte l of `high` is
// the third bit of element 32t + l. Scales have 6 bits and an offset of 32: the low nibble of group
// g in half (g / 8) of byte g % 8, the high two bits at 2 (g / 4) of byte 8 + g % 4.
struct block_q3_k {
  static constexpr char kType[] = "q3_k";
  static constexpr int kElements = 256;
  uint16_t high[16];
  uint16_t q[32];
  uint8_t scales[12];
  uint16_t d;
};
static_assert(sizeof(block_q3_k) == 110);

// w = d scale q - dmin min, 8 groups of 32; bytes 32j ... 32j + 31 of q hold group 2j below and 2j
// + 1 above. Scales and mins have 6 bits. Those of groups 0 ... 3 are the low bits of the bytes of
// scales[0] and scales[1]; those of groups 4 ... 7 have their low four bits in scales[2] (scale
// below, min above) and their high two on top of the bytes of scales[0] and scales[1].
struct block_q4_k {
  static constexpr char kType[] = "q4_k";
  static constexpr int kElements = 256;
  uint16_t d, dmin;
  uint32_t scales[3];
  uint64_t q[16];
};
static_assert(sizeof(block_q4_k) == 144);

// As q4_k, and bit g of byte l of `high` is the fifth bit of element l of group g.
struct block_q5_k {
  static constexpr char kType[] = "q5_k";
  static constexpr int kElements = 256;
  uint16_t d, dmin;
  uint32_t scales[3];
  uint64_t high[4];
  uint64_t q[16];
};
static_assert(sizeof(block_q5_k) == 176);

// w = d scale (q - 32), 16 groups of 16 with signed byte scales. Half h has 64 bytes of `low` and
// 32 of `high`; element 32t + l of it is nibble t / 2 of low byte 32 (t % 2) + l, and bits 2t, 2t +
// 1 of high byte l above it.
struct block_q6_k {
  static constexpr char kType[] = "q6_k";
  static constexpr int kElements = 256;
  uint16_t low[64];
  uint16_t high[32];
  int8_t scales[16];
  uint16_t d;
};
static_assert(sizeof(block_q6_k) == 210);

// w = d codebook[q]; nibbles as in q4_0.
struct block_iq4_nl {
  static constexpr char kType[] = "iq4_nl";
  static constexpr int kElements = 32;
  uint16_t d;
  uint16_t q[8];
};
static_assert(sizeof(block_iq4_nl) == 18);

// w = d scale codebook[q], 8 groups of 32, each with 16 bytes of nibbles as in q4_0. Scales have 6
// bits and an offset of 32: four bits in scales_low (nibble g), two in scales_high (bits 2g, 2g +
// 1).
struct block_iq4_xs {
  static constexpr char kType[] = "iq4_xs";
  static constexpr int kElements = 256;
  uint16_t d;
  uint16_t scales_high;
  uint32_t scales_low;
  uint64_t q[16];
};
static_assert(sizeof(block_iq4_xs) == 136);

}  // namespace quant
