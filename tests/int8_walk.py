"""The addresses that the kernels of int8 products form, thread by thread, as NumPy arrays.

What cuda/kernels/{gemm_int8,gemv_int8,quantize,repack}.cuh compute, written down once more without
knowing what it should come to. Each function gives the end of what is read or written of an array:
bytes from its start, 0 if nothing is. Copies of size 0 read nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from blocks import FIELDS, block_of
from numpy.typing import NDArray

Index = NDArray[np.int64]
STEP, GROUPS, BAND_ROWS, PLANE_ROWS = 128, 4, 2048, 16


@dataclass(frozen=True)
class Form:
    """quant::Operands of a type."""

    raw: int
    high: int
    high_whole: bool
    super_block: bool
    sums: bool


@dataclass(frozen=True)
class Gemm:
    """A row of the table of gemm_int8.cuh."""

    name: str  # of the type
    form: Form
    bm: int
    bn: int
    split: int
    threads: int

    @property
    def tail(self) -> bool:
        return not self.form.super_block or self.split > 2

    @property
    def slot_blocks(self) -> int:
        return (self.split + 1) // 2 if self.form.super_block else 4 * self.split

    @property
    def high_parts(self) -> int:
        return self.slot_blocks if self.form.high_whole else self.split

    @property
    def turns(self) -> int:
        return 2 if self.form.super_block and self.split == 1 else 1


def end_of(address: Index, live: Any, size: int) -> int:
    """The end of the last of the accesses of `size` bytes that are live."""
    reached = np.where(live, address, -size)
    return int(reached.max()) + size


def row_of(f: Index) -> Index:
    return f // 32 * 32 + f % 8 * 4 + f % 32 // 8


def axes(threads: int, count: int, turns: Index) -> tuple[Index, Index, Index]:
    """Threads, their chunks and turns, to be combined."""
    return np.arange(threads), np.arange(count)[:, None], turns[:, None, None]


def start(name: str, field: int, n: int, blocks: int) -> int:
    """First byte of a plane of a tensor."""
    return n * blocks * sum(size for _, size, _ in FIELDS[name][:field])


def row_copy(
    threads: int, rows: int, row_bytes: int, parts: int, *, permuted: bool, tail: bool,
    present: int, pitch: int, ahead: Index, index: Index, step: int, left: Index,
) -> int:  # fmt: skip
    """RowCopy; `ahead`, `index` and `left` by turn."""
    in_row, all_ = row_bytes // 16, parts * rows * (row_bytes // 16)
    t, i, _ = axes(threads, -(-all_ // threads), index)
    first, part, chunk = t // in_row % rows, t // (in_row * rows), t % in_row
    row_i, part_i = i * threads // in_row % rows, i * threads // (in_row * rows)
    has = ((i + 1) * threads <= all_) | (i * threads + t < all_)
    row = row_of(first) + row_of(row_i) if permuted else first + row_i
    assert (row[has & (t >= 0)] < rows).all()
    at = (part + part_i) * row_bytes + chunk * 16
    address = np.minimum(row, present - 1) * pitch + at + (index * step + ahead)[:, None, None]
    live = has & (not tail or at < left[:, None, None])
    return end_of(address, live, 16)


def word_copy(
    threads: int, rows: int, parts: int, *, present: int, pitch: int, index: Index, step: int,
    left: Index,
) -> int:  # fmt: skip
    """WordCopy."""
    t, i, _ = axes(threads, parts * rows * 4 // threads, index)
    word = i * threads + t
    at = word // (4 * rows) * 16 + word % 4 * 4
    address = np.minimum(row_of(word // 4 % rows), present - 1) * pitch + at
    return end_of(address + (index * step)[:, None, None], at < left[:, None, None], 4)


def side_copy(
    threads: int, size: int, parts: int, unit: int, *, tail: bool, present: int, pitch: int,
    index: Index, step: int, left: Index,
) -> int:  # fmt: skip
    """SideCopy."""
    in_part = size // unit
    all_ = parts * in_part
    t, i, _ = axes(threads, -(-all_ // threads), index)
    part, place = (i * threads + t) // in_part, (i * threads + t) % in_part
    address = part * pitch + np.minimum(place, (present - 1) // unit) * unit
    live = ((i * threads + t) < all_) & (not tail or part < left[:, None, None])
    return end_of(address + (index * step)[:, None, None], live, unit)


def tiles(gemm: Gemm, m: int, n: int, blocks: int) -> Iterator[tuple[int, int]]:
    """(token0, row0) of the blocks of a grid that find work."""
    down, across = -(-m // gemm.bm), -(-n // gemm.bn)
    band_tiles = BAND_ROWS // gemm.bm
    for tile in range(min(blocks, down * across)):
        band = tile // (band_tiles * across) * band_tiles
        in_band, height = tile - band * across, min(band_tiles, down - band)
        yield (band + in_band % height) * gemm.bm, in_band // height * gemm.bn


def gemm_weights(gemm: Gemm, n: int, k: int, row0s: frozenset[int]) -> int:
    """End of what is read of w by tiles that begin at these rows."""
    return max(_gemm_weights(gemm, n, k, row0) for row0 in row0s)


@lru_cache(None)
def _gemm_weights(gemm: Gemm, n: int, k: int, row0: int) -> int:
    form, split, turns = gemm.form, gemm.split, gemm.turns
    fields, row_blocks = FIELDS[gemm.name], k // block_of(gemm.name)[0]
    turn = np.arange(-(-k // (split * STEP)))
    half, index, present = turn % 2 if turns == 2 else 0 * turn, turn // turns, n - row0
    pitch = row_blocks * fields[0][1]
    ends = [
        start(gemm.name, 0, n, row_blocks) + row0 * pitch + row_copy(
            gemm.threads, gemm.bn, form.raw, split, permuted=True, tail=gemm.tail, present=present,
            pitch=pitch, ahead=half * form.raw, index=index, step=turns * split * form.raw,
            left=pitch - turn * split * form.raw,
        )
    ]  # fmt: skip
    if form.high:
        pitch = row_blocks * fields[1][1]
        step = form.high * (gemm.high_parts if form.high_whole else split)
        common = {"present": present, "pitch": pitch, "index": index, "left": pitch - turn * step}
        stride = step if form.high_whole else turns * step
        if form.high == 16:
            end = word_copy(gemm.threads, gemm.bn, gemm.high_parts, step=stride, **common)
        else:
            end = row_copy(
                gemm.threads, gemm.bn, form.high, gemm.high_parts, permuted=True, tail=gemm.tail,
                ahead=half * (0 if form.high_whole else form.high), step=stride, **common,
            )  # fmt: skip
        ends.append(start(gemm.name, 1, n, row_blocks) + row0 * pitch + end)
    for field in range(1 + (form.high > 0), len(fields)):
        size = fields[field][1]
        end = side_copy(
            gemm.threads, gemm.bn * size, gemm.slot_blocks, 16, tail=gemm.tail,
            present=present * size, pitch=n * size, index=index, step=gemm.slot_blocks * size * n,
            left=row_blocks - index * gemm.slot_blocks,
        )  # fmt: skip
        ends.append(start(gemm.name, field, n, row_blocks) + row0 * size + end)
    return max(ends)


def gemm_plane(gemm: Gemm, m: int, k: int, stride: int, token0s: frozenset[int]) -> dict[str, int]:
    """Ends of what is read of a plane by tiles that begin at these tokens."""
    found = {"q": 0, "scales": 0, "sums": 0}
    for token0 in token0s:
        # A tile has no more tokens than bm: nothing of it tells how many come after.
        ends = _gemm_plane(gemm, min(m - token0, gemm.bm), k, stride)
        begins = {"q": token0 * k, "scales": token0 * 8, "sums": token0 * 4}
        for name, end in ends.items():
            found[name] = max(found[name], end and begins[name] + end)
    return found


@lru_cache(None)
def _gemm_plane(gemm: Gemm, tokens: int, k: int, stride: int) -> dict[str, int]:
    split, turns = gemm.split, gemm.turns
    turn = np.arange(-(-k // (split * STEP)))
    half = turn % 2 if turns == 2 else 0 * turn
    by_group = {
        "tail": gemm.tail, "index": turn, "left": k // 32 - turn * split * GROUPS,
    }  # fmt: skip
    return {
        "q": row_copy(
            gemm.threads, gemm.bm, 128, split, permuted=False, tail=gemm.tail, present=tokens,
            pitch=k, ahead=half * 128, index=turn // turns, step=turns * split * 128,
            left=k - turn * split * 128,
        ),
        "scales": side_copy(
            gemm.threads, gemm.bm * 8, split * GROUPS, 16, present=tokens * 8, pitch=stride * 8,
            step=split * GROUPS * 8 * stride, **by_group,
        ),
        "sums": gemm.form.sums and side_copy(
            gemm.threads, gemm.bm * 4, split * GROUPS, 4, present=tokens * 4, pitch=stride * 4,
            step=split * GROUPS * 4 * stride, **by_group,
        ),
    }  # fmt: skip


def gemm_result(
    gemm: Gemm, m: int, n: int, width: int, column: int, places: list[tuple[int, int]]
) -> int:
    """End of what is written of c, in elements."""
    warps_m, warps = gemm.bn // 32, gemm.threads // 32
    warps_n = warps // (warps_m * gemm.split)
    warp_tokens = gemm.bm // warps_n
    thread = np.arange(gemm.threads)
    warp, lane = thread // 32, thread % 32
    row = warp % warps_m * 32 + lane // 4 * 4
    token = warp // warps_m % warps_n * warp_tokens + lane % 4 * 2
    ends = [0]
    for (token0, row0), fragment, y in product(places, range(warp_tokens // 8), range(2)):
        mine = token + fragment * 8 + y
        at = token0 * width + column + row0 + row + mine * width
        ends.append(end_of(at, (row < n - row0) & (mine < m - token0), 4))
    return max(ends)


def _begin(u: Index) -> Index:
    return 0 * u


def _sixteenth(u: Index) -> Index:
    return 16 * u


def _odd(u: Index) -> Index:
    return u % 2 * 16


# What gemv_units.cuh loads by unit: plane, bytes of a load, where in the block's field it begins,
# and whether one load has the fields of all rows of a lane.
Load = tuple[int, int, Callable[[Index], Index], bool]
_NIBBLES: Load = (0, 16, _begin, False)
_UNITS: Load = (0, 16, _sixteenth, False)
LOADS: dict[str, tuple[Load, ...]] = {
    "Q4_0": (_NIBBLES, (1, 2, _begin, True)),
    "Q4_1": (_NIBBLES, (1, 4, _begin, True)),
    "Q5_0": (_NIBBLES, (1, 4, _begin, False), (2, 2, _begin, True)),
    "Q5_1": (_NIBBLES, (1, 4, _begin, False), (2, 4, _begin, True)),
    "Q8_0": (_NIBBLES, (0, 16, lambda u: 0 * u + 16, False), (1, 2, _begin, True)),
    "Q2_K": (_UNITS, (1, 8, lambda u: u // 2 * 8, False), (2, 4, _begin, True)),
    "Q3_K": (_UNITS, (1, 16, _odd, False), (2, 4, _begin, False),
             (2, 4, lambda u: 0 * u + 4, False), (2, 4, lambda u: 0 * u + 8, False),
             (3, 2, _begin, True)),
    "Q4_K": (_UNITS, (1, 16, _begin, False)),
    "Q5_K": (_UNITS, (1, 16, _odd, False), (2, 16, _begin, False)),
    "Q6_K": (_UNITS, (1, 16, lambda u: u // 4 * 32 + u % 2 * 16, False),
             (2, 8, lambda u: u // 4 * 8, False), (3, 2, _begin, True)),
    "IQ4_NL": (_NIBBLES, (1, 2, _begin, True)),
    "IQ4_XS": (_UNITS, (1, 8, _begin, False)),
}  # fmt: skip


@dataclass(frozen=True)
class Folds:
    """Of a unit: how many, of how many weights, where in the block; whether sums are read."""

    count: int = 1
    weights: int = 32
    column: Callable[[Index, int], Index] = lambda u, fold: 0 * u
    sums: bool = False


_K = Folds(2, 16, lambda u, fold: u // 2 * 64 + fold * 32 + u % 2 * 16, True)
_PAIRS = Folds(4, 16, lambda u, fold: u // 2 * 128 + fold * 32 + u % 2 * 16)
FOLDS = {
    "Q4_0": Folds(), "Q4_1": Folds(sums=True), "Q5_0": Folds(), "Q5_1": Folds(sums=True),
    "Q8_0": Folds(), "IQ4_NL": Folds(), "Q2_K": _PAIRS, "Q3_K": _PAIRS, "Q4_K": _K, "Q5_K": _K,
    "Q6_K": Folds(2, 16, lambda u, fold: u // 4 * 128 + fold * 64 + u % 4 * 16),
    "IQ4_XS": Folds(column=lambda u, fold: 32 * u),
}  # fmt: skip


def gemv(
    name: str, tile: Mapping[str, Any], threads: int, launch: Mapping[str, int], grid: int,
    live: int,
) -> dict[str, int]:  # fmt: skip
    """Ends of what a launch reads and, of c in elements, writes.

    Args:
        launch: the launch's parameters.
    """
    n, blocks, split = launch["n"], launch["blocks"], launch["split"]
    lanes, tile_rows, units = (int(tile[x]) for x in ("lanes", "rows", "units"))
    lane_rows, weights = tile_rows // (32 // lanes), int(tile["block"])
    live = min(live, int(tile["tokens"]))
    all_tiles = threads // 32 // split
    block, thread = np.arange(grid)[:, None, None], np.arange(threads)[:, None]
    warp, lane = thread // 32, thread % 32
    first_row = block * all_tiles * tile_rows + warp // split * tile_rows
    row = first_row + lane // lanes * lane_rows
    count = np.where(first_row < n, blocks * units, 0)
    u = (
        warp % split * lanes
        + lane % lanes
        + np.arange(-(-blocks * units // (lanes * split))) * (lanes * split)
    )
    works = u < count
    b, u = u // units, u % units
    ends: dict[str, list[int]] = {x: [0] for x in ("q", "scales", "sums", "w", "c")}
    for plane, size, at, together in LOADS[name]:
        _, field, head = FIELDS[name][plane]
        for r in range(1 if together else lane_rows):
            place = (b * n + row + r if head else (row + r) * blocks + b) * field
            bytes_ = size * lane_rows if together else size
            assert not together or size == field
            reached = start(name, plane, n, blocks) + place + at(u)
            ends["w"].append(end_of(reached, works, bytes_))
    of = FOLDS[name]
    for token in range(live):
        for fold in range(of.count):
            first = b * weights + of.column(u, fold)
            at = token * blocks * weights + first
            ends["q"].append(end_of(at, works, of.weights))
            place = (first // 32 * launch["stride"] + token) * 8
            ends["scales"].append(end_of(place, works, 8))
        if of.sums:
            group = b * weights // 32 + u
            ends["sums"].append(end_of((group * launch["stride"] + token) * 4, works, 4))
    i = np.arange(all_tiles * tile_rows * live)
    to = np.arange(grid)[:, None] * all_tiles * tile_rows + i // tile_rows % all_tiles * tile_rows
    to = to + i % tile_rows
    token = i // (tile_rows * all_tiles)
    ends["c"].append(end_of(token * launch["width"] + launch["column"] + to, to < n, 1))
    return {x: max(all_) for x, all_ in ends.items()}


def quantize(
    tile: Mapping[str, Any], threads: int, launch: Mapping[str, int], grid: tuple[int, int, int],
    live: int,
) -> dict[str, int]:  # fmt: skip
    """Ends of what a launch writes of a plane; of "x" in elements what it reads of its matrices."""
    columns, stride = launch["columns"], launch["stride"]
    rows = int(tile["rows"])
    groups, warp_groups = columns // 32, 8 // rows
    bx, by, t = (
        np.arange(grid[0])[:, None, None], np.arange(grid[1])[:, None], np.arange(threads),
    )  # fmt: skip
    row = bx * rows + t // 4 % rows
    x_end: list[int] = []
    if "held" in tile:
        group = np.broadcast_to(t // 4, (1, threads))
        x_end.append(end_of(row * columns + 8 * t, (row < live) & (8 * t < columns), 8))
    else:
        if "columns" in tile:  # so many in a block
            each = int(tile["columns"]) // 32
            loads = each // (threads // 32 * warp_groups)
            first = by * each + t // 32 * (loads * warp_groups)
            turn = np.arange(loads) * warp_groups
        else:  # whole rows, of which a warp takes every so many-th groups
            first = np.broadcast_to(t // 32 * warp_groups, (1, threads))
            turn = np.arange(0, groups, threads // 32 * warp_groups)
            step = threads // rows  # of the threads that sum a row's squares
            i = t % step + np.arange(0, columns // 4, step)[:, None, None, None]
            own = bx * rows + t // step
            x_end.append(end_of(own * columns + 4 * i, (own < live) & (i < columns // 4), 4))
        group = first + turn[:, None, None, None] + t % 32 // 4 // rows
    part = t % 4
    here = (row < live) & (group < groups)
    x_end.append(end_of(row * columns + group * 32 + part * 8, here, 8))
    place = group * stride + row
    return {
        "x": max(x_end),
        "q": end_of(row * columns + group * 32 + part * 8, here, 8),
        "scales": end_of(place * 8, here & (part == 0), 8),
        "sums": end_of(place * 4, here & (part == 1), 4),
    }


def repack(
    name: str, tile: Mapping[str, Any], threads: int, launch: Mapping[str, int], grid: int
) -> dict[str, int]:
    """Ends of what a launch reads of its source and writes of the tensor."""
    size, per_block = int(tile["bytes"]), int(tile["blocks"])
    rows, row_blocks, n = (launch[x] for x in ("rows", "row_blocks", "n"))
    source, out = [0], [0]
    for first in range(0, grid * per_block, per_block):
        blocks = min(rows * row_blocks - first, per_block)
        whole = np.arange(0, blocks * size - 15, 16)
        source.append(first * size + end_of(whole, True, 16) if len(whole) else 0)
        last = blocks * size // 16 * 16 + np.arange(threads) * 2
        source.append(first * size + end_of(last, last < blocks * size, 2))
        block = first + np.arange(blocks)
        row, of_row = block // row_blocks, block % row_blocks
        for plane, (_, field, head) in enumerate(FIELDS[name]):
            there = launch["first"] + row
            place = of_row * n + there if head else there * row_blocks + of_row
            out.append(start(name, plane, n, row_blocks) + end_of(place * field, True, field))
    return {"source": max(source), "out": max(out)}
