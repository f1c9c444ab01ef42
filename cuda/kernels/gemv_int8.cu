#include "gemv_int8.cuh"

#define GEMV_INT8(type, tokens, warps, lanes, rows, blocks) \
  KERNEL(gemv_int8_##type##_t##tokens##_r##rows##_w##warps, \
         GemvInt8<quant::block_##type, tokens, warps, lanes, rows, blocks>)
#include "../table.def"
