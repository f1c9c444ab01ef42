"""The cost model that picks a row of the GEMM table, and what `gemm` refuses."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyruntime.cubin.installed import manifest, root
from pyruntime.cubin.spec import read_specs
from pyruntime.driver import api, tensormap
from pyruntime.driver.library import Kernel
from pyruntime.driver.program import Program
from pyruntime.errors import CubinError
from pyruntime.model.buckets import bucket
from pyruntime.ops.gemm import GATED, OUTPUTS, gemm
from pyruntime.ops.gemm_choice import (
    L2_HELD,
    SLOTS,
    at_once,
    choose,
    costs,
    invariant,
    parts,
    units,
)

# Multiprocessors, their shared memory and the reserve per block (CUDA C++ programming guide,
# technical specifications per compute capability).
DEVICES: dict[str, Any] = {
    "H200": SimpleNamespace(sm_count=132, smem_per_sm=233472, smem_reserved=1024),
    "A100": SimpleNamespace(sm_count=108, smem_per_sm=167936, smem_reserved=1024),
    "RTX 3060": SimpleNamespace(sm_count=28, smem_per_sm=102400, smem_reserved=1024),
    "one SM": SimpleNamespace(sm_count=1, smem_per_sm=102400, smem_reserved=1024),
}
LENGTHS = (1, 2, 16, 17, 64, 65, 128, 320, 512, 2048, 4096)
SHAPES = ((4608, 3584), (3584, 18944), (37888, 3584), (576, 576), (152064, 3584), (259, 64))


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    folder = root() / f"sm_{manifest()['architectures'][0]}"
    specs = read_specs((folder / "gemm.cubin").read_bytes(), "gemm.cubin").values()
    return [Kernel(spec, None, 0) for spec in specs if spec.tile["epilogue"] == "f32"]


# Clusters of so many blocks that an H200 holds at a time (cuOccupancyMaxActiveClusters).
CLUSTERS = {1: None, 2: 66, 3: 39, 4: 30}


@pytest.fixture(scope="module")
def hopper() -> list[Kernel]:
    """All engines, every epilogue."""
    if "90a" not in manifest()["architectures"]:
        pytest.skip("this build has no cubins for sm_90a")
    specs = [
        spec
        for name in ("gemm", "gemm_wgmma", "gemm_stream")
        for spec in read_specs((root() / f"sm_90a/{name}.cubin").read_bytes(), name).values()
    ]
    return [Kernel(spec, None, 0, CLUSTERS[spec.cluster]) for spec in specs]


@pytest.mark.parametrize("name", DEVICES)
def test_choice_fits_and_does_not_depend_on_order(kernels: list[Kernel], name: str) -> None:
    device = DEVICES[name]
    for n, k in SHAPES:
        for m in LENGTHS:
            chosen = choose(kernels, m, n, k, device)
            assert chosen.spec.smem_bytes + device.smem_reserved <= device.smem_per_sm
            assert choose(kernels[::-1], m, n, k, device) is chosen


def test_invariant_rows_are_of_one_engine_and_split_nothing(
    kernels: list[Kernel], hopper: list[Kernel]
) -> None:
    found = invariant(hopper)
    assert {(x.spec.tile["engine"], x.spec.tile["split"]) for x in found} == {("wgmma", 1)}
    assert {x.spec.tile["epilogue"] for x in found} == {*OUTPUTS, "qkv"}
    assert len(found) < len([x for x in hopper if x.spec.tile["engine"] == "wgmma"])
    assert invariant(kernels) == kernels and len(kernels) > 1


@pytest.mark.parametrize(
    ("epilogue", "n", "k"),
    [("qkv", 4608, 3584), ("add", 3584, 18944), ("swiglu", 37888, 3584), ("add", 896, 896),
     ("swiglu", 9728, 896)],
)  # fmt: skip
def test_a_bucket_changes_no_choice(hopper: list[Kernel], epilogue: str, n: int, k: int) -> None:
    """Of Qwen2.5's products: a length in it is run by the rows that it would have had alone."""
    rows = [kernel for kernel in hopper if kernel.spec.tile["epilogue"] == epilogue]
    lengths = (*range(1, 400), *range(401, 4097, 97))
    chosen = {m: choose(rows, m, n, k, DEVICES["H200"]) for m in lengths}
    for m, row in chosen.items():
        assert choose(rows, bucket(m, 4096), n, k, DEVICES["H200"]) is row, m
    assert len(set(chosen.values())) > 3


