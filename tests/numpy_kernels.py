"""Every kernel in NumPy, on a fake driver: what the host has prepared gives real logits anywhere.

Numbers are those of the reference's functions on what kernels are given, rounded where kernels
store float16 or e4m3. So a difference from the NumPy backend is in what the host has prepared:
lists of rows, positions, sequences, addresses of caches, weights, the order of launches. How a
kernel works inside (tiles, parts of a schedule, tensor maps) is not looked at, nor what runs at the
same time: each launch ends before the next begins.

As it goes, it is checked that grids and arrays are large enough for the live counts, that memory
has been allocated, that the sequence table agrees with the rows, and that a schedule's parts have
room. Each error is an AssertionError that names the launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from blocks import block_of, dequantized
from fake_driver import FakeDriver
from numpy.typing import DTypeLike, NDArray
from order import kept_launches

from pyruntime.driver.program import Launch
from pyruntime.model.scores import Targets, token_scores
from pyruntime.ops.attention_schedule import UNLIMITED
from pyruntime.ops.int8_products import EPILOGUES
from pyruntime.ops.qkv import paired_rows
from pyruntime.reference import e4m3, int8
from pyruntime.reference.functions import (
    Array,
    causal_attention,
    exact,
    geglu,
    rms_norm,
    rotate,
    softcap,
    swiglu,
)

_ENTRY = [(name, "<i4") for name in ("row0", "rows", "start", "capacity")]
# Sequence of cuda/core/live.cuh and e4m3::Sequence of cuda/core/e4m3.cuh, by their bytes.
TABLES = {
    table.itemsize: table
    for table in (
        np.dtype(_ENTRY + [(name, "<u8") for name in names])
        for names in (("k", "v", "maps"), ("k", "v", "k_scale", "v_scale"))
    )
}
GATED = {"silu": swiglu, "gelu": geglu}
LOG2E = math.log2(math.e)


class NumpyKernels:
    """Carries out what is launched on a driver, from its construction on.

    The driver's new memory is NaN in every float type from then on.
    """

    def __init__(self, driver: FakeDriver, monkeypatch: Any) -> None:
        self._kept = kept_launches(monkeypatch)
        self._memory = driver.live["arrays"]
        self._schedules: dict[int, dict[str, Any]] = {}
        monkeypatch.setattr(driver, "carry_out", self._run)
        monkeypatch.setattr(driver, "keep", self._keep)
        monkeypatch.setattr(driver, "fresh", 0xFF)

    def _keep(self, kernel: str, address: int) -> tuple[Launch, dict[str, Any]]:
        """A launch with its parameters as they are now."""
        launch, given = self._kept[address]
        return launch, dict(given)

    def _run(self, config: Any, kernel: str, launched: int | tuple[Launch, dict[str, Any]]) -> None:
        launch, given = self._kept[launched] if isinstance(launched, int) else launched
        run = FAMILIES[launch.kernel.spec.family]
        run(Work(launch, given, self._memory, self._schedules))


@dataclass(frozen=True)
class Work:
    """One launch.

    Attributes:
        given: its parameters. memory: the driver's arrays, by address. schedules: parameters of the
            launches that made schedules, by the address of the parts.
    """

    launch: Launch
    given: dict[str, Any]
    memory: dict[int, NDArray[np.uint8]]
    schedules: dict[int, dict[str, Any]]

    @property
    def tile(self) -> Any:
        return self.launch.kernel.spec.tile

    def require(self, condition: object, otherwise: str) -> None:
        if not condition:
            raise AssertionError(f"{self.launch.role}, {self.launch}: {otherwise}")

    def at(self, address: int, shape: tuple[int, ...], dtype: DTypeLike, what: str) -> Any:
        """Device memory as a NumPy array, which shares it."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        for start, memory in self.memory.items():
            if start <= address <= start + memory.nbytes - nbytes:
                return memory[address - start :][:nbytes].view(dtype).reshape(shape)
        self.require(False, f"{what}: {nbytes:,} bytes at {address:#x} are not inside of an array")

    def array(self, name: str) -> Any:
        """A parameter: an array, or the one behind a tensor map."""
        array = getattr(self.given[name], "array", self.given[name])
        return self.at(array.ptr, array.shape, array.dtype, name)

    def rows(self, name: str, count: int) -> Any:
        """The first `count` rows of a parameter."""
        array = self.array(name)
        self.require(count <= len(array), f"{count} live rows of {name} {array.shape}")
        return array[:count]

    def count(self, name: str = "rows") -> int:
        """A count of rows, in device memory."""
        address = self.given[name]
        return int(self.at(getattr(address, "ptr", address), (1,), np.int32, name)[0])

    def covers(self, axis: int, needed: int, each: int = 1) -> None:
        """Checks that so many blocks along an axis, for `each` things per block, are enough."""
        blocks = self.launch.grid[axis]
        self.require(blocks * each >= needed, f"{blocks} blocks of {each} in {'xyz'[axis]} "
                                              f"for {needed}")  # fmt: skip

    def store(self, out: Any, values: Array, site: int = 0) -> None:
        """Rounds to float16. If one leaves its range, that lowers the overflow word."""
        with np.errstate(over="ignore"):
            out[...] = values
        if not np.isfinite(out).all():
            word = self.array("overflow")
            word[0] = min(word[0], self.given["site"] + site)

    def table(self, name: str, count: int) -> Any:
        """The first `count` entries of a sequence table, as records of one of TABLES."""
        entries = self.rows(name, count)
        return entries.view(TABLES[entries.shape[1]])[:, 0]

    def cached(self, entry: Any, name: str, layer: int, width: int, dtype: DTypeLike) -> Any:
        """What a sequence's cache has room for up to its last row: [kv heads, positions, width]."""
        heads, capacity, positions = self.given["kv_heads"], int(entry["capacity"]), end(entry)
        self.require(positions <= capacity, f"{positions} positions in a cache of {capacity}")
        row = width * np.dtype(dtype).itemsize
        address = int(entry[name]) + layer * heads * capacity * row
        flat = self.at(address, ((heads - 1) * capacity + positions, width), dtype, f"cache {name}")
        shape, strides = (heads, positions, width), (capacity * row, *flat.strides)
        return np.lib.stride_tricks.as_strided(flat, shape, strides)


