#include "norm.cuh"

#define NORM(threads) KERNEL(norm_t##threads, Norm<threads>)
#define NORM_RESIDUAL(threads) KERNEL(norm_residual_t##threads, NormResidual<threads>)
#include "../table.def"
