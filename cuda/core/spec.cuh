// The contract that travels inside the cubin.
//
// Each kernel family states its shared memory once (a list of planes) and its parameters once (a
// list of fields). The lists declare `struct Smem` and `struct Params`, and export what they
// declared as text in a constant object `<kernel>_spec`, which the host reads from the ELF bytes:
// threads, shared bytes, parameter offsets and the plane map are never written down a second time.
//
// From sm_90 on kernels overlap (programmatic dependent launch): a kernel lets the next one of its
// stream start at once, and waits for the one before, so that only launch latency and prologue of
// a kernel run under the tail of another. "dependent=1" in its tile lets the host launch it so.
//
// Every thread of every kernel waits before it ends, whatever path it takes, and before it writes
// to global memory or reads what a kernel may have written. A wait is for the kernel before alone,
// and that kernel is complete only if the one before it was: the chain holds by each link. One
// block that ended without waiting could let its kernel complete before its predecessor, and the
// kernel after it start to read what is still being written. Nor is it enough to wait before the
// first read: a store may overtake what the kernel before still has to read.
//
// KERNEL waits before `run`. A family that declares `static constexpr bool kWaitsItself = true`
// calls ptx::dependency_wait() itself, after a prologue that reads nothing but what no kernel of
// the program writes: weights, counts of rows and the sequence table, which copies fill before, and
// what kernels wrote that held the next.
//
// A family that declares `kHoldsNext = true` lets nothing start before it has written its results:
// all kernels after it may read them before they wait, from L2 (an L1 cache may be older).
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ptx.cuh"

namespace spec {

constexpr uint32_t kMagic = 0x53525950;  // "PYRS"
constexpr uint32_t kAbi = 1;

struct alignas(64) TensorMap {
  uint8_t opaque[128];
};

// One letter per parameter type; pyruntime/cubin/spec.py holds the other half of this table.
template <class T>
constexpr char code() {
  if constexpr (std::is_pointer_v<T>)
    return 'P';
  else if constexpr (std::is_same_v<T, int32_t>)
    return 'i';
  else if constexpr (std::is_same_v<T, uint32_t>)
    return 'u';
  else if constexpr (std::is_same_v<T, int64_t>)
    return 'l';
  else if constexpr (std::is_same_v<T, float>)
    return 'f';
  else if constexpr (std::is_same_v<T, TensorMap>)
    return 'T';
  else
    static_assert(sizeof(T) == 0, "no letter for this parameter type");
}

// Text built at compile time: space-separated items.
template <int N>
struct Text {
  char s[N] = {};
  int n = 0;
  constexpr Text& put(const char* t) {
    for (; *t; ++t) s[n++] = *t;
    return *this;
  }
  constexpr Text& put(size_t v) {
    char digits[20] = {};
    int k = 0;
    do digits[k++] = char('0' + v % 10);
    while (v /= 10);
    while (k) s[n++] = digits[--k];
    return *this;
  }
  constexpr Text& item() {
    if (n) s[n++] = ' ';
    return *this;
  }
};

// Tile constants by name, for the host to choose and size grids by: "bm=128 bn=128". The launcher
// itself reads two: "cluster", the blocks of a cluster along x (none: no clusters), and
// "dependent", which every kernel from sm_90 on gets without asking.
struct Tile : Text<128> {
  template <class V>
  constexpr Tile& with(const char* name, V value) {
    item().put(name).put("=");
    if constexpr (std::is_integral_v<V>)
      put(size_t(value));
    else
      put(value);
    return *this;
  }
};

// Parameters: "name:code@offset".
struct Signature : Text<1024> {
  constexpr Signature& field(const char* name, char letter, size_t offset) {
    char c[2] = {letter, 0};
    item().put(name).put(":").put(c).put("@").put(offset);
    return *this;
  }
};

// Planes: "name@offset+bytes/rowstride*element", with "=other" where it lies on another plane.
struct Planes : Text<1024> {
  size_t end = 0;  // shared bytes asked for: the furthest end of any plane
  template <class M>
  constexpr Planes& plane(const char* name, size_t offset, const char* on = nullptr) {
    using Element = std::remove_all_extents_t<M>;
    constexpr size_t columns = std::rank_v<M>                  ? std::extent_v < M,
                     std::rank_v<M> ? std::rank_v<M> - 1 : 0 > : 1;
    item().put(name).put("@").put(offset).put("+").put(sizeof(M));
    put("/").put(columns * sizeof(Element)).put("*").put(sizeof(Element));
    if (on) put("=").put(on);
    if (offset + sizeof(M) > end) end = offset + sizeof(M);
    return *this;
  }
};

template <class K, class = void>
constexpr bool kWaitsItself = false;
template <class K>
constexpr bool kWaitsItself<K, std::void_t<decltype(K::kWaitsItself)>> = K::kWaitsItself;
template <class K, class = void>
constexpr bool kHoldsNext = false;
template <class K>
constexpr bool kHoldsNext<K, std::void_t<decltype(K::kHoldsNext)>> = K::kHoldsNext;

// A family's tile constants, and that KERNEL made it wait for the kernel before.
template <class K>
constexpr Tile tile_of() {
  Tile tile = K::tile();
#if __CUDA_ARCH__ >= 900
  tile.with("dependent", 1);
#endif
  return tile;
}

struct Spec {
  uint32_t magic, abi, threads, min_blocks, smem_bytes, param_bytes;
  char tile[128], signature[1024], planes[1024];
};

template <class K>
constexpr Spec of() {
  Spec r{kMagic,
         kAbi,
         K::kThreads,
         K::kMinBlocks,
         uint32_t(K::planes().end),
         uint32_t(sizeof(typename K::Params)),
         {},
         {},
         {}};
  constexpr auto tile = tile_of<K>();
  constexpr auto signature = K::signature();
  constexpr auto planes = K::planes();
  for (int i = 0; i < tile.n; ++i) r.tile[i] = tile.s[i];
  for (int i = 0; i < signature.n; ++i) r.signature[i] = signature.s[i];
  for (int i = 0; i < planes.n; ++i) r.planes[i] = planes.s[i];
  return r;
}

// The only place that names dynamic shared memory.
template <class Smem>
__device__ __forceinline__ Smem& shared() {
  extern __shared__ __align__(1024) unsigned char raw[];
  return *reinterpret_cast<Smem*>(raw);
}

}  // namespace spec

