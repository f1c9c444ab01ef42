// The kernels of one file (-DKERNELS="path"), each a function of its name, and what runs them.
#include "device.hpp"

#include "cuda/core/spec.cuh"

#include <signal.h>
#include <sys/mman.h>

#undef KERNEL
#define KERNEL(name, ...)                                               \
  extern "C" void name(const void* params) {                            \
    __VA_ARGS__::run(*static_cast<const __VA_ARGS__::Params*>(params)); \
  }
#include KERNELS

namespace {

constexpr int kMostThreads = 1024;

void on_fault(int, siginfo_t* about, void*) {
  sigset_t now;
  sigemptyset(&now);
  sigaddset(&now, SIGSEGV);
  sigaddset(&now, SIGBUS);
  sigprocmask(SIG_UNBLOCK, &now, nullptr);
  char what[128];
  std::snprintf(what, sizeof(what), "%p is in no array, or misaligned", about->si_addr);
  emulated::leave(what);
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

// Whether shared memory from byte `first` on is as it was before the block.
bool untouched(size_t first) {
  const unsigned char* const rest = spec::raw + first;
  const size_t count = sizeof(spec::raw) - first;
  return rest[0] == emulated::kPoison && !std::memcmp(rest, rest + 1, count - 1);
}

}  // namespace

// Runs a grid of blocks with `threads` threads and `shared` bytes of shared memory each. Null, or
// what went wrong. `late`: asynchronous copies arrive when they are waited for, or else at once.
extern "C" const char* emulate(void (*entry)(const void*), const void* params, const unsigned* grid,
                               unsigned threads, unsigned shared, unsigned seed, int late) {
  using namespace emulated;
  static Block b;
  static char text[512];
  if (!stacks)
    stacks = static_cast<uint8_t*>(mmap(nullptr, kMostThreads * kStack, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  const Guard guard;
  b.entry = entry;
  b.params = params;
  b.late = late;
  b.random.seed(seed);
  gridDim = dim3(grid[0], grid[1], grid[2]);
  blockDim = dim3(threads, 1, 1);
  std::vector<unsigned> order(grid[0] * grid[1] * grid[2]);
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), b.random);
  for (unsigned number : order) {
    blockIdx = {number % grid[0], number / grid[0] % grid[1], number / grid[0] / grid[1]};
    std::memset(spec::raw, kPoison, sizeof(spec::raw));
    bool right = run_block(b, threads);
    if (right && !untouched(shared)) {
      right = false;
      std::snprintf(b.fault, sizeof(b.fault), "written to shared memory past its %u bytes", shared);
    }
    if (!right) {
      std::snprintf(text, sizeof(text), "block (%u, %u, %u), thread %d: %s", blockIdx.x, blockIdx.y,
                    blockIdx.z, b.current, b.fault);
      return text;
    }
  }
  return nullptr;
}
