"""Every row of the GEMM table on the four products of a Qwen2.5-7B layer, against the chosen row.

All engines: mma.sync, and where the device has them wgmma and stream (whose rows are left out where
a tile has not all rows of A).

Random-normal data; weights rotate over more memory than L2 holds. A figure is the median of
ROUNDS timings of LAUNCHES launches each, rows taken in turn; every raw value is kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import numpy as np

from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Event, Stream
from pyruntime.ops.gemm import OUTPUTS, gemm
from pyruntime.ops.gemm_choice import choose, costs

SHAPES = {  # name: (epilogue, n, k)
    "qkv": ("f32", 4608, 3584),
    "o": ("add", 3584, 3584),
    "gate_up": ("swiglu", 37888, 3584),
    "down": ("add", 3584, 18944),
}
LENGTHS = (1, 16, 64, 128, 512, 2048, 4096, 8192)
ROUNDS, LAUNCHES = 7, 10
ROTATED = 256 << 20  # bytes of weights


def normal(device: Device, rows: int, columns: int) -> DeviceArray:
    """Random-normal float16; one block of it repeated."""
    block = np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(np.float16)
    values = np.resize(block, (rows, columns))
    return DeviceArray(device, values.shape, values.dtype).upload(values)


def measure(library: Library, stream: Stream, name: str, m: int) -> dict[str, Any]:
    """Milliseconds per launch of each row, and the choice."""
    epilogue, n, k = SHAPES[name]
    device = library.device
    copies = -(-ROTATED // (2 * n * k))
    w = normal(device, copies * n, k)
    c = DeviceArray(device, (m, n // 2 if epilogue == "swiglu" else n), OUTPUTS[epilogue]).fill(0)
    rows, overflow = (DeviceArray(device, (1,), np.int32) for _ in range(2))
    rows.upload(np.array([m], np.int32))
    a = normal(device, m, k)
    found = [x for x in library.family("gemm") if x.spec.tile["epilogue"] == epilogue]
    kernels = costs(found, m, n, k, device)
    programs = {}
    for kernel in kernels:
        programs[kernel.name] = program = Program()
        for i in range(LAUNCHES):
            start = i % copies * n
            gemm(
                program, library, a=a, w=w.rows(start, start + n), c=c, rows=rows, max_rows=m,
                epilogue=epilogue, scale=2.0**-12, overflow=overflow, kernel=kernel,
            )  # fmt: skip
    raw: dict[str, list[float]] = {x: [] for x in programs}
    before, after = Event(device), Event(device)
    for round_ in range(ROUNDS + 1):
        for row, program in programs.items():
            before.record(stream)
            with device.current():
                program.run(stream)
            after.record(stream)
            after.synchronize()
            if round_:  # the first warms up
                raw[row].append(after.milliseconds_since(before) / LAUNCHES)
    for array in (a, w, c):
        array.close()
    return {"choice": choose(kernels, m, n, k, device).name, "ms": raw}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = Device(0)
    library, stream = Library(device), Stream(device)
    figures = {f"{x} {m}": measure(library, stream, x, m) for x in SHAPES for m in LENGTHS}
    if args.json:
        print(json.dumps(figures))
    else:
        for case, figure in figures.items():
            report(case, figure)
    return 0


def report(case: str, figure: dict[str, Any]) -> None:
    name, m = case.split()
    _, n, k = SHAPES[name]
    median = {row: statistics.median(times) for row, times in figure["ms"].items()}
    ranked, choice = sorted(median, key=lambda row: median[row]), figure["choice"]
    print(
        f"{name} m={m}: chose {choice}, {2 * int(m) * n * k / median[choice] / 1e9:.0f} TF, "
        f"{2 * n * k / median[choice] / 1e6:,.0f} GB/s of weights, "
        f"{median[ranked[0]] / median[choice]:.3f} of {ranked[0]}"
    )
    for row in ranked:
        ms = median[row]
        print(f"    {row:<32} {1e3 * ms:9.1f} us {2 * int(m) * n * k / ms / 1e9:7.0f} TF")


if __name__ == "__main__":
    sys.exit(main())
