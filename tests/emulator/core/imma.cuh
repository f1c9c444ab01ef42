// core/imma.cuh and its instructions on the host; see tests/emulator/device.hpp.
#pragma once

#include <cstdint>

namespace ptx {

// A row, then the same 8 further down; the second half of k follows. B likewise by columns.
struct IntOperands {
  uint32_t a[4], b[2];
};
template <bool Signed, int Halves>
void imma(int (&d)[4], const IntOperands& mine, const uint4& c) {
  const auto all = emulated::exchange(&mine, sizeof(mine));
  const uint32_t initial[4] = {c.x, c.y, c.z, c.w};
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, high = i / 2, column = 2 * (lane % 4) + i % 2;
    uint32_t sum = initial[i];
    for (int quad = 0; quad < 4; ++quad) {
      const auto left = emulated::from_lane<IntOperands>(all, 4 * row + quad);
      const auto right = emulated::from_lane<IntOperands>(all, 4 * column + quad);
      for (int half = 0; half < Halves; ++half)
        for (int byte = 0; byte < 4; ++byte) {
          const uint8_t x = left.a[2 * half + high] >> 8 * byte;
          sum += (Signed ? int(int8_t(x)) : int(x)) * int8_t(right.b[half] >> 8 * byte);
        }
    }
    d[i] = int(sum);
  }
}
template <bool Signed>
void imma_16832(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const uint4& c) {
  imma<Signed, 2>(d, {{a[0], a[1], a[2], a[3]}, {b0, b1}}, c);
}
template <bool Signed>
void imma_16816(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, const uint4& c) {
  imma<Signed, 1>(d, {{a0, a1, 0, 0}, {b, 0}}, c);
}

inline void mma_1688(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const IntOperands mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const auto all = emulated::exchange(&mine, sizeof(mine));
  const auto tf32 = [](uint32_t x) { return double(bits_as<float>(x & 0xffffe000u)); };
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, high = i / 2, column = 2 * (lane % 4) + i % 2;
    double sum = 0;
    for (int quad = 0; quad < 4; ++quad) {
      const auto left = emulated::from_lane<IntOperands>(all, 4 * row + quad);
      const auto right = emulated::from_lane<IntOperands>(all, 4 * column + quad);
      for (int half = 0; half < 2; ++half)
        sum += tf32(left.a[2 * half + high]) * tf32(right.b[half]);
    }
    c[i] = float(c[i] + sum);
  }
}

}  // namespace ptx
