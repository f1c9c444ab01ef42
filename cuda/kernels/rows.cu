#include "rows.cuh"

#define EMBED(type, threads) \
  KERNEL(rows_embed_##type##_t##threads, Embed<quant::block_##type, threads>)
#define GATHER(threads) KERNEL(rows_gather_t##threads, Gather<threads>)
#define LOGITS(type, threads, rows, columns, blocks) \
  KERNEL(rows_logits_##type##_t##threads,            \
         Logits<quant::block_##type, threads, rows, columns, blocks>)
#include "../table.def"
