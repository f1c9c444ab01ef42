// core/tma.cuh and its instructions on the host; see tests/emulator/grid.hpp.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "spec.cuh"

namespace ptx {

// An address in the cluster: a block's rank + 1 (0: the own block), then what is one in the block.
constexpr int kRankBit = 24;

struct Place {
  emulated::Block* block;
  uint32_t offset;
  uint8_t* bytes() const { return emulated::memory_of(*block) + offset; }
};
inline Place place_of(uint32_t address, uint32_t bytes, uint32_t alignment) {
  using namespace emulated;
  const uint32_t rank = address >> kRankBit, offset = address & ((1u << kRankBit) - 1);
  if (rank > launch.cluster_size) leave("a block of the cluster that is not there");
  Block* const there = rank ? &block->cluster->blocks[rank - 1] : block;
  if (offset % alignment || offset + bytes > launch.shared)
    leave("shared memory: a misaligned address, or none");
  if (!there->meeting.alive) leave("shared memory of a block that has ended");
  return {there, offset};
}
inline uint32_t map_to_rank(uint32_t shared, uint32_t rank) {
  if (shared >> kRankBit) emulated::leave("an address that is mapped already");
  return (rank + 1) << kRankBit | shared;
}

// mbarrier: bytes expected (signed), arrivals left, arrivals of a phase, parity of the phase.
struct Barrier {
  int32_t bytes;
  uint16_t left, count : 15, phase : 1;

  void end_if_all() {
    if (left || bytes) return;
    left = count;
    phase ^= 1;
  }
  void expect(int32_t more) {
    bytes += more;
    if (std::abs(bytes) >= 1 << 20) emulated::leave("more bytes than a barrier can count");
  }
  void arrive() {
    if (!left--) emulated::leave("more threads arrive at a barrier than it counts");
    end_if_all();
  }
};
static_assert(sizeof(Barrier) == 8);
constexpr uint64_t kPhase = uint64_t(1) << 63;  // where it lies in a barrier's word

inline Barrier& barrier_at(const Place& place) {
  Barrier& barrier = *reinterpret_cast<Barrier*>(place.bytes());
  if (barrier.count == 0x7fff) emulated::leave("a barrier that nobody has initialised");
  return barrier;
}
inline Barrier& barrier_at(uint32_t address) { return barrier_at(place_of(address, 8, 8)); }

inline void barrier_init(uint32_t barrier, uint32_t count) {
  *reinterpret_cast<Barrier*>(place_of(barrier, 8, 8).bytes()) = {0, uint16_t(count),
                                                                  uint16_t(count), 0};
}
inline void fence_barrier_init() {}
inline void fence_async_proxy() {}
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  barrier_at(barrier).expect(bytes);
  barrier_at(barrier).arrive();
}
inline void barrier_arrive_remote(uint32_t barrier) { barrier_at(barrier).arrive(); }
inline void barrier_arrive(uint32_t barrier) { barrier_at(barrier).arrive(); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (barrier_at(barrier).phase == parity)
    emulated::wait_beyond(shared_at<uint64_t>(barrier), parity ? kPhase : 0, kPhase);
}
inline void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  barrier_wait(barrier, parity);
}

// Bytes for one block arrive, and are counted at a barrier of that block: what they are is found
// out then.
template <class Bytes>
void deliver(const Place& to, uint32_t size, uint32_t barrier, Bytes&& write) {
  const Place counted{to.block, place_of(barrier, 8, 8).offset};
  barrier_at(counted);
  if (emulated::launch.late) std::memset(to.bytes(), emulated::kPoison, size);
  emulated::hand_over(to.block, [=] {
    write(to);
    barrier_at(counted).expect(-int32_t(size));
    barrier_at(counted).end_if_all();
  });
}

// What EmulatedDriver encodes a tensor map as.
struct Map {
  uint64_t magic;
  uint8_t* base;
  uint64_t sizes[3], strides[2];  // from the innermost axis on; in elements, in bytes
  uint32_t box[3], rank;
};
constexpr uint64_t kMapMagic = 0x70616d726f736e74;
constexpr uint32_t kLine = 128;  // bytes of a box's rows

inline const Map& read(const spec::TensorMap* map, uint32_t rank) {
  const Map& m = *reinterpret_cast<const Map*>(map);
  if (reinterpret_cast<uintptr_t>(map) % 64) emulated::leave("a misaligned tensor map");
  if (m.magic != kMapMagic) emulated::leave("a tensor map that is none");
  if (m.rank != rank) emulated::leave("a tensor map of %u dimensions", m.rank);
  return m;
}
inline uint32_t bytes_of(const Map& map) { return kLine * map.box[1] * map.box[2]; }

