"""Which row of the table an int8 product takes: next to what every row took on an H200."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pyruntime.cubin.installed import manifest, root
from pyruntime.cubin.spec import read_specs
from pyruntime.driver.library import Kernel
from pyruntime.errors import CubinError
from pyruntime.ops.gemm_int8 import CYCLES, choose, rows_for, units

DEVICES: dict[str, Any] = {
    "H200": SimpleNamespace(sm_count=132, smem_per_sm=233472, smem_reserved=1024),
    "A100": SimpleNamespace(sm_count=108, smem_per_sm=167936, smem_reserved=1024),
    "RTX 3060": SimpleNamespace(sm_count=28, smem_per_sm=102400, smem_reserved=1024),
}
# Microseconds a launch, medians of seven timings of four launches (bench/gemm_int8.py).
ROWS = (
    "m64_n128_k1_s2_b3", "m64_n128_k1_s2_b2", "m64_n32_k4_s2_b2", "m32_n32_k4_s3_b2",
    "m16_n32_k4_s3_b3",
)  # fmt: skip
MEASURED = {
    ("q4_k", 64, 3584, 3584): (36.0, 37.4, 15.5, 14.0, 17.6),
    ("q4_k", 512, 3584, 3584): (76.2, 58.5, 88.2, 78.3, 93.1),
    ("q4_k", 2048, 3584, 3584): (183.7, 196.3, 336.6, 294.3, 352.3),
    ("q4_k", 64, 512, 3584): (37.1, 37.4, 15.8, 10.3, 8.4),
    ("q4_k", 512, 512, 3584): (36.1, 37.2, 15.4, 14.4, 19.6),
    ("q4_k", 2048, 512, 3584): (42.3, 48.0, 51.9, 46.6, 55.7),
    ("q4_k", 64, 18944, 3584): (64.0, 58.5, 65.9, 56.8, 63.3),
    ("q4_k", 512, 18944, 3584): (233.2, 249.4, 436.7, 386.9, 462.2),
    ("q4_k", 2048, 18944, 3584): (889.9, 953.7, 1691.8, 1518.5, 1814.0),
    ("q4_k", 64, 3584, 18944): (165.5, 170.0, 62.1, 53.6, 71.8),
    ("q4_k", 512, 3584, 18944): (374.2, 278.6, 402.0, 342.6, 424.8),
    ("q4_k", 2048, 3584, 18944): (918.6, 979.6, 1531.5, 1322.7, 1638.9),
    ("q6_k", 64, 3584, 3584): (70.1, 69.6, 19.7, 23.0, 22.9),
    ("q6_k", 512, 3584, 3584): (121.0, 90.6, 115.2, 138.2, 138.9),
    ("q6_k", 2048, 3584, 3584): (291.1, 313.6, 424.7, 509.0, 524.0),
    ("q6_k", 64, 512, 3584): (65.4, 65.5, 19.3, 12.6, 9.3),
    ("q6_k", 512, 512, 3584): (70.0, 70.1, 19.4, 22.6, 23.1),
    ("q6_k", 2048, 512, 3584): (77.5, 78.5, 66.9, 80.3, 81.8),
    ("q6_k", 64, 18944, 3584): (98.7, 88.1, 83.5, 92.6, 93.2),
    ("q6_k", 512, 18944, 3584): (379.5, 394.5, 570.8, 685.9, 696.5),
    ("q6_k", 2048, 18944, 3584): (1440.5, 1447.7, 2191.3, 2653.4, 2733.8),
    ("q6_k", 64, 3584, 18944): (347.6, 347.4, 79.1, 94.0, 97.7),
    ("q6_k", 512, 3584, 18944): (606.0, 449.8, 519.6, 613.1, 646.3),
    ("q6_k", 2048, 3584, 18944): (1473.5, 1580.3, 1935.2, 2378.7, 2484.2),
}
OF_THE_BEST = 0.97


def library_of(architecture: str) -> Any:
    folder = root() / f"sm_{architecture}"
    kernels = [
        Kernel(spec, None, 0)
        for file in sorted(folder.glob("gemm_int8*.cubin"))
        for spec in read_specs(file.read_bytes(), file.name).values()
    ]
    return SimpleNamespace(family=lambda _: kernels)


@pytest.fixture(scope="module")
def hopper() -> Any:
    if "90a" not in manifest()["architectures"]:
        pytest.skip("no cubins for sm_90a are installed")
    return library_of("90a")


def shape_of(kernel: Kernel) -> str:
    tile = kernel.spec.tile
    return f"m{tile['bm']}_n{tile['bn']}_k{tile['split']}"


@pytest.mark.parametrize("case", MEASURED)
def test_the_choice_is_next_to_the_best_measured(
    hopper: Any, case: tuple[str, int, int, int]
) -> None:
    type_name, m, n, k = case
    took = {f"int8_{type_name}_{row}": us for row, us in zip(ROWS, MEASURED[case], strict=True)}
    rows = [row for row in rows_for(hopper, type_name, levers=True) if row.name in took]
    assert len(rows) == len(took)
    chosen = choose(rows, m, n, k, DEVICES["H200"]).name
    assert min(took.values()) >= OF_THE_BEST * took[chosen], chosen


@pytest.mark.parametrize("architecture", manifest()["architectures"])
def test_every_row_has_its_cycles(architecture: str) -> None:
    for kernel in library_of(architecture).family("int8"):
        if kernel.spec.tile["lever"]:
            continue
        assert shape_of(kernel) in CYCLES[int(kernel.spec.tile["sub"])]


@pytest.mark.parametrize("type_name", ["q4_k", "q6_k"])
def test_lengths_in_between(hopper: Any, type_name: str) -> None:
    """Few tokens take small tiles, many the largest that a multiprocessor holds two of."""
    rows = rows_for(hopper, type_name)
    for n, k in ((3584, 3584), (512, 3584), (18944, 3584), (3584, 18944), (576, 576)):
        chosen = {
            m: choose(rows, m, n, k, DEVICES["H200"])
            for m in (9, 16, 17, 32, 33, 64, 96, 160, 320, 512, 1000, 2048, 4096)
        }
        for m, kernel in chosen.items():
            assert int(kernel.spec.tile["bm"]) < 2 * m, (m, n, k)
            if m * n >= 1000 * 3584:
                assert shape_of(kernel) == "m64_n128_k1", (m, n, k)


@pytest.mark.parametrize("device", DEVICES)
def test_the_choice_goes_by_the_device(device: str) -> None:
    """A wave less is worth a tile that is not full: every device has its own lengths."""
    rows = rows_for(library_of(manifest()["architectures"][0]), "q4_k")
    few, many = (choose(rows, m, 3584, 3584, DEVICES[device]) for m in (9, 4096))
    assert shape_of(few) == "m16_n32_k4" and shape_of(many) == "m64_n128_k1"


def test_blocks_of_an_h200(hopper: Any) -> None:
    """Shared memory leaves room for as many as registers do, where the choice counts on it."""
    device = DEVICES["H200"]
    found = {
        row.name: device.smem_per_sm // (row.spec.smem_bytes + device.smem_reserved)
        for type_name in ("q4_k", "q6_k")
        for row in rows_for(hopper, type_name, levers=True)
    }
    assert found["int8_q4_k_m64_n128_k1_s2_b3"] == found["int8_q6_k_m64_n128_k1_s2_b3"] == 3
    assert found["int8_q4_k_m32_n32_k4_s3_b2"] == 2 and found["int8_q4_k_m16_n32_k4_s3_b3"] == 3
    assert found["int8_wide_q4_k_m128_n128_k1_s2_b2"] == 2
    assert found["int8_wide_q6_k_m128_n128_k1_s2_b2"] == 2


def test_what_does_not_fit_is_refused(hopper: Any) -> None:
    rows = rows_for(hopper, "q4_k")
    small = SimpleNamespace(sm_count=1, smem_per_sm=1 << 14, smem_reserved=1024)
    with pytest.raises(CubinError, match="16,384 B"):
        choose(rows, 512, 512, 512, small)
    assert {units(row, 65, 33) for row in rows if shape_of(row) == "m64_n32_k4"} == {4}
