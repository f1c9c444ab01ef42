"""Every row of the attention table, in each packing, on the prompts of five models.

Random-normal data, one sequence, causal. A figure is the median of ROUNDS timings of LAUNCHES
launches each and of the list that they share, if they need one; rows are taken in turn and every
raw value is kept. TF counts the half of the square that causal attention needs. The chosen one is
marked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import numpy as np
from attention_launches import Prompt

from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.stream import Stream
from pyruntime.driver.timing import time_program
from pyruntime.ops.attention_choice import Choice, choose, packings

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


def label(choice: Choice) -> str:
    return choice.kernel.name + f" pack {choice.pack}" * choice.scheduled


def measure(library: Library, stream: Stream, model: tuple[int, ...], rows: int) -> dict[str, Any]:
    """Milliseconds per launch of each table row and packing, and the choice."""
    heads, kv_heads, head_dim = model
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> DeviceArray:
        values = rng.standard_normal(shape, np.float32).astype(np.float16)
        return DeviceArray(library.device, shape, np.float16).upload(values)

    q, out = (normal(rows, heads * head_dim) for _ in range(2))
    k, v = (normal(kv_heads, rows, head_dim) for _ in range(2))
    prompt = Prompt(library, stream, q=q, out=out, k=k, v=v)
    programs = {
        label(choice): prompt.program(choice, LAUNCHES)
        for kernel in library.family("attention")
        if kernel.spec.tile["hd"] == head_dim and not kernel.spec.tile.get("cap")
        for choice in packings(kernel, heads, kv_heads)
    }
    raw: dict[str, list[float]] = {name: [] for name in programs}
    for round_ in range(ROUNDS + 1):
        for name, program in programs.items():
            (ms,) = time_program(program, stream, rounds=1, warmup=0)
            if round_:  # the first warms up
                raw[name].append(ms / LAUNCHES)
    chosen = choose(
        library, head_dim=head_dim, heads=heads, kv_heads=kv_heads, max_rows=rows, max_keys=rows
    )
    return {"choice": label(chosen), "ms": raw}


def report(model: tuple[int, ...], rows: int, figure: dict[str, Any]) -> None:
    heads, kv_heads, head_dim = model
    print(f"{heads}/{kv_heads}/{head_dim} nt={rows}")
    for name, times in figure["ms"].items():
        ms = statistics.median(times)
        tf = 2 * heads * head_dim * rows * (rows + 1) / ms / 1e9
        print(f"    {name:<44} {1e3 * ms:9.1f} us {tf:7.0f} TF{' *' * (name == figure['choice'])}")


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
