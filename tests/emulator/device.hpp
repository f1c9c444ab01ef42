// A block of threads on the host: what device code takes for granted of CUDA.
//
// A kernel is compiled for the host with this file before it, and with the files in core/ beside it
// in place of those of the same names in cuda/core. The threads of a block are fibers of one thread.
// One runs until it has to wait for others (at a barrier, for what lanes of its warp bring), then
// another, in an order that `seed` shuffles: what depends on the order differs from seed to seed.
// Blocks run one after the other, in shuffled order, too.
//
// Arithmetic is IEEE's, without contraction; mma adds exact products up. A store is seen at once.
// There are no clusters, no wgmma, no TMA.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#define __CUDA_ARCH__ EMULATED  // from here on: the toolkit's headers are for the host

#undef __shared__
#define __shared__  // the block that runs has all of it: spec::raw
#ifndef __global__
#define __global__
#endif
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

using std::max;
using std::min;

namespace spec {
constexpr size_t kMostShared = 232448;
alignas(1024) unsigned char raw[kMostShared];
}  // namespace spec

namespace emulated {

constexpr size_t kStack = 256 << 10;
constexpr int kWarp = 32;
constexpr uint8_t kPoison = 0xff;  // NaN in every float format

// Bytes that are on their way from global to shared memory.
struct Copy {
  uint32_t to;
  const void* from;
  int bytes, zeros, group;
};

struct Thread {
  jmp_buf at;
  bool done = true;
  uint64_t waits = 0;  // for the generation of `where` to be another one
  const uint64_t* where = nullptr;
  std::vector<Copy> copies;
  int groups = 0;  // of copies, committed so far
};

// Of a warp: what its lanes have brought to an exchange, for two in turn, since the first lanes may
// be at the next one while others still read.
struct Warp {
  alignas(16) uint8_t brought[2][kWarp][64];
  uint64_t generation = 0;
  int arrived = 0, alive = 0;
};

struct Block {
  void (*entry)(const void*);
  const void* params;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  uint64_t generation = 0;
  int arrived = 0, alive = 0;
  jmp_buf scheduler;
  int current = 0;
  std::mt19937 random;
  bool late = false;  // copies arrive when they are waited for; else at once
  char fault[256];
};

inline Block* block;
inline uint8_t* stacks;
inline ucontext_t entered, caller;

inline Thread& self() { return block->threads[block->current]; }

[[noreturn]] inline void leave(const char* what) {
  std::snprintf(block->fault, sizeof(block->fault), "%s", what);
  _longjmp(block->scheduler, 2);
}

// Lets others run until a generation is another one.
inline void wait_beyond(const uint64_t& generation, uint64_t seen) {
  Thread& me = self();
  me.where = &generation;
  me.waits = seen;
  if (!_setjmp(me.at)) _longjmp(block->scheduler, 1);
}

inline void arrive(uint64_t& generation, int& arrived, int alive) {
  const uint64_t seen = generation;
  if (++arrived == alive) {
    arrived = 0;
    ++generation;
  } else {
    wait_beyond(generation, seen);
  }
}

// What every lane of the warp brings, once all have: 32 slots of 64 bytes.
inline const uint8_t (*exchange(const void* mine, size_t size))[64] {
  Warp& warp = block->warps[block->current / kWarp];
  const int turn = warp.generation % 2;
  std::memcpy(warp.brought[turn][block->current % kWarp], mine, size);
  arrive(warp.generation, warp.arrived, warp.alive);
  return warp.brought[turn];
}
template <class T>
T from_lane(const uint8_t (*all)[64], int lane) {
  T x;
  std::memcpy(&x, all[lane], sizeof(T));
  return x;
}

inline void carry_out(const Copy& copy) {
  std::memcpy(spec::raw + copy.to, copy.from, copy.bytes);
  std::memset(spec::raw + copy.to + copy.bytes, 0, copy.zeros);
}

// Groups up to this number arrive.
inline void arrive_copies(int last) {
  auto& copies = self().copies;
  size_t left = 0;
  for (const Copy& copy : copies) {
    if (copy.group <= last)
      carry_out(copy);
    else
      copies[left++] = copy;
  }
  copies.resize(left);
}

inline void copy_async(uint32_t to, const void* from, int size, int bytes) {
  const Copy copy{to, from, bytes, size - bytes, self().groups};
  if (!block->late) return carry_out(copy);
  std::memset(spec::raw + to, kPoison, size);
  self().copies.push_back(copy);
}

inline void main_of_thread() {
  block->entry(block->params);
  arrive_copies(1 << 30);
  Thread& me = self();
  me.done = true;
  Warp& warp = block->warps[block->current / kWarp];
  if (--warp.alive && warp.arrived == warp.alive) warp.arrived = 0, ++warp.generation;
  if (--block->alive && block->arrived == block->alive) block->arrived = 0, ++block->generation;
  _longjmp(block->scheduler, 1);
}

}  // namespace emulated

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace emulated {

// Runs a block; whether it came to its end.
inline bool run_block(Block& b, int count) {
  block = &b;
  b.threads.assign(count, {});
  b.warps.assign((count + kWarp - 1) / kWarp, {});
  b.alive = count;
  b.arrived = 0;
  std::vector<int> order(count);
  for (int i = 0; i < count; ++i) {
    order[i] = i;
    b.threads[i].done = false;
    ++b.warps[i / kWarp].alive;
  }
  std::vector<bool> started(count);
  while (b.alive) {
    std::shuffle(order.begin(), order.end(), b.random);
    bool moved = false;
    for (int i : order) {
      Thread& thread = b.threads[i];
      if (thread.done || (thread.where && *thread.where == thread.waits)) continue;
      thread.where = nullptr;
      moved = true;
      b.current = i;
      threadIdx = {unsigned(i), 0, 0};
      const int back = _setjmp(b.scheduler);
      if (back == 2) return false;
      if (back) continue;
      if (started[i]) _longjmp(thread.at, 1);
      started[i] = true;
      getcontext(&entered);
      entered.uc_stack.ss_sp = stacks + i * kStack;
      entered.uc_stack.ss_size = kStack;
      entered.uc_link = nullptr;
      makecontext(&entered, main_of_thread, 0);
      setcontext(&entered);
    }
    if (!moved) {
      std::snprintf(b.fault, sizeof(b.fault),
                    "%d threads wait for others that do not come", b.alive);
      return false;
    }
  }
  return true;
}

}  // namespace emulated

