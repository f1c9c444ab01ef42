// Threads, blocks and clusters of a grid on the host, and how they take turns.
//
// Threads are fibers of one thread. One runs until it has to wait for others (at a barrier, for
// what lanes of its warp bring, for bytes), then another, in an order that `seed` shuffles: what
// depends on the order differs from seed to seed.
//
// Blocks of a cluster run at a time, clusters one after the other in shuffled order. Two
// exceptions:
// - While threads of a cluster wait for a flag of another one, those with lower numbers start. So a
//   cluster may wait for lower ones alone: on a GPU higher ones may not have started.
// - Late, up to kMostResident clusters are there at a time.
// Shared memory is one symbol, spec::raw: what a block has there is kept aside while another runs.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace spec {
constexpr size_t kMostShared = 232448;
alignas(1024) unsigned char raw[kMostShared];
}  // namespace spec

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace emulated {

constexpr size_t kStack = 256 << 10;
constexpr int kWarp = 32, kMostThreads = 1024, kMostResident = 3;
constexpr uint8_t kPoison = 0xff;  // NaN in every float format

// Bytes that a thread has on their way from global to shared memory (cp.async).
struct Copy {
  uint32_t to;
  const void* from;
  int bytes, zeros, group;
};

// A product that a warp has issued to the tensor cores (core/wgmma.cuh): its own lane's registers.
struct Product {
  float* d;
  const uint32_t* a_words;  // null: `a` says where in shared memory
  uint64_t a, b;
  int columns;
  bool keep, transposed;
  int group;
};

struct Thread {
  jmp_buf at;
  bool started = false, done = false;
  // It waits until those bits of a word are not what it has seen.
  const uint64_t* where = nullptr;
  uint64_t bits = 0, seen = 0;
  std::vector<Copy> copies;
  int groups = 0;  // of copies, committed so far
  std::vector<Product> products;
  int product_groups = 0;
  bool at_cluster = false;  // it has arrived at the cluster's barrier in the generation ...
  uint64_t cluster_seen = 0;
  const int32_t* flag = nullptr;  // that it read last, and what was there
  int32_t flag_seen = 0;
};

// Who has come to a barrier that all `alive` threads come to.
struct Meeting {
  uint64_t generation = 0;
  int arrived = 0, alive = 0;

  void end_if_all() {
    if (alive && arrived == alive) arrived = 0, ++generation;
  }
  void leave() {
    --alive;
    end_if_all();
  }
};

// Of a warp: what its lanes have brought to an exchange, for two in turn, since the first lanes may
// be at the next one while others still read.
struct Warp {
  alignas(16) uint8_t brought[2][kWarp][64];
  Meeting meeting;
};

struct Cluster;
struct Block {
  uint3 index;
  int rank, area;  // in the cluster; of its stacks
  Cluster* cluster;
  std::vector<Thread> threads;
  std::vector<int> order;
  std::vector<Warp> warps;
  Meeting meeting, named[16];  // of a named barrier `alive` is how many it is for
  std::vector<uint8_t> aside;  // its shared memory while another block runs
  int current = 0;
};

struct Cluster {
  unsigned number;
  std::vector<Block> blocks;
  std::vector<int> order;
  Meeting meeting;
};

// What another agent than a thread carries out: of a copy to `to`'s shared memory, or from its own.
struct Transfer {
  Block* by;
  int thread;
  Block* to;  // null: to global memory
  std::function<void()> carry_out;
};

struct Launch {
  void (*entry)(const void*);
  const void* params;
  unsigned threads, shared, cluster_size;
  bool late;  // what is asynchronous happens when it is waited for; else at once
  std::mt19937 random;
  std::vector<bool> started;  // clusters
  std::vector<std::unique_ptr<Cluster>> resident;
  std::vector<Transfer> transfers;
  std::vector<bool> areas;  // of stacks: whether in use
  Block* loaded;            // whose shared memory is in spec::raw
  uint64_t releases;        // of flags, so far
  jmp_buf scheduler, out;
  char fault[256];
};

inline Launch launch;
inline Block* block;
inline std::vector<uint8_t*> stacks;  // areas of kMostThreads
inline ucontext_t entered;

inline Thread& self() { return block->threads[block->current]; }
inline Warp& own_warp() { return block->warps[block->current / kWarp]; }

template <class... Words>
[[noreturn]] void leave(const char* what, Words... words) {
  std::snprintf(launch.fault, sizeof(launch.fault), what, words...);
  _longjmp(launch.out, 1);
}

// Lets others run until those bits of a word are not what was seen.
inline void wait_beyond(const uint64_t& word, uint64_t seen, uint64_t bits = ~uint64_t(0)) {
  Thread& me = self();
  me.where = &word;
  me.seen = seen & bits;
  me.bits = bits;
  if (!_setjmp(me.at)) _longjmp(launch.scheduler, 1);
}

inline void arrive(Meeting& meeting) {
  const uint64_t seen = meeting.generation;
  ++meeting.arrived;
  meeting.end_if_all();
  if (meeting.generation == seen) wait_beyond(meeting.generation, seen);
}

// What every lane of the warp brings, once all have: 32 slots of 64 bytes.
inline const uint8_t (*exchange(const void* mine, size_t size))[64] {
  Warp& warp = own_warp();
  const int turn = warp.meeting.generation % 2;
  std::memcpy(warp.brought[turn][block->current % kWarp], mine, size);
  arrive(warp.meeting);
  return warp.brought[turn];
}
template <class T>
T from_lane(const uint8_t (*all)[64], int lane) {
  T x;
  std::memcpy(&x, all[lane], sizeof(T));
  return x;
}

// ---- Bytes on their way.

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
  if (!launch.late) return carry_out(copy);
  std::memset(spec::raw + to, kPoison, size);
  self().copies.push_back(copy);
}

