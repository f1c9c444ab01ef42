#include "pool.cuh"

#define POOL(threads) KERNEL(pool_t##threads, Pool<threads>)
#include "../table.def"
