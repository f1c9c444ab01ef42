#include "repack.cuh"

#define REPACK(type, threads, blocks) \
  KERNEL(repack_##type, Repack<quant::block_##type, threads, blocks>)
#include "../table.def"
