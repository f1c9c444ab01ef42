"""Bias, q/k norm, rotary embedding, and the store of K and V."""

from __future__ import annotations

import numpy as np

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import CubinError

GROUP = 32  # columns that paired ones come in (cuda/kernels/rotary.cuh): 16 pairs of one head


def rope(
    program: Program,
    library: Library,
    *,
    qkv: DeviceArray,
    q: DeviceArray,
    live: DeviceArray,
    sequences: DeviceArray,
    sequence_of: DeviceArray,
    positions: DeviceArray,
    cosines: DeviceArray,
    sines: DeviceArray,
    max_rows: int,
    layer: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    interleaved: bool,
    overflow: DeviceArray,
    site: int,
    eps: float,
    kv_dtype: str = "f16",
    alike: int = 0,
    bias: DeviceArray | None = None,
    q_norm: DeviceArray | None = None,
    k_norm: DeviceArray | None = None,
) -> None:
    """Records q = rope(norm(qkv + bias)) and the same for k, and the store of k and v in the cache.

    Args:
        qkv: float32 [rows, (heads + 2 kv_heads) * head_dim].
        q: float16 [rows, heads * head_dim], written.
        live, sequences, sequence_of, positions: see `pyruntime.model.live`; of an e4m3 cache,
            `stored` is its list of sequences.
        cosines, sines: float32 [positions, head_dim / 2].
        max_rows: the most rows that `live` will hold when this runs.
        layer: of the cache that k and v go to.
        interleaved: pairs are (2i, 2i + 1), otherwise (i, i + head_dim / 2).
        overflow: int32, lowered to `site` for q, site + 1 for k, site + 2 for v, if a value is out
            of fp16's range.
        eps: of the q/k norm.
        kv_dtype: what the cache holds, "f16" or "e4m3".
        alike: how the columns of qkv lie, see `pyruntime.ops.qkv`; 0: by heads and elements.
        bias: float32 [(heads + 2 kv_heads) * head_dim]; q_norm, k_norm: float32 [head_dim].

    Raises:
        ValueError: arrays that do not belong together, or a head dim beyond the kernel's.
        CubinError: no kernel stores `kv_dtype`.
    """
    kernel = next((k for k in library.family("rope") if k.spec.tile["kv"] == kv_dtype), None)
    if kernel is None:
        raise CubinError(
            f"no rope kernel stores K and V as {kv_dtype} in the cubins for {library.device.name}"
        )
    width = (heads + 2 * kv_heads) * head_dim
    if qkv.shape[1:] != (width,) or q.shape[1:] != (heads * head_dim,):
        raise ValueError(f"rope: qkv {qkv.shape} and q {q.shape} for {heads}+2*{kv_heads} heads")
    if qkv.dtype != np.float32 or q.dtype != np.float16:
        raise ValueError(f"rope: qkv is {qkv.dtype}, q {q.dtype}")
    if max_rows > min(qkv.shape[0], q.shape[0]):
        raise ValueError(f"rope: {max_rows} rows of qkv {qkv.shape}, q {q.shape}")
    if head_dim % 2 or head_dim > int(kernel.spec.tile["max_head_dim"]):
        raise ValueError(f"rope: head dim {head_dim} is odd or beyond {kernel.spec.tile}")
    check_rotary(cosines, sines, head_dim)
    if alike:
        check_paired(heads, kv_heads, head_dim, alike)
    program.add(
        kernel,
        grid=(max_rows, -(-(heads + 2 * kv_heads) // int(kernel.spec.tile["heads"]))),
        live=live,
        sequences=sequences,
        sequence_of=sequence_of,
        positions=positions,
        qkv=qkv,
        bias=bias or 0,
        q_norm=q_norm or 0,
        k_norm=k_norm or 0,
        cosines=cosines,
        sines=sines,
        q=q,
        overflow=overflow,
        layer=layer,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        interleaved=int(interleaved),
        alike=alike,
        site=site,
        eps=eps,
    )


def check_paired(heads: int, kv_heads: int, head_dim: int, alike: int) -> None:
    """Raises ValueError unless columns of so many heads can be paired, `alike` of them in turn."""
    if alike < 1 or heads % alike or kv_heads % alike or head_dim % GROUP:
        raise ValueError(
            f"{heads} and {kv_heads} heads of {head_dim} cannot be paired, {alike} in turn"
        )


def check_rotary(cosines: DeviceArray, sines: DeviceArray, head_dim: int) -> None:
    """Raises ValueError unless both are float32 [positions, head_dim / 2]."""
    shapes, dtypes = {cosines.shape, sines.shape}, {cosines.dtype, sines.dtype}
    if len(shapes) != 1 or cosines.shape[1:] != (head_dim // 2,) or dtypes != {np.dtype("f4")}:
        raise ValueError(
            f"rope: tables {cosines.dtype} {cosines.shape}, {sines.dtype} {sines.shape} "
            f"for head dim {head_dim}"
        )
