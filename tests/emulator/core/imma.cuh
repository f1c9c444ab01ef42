// core/imma.cuh and its instructions on the host; see tests/emulator/device.hpp.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace ptx {

template <bool Signed>
void imma(int (&d)[4], const Operands& mine, const uint4& c) {
  uint32_t sum[4] = {c.x, c.y, c.z, c.w};
  multiply(sum, mine, [](uint32_t sum, uint32_t a, uint32_t b) {
    for (int byte = 0; byte < 4; ++byte) {
      const uint8_t x = a >> 8 * byte;
      sum += (Signed ? int(int8_t(x)) : int(x)) * int8_t(b >> 8 * byte);
    }
    return sum;
  });
  for (int i = 0; i < 4; ++i) d[i] = int(sum[i]);
}
template <bool Signed>
void imma_16832(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const uint4& c) {
  imma<Signed>(d, {{a[0], a[1], a[2], a[3]}, {b0, b1}}, c);
}
template <bool Signed>
void imma_16816(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t b, const uint4& c) {
  imma<Signed>(d, {{a0, a1, 0, 0}, {b, 0}}, c);
}

inline void mma_1688(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto tf32 = [](uint32_t x) { return double(bits_as<float>(x & 0xffffe000u)); };
  multiply_floats(c, a, b0, b1, [&](double sum, uint32_t x, uint32_t y) {
    return sum + tf32(x) * tf32(y);
  });
}

}  // namespace ptx
