#include "rope.cuh"

#define ROPE(kv, max_head_dim, threads) \
  KERNEL(rope_##kv##_hd##max_head_dim##_t##threads, Rope<cached::kv, max_head_dim, threads>)
#include "../table.def"