// Visits what of a box is inside of the array, in pieces that the swizzle leaves whole: where it
// lies in the box, where in the array, and its bytes.
template <class Visit>
void each_piece(const Map& map, int x, int y, int z, Visit&& visit) {
  const int64_t from = std::max<int64_t>(0, -int64_t(x)) * 2;
  const int64_t to = std::min<int64_t>(kLine, (int64_t(map.sizes[0]) - x) * 2);
  for (int64_t i = 0; i < map.box[2]; ++i)
    for (int64_t j = 0; j < map.box[1]; ++j) {
      const int64_t row = y + j, plane = z + i;
      if (row < 0 || row >= int64_t(map.sizes[1]) || plane < 0 || plane >= int64_t(map.sizes[2]))
        continue;
      uint8_t* const line = map.base + row * map.strides[0] + plane * map.strides[1];
      for (int64_t at = from; at < to;) {
        const int64_t end = std::min(to, (at | 15) + 1);
        visit((i * map.box[1] + j) * kLine + at, line + 2 * int64_t(x) + at, end - at);
        at = end;
      }
    }
}
// The 128-byte swizzle.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void load_box(uint32_t shared, const Map& map, uint32_t barrier, int x, int y, int z) {
  deliver(place_of(shared, bytes_of(map), 128), bytes_of(map), barrier, [=](const Place& to) {
    uint8_t* const memory = to.bytes() - to.offset;
    std::memset(to.bytes(), 0, bytes_of(map));
    each_piece(map, x, y, z, [&](uint32_t place, const uint8_t* from, size_t bytes) {
      std::memcpy(memory + swizzled(to.offset + place), from, bytes);
    });
  });
}
inline void tensor_load(uint32_t shared, const spec::TensorMap* map, uint32_t barrier, int x,
                        int y) {
  load_box(shared, read(map, 2), barrier, x, y, 0);
}
inline void tensor_load(uint32_t shared, const spec::TensorMap* map, uint32_t barrier, int x, int y,
                        int z) {
  load_box(shared, read(map, 3), barrier, x, y, z);
}
inline void tensor_load_multicast(uint32_t shared, const spec::TensorMap* map, uint32_t barrier,
                                  int x, int y, uint16_t blocks) {
  for (int rank = 0; blocks >> rank; ++rank)
    if (blocks >> rank & 1) load_box(map_to_rank(shared, rank), read(map, 2), barrier, x, y, 0);
}
inline void bulk_load(uint32_t shared, const void* from, uint32_t bytes, uint32_t barrier) {
  require_aligned<Four>(from);
  if (bytes % 16) emulated::leave("bytes that are no multiple of 16");
  deliver(place_of(shared, bytes, 16), bytes, barrier,
          [=](const Place& to) { std::memcpy(to.bytes(), from, bytes); });
}
inline void store_async(uint32_t address, uint32_t barrier, float x, float y, float z, float w) {
  const float4 v{x, y, z, w};
  const Place to = place_of(address, 16, 16);
  if (place_of(barrier, 8, 8).block != to.block) emulated::leave("a barrier of another block");
  deliver(to, 16, barrier, [=](const Place& to) { std::memcpy(to.bytes(), &v, 16); });
}

inline void tensor_store(const spec::TensorMap* to, uint32_t shared, int x, int y, int z) {
  const Map map = read(to, 3);
  const Place from = place_of(shared, bytes_of(map), 128);
  if (x < 0 || y < 0 || z < 0) emulated::leave("a box that begins before the array");
  emulated::hand_over(nullptr, [=] {
    const uint8_t* const memory = from.bytes() - from.offset;
    each_piece(map, x, y, z, [&](uint32_t place, uint8_t* to, size_t bytes) {
      std::memcpy(to, memory + swizzled(from.offset + place), bytes);
    });
  });
}
inline void tensor_store_wait() {
  emulated::finish_stores(*emulated::block, emulated::block->current);
}

inline void acquire_map(const spec::TensorMap*) {}
inline void prefetch_map(const spec::TensorMap*) {}

inline void cluster_arrive() {
  emulated::Thread& me = emulated::self();
  emulated::Meeting& all = emulated::block->cluster->meeting;
  if (me.at_cluster) emulated::leave("arrives at the cluster's barrier and has not waited there");
  me.at_cluster = true;
  me.cluster_seen = all.generation;
  ++all.arrived;
  all.end_if_all();
}
inline void cluster_wait() {
  emulated::Thread& me = emulated::self();
  const emulated::Meeting& all = emulated::block->cluster->meeting;
  if (!me.at_cluster) emulated::leave("waits at the cluster's barrier and has not arrived there");
  if (all.generation == me.cluster_seen) emulated::wait_beyond(all.generation, me.cluster_seen);
  me.at_cluster = false;
}

inline emulated::Meeting& named(int id, int threads) {
  emulated::Meeting& meeting = emulated::block->named[id];
  if (meeting.arrived && meeting.alive != threads)
    emulated::leave("barrier %d is for %d threads, and for %d", id, meeting.alive, threads);
  meeting.alive = threads;
  return meeting;
}
template <int Threads>
void named_barrier(int id) {
  emulated::arrive(named(id, Threads));
}
template <int Threads>
void named_arrive(int id) {
  emulated::Meeting& meeting = named(id, Threads);
  ++meeting.arrived;
  meeting.end_if_all();
}

inline void store_matrix_x4(uint32_t shared, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const auto all = emulated::exchange(&shared, sizeof(shared));
  const int lane = threadIdx.x % 32;
  const uint32_t mine[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i)
    shared_at<Four>(emulated::from_lane<uint32_t>(all, 8 * i + lane / 4)).x[lane % 4] = mine[i];
}

template <int Registers>
void raise_registers() {}
template <int Registers>
void lower_registers() {}

}  // namespace ptx