// A block's shared memory, whether it runs or not.
inline uint8_t* memory_of(Block& b) { return launch.loaded == &b ? spec::raw : b.aside.data(); }

inline void hand_over(Block* to, std::function<void()> what) {
  if (!launch.late) return what();
  launch.transfers.push_back({block, block->current, to, std::move(what)});
}

inline void carry_out_transfer(size_t i) {
  const Transfer transfer = std::move(launch.transfers[i]);
  launch.transfers.erase(launch.transfers.begin() + i);
  Block* const was = block;
  block = transfer.by;
  const int current = std::exchange(block->current, transfer.thread);
  transfer.carry_out();
  block->current = current;
  block = was;
}

// What a block has on its way out of its shared memory, of one of its threads or of all (-1).
inline void finish_stores(const Block& b, int thread) {
  for (size_t i = 0; i < launch.transfers.size();) {
    const Transfer& t = launch.transfers[i];
    if (!t.to && t.by == &b && (thread < 0 || t.thread == thread))
      carry_out_transfer(i);
    else
      ++i;
  }
}

// ---- Taking turns.

inline void main_of_thread() {
  launch.entry(launch.params);
  arrive_copies(1 << 30);
  Thread& me = self();
  if (!me.products.empty()) leave("ends with products that it has not waited for");
  me.done = true;
  own_warp().meeting.leave();
  block->meeting.leave();
  Meeting& cluster = block->cluster->meeting;
  if (me.at_cluster && me.cluster_seen == cluster.generation) --cluster.arrived;
  cluster.leave();
  _longjmp(launch.scheduler, 1);
}

// Sees to it that spec::raw is a block's; that nothing was written past what blocks ask for.
inline void load(Block* b) {
  if (launch.loaded == b) return;
  if (Block* const before = launch.loaded) {
    const unsigned char* const rest = spec::raw + launch.shared;
    const size_t count = sizeof(spec::raw) - launch.shared;
    if (count && (rest[0] != kPoison || std::memcmp(rest, rest + 1, count - 1))) {
      block = before;
      leave("written to shared memory past its %u bytes", launch.shared);
    }
    std::memcpy(before->aside.data(), spec::raw, launch.shared);
  }
  if (b) std::memcpy(spec::raw, b->aside.data(), launch.shared);
  launch.loaded = b;
}

inline bool can_go_on(Block& b, const Thread& thread) {
  if (thread.done) return false;
  if (!thread.where) return true;
  auto at = reinterpret_cast<const unsigned char*>(thread.where);
  if (at >= spec::raw && at < spec::raw + sizeof(spec::raw)) at = memory_of(b) + (at - spec::raw);
  uint64_t word;
  std::memcpy(&word, at, sizeof(word));
  return (word & thread.bits) != thread.seen;
}

// One thread, until it waits or ends.
inline void run_thread(Block& b, int i) {
  load(&b);
  block = &b;
  b.current = i;
  blockIdx = b.index;
  threadIdx = {unsigned(i), 0, 0};
  Thread& thread = b.threads[i];
  thread.where = nullptr;
  if (_setjmp(launch.scheduler)) return;
  if (thread.started) _longjmp(thread.at, 1);
  thread.started = true;
  getcontext(&entered);
  entered.uc_stack.ss_sp = stacks[b.area] + i * kStack;
  entered.uc_stack.ss_size = kStack;
  entered.uc_link = nullptr;
  makecontext(&entered, main_of_thread, 0);
  setcontext(&entered);
}