// PARAMS(P): P(type, name) per field.
#define SPEC_FIELD(type, name) type name;
#define SPEC_SIGN(type, name) .field(#name, ::spec::code<type>(), offsetof(Params, name))
#define SPEC_PARAMS(LIST)                          \
  struct Params {                                  \
    LIST(SPEC_FIELD)                               \
  };                                               \
  static constexpr ::spec::Signature signature() { \
    return ::spec::Signature {}                    \
    LIST(SPEC_SIGN);                               \
  }

// PLANES(P, A): P(align, type, name, dims) for a plane of its own, A(on, type, name, dims) for one
// that reuses the memory of plane `on` from its start (it may be larger: the end of the longest
// counts).
#define SPEC_MEMBER(align, type, name, ...) alignas(align) type name __VA_ARGS__;
#define SPEC_ALIAS(on, type, name, ...)  \
  typedef type name##_plane __VA_ARGS__; \
  __device__ name##_plane& name() { return *reinterpret_cast<name##_plane*>(&this->on); }
#define SPEC_MAP(align, type, name, ...) \
  .template plane<decltype(Smem::name)>(#name, offsetof(Smem, name))
#define SPEC_MAP_ALIAS(on, type, name, ...) \
  .template plane<typename Smem::name##_plane>(#name, offsetof(Smem, on), #on)
#define SPEC_SMEM(LIST)                      \
  struct Smem {                              \
    LIST(SPEC_MEMBER, SPEC_ALIAS)            \
  };                                         \
  static constexpr ::spec::Planes planes() { \
    return ::spec::Planes {}                 \
    LIST(SPEC_MAP, SPEC_MAP_ALIAS);          \
  }
#define SPEC_NO_SMEM \
  static constexpr ::spec::Planes planes() { return {}; }

// The entry point and its exported spec. `...` is a family type with kThreads, kMinBlocks, tile(),
// SPEC_PARAMS, SPEC_SMEM or SPEC_NO_SMEM, and `static __device__ void run(const Params&)`.
#define KERNEL(name, ...)                                                                          \
  extern "C" __global__ void __launch_bounds__((__VA_ARGS__::kThreads), (__VA_ARGS__::kMinBlocks)) \
      name(const __grid_constant__ __VA_ARGS__::Params p) {                                        \
    if constexpr (!::spec::kHoldsNext<__VA_ARGS__>) ptx::launch_dependents();                      \
    if constexpr (!::spec::kWaitsItself<__VA_ARGS__>) ptx::dependency_wait();                      \
    __VA_ARGS__::run(p);                                                                           \
    if constexpr (::spec::kHoldsNext<__VA_ARGS__>) {                                               \
      __threadfence();                                                                             \
      __syncthreads(); /* a block's first thread to call it speaks for all */                      \
      ptx::launch_dependents();                                                                    \
    }                                                                                              \
  }                                                                                                \
  extern "C" __device__ constexpr ::spec::Spec name##_spec = ::spec::of<__VA_ARGS__>();
