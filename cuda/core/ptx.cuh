// One PTX instruction, one function. Sections are those of the PTX ISA manual.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// cp.async (9.7.9.25.3): 16 bytes from global to shared memory, the last 16 - `bytes` of them
// zeroed; L2 may fetch the whole 128-byte line.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared),
               "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copy_async_16(void* shared, const void* global, int bytes) {
  copy_async_16(shared_address(shared), global, bytes);
}

// The same for 4 bytes, through L1.
__device__ __forceinline__ void copy_async_4(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Wait until at most `Pending` of this thread's groups are still on their way.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

// ldmatrix (9.7.14.5.15): four 8x8 fp16 matrices; lane i has the address of row i % 8 of matrix
// i / 8.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], const void* shared) {
  load_matrix_x4(r, shared_address(shared));
}

__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
}

// mma (9.7.14.5.8): c[16x8] += a[16x16] * b[16x8], fp16 in, f32 accumulation.
// Lane l holds c[l/4 (+8)][2*(l%4) (+1)] as {c0, c1 | c2, c3}.
__device__ __forceinline__ void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ld.global.nc of one, two or four words that no kernel writes while this one runs. Where nobody
// else will want them they leave no trace in L1. `volatile`: they stay before a wait that they are
// before.
__device__ __forceinline__ void load_once(uint32_t (&r)[1], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];\n" : "=r"(r[0]) : "l"(from));
}
__device__ __forceinline__ void load_once(uint32_t (&r)[2], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "l"(from));
}
__device__ __forceinline__ void load_once(uint32_t (&r)[4], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "l"(from));
}
__device__ __forceinline__ void load_constant(uint32_t (&r)[1], const void* from) {
  asm volatile("ld.global.nc.b32 %0, [%1];\n" : "=r"(r[0]) : "l"(from));
}
__device__ __forceinline__ void load_constant(uint32_t (&r)[2], const void* from) {
  asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];\n" : "=r"(r[0]), "=r"(r[1]) : "l"(from));
}
__device__ __forceinline__ void load_constant(uint32_t (&r)[4], const void* from) {
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "l"(from));
}

// Memory accesses before it stay before those after it, for the compiler.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

// st.global.v2, .v4: one store, where the compiler would split an assignment under a condition.
__device__ __forceinline__ void store_words(void* to, uint32_t x, uint32_t y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};\n" ::"l"(to), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void store_words(void* to, uint32_t x, uint32_t y, uint32_t z,
                                            uint32_t w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(x), "r"(y), "r"(z),
               "r"(w)
               : "memory");
}

__device__ __forceinline__ void store_floats(float* to, float4 v) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
}

// red.add (9.7.13.7): *to += x, done in L2; subnormal numbers count as zeros.
__device__ __forceinline__ void add_float(float* to, float x) {
  asm volatile("red.global.add.f32 [%0], %1;\n" ::"l"(to), "f"(x) : "memory");
}

// cvt.rn.f16x2.f32 (9.7.9.21): two floats to the fp16 halves of a word.
__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// griddepcontrol (sm_90 and newer; nothing below): lets the next kernel of the stream start once
// every block of this one has said so or ended. It says nothing about data: see spec.cuh.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// Waits until the kernel before has completed and all that it wrote is visible here. Returns at
// once in a kernel that was launched the ordinary way.
__device__ __forceinline__ void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// fma.rn.f32x2 (9.7.3.6): x[i] * y[i] + z[i] of two floats, each rounded once as fmaf does. A
// single instruction of sm_100 to 110; older ones have none, and of sm_120 ptxas makes two of it.
#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr bool kPairedFloats = true;
#else
constexpr bool kPairedFloats = false;
#endif
template <bool Paired = kPairedFloats>
__device__ __forceinline__ void fma_pair(float (&to)[2], float x0, float x1, float y0, float y1,
                                         float z0, float z1) {
  if constexpr (Paired)
    asm("{\n.reg .b64 x, y, z;\nmov.b64 x, {%2,%3};\nmov.b64 y, {%4,%5};\nmov.b64 z, {%6,%7};\n"
        "fma.rn.f32x2 x, x, y, z;\nmov.b64 {%0,%1}, x;\n}\n"
        : "=f"(to[0]), "=f"(to[1])
        : "f"(x0), "f"(x1), "f"(y0), "f"(y1), "f"(z0), "f"(z1));
  else
    to[0] = fmaf(x0, y0, z0), to[1] = fmaf(x1, y1, z1);
}

// ex2.approx (9.7.3.21): 2^x, 2 ulp; 2^-inf = 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// max.NaN (9.7.3.12): the larger one; NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

// rcp.approx (9.7.3.13): 1 / x, 1 ulp; 1 / inf = 0.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// atom.inc. Unlike atomicAdd's, which the compiler gathers over the warp, its old value is waited
// for only where it is used.
__device__ __forceinline__ int fetch_increment(int32_t* counter) {
  int old;
  asm volatile("atom.global.inc.u32 %0, [%1], 0x7fffffff;\n" : "=r"(old) : "l"(counter) : "memory");
  return old;
}

// st.release and ld.acquire of a flag between blocks: who reads it sees what was written before it.
__device__ __forceinline__ void store_release(int32_t* to, int32_t x) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;\n" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ int32_t load_acquire(const int32_t* from) {
  int32_t x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];\n" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// mad.wide: base + index * stride, in one instruction that the compiler does not take apart.
__device__ __forceinline__ const uint8_t* address_of(const uint8_t* base, uint32_t index,
                                                     uint32_t stride) {
  const uint8_t* address;
  asm("mad.wide.u32 %0, %1, %2, %3;\n" : "=l"(address) : "r"(index), "r"(stride), "l"(base));
  return address;
}

// trap (9.7.19.5): the launch ends with an error.
__device__ __forceinline__ void trap() { asm volatile("trap;\n"); }

// threadIdx.x, read once more: the compiler keeps nothing that was computed from it before.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(thread));
  return thread;
}

// ld.shared.v4 and st.shared.v4 by address.
__device__ __forceinline__ uint4 load_shared(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared_word(uint32_t shared) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(v) : "r"(shared) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_pointer(uint32_t shared, const uint8_t* pointer) {
  asm volatile("st.shared.b64 [%0], %1;\n" ::"r"(shared), "l"(pointer) : "memory");
}
__device__ __forceinline__ void load_shared_pointers(const uint8_t*& first, const uint8_t*& second,
                                                     uint32_t shared) {
  asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];\n"
               : "=l"(first), "=l"(second)
               : "r"(shared)
               : "memory");
}
__device__ __forceinline__ void store_shared_byte(uint32_t shared, uint32_t byte) {
  asm volatile("st.shared.b8 [%0], %1;\n" ::"r"(shared), "r"(byte) : "memory");
}
__device__ __forceinline__ void store_shared_zero(uint32_t shared) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(shared), "r"(0) : "memory");
}

// %globaltimer (10.27): nanoseconds, in steps of 32 ns to 1 us.
__device__ __forceinline__ int64_t global_timer() {
  int64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;\n" : "=l"(t));
  return t;
}

}  // namespace ptx
