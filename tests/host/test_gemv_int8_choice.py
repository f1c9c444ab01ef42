"""Which row of the table a product of a few int8 rows takes: next to what rows took on an H200."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pyruntime.cubin.installed import manifest, root
from pyruntime.cubin.spec import read_specs
from pyruntime.driver.library import Kernel
from pyruntime.errors import CubinError
from pyruntime.ops.gemv_int8 import _kernel

# Microseconds a launch in blocks of four warps and of two, medians of seven graphs of launches.
MEASURED = {
    ("q4_k", 1, 512, 3584): (1.87, 3.11),
    ("q4_k", 1, 3584, 3584): (4.23, 4.03),
    ("q4_k", 1, 18944, 3584): (15.89, 13.66),
    ("q4_k", 1, 3584, 18944): (14.38, 16.01),
    ("q4_k", 1, 152064, 3584): (112.82, 94.07),
    ("q4_k", 1, 1024, 4096): (2.10, 3.62),
    ("q4_k", 1, 4096, 4096): (4.82, 4.23),
    ("q4_k", 1, 14336, 4096): (13.16, 11.56),
    ("q4_k", 1, 4096, 14336): (12.39, 12.09),
    ("q4_k", 1, 4864, 1024): (2.04, 2.11),
    ("q4_k", 1, 1024, 4864): (2.90, 4.83),
    ("q4_k", 1, 8192, 2048): (4.47, 4.85),
    ("q4_k", 1, 2048, 8192): (4.27, 6.80),
    ("q4_k", 2, 18944, 3584): (23.40, 19.42),
    ("q4_k", 4, 18944, 3584): (39.41, 32.50),
    ("q4_k", 8, 18944, 3584): (68.50, 57.86),
    ("q6_k", 1, 512, 3584): (1.68, 2.71),
    ("q6_k", 1, 3584, 3584): (4.72, 4.34),
    ("q6_k", 1, 18944, 3584): (17.82, 16.88),
    ("q6_k", 1, 3584, 18944): (18.24, 18.37),
    ("q6_k", 1, 8192, 2048): (5.07, 5.67),
    ("q6_k", 8, 18944, 3584): (55.24, 44.24),
    ("q5_k", 1, 18944, 3584): (21.43, 18.68),
    ("q5_k", 1, 3584, 18944): (18.53, 18.84),
}


@pytest.fixture(params=["80", "90a", "100", "120"])
def library(request: pytest.FixtureRequest) -> Any:
    if request.param not in manifest()["architectures"]:
        pytest.skip(f"no cubins for {request.param}")
    file = root() / f"sm_{request.param}/gemv_int8.cubin"
    kernels = [Kernel(spec, None, 0) for spec in read_specs(file.read_bytes(), file.name).values()]
    return SimpleNamespace(
        family=lambda name: kernels, answers={}, device=SimpleNamespace(sm_count=132)
    )


@pytest.mark.parametrize("case", MEASURED)
def test_it_is_the_fastest(library: Any, case: tuple[str, int, int, int]) -> None:
    four, two = MEASURED[case]
    assert _kernel(library, *case).spec.threads == (128 if four < two else 64)


def test_it_is_for_the_fewest_tokens_that_are_enough(library: Any) -> None:
    for rows, tokens in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)):
        assert _kernel(library, "q4_k", rows, 3584, 3584).spec.tile["tokens"] == tokens
    with pytest.raises(CubinError, match="no gemv_int8 kernel for type q4_k and 9 rows"):
        _kernel(library, "q4_k", 9, 3584, 3584)


def test_a_type_without_small_blocks_takes_the_others(library: Any) -> None:
    assert _kernel(library, "q8_0", 1, 18944, 3584).spec.threads == 256
