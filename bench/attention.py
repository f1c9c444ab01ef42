"""Every row of the attention table on the prompts of five models, against the chosen row.

Random-normal data, one sequence, causal. A figure is the median of ROUNDS timings of LAUNCHES
launches each, rows taken in turn; every raw value is kept. TF counts the half of the square that
causal attention needs.
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
from pyruntime.driver.stream import Stream
from pyruntime.driver.timing import time_program
from pyruntime.model.live import LiveBlock
from pyruntime.ops.attention import attention, choose

# heads, K/V heads, head dim
MODELS = ((28, 4, 128), (32, 8, 64), (9, 3, 64), (32, 32, 96), (16, 8, 256))
LENGTHS = (128, 512, 2048, 3325, 8192)
ROUNDS, LAUNCHES = 7, 10


def resources(library: Library) -> dict[str, dict[str, Any]]:
    """What each row asks of an SM, and how many of its blocks the driver puts on one."""
    return {
        kernel.name: {
            "variant": kernel.spec.tile["variant"],
            "threads": kernel.spec.threads,
            "registers": kernel.registers,
            "shared_bytes": kernel.spec.smem_bytes,
            "blocks_per_sm": library.blocks_per_sm(kernel),
        }
        for kernel in library.family("attention")
    }


def measure(library: Library, stream: Stream, model: tuple[int, ...], rows: int) -> dict[str, Any]:
    """Milliseconds per launch of each table row, and the choice."""
    heads, kv_heads, head_dim = model
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> DeviceArray:
        values = rng.standard_normal(shape, np.float32).astype(np.float16)
        return DeviceArray(library.device, shape, np.float16).upload(values)

    q, out = (normal(rows, heads * head_dim) for _ in range(2))
    k, v = (normal(kv_heads, rows, head_dim) for _ in range(2))
    block, ids = LiveBlock(library.device, rows), np.zeros(rows, np.int32)
    with library.device.current():
        block.upload(stream, ids, start=0, capacity=rows, k=k, v=v, wanted=ids[:1])
    programs = {}
    for kernel in library.family("attention"):
        if kernel.spec.tile["hd"] == head_dim and not kernel.spec.tile.get("cap"):
            programs[kernel.name] = program = Program()
            for _ in range(LAUNCHES):
                attention(
                    program, library, q=q, out=out, live=block.live, sequences=block.sequences,
                    max_rows=rows, max_sequences=1, layer=0, heads=heads, kv_heads=kv_heads,
                    scale=head_dim**-0.5, kernel=kernel,
                )  # fmt: skip
    raw: dict[str, list[float]] = {name: [] for name in programs}
    for round_ in range(ROUNDS + 1):
        for name, program in programs.items():
            (ms,) = time_program(program, stream, rounds=1, warmup=0)
            if round_:  # the first warms up
                raw[name].append(ms / LAUNCHES)
    return {"choice": choose(library, head_dim, rows, heads).name, "ms": raw}


def report(model: tuple[int, ...], rows: int, figure: dict[str, Any]) -> None:
    heads, kv_heads, head_dim = model
    print(f"{heads}/{kv_heads}/{head_dim} nt={rows}")
    for name, times in figure["ms"].items():
        ms = statistics.median(times)
        tf = 2 * heads * head_dim * rows * (rows + 1) / ms / 1e9
        print(f"    {name:<40} {1e3 * ms:9.1f} us {tf:7.0f} TF{' *' * (name == figure['choice'])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = Device(0)
    library, stream = Library(device), Stream(device)
    kernels, cases = resources(library), {}
    if not args.json:
        for name, r in kernels.items():
            print(
                f"{name:<40} {r['threads']} threads, {r['registers']} registers, "
                f"{r['shared_bytes']:,} B, {r['blocks_per_sm']} blocks/SM"
            )
    for model in MODELS:
        for rows in LENGTHS:
            figure = measure(library, stream, model, rows)
            cases["/".join(map(str, model)) + f" {rows}"] = figure
            if not args.json:
                report(model, rows, figure)
    if args.json:
        print(json.dumps({"kernels": kernels, "cases": cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
