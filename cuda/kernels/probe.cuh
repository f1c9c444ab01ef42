// A stopwatch for shared memory: every warp of one block makes the same access again and again, and
// each notes the SM's clock before and after. tests/gpu/test_banks.py holds the cycles against the
// wavefronts that pyruntime/cubin/banks.py counts for the same addresses.
//
// Grid: one block. Enough warps that the memory is never idle: one warp alone cannot issue fast
// enough to show conflicts.
//
// Plane: the words that are accessed. Stores of all warps meet there; nobody reads what they leave.
#pragma once

#include "../core/ptx.cuh"
#include "../core/spec.cuh"

#define PROBE_PARAMS(P)                                                \
  P(const uint32_t*, addresses) /* [32]: byte in the plane, by lane */ \
  P(int64_t*, clocks)           /* [warps][2]: before and after */     \
  P(uint32_t*, sink)            /* [1], never written */               \
  P(int32_t, rounds)            /* of kAccesses accesses each */       \
  P(uint32_t, step)             /* 0: what the addresses move by in each access */

#define PROBE_PLANES(P, A) P(1024, uint32_t, words, [kWords])

enum class Access { ld4, ld8, ld16, st4, st8, st16, ldmatrix };

template <Access A, int Threads>
struct Probe {
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr int kAccesses = 32;    // between two looks at the loop counter
  static constexpr int kWords = 32 << 8;  // 32 KB
  static constexpr spec::Tile tile() {
    constexpr const char* names[] = {"ld4", "ld8", "ld16", "st4", "st8", "st16", "ldmatrix"};
    return spec::Tile{}.with("access", names[int(A)]).with("accesses", kAccesses);
  }
  SPEC_PARAMS(PROBE_PARAMS)
  SPEC_SMEM(PROBE_PLANES)

  static __device__ void run(const Params& p) {
    Smem& s = spec::shared<Smem>();
#pragma unroll 1
    for (int i = threadIdx.x; i < kWords; i += kThreads) s.words[i] = 0;
    __syncthreads();
    uint32_t address = ptx::shared_address(s.words) + p.addresses[threadIdx.x % 32];
    uint32_t seen = access(address);  // so that the address is here before the clock starts
    __syncthreads();
    const int64_t before = clock64();
#pragma unroll 1
    for (int round = 0; round < p.rounds; ++round) {
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) {
        seen |= access(address);
        address += p.step;  // unknown to the compiler, or it would make one access of all
      }
    }
    const int64_t after = clock64();
    if (seen) *p.sink = seen;  // all words are zero
    if (threadIdx.x % 32 == 0) {
      int64_t* clocks = p.clocks + threadIdx.x / 32 * 2;
      clocks[0] = before;
      clocks[1] = after;
    }
  }

  // One access; what it read, if it is a load.
  static __device__ __forceinline__ uint32_t access(uint32_t address) {
    uint32_t r[4] = {};
    if constexpr (A == Access::ld4)
      asm volatile("ld.volatile.shared.u32 %0, [%1];\n" : "=r"(r[0]) : "r"(address));
    else if constexpr (A == Access::ld8)
      asm volatile("ld.volatile.shared.v2.u32 {%0,%1}, [%2];\n"
                   : "=r"(r[0]), "=r"(r[1])
                   : "r"(address));
    else if constexpr (A == Access::ld16)
      asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(address));
    else if constexpr (A == Access::st4)
      asm volatile("st.volatile.shared.u32 [%0], %1;\n" ::"r"(address), "r"(0));
    else if constexpr (A == Access::st8)
      asm volatile("st.volatile.shared.v2.u32 [%0], {%1,%1};\n" ::"r"(address), "r"(0));
    else if constexpr (A == Access::st16)
      asm volatile("st.volatile.shared.v4.u32 [%0], {%1,%1,%1,%1};\n" ::"r"(address), "r"(0));
    else
      ptx::load_matrix_x4(r, address);
    return r[0] | r[1] | r[2] | r[3];
  }
};
