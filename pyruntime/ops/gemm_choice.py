"""Which row of the GEMM table for a product: cost models in cycles of a multiprocessor.

Nothing is timed, so the choice is the same in every process. The constants are fitted to what all
rows took on an H200 for 240 products of nine models, bench/results/gemm-fit.json;
`bench/gemm_choice.py --fit` searches on from them. IDLE_WARPS, SHARED_START and what is of stream-K
were set by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pyruntime.cubin.spec import KernelSpec
from pyruntime.driver.library import Kernel
from pyruntime.errors import CubinError

# Cycles are of 1.98 GHz, at which short launches run. A launch costs, besides its main loops:
LAUNCH = {"mma": 4440.0, "wgmma": 4890.0, "stream": 3700.0}
# Bytes a cycle that come from device memory, for each multiprocessor of the device.
MEMORY_BYTES = {"mma": 19.0, "wgmma": 15.9, "stream": 18.3}

# mma.sync.
MACS = 1320.0  # fp16 multiply-adds of a multiprocessor in a cycle with enough warps at work
IDLE_WARPS = 2.0  # w warps keep the tensor cores busy w / (w + this) of the time
PORT_BYTES = 63.4  # what a multiprocessor takes in in a cycle
LATENCY = 1750.0  # cycles until a copy from device memory arrives
AGAIN = 865.0  # of each wave of blocks but the first: first copies, stores

# wgmma.
WGMMA_COLUMN = 5.27  # per column of a tile and slot of k
L2_BYTES = 48.5  # a cycle from L2 into each multiprocessor, if all are at work
SHARED_START = 3200.0  # of a launch in which blocks share W
EXCHANGE, EXCHANGED_COLUMN = 680.0, 37.6  # per further rank of a split; its columns are divided
# Between tiles, per column. f16, not measured, and geglu, of seven cases, count as swiglu; qkv, not
# measured, as f32.
STORED_COLUMN = {
    "f32": 11.4, "f16": 10.1, "add": 14.9, "swiglu": 10.1, "geglu": 10.1, "qkv": 11.4,
}  # fmt: skip
# To and from C, per product's column.
OUTPUT_BYTES = {"f32": 4, "f16": 2, "add": 8, "swiglu": 1, "geglu": 1, "qkv": 2}

# stream-K (cuda/kernels/sm_90a/gemm_division.cuh).
SUMS_START = 1500.0  # of a launch in which units are shared
SUMS_BYTES = 40.0  # a cycle, of a tile's float32 sums that a block leaves, or takes
MOST_PARTS = 4  # clusters that share a unit, on average
SLOTS = 132  # blocks that may leave sums: of a whole H200
L2_HELD = 40 << 20  # bytes of A and W that L2 holds until they are read again
BAND_ROWS = 2048  # kBandRows of cuda/kernels/gemm_base.cuh

# stream.
ALONE_BYTES = 71.2  # a cycle, of W into a multiprocessor whose neighbour is idle
BESIDE_BYTES = 38.3  # the same if both are at work: they share a port
STREAM_INSTRUCTION = 28.7  # one wgmma after the other; each has 16 columns of k
STREAM_A_BYTES = 250.0  # a cycle, of A: from L2, mostly while W is awaited
STREAM_ROW = 18.0  # per row of a tile: what is stored
STREAM_CLUSTER, STREAM_EXCHANGED = 727.0, 0.335  # of a split; per element and further rank

# What goes on at the same time hides each other as the norm of these orders: not perfectly.
WAITS = 2  # of copies, products and memory in stream and mma.sync rows
STEPS = 6  # of products and L2 in a step of wgmma
OVERLAP = 4  # of the work of a wgmma row and memory


class Limits(Protocol):
    """What is asked of a device: see `driver.device.Device`."""

    @property
    def sm_count(self) -> int: ...
    @property
    def smem_per_sm(self) -> int: ...
    @property
    def smem_reserved(self) -> int: ...


def choose(
    kernels: Sequence[Kernel], m: int, n: int, k: int, device: Limits, stream_k: bool = False
) -> Kernel:
    """The row that should be fastest for C [m, n] = A [m, k] · W [n, k]ᵀ.

    All rows of the mma engine compute the same bits. So do those of the wgmma engine that do not
    split k, those of the stream engine that do not, and stream rows with the same `bn` and `split`.

    Args:
        stream_k: whether blocks of a wgmma row may share units, see `parts`. Then its bits are its
            own, and depend on m.

    Raises:
        CubinError: no row fits the device.
    """
    found = costs(kernels, m, n, k, device, stream_k)
    if not found:
        raise CubinError(f"no gemm row fits {device.smem_per_sm:,} B of shared memory")
    return min(found, key=lambda row: (found[row], row.name))


def invariant(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Those rows of a device's table that all give a row of C the same bits, whatever m and n are.

    They are of one engine for all epilogues: wgmma without a split of k where the device has it,
    else mma. What follows the product is element by element, so a product to float32 that another
    launch rotates or gates gives what its own epilogue would.
    """
    rows = list(kernels)
    engine = "wgmma" if any(row.spec.tile["engine"] == "wgmma" for row in rows) else "mma"
    tiles = ((row, row.spec.tile) for row in rows)
    return [row for row, tile in tiles if tile["engine"] == engine and tile.get("split", 1) == 1]


