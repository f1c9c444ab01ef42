"""Sums over rows against a float64 oracle, and bits that the number of rows alone decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyruntime.driver.program import Program
from pyruntime.ops.pool import pool

COLUMNS = [8, 64, 72, 576, 3584]
EPSILON = 2.0**-24  # a rounding to float32


def launch(
    gpu: Any, x: NDArray[np.float16], spans: list[tuple[int, int]], *, more: int = 0
) -> NDArray[np.float32]:
    """The sums of `spans`; with `more` entries past the live ones, which must stay as they are."""
    count = len(spans)
    given = np.array([*spans, *[(-1, 2**30)] * more], np.int32)
    sums, program = gpu.empty((count + more, x.shape[1]), np.float32), Program()
    pool(
        program, gpu.library, count=gpu.upload(np.array([count], np.int32)),
        max_count=count + more, spans=gpu.upload(given), x=gpu.upload(x), sums=sums,
    )  # fmt: skip
    gpu.run(program)
    found = gpu.download(sums)
    assert (found[count:].view(np.uint32) == 0xFFFFFFFF).all()
    return found[:count]


@pytest.mark.smoke
@pytest.mark.parametrize("columns", COLUMNS)
def test_values(gpu: Any, rng: np.random.Generator, columns: int) -> None:
    """Rows between spans, before and after them are NaN."""
    spans, first = [], 1
    for rows in (1, 2, 63, 64, 65, 130, 256, 257):
        spans.append((first, rows))
        first += rows + 1
    x = np.full((first, columns), np.nan, np.float16)
    for first, rows in spans:
        x[first : first + rows] = rng.standard_normal((rows, columns)) * 10 ** rng.uniform(-3, 3)
    for more in (0, 3):
        for (first, rows), sums in zip(spans, launch(gpu, x, spans, more=more), strict=True):
            own = x[first : first + rows].astype(np.float64)
            # Each number is in at most so many additions: of a lane's rows, of lanes, of warps.
            most = EPSILON * (rows / 64 + 2 + 16) * np.abs(own).sum(0)
            assert (np.abs(sums - own.sum(0)) <= most).all()


def test_a_single_row_is_copied(gpu: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((9, 256)).astype(np.float16)
    np.testing.assert_array_equal(launch(gpu, x, [(4, 1), (0, 1)]), x[[4, 0]].astype(np.float32))


def test_the_bits_are_those_of_the_rows_alone(gpu: Any, rng: np.random.Generator) -> None:
    """Wherever they lie and whatever lies beside them."""
    x = (rng.standard_normal((9000, 576)) * 30).astype(np.float16)
    spans = [(0, 8192), (8192, 700), (8900, 100)]
    together = launch(gpu, x, spans)
    assert together.tobytes() == launch(gpu, x, spans).tobytes()
    for (first, rows), sums in zip(spans, together, strict=True):
        (alone,) = launch(gpu, x[first : first + rows], [(0, rows)])
        assert alone.tobytes() == sums.tobytes()


def test_many_spans(gpu: Any, rng: np.random.Generator) -> None:
    """As many as a pass has prompts, of any lengths, also 0."""
    rows = rng.integers(0, 9, 256)
    x = rng.standard_normal((int(rows.sum()), 64)).astype(np.float16)
    spans = list(zip((np.cumsum(rows) - rows).tolist(), rows.tolist(), strict=True))
    want = [x[first : first + n].astype(np.float64).sum(0) for first, n in spans]
    np.testing.assert_allclose(launch(gpu, x, spans), want, rtol=1e-6, atol=1e-5)


def test_what_does_not_fit_is_refused(gpu: Any) -> None:
    good: dict[str, Any] = {
        "count": gpu.empty((1,), np.int32), "max_count": 4, "spans": gpu.empty((4, 2), np.int32),
        "x": gpu.empty((9, 64), np.float16), "sums": gpu.empty((4, 64), np.float32),
    }  # fmt: skip
    pool(Program(), gpu.library, **good)
    for bad in (
        {"spans": gpu.empty((4, 2), np.float32)},
        {"spans": gpu.empty((4, 3), np.int32)},
        {"spans": gpu.empty((3, 2), np.int32)},
        {"x": gpu.empty((9, 64), np.float32)},
        {"x": gpu.empty((9, 72), np.float16)},
        {"x": gpu.empty((9, 60), np.float16), "sums": gpu.empty((4, 60), np.float32)},
        {"sums": gpu.empty((4, 64), np.float16)},
        {"sums": gpu.empty((3, 64), np.float32)},
        {"max_count": 5},
        {"max_count": 0},
    ):
        with pytest.raises(ValueError, match="pool"):
            pool(Program(), gpu.library, **{**good, **bad})