def test_a_row_too_large_is_never_chosen(kernels: list[Kernel]) -> None:
    small = min(kernel.spec.smem_bytes for kernel in kernels)
    device: Any = SimpleNamespace(sm_count=8, smem_per_sm=small + 1024, smem_reserved=1024)
    for m in LENGTHS:
        assert choose(kernels, m, 4608, 3584, device).spec.smem_bytes == small
    device.smem_per_sm -= 1
    with pytest.raises(CubinError, match="no gemm row fits"):
        choose(kernels, 1, 4608, 3584, device)


def test_rows_fit_the_smallest_devices(kernels: list[Kernel]) -> None:
    """99 KB per block: compute capabilities 8.6, 8.9 and 12.0."""
    assert all(kernel.spec.smem_bytes <= 99 * 1024 for kernel in kernels)


@pytest.mark.parametrize(
    ("device", "m", "n", "k", "expected"),
    [
        ("H200", 1, 4608, 3584, "gemm_f32_m16_n32_k128_s6"),
        ("H200", 1, 152064, 3584, "gemm_f32_m16_n32_k128_s6"),
        ("H200", 64, 4608, 3584, "gemm_f32_m16_n32_k128_s6"),
        ("H200", 512, 576, 576, "gemm_f32_m64_n64_k64_s4"),
        ("H200", 512, 3584, 3584, "gemm_f32_m64_n64_k64_s4"),
        ("H200", 4096, 4608, 3584, "gemm_f32_m64_n128_k64_s3"),
        ("H200", 4096, 37888, 3584, "gemm_f32_m128_n256_k32_s4"),
        ("RTX 3060", 1, 4608, 3584, "gemm_f32_m16_n32_k128_s6"),
        ("RTX 3060", 4096, 4608, 3584, "gemm_f32_m128_n256_k32_s4"),
    ],
)
def test_choices(kernels: list[Kernel], device: str, m: int, n: int, k: int, expected: str) -> None:
    assert choose(kernels, m, n, k, DEVICES[device]).name == expected


@pytest.mark.parametrize(
    ("epilogue", "m", "n", "k", "expected"),
    [
        ("f32", 1, 4608, 3584, "gemm_stream_f32_m32_n128_s10_k3"),
        ("f32", 64, 4608, 3584, "gemm_stream_f32_m64_n128_s8_k3"),
        ("f32", 1, 152064, 3584, "gemm_f32_m16_n32_k128_s6"),
        ("add", 16, 3584, 3584, "gemm_stream_add_m16_n64_s11_k2"),
        ("add", 1, 896, 4864, "gemm_stream_add_m16_n64_s11_k4"),
        ("add", 64, 3584, 18944, "gemm_stream_add_m64_n128_s8_k4"),
        ("swiglu", 1, 37888, 3584, "gemm_swiglu_m16_n32_k128_s6"),
        ("swiglu", 17, 3072, 576, "gemm_stream_swiglu_m32_n64_s9_k1"),
        ("f32", 512, 4608, 3584, "gemm_wgmma_f32_n144_s6_c1_k1"),
        ("f32", 2048, 4608, 3584, "gemm_wgmma_f32_n192_s5_c2_k1"),
        ("f32", 2048, 152064, 3584, "gemm_wgmma_f32_n256_s4_c2_k1"),
        ("add", 512, 3584, 3584, "gemm_wgmma_add_n112_s7_c1_k1"),
        ("add", 2048, 3584, 3584, "gemm_wgmma_add_n224_s5_c2_k1"),
        ("add", 512, 3584, 18944, "gemm_wgmma_add_n112_s7_c1_k1"),
        ("add", 2048, 3584, 18944, "gemm_wgmma_add_n224_s5_c2_k1"),
        ("swiglu", 128, 37888, 3584, "gemm_wgmma_swiglu_n144_s6_c1_k1"),
        ("swiglu", 512, 37888, 3584, "gemm_wgmma_swiglu_n192_s5_c2_k1"),
        ("swiglu", 2048, 37888, 3584, "gemm_wgmma_swiglu_n256_s4_c2_k1"),
        ("swiglu", 512, 9728, 896, "gemm_wgmma_swiglu_n160_s6_c1_k1"),
        ("geglu", 1, 18432, 2304, "gemm_geglu_m16_n32_k128_s6"),
        ("geglu", 2048, 28672, 3584, "gemm_wgmma_geglu_n256_s4_c2_k1"),
    ],
)
def test_choices_among_engines(
    hopper: list[Kernel], epilogue: str, m: int, n: int, k: int, expected: str
) -> None:
    rows = [x for x in hopper if x.spec.tile["epilogue"] == epilogue]
    assert choose(rows, m, n, k, DEVICES["H200"]).name == expected


