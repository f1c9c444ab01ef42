// The SM clock: cycles of one multiprocessor over a stretch of the global timer.
// Grid: one block; one thread works. It waits for two ticks of the timer, so that the timer's
// resolution (32 ns to 1 us) does not count. Bytes: 16, written.
#pragma once

#include "../core/ptx.cuh"
#include "../core/spec.cuh"

#define CLOCK_PARAMS(P)                                  \
  P(int64_t*, out)        /* [2]: cycles, nanoseconds */ \
  P(int32_t, nanoseconds) /* to measure over, about */

template <int Threads>
struct Clock {
  static constexpr int kThreads = Threads, kMinBlocks = 1;
  static constexpr spec::Tile tile() { return spec::Tile{}; }
  SPEC_PARAMS(CLOCK_PARAMS)
  SPEC_NO_SMEM

  static __device__ void run(const Params& p) {
    if (threadIdx.x) return;
    const int64_t before = ptx::global_timer();
    int64_t started, ended;
    do started = ptx::global_timer();
    while (started == before);
    const int64_t first = clock64();
    do ended = ptx::global_timer();
    while (ended - started < p.nanoseconds);
    p.out[0] = clock64() - first;
    p.out[1] = ended - started;
  }
};
