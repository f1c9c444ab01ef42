#include "gemm_int8.cuh"

#define GEMM_INT8(type, bm, bn, split, stages, blocks)                   \
  KERNEL(int8_##type##_m##bm##_n##bn##_k##split##_s##stages##_b##blocks, \
         GemmInt8<quant::block_##type, bm, bn, split, stages, blocks, 16, false>)
#define GEMM_INT8_LEVER(type, bm, bn, split, stages, blocks, copy)                 \
  KERNEL(int8_##type##_m##bm##_n##bn##_k##split##_s##stages##_b##blocks##_c##copy, \
         GemmInt8<quant::block_##type, bm, bn, split, stages, blocks, copy, true>)
#include "../table.def"
