// The kernels of one file (-DKERNELS="path"), each a function of its name, and what runs them.
#include "device.hpp"

#include "cuda/core/spec.cuh"

#include <signal.h>

#undef KERNEL
#define KERNEL(name, ...)                                               \
  extern "C" void name(const void* params) {                            \
    __VA_ARGS__::run(*static_cast<const __VA_ARGS__::Params*>(params)); \
  }
#include KERNELS

namespace {

constexpr int kMostParams = 4096;  // bytes

void on_fault(int, siginfo_t* about, void*) {
  sigset_t now;
  sigemptyset(&now);
  sigaddset(&now, SIGSEGV);
  sigaddset(&now, SIGBUS);
  sigprocmask(SIG_UNBLOCK, &now, nullptr);
  emulated::leave("%p is in no array, or misaligned", about->si_addr);
}

// While it lives, what a kernel does to memory that is not there ends the kernel, not the process.
class Guard {
 public:
  Guard() {
    stack_t mine{};
    mine.ss_sp = stack_.data();
    mine.ss_size = stack_.size();
    sigaltstack(&mine, &stack_before_);
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &segv_before_);
    sigaction(SIGBUS, &action, &bus_before_);
  }
  ~Guard() {
    sigaction(SIGSEGV, &segv_before_, nullptr);
    sigaction(SIGBUS, &bus_before_, nullptr);
    sigaltstack(&stack_before_, nullptr);
  }

 private:
  std::vector<uint8_t> stack_ = std::vector<uint8_t>(64 << 10);
  stack_t stack_before_;
  struct sigaction segv_before_, bus_before_;
};

}  // namespace

// Runs a grid in clusters of `cluster` blocks, with `threads` threads and `shared` bytes of shared
// memory each. Null, or what went wrong. `late`: what is asynchronous happens when it is waited
// for, or else at once.
extern "C" const char* emulate(void (*entry)(const void*), const void* params, unsigned size,
                               const unsigned* grid, unsigned threads, unsigned shared,
                               unsigned cluster, unsigned seed, int late) {
  using namespace emulated;
  alignas(64) static uint8_t own[kMostParams];
  static char text[512];
  std::memcpy(own, params, size);
  const Guard guard;
  launch = {};
  launch.entry = entry;
  launch.params = own;
  launch.threads = threads;
  launch.shared = shared;
  launch.cluster_size = cluster;
  launch.late = late;
  launch.random.seed(seed);
  gridDim = dim3(grid[0], grid[1], grid[2]);
  blockDim = dim3(threads, 1, 1);
  launch.started.resize(grid[0] * grid[1] * grid[2] / cluster);
  std::memset(spec::raw, kPoison, sizeof(spec::raw));
  if (!_setjmp(launch.out)) {
    run_grid();
    return nullptr;
  }
  const uint3 at = block->index;
  std::snprintf(text, sizeof(text), "block (%u, %u, %u), thread %d: %s", at.x, at.y, at.z,
                block->current, launch.fault);
  return text;
}