// A block, until none of its threads can go on; whether one could.
inline bool run_block(Block& b) {
  bool moved = false, again = true;
  while (again) {
    again = false;
    std::shuffle(b.order.begin(), b.order.end(), launch.random);
    for (int i : b.order) {
      if (!can_go_on(b, b.threads[i])) continue;
      run_thread(b, i);
      again = moved = true;
    }
  }
  return moved;
}

inline int free_area() {
  const int area =
      std::find(launch.areas.begin(), launch.areas.end(), false) - launch.areas.begin();
  if (area == int(launch.areas.size())) launch.areas.push_back(false);
  launch.areas[area] = true;
  if (area == int(stacks.size()))
    stacks.push_back(
        static_cast<uint8_t*>(mmap(nullptr, kMostThreads * kStack, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)));
  return area;
}

inline void start(unsigned number) {
  launch.started[number] = true;
  launch.resident.push_back(std::make_unique<Cluster>());
  Cluster& cluster = *launch.resident.back();
  cluster.number = number;
  cluster.blocks.resize(launch.cluster_size);
  cluster.meeting.alive = launch.cluster_size * launch.threads;
  for (int rank = 0; rank < int(launch.cluster_size); ++rank) {
    Block& b = cluster.blocks[rank];
    const unsigned at = number * launch.cluster_size + rank;
    b.index = {at % gridDim.x, at / gridDim.x % gridDim.y, at / gridDim.x / gridDim.y};
    b.rank = rank;
    cluster.order.push_back(rank);
    b.area = free_area();
    b.cluster = &cluster;
    b.threads.resize(launch.threads);
    b.warps.resize((launch.threads + kWarp - 1) / kWarp);
    b.meeting.alive = launch.threads;
    b.aside.assign(launch.shared, kPoison);
    for (int i = 0; i < int(launch.threads); ++i) {
      b.order.push_back(i);
      ++b.warps[i / kWarp].meeting.alive;
    }
  }
}

inline void end(Block& b) {
  block = &b;
  finish_stores(b, -1);
  for (const Transfer& t : launch.transfers)
    if (t.to == &b) leave("the block has ended, and bytes are on their way to it");
  if (launch.loaded == &b) load(nullptr);
  launch.areas[b.area] = false;
}

// Nothing moves: the lowest cluster that one of those that are there may wait for, if there is one.
inline bool start_lower() {
  for (const auto& cluster : launch.resident)
    for (const Block& b : cluster->blocks)
      for (const Thread& thread : b.threads)
        if (!thread.done && thread.where == &launch.releases)
          for (unsigned number = 0; number < cluster->number; ++number)
            if (!launch.started[number]) return start(number), true;
  return false;
}

[[noreturn]] inline void report_waiting() {
  int waiting = 0;
  for (const auto& cluster : launch.resident)
    for (Block& b : cluster->blocks)
      for (int i = 0; i < int(b.threads.size()); ++i)
        if (!b.threads[i].done) ++waiting, block = &b, b.current = i;
  leave("%d threads wait for others that do not come", waiting);
}

inline void run_grid() {
  std::vector<unsigned> order(launch.started.size());
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), launch.random);
  auto& resident = launch.resident;
  auto& transfers = launch.transfers;
  for (auto next = order.begin();;) {
    while (next != order.end() && launch.started[*next]) ++next;
    if (resident.empty()) {
      if (next == order.end()) return;
      start(*next);
    }
    bool moved = false;
    for (size_t i = 0; i < resident.size();) {
      Cluster& cluster = *resident[i];
      std::shuffle(cluster.order.begin(), cluster.order.end(), launch.random);
      for (int rank : cluster.order) {
        Block& b = cluster.blocks[rank];
        if (!b.meeting.alive) continue;
        moved |= run_block(b);
        if (!b.meeting.alive) end(b);
      }
      if (cluster.meeting.alive)
        ++i;
      else
        resident.erase(resident.begin() + i);
    }
    if (moved) continue;
    const bool more = next != order.end() && !launch.started[*next];
    if (!transfers.empty()) {
      if (more && resident.size() < kMostResident && launch.random() % 4 == 0)
        start(*next);
      else
        carry_out_transfer(launch.random() % transfers.size());
    } else if (!start_lower()) {
      report_waiting();
    }
  }
}

}  // namespace emulated
