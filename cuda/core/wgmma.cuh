// wgmma (sm_90a): products of a warpgroup, operands in shared memory, accumulators in registers.
#pragma once

#include <cstdint>
#include <type_traits>

namespace ptx {

// Registers written before are visible to the tensor cores from here on.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Wait until at most `Pending` of the warpgroup's groups are still at work.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
}

// Matrix descriptor of rows of 128 bytes (64 fp16 along k) under the 128-byte swizzle: address,
// (ignored) leading offset and the 1024 bytes between groups of eight rows, all in units of 16
// bytes, then the swizzle. 16 further along k are 2 units further.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t shared) {
  return uint64_t((shared & 0x3FFFF) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 |
         uint64_t(1) << 62;
}

// The same for a B operand of which 64 columns of n lie in a row of 128 bytes (V as [key][dim]):
// `plane` bytes are from 64 columns to the next 64, and 16 further along k are 2048 bytes further.
__device__ __forceinline__ uint64_t wgmma_operand_transposed(uint32_t shared, uint32_t plane) {
  return uint64_t((shared & 0x3FFFF) >> 4) | uint64_t(plane >> 4) << 16 |
         uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// The compiler sees no link between a wait and the registers of the products waited for: after it,
// this one, so that no use of them moves above.
template <class T, int N>
__device__ __forceinline__ void wgmma_settle(T (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if constexpr (std::is_same_v<T, float>)
      asm volatile("" : "+f"(registers[i])::"memory");
    else
      asm volatile("" : "+r"(registers[i])::"memory");
}

// Wgmma<N>::mma(d, a, b, keep): d[64 x N] = a[64 x 16] * b[N x 16]^T (+ d if keep), fp16 in, f32
// accumulation. Lane l of warp w of the warpgroup holds d[16 * w + l / 4 (+ 8)][8 * j + 2 * (l % 4)
// (+ 1)] as d[4 * j + {0, 1 | 2, 3}].
//
// WgmmaRegisters<N>::mma(d, a, b): d += a * b with a [64 x 16] in registers (two fragments of d,
// rounded to fp16, are one of a) and b [16 x N] transposed.
template <int N>
struct Wgmma;
template <int N>
struct WgmmaRegisters;

#define WGMMA_LIST_4 "%0, %1, %2, %3"
#define WGMMA_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES_8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_NAMES_24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_NAMES_72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_NAMES_88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_NAMES_104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_NAMES_112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_NAMES_120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_LIST_8 WGMMA_NAMES_0
#define WGMMA_LIST_16 WGMMA_NAMES_0 ", " WGMMA_NAMES_8
#define WGMMA_LIST_32 WGMMA_LIST_16 ", " WGMMA_NAMES_16 ", " WGMMA_NAMES_24
#define WGMMA_LIST_40 WGMMA_LIST_32 ", " WGMMA_NAMES_32
#define WGMMA_LIST_48 WGMMA_LIST_40 ", " WGMMA_NAMES_40
#define WGMMA_LIST_56 WGMMA_LIST_48 ", " WGMMA_NAMES_48
#define WGMMA_LIST_64 WGMMA_LIST_56 ", " WGMMA_NAMES_56
#define WGMMA_LIST_72 WGMMA_LIST_64 ", " WGMMA_NAMES_64
#define WGMMA_LIST_80 WGMMA_LIST_72 ", " WGMMA_NAMES_72
#define WGMMA_LIST_88 WGMMA_LIST_80 ", " WGMMA_NAMES_80
#define WGMMA_LIST_96 WGMMA_LIST_88 ", " WGMMA_NAMES_88
#define WGMMA_LIST_104 WGMMA_LIST_96 ", " WGMMA_NAMES_96
#define WGMMA_LIST_112 WGMMA_LIST_104 ", " WGMMA_NAMES_104
#define WGMMA_LIST_120 WGMMA_LIST_112 ", " WGMMA_NAMES_112
#define WGMMA_LIST_128 WGMMA_LIST_120 ", " WGMMA_NAMES_120
#define WGMMA_REGISTERS(i)                                                                    \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_OUT_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_OUT_8 WGMMA_REGISTERS(0)
#define WGMMA_OUT_16 WGMMA_OUT_8, WGMMA_REGISTERS(8)
#define WGMMA_OUT_32 WGMMA_OUT_16, WGMMA_REGISTERS(16), WGMMA_REGISTERS(24)
#define WGMMA_OUT_40 WGMMA_OUT_32, WGMMA_REGISTERS(32)
#define WGMMA_OUT_48 WGMMA_OUT_40, WGMMA_REGISTERS(40)
#define WGMMA_OUT_56 WGMMA_OUT_48, WGMMA_REGISTERS(48)
#define WGMMA_OUT_64 WGMMA_OUT_56, WGMMA_REGISTERS(56)
#define WGMMA_OUT_72 WGMMA_OUT_64, WGMMA_REGISTERS(64)
#define WGMMA_OUT_80 WGMMA_OUT_72, WGMMA_REGISTERS(72)
#define WGMMA_OUT_88 WGMMA_OUT_80, WGMMA_REGISTERS(80)
#define WGMMA_OUT_96 WGMMA_OUT_88, WGMMA_REGISTERS(88)
#define WGMMA_OUT_104 WGMMA_OUT_96, WGMMA_REGISTERS(96)
#define WGMMA_OUT_112 WGMMA_OUT_104, WGMMA_REGISTERS(104)
#define WGMMA_OUT_120 WGMMA_OUT_112, WGMMA_REGISTERS(112)
#define WGMMA_OUT_128 WGMMA_OUT_120, WGMMA_REGISTERS(120)

// N, its N / 2 accumulators per thread, and the numbers of the three operands after them.
#define WGMMA(N, D, A, B, KEEP)                                                                   \
  template <>                                                                                     \
  struct Wgmma<N> {                                                                               \
    static __device__ __forceinline__ void mma(float (&d)[D], uint64_t a, uint64_t b, int keep) { \
      asm volatile(                                                                               \
          "{\n"                                                                                   \
          ".reg .pred keep;\n"                                                                    \
          "setp.ne.b32 keep, %" #KEEP                                                             \
          ", 0;\n"                                                                                \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" WGMMA_LIST_##D               \
          "}, %" #A ", %" #B                                                                      \
          ", keep, 1, 1, 0, 0;\n"                                                                 \
          "}\n"                                                                                   \
          : WGMMA_OUT_##D                                                                         \
          : "l"(a), "l"(b), "r"(keep)                                                             \
          : "memory");                                                                            \
    }                                                                                             \
  };
WGMMA(8, 4, 4, 5, 6)
WGMMA(16, 8, 8, 9, 10)
WGMMA(32, 16, 16, 17, 18)
WGMMA(64, 32, 32, 33, 34)
WGMMA(80, 40, 40, 41, 42)
WGMMA(96, 48, 48, 49, 50)
WGMMA(112, 56, 56, 57, 58)
WGMMA(128, 64, 64, 65, 66)
WGMMA(144, 72, 72, 73, 74)
WGMMA(160, 80, 80, 81, 82)
WGMMA(192, 96, 96, 97, 98)
WGMMA(224, 112, 112, 113, 114)
WGMMA(240, 120, 120, 121, 122)
WGMMA(256, 128, 128, 129, 130)

// N, its accumulators, the numbers of four registers of a and of b.
#define WGMMA_FROM_REGISTERS(N, D, A0, A1, A2, A3, B)                                          \
  template <>                                                                                  \
  struct WgmmaRegisters<N> {                                                                   \
    static __device__ __forceinline__ void mma(float (&d)[D], const uint32_t* a, uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" WGMMA_LIST_##D   \
                   "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, 1;\n"       \
                   : WGMMA_OUT_##D                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                        \
                   : "memory");                                                                \
    }                                                                                          \
  };
WGMMA_FROM_REGISTERS(64, 32, 32, 33, 34, 35, 36)
WGMMA_FROM_REGISTERS(96, 48, 48, 49, 50, 51, 52)
WGMMA_FROM_REGISTERS(128, 64, 64, 65, 66, 67, 68)
WGMMA_FROM_REGISTERS(256, 128, 128, 129, 130, 131, 132)

}  // namespace ptx
