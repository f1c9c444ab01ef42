#include "clock.cuh"

#define CLOCK(threads) KERNEL(clock_t##threads, Clock<threads>)
#include "../table.def"
