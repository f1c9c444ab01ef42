#include "quantize.cuh"

#define QUANTIZE(threads, rows, loads) \
  KERNEL(quantize_r##rows##_l##loads, Quantize<threads, rows, loads>)
#define QUANTIZE_NORM(threads, rows, copy) \
  KERNEL(quantize_norm_r##rows##_c##copy, QuantizeNorm<threads, rows, copy>)
#define QUANTIZE_NORM_HELD(threads, copy) \
  KERNEL(quantize_norm_t##threads##_c##copy, QuantizeNormHeld<threads, copy>)
#define QUANTIZE_RESIDUAL(threads, rows, copy) \
  KERNEL(quantize_residual_r##rows##_c##copy, QuantizeResidual<threads, rows, copy>)
#define QUANTIZE_GATED(epilogue, threads, rows, loads, copy) \
  KERNEL(quantize_##epilogue##_r##rows##_l##loads##_c##copy, \
         QuantizeGated<Epilogue::epilogue, threads, rows, loads, copy>)
#include "../table.def"
