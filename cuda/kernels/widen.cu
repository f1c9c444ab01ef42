#include "widen.cuh"

#define WIDEN(threads, loads) KERNEL(widen_e4m3_t##threads##_l##loads, Widen<threads, loads>)
#include "../table.def"