@pytest.mark.parametrize(
    ("epilogue", "m", "n", "k", "expected", "shared"),
    [
        ("qkv", 320, 4608, 3584, "gemm_wgmma_qkv_n160_s6_c1_k1", 2),
        ("qkv", 2048, 4608, 3584, "gemm_wgmma_qkv_n192_s5_c2_k1", 1),
        ("qkv", 3325, 4608, 3584, "gemm_wgmma_qkv_n192_s5_c2_k1", 1),
        ("add", 256, 3584, 3584, "gemm_wgmma_add_n112_s7_c1_k1", 2),
        ("add", 3325, 3584, 3584, "gemm_wgmma_add_n240_s4_c2_k1", 1),
        ("add", 320, 3584, 18944, "gemm_wgmma_add_n256_s4_c1_k1", 3),
        ("add", 512, 3584, 18944, "gemm_wgmma_add_n224_s5_c2_k1", 2),
        ("add", 3325, 3584, 18944, "gemm_wgmma_add_n240_s4_c2_k1", 1),
        ("swiglu", 2048, 37888, 3584, "gemm_wgmma_swiglu_n256_s4_c2_k1", 1),
        ("swiglu", 3325, 37888, 3584, "gemm_wgmma_swiglu_n192_s5_c2_k1", 1),
        ("f32", 1, 4608, 3584, "gemm_stream_f32_m32_n128_s10_k3", 1),
    ],
)
def test_choices_where_units_may_be_shared(
    hopper: list[Kernel], epilogue: str, m: int, n: int, k: int, expected: str, shared: int
) -> None:
    rows = [x for x in hopper if x.spec.tile["epilogue"] == epilogue]
    chosen = choose(rows, m, n, k, DEVICES["H200"], stream_k=True)
    assert (chosen.name, parts(chosen, m, n, k, DEVICES["H200"])) == (expected, shared)


def test_sharing_is_for_less_than_a_wave(hopper: list[Kernel]) -> None:
    device, found = DEVICES["H200"], 0
    for m in (*LENGTHS, 1000, 3325):
        for n, k in SHAPES:
            plain = costs(hopper, m, n, k, device)
            both = costs(hopper, m, n, k, device, stream_k=True)
            assert plain.keys() == both.keys()
            for row, cycles in both.items():
                share = parts(row, m, n, k, device)
                assert (cycles < plain[row]) == (share > 1)
                if share == 1:
                    continue
                found += 1
                count, most = units(row.spec, m, n), at_once(row, device)
                assert row.spec.tile["engine"] == "wgmma" and row.spec.tile["split"] == 1
                assert count < most and most * row.spec.cluster <= SLOTS
                assert count * (share - 1) < most
    assert found > 100


