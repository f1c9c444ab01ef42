"""One layer of an e4m3 K/V cache as fp16, for attention to read."""

from __future__ import annotations

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program

# Blocks of all heads together: more would only take turns, and short prompts leave most idle.
_BLOCKS_PER_SM = 8


def widen(
    program: Program,
    library: Library,
    *,
    live: DeviceArray,
    stored: DeviceArray,
    sequences: DeviceArray,
    max_positions: int,
    max_sequences: int,
    layer: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    """Records to = fp16(code * scale) for K and V of `layer`, of every position in use.

    Args:
        live: `Live` of cuda/core/live.cuh.
        stored: `e4m3::Sequence` of cuda/core/e4m3.cuh, one per sequence: the caches.
        sequences: `Sequence` of cuda/core/live.cuh, one per sequence: one layer of fp16 each, with
            room for as many positions as are in use.
        max_positions: the most positions that a sequence will have in use when this runs; only
            speed depends on it.
        max_sequences: the most sequences that `live` will hold.

    Raises:
        ValueError: a head dim that the kernel's pieces do not divide.
        CubinError: there is no kernel.
    """
    (kernel,) = library.family("widen")
    tile = kernel.spec.tile
    if head_dim < 1 or head_dim % int(tile["piece"]):
        raise ValueError(f"widen: head dim {head_dim} is no multiple of {tile['piece']}")
    columns = 2 * kv_heads * max_sequences
    turns = -(-max_positions * head_dim // int(tile["elements"]))
    most = -(-_BLOCKS_PER_SM * library.device.sm_count // columns)
    program.add(
        kernel,
        grid=(min(turns, most), 2 * kv_heads, max_sequences),
        live=live,
        stored=stored,
        sequences=sequences,
        layer=layer,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
