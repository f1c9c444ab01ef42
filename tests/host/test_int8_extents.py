"""How far int8 products reach into their arrays: formulas against a walk of all addresses.

For every type, every row of the table that is installed, and 1 to 130 rows: what `ops.extents`
says is within the arrays as they are allocated, and is to the byte what the kernels' loops
(int8_walk.py) come to.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import int8_walk as walk
import numpy as np
import pytest
from blocks import FIELDS, block_of
from compilers import cxx
from fake_driver import FakeDriver

from pyruntime.cubin.installed import manifest, root
from pyruntime.cubin.spec import read_specs
from pyruntime.driver.device import Device
from pyruntime.driver.library import Kernel, Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.ops.extents import SUMMED, plane_extents, product_extents
from pyruntime.ops.gemm_int8 import TOGETHER, gemm_int8, rows_for, units
from pyruntime.ops.gemv_int8 import gemv_int8
from pyruntime.ops.quantize import Plane, gated_quantize, norm_quantize, plane_layout, quantize
from pyruntime.ops.repack import repack

ROOT = Path(__file__).parents[2]
ROWS = range(1, 131)
NS = (16, 144, 272)
K32, K256 = (32, 96, 160, 288, 640, 1056), (256, 512, 768, 1280)
SOURCE = """
#include <cstdio>
#include "cuda/quant/operands.cuh"
#define SHOW(type)                                                                             \\
  {                                                                                            \\
    using Of = quant::Operands<quant::block_##type>;                                           \\
    std::printf("%s %d %d %d %d %d\\n", #type, Of::kRaw, Of::kHigh, Of::kHighWhole, Of::kSuper, \\
                Of::kMin == quant::Min::sums);                                                 \\
  }
