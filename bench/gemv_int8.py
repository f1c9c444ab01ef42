"""Products of 1, 4 and 8 quantized rows with Q4_K and Q6_K matrices of Qwen2.5-7B.

    python bench/gemv_int8.py [--types Q4_K] [--save FILE]

Every row of the table for so many tokens. Bytes of weights per second: a CUDA graph of launches, as
they overlap in a generation, over copies of the weights that are more than L2 holds. A figure is
the median of ROUNDS replays, rows taken in turn; every raw value is kept.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pyruntime.driver.device import Device
from pyruntime.driver.graph import Graph
from pyruntime.driver.library import Kernel, Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Launch, Program
from pyruntime.driver.stream import Stream
from pyruntime.measure.inplace import spans
from pyruntime.measure.records import identity, save_record
from pyruntime.ops.gemv_int8 import gemv_int8
from pyruntime.ops.quantize import Plane, plane_layout

SHAPES = {  # name: (n, k)
    "k": (512, 3584),
    "q": (3584, 3584),
    "gate": (18944, 3584),
    "down": (3584, 18944),
    "output": (152064, 3584),
}
TOKENS = (1, 4, 8)
ROUNDS = 7
COLD = 256 << 20  # bytes of weights of a replay, at least
LEAST = 4  # launches of a replay


class Bench:
    """Weights of random bits, activations of ones, and the times of products of them."""

    def __init__(self) -> None:
        self.device = Device(0)
        self.library, self.stream = Library(self.device), Stream(self.device)
        largest = max(n * k for n, k in SHAPES.values()) // 256 * 210
        # Without bit 6 no exponent of a scale is all ones.
        bits = np.random.default_rng(0).integers(0, 256, 1 << 24, np.uint8) & 0xBF
        self.bits = self.array((max(largest, COLD),), np.uint8).upload(
            np.resize(bits, max(largest, COLD))
        )
        self.launches: list[Launch] = []

    def array(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        return DeviceArray(self.device, shape, dtype)

    def measure(self, kernels: list[Kernel], m: int, n: int, k: int) -> dict[str, list[float]]:
        """Milliseconds per launch of each kernel."""
        plane = Plane(**{name: self.array(*of).fill(1) for name, of in plane_layout(m, k).items()})
        rows = self.array((1,), np.int32).upload(np.array([m], np.int32))
        c = self.array((m, n), np.float32).fill(0)
        graphs, raw = {}, {kernel.name: [] for kernel in kernels}
        for kernel in kernels:
            tile, program = kernel.spec.tile, Program()
            row_bytes = k // int(tile["block"]) * int(tile["bytes"])
            copies = self.bits.nbytes // (n * row_bytes)
            count = max(-(-COLD // (n * row_bytes)), LEAST)
            # Spread over all bits, so that few launches find theirs in L2.
            for i in range(count):
                at = i * copies // count if copies >= count else i % copies
                gemv_int8(
                    program, self.library, plane=plane, kernel=kernel,
                    w=self.bits.view(at * n * row_bytes, (n, row_bytes), np.uint8),
                    type_name=str(tile["type"]), c=c, rows=rows, max_rows=m, epilogue="f32",
                )  # fmt: skip
            self.launches += program.launches[:1]
            graphs[kernel.name] = (
                program,
                Graph(self.stream, lambda program=program: program.enqueue(self.stream)),
            )
        with self.device.current():
            for round_ in range(ROUNDS + 1):
                for name, (program, graph) in graphs.items():
                    (ms,) = spans(self.stream, [lambda graph=graph: graph.launch(self.stream)])
                    if round_:  # the first warms up
                        raw[name].append(ms / len(program.launches))
        for _, graph in graphs.values():
            graph.close()
        return raw


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", default=["Q4_K", "Q6_K"])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args()
    bench, cases = Bench(), {}
    for type_name in args.types:
        for m in TOKENS:
            kernels = [
                kernel
                for kernel in bench.library.family("gemv")
                if kernel.spec.tile["type"] == type_name.lower() and kernel.spec.tile["tokens"] == m
            ]
            for name, (n, k) in SHAPES.items():
                for kernel, times in bench.measure(kernels, m, n, k).items():
                    tile = bench.library[kernel].spec.tile
                    nbytes, ms = n * k // tile["block"] * tile["bytes"], statistics.median(times)
                    figure = {"n": n, "k": k, "bytes": nbytes, "ms": times}
                    cases[f"{kernel} {name}"] = figure
                    print(
                        f"{kernel:<24} {name:<8} {1e3 * ms:7.2f} us {nbytes / ms / 1e6:7,.0f} GB/s",
                        flush=True,
                    )
    if args.save:
        record = identity(bench.device, bench.launches, args.commit) | {"cases": cases}
        save_record(args.save, "gemv-int8", record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
