#include "norm.cuh"

#define NORM(threads) KERNEL(norm_t##threads, Norm<threads>)
#include "../table.def"
