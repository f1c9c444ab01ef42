#include "gemm_stream.cuh"

#define GEMM_STREAM(epilogue, bm, bn, stages, split)                    \
  KERNEL(gemm_stream_##epilogue##_m##bm##_n##bn##_s##stages##_k##split, \
         GemmStream<Epilogue::epilogue, bm, bn, stages, split>)
#include "../../table.def"
