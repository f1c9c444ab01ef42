// Copies by the tensor memory accelerator, the barriers they complete on, and clusters (sm_90 and
// newer). One PTX instruction, one function.
#pragma once

#include "ptx.cuh"
#include "spec.cuh"

namespace ptx {

// mbarrier: a phase ends when `count` arrivals and all expected bytes have come.
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers known to the cluster ...
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// ... and generic writes to shared memory known to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// At a barrier of any block of the cluster. Not `.release.cluster`, which compiles to a memory
// barrier of the whole GPU: it orders nothing but what has completed already.
__device__ __forceinline__ void barrier_arrive_remote(uint32_t cluster_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(cluster_barrier) : "memory");
}

// Waits until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
      "@!over bra AGAIN;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same for data that other blocks of the cluster wrote (st.async). It drops the L1 cache: not
// for a main loop.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%0], %1;\n"
      "@!over bra AGAIN;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// cp.async.bulk.tensor: the map's box at column x, row y to shared memory; what lies outside of the
// matrix becomes zeros, and the barrier gets the bytes of the whole box.
__device__ __forceinline__ void tensor_load(uint32_t shared, const spec::TensorMap* map,
                                            uint32_t barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// The same, to the same place in every block of the cluster whose rank is a bit of `blocks`.
__device__ __forceinline__ void tensor_load_multicast(uint32_t shared, const spec::TensorMap* map,
                                                      uint32_t barrier, int x, int y,
                                                      uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

// The same for three dimensions, coordinates from the innermost (x) on.
__device__ __forceinline__ void tensor_load(uint32_t shared, const spec::TensorMap* map,
                                            uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// cp.async.bulk: bytes as they lie, a multiple of 16 from a 16-byte boundary to one.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(shared),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// A box from shared memory to the matrix. What lies past its end is dropped; coordinates before its
// begin fault. One group per call; the wait is for its reads of shared memory.
__device__ __forceinline__ void tensor_store(const spec::TensorMap* map, uint32_t shared, int x,
                                             int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];\n" ::
          "l"(map),
      "r"(shared), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void tensor_store_wait() {
  asm volatile(
      "cp.async.bulk.commit_group;\n"
      "cp.async.bulk.wait_group.read 0;\n" ::
          : "memory");
}

// A map in global memory that a copy wrote: before a thread's first use of it.
__device__ __forceinline__ void acquire_map(const spec::TensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;\n" ::"l"(map) : "memory");
}

__device__ __forceinline__ void prefetch_map(const spec::TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// mapa: where a shared address of this block lies in block `rank` of the cluster.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t shared, uint32_t rank) {
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(r) : "r"(shared), "r"(rank));
  return r;
}

// 16 bytes to another block's shared memory, counted at that block's barrier; no waiting here.
__device__ __forceinline__ void store_async(uint32_t cluster_address, uint32_t cluster_barrier,
                                            float x, float y, float z, float w) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, "
      "[%1];\n" ::"r"(cluster_address),
      "r"(cluster_barrier), "f"(x), "f"(y), "f"(z), "f"(w)
      : "memory");
}

// Every thread of the cluster arrives, and waits later.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory");
}

// bar.sync: barrier `id` among `Threads` threads.
template <int Threads>
__device__ __forceinline__ void named_barrier(int id) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "n"(Threads) : "memory");
}

// bar.arrive: counts this warp at barrier `id` among `Threads` threads, without waiting.
template <int Threads>
__device__ __forceinline__ void named_arrive(int id) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "n"(Threads) : "memory");
}

// stmatrix: four 8x8 matrices of fp16 to shared memory, a row's address from each lane.
__device__ __forceinline__ void store_matrix_x4(uint32_t shared, uint32_t a, uint32_t b, uint32_t c,
                                                uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// setmaxnreg: registers per thread of this warpgroup from here on.
template <int Registers>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Registers));
}

}  // namespace ptx
