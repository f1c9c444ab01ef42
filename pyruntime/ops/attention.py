"""Causal attention of activation rows over a K/V cache."""

from __future__ import annotations

from pyruntime.cubin.spec import KernelSpec
from pyruntime.driver.library import Kernel, Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.errors import UnsupportedModelError

# A wide row tile reads K and V less often, a narrow one gives more blocks: wide only where the
# blocks still go this many times round the device, so that short causal tiles can fill the gaps.
_BLOCKS_PER_SM = 3
_FASTEST = "fast"  # the variant that "auto" stands for
_NO_WINDOW = 2**31 - 1  # what a kernel takes for all keys


def variants(library: Library) -> dict[str, list[int]]:
    """The attention variants that run on this device, and their head dims in ascending order."""
    found: dict[str, list[int]] = {}
    for tile in sorted((k.spec.tile for k in library.family("attention")), key=lambda t: t["hd"]):
        dims = found.setdefault(str(tile["variant"]), [])
        if tile["hd"] not in dims:
            dims.append(int(tile["hd"]))
    return dict(sorted(found.items()))


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
    window: int | None = None,
    softcap: float | None = None,
    variant: str = "auto",
    kernel: Kernel | None = None,
) -> None:
    """Records out = softmax(scale q K^T) V per head, a row at position p seeing keys 0..p.

    With `window` it sees the last `window` of these, its own included. With `softcap` a score s
    (scaled) becomes softcap tanh(s / softcap) (Gemma 2, arXiv:2408.00118, section 2).

    K and V are those of `layer` in the cache that each sequence names; the rows' own keys and
    values are there already. Query heads share a K/V head in groups of heads / kv_heads. The result
    of a row is the same bit for bit whichever row of a variant runs and wherever a prompt was cut.

    Args:
        q: float16 [rows, heads * head_dim].
        out: float16, shape of q, written where a sequence has rows.
        live, sequences: `Live` and `Sequence` of cuda/core/live.cuh.
        max_rows: the most rows that any one sequence will have when this runs.
        max_sequences: the most sequences that `live` will hold.
        scale: positive; 1 / sqrt(head_dim) in most models.
        window: positive; None for all keys.
        softcap: positive; None for none.
        variant: see `choose`.
        kernel: a row of the table, instead of the one that `choose` picks.

    Raises:
        UnsupportedModelError: no kernel for this head dim, window or cap.
        ValueError: shapes, dtypes or numbers that do not belong together; an unknown variant.
    """
    if q.dtype != "float16" or out.dtype != "float16" or q.shape != out.shape:
        raise ValueError(f"attention: q {q.dtype} {q.shape}, out {out.dtype} {out.shape}")
    if kv_heads < 1 or heads % kv_heads or len(q.shape) != 2 or q.shape[1] % heads:
        raise ValueError(f"attention: q {q.shape} for {heads} heads on {kv_heads} K/V heads")
    if not scale > 0:
        raise ValueError(f"attention: scale {scale} is not positive")
    if window is not None and window < 1:
        raise ValueError(f"attention: a window of {window} keys")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"attention: softcap {softcap} is not positive")
    needs = {"windowed": window is not None, "capped": softcap is not None}
    if kernel is None:
        columns = heads * max_sequences
        kernel = choose(library, q.shape[1] // heads, max_rows, columns, variant, **needs)
    elif not _serves(kernel.spec, **needs):
        raise ValueError(f"attention: {kernel.name} with window {window}, softcap {softcap}")
    masking = {"window": min(window or _NO_WINDOW, _NO_WINDOW), "softcap": softcap or 0.0}
    taken = {p.name for p in kernel.spec.params}
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
        **{name: value for name, value in masking.items() if name in taken},
    )


def _tiles(kernel: Kernel, rows: int) -> int:
    return -(-rows // int(kernel.spec.tile["tq"]))


def _serves(spec: KernelSpec, *, windowed: bool, capped: bool) -> bool:
    """Rows with `cap` in their tile cap the scores and no others do; a window is a parameter."""
    takes_window = any(p.name == "window" for p in spec.params)
    return bool(spec.tile.get("cap", 0)) == capped and (takes_window or not windowed)


def choose(
    library: Library,
    head_dim: int,
    max_rows: int,
    columns: int,
    variant: str = "auto",
    *,
    windowed: bool = False,
    capped: bool = False,
) -> Kernel:
    """The variant's widest row tile that keeps the device busy, else its narrowest.

    Args:
        columns: heads times sequences.
        variant: "auto" (the fastest) or a key of `variants`; "-" is as good as "_" in it.
        windowed, capped: whether there will be a window, a softcap.

    Raises:
        ValueError: no such variant. UnsupportedModelError: it has no kernel for this head dim,
            window or cap. The text lists all that there are, and those that this device has no room
            for.
    """
    name = _FASTEST if variant == "auto" else variant.replace("-", "_")
    tiles = [(k, k.spec.tile) for k in library.family("attention")]
    fitting = [
        k
        for k, tile in tiles
        if (tile["variant"], tile["hd"]) == (name, head_dim)
        and _serves(k.spec, windowed=windowed, capped=capped)
    ]
    if not fitting:
        wanted_too = " with a sliding window" * windowed + " with capped scores" * capped
        raise _missing(library, head_dim, variant, name, wanted_too)
    fitting.sort(key=lambda k: int(k.spec.tile["tq"]))
    wanted = _BLOCKS_PER_SM * library.device.sm_count
    busy = [k for k in fitting[1:] if _tiles(k, max_rows) * columns >= wanted]
    return (fitting[:1] + busy)[-1]


def _missing(library: Library, head_dim: int, variant: str, name: str, needs: str) -> Exception:
    known = variants(library)
    there = ["auto", *(f"{n} (head dims {', '.join(map(str, d))})" for n, d in known.items())]
    refused = [text for kernel, text in library.refused.items() if kernel.startswith("attention_")]
    listed = "; ".join([f"there are {', '.join(there)}", *refused])
    if name in known:
        return UnsupportedModelError(
            f"attention {variant!r} is not supported at head dim {head_dim}{needs}; {listed}"
        )
    return ValueError(f"attention {variant!r} is not known; {listed}")
