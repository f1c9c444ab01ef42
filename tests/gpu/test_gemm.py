"""Matrix products against float64, for every row of the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyruntime.driver.graph import Graph
from pyruntime.driver.library import Kernel
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.model.live import NO_OVERFLOW
from pyruntime.ops.gemm import GATED, OUTPUTS, gemm
from pyruntime.ops.gemm_choice import at_once
from pyruntime.ops.gemm_workspace import GemmWorkspace

# Norm of a row's error over the row's norm. Rounding results to fp16 gives 2.1e-4, f32 accumulation
# far less; one wrong value in a row of 49152 would give 6e-3.
TOLERANCE = 1e-3
DEAD = 5  # rows past the live ones, NaN in A, poisoned in C
ADD_SCALE, GATED_SCALE = 2.0**5, 2.0**-5
SCALES = {"f32": 1.0, "f16": 1.0, "add": ADD_SCALE, **dict.fromkeys(GATED, GATED_SCALE)}


def rows_of(gpu: Any, epilogue: str) -> list[Kernel]:
    return [x for x in gpu.library.family("gemm") if x.spec.tile["epilogue"] == epilogue]


def bits_class(kernel: Kernel) -> str:
    """Rows of one class compute the same bits; a wgmma row that splits k is alone."""
    tile = kernel.spec.tile
    if tile.get("split", 1) == 1:
        return str(tile["engine"])
    return f"stream {tile['bn']} {tile['split']}" if tile["engine"] == "stream" else kernel.name


def normal(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.float16]:
    return rng.standard_normal((rows, columns), np.float32).astype(np.float16)


def weights(rng: np.random.Generator, n: int, k: int) -> NDArray[np.float16]:
    """Rows of norm 1 or so: products of order 1, where silu bends."""
    return (rng.standard_normal((n, k), np.float32) * k**-0.5).astype(np.float16)


def reference(
    epilogue: str, a: NDArray[np.float16], w: NDArray[np.float16], before: NDArray[np.float32]
) -> NDArray[np.float64]:
    acc = a.astype(np.float64) @ w.astype(np.float64).T
    if epilogue in ("f32", "f16"):
        return acc
    if epilogue == "add":
        return before[: len(acc)] + ADD_SCALE * acc
    gate, up = acc[:, 0::2], acc[:, 1::2]
    power = gate if epilogue == "swiglu" else 2 * (2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return GATED_SCALE * gate / (1 + np.exp(-power)) * up


def check(
    gpu: Any, rng: np.random.Generator, epilogue: str, n: int, k: int, lengths: tuple[int, ...]
) -> None:
    """Every row of the table and the chosen one: near the truth, a class's bits, rest untouched."""
    most = max(lengths) + DEAD
    a, w = normal(rng, most, k), weights(rng, n, k)
    before = rng.standard_normal((most, n), np.float32)
    truth = reference(epilogue, a, w, before)
    w_device = gpu.upload(w)
    scale = SCALES[epilogue]
    width, dtype = n // 2 if epilogue in GATED else n, OUTPUTS[epilogue]
    failures = []
    for i, m in enumerate(lengths):
        capacity = m + (DEAD if i % 2 else 0)  # every other case: an allocation without slack
        host = a[:capacity].copy()
        host[m:] = np.nan
        a_device, live = gpu.upload(host), gpu.upload(np.array([m], np.int32))
        first: dict[str, NDArray[np.uint8]] = {}
        for kernel in (None, *rows_of(gpu, epilogue)):
            c = gpu.empty((capacity, width), dtype)
            if epilogue == "add":
                c.rows(0, m).upload(before[:m])
            overflow = gpu.upload(np.array([NO_OVERFLOW], np.int32))
            program = Program()
            gemm(
                program, gpu.library, a=a_device, w=w_device, c=c, rows=live, max_rows=capacity,
                epilogue=epilogue, scale=scale, overflow=overflow, kernel=kernel,
            )  # fmt: skip
            gpu.run(program)
            got = gpu.download(c)
            chosen = program.launches[0].kernel
            where = f"{program.launches[0]} m {m} n {n} k {k}"
            if (got[m:].view(np.uint8) != 0xFF).any():
                failures.append(f"{where}: wrote past the live rows")
            if gpu.download(overflow)[0] != NO_OVERFLOW:
                failures.append(f"{where}: reported an overflow")
            error = np.linalg.norm(got[:m] - truth[:m], axis=1) / np.linalg.norm(truth[:m], axis=1)
            if not (error <= TOLERANCE).all():
                worst = int(np.argmax(np.nan_to_num(error, nan=np.inf)))
                off = np.abs(got[worst] - truth[worst]) > TOLERANCE * np.abs(truth[worst]).max()
                columns = np.flatnonzero(off | np.isnan(got[worst]))
                failures.append(
                    f"{where}: row {worst} is off by {error[worst]:.1e}, columns {columns[:8]} …"
                )
            bits = got[:m].view(np.uint8)
            if not np.array_equal(bits, first.setdefault(bits_class(chosen), bits)):
                failures.append(f"{where}: bits differ from those of another row of its class")
    assert not failures, "\n".join(failures)


