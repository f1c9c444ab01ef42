// core/wgmma.cuh and its instructions on the host; see tests/emulator/grid.hpp.
//
// A warp's products are computed when they are waited for, or at their commit: until then their
// operands must stay, and the sums are not there.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace ptx {

inline void wgmma_fence() {}
template <class T, int N>
void wgmma_settle(T (&)[N]) {}

inline uint64_t wgmma_operand(uint32_t shared) {
  return uint64_t((shared & 0x3FFFF) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 |
         uint64_t(1) << 62;
}
inline uint64_t wgmma_operand_transposed(uint32_t shared, uint32_t plane) {
  return wgmma_operand(shared) & ~uint64_t(0xffff0000) | uint64_t(plane >> 4) << 16;
}

// Of a matrix descriptor: where an element lies, k being along its lines of 128 bytes or across.
struct Operand {
  uint32_t start, leading, stride;
  explicit Operand(uint64_t descriptor)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) emulated::leave("a matrix without the 128-byte swizzle");
  }
  float along(int row, int k) const { return at(start + row / 8 * stride + row % 8 * 128 + k * 2); }
  float across(int column, int k) const {
    return at(start + column / 64 * leading + k / 8 * stride + k % 8 * 128 + column % 64 * 2);
  }
  static float at(uint32_t address) {
    const uint32_t place = address ^ (address >> 7 & 7) << 4;
    return half_value(shared_at<uint16_t>(place));
  }
  static float half_value(uint16_t bits) {
    static const auto* const values = [] {
      auto* const all = new float[1 << 16];
      for (int i = 0; i < 1 << 16; ++i) all[i] = __half2float(bits_as<__half>(uint16_t(i)));
      return all;
    }();
    return values[bits];
  }
};

// d[16 x columns] += a[16 x 16] * b[16 x columns].
__attribute__((noinline, optimize("O3"))) inline void multiply(float* __restrict__ d,
                                                               const float* a, const float* b,
                                                               int columns) {
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k) {
      const float x = a[row * 16 + k];
      for (int i = 0; i < columns; ++i) d[row * columns + i] += x * b[k * columns + i];
    }
}

// A product of all lanes of a warp; `of(lane)` has that lane's registers.
template <class Of>
void compute(const emulated::Product& product, int warp, Of&& of) {
  float a[16 * 16], b[16 * 256], d[16 * 256];
  const int columns = product.columns;
  const Operand right(product.b);
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < columns; ++i)
      b[k * columns + i] = product.transposed ? right.across(i, k) : right.along(i, k);
  if (!product.a_words) {
    const Operand left(product.a);
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < 16; ++k) a[row * 16 + k] = left.along(warp % 4 * 16 + row, k);
  }
  const auto each = [&](auto&& visit) {  // visit(accumulator, its place in d)
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < columns / 2; ++i)
        visit(of(lane).d[i],
              d[(lane / 4 + i / 2 % 2 * 8) * columns + i / 4 * 8 + lane % 4 * 2 + i % 2]);
  };
  if (product.a_words)
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 8; ++i)
        a[(lane / 4 + i / 2 % 2 * 8) * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2] =
            half_of(of(lane).a_words[i / 2], i % 2);
  each([&](float& own, float& sum) { sum = product.keep ? own : 0; });
  multiply(d, a, b, columns);
  each([&](float& own, float& sum) { own = sum; });
}

// Groups up to this number: whoever comes here first after all lanes have computes for all.
inline void finish_products(int last) {
  using namespace emulated;
  exchange("", 0);
  const int warp = block->current / kWarp;
  const auto queue = [&](int lane) -> auto& {
    return block->threads[warp * kWarp + lane].products;
  };
  const auto& mine = self().products;
  size_t count = 0;
  while (count < mine.size() && mine[count].group <= last) ++count;
  if (!count) return;
  for (size_t i = 0; i < count; ++i)
    compute(mine[i], warp, [&](int lane) -> const Product& { return queue(lane).at(i); });
  for (int lane = 0; lane < kWarp; ++lane)
    queue(lane).erase(queue(lane).begin(), queue(lane).begin() + count);
}
inline void wgmma_commit() {
  const int group = emulated::self().product_groups++;
  if (!emulated::launch.late) finish_products(group);
}
template <int Pending>
void wgmma_wait() {
  finish_products(emulated::self().product_groups - 1 - Pending);
}

inline void issue(emulated::Product product) {
  product.group = emulated::self().product_groups;
  emulated::self().products.push_back(product);
}
template <int N>
struct Wgmma {
  static void mma(float (&d)[N / 2], uint64_t a, uint64_t b, int keep) {
    issue({d, nullptr, a, b, N, keep != 0, false});
  }
};
template <int N>
struct WgmmaRegisters {
  static void mma(float (&d)[N / 2], const uint32_t* a, uint64_t b) {
    issue({d, a, 0, b, N, true, true});
  }
};

}  // namespace ptx