def costs(
    kernels: Iterable[Kernel], m: int, n: int, k: int, device: Limits, stream_k: bool = False
) -> dict[Kernel, float]:
    """Cycles of an H200 that each row should take; see `choose`.

    Left out are rows that do not fit the device, and stream rows whose tile has not all m rows of
    A: they would read W again for each tile.
    """
    found = {}
    for row in kernels:
        cost = _COSTS[str(row.spec.tile["engine"])](row, m, n, k, device)
        if cost is not None:
            shared = _stream_k(row, m, n, k, device) if stream_k else {}
            found[row] = float(min(cost, *shared.values()) if shared else cost)
    return found


def parts(kernel: Kernel, m: int, n: int, k: int, device: Limits) -> int:
    """How many clusters of a row's blocks should share a unit, on average, where any is shared.

    1: none should be, or the row cannot.
    """
    found = _stream_k(kernel, m, n, k, device)
    if not found:
        return 1
    found[1] = _wgmma(kernel, m, n, k, device)
    return min(found, key=lambda parts: (found[parts], parts))


def units(spec: KernelSpec, m: int, n: int) -> int:
    """Pieces of an [m, n] product that the row's blocks, or clusters of blocks, take on."""
    rows = int(spec.tile["bm"]) * int(spec.tile.get("share", 1))
    return -(-m // rows) * -(-n // int(spec.tile["bn"]))


def at_once(kernel: Kernel, device: Limits) -> int:
    """Blocks, or clusters of blocks, of a row with TMA that the device holds at a time."""
    return kernel.clusters or device.sm_count


def _together(order: int, *cycles: float) -> float:
    """How long what hides each other takes."""
    return float(sum(x**order for x in cycles) ** (1 / order))


def _waves(count: int, most: int) -> list[tuple[int, int]]:
    """How many waves of how many units, of which the device holds `most`: full ones, the rest."""
    full, rest = divmod(count, most)
    return [wave for wave in ((full, most), (1, rest)) if all(wave)]


def _wgmma(kernel: Kernel, m: int, n: int, k: int, device: Limits) -> float:
    tile = kernel.spec.tile
    bn, bk, share, split = (int(tile[name]) for name in ("bn", "bk", "share", "split"))
    epilogue = str(tile["epilogue"])
    steps = -(-k // (bk * split))
    work, waves = 0.0, 0
    for count, clusters in _waves(units(kernel.spec, m, n), at_once(kernel, device)):
        step = _wgmma_step(kernel, clusters, device)
        work += count * (steps * step + STORED_COLUMN[epilogue] * bn)
        waves += count
    once = LAUNCH["wgmma"] + (split - 1) * (EXCHANGE + EXCHANGED_COLUMN * bn / split)
    once += SHARED_START if share > 1 else 0
    # A grid with split is not persistent: each wave starts anew.
    work += (waves - 1) * once if split > 1 else 0
    return once + _together(OVERLAP, work, _wgmma_memory(epilogue, m, n, k, device))


def _wgmma_step(kernel: Kernel, clusters: int, device: Limits) -> float:
    """A slot of k, if so many clusters are at work: they share what L2 delivers."""
    tile = kernel.spec.tile
    bm, bn, bk, share = (int(tile[name]) for name in ("bm", "bn", "bk", "share"))
    busy = clusters * kernel.spec.cluster / device.sm_count
    copied = busy * (bm + bn / share) * 2 * bk / L2_BYTES
    return _together(STEPS, WGMMA_COLUMN * bn, copied)


def _wgmma_memory(epilogue: str, m: int, n: int, k: int, device: Limits) -> float:
    moved = 2 * k * (n + m) + OUTPUT_BYTES[epilogue] * m * n
    return moved / (MEMORY_BYTES["wgmma"] * device.sm_count)


def _stream_k(kernel: Kernel, m: int, n: int, k: int, device: Limits) -> dict[int, float]:
    """What the row should take if clusters share units, by `parts`; nothing where they should not.

    Blocks at work on whole tiles are at the same columns of k at a time. Tiles one above the other
    read W in step, and those side by side A, so each comes from memory once, however long k is. It
    is so, too, if each unit is shared by as many clusters, of which none has steps of two units.
    Otherwise blocks are at all columns of k at a time. Then what they have in common must stay in
    L2 from the first that reads it to the last: the rows of A of a band, and W, where tiles lie one
    above the other.

    A product of a wave or more is not shared: to share the units that its last wave has too few of
    made nothing faster on an H200, and passes of 1,100 and 3,325 rows slower.
    """
    tile = kernel.spec.tile
    if tile["engine"] != "wgmma" or tile["split"] != 1:
        return {}
    bm, bn, bk, share = (int(tile[name]) for name in ("bm", "bn", "bk", "share"))
    epilogue, steps = str(tile["epilogue"]), -(-k // bk)
    count, most = units(kernel.spec, m, n), at_once(kernel, device)
    if most * share > SLOTS or count >= most:
        return {}
    columns = n if m > bm * share else 0
    held = 2 * k * (min(m, BAND_ROWS) + columns) <= L2_HELD
    once = LAUNCH["wgmma"] + SUMS_START + (SHARED_START if share > 1 else 0)
    memory = _wgmma_memory(epilogue, m, n, k, device)
    found = {}
    for part in range(2, MOST_PARTS + 1):
        sharing = min(count * part, most)
        if part > steps or (sharing < count * part and not held):
            continue
        step = _wgmma_step(kernel, sharing, device)
        work = -(-count * steps // sharing) * step + STORED_COLUMN[epilogue] * bn
        # The owner of a tile takes the sums of the others, which leave theirs at a time.
        taken = 1 + -(-sharing // count) - (sharing % count == 0)
        sums = taken * bm * bn * 4 / SUMS_BYTES
        found[part] = once + sums + _together(OVERLAP, work, memory)
        if sharing == most:
            break
    return found


def _stream(kernel: Kernel, m: int, n: int, k: int, device: Limits) -> float | None:
    tile = kernel.spec.tile
    bm, bn, bk, boxes, split = (int(tile[name]) for name in ("bm", "bn", "bk", "boxes", "split"))
    if m > bm:
        return None
    depth = bk * boxes
    steps = -(-k // (depth * split))
    most = at_once(kernel, device)
    work, waves = 0.0, 0
    for count, clusters in _waves(units(kernel.spec, m, n), most):
        w_bytes = bn * depth * 2
        copied = w_bytes / (BESIDE_BYTES if clusters > most / 2 else ALONE_BYTES)
        memory = clusters * split * w_bytes / (MEMORY_BYTES["stream"] * device.sm_count)
        step = _together(WAITS, copied, memory, STREAM_INSTRUCTION * depth / 16)
        step += bm * depth * 2 / STREAM_A_BYTES
        work += count * (steps * step + STREAM_ROW * bm)
        waves += count
    if split == 1:
        return LAUNCH["stream"] + work
    # A grid with split is not persistent: each wave starts anew.
    exchanged = STREAM_CLUSTER + (split - 1) * STREAM_EXCHANGED * bm * bn / split
    return work + waves * (LAUNCH["stream"] + exchanged)


def _mma(kernel: Kernel, m: int, n: int, k: int, device: Limits) -> float | None:
    spec = kernel.spec
    resident = min(spec.min_blocks, device.smem_per_sm // (spec.smem_bytes + device.smem_reserved))
    if not resident:
        return None
    bm, bn, bk, stages = (int(spec.tile[name]) for name in ("bm", "bn", "bk", "stages"))
    most = resident * device.sm_count
    work, waves = 0.0, 0  # cycles per column of k
    for count, blocks in _waves(units(spec, m, n), most):
        # If more than half of what fits, they meet the launch before, and lie unevenly.
        together = resident if blocks > most / 2 else -(-blocks // device.sm_count)
        warps = together * spec.threads // 32
        # Rows past m are not copied. Tiles one above the other read W from memory once.
        copying = together * 2 * (min(bm, m) + bn) / PORT_BYTES
        memory = blocks * 2 * bn / -(-m // bm) / (MEMORY_BYTES["mma"] * device.sm_count)
        computing = together * bm * bn / MACS * (warps + IDLE_WARPS) / warps
        waiting = LATENCY / ((stages - 1) * bk)
        work += count * _together(WAITS, copying, memory, computing, waiting)
        waves += count
    return LAUNCH["mma"] + work * k + (waves - 1) * AGAIN


_COSTS: dict[str, Callable[[Kernel, int, int, int, Limits], float | None]] = {
    "mma": _mma,
    "wgmma": _wgmma,
    "stream": _stream,
}
