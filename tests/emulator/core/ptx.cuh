// core/ptx.cuh and its instructions on the host; see tests/emulator/device.hpp.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace ptx {

inline uint32_t shared_address(const void* p) {
  return uint32_t(static_cast<const unsigned char*>(p) - spec::raw);
}
template <class T>
T& shared_at(uint32_t shared) {
  if (shared % sizeof(T) || shared + sizeof(T) > spec::kMostShared)
    emulated::leave("shared memory: a misaligned address, or none");
  return *reinterpret_cast<T*>(spec::raw + shared);
}
template <class T>
void require_aligned(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(T)) emulated::leave("a misaligned address");
}
struct alignas(8) Two {
  uint32_t x[2];
};
struct alignas(16) Four {
  uint32_t x[4];
};

inline void copy_async_16(uint32_t shared, const void* global, int bytes) {
  shared_at<Four>(shared);
  require_aligned<Four>(global);
  emulated::copy_async(shared, global, 16, bytes);
}
inline void copy_async_16(void* shared, const void* global, int bytes) {
  copy_async_16(shared_address(shared), global, bytes);
}
inline void copy_async_4(uint32_t shared, const void* global, int bytes) {
  shared_at<uint32_t>(shared);
  require_aligned<uint32_t>(global);
  emulated::copy_async(shared, global, 4, bytes);
}
inline void copy_async_commit() { ++emulated::self().groups; }
template <int Pending>
void copy_async_wait() {
  emulated::arrive_copies(emulated::self().groups - 1 - Pending);
}

inline void load_matrix_x4(uint32_t (&r)[4], uint32_t shared) {
  const auto all = emulated::exchange(&shared, sizeof(shared));
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i)
    r[i] = shared_at<Four>(emulated::from_lane<uint32_t>(all, 8 * i + lane / 4)).x[lane % 4];
}
inline void load_matrix_x4(uint32_t (&r)[4], const void* shared) {
  load_matrix_x4(r, shared_address(shared));
}
inline void load_matrix_x4_transposed(uint32_t (&r)[4], const void* shared) {
  const uint32_t mine = shared_address(shared);
  const auto all = emulated::exchange(&mine, sizeof(mine));
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    r[i] = 0;
    for (int j = 0; j < 2; ++j) {
      const uint32_t row = emulated::from_lane<uint32_t>(all, 8 * i + 2 * (lane % 4) + j);
      r[i] |= uint32_t(shared_at<uint16_t>(row + lane / 4 * 2)) << 16 * j;
    }
  }
}

inline float half_of(uint32_t word, int i) {
  return __half2float(bits_as<__half>(uint16_t(word >> 16 * i)));
}

// What a lane brings to an m16n8 product: a of a row, then of that 8 further down, and the same of
// the second half of k; b of a column, of either half.
struct Operands {
  uint32_t a[4], b[2];
};
// For each of a lane's four results `sum[i] = add(sum[i], a, b)` with all words of its row and column.
template <class Sum, class Add>
void multiply(Sum (&sum)[4], const Operands& mine, Add add) {
  const auto all = emulated::exchange(&mine, sizeof(mine));
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, high = i / 2, column = 2 * (lane % 4) + i % 2;
    for (int quad = 0; quad < 4; ++quad) {
      const auto left = emulated::from_lane<Operands>(all, 4 * row + quad);
      const auto right = emulated::from_lane<Operands>(all, 4 * column + quad);
      for (int half = 0; half < 2; ++half)
        sum[i] = add(sum[i], left.a[2 * half + high], right.b[half]);
    }
  }
}
// The same of floats, in double until the end.
template <class Add>
void multiply_floats(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Add add) {
  double sum[4] = {};
  multiply(sum, {{a[0], a[1], a[2], a[3]}, {b0, b1}}, add);
  for (int i = 0; i < 4; ++i) c[i] = float(c[i] + sum[i]);
}
inline void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_floats(c, a, b0, b1, [](double sum, uint32_t x, uint32_t y) {
    for (int j = 0; j < 2; ++j) sum += double(half_of(x, j)) * half_of(y, j);
    return sum;
  });
}

template <int N>
void load_words(uint32_t (&r)[N], const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % (4 * N)) emulated::leave("a misaligned load");
  std::memcpy(r, from, 4 * N);
}
template <int N>
void load_once(uint32_t (&r)[N], const void* from) {
  load_words(r, from);
}
template <int N>
void load_constant(uint32_t (&r)[N], const void* from) {
  load_words(r, from);
}
inline void keep_order() {}

inline void store_words(void* to, uint32_t x, uint32_t y) {
  require_aligned<Two>(to);
  *static_cast<Two*>(to) = {x, y};
}
inline void store_words(void* to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  require_aligned<Four>(to);
  *static_cast<Four*>(to) = {x, y, z, w};
}
inline void store_floats(float* to, float4 v) {
  require_aligned<float4>(to);
  *reinterpret_cast<float4*>(to) = v;
}
inline void add_float(float* to, float x) { *to += x; }

inline uint32_t pack_halves(float low, float high) {
  return bits_as<uint16_t>(__float2half_rn(low)) |
         uint32_t(bits_as<uint16_t>(__float2half_rn(high))) << 16;
}

inline void launch_dependents() {}
inline void dependency_wait() {}

constexpr bool kPairedFloats = __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200;
template <bool Paired = kPairedFloats>
void fma_pair(float (&to)[2], float x0, float x1, float y0, float y1, float z0, float z1) {
  to[0] = fmaf(x0, y0, z0), to[1] = fmaf(x1, y1, z1);
}

inline float exp2_approx(float x) { return exp2f(x); }
inline float max_or_nan(float x, float y) { return x != x || y != y ? NAN : fmaxf(x, y); }
inline float reciprocal_approx(float x) { return 1 / x; }
inline int fetch_increment(int32_t* counter) {
  return std::exchange(*counter, *counter >= 0x7fffffff ? 0 : *counter + 1);
}
inline void store_release(int32_t* to, int32_t x) {
  *to = x;
  ++emulated::launch.releases;
}
// Who reads a flag again, and finds it as it was, waits for it.
inline int32_t load_acquire(const int32_t* from) {
  emulated::Thread& me = emulated::self();
  if (me.flag == from && me.flag_seen == *from)
    emulated::wait_beyond(emulated::launch.releases, emulated::launch.releases);
  me.flag = from;
  return me.flag_seen = *from;
}
inline const uint8_t* address_of(const uint8_t* base, uint32_t index, uint32_t stride) {
  return base + uint64_t(index) * stride;
}
inline void trap() { emulated::leave("trap"); }
inline int thread_again() { return threadIdx.x; }

inline uint4 load_shared(uint32_t shared) {
  const Four v = shared_at<Four>(shared);
  return {v.x[0], v.x[1], v.x[2], v.x[3]};
}
inline uint32_t load_shared_word(uint32_t shared) { return shared_at<uint32_t>(shared); }
inline void store_shared_pointer(uint32_t shared, const uint8_t* pointer) {
  shared_at<const uint8_t*>(shared) = pointer;
}
inline void load_shared_pointers(const uint8_t*& first, const uint8_t*& second, uint32_t shared) {
  shared_at<Four>(shared);
  first = shared_at<const uint8_t*>(shared);
  second = shared_at<const uint8_t*>(shared + 8);
}
inline void store_shared_byte(uint32_t shared, uint32_t byte) {
  shared_at<uint8_t>(shared) = uint8_t(byte);
}
inline void store_shared_zero(uint32_t shared) { shared_at<Four>(shared) = {}; }

}  // namespace ptx
