"""Capped logits against a float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyruntime.driver.program import Program
from pyruntime.ops.softcap import softcap


@pytest.mark.smoke
@pytest.mark.parametrize(("live", "rows"), [(1, 1), (2, 5), (130, 130)])
@pytest.mark.parametrize("columns", [1, 301, 2047, 2048, 2049, 32001])
def test_values(gpu: Any, rng: np.random.Generator, columns: int, live: int, rows: int) -> None:
    x = (rng.standard_normal((rows, columns)) * 10.0 ** rng.uniform(-4, 3, (rows, 1))).astype("f4")
    x[0, 0] = -1e30
    logits, program = gpu.upload(x), Program()
    softcap(
        program, gpu.library, rows=gpu.upload(np.array([live], np.int32)), max_rows=rows, x=logits,
        cap=30.0,
    )  # fmt: skip
    gpu.run(program)
    got = gpu.download(logits)
    want = 30 * np.tanh(x[:live].astype(np.float64) / 30)
    np.testing.assert_allclose(got[:live], want, rtol=1e-6, atol=0)
    np.testing.assert_array_equal(got[live:], x[live:])


def test_what_does_not_fit_is_refused(gpu: Any) -> None:
    rows, x = gpu.empty((1,), np.int32), gpu.empty((4, 64), np.float32)
    good: dict[str, Any] = {"rows": rows, "max_rows": 4, "x": x, "cap": 30.0}
    for bad in (
        {"x": gpu.empty((4, 64), np.float16)},
        {"x": gpu.empty((64,), np.float32)},
        {"max_rows": 5},
        {"cap": 0.0},
        {"cap": float("nan")},
    ):
        with pytest.raises(ValueError, match="softcap"):
            softcap(Program(), gpu.library, **{**good, **bad})
