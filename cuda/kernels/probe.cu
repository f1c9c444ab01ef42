#include "probe.cuh"

#define PROBE(access, threads) KERNEL(probe_##access##_t##threads, Probe<Access::access, threads>)
#include "../table.def"
