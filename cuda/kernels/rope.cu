#include "rope.cuh"

#define ROPE(max_head_dim, threads) \
  KERNEL(rope_hd##max_head_dim##_t##threads, Rope<max_head_dim, threads>)
#include "../table.def"
