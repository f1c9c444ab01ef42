#include "softcap.cuh"

#define SOFTCAP(threads, each) KERNEL(softcap_t##threads, Softcap<threads, each>)
#include "../table.def"