def test_what_shares_units_reads_memory_once(hopper: list[Kernel]) -> None:
    """Where L2 does not hold the rows of A and columns of W at work, clusters read in step."""
    device, found = DEVICES["H200"], set()
    for m in (200, 512, 700, 2048, 3325):
        for row in hopper:
            count, most, k = units(row.spec, m, 3584), at_once(row, device), 18944
            assert 2 * k * min(m, 2048) + 2 * k * 3584 > L2_HELD
            if m <= int(row.spec.tile.get("share", 1)) * 128:
                continue  # no two tiles have columns of W in common
            if (share := parts(row, m, 3584, k, device)) > 1:
                assert count * share <= most
                found.add(share)
    assert found == {2, 3, 4}


def test_a_device_with_more_blocks_than_slots_shares_nothing(hopper: list[Kernel]) -> None:
    device: Any = SimpleNamespace(sm_count=SLOTS + 1, smem_per_sm=233472, smem_reserved=1024)
    rows = [x for x in hopper if x.spec.cluster == 1]
    assert {parts(x, 200, 3584, 3584, device) for x in rows} == {1}
    device.sm_count = SLOTS
    assert {parts(x, 200, 3584, 3584, device) for x in rows} > {1}


# Of Qwen2.5-7B, SmolLM2-135M and Qwen2.5-0.5B, by epilogue. Larger W flow through many small blocks
# of mma.sync as fast, or faster.
STREAMED = {
    "f32": ((4608, 3584), (960, 576), (1152, 896)),
    "add": ((3584, 3584), (3584, 18944), (576, 576), (576, 1536), (896, 896), (896, 4864)),
    **dict.fromkeys(GATED, ((3072, 576),)),
}


@pytest.mark.parametrize("epilogue", STREAMED)
def test_few_rows_are_streamed(hopper: list[Kernel], epilogue: str) -> None:
    """In one tile of A's rows, and in clusters that the device holds all at a time."""
    rows = [x for x in hopper if x.spec.tile["epilogue"] == epilogue]
    for n, k in STREAMED[epilogue]:
        for m in range(1, 17):
            chosen = choose(rows, m, n, k, DEVICES["H200"])
            tile = chosen.spec.tile
            assert tile["engine"] == "stream" and m <= int(tile["bm"])
            assert tile["split"] == 1 or units(chosen.spec, m, n) <= (chosen.clusters or 0)


@pytest.mark.parametrize("epilogue", STREAMED)
def test_stream_rows_for_all_counts_of_few(hopper: list[Kernel], epilogue: str) -> None:
    rows = [
        x.spec.tile
        for x in hopper
        if x.spec.tile["epilogue"] == epilogue and x.spec.tile["engine"] == "stream"
    ]
    assert {int(tile["bm"]) for tile in rows} == {8, 16, 32, 64}


def test_a_stream_row_is_for_one_tile(hopper: list[Kernel]) -> None:
    for m in (8, 9, 64, 65):
        left_out = {x.name for x in hopper} - {
            x.name for x in costs(hopper, m, 4608, 3584, DEVICES["H200"])
        }
        assert left_out == {
            x.name
            for x in hopper
            if x.spec.tile["engine"] == "stream" and m > int(x.spec.tile["bm"])
        }


def array(*shape: int, dtype: str = "float16", ptr: int = 256) -> Any:
    device = SimpleNamespace(current=nullcontext)
    return SimpleNamespace(shape=shape, dtype=np.dtype(dtype), ptr=ptr, device=device)


