#include "../gemm_int8.cuh"

#define GEMM_INT8_LARGE(type, bm, bn, split, stages, blocks)             \
  KERNEL(int8_##type##_m##bm##_n##bn##_k##split##_s##stages##_b##blocks, \
         GemmInt8<quant::block_##type, bm, bn, split, stages, blocks, 16, false>)
#include "../../table.def"
