#include "gemm.cuh"

#define GEMM(epilogue, bm, bn, bk, stages, warps_m, warps_n, blocks) \
  KERNEL(gemm_##epilogue##_m##bm##_n##bn##_k##bk##_s##stages,        \
         Gemm<Epilogue::epilogue, bm, bn, bk, stages, warps_m, warps_n, blocks>)
#include "../table.def"
