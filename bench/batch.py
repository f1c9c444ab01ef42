"""Rows per second of `pyruntime batch` on the CPU, by workers, each on a core of its own.

    python bench/batch.py MODEL [--workers 1 2] [--rows 192] [--nt 128] [--save OUT] [--json]

All runs have the same prompts, random token ids, and one Ray; numbers of workers take turns, ROUNDS
times each. What is compared is the time from the first part that a run writes to its last: engines
have started by then. A part per worker is not counted, as it may have been begun before. The time
of the whole run is recorded, too, as are the machine's load before it and the cores that there are.

The exit code is 1 if two workers reach less than FLOOR times what one does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from pyruntime import Engine
from pyruntime.batch import Score, cluster, run
from pyruntime.batch.worker import Done
from pyruntime.measure.records import head_commit, save_record

ROUNDS, FLOOR = 3, 1.6
CONTINUATION = 8  # tokens that are scored of each prompt


def write_rows(path: Path, vocab: int, rows: int, nt: int) -> None:
    ids = np.random.default_rng(0).integers(0, vocab, (rows, nt)).tolist()
    with path.open("w") as file:
        for row in ids:
            halves = {"prompt": row[:-CONTINUATION], "continuation": row[-CONTINUATION:]}
            file.write(json.dumps(halves) + "\n")


def once(args: argparse.Namespace, source: Path, out: Path, workers: int) -> dict[str, Any]:
    """One run: seconds from its first part to its last, and rows that were run in between."""
    load = os.getloadavg()[0]
    times: list[float] = []

    def progress(done: Done) -> None:
        times.append(time.perf_counter())

    report = run(args.model, source, out, task=Score(), device="cpu", workers=workers,
                 part_rows=args.part_rows, progress=progress)  # fmt: skip
    return {
        "seconds": times[-1] - times[0],
        "rows": report.rows - workers * args.part_rows,
        "whole_seconds": report.seconds,
        "load_before": load,
    }


def per_second(rounds: list[dict[str, Any]]) -> float:
    return statistics.median(r["rows"] / r["seconds"] for r in rounds)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {str(n): [] for n in args.workers}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "in.jsonl")
        with Engine.load(args.model, device="cpu") as engine:
            name, path = engine.config.name, engine.path
            write_rows(source, engine.config.vocab, args.rows, args.nt)
        with cluster.connected(None, cpus=max(args.workers)):
            for turn in range(args.rounds):
                for workers in args.workers:
                    out = Path(folder, f"{turn}-{workers}")
                    runs[str(workers)].append(once(args, source, out, workers))
    return {
        "commit": args.commit or head_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": path,
        "model": name,
        "nt": args.nt,
        "rows": args.rows,
        "part_rows": args.part_rows,
        "cpus": len(os.sched_getaffinity(0)),
        "runs": runs,
        "ratios": {n: per_second(found) / per_second(next(iter(runs.values())))
                   for n, found in runs.items()},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--part-rows", type=int, default=8)
    parser.add_argument("--nt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args()
    record = measure(args)
    if args.save:
        save_record(args.save, "batch-bench", record)
    if args.json:
        print(json.dumps({"schema": "pyruntime.batch-bench/1", **record}))
    else:
        print(f"{'workers':>8}{'rows/s':>10}{'ratio':>8}{'load before':>14}")
        for n, found in record["runs"].items():
            load = statistics.median(r["load_before"] for r in found)
            print(f"{n:>8}{per_second(found):>10.1f}{record['ratios'][n]:>8.2f}{load:>14.1f}")
    missed = record["ratios"].get("2", FLOOR) < FLOOR
    if missed and not args.json:
        print(f"two workers reach less than {FLOOR} times what one does")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
