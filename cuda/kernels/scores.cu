#include "scores.cuh"

#define SCORES(threads, loads) KERNEL(scores_t##threads, Scores<threads, loads>)
#include "../table.def"