def end(entry: Any) -> int:
    """Positions that a sequence has with its rows of this pass."""
    return int(entry["start"] + entry["rows"])


@lru_cache(256)  # weights "per-layer" are dequantized in every pass
def _weights(type_name: str, packed: bytes, columns: int) -> Array:
    """float32 [rows, columns] of whole packed rows."""
    return dequantized(type_name, np.frombuffer(packed, np.uint8)).reshape(-1, columns)


def _dequant(work: Work) -> None:
    given, name = work.given, str(work.tile["type"]).upper()
    rows, columns = given["rows"], given["columns"]
    work.covers(0, rows * columns, int(work.tile["elements"]))
    weights, size = block_of(name)
    packed = work.array("source").ravel()[: rows * columns // weights * size]
    first, step = given["row0"], given["row_step"]
    out = work.array("out")[first : first + rows * step : step]
    work.store(out, _weights(name, packed.tobytes(), columns))


def _repack(work: Work) -> None:
    """Rows stay as in the file: where bytes lie matters to kernels alone."""
    given, out = work.given, work.array("out")
    first, last = given["first"], given["first"] + given["rows"]
    work.covers(0, given["rows"] * given["row_blocks"], int(work.tile["blocks"]))
    out[first:last] = work.array("source").ravel()[: out[first:last].size].reshape(-1, out.shape[1])


def _quantize(work: Work) -> None:
    """To a plane, of which rows past the live ones are left alone."""
    given, op, count = work.given, work.tile["op"], work.count()
    work.covers(0, count, int(work.tile["rows"]))
    work.covers(1, given["columns"], int(work.tile.get("columns", given["columns"])))
    if op == "quantize":
        x = work.rows("x", count).astype(np.float32)
    elif op == "gated":
        gate, up = (work.rows(name, count).astype(np.float32) for name in ("gate", "up"))
        x = GATED[str(work.tile["activation"])](gate, up)
    else:
        x = work.rows("x", count)
        if op == "residual":
            x += rms_norm(work.rows("branch", count), work.array("post"), given["eps"])
        x = rms_norm(x, work.array("weight"), given["eps"])
    if given.get("y"):
        work.store(work.rows("y", count), x)
    if not int8.fits(x):
        word = work.array("overflow")
        word[0] = min(word[0], given["site"])
    made = int8.quantize_rows(x)
    work.rows("q", count)[...] = made.q
    work.array("scales")[:, :count] = int8.device_scales(made)
    work.array("sums")[:, :count] = made.sums.T


def _gemv_int8(work: Work) -> None:
    per_block = work.launch.kernel.spec.threads // 32 // work.given["split"]
    work.covers(0, work.given["n"], per_block * int(work.tile["rows"]))
    work.require(work.count() <= int(work.tile["tokens"]), f"{work.count()} rows")
    _int8_product(work, work.rows("q", work.count()))


def _gemm_int8(work: Work) -> None:
    tall, wide = (int(work.tile[name]) for name in ("bm", "bn"))
    work.covers(0, -(-work.count() // tall) * -(-work.given["n"] // wide))
    _int8_product(work, work.rows("x", work.count()))


def _int8_product(work: Work, q: Any) -> None:
    """The tensor's rows lie as in the file, see `_repack`."""
    given, count, epilogue = work.given, len(q), list(EPILOGUES)[work.given["epilogue"]]
    scales, sums = (work.array(name) for name in ("scales", "sums"))
    plane = int8.Quantized(
        q,
        np.ascontiguousarray(scales[:, :count, 0].T),
        np.ascontiguousarray(sums[:, :count].T),
    )
    work.require(np.isfinite(plane.scales).all(), "a plane that nothing was quantized to")
    name = str(work.tile["type"]).upper()
    w, column = work.array("w"), given["column"]
    product = np.float32(given["scale"]) * _product(plane, w, name)
    c = work.rows("c", count)[:, column : column + len(w)]
    work.require(c.shape == product.shape, f"{product.shape} to columns from {column} of {c.shape}")
    if epilogue == "add":
        c += product
    elif epilogue == "f32":
        c[...] = product
    else:
        work.store(c, product)


def _product(plane: int8.Quantized, w: Any, name: str) -> Array:
    """`reference.int8.product`, but for the order in which groups are added: that takes long."""
    weights = _int8_weights(name, w.tobytes(), len(w))
    return plane.values @ weights.T


@lru_cache(512)
def _int8_weights(name: str, packed: bytes, rows: int) -> Array:
    return int8.parts(np.frombuffer(packed, np.uint8).reshape(rows, -1), name).values


def _rows(work: Work) -> None:
    if work.tile["op"] == "logits":
        _logits(work)
        return
    if work.tile["op"] == "embed":
        count = work.count()
        name, columns = str(work.tile["type"]).upper(), work.given["columns"]
        table = _weights(name, work.array("table").tobytes(), columns)
        embedded = table[work.rows("ids", count)]
        work.rows("x", count)[...] = np.float32(work.given["scale"]) * embedded
    else:
        count = work.count("wanted")
        index = work.rows("index", count)
        for name in ("x", "a"):
            work.rows(f"{name}_out", count)[...] = work.array(name)[index]
    work.covers(0, count)


def _logits(work: Work) -> None:
    """The launch strides over the table: any grid will do."""
    count, columns, vocab = work.count(), work.given["columns"], work.given["vocab"]
    work.require(count <= 1 and columns <= int(work.tile["columns"]), f"{count} rows of {columns}")
    if count:
        name = str(work.tile["type"]).upper()
        table = _weights(name, work.array("table").tobytes(), columns)
        work.require(len(table) == vocab, f"a table of {len(table)} rows, not {vocab}")
        y = rms_norm(work.rows("x", 1), work.array("weight"), work.given["eps"])
        work.rows("c", 1)[...] = y @ table.T


def _norm(work: Work) -> None:
    count, eps = work.count(), work.given["eps"]
    work.covers(0, count)
    x = work.rows("x", count)
    if "branch" in work.given:
        x += rms_norm(work.rows("branch", count), work.array("post"), eps)
    work.store(work.rows("y", count), rms_norm(x, work.array("weight"), eps))


def _gemm(work: Work) -> None:
    count, tile, epilogue = work.count(), work.tile, work.tile["epilogue"]
    tall, wide = int(tile["bm"]) * int(tile.get("share", 1)), int(tile["bn"])
    if tile.get("split") != 1:  # others are persistent
        units = -(-count // tall) * -(-work.given["n"] // wide)
        work.covers(0, units * work.launch.kernel.spec.cluster)
    if work.given.get("parts", 1) > 1:
        blocks, room = work.launch.grid[0], len(work.array("sums"))
        work.require(blocks <= room, f"{blocks} blocks leave sums where there is room for {room}")
        work.require(not work.array("raised").any(), "flags are raised before it starts")
    product = work.rows("a", count).astype(np.float32) @ work.array("w").astype(np.float32).T
    if epilogue == "qkv":
        _rotate(work, product, "f16")
        return
    c, scale = work.rows("c", count), np.float32(work.given["scale"])
    aligned = c.strides[0] % 16 or work.given["c"].ptr % 16 == 0
    work.require(aligned, f"c at {work.given['c'].ptr:#x}, with rows of {c.strides[0]} bytes")
    if epilogue == "add":
        c += scale * product
    elif epilogue == "f32":
        c[...] = scale * product
    else:
        gated = {"swiglu": swiglu, "geglu": geglu}.get(epilogue)
        result = gated(product[:, 0::2], product[:, 1::2]) if gated else product
        work.store(c, scale * result)


def _rope(work: Work) -> None:
    count = int(work.array("live")[0])
    work.covers(0, count)
    heads = work.given["heads"] + 2 * work.given["kv_heads"]
    work.covers(1, heads, int(work.tile["heads"]))
    _rotate(work, work.rows("qkv", count), work.tile["kv"])


def _rotate(work: Work, product: Array, kv_dtype: str) -> None:
    """Bias, q/k norm and rotation of [rows, (heads + 2 kv heads) * head dim]; q, and the caches."""
    given, count = work.given, len(product)
    sizes = {name: given[name] for name in ("heads", "kv_heads", "head_dim")}
    if given["alike"]:
        paired, product = product, np.empty_like(product)
        interleaved = bool(given["interleaved"])
        product[:, paired_rows(**sizes, interleaved=interleaved, alike=given["alike"])] = paired
    if given["bias"]:
        product = product + work.array("bias")
    heads, kv_heads, head_dim = sizes.values()
    by_head = product.reshape(count, -1, head_dim)
    q, k, v = np.split(by_head, [heads, heads + kv_heads], axis=1)
    if given.get("q_norm"):
        q = rms_norm(q, work.array("q_norm"), given["eps"])
    if given.get("k_norm"):
        k = rms_norm(k, work.array("k_norm"), given["eps"])
    positions = work.rows("positions", count)
    cosines, sines = (work.array(name)[positions] for name in ("cosines", "sines"))
    q, k = (
        rotate(x, cosines, sines, "interleaved" if given["interleaved"] else "neox") for x in (q, k)
    )
    work.store(work.rows("q", count), q.reshape(count, -1))
    _cache(work, k, v, kv_dtype)


def _cache(work: Work, k: Array, v: Array, kv_dtype: str) -> None:
    """Stores [rows, kv heads, head dim] where the sequence table says."""
    of, positions = (work.rows(name, len(k)) for name in ("sequence_of", "positions"))
    layer, head_dim, first = work.given["layer"], work.given["head_dim"], 0
    for i, entry in enumerate(work.table("sequences", int(of[-1]) + 1)):
        start, last = int(entry["start"]), first + int(entry["rows"])
        expected = np.arange(start, end(entry))
        agrees = entry["row0"] == first and np.array_equal(positions[first:last], expected)
        agrees = agrees and (of[first:last] == i).all()
        work.require(agrees, f"sequence {i}, {entry}, is not that of rows {first} to {last}")
        for site, name, values in ((1, "k", k), (2, "v", v)):
            rows = values[first:last].transpose(1, 0, 2)
            if kv_dtype == "f16":
                cached = work.cached(entry, name, layer, head_dim, np.float16)
                work.store(cached[:, start:], rows, site)
            else:
                codes = work.cached(entry, name, layer, head_dim, np.uint8)
                scales = work.cached(entry, f"{name}_scale", layer, 1, np.float32)
                codes[:, start:], scales[:, start:, 0] = e4m3.quantize(rows)
        first = last
    work.require(first == len(k), f"the table has {first} rows of {len(k)}")


def _widen(work: Work) -> None:
    count, head_dim = int(work.array("live")[1]), work.given["head_dim"]
    work.covers(1, 2 * work.given["kv_heads"])
    work.covers(2, count)
    tables = (work.table(name, count) for name in ("stored", "sequences"))
    for stored, staged in zip(*tables, strict=True):
        for name in ("k", "v"):
            codes = work.cached(stored, name, work.given["layer"], head_dim, np.uint8)
            scales = work.cached(stored, f"{name}_scale", work.given["layer"], 1, np.float32)
            wide = e4m3.widen(codes, scales[..., 0])
            work.cached(staged, name, 0, head_dim, np.float16)[...] = wide


def _schedule(work: Work) -> None:
    given = work.given
    entries = work.table("sequences", int(work.array("live")[1]))
    tiles = sum(-(-int(rows) // given["rows"]) for rows in entries["rows"])
    parts, room = tiles * given["columns"] + given["workers"], given["parts"].shape[1]
    work.require(parts <= room, f"{parts} parts where there is room for {room}")
    work.schedules[given["parts"].ptr] = given


def _attention(work: Work) -> None:
    given, tile, scale, cap = work.given, work.tile, work.given["scale"], None
    window = given.get("window", UNLIMITED)
    if scheduled := "parts" in given:
        made = work.schedules[given["parts"].ptr]
        work.require(made["window"] == window, f"window {window}, scheduled for {made['window']}")
        given = {**given, "live": made["live"], "sequences": made["sequences"]}
        if tile.get("cap"):
            cap = given["cap"] / LOG2E
        scale *= cap / (2 * LOG2E) if cap else 1 / LOG2E
    elif tile.get("cap"):
        cap = given["softcap"]
    inputs = Work(work.launch, given, work.memory, work.schedules)
    q, out, head_dim = work.array("q"), work.array("o"), int(tile["hd"])
    entries = inputs.table("sequences", int(inputs.array("live")[1]))
    for entry in entries:
        if not scheduled:
            work.covers(1, len(entries))
            work.covers(2, int(entry["rows"]), int(tile["tq"]))
        rows = slice(entry["row0"], entry["row0"] + entry["rows"])
        keys, values = (
            inputs.cached(entry, name, given["layer"], head_dim, np.float16).astype(np.float32)
            for name in ("k", "v")
        )
        queries = q[rows].astype(np.float32).reshape(-1, given["heads"], head_dim)
        seen = None if window == UNLIMITED else window
        found = causal_attention(queries, keys, values, exact, scale=scale, window=seen, cap=cap)
        out[rows] = found.reshape(len(found), -1)


def _softcap(work: Work) -> None:
    count, cap = work.count(), work.given["cap"]
    work.covers(0, count)
    work.covers(1, work.given["columns"], int(work.tile["columns"]))
    x = work.rows("x", count)
    x[...] = softcap(x, cap)


def _scores(work: Work) -> None:
    count, vocab = work.count(), work.given["vocab"]
    work.covers(0, count)
    logits, first = work.rows("logits", count), work.rows("first", count + 1)
    top, names = work.given["top"], ("log_probs", "best", "values")
    outputs = [work.rows(name, int(first[-1])) for name in names]
    tokens = work.rows("tokens", int(first[-1]))[first[0] :]
    each = np.diff(first)
    work.require(logits.shape[1] == vocab, f"{vocab} columns of logits {logits.shape}")
    work.require(first[0] >= 0 and (each >= 0).all(), f"targets from {first}")
    work.require((tokens < vocab).all(), f"tokens {tokens} of {vocab}")
    work.require([out.shape[1:] for out in outputs] == [(), (top,), (top,)], f"the best {top}")
    rows = np.repeat(np.arange(count, dtype=np.int32), each)
    found = token_scores(logits.copy(), Targets(rows, tokens), top)
    for out, values in zip(outputs, found[1:], strict=True):
        out[first[0] :] = values


def _pool(work: Work) -> None:
    count = work.count("count")
    work.covers(0, count)
    work.covers(1, work.given["columns"], int(work.tile["columns"]))
    x, sums = work.array("x"), work.rows("sums", count)
    for out, (first, rows) in zip(sums, work.rows("spans", count).tolist(), strict=True):
        work.require(0 <= first <= first + rows <= len(x), f"{rows} rows from {first} of {x.shape}")
        out[...] = x[first : first + rows].sum(0, dtype=np.float32)


FAMILIES: dict[str, Callable[[Work], None]] = {
    "dequant": _dequant, "rows": _rows, "norm": _norm, "gemm": _gemm, "rope": _rope,
    "widen": _widen, "schedule": _schedule, "attention": _attention, "softcap": _softcap,
    "scores": _scores, "pool": _pool, "repack": _repack, "quantize": _quantize,
    "int8": _gemm_int8, "gemv": _gemv_int8,
}  # fmt: skip
