#include "schedule.cuh"

#define SCHEDULE(threads) KERNEL(schedule_t##threads, Schedule<threads>)
#include "../../table.def"
