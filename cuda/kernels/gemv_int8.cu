#include "gemv_int8.cuh"

#define GEMV_INT8(type, tokens, threads, lanes, blocks) \
  KERNEL(gemv_int8_##type##_t##tokens,                  \
         GemvInt8<quant::block_##type, tokens, threads, lanes, blocks>)
#include "../table.def"
