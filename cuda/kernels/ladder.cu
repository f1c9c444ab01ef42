#include "ladder.cuh"

#define LADDER(variant, structure, hd, tq, tkv, threads, last)       \
  KERNEL(attention_##variant##_hd##hd##_q##tq##_k##tkv##_t##threads, \
         attention::structure<attention::Variant::variant, hd, tq, tkv, threads, last>)
#include "../table.def"