int main() {
""" + "".join(f"  SHOW({name.lower()})\n" for name in FIELDS) + "}\n"  # fmt: skip


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, walk.Form]:
    """What cuda/quant/operands.cuh says of each type."""
    folder = tmp_path_factory.mktemp("forms")
    (folder / "forms.cpp").write_text(SOURCE)
    command = [cxx(), "-std=c++17", "-Wall", f"-I{ROOT}", "-o", "forms", "forms.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    lines = subprocess.run([folder / "forms"], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in lines.splitlines():
        name, raw, high, *flags = line.split()
        found[name.upper()] = walk.Form(int(raw), int(high), *(flag == "1" for flag in flags))
    return found


@cache
def installed(file: str, name: str) -> list[Kernel]:
    """The rows of a type on all architectures, those that walk alike but once."""
    found = {}
    for architecture in manifest()["architectures"]:
        for path in sorted((root() / f"sm_{architecture}").glob(f"{file}*.cubin")):
            for spec in read_specs(path.read_bytes(), path.name).values():
                if spec.tile["type"] == name.lower():
                    found[*spec.tile.items(), spec.threads] = Kernel(spec, None, 0)
    return list(found.values())


def widths(name: str) -> tuple[int, ...]:
    return K256 if block_of(name)[0] == 256 else K32


def stride_of(rows: int, k: int) -> int:
    return plane_layout(rows, k)["sums"][0][1]


def allocated(name: str, rows: int, n: int, k: int, width: int) -> dict[str, int]:
    """Bytes as `plane_layout`, the loader and the layers allocate for passes of so many rows."""
    weights, size = block_of(name)
    found = {
        part: math.prod(shape) * np.dtype(dtype).itemsize
        for part, (shape, dtype) in plane_layout(rows, k).items()
    }
    return found | {"w": n * k // weights * size, "c": rows * width * 4}


def expected(name: str, rows: int, n: int, k: int, together: int, **more: Any) -> dict[str, int]:
    weights, size = block_of(name)
    return product_extents(
        type_name=name.lower(), rows=rows, n=n, k=k, row_bytes=k // weights * size,
        together=together, itemsize=4, **more,
    )  # fmt: skip


def test_types_that_read_sums(forms: dict[str, walk.Form]) -> None:
    assert {name.lower() for name, form in forms.items() if form.sums} == SUMMED
    assert {name.lower() for name, folds in walk.FOLDS.items() if folds.sums} == SUMMED


@pytest.mark.parametrize("name", FIELDS)
def test_gemm(forms: dict[str, walk.Form], name: str) -> None:
    kernels = installed("gemm_int8", name)
    assert kernels
    for kernel in kernels:
        tile = kernel.spec.tile
        gemm = walk.Gemm(
            name, forms[name], *(int(tile[x]) for x in ("bm", "bn", "split")), kernel.spec.threads
        )
        for n in NS:
            for rows in ROWS:
                places = list(walk.tiles(gemm, rows, n, units(kernel, rows, n)))
                tokens, firsts = (frozenset(x) for x in zip(*places, strict=True))
                width, column = n + 8, 4
                for k in widths(name):
                    more = {"stride": stride_of(rows, k), "width": width, "column": column}
                    said = expected(name, rows, n, k, TOGETHER, **more)
                    walked = walk.gemm_plane(gemm, rows, k, more["stride"], tokens)
                    walked["w"] = walk.gemm_weights(gemm, n, k, firsts)
                    held = allocated(name, rows, n, k, width)
                    for array, end in walked.items():
                        assert end == said[array] <= held[array], (kernel.name, rows, n, k, array)
                end = 4 * walk.gemm_result(gemm, rows, n, width, column, places)
                assert end == said["c"] <= held["c"], (kernel.name, rows, n)


@pytest.mark.parametrize("name", FIELDS)
def test_gemm_of_more_tokens_than_a_band(forms: dict[str, walk.Form], name: str) -> None:
    """Tiles are walked band by band: all of them, once; and fewer live rows reach no further."""
    for kernel in installed("gemm_int8", name):
        tile = kernel.spec.tile
        gemm = walk.Gemm(
            name, forms[name], *(int(tile[x]) for x in ("bm", "bn", "split")), kernel.spec.threads
        )
        most, n, k = 2 * walk.BAND_ROWS + 65, 272, widths(name)[1]
        stride, grid = stride_of(most, k), units(kernel, most, n)
        for rows in (most, most - 1, walk.BAND_ROWS + 1, 1):
            places = list(walk.tiles(gemm, rows, n, grid))
            tall, wide = (range(0, x, int(tile[y])) for x, y in ((rows, "bm"), (n, "bn")))
            assert sorted(places) == [(token, row) for token in tall for row in wide]
            tokens = frozenset(token for token, _ in places)
            said = plane_extents(most, k, stride, together=TOGETHER)
            for array, end in walk.gemm_plane(gemm, rows, k, stride, tokens).items():
                assert end <= said[array]


@pytest.fixture
def library(driver: FakeDriver) -> Iterator[Library]:
    device = Device(0)
    library = Library(device)
    yield library
    library.close()
    device.close()


Maker = Callable[..., DeviceArray]


class Recorder(Program):
    """Keeps the parameters of what is added, and the grid among them."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[dict[str, Any]] = []

    def add(self, kernel: Kernel, **given: Any) -> None:
        self.launched.append(given)


@pytest.fixture
def array(library: Library) -> Maker:
    return lambda *shape, dtype="float32": DeviceArray(library.device, shape, np.dtype(dtype))


def plane_of(array: Maker, rows: int, k: int) -> Plane:
    layout = plane_layout(rows, k).items()
    return Plane(**{name: array(*shape, dtype=dtype) for name, (shape, dtype) in layout})


@pytest.mark.parametrize("name", FIELDS)
def test_gemv(library: Library, array: Maker, name: str) -> None:
    """As the launcher launches them: the grid and the split are its own."""
    weights, size = block_of(name)
    kernels = installed("gemv_int8", name)
    assert {int(kernel.spec.tile["tokens"]) for kernel in kernels} == {1, 2, 4, 8}
    for kernel in kernels:
        for n in NS:
            for k in widths(name):
                for rows in range(1, int(kernel.spec.tile["tokens"]) + 1):
                    program = Recorder()
                    width, column = n + 9, 5
                    gemv_int8(
                        program, library, plane=plane_of(array, rows, k),
                        w=array(n, k // weights * size, dtype="uint8"), type_name=name,
                        c=array(rows, width), rows=array(1, dtype="int32"), max_rows=rows,
                        epilogue="f32", column=column, kernel=kernel,
                    )  # fmt: skip
                    (launch,) = program.launched
                    walked = walk.gemv(
                        name, kernel.spec.tile, kernel.spec.threads, launch, launch["grid"], rows
                    )
                    walked["c"] *= 4
                    said = expected(
                        name, rows, n, k, 1, stride=launch["stride"], width=width, column=column
                    )
                    held = allocated(name, rows, n, k, width)
                    for x, end in walked.items():
                        assert end == said[x] <= held[x], (kernel.name, rows, n, k, x)


@pytest.mark.parametrize("k", [32, 96, 256, 3584, 4096, 8224])
def test_quantize(library: Library, array: Maker, k: int) -> None:
    """Every row of the table writes a plane to the byte, and reads all of its rows and no more."""
    for kernel in library.family("quantize"):
        tile = kernel.spec.tile
        if k > int(tile.get("held", k)):
            continue
        for rows in (1, 2, 7, 8, 9, 63, 64, 65, 130):
            program = Recorder()
            half, full = array(rows, k, dtype="float16"), array(rows, k)
            common = {
                "plane": plane_of(array, rows, k), "rows": array(1, dtype="int32"),
                "max_rows": rows, "overflow": array(1, dtype="int32"), "site": 0, "kernel": kernel,
            }  # fmt: skip
            if tile["op"] == "quantize":
                quantize(program, library, x=half, **common)
            elif tile["op"] == "gated":
                activation = str(tile["activation"])
                gated_quantize(
                    program, library, gate=half, up=half, activation=activation, **common
                )
            else:
                vector = array(k)
                joins = {"branch": full, "post": vector} if tile["op"] == "residual" else {}
                norm_quantize(program, library, x=full, weight=vector, eps=1e-6, **joins, **common)
            (launch,) = program.launched
            grid = (*launch.get("grid", ()), 1)[:3]
            walked = walk.quantize(tile, kernel.spec.threads, launch, grid, rows)
            assert walked.pop("x") == rows * k
            held = allocated("Q8_0", rows, 16, k, 16)
            for x, end in plane_extents(rows, k, launch["stride"]).items():
                assert walked[x] == end <= held[x], (kernel.name, rows, x)


@pytest.mark.parametrize("name", FIELDS)
def test_repack(library: Library, array: Maker, name: str) -> None:
    weights, size = block_of(name)
    spec = library[f"repack_{name.lower()}"].spec
    for n in NS:
        for k in widths(name):
            row_bytes = k // weights * size
            out = array(n, row_bytes, dtype="uint8")
            for first, rows in ((0, n), (0, 1), (3, 7), (n - 5, 5)):
                program = Recorder()
                source = array(rows * row_bytes, dtype="uint8")
                repack(
                    program, library, type_name=name, source=source, first=first, rows=rows, out=out
                )
                (launch,) = program.launched
                walked = walk.repack(name, spec.tile, spec.threads, launch, launch["grid"])
                assert walked["source"] == rows * row_bytes == source.nbytes
                # The last plane has each block of all rows, one after the other.
                last = (n - first - rows) * FIELDS[name][-1][1]
                assert walked["out"] == out.nbytes - last


ARRAYS = ("q", "scales", "sums", "w", "c", "rows", "overflow")


@pytest.mark.parametrize("array_name", ARRAYS)
@pytest.mark.parametrize(("operation", "rows"), [(gemm_int8, 67), (gemv_int8, 5)])
def test_an_array_that_is_too_short_is_refused_by_name(
    library: Library, array: Maker, operation: Callable[..., None], rows: int, array_name: str
) -> None:
    """By a byte. What is just long enough is taken."""
    n, k = 144, 512
    plane = plane_of(array, rows, k)
    given: dict[str, Any] = {
        "w": array(n, k // 256 * 144, dtype="uint8"), "c": array(rows, n, dtype="float16"),
        "rows": array(1, dtype="int32"), "overflow": array(1, dtype="int32"),
    }  # fmt: skip
    kernel = rows_for(library, "q4_k")[0] if operation is gemm_int8 else None
    extents = product_extents(
        type_name="q4_k", rows=rows, n=n, k=k, row_bytes=288, stride=plane.stride, width=n,
        column=0, itemsize=2, together=TOGETHER if operation is gemm_int8 else 1,
    )  # fmt: skip
    short = {**given, **vars(plane)}[array_name]

    def record() -> None:
        operation(
            Program(), library, plane=plane, type_name="Q4_K", max_rows=rows, epilogue="f16",
            kernel=kernel, **given,
        )  # fmt: skip

    short.nbytes = extents[array_name]
    record()
    short.nbytes -= 1
    said = rf"{operation.__name__}.*: {array_name} of {short.nbytes:,} bytes"
    with pytest.raises(ValueError, match=said):
        record()


def test_sums_are_not_asked_of_types_that_read_none(library: Library, array: Maker) -> None:
    plane = plane_of(array, 3, 256)
    given: dict[str, Any] = {
        "plane": plane, "c": array(3, 16), "rows": array(1, dtype="int32"), "max_rows": 3,
        "epilogue": "f32",
    }  # fmt: skip
    plane.sums.nbytes = 0
    for name in FIELDS:
        weights, size = block_of(name)
        given |= {"w": array(16, 256 // weights * size, dtype="uint8"), "type_name": name}
        if name.lower() in SUMMED:
            with pytest.raises(ValueError, match="sums of 0 bytes"):
                gemv_int8(Program(), library, **given)
        else:
            gemv_int8(Program(), library, **given)
