#include "attention_wgmma.cuh"

#define ATTENTION_WGMMA(hd, wgs, bn, qstages, capped, blocks, producer, consumer) \
  KERNEL(attention_wgmma_hd##hd##_w##wgs##_n##bn##_cap##capped,                   \
         attention::Wgmma<hd, wgs, bn, 2, qstages, capped, blocks, producer, consumer>)
#include "../../table.def"
