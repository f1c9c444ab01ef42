#include "attention.cuh"

#define ATTENTION(hd, tq, tkv, threads) \
  KERNEL(attention_hd##hd##_q##tq##_k##tkv##_t##threads, Attention<hd, tq, tkv, threads>)
#include "../table.def"