def product(
    gpu: Any, epilogue: str, a: DeviceArray, w: DeviceArray, m: int, kernel: Kernel
) -> NDArray[Any]:
    """C of `m` rows, added to ones."""
    gated = epilogue in GATED
    c, program = gpu.empty((m, w.shape[0] // (1 + gated)), OUTPUTS[epilogue]), Program()
    if epilogue == "add":
        c.upload(np.ones(c.shape, np.float32))
    live, overflow = (gpu.upload(np.array([x], np.int32)) for x in (m, NO_OVERFLOW))
    gemm(
        program, gpu.library, a=a, w=w, c=c, rows=live, max_rows=m, epilogue=epilogue,
        scale=SCALES[epilogue], overflow=overflow, kernel=kernel,
    )  # fmt: skip
    gpu.run(program)
    c_host: NDArray[Any] = gpu.download(c)
    return c_host


@pytest.mark.parametrize(
    ("n", "k", "lengths"),
    [
        (259, 64, (1, 7, 17, 63, 64, 65)),
        (300, 200, (127, 128, 129, 130)),
        (576, 576, (1, 16, 64, 257, 320)),
        (4608, 896, (7, 130, 320)),
        (1000, 3584, (17, 65, 129)),
        (49152, 576, (1, 2, 65)),
        (32001, 72, (1, 63)),
        (17, 8, (1, 33)),
        (16644, 136, (129, 300)),
        (515, 584, (8, 9, 31)),
    ],
)
def test_f32(gpu: Any, rng: np.random.Generator, n: int, k: int, lengths: tuple[int, ...]) -> None:
    check(gpu, rng, "f32", n, k, lengths)


@pytest.mark.parametrize(
    ("n", "k", "lengths"),
    [
        (300, 64, (1, 7, 17, 63, 64, 65)),
        (576, 1536, (1, 127, 128, 129, 130, 320)),
        (896, 4864, (1, 65, 257)),
        (3584, 3584, (1, 128)),
        (1040, 896, (8, 16, 32)),
        (3584, 18944, (1, 64)),
        (16400, 64, (130, 257)),
    ],
)
def test_add(gpu: Any, rng: np.random.Generator, n: int, k: int, lengths: tuple[int, ...]) -> None:
    check(gpu, rng, "add", n, k, lengths)


@pytest.mark.parametrize(
    ("n", "k", "lengths"),
    [
        (264, 64, (1, 7, 17, 63, 64, 65)),
        (1000, 1536, (1, 127, 128, 129, 130, 320)),
        (4608, 3584, (1, 128)),
        (16400, 64, (130, 257)),
    ],
)
def test_f16(gpu: Any, rng: np.random.Generator, n: int, k: int, lengths: tuple[int, ...]) -> None:
    check(gpu, rng, "f16", n, k, lengths)


@pytest.mark.parametrize(
    ("n", "k", "lengths"),
    [
        (304, 64, (1, 7, 17, 63, 64, 65)),
        (3072, 576, (1, 127, 128, 129, 130, 320)),
        (9728, 896, (1, 65, 257)),
        (16, 40, (1, 31)),
        (37888, 72, (130, 257)),
        (20480, 640, (257,)),
    ],
)
@pytest.mark.parametrize("epilogue", GATED)
def test_gated(
    gpu: Any, rng: np.random.Generator, epilogue: str, n: int, k: int, lengths: tuple[int, ...]
) -> None:
    check(gpu, rng, epilogue, n, k, lengths)


@pytest.mark.smoke
@pytest.mark.parametrize("epilogue", OUTPUTS)
def test_edges(gpu: Any, rng: np.random.Generator, epilogue: str) -> None:
    check(gpu, rng, epilogue, 259 if epilogue == "f32" else 272, 72, (1, 17, 130))


def test_row_tiles_beyond_one_band(gpu: Any, rng: np.random.Generator) -> None:
    """More rows than the raster walks down at a time, and fewer in the last band."""
    check(gpu, rng, "f32", 640, 32, (2049, 4100))


@pytest.mark.parametrize("epilogue", OUTPUTS)
@pytest.mark.parametrize(("capacity", "live"), [(3, 0), (600, 0), (600, 1), (600, 129)])
def test_fewer_live_rows_than_the_grid_is_for(
    gpu: Any, rng: np.random.Generator, epilogue: str, capacity: int, live: int
) -> None:
    a, w = normal(rng, capacity, 64), weights(rng, 1024, 64)
    a[live:] = np.nan
    a_device, w_device = gpu.upload(a), gpu.upload(w)
    rows, overflow = (gpu.upload(np.array([x], np.int32)) for x in (live, NO_OVERFLOW))
    width, dtype = 512 if epilogue in GATED else 1024, OUTPUTS[epilogue]
    scale = SCALES[epilogue]
    truth = reference(epilogue, a[:live], w, np.zeros((live, 1024), np.float32))
    for kernel in rows_of(gpu, epilogue):
        c, program = gpu.empty((capacity, width), dtype), Program()
        if epilogue == "add" and live:
            c.rows(0, live).fill(0)
        gemm(
            program, gpu.library, a=a_device, w=w_device, c=c, rows=rows, max_rows=capacity,
            epilogue=epilogue, scale=scale, overflow=overflow, kernel=kernel,
        )  # fmt: skip
        gpu.run(program)
        got = gpu.download(c)
        assert (got[live:].view(np.uint8) == 0xFF).all(), kernel.name
        error = np.linalg.norm(got[:live] - truth, axis=1) / np.linalg.norm(truth, axis=1)
        assert (error <= TOLERANCE).all(), kernel.name
    assert gpu.download(overflow)[0] == NO_OVERFLOW


@pytest.mark.parametrize("epilogue", OUTPUTS)
@pytest.mark.parametrize("m", [1, 64, 300])
def test_repeated_runs_give_the_same_bits(
    gpu: Any, rng: np.random.Generator, epilogue: str, m: int
) -> None:
    a, w = gpu.upload(normal(rng, m, 1024)), gpu.upload(weights(rng, 2000, 1024))
    for kernel in rows_of(gpu, epilogue):
        results = {product(gpu, epilogue, a, w, m, kernel).tobytes() for _ in range(5)}
        assert len(results) == 1, kernel.name


@pytest.mark.parametrize("epilogue", OUTPUTS)
def test_a_row_does_not_depend_on_its_neighbours(
    gpu: Any, rng: np.random.Generator, epilogue: str
) -> None:
    """Nor on its place, but for wgmma rows that split k: which block adds up depends on it."""
    a, w = normal(rng, 70, 1000), gpu.upload(weights(rng, 528, 1000))
    moved = a[::-1].copy()
    moved[::3] *= 100
    for kernel in rows_of(gpu, epilogue):
        alone = product(gpu, epilogue, gpu.upload(a[1:2]), w, 1, kernel)
        among = product(gpu, epilogue, gpu.upload(a), w, 70, kernel)
        after = product(gpu, epilogue, gpu.upload(moved), w, 70, kernel)
        assert np.array_equal(alone[0], among[1]), kernel.name
        tile = kernel.spec.tile
        if tile["engine"] != "wgmma" or tile["split"] == 1:
            assert np.array_equal(alone[0], after[68]), kernel.name


@pytest.mark.parametrize(
    ("gate", "up", "site", "expected"),
    [
        (400.0, 250.0, 7, NO_OVERFLOW),  # 1e5 is out of fp16's range, 1e5 / 32 is not
        (2000.0, 1048.0, 7, NO_OVERFLOW),  # 65500: just inside
        (2000.0, 1500.0, 7, 7),
        (2000.0, -1500.0, 3, 3),
        (2000.0, 1500.0, 12, 9),  # a lower site was there before
        (np.nan, 1.0, 7, 7),
        (-2000.0, 1500.0, 7, NO_OVERFLOW),  # silu and gelu are 0 there
    ],
)
@pytest.mark.parametrize("epilogue", GATED)
def test_gated_range(
    gpu: Any, epilogue: str, gate: float, up: float, site: int, expected: int
) -> None:
    """Two rows of W pick `gate` and `up` out of row 2 of A; A's dead row would overflow."""
    m, n, k = 4, 64, 64
    a, w = np.zeros((m + 1, k), np.float16), np.zeros((n, k), np.float16)
    a[2, :2] = gate, up
    a[m:] = 6e4
    w[20, 0] = w[21, 1] = 1
    before = 9 if expected == 9 else NO_OVERFLOW
    live = gpu.upload(np.array([m], np.int32))
    for kernel in rows_of(gpu, epilogue):
        overflow = gpu.upload(np.array([before], np.int32))
        c, program = gpu.empty((m + 1, n // 2), np.float16), Program()
        gemm(
            program, gpu.library, a=gpu.upload(a), w=gpu.upload(w), c=c, rows=live, max_rows=m + 1,
            epilogue=epilogue, scale=GATED_SCALE, overflow=overflow, site=site, kernel=kernel,
        )  # fmt: skip
        gpu.run(program)
        got = gpu.download(c)
        assert gpu.download(overflow)[0] == expected, kernel.name
        if expected == NO_OVERFLOW:
            truth = np.zeros((m, n // 2))
            truth[2, 10] = max(gate, 0) * up * GATED_SCALE
            np.testing.assert_allclose(got[:m], truth, rtol=TOLERANCE, err_msg=kernel.name)


@pytest.mark.parametrize(
    ("value", "site", "expected"),
    [(65500.0, 7, NO_OVERFLOW), (-65500.0, 7, NO_OVERFLOW), (65520.0, 3, 3), (-1e6, 12, 9),
     (np.nan, 7, 7)],
)  # fmt: skip
def test_f16_range(gpu: Any, value: float, site: int, expected: int) -> None:
    """`value` is 64 products of one row of A and one of W; A's dead row would overflow."""
    m, n, k = 12, 64, 64
    a, w = np.zeros((m + 1, k), np.float16), np.zeros((n, k), np.float16)
    a[10], a[m:], w[21] = value / k, 6e4, 1
    before = 9 if expected == 9 else NO_OVERFLOW
    live = gpu.upload(np.array([m], np.int32))
    for kernel in rows_of(gpu, "f16"):
        overflow = gpu.upload(np.array([before], np.int32))
        c, program = gpu.empty((m + 1, n), np.float16), Program()
        gemm(
            program, gpu.library, a=gpu.upload(a), w=gpu.upload(w), c=c, rows=live, max_rows=m + 1,
            epilogue="f16", overflow=overflow, site=site, kernel=kernel,
        )  # fmt: skip
        gpu.run(program)
        assert gpu.download(overflow)[0] == expected, kernel.name
        if expected == NO_OVERFLOW:
            truth = np.zeros((m, n), np.float16)
            truth[10, 21] = a[10].astype(np.float64).sum()
            np.testing.assert_array_equal(gpu.download(c)[:m], truth, err_msg=kernel.name)


# Units that clusters share: cuda/kernels/sm_90a/gemm_division.cuh.


@pytest.fixture
def workspace(gpu: Any) -> Iterator[GemmWorkspace]:
    """Full of NaN; its flags must be lowered in the end."""
    workspace = GemmWorkspace(gpu.library)
    workspace.sums.fill(0xFF)
    yield workspace
    raised = gpu.download(workspace.raised)
    workspace.close()
    assert not raised.any()


def sharing_rows(gpu: Any, epilogue: str) -> list[Kernel]:
    rows = [x for x in rows_of(gpu, epilogue) if x.spec.tile["engine"] == "wgmma"]
    if not rows:
        pytest.skip("no row of this device shares units")
    return [x for x in rows if x.spec.tile["split"] == 1]


def unit_of(kernel: Kernel) -> tuple[int, int]:
    """Rows and columns of a unit."""
    tile = kernel.spec.tile
    return int(tile["bm"]) * int(tile["share"]), int(tile["bn"])


class Shared:
    """A product of `down` x `across` units of a row, edges not full, dead rows behind it."""

    def __init__(
        self,
        gpu: Any,
        rng: np.random.Generator,
        kernel: Kernel,
        down: int,
        across: int,
        k: int,
        capacity: int = 0,
    ) -> None:
        self.gpu, self.kernel = gpu, kernel
        self.epilogue = str(kernel.spec.tile["epilogue"])
        rows, columns = unit_of(kernel)
        self.m, n = down * rows - 37, across * columns - 16
        self.capacity = capacity or self.m + DEAD
        a, w = normal(rng, self.capacity, k), weights(rng, n, k)
        a[self.m :] = np.nan
        added = self.m if self.epilogue == "add" else 0
        self.before = rng.standard_normal((added, n), np.float32)
        self.truth = reference(self.epilogue, a[: self.m], w, self.before)
        self.a, self.w = gpu.upload(a), gpu.upload(w)
        self.live, self.overflow = (
            gpu.upload(np.array([x], np.int32)) for x in (self.m, NO_OVERFLOW)
        )

    def output(self) -> DeviceArray:
        width = self.w.shape[0] // (1 + (self.epilogue in GATED))
        c = self.gpu.empty((self.capacity, width), OUTPUTS[self.epilogue])
        if self.epilogue == "add":
            c.rows(0, self.m).upload(self.before)
        return c

    def record(
        self, program: Program, c: DeviceArray, workspace: GemmWorkspace, parts: int | None
    ) -> None:
        gemm(
            program, self.gpu.library, a=self.a, w=self.w, c=c, rows=self.live,
            max_rows=self.capacity, epilogue=self.epilogue, scale=SCALES[self.epilogue],
            overflow=self.overflow, kernel=self.kernel, workspace=workspace, parts=parts,
        )  # fmt: skip

    def check(self, workspace: GemmWorkspace, parts: int | None, runs: int = 3) -> None:
        """Near the truth, the rest untouched, and the same bits each time."""
        first = None
        for _ in range(runs):
            c, program = self.output(), Program()
            self.record(program, c, workspace, parts)
            self.gpu.run(program)
            got = self.gpu.download(c)
            where = f"{program.launches[0]}, m {self.m} of {self.capacity}, w {self.w.shape}"
            assert (got[self.m :].view(np.uint8) == 0xFF).all(), where
            assert not self.gpu.download(workspace.raised).any(), where
            assert self.gpu.download(self.overflow)[0] == NO_OVERFLOW, where
            error = np.linalg.norm(got[: self.m] - self.truth, axis=1)
            error /= np.linalg.norm(self.truth, axis=1)
            assert (error <= TOLERANCE).all(), f"{where}: row {np.argmax(error)}, {error.max():.1e}"
            first = got.tobytes() if first is None else first
            assert got.tobytes() == first, where


@pytest.mark.parametrize("epilogue", OUTPUTS)
@pytest.mark.parametrize(
    ("parts", "waves", "k"),
    [
        (2, 0.03, 1000),
        (3, 0.03, 200),  # parts of one step and of two
        (4, 0.2, 2056),
        (4, 0.2, 136),  # fewer steps than parts
        (2, 0.7, 584),  # parts of two units, for which there is no whole number of clusters
        (3, 0.99, 1000),
        (2, 0.5, 8),  # one step
        (2, 1.5, 72),  # whole
    ],
)
def test_shared_units(
    gpu: Any,
    rng: np.random.Generator,
    workspace: GemmWorkspace,
    epilogue: str,
    parts: int,
    waves: float,
    k: int,
) -> None:
    rows, down = sharing_rows(gpu, epilogue), 2
    if waves > 1:  # products are large: a row of each kind
        rows, down = [*{x.spec.tile["share"]: x for x in rows}.values(), rows[0]], 3
    for kernel in rows:
        across = max(round(waves * at_once(kernel, gpu.device)) // down, 1)
        Shared(gpu, rng, kernel, down, across, k).check(workspace, parts)


@pytest.mark.smoke
@pytest.mark.parametrize("epilogue", OUTPUTS)
def test_edges_of_shared_units(
    gpu: Any, rng: np.random.Generator, workspace: GemmWorkspace, epilogue: str
) -> None:
    for kernel in sharing_rows(gpu, epilogue):
        Shared(gpu, rng, kernel, 1, 2, 328).check(workspace, 3, runs=1)


@pytest.mark.parametrize("epilogue", OUTPUTS)
def test_shared_units_of_fewer_live_rows_than_the_grid_is_for(
    gpu: Any, rng: np.random.Generator, workspace: GemmWorkspace, epilogue: str
) -> None:
    """Whole waves for the rows that there can be, none for those that there are, and none live."""
    for kernel in sharing_rows(gpu, epilogue):
        tall, _ = unit_of(kernel)
        across = at_once(kernel, gpu.device) // 3
        some = Shared(gpu, rng, kernel, 1, across, 200, capacity=5 * tall)
        some.check(workspace, 2)
        some.live.upload(np.array([0], np.int32))
        c, program = some.output().fill(0xFF), Program()
        some.record(program, c, workspace, 2)
        gpu.run(program)
        assert (gpu.download(c).view(np.uint8) == 0xFF).all()


@pytest.mark.parametrize("epilogue", OUTPUTS)
def test_products_one_after_the_other_share_a_workspace(
    gpu: Any, rng: np.random.Generator, workspace: GemmWorkspace, epilogue: str
) -> None:
    """Launches that overlap, enqueued and as a graph, many times: the bits of each alone."""
    rows = sharing_rows(gpu, epilogue)
    shapes = [(1, 3, 1000, 4), (2, 40, 328, 2), (3, 50, 200, 2)]
    products = [Shared(gpu, rng, rows[i % len(rows)], *shape[:3]) for i, shape in enumerate(shapes)]
    outputs = [x.output() for x in products]

    def record(program: Program) -> Program:
        for x, c, shape in zip(products, outputs, shapes, strict=True):
            x.record(program, c, workspace, shape[3])
        return program

    def results() -> list[bytes]:
        found = [gpu.download(c).tobytes() for c in outputs]
        for x, c in zip(products, outputs, strict=True):
            if epilogue == "add":
                c.rows(0, x.m).upload(x.before)
        return found

    alone = []
    for x, c, shape in zip(products, outputs, shapes, strict=True):
        program = Program()
        x.record(program, c, workspace, shape[3])
        gpu.run(program)
    alone = results()
    assert len(set(alone)) == len(alone)
    chain, aside = record(Program()), Stream(gpu.device)
    graph = Graph(aside, lambda: chain.enqueue(aside))
    for _ in range(30):
        gpu.run(chain)
        assert results() == alone
        with gpu.device.current():
            graph.launch(aside)
            aside.synchronize()
        assert results() == alone
    graph.close()
    aside.close()


def test_sharing_is_chosen(gpu: Any, rng: np.random.Generator, workspace: GemmWorkspace) -> None:
    """For two thirds of a wave, of the row that is the best for that."""
    (kernel,) = sharing_rows(gpu, "f16")[:1]
    across = at_once(kernel, gpu.device) // 3
    product = Shared(gpu, rng, kernel, 1, across, 3584)
    program = Program()
    product.record(program, product.output(), workspace, None)
    assert program.launches[0].grid[0] > across * kernel.spec.cluster
    product.check(workspace, None)
