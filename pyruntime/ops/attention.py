"""Causal attention of activation rows over a K/V cache."""

from __future__ import annotations

from pyruntime.driver.library import Kernel, Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import UnsupportedModelError

# A wide row tile reads K and V less often, a narrow one gives more blocks: wide only where the
# blocks still go this many times round the device, so that short causal tiles can fill the gaps.
_BLOCKS_PER_SM = 3


def supported_head_dims(library: Library) -> list[int]:
    """Head dims that a kernel on this device exists for, ascending."""
    return sorted({int(k.spec.tile["hd"]) for k in library.family("attention")})


def attention(
    program: Program,
    library: Library,
    *,
    q: DeviceArray,
    out: DeviceArray,
    live: DeviceArray,
    sequences: DeviceArray,
    max_rows: int,
    max_sequences: int,
    layer: int,
    heads: int,
    kv_heads: int,
    scale: float,
    kernel: Kernel | None = None,
) -> None:
    """Records out = softmax(scale q K^T) V per head, a row at position p seeing keys 0..p.

    K and V are those of `layer` in the cache that each sequence names; the rows' own keys and
    values are there already. Query heads share a K/V head in groups of heads / kv_heads. The result
    of a row is the same bit for bit whichever row of the kernel table runs and wherever a prompt
    was cut.

    Args:
        q: float16 [rows, heads * head_dim].
        out: float16, shape of q, written where a sequence has rows.
        live, sequences: `Live` and `Sequence` of cuda/core/live.cuh.
        max_rows: the most rows that any one sequence will have when this runs.
        max_sequences: the most sequences that `live` will hold.
        scale: positive; 1 / sqrt(head_dim) in most models.
        kernel: a row of the table, instead of the one that `choose` picks.

    Raises:
        UnsupportedModelError: no kernel for this head dim.
        ValueError: shapes, dtypes or numbers that do not belong together.
    """
    if q.dtype != "float16" or out.dtype != "float16" or q.shape != out.shape:
        raise ValueError(f"attention: q {q.dtype} {q.shape}, out {out.dtype} {out.shape}")
    if kv_heads < 1 or heads % kv_heads or len(q.shape) != 2 or q.shape[1] % heads:
        raise ValueError(f"attention: q {q.shape} for {heads} heads on {kv_heads} K/V heads")
    if not scale > 0:
        raise ValueError(f"attention: scale {scale} is not positive")
    if kernel is None:
        kernel = choose(library, q.shape[1] // heads, max_rows, heads * max_sequences)
    program.add(
        kernel,
        grid=(heads, max_sequences, _tiles(kernel, max_rows)),
        live=live,
        sequences=sequences,
        q=q,
        o=out,
        layer=layer,
        heads=heads,
        kv_heads=kv_heads,
        scale=scale,
    )


def _tiles(kernel: Kernel, rows: int) -> int:
    return -(-rows // int(kernel.spec.tile["tq"]))


def choose(library: Library, head_dim: int, max_rows: int, columns: int) -> Kernel:
    """The widest row tile that keeps the device busy, else the narrowest.

    Args:
        columns: heads times sequences.

    Raises:
        UnsupportedModelError: no kernel for this head dim.
    """
    fitting = [k for k in library.family("attention") if k.spec.tile["hd"] == head_dim]
    if not fitting:
        raise UnsupportedModelError(
            f"attention: head dim {head_dim} is not supported; "
            f"supported are {', '.join(map(str, supported_head_dims(library)))}"
        )
    fitting.sort(key=lambda k: int(k.spec.tile["tq"]))
    wanted = _BLOCKS_PER_SM * library.device.sm_count
    busy = [k for k in fitting[1:] if _tiles(k, max_rows) * columns >= wanted]
    return (fitting[:1] + busy)[-1]
