"""Sizes that passes are recorded for, so few that lengths between two of them share a graph.

Kernels take the counts of live rows, prompts and wanted rows from device memory; what is recorded
is sized for the most there can be, and blocks past the live rows return. So a pass that is recorded
for `bucket(n)` rows serves every length from the bucket before it up to that. All buffers are those
of the decoder, whatever the bucket.

Steps are powers of two, and no more than a ninth of the length: up to 17 every length is its own
bucket, and grids have less than 1/9 more rows than are live. From 1152 on a step is 128,
the rows of the tallest tile of a matrix product: every length has as many tiles as its bucket, and
below that the height of every tile is an edge. So a bucket costs no tile that does work, and on an
H200 the cost model picks the same rows of the GEMM table as for the length itself.
"""

from __future__ import annotations

PARTS = 9  # steps that a length has at least
TILE = 128  # rows; the largest step


def bucket(n: int, most: int) -> int:
    """The size from which nothing larger than `n` is left out, `most` at most; `n` beyond that."""
    step = min(1 << max((n // PARTS).bit_length() - 1, 0), TILE)
    return max(n, min(-(-n // step) * step, most))
