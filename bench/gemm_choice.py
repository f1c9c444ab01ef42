"""How good the choice of a GEMM row is: every row on products that models have, on a GPU.

    python bench/gemm_choice.py --shapes fit --save fit.json
    python bench/gemm_choice.py --shapes held-out --save held-out.json
    python bench/gemm_choice.py --fit fit.json
    python bench/gemm_choice.py --judge held-out.json

Each row that can do a case is timed once. What is then within NEAR of the best, and the choice, are
timed again, rested and in turn: head to head. A timing is of launches back to back, each with
weights that are not in L2, with the GPU kept busy while the host enqueues. Random-normal data.

--fit and --judge need no GPU. The choice is that of today's constants in ops/gemm_choice.py.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gemm_fit import fit, judge
from gemm_shapes import COUNTS, LONGEST, Case, cases
from regimes import interleaved

from pyruntime.driver.device import Device
from pyruntime.driver.library import Kernel, Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.errors import DriverNotFoundError, InputError
from pyruntime.measure.inplace import HOST_MS, Hold, spans
from pyruntime.measure.records import identity, load_record, save_record
from pyruntime.measure.telemetry import Telemetry
from pyruntime.ops.gemm import GATED, OUTPUTS, gemm
from pyruntime.ops.gemm_choice import costs
from pyruntime.tools.arms import require_gpu

KIND = "gemm-choice"
NEAR = 1.08  # times the best quick timing
ROUNDS, REST = 7, 0.004  # of the timings head to head; seconds before each
LAUNCHES, LEAST, WORK_MS = 24, 3, 0.6  # most and fewest of a timing, which lasts about so long
COLD = 192 << 20  # bytes of weights after which L2 holds none of the first any more
NORMAL = (1 << 20) - 40  # random numbers, repeated all over the memory


class Arena:
    """One piece of device memory full of random-normal fp16, and what a product needs beside it."""

    def __init__(self, library: Library, chosen: Iterable[Case]) -> None:
        chosen, self._library = list(chosen), library
        weights = max(copies(case) * case.n * case.k for case in chosen)
        self._all = _normal(library.device, weights + LONGEST * max(case.k for case in chosen))
        self._out = DeviceArray(library.device, (max(map(_out_bytes, chosen)),), np.uint8).fill(0)
        self._rows, self._overflow = (DeviceArray(library.device, (1,), np.int32) for _ in range(2))

    def program(self, case: Case, row: Kernel, launches: int) -> Program:
        """The product so many times, each with other weights as far as L2 could hold them."""
        m, n, k, epilogue = case
        a = self._all.view(0, (LONGEST, k), np.float16)  # as large as a model's buffer
        out = OUTPUTS[epilogue]
        c = self._out.view(0, (m, n // 2 if epilogue in GATED else n), out)
        program = Program()
        for i in range(launches):
            at = 2 * k * (LONGEST + i % copies(case) * n)
            gemm(
                program, self._library, a=a, w=self._all.view(at, (n, k), np.float16), c=c,
                rows=self._rows, max_rows=m, epilogue=epilogue, scale=2.0**-12,
                overflow=self._overflow, kernel=row,
            )  # fmt: skip
        return program

    def live(self, m: int) -> None:
        """How many rows products have from now on."""
        self._rows.upload(np.array([m], np.int32))

    def close(self) -> None:
        """Frees everything."""
        for array in (self._all, self._out, self._rows, self._overflow):
            array.close()


def copies(case: Case) -> int:
    """Weights that launches of a case take in turn."""
    return min(-(-COLD // (2 * case.n * case.k)), LAUNCHES)


def _out_bytes(case: Case) -> int:
    width = case.n // 2 if case.epilogue in GATED else case.n
    return case.m * width * np.dtype(OUTPUTS[case.epilogue]).itemsize


def _normal(device: Device, count: int) -> DeviceArray:
    """float16 [count]; copied from itself, in ever larger pieces."""
    array = DeviceArray(device, (count,), np.float16)
    some = np.random.default_rng(0).standard_normal(min(NORMAL, count), np.float32)
    array.view(0, some.shape, np.float16).upload(some)
    stream, done = Stream(device), len(some)
    with device.current():
        while done < count:
            more = min(done, count - done)
            stream.copy_on_device(array.ptr + 2 * done, array.ptr, 2 * more)
            done += more
    stream.synchronize()
    stream.close()
    return array


def measure(args: argparse.Namespace, chosen: list[Case]) -> dict[str, Any]:
    """Runs the cases; the record is written after each tenth of them, and at the end."""
    device = Device(0)
    library, stream = Library(device), Stream(device)
    rows = library.family("gemm")
    record = identity(device, (), args.commit)
    record["kernels"] = identity_of(rows, record["architecture"])
    record |= {"rows": {row.name: facts(row) for row in rows}, "cases": [], "failed": {}}
    record["limits"] = {x: getattr(device, x) for x in ("sm_count", "smem_per_sm", "smem_reserved")}
    del record["plan"]
    started = time.perf_counter()
    with device.current(), Telemetry(device) as telemetry:
        arena, hold = Arena(library, chosen), Hold(stream)
        for done, case in enumerate(chosen, 1):
            try:
                record["cases"].append(one(arena, hold, stream, rows, case))
            except Exception as error:  # the other cases' figures must not be lost
                record["failed"][str(case)] = f"{type(error).__name__}: {error}"
            if done % -(-len(chosen) // 10) == 0:
                save_record(args.save, KIND, record)
                print(f"{time.perf_counter() - started:6.1f} s  {done} cases", flush=True)
        hold.close()
        arena.close()
    record["seconds"] = time.perf_counter() - started
    record["clocks"] = telemetry.record()
    save_record(args.save, KIND, record)
    return record


def one(
    arena: Arena, hold: Hold, stream: Stream, rows: Iterable[Kernel], case: Case
) -> dict[str, Any]:
    """The figure of a case: milliseconds of a launch, once of every row and then head to head."""
    able = [row for row in rows if row.spec.tile["epilogue"] == case.epilogue]
    cost = costs(able, case.m, case.n, case.k, stream.device)
    choice = min(cost, key=lambda row: (cost[row], row.name)).name
    expected = 0.003 + case.flop / 600e9 + 2 * case.n * case.k / 4e9  # ms
    launches = min(max(round(WORK_MS / expected), LEAST), LAUNCHES)
    arena.live(case.m)
    programs = {row.name: arena.program(case, row, launches) for row in cost}

    def timed(program: Program) -> float:
        stream.synchronize()
        hold(launches * HOST_MS + 0.1)
        (ms,) = spans(stream, [partial(program.run, stream)])
        return ms / launches

    quick = {}
    for name, program in programs.items():
        program.run(stream)
        quick[name] = timed(program)
    best = min(quick.values())
    near = {name: programs[name] for name, ms in quick.items() if ms <= NEAR * best}
    near[choice] = programs[choice]
    raw = interleaved(near, timed, rounds=ROUNDS, rest=REST, warm_up=1)
    return {"case": case, "launches": launches, "choice": choice, "quick": quick, "ms": raw}


def facts(row: Kernel) -> dict[str, Any]:
    """What the cost model asks of a row."""
    spec = row.spec
    return {
        "threads": spec.threads, "min_blocks": spec.min_blocks, "smem_bytes": spec.smem_bytes,
        "tile": spec.tile, "clusters": row.clusters,
    }  # fmt: skip


def identity_of(rows: Iterable[Kernel], architecture: str) -> dict[str, str]:
    """sha256 of the machine code of each row."""
    from pyruntime.cubin.installed import installed_code

    code = installed_code(architecture)
    return {row.name: code[row.name] for row in rows}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("gemm_choice", description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shapes", choices=tuple(COUNTS), help="time these")
    what.add_argument("--fit", type=Path, metavar="FILE", nargs="+", help="print better constants")
    what.add_argument("--judge", type=Path, metavar="FILE", help="compare choices with best rows")
    parser.add_argument("--cases", metavar="REGEX", default="", help="those whose name it finds")
    parser.add_argument("--save", type=Path, help="the record (default: bench/results/)")
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args(argv)
    args.save = args.save or Path(f"bench/results/gemm-choice-{args.shapes}.json")
    try:
        if args.fit:
            print("\n".join(fit([load_record(path, KIND) for path in args.fit])))
            return 0
        if args.judge:
            record = load_record(args.judge, KIND)
        else:
            chosen = [case for case in cases(args.shapes) if re.search(args.cases, str(case))]
            if not chosen:
                parser.error(f"--cases {args.cases}: no such case")
            require_gpu("gemm_choice")
            record = measure(args, chosen)
    except re.error as error:
        parser.error(f"--cases {args.cases}: {error}")
    except (DriverNotFoundError, InputError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    lines, passed = judge(record)
    print("\n".join(lines))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