GOOD = {
    "a": array(4, 64), "w": array(48, 64), "c": array(4, 48, dtype="float32"),
    "max_rows": 4, "epilogue": "f32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epilogue": "relu"}, "epilogue 'relu'"),
        ({"a": array(4, 64, dtype="float32")}, "a is float32"),
        ({"w": array(48 * 64)}, "w is float16"),
        ({"c": array(4, 48)}, "c is float16"),
        ({"a": array(4, 60), "w": array(48, 60)}, "rows of a"),
        ({"a": array(4, 64, ptr=8)}, "a at 0x8"),
        ({"c": array(4, 48, dtype="float32", ptr=8)}, "c at 0x8"),
        ({"a": array(4, 72)}, r"a \(4, 72\) and w"),
        ({"c": array(4, 40, dtype="float32")}, r"into c \(4, 40\)"),
        ({"max_rows": 5}, "5 rows"),
        ({"max_rows": 0}, "0 rows"),
        ({"c": array(3, 48, dtype="float32")}, "4 rows"),
        ({"epilogue": "add", "w": array(42, 64), "c": array(4, 42, dtype="float32")}, "rows of c"),
        ({"epilogue": "swiglu", "w": array(40, 64), "c": array(4, 20)}, "rows of c"),
        ({"epilogue": "swiglu", "w": array(33, 64), "c": array(4, 16)}, "swiglu of a"),
        ({"epilogue": "swiglu", "c": array(4, 24)}, "swiglu needs an overflow word"),
        ({"epilogue": "geglu", "c": array(4, 24)}, "geglu needs an overflow word"),
    ],
)
def test_misfits_are_named(changed: dict[str, Any], message: str) -> None:
    library: Any = SimpleNamespace(device=DEVICES["H200"])
    with pytest.raises(ValueError, match=message):
        gemm(Program(), library, rows=256, **{**GOOD, **changed})