// ---- What CUDA offers device code.

inline void __syncthreads() {
  auto& b = *emulated::block;
  emulated::arrive(b.generation, b.arrived, b.alive);
}
inline void __syncwarp(uint32_t = ~0u) { emulated::exchange("", 0); }
inline void __threadfence() {}

template <class T>
T __shfl_sync(uint32_t, T x, int lane) {
  return emulated::from_lane<T>(emulated::exchange(&x, sizeof(T)), lane % 32);
}
template <class T>
T __shfl_xor_sync(uint32_t, T x, int mask) {
  return emulated::from_lane<T>(emulated::exchange(&x, sizeof(T)), (threadIdx.x % 32) ^ mask);
}
template <class T>
T __shfl_down_sync(uint32_t, T x, int by) {
  const int lane = threadIdx.x % 32;
  return emulated::from_lane<T>(emulated::exchange(&x, sizeof(T)), lane + by < 32 ? lane + by : lane);
}
template <class T>
T __shfl_up_sync(uint32_t, T x, int by) {
  const int lane = threadIdx.x % 32;
  return emulated::from_lane<T>(emulated::exchange(&x, sizeof(T)), lane >= by ? lane - by : lane);
}
template <class T>
T __reduce_max_sync(uint32_t, T x) {
  const auto all = emulated::exchange(&x, sizeof(T));
  for (int i = 0; i < 32; ++i) x = max(x, emulated::from_lane<T>(all, i));
  return x;
}
inline uint32_t __ballot_sync(uint32_t, int x) {
  const auto all = emulated::exchange(&x, sizeof(x));
  uint32_t found = 0;
  for (int i = 0; i < 32; ++i) found |= uint32_t(emulated::from_lane<int>(all, i) != 0) << i;
  return found;
}
inline int __any_sync(uint32_t mask, int x) { return __ballot_sync(mask, x) != 0; }
inline int __all_sync(uint32_t mask, int x) { return __ballot_sync(mask, x) == ~0u; }

template <class T>
T atomicAdd(T* at, T x) {
  return std::exchange(*at, *at + x);
}
template <class T>
T atomicMin(T* at, T x) {
  return std::exchange(*at, min(*at, x));
}
template <class T>
T atomicMax(T* at, T x) {
  return std::exchange(*at, max(*at, x));
}
inline unsigned atomicInc(unsigned* at, unsigned last) {
  return std::exchange(*at, *at >= last ? 0 : *at + 1);
}

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }

inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline int __float2int_rn(float x) { return int(nearbyintf(x)); }

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint32_t __umulhi(uint32_t x, uint32_t y) { return uint64_t(x) * y >> 32; }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = uint64_t(y) << 32 | x;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= uint32_t(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return found;
}
inline int __dp4a(int x, int y, int sum) {
  for (int i = 0; i < 4; ++i) sum += int8_t(x >> 8 * i) * int8_t(y >> 8 * i);
  return sum;
}

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, T x) {
  *p = x;
}
