"""Products of int8 activations with packed weights: every row of the table, and the choice.

Types are Q4_K and Q6_K unless others are named. The shapes are those of a Qwen2.5-7B layer. Random
bytes as weights, which rotate over more memory than L2 holds. A figure is the median of ROUNDS
timings of LAUNCHES launches each; every raw value is kept. All rows are timed in each round, in an
order that is drawn anew, and the choice once more, as AGAIN: what it differs from itself is noise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from regimes import interleaved

from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Event, Stream
from pyruntime.measure.records import identity, save_record
from pyruntime.ops.gemm_int8 import choice, gemm_int8, rows_for
from pyruntime.ops.quantize import Plane, plane_layout
from pyruntime.reference import int8

KIND = "gemm-int8"
SHAPES = {"q, o": (3584, 3584), "k, v": (512, 3584), "gate, up": (18944, 3584),
          "down": (3584, 18944)}  # fmt: skip
LENGTHS = (64, 512, 2048)
DEFAULT = ("Q4_K", "Q6_K")
ROUNDS, LAUNCHES = 9, 4
AGAIN = "again"
ROTATED = 192 << 20  # bytes of weights
FINITE = 0x3F  # of every byte: no float is large, whatever field it belongs to


class Weights:
    """Copies of one matrix in a type."""

    def __init__(self, library: Library, name: str, n: int, k: int) -> None:
        self.library, self.name, self.shape = library, name, (n, k)
        tile = rows_for(library, name.lower())[0].spec.tile
        row = k // int(tile["block"]) * int(tile["bytes"])
        copies = max(-(-ROTATED // (n * row)), 1)
        some = np.random.default_rng(0).integers(0, 256, 1 << 22, np.uint8) & FINITE
        packed = np.resize(some, (copies * n, row))
        self.packed = DeviceArray(library.device, packed.shape, packed.dtype).upload(packed)
        self.copies = [self.packed.rows(i * n, (i + 1) * n) for i in range(copies)]

    def programs(self, m: int) -> dict[str, Program]:
        """LAUNCHES launches of every row of the table."""
        n, k = self.shape
        device, rng = self.library.device, np.random.default_rng(1)
        arrays = {}
        for part, (shape, dtype) in plane_layout(m, k).items():
            values = rng.integers(-127, 128, shape).astype(dtype)
            arrays[part] = DeviceArray(device, shape, np.dtype(dtype)).upload(values)
        c = DeviceArray(device, (m, n), np.float32).fill(0)
        rows = DeviceArray(device, (1,), np.int32).upload(np.array([m], np.int32))
        programs = {}
        for kernel in rows_for(self.library, self.name.lower(), levers=True):
            programs[kernel.name] = program = Program()
            for i in range(LAUNCHES):
                gemm_int8(
                    program, self.library, plane=Plane(**arrays),
                    w=self.copies[i % len(self.copies)], type_name=self.name, c=c, rows=rows,
                    max_rows=m, epilogue="f32", kernel=kernel,
                )  # fmt: skip
        return programs


def measure(weights: Weights, stream: Stream, m: int, rounds: int) -> dict[str, Any]:
    """Milliseconds per launch of each row, the choice, and the choice's once more."""
    programs, device = weights.programs(m), weights.library.device
    chosen = choice(weights.library, weights.name.lower(), m, *weights.shape).name
    before, after = Event(device), Event(device)

    def timed(program: Program) -> float:
        before.record(stream)
        with device.current():
            program.run(stream)
        after.record(stream)
        after.synchronize()
        return after.milliseconds_since(before) / LAUNCHES

    contestants = {**programs, AGAIN: programs[chosen]}
    raw = interleaved(contestants, timed, rounds=rounds, rest=0, warm_up=1)
    return {"choice": chosen, AGAIN: raw.pop(AGAIN), "ms": raw}


def report(name: str, shape: str, m: int, figure: dict[str, Any]) -> None:
    n, k = SHAPES[shape]
    median = {row: statistics.median(times) for row, times in figure["ms"].items()}
    ranked, chosen = sorted(median, key=lambda row: median[row]), figure["choice"]
    print(f"{name} {shape} [{n}, {k}] m={m}: {median[ranked[0]] / median[chosen]:.3f} of the best")
    for row in ranked:
        ms = median[row]
        mark = "*" if row == chosen else " "
        print(f"  {mark} {row:<36} {1e3 * ms:9.1f} us {2 * m * n * k / ms / 1e9:7.1f} TOPS")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--type", choices=int8.TYPES, action="append")
    parser.add_argument("--save", type=Path, metavar="JSON")
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args()
    device = Device(0)
    library, stream = Library(device), Stream(device)
    figures: dict[str, Any] = {}
    for name in args.type or DEFAULT:
        for shape, (n, k) in SHAPES.items():
            weights = Weights(library, name, n, k)
            for m in LENGTHS:
                figures[f"{name} {shape} {m}"] = figure = measure(weights, stream, m, args.rounds)
                report(name, shape, m, figure)
            weights.packed.close()
    if args.save:
        save_record(args.save, KIND, identity(device, (), args.commit) | {"figures": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