@pytest.mark.parametrize(("n", "ptr"), [(48, 256), (259, 4)])
def test_grid_comes_from_the_tile(kernels: list[Kernel], n: int, ptr: int) -> None:
    library: Any = SimpleNamespace(device=DEVICES["H200"])
    for kernel in kernels:
        program = Program()
        gemm(
            program, library, a=array(300, 64), w=array(n, 64),
            c=array(300, n, dtype="float32", ptr=ptr), rows=256, max_rows=290, epilogue="f32",
            kernel=kernel,
        )  # fmt: skip
        bm, bn = int(kernel.spec.tile["bm"]), int(kernel.spec.tile["bn"])
        assert program.launches[0].grid == (-(-290 // bm) * -(-n // bn), 1, 1)


class Driver:
    """The bindings' types without a driver; remembers the tensor maps that it is asked for."""

    def __init__(self) -> None:
        self.maps: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        from cuda.bindings import driver

        return getattr(driver, name)

    def cuTensorMapEncodeTiled(self, *args: Any) -> tuple[int, Any]:  # noqa: N802
        self.maps.append(args)
        return 0, self.CUtensorMap()


@pytest.mark.parametrize("rows", [1, 8, 9, 128, 129, 5000])
def test_grids_and_boxes_of_rows_with_tma(
    hopper: list[Kernel], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    library: Any = SimpleNamespace(device=DEVICES["H200"])
    driver = Driver()
    monkeypatch.setattr(api, "_driver", driver)
    n, k = 1008, 72
    rows_of_gemm = (x for x in hopper if x.spec.tile["epilogue"] in OUTPUTS)  # others: test_qkv.py
    for kernel in (x for x in rows_of_gemm if x.spec.tile["engine"] != "mma"):
        epilogue = str(kernel.spec.tile["epilogue"])
        c = array(rows, n // 2 if epilogue in GATED else n, dtype=OUTPUTS[epilogue])
        program = Program()
        driver.maps.clear()
        tensormap._encode.cache_clear()
        gemm(
            program, library, a=array(rows + 3, k), w=array(n, k), c=c,
            rows=256, max_rows=rows, epilogue=epilogue, overflow=256, kernel=kernel,
        )  # fmt: skip
        (launch,), tile = program.launches, kernel.spec.tile
        bm, bn, split, share = (int(tile.get(x, 1)) for x in ("bm", "bn", "split", "share"))
        clusters = -(-rows // (bm * share)) * -(-n // bn)
        if split == 1:  # persistent
            clusters = min(clusters, kernel.clusters or 132)
        assert launch.grid == (clusters * share * split, 1, 1)
        assert launch.config.numAttrs == (share * split > 1)
        sizes = [([int(x) for x in m[3]], [int(x) for x in m[5]]) for m in driver.maps]
        assert sizes == [([k, rows + 3], [64, bm]), ([k, n], [64, bn // share])]


def workspace(slots: int = SLOTS) -> Any:
    return SimpleNamespace(sums=array(slots, 128 * 256, dtype="float32"), raised=array(slots, 8))


@pytest.mark.parametrize("rows", [8, 129, 700, 2048])
def test_launches_that_share_units(
    hopper: list[Kernel], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """All clusters that there is work for; what says so is in the parameters."""
    library: Any = SimpleNamespace(device=DEVICES["H200"], answers={})
    monkeypatch.setattr(api, "_driver", Driver())
    n, k, found = 1008, 1024, set()
    shared_rows = [x for x in hopper if x.spec.tile["engine"] == "wgmma"]
    for kernel in shared_rows:
        epilogue, tile = str(kernel.spec.tile["epilogue"]), kernel.spec.tile
        if epilogue not in OUTPUTS:
            continue  # test_qkv.py
        for share in (None, 3):
            c = array(rows, n // 2 if epilogue in GATED else n, dtype=OUTPUTS[epilogue])
            given: Any = {
                "a": array(rows, k), "w": array(n, k), "c": c, "rows": 256, "max_rows": rows,
                "epilogue": epilogue, "overflow": 256, "kernel": kernel, "parts": share,
            }  # fmt: skip
            program, space = Program(), workspace()
            if share and tile["split"] != 1:
                with pytest.raises(ValueError, match=f"units of {kernel.name} in 3 parts"):
                    gemm(program, library, workspace=space, **given)
                continue
            packed: dict[str, Any] = {}
            with monkeypatch.context() as patch:
                patch.setattr(Kernel, "pack", lambda self, params, to=packed: keep(to, params))
                gemm(program, library, workspace=space, **given)
            expected = share or parts(kernel, rows, n, k, DEVICES["H200"])
            assert packed["parts"] == expected
            assert packed["sums"] == (space.sums if expected > 1 else 0)
            assert packed["raised"] == (space.raised if expected > 1 else 0)
            most = at_once(kernel, DEVICES["H200"]) if tile["split"] == 1 else 1 << 30
            clusters = min(units(kernel.spec, rows, n) * expected, most)
            assert program.launches[0].grid == (clusters * kernel.spec.cluster, 1, 1)
            found.add(expected)
            if share:
                for space, room in ((None, 0), (workspace(100), 100)):
                    with pytest.raises(ValueError, match=rf"1\d\d blocks .* for {room}"):
                        gemm(program, library, workspace=space, **given)
    assert {1, 3} <= found


def keep(packed: dict[str, Any], params: dict[str, Any]) -> Any:
    packed.update(params)
    return (ctypes.c_char * 1)()


def test_without_a_workspace_units_are_whole(
    hopper: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever would be faster: the row that is chosen, and how it is launched."""
    monkeypatch.setattr(api, "_driver", Driver())
    device = DEVICES["H200"]
    for stream_k in (False, True):
        library: Any = SimpleNamespace(device=device, family=lambda name: hopper, answers={})
        program, packed = Program(), {}
        with monkeypatch.context() as patch:
            patch.setattr(Kernel, "pack", lambda self, params, to=packed: keep(to, params))
            gemm(
                program, library, a=array(256, 3584), w=array(3584, 3584),
                c=array(256, 3584, dtype="float32"), rows=256, max_rows=256, epilogue="add",
                workspace=workspace() if stream_k else None,
            )  # fmt: skip
        rows = [x for x in hopper if x.spec.tile["epilogue"] == "add"]
        chosen = choose(rows, 256, 3584, 3584, device, stream_k)
        assert program.launches[0].kernel is chosen
        assert (packed["parts"] > 1) == stream_k
