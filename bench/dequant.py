"""Dequantization of a Qwen2.5-7B FFN matrix, type by type: bytes read and written per second.

Every run goes through `SETS` copies in turn, several times what an L2 cache holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import numpy as np

from pyruntime.driver.device import Device
from pyruntime.driver.library import Kernel, Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.driver.timing import time_program
from pyruntime.ops.dequant import dequantize

ROWS, COLUMNS = 18944, 3584
SETS = 4


def measure(library: Library, stream: Stream, kernel: Kernel) -> dict[str, Any]:
    """Median GB/s and every raw time in ms of one matrix."""
    tile = kernel.spec.tile
    nbytes = ROWS * COLUMNS // int(tile["block"]) * int(tile["bytes"])
    # Any bits will do that make finite scales: without bit 6, no exponent is all ones.
    packed = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8) & 0xBF
    device = library.device
    overflow = DeviceArray(device, (1,), np.int32).fill(0)
    program = Program()
    for _ in range(SETS):
        dequantize(
            program,
            library,
            type_name=str(tile["type"]),
            source=DeviceArray(device, packed.shape, packed.dtype).upload(packed),
            rows=ROWS,
            columns=COLUMNS,
            out=DeviceArray(device, (ROWS, COLUMNS), np.float16),
            overflow=overflow,
            site=0,
        )
    times = [t / SETS for t in time_program(program, stream)]
    moved = nbytes + 2 * ROWS * COLUMNS
    return {"gb_per_s": moved / statistics.median(times) / 1e6, "bytes": moved, "ms": times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = Device(0)
    library, stream = Library(device), Stream(device)
    figures = {
        str(kernel.spec.tile["type"]): measure(library, stream, kernel)
        for kernel in library.family("dequant")
    }
    if args.json:
        print(json.dumps(figures))
        return 0
    for name, row in figures.items():
        print(f"{name:<8} {row['gb_per_s']:7,.0f} GB/s  {statistics.median(row['ms']):.4f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
