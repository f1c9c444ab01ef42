#include "gemv_int8.cuh"

#define GEMV_INT8(type, tokens, threads, lanes, rows, blocks) \
  KERNEL(gemv_int8_##type##_t##tokens##_r##rows,              \
         GemvInt8<quant::block_##type, tokens, threads, lanes, rows, blocks>)
#include "../table.def"
