"""Our attention against FlashAttention-3 and cuDNN in one process, interleaved in random order.

GPU time alone: every contestant's calls are captured into a CUDA graph. Random-normal data. A
result that is not that of FlashAttention-3 fails its case before anything is timed. burst: the
median of nine timings of 4 ms with rest before each. sustained: 0.4 s back to back, three times.
The chosen kernel and the peers run in both, other kernels of ours in burst only.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention_cases import QUICK, Case, cases, expected_seconds, findings, speedups, table
from peers import versions

from pyruntime.cubin.installed import installed_code
from pyruntime.errors import DriverNotFoundError, InputError
from pyruntime.measure.records import identity, load_record, save_record
from pyruntime.measure.telemetry import Telemetry
from pyruntime.tools.arms import require_gpu

KIND = "attention-peers"


def measure(args: argparse.Namespace, chosen: list[Case]) -> dict[str, Any]:
    """Runs the chosen cases; the record grows on disk as it goes."""
    import torch
    from attention_contest import compete
    from stopwatch import Gpu, Stopwatch

    gpu = Gpu()
    record: dict[str, Any] = identity(gpu.device, (), args.commit)
    record |= {"versions": versions("fa3-fwd"), "cases": {}, "failed": {}}
    del record["plan"]  # each case has its own
    code = installed_code(record["architecture"])
    started = time.perf_counter()
    with gpu.device.current(), Telemetry(gpu.device) as telemetry:
        watch = Stopwatch(gpu)
        for case in chosen:
            begun = time.perf_counter()
            try:
                figure = compete(gpu, watch, case, args.rows)
                record["cases"][case.name] = figure
                record["kernels"] |= {name: code[name] for name in figure["kernels"]}
                told = _told(figure)
            except Exception as error:  # the other cases' figures must not be lost
                record["failed"][case.name] = told = f"{type(error).__name__}: {error}"
            torch.cuda.empty_cache()
            now = time.perf_counter()
            elapsed = f"{now - started:6.1f} s (+{now - begun:4.1f})"
            print(f"{elapsed}  {case.name:<24} {told}", flush=True)
            save_record(args.save, KIND, record)
        watch.close()
    record["seconds"] = time.perf_counter() - started
    record["clocks"] = telemetry.record()
    save_record(args.save, KIND, record)
    return record


def _told(figure: Mapping[str, Any]) -> str:
    """The kernel, and by regime each peer's time over ours and the SM clock after ours."""
    parts = [figure["notes"]["ours"]]
    for regime, clocks in figure["mhz"].items():
        ratios = ", ".join(f"{peer} {x:.2f}x" for peer, x in speedups(figure, regime).items())
        parts.append(f"{regime} {ratios} at {statistics.median(clocks['ours']):.0f} MHz")
    return "; ".join(parts)


def choose(pattern: str | None, quick: bool) -> list[Case]:
    """The cases whose name the regular expression finds, and which are quick if that is asked."""
    return [
        case
        for case in cases()
        if re.search(pattern or "", case.name) and (not quick or case.name in QUICK)
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("attention_peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few cases only")
    parser.add_argument("--cases", metavar="REGEX", help="those whose name it finds")
    parser.add_argument("--list", action="store_true", help="only names the cases")
    parser.add_argument("--rows", action="store_true", help="every row of our kernel table, too")
    parser.add_argument("--from", dest="source", type=Path, help="show a record; measure nothing")
    parser.add_argument("--save", type=Path, default=Path("bench/results/attention.json"))
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args(argv)
    try:
        chosen = choose(args.cases, args.quick)
    except re.error as error:
        parser.error(f"--cases {args.cases}: {error}")
    if not chosen:
        parser.error(f"--cases {args.cases}: no such case; --list names all")
    if args.list:
        print("\n".join(case.name for case in chosen))
        return 0
    try:
        if args.source:
            record = load_record(args.source, KIND)
        else:
            require_gpu("attention_peers")
            print(f"{len(chosen)} cases, about {expected_seconds(chosen):.0f} s", flush=True)
            record = measure(args, chosen)
    except (DriverNotFoundError, InputError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        print(f"attention_peers: the libraries are missing: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(record)))
    return 1 if findings(record) else 0


if __name__ == "__main__":
    sys.exit(main())
