#include "rows.cuh"

#define EMBED(threads) KERNEL(rows_embed_t##threads, Embed<threads>)
#define GATHER(threads) KERNEL(rows_gather_t##threads, Gather<threads>)
#include "../table.def"
