"""The q, k, v product on to attention's inputs, in one launch where a GEMM can rotate by itself.

For that the columns of the product are *paired* (cuda/kernels/rotary.cuh): the rows of W lie so
that a thread of the GEMM gets both elements of a rotated pair. q and what is stored of K and V are
in the model's own order all the same. `alike` says how the columns lie, 0: as in the model.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pyruntime.driver.library import Kernel, Library, kept
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.ops.gemm import ALIGNMENT, blocks, choice, divided, gemm, operands, rows_for, sharing
from pyruntime.ops.gemm_choice import MEMORY_BYTES, costs
from pyruntime.ops.gemm_workspace import GemmWorkspace
from pyruntime.ops.rope import GROUP, check_paired, check_rotary, rope

MOST_ALIKE = 4
# Cycles of a launch of rope besides what it moves: less than of a stream GEMM, which fills and
# empties its pipeline, too. Set by hand.
ROPE_LAUNCH = 2800.0


def alike_heads(
    library: Library,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    interleaved: bool,
    bias: bool,
    norm: bool,
    kv_dtype: str,
) -> int:
    """How many heads alternate in the columns of the product, or 0: columns as in the model.

    0 is where no GEMM could use the paired order: on devices without its kernels, for caches that
    are not fp16, with q/k norms, with a bias of interleaved pairs, and at head dims that are no
    multiple of 32.
    """
    fused = any(k.spec.tile["epilogue"] == "qkv" for k in library.family("gemm"))
    if not fused or kv_dtype != "f16" or norm or (bias and interleaved) or head_dim % GROUP:
        return 0
    return math.gcd(heads, kv_heads, MOST_ALIKE)


def paired_rows(
    *, heads: int, kv_heads: int, head_dim: int, interleaved: bool, alike: int
) -> NDArray[np.int32]:
    """The row of the model's W, int32 [(heads + 2 kv_heads) * head_dim], of each paired column."""
    column = np.arange((heads + 2 * kv_heads) * head_dim, dtype=np.int32)
    group, inside = np.divmod(column, GROUP)
    fragment, (quad, element) = inside // 8, np.divmod(inside % 8, 2)
    block, group = np.divmod(group, head_dim // GROUP * alike)
    head = block * alike + group % alike
    pair = group // alike * (GROUP // 2) + quad * 4 + fragment
    place = 2 * pair + element if interleaved else pair + element * (head_dim // 2)
    return np.asarray(head * head_dim + place, np.int32)


@kept  # all layers of a model ask the same
def rotating(
    library: Library, m: int, n: int, k: int, invariant: bool, stream_k: bool = False
) -> Kernel | None:
    """The row of the table that makes [m, n] of q, k, v from k inputs in one launch.

    None where a product and a launch of rope should be faster: with few rows of A, for which there
    are engines that cannot rotate. stream_k: see `choose`.
    """
    device = library.device
    one, two = (
        costs(rows_for(library, epilogue, invariant), m, n, k, device, stream_k)
        for epilogue in ("qkv", "f32")
    )
    moved = (4 + 2) * m * n / (MEMORY_BYTES["stream"] * device.sm_count)
    if not one or min(one.values()) > min(two.values()) + ROPE_LAUNCH + moved:
        return None
    return choice(library, "qkv", m, n, k, invariant, stream_k)


def qkv(
    program: Program,
    library: Library,
    *,
    a: DeviceArray,
    w: DeviceArray,
    product: DeviceArray,
    q: DeviceArray,
    rows: DeviceArray,
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
    alike: int,
    overflow: DeviceArray,
    site: int,
    eps: float,
    kv_dtype: str = "f16",
    bias: DeviceArray | None = None,
    q_norm: DeviceArray | None = None,
    k_norm: DeviceArray | None = None,
    invariant: bool = False,
    kernel: Kernel | None = None,
    workspace: GemmWorkspace | None = None,
    parts: int | None = None,
) -> None:
    """Records q of the live rows of `a`, and the store of their k and v in the cache.

    One launch, of the role "qkv", where columns are paired and `rotating` has a row for it;
    otherwise a product to float32 and a launch that rotates it, of the role "rope". Both give the
    same bits, if the products do.

    Args:
        a: float16 [at least max_rows, k]. w: float16 [(heads + 2 kv_heads) * head_dim, k], rows as
            `paired_rows` has them if `alike` is not 0; see `gemm`.
        product: float32 [at least max_rows, rows of w], what two launches hand to one another.
        rows: device int32, the count of live rows, which `live` holds as well.
        invariant: see `gemm`; one launch and two then give the same bits.
        kernel: the row of the table for one launch, instead of what `rotating` says.
        workspace, parts: see `gemm`.
        q and all others: see `rope`.

    Raises:
        ValueError: arrays that do not belong together. CubinError, CudaError: see `gemm`, `rope`.
    """
    (n, k), stream_k = w.shape, workspace is not None and not invariant
    if alike and kernel is None:
        kernel = rotating(library, max_rows, n, k, invariant, stream_k)
    if kernel is None:
        with program.role("qkv"):
            gemm(
                program, library, a=a, w=w, c=product, rows=rows, max_rows=max_rows,
                epilogue="f32", invariant=invariant, workspace=workspace, parts=parts,
            )  # fmt: skip
        rope(
            program, library, qkv=product, q=q, live=live, sequences=sequences,
            sequence_of=sequence_of, positions=positions, cosines=cosines, sines=sines,
            max_rows=max_rows, layer=layer, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            interleaved=interleaved, alike=alike, overflow=overflow, site=site, eps=eps,
            kv_dtype=kv_dtype, bias=bias, q_norm=q_norm, k_norm=k_norm,
        )  # fmt: skip
        return
    _check(a, w, q, max_rows, heads, kv_heads, head_dim)
    check_paired(heads, kv_heads, head_dim, alike)
    check_rotary(cosines, sines, head_dim)
    if kv_dtype != "f16" or q_norm or k_norm or (bias and interleaved):
        raise ValueError(
            f"qkv: paired columns, but a {kv_dtype} cache, norms or a bias of interleaved pairs"
        )
    if parts is None:
        parts = divided(library, kernel, max_rows, n, k) if stream_k else 1
    with program.role("qkv"):
        program.add(
            kernel,
            grid=blocks(kernel, max_rows, n, library.device, parts),
            **operands(kernel, a, w),
            **sharing(kernel, library.device, workspace, parts),
            rows=rows,
            sequences=sequences,
            sequence_of=sequence_of,
            positions=positions,
            bias=bias or 0,
            cosines=cosines,
            sines=sines,
            q=q,
            overflow=overflow,
            n=n,
            k=k,
            layer=layer,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            interleaved=int(interleaved),
            alike=alike,
            site=site,
        )


def _check(
    a: DeviceArray,
    w: DeviceArray,
    q: DeviceArray,
    max_rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    for name, array in (("a", a), ("w", w), ("q", q)):
        if len(array.shape) != 2 or array.dtype != np.float16:
            raise ValueError(f"qkv: {name} is {array.dtype} {array.shape}, not float16 in two axes")
    (n, k), width = w.shape, heads * head_dim
    if n != width + 2 * kv_heads * head_dim or a.shape[1] != k or k % 8 or q.shape[1] != width:
        raise ValueError(
            f"qkv: a {a.shape}, w {w.shape} and q {q.shape} for {heads}+2*{kv_heads} heads of "
            f"{head_dim}"
        )
    if q.ptr % ALIGNMENT:
        raise ValueError(f"qkv: q at {q.ptr:#x} is not {ALIGNMENT}-byte aligned")
    if not 1 <= max_rows <= min(a.shape[0], q.shape[0]):
        raise ValueError(f"qkv: {max_rows} rows of a {a.shape}, q {q.shape}")
