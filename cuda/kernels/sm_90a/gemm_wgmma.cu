#include "gemm_wgmma.cuh"

#define GEMM_WGMMA(epilogue, bn, stages, share, split)                    \
  KERNEL(gemm_wgmma_##epilogue##_n##bn##_s##stages##_c##share##_k##split, \
         GemmWgmma<Epilogue::epilogue, bn, stages, share, split>)
#include "../../table.def"
