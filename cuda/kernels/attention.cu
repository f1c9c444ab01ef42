#include "attention.cuh"

#define ATTENTION(hd, tq, tkv, threads) \
  KERNEL(attention_hd##hd##_q##tq##_k##tkv##_t##threads, attention::Fast<hd, tq, tkv, threads>)
#define ATTENTION_CAP(hd, tq, tkv, threads)                  \
  KERNEL(attention_cap_hd##hd##_q##tq##_k##tkv##_t##threads, \
         attention::Fast<hd, tq, tkv, threads, true>)
#include "../table.def"
