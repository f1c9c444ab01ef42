"""Every row of the GEMM table on the four products of a Qwen2.5-7B layer, against the chosen row.

All engines: mma.sync, and where the device has them wgmma and stream (whose rows are left out where
a tile has not all rows of A). There also the product that rotates.

Random-normal data; weights rotate over more memory than L2 holds. A figure is the median of
ROUNDS timings of LAUNCHES launches each, rows taken in turn; every raw value is kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from pyruntime.driver.device import Device
from pyruntime.driver.library import Kernel, Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Event, Stream
from pyruntime.ops.gemm import OUTPUTS, gemm
from pyruntime.ops.gemm_choice import choose, costs
from pyruntime.ops.qkv import qkv

SHAPES = {  # name: (epilogue, n, k)
    "qkv": ("f32", 4608, 3584),
    "rotated": ("qkv", 4608, 3584),
    "o": ("add", 3584, 3584),
    "gate_up": ("swiglu", 37888, 3584),
    "down": ("add", 3584, 18944),
}
LENGTHS = (1, 64, 512, 4096)
ROUNDS, LAUNCHES = 7, 10
ROTATED = 256 << 20  # bytes of weights
HEADS, KV_HEADS, HEAD_DIM, ALIKE = 28, 4, 128, 4  # of qkv

Record = Callable[[Program, Kernel, DeviceArray], None]  # of a launch with this W


def normal(device: Device, rows: int, columns: int) -> DeviceArray:
    """Random-normal float16; one block of it repeated."""
    block = np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(np.float16)
    values = np.resize(block, (rows, columns))
    return DeviceArray(device, values.shape, values.dtype).upload(values)


def recorder(library: Library, epilogue: str, m: int, n: int, k: int) -> Record:
    """Records products of m rows of random-normal data."""
    device, a = library.device, normal(library.device, m, k)

    def array(*shape: int, dtype: str = "int32") -> DeviceArray:
        return DeviceArray(device, shape, dtype).fill(0)

    def upload(values: np.ndarray) -> DeviceArray:
        return DeviceArray(device, values.shape, values.dtype).upload(values)

    rows, overflow = upload(np.array([m], np.int32)), array(1)
    if epilogue == "qkv":
        keys, values = (array(KV_HEADS, m, HEAD_DIM, dtype="float16") for _ in "kv")
        sequence = struct.pack("<4i2Q8x", 0, m, 0, m, keys.ptr, values.ptr)
        q = array(m, HEADS * HEAD_DIM, dtype="float16")
        table = upload(np.full((m, HEAD_DIM // 2), 0.5**0.5, np.float32))
        given: dict[str, Any] = {
            "q": q, "product": q, "live": rows, "sequences": upload(np.frombuffer(sequence, "u1")),
            "sequence_of": array(m), "positions": upload(np.arange(m, dtype=np.int32)),
            "cosines": table, "sines": table, "layer": 0, "heads": HEADS,
            "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "interleaved": False, "alike": ALIKE,
            "site": 0, "eps": 0.0, "bias": array(n, dtype="float32"),
        }  # fmt: skip
        held = keys, values

        def rotate(program: Program, kernel: Kernel, w: DeviceArray) -> None:
            assert held  # the sequence points into them
            qkv(
                program, library, a=a, w=w, rows=rows, max_rows=m, overflow=overflow,
                kernel=kernel, **given,
            )  # fmt: skip

        return rotate
    c = array(m, n // 2 if epilogue == "swiglu" else n, dtype=OUTPUTS[epilogue])

    def multiply(program: Program, kernel: Kernel, w: DeviceArray) -> None:
        gemm(
            program, library, a=a, w=w, c=c, rows=rows, max_rows=m, epilogue=epilogue,
            scale=2.0**-12, overflow=overflow, kernel=kernel,
        )  # fmt: skip

    return multiply


def measure(library: Library, stream: Stream, name: str, m: int) -> dict[str, Any]:
    """Milliseconds per launch of each row, and the choice."""
    epilogue, n, k = SHAPES[name]
    device = library.device
    copies = -(-ROTATED // (2 * n * k))
    w = normal(device, copies * n, k)
    record = recorder(library, epilogue, m, n, k)
    kernels = costs(rows_of(library, epilogue), m, n, k, device)
    programs = {}
    for kernel in kernels:
        programs[kernel.name] = program = Program()
        for i in range(LAUNCHES):
            start = i % copies * n
            record(program, kernel, w.rows(start, start + n))
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
    w.close()
    return {"choice": choose(kernels, m, n, k, device).name, "ms": raw}


def rows_of(library: Library, epilogue: str) -> list[Kernel]:
    return [x for x in library.family("gemm") if x.spec.tile["epilogue"] == epilogue]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = Device(0)
    library, stream = Library(device), Stream(device)
    figures = {
        f"{name} {m}": measure(library, stream, name, m)
        for name, (epilogue, *_) in SHAPES.items()
        for m in LENGTHS
        if rows_of(library, epilogue)
    }
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
