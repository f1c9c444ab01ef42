"""Planes of int8 activations against the NumPy model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.ops.quantize import Plane, gated_quantize, norm_quantize, plane_layout, quantize
from pyruntime.reference import int8
from pyruntime.reference.functions import geglu, rms_norm, swiglu

NONE, SITE = 2**31 - 1, 3
# Of float32 arithmetic before the quantization: the root, gates' exponential. A scale may then be
# the next one of 16 bits.
BEFORE, SCALE = 4e-6, 2.0**-15
SHAPES = [(1, 1), (2, 7), (63, 64), (64, 65), (130, 130), (1100, 1100)]


@dataclass
class Guarded:
    """A plane in the middle of guards of 0xFF, and the arrays that hold it."""

    plane: Plane
    arrays: dict[str, DeviceArray]


GUARD = 256  # bytes before and behind each array


def new_plane(gpu: Any, rows: int, k: int) -> Guarded:
    parts, arrays = {}, {}
    for name, (shape, dtype) in plane_layout(rows, k).items():
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[name] = gpu.empty((nbytes + 2 * GUARD,), np.uint8)
        parts[name] = arrays[name].view(GUARD, shape, dtype)
    return Guarded(Plane(**parts), arrays)


def read(gpu: Any, guarded: Guarded, live: int) -> int8.Quantized:
    """The live rows; all else is as it was."""
    for array in guarded.arrays.values():
        held = gpu.download(array)
        assert (held[:GUARD] == 0xFF).all() and (held[-GUARD:] == 0xFF).all()
    plane = guarded.plane
    q, scales, sums = (gpu.download(part) for part in (plane.q, plane.scales, plane.sums))
    for rest in (q[live:], scales[:, live:], sums[:, live:]):
        assert (np.ascontiguousarray(rest).view(np.uint8) == 0xFF).all()
    found = int8.Quantized(q[:live], scales[:, :live, 0].T.copy(), sums[:, :live].T.copy())
    np.testing.assert_array_equal(scales[:, :live], int8.device_scales(found))
    return found


def common(gpu: Any, guarded: Guarded, live: int, rows: int) -> dict[str, Any]:
    return {
        "plane": guarded.plane, "rows": gpu.upload(np.array([live], np.int32)), "max_rows": rows,
        "overflow": gpu.upload(np.array([NONE], np.int32)), "site": SITE,
    }  # fmt: skip


def finish(gpu: Any, program: Program, given: dict[str, Any]) -> int:
    gpu.run(program)
    return int(gpu.download(given["overflow"])[0])


def assert_same(got: int8.Quantized, want: int8.Quantized) -> None:
    """Bit by bit."""
    np.testing.assert_array_equal(got.scales, want.scales)
    np.testing.assert_array_equal(got.q, want.q)
    np.testing.assert_array_equal(got.sums, want.sums)


def assert_near(got: int8.Quantized, x: NDArray[np.float32], error: NDArray[Any]) -> None:
    """Of values that may be `error` off: integers differ where that, or the scale, is near a tie.

    What follows from the integers and the scales is the same bit by bit.
    """
    want = int8.quantize_rows(x)
    np.testing.assert_allclose(got.scales, want.scales, SCALE + BEFORE)
    scales = np.repeat(want.scales, int8.GROUP, axis=1).astype(np.float64)
    steps = np.divide(x, scales, out=np.zeros_like(scales), where=scales > 0)
    slack = np.divide(error, scales, out=np.zeros_like(scales), where=scales > 0)
    slack += np.abs(steps) * 2 * (SCALE + BEFORE)
    assert (np.abs(got.q - steps) <= 0.5 + slack).all()
    assert (got.q == want.q).mean() > 0.99
    whole = got.q.reshape(*got.scales.shape, -1).sum(2, dtype=np.int32).astype(np.float32)
    np.testing.assert_array_equal(got.sums, int8.tf32(got.scales * whole))


def spread(rng: np.random.Generator, rows: int, k: int, most: float = 3) -> NDArray[np.float32]:
    """Rows, and groups in them, of many sizes; some groups are zeros."""
    x = rng.standard_normal((rows, k)) * 10.0 ** rng.uniform(-3, most, (rows, 1))
    by_group = x.reshape(rows, -1, int8.GROUP)
    by_group *= rng.choice([0, 1, 1, 0.01], by_group.shape[:2])[..., None]
    return x.astype(np.float32)


def check_quantize(
    gpu: Any, rng: np.random.Generator, k: int, live: int, rows: int, kernel: Any = None
) -> None:
    x = spread(rng, rows, k).astype(np.float16)
    x[live:] = np.nan
    guarded, program = new_plane(gpu, rows, k), Program()
    given = common(gpu, guarded, live, rows)
    quantize(program, gpu.library, x=gpu.upload(x), kernel=kernel, **given)
    assert finish(gpu, program, given) == NONE
    assert_same(read(gpu, guarded, live), int8.quantize_rows(x[:live]))


@pytest.mark.parametrize(("live", "rows"), SHAPES)
@pytest.mark.parametrize("k", [32, 576, 3584, 18944])
def test_quantize(gpu: Any, rng: np.random.Generator, k: int, live: int, rows: int) -> None:
    check_quantize(gpu, rng, k, live, rows)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 31, 319])
def test_what_is_not_finite_is_reported(gpu: Any, value: float, column: int) -> None:
    for live, word in ((5, SITE), (3, NONE)):  # it is in row 4
        x = np.ones((8, 320), np.float16)
        x[4, column] = value
        guarded, program = new_plane(gpu, 8, 320), Program()
        given = common(gpu, guarded, live, 8)
        quantize(program, gpu.library, x=gpu.upload(x), **given)
        assert finish(gpu, program, given) == word
        assert_same(read(gpu, guarded, live) if word == NONE else int8.quantize_rows(x[:3]),
                    int8.quantize_rows(x[:3]))  # fmt: skip


def check_norm(
    gpu: Any, rng: np.random.Generator, k: int, live: int, rows: int, copy: bool, kernel: Any = None
) -> None:
    x = spread(rng, rows, k)
    x[live:] = np.nan
    weight = rng.uniform(-2, 2, k).astype(np.float32)
    guarded, program = new_plane(gpu, rows, k), Program()
    given = common(gpu, guarded, live, rows)
    y = gpu.empty((rows, k), np.float16) if copy else None
    norm_quantize(
        program,
        gpu.library,
        x=gpu.upload(x),
        weight=gpu.upload(weight),
        eps=1e-6,
        y=y,
        kernel=kernel,
        **given,
    )
    assert finish(gpu, program, given) == NONE
    want = rms_norm(x[:live].astype(np.float64), weight, 1e-6).astype(np.float32)
    assert_near(read(gpu, guarded, live), want, np.abs(want) * BEFORE)
    if y is not None:
        assert_copied(gpu.download(y), want, live)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(("live", "rows"), SHAPES)
@pytest.mark.parametrize("k", [32, 576, 3584, 8192, 8224])
def test_norm(gpu: Any, rng: np.random.Generator, k: int, live: int, rows: int, copy: bool) -> None:
    check_norm(gpu, rng, k, live, rows, copy)


def assert_copied(y: NDArray[np.float16], want: NDArray[np.float32], live: int) -> None:
    np.testing.assert_allclose(y[:live].astype(np.float32), want, 2.0**-11 + BEFORE, 2.0**-24)
    assert (y[live:].view(np.uint16) == 0xFFFF).all()


def check_residual(
    gpu: Any, rng: np.random.Generator, k: int, live: int, rows: int, copy: bool, kernel: Any = None
) -> None:
    branch, x = spread(rng, rows, k), spread(rng, rows, k)
    branch[live:] = np.nan
    post, weight = (rng.uniform(-2, 2, k).astype(np.float32) for _ in range(2))
    guarded, program, stream = new_plane(gpu, rows, k), Program(), gpu.upload(x)
    given = common(gpu, guarded, live, rows)
    y = gpu.empty((rows, k), np.float16) if copy else None
    norm_quantize(
        program, gpu.library, x=stream, weight=gpu.upload(weight), eps=1e-6,
        branch=gpu.upload(branch), post=gpu.upload(post), y=y, kernel=kernel,
        **given,
    )  # fmt: skip
    assert finish(gpu, program, given) == NONE
    after = gpu.download(stream)
    joined = rms_norm(branch[:live].astype(np.float64), post, 1e-6)
    sizes = np.abs(x[:live]) + np.abs(joined)
    assert (np.abs(after[:live] - (x[:live] + joined)) <= 2e-6 * sizes).all()
    np.testing.assert_array_equal(after[live:], x[live:])
    want = rms_norm(after[:live].astype(np.float64), weight, 1e-6).astype(np.float32)
    assert_near(read(gpu, guarded, live), want, np.abs(want) * BEFORE)
    if y is not None:
        assert_copied(gpu.download(y), want, live)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(("live", "rows"), SHAPES)
@pytest.mark.parametrize("k", [128, 1152, 5376])
def test_a_branch_joins(
    gpu: Any, rng: np.random.Generator, k: int, live: int, rows: int, copy: bool
) -> None:
    check_residual(gpu, rng, k, live, rows, copy)


def check_gated(
    gpu: Any,
    rng: np.random.Generator,
    k: int,
    live: int,
    rows: int,
    copy: bool,
    activation: str,
    kernel: Any = None,
) -> None:
    gate = (4 * rng.standard_normal((rows, k))).astype(np.float16)
    up = spread(rng, rows, k).astype(np.float16)
    gate[live:] = up[live:] = np.nan
    guarded, program = new_plane(gpu, rows, k), Program()
    given = common(gpu, guarded, live, rows)
    y = gpu.empty((rows, k), np.float16) if copy else None
    gated_quantize(
        program, gpu.library, gate=gpu.upload(gate), up=gpu.upload(up), activation=activation,
        y=y, kernel=kernel, **given,
    )  # fmt: skip
    assert finish(gpu, program, given) == NONE
    function = {"silu": swiglu, "gelu": geglu}[activation]
    wide = [a[:live].astype(np.float64) for a in (gate, up)]
    want = function(*wide).astype(np.float32)
    # The exponential's error is of its argument; a gate of -20 leaves next to nothing.
    error = BEFORE * (np.abs(want) * (1 + np.abs(wide[0]) ** 3) + 1e-6 * np.abs(wide[1]))
    assert_near(read(gpu, guarded, live), want, error)
    if y is not None:
        assert_copied(gpu.download(y), want, live)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(("live", "rows"), SHAPES)
@pytest.mark.parametrize("k", [32, 576, 8960])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated(
    gpu: Any, rng: np.random.Generator, activation: str, k: int, live: int, rows: int, copy: bool
) -> None:
    check_gated(gpu, rng, k, live, rows, copy, activation)


CHECKS = {
    "quantize": check_quantize, "norm": check_norm, "residual": check_residual,
    "gated": check_gated,
}  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize(("live", "rows"), [(1, 1), (5, 19)])
@pytest.mark.parametrize("k", [32, 1152])
def test_every_kernel(gpu: Any, rng: np.random.Generator, k: int, live: int, rows: int) -> None:
    """Whatever it would be chosen for."""
    for kernel in gpu.library.family("quantize"):
        tile, more = kernel.spec.tile, {}
        if tile["op"] != "quantize":
            more["copy"] = bool(tile["copy"])
        if tile["op"] == "gated":
            more["activation"] = tile["activation"]
        CHECKS[tile["op"]](gpu, rng, k, live, rows, kernel=kernel, **more)


@pytest.mark.parametrize(
    ("value", "copy", "word"),
    [(np.nan, False, SITE), (1e31, False, SITE), (1e6, False, NONE), (1e6, True, SITE)],
)
def test_the_range_is_that_of_what_is_written(
    gpu: Any, value: float, copy: bool, word: int
) -> None:
    x, weight = np.ones((4, 256), np.float32), np.ones(256, np.float32)
    weight[255] = value
    guarded, program = new_plane(gpu, 4, 256), Program()
    given = common(gpu, guarded, 4, 4)
    y = gpu.empty((4, 256), np.float16) if copy else None
    norm_quantize(
        program, gpu.library, x=gpu.upload(x), weight=gpu.upload(weight), eps=0.0, y=y, **given
    )
    assert finish(gpu, program, given) == word


def test_what_does_not_fit_is_refused(gpu: Any) -> None:
    with pytest.raises(ValueError, match="not whole groups of 32"):
        plane_layout(4, 48)
    plane, count = new_plane(gpu, 4, 64).plane, gpu.empty((1,), np.int32)
    half, wide = gpu.empty((4, 64), np.float16), gpu.empty((4, 64), np.float32)
    weight = gpu.empty((64,), np.float32)
    given = {"plane": plane, "rows": count, "max_rows": 4, "overflow": count, "site": 0}
    for bad in (
        {"x": wide}, {"x": gpu.empty((4, 32), np.float16)}, {"x": half, "max_rows": 5},
        {"x": gpu.empty((3, 64), np.float16)}, {"x": half, "plane": new_plane(gpu, 3, 64).plane},
        {"x": half, "plane": Plane(plane.q, plane.scales, plane.scales)},
        {"x": half.view(2, (3, 64), np.float16), "max_rows": 3},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="quantize"):
            quantize(Program(), gpu.library, **{**given, **bad})
    for bad in (
        {"x": half}, {"weight": gpu.empty((32,), np.float32)}, {"branch": wide},
        {"branch": wide, "post": gpu.empty((32,), np.float32)}, {"post": weight}, {"y": wide},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="quantize"):
            norm_quantize(
                Program(), gpu.library, **{**given, "x": wide, "weight": weight, "eps": 0.0, **bad}
            )
    good = {**given, "gate": half, "up": half, "activation": "silu"}
    for bad in ({"gate": wide}, {"activation": "relu"}, {"y": wide}):
        with pytest.raises(ValueError, match="quantize"):
            gated_quantize(Program(), gpu.library, **{**good, **bad})
