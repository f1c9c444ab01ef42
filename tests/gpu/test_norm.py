"""RMSNorm against a float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyruntime.driver.program import Program
from pyruntime.ops.norm import norm, norm_residual

NONE = 2**31 - 1
# Half an ulp of fp16, and the float32 arithmetic before it; half of fp16's smallest step near zero.
RELATIVE, ABSOLUTE = 2.0**-11 + 2e-6, 2.0**-25


def oracle(x: NDArray[Any], weight: NDArray[Any], eps: float) -> NDArray[np.float64]:
    x = x.astype(np.float64)
    scaled: NDArray[np.float64] = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps) * weight
    return scaled


def run(
    gpu: Any, x: NDArray[np.float32], weight: NDArray[np.float32], live: int, eps: float = 1e-6
) -> tuple[NDArray[np.float16], int]:
    """(y, overflow word) for the rows of x, of which `live` are live."""
    y = gpu.empty(x.shape, np.float16)
    overflow = gpu.upload(np.array([NONE], np.int32))
    program = Program()
    norm(
        program,
        gpu.library,
        rows=gpu.upload(np.array([live], np.int32)),
        max_rows=len(x),
        x=gpu.upload(x),
        weight=gpu.upload(weight),
        y=y,
        overflow=overflow,
        site=3,
        eps=eps,
    )
    gpu.run(program)
    return gpu.download(y), int(gpu.download(overflow)[0])


@pytest.mark.smoke
@pytest.mark.parametrize(("live", "rows"), [(1, 1), (2, 7), (63, 64), (129, 130), (130, 130)])
@pytest.mark.parametrize("columns", [256, 576, 896, 3584])
def test_values(gpu: Any, rng: np.random.Generator, columns: int, live: int, rows: int) -> None:
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    x *= 10.0 ** rng.uniform(-3, 3, (rows, 1)).astype(np.float32)
    x[live:] = np.nan
    weight = rng.uniform(-2, 2, columns).astype(np.float32)
    y, word = run(gpu, x, weight, live)
    want = oracle(x[:live], weight, 1e-6)
    np.testing.assert_allclose(y[:live].astype(np.float64), want, RELATIVE, ABSOLUTE)
    assert (y[live:].view(np.uint16) == 0xFFFF).all()
    assert word == NONE


def test_eps_counts(gpu: Any) -> None:
    x, weight = np.full((2, 256), 1e-3, np.float32), np.ones(256, np.float32)
    x[1] = 0
    y, word = run(gpu, x, weight, 2, eps=1e-5)
    want = oracle(x, weight, 1e-5)
    np.testing.assert_allclose(y.astype(np.float64), want, RELATIVE, ABSOLUTE)
    assert word == NONE


@pytest.mark.parametrize(("value", "word"), [(1e6, 3), (np.nan, 3), (6e4, NONE)])
def test_results_out_of_range_are_reported(gpu: Any, value: float, word: int) -> None:
    weight = np.ones(256, np.float32)
    weight[255] = value
    assert run(gpu, np.ones((4, 256), np.float32), weight, 4)[1] == word


def run_residual(
    gpu: Any,
    branch: NDArray[np.float32],
    post: NDArray[np.float32],
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    live: int,
) -> tuple[NDArray[np.float32], NDArray[np.float16], int]:
    """(x, y, overflow word) after the rows, of which `live` are live."""
    stream, y = gpu.upload(x), gpu.empty(x.shape, np.float16)
    overflow = gpu.upload(np.array([NONE], np.int32))
    program = Program()
    norm_residual(
        program,
        gpu.library,
        rows=gpu.upload(np.array([live], np.int32)),
        max_rows=len(x),
        branch=gpu.upload(branch),
        post=gpu.upload(post),
        x=stream,
        weight=gpu.upload(weight),
        y=y,
        overflow=overflow,
        site=3,
        eps=1e-6,
    )
    gpu.run(program)
    return gpu.download(stream), gpu.download(y), int(gpu.download(overflow)[0])


@pytest.mark.smoke
@pytest.mark.parametrize(("live", "rows"), [(1, 1), (2, 7), (64, 65), (130, 130)])
@pytest.mark.parametrize("columns", [128, 1152, 2304, 5376])
def test_a_branch_joins(
    gpu: Any, rng: np.random.Generator, columns: int, live: int, rows: int
) -> None:
    """Branches and streams of any size, each beside the other."""
    branch, x = (
        (rng.standard_normal((rows, columns)) * 10.0 ** rng.uniform(-3, 4, (rows, 1))).astype("f4")
        for _ in range(2)
    )
    before = x.copy()
    branch[live:] = np.nan
    post, weight = (rng.uniform(-2, 2, columns).astype(np.float32) for _ in range(2))
    after, y, word = run_residual(gpu, branch, post, x, weight, live)
    joined = oracle(branch[:live], post, 1e-6)
    sizes = np.abs(before[:live]) + np.abs(joined)
    assert (np.abs(after[:live] - (before[:live] + joined)) <= 2e-6 * sizes).all()
    want = oracle(after[:live], weight, 1e-6)
    np.testing.assert_allclose(y[:live].astype(np.float64), want, RELATIVE, ABSOLUTE)
    np.testing.assert_array_equal(after[live:], before[live:])
    assert (y[live:].view(np.uint16) == 0xFFFF).all()
    assert word == NONE


@pytest.mark.parametrize(("value", "word"), [(1e6, 3), (np.nan, 3), (1.0, NONE)])
def test_a_joined_result_out_of_range_is_reported(gpu: Any, value: float, word: int) -> None:
    ones, weight = np.ones((4, 256), np.float32), np.ones(256, np.float32)
    weight[255] = value
    assert run_residual(gpu, ones, ones[0], ones, weight, 4)[2] == word


def test_rows_that_are_not_live_report_nothing(gpu: Any) -> None:
    x = np.ones((4, 256), np.float32)
    x[2:] = np.inf
    assert run(gpu, x, np.ones(256, np.float32), 2)[1] == NONE


def test_what_does_not_fit_is_refused(gpu: Any) -> None:
    x, weight = gpu.empty((4, 64), np.float32), gpu.empty((64,), np.float32)
    good = {
        "rows": gpu.empty((1,), np.int32), "max_rows": 4, "x": x, "weight": weight,
        "y": gpu.empty((4, 64), np.float16), "overflow": gpu.empty((1,), np.int32), "site": 0,
        "eps": 1e-6,
    }  # fmt: skip
    for bad in (
        {"weight": gpu.empty((32,), np.float32)},
        {"y": gpu.empty((4, 64), np.float32)},
        {"max_rows": 5},
    ):
        with pytest.raises(ValueError, match="norm"):
            norm(Program(), gpu.library, **{**good, **bad})
    good |= {"branch": x, "post": weight}
    for bad in (
        {"branch": gpu.empty((4, 60), np.float32)},
        {"branch": gpu.empty((4, 64), np.float16)},
        {"branch": gpu.empty((3, 64), np.float32)},
        {"post": gpu.empty((60,), np.float32)},
    ):
        with pytest.raises(ValueError, match="norm"):
            norm_residual(Program(), gpu.library, **{**good, **bad})
