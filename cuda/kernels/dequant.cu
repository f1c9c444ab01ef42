#include "dequant.cuh"

#define DEQUANT(type, threads, elements) \
  KERNEL(dequant_##type, Dequant<quant::block_##type, threads, elements>)
#include "../table.def"
