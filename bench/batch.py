"""Rows per second of `pyruntime batch` by workers, each on a GPU or a CPU core of its own.

    python bench/batch.py [MODEL] [--device cuda] [--workers 1 2] [--nt 128] [--save OUT] [--json]

All runs have the same prompts, random token ids, and one Ray; numbers of workers take turns, ROUNDS
times each: on GPUs one and as many as there are, else 1 and 2. What is compared is the time from
the first part that a run writes to its last: engines have started by then. A part per worker is not
counted, as it may have been begun before. The time of the whole run is recorded, too, as are the
machine's load before it and the cores that there are. Without MODEL a file of Qwen2.5-0.5B shapes
is made up.

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
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from pyruntime.batch import Score, cluster, run
from pyruntime.batch.worker import Done
from pyruntime.driver.device import Device, device_count
from pyruntime.gguf import GGUFFile
from pyruntime.hub import resolve
from pyruntime.measure.records import head_commit, identity, save_record
from pyruntime.model.config import ModelConfig

ROUNDS, FLOOR = 3, 1.6
CONTINUATION = 8  # tokens that are scored of each prompt
ROWS = {"cpu": (192, 8), "cuda": (32_768, 512)}  # and of a part


def write_rows(path: Path, vocab: int, rows: int, nt: int) -> None:
    ids = np.random.default_rng(0).integers(0, vocab, (rows, nt)).tolist()
    with path.open("w") as file:
        for row in ids:
            halves = {"prompt": row[:-CONTINUATION], "continuation": row[-CONTINUATION:]}
            file.write(json.dumps(halves) + "\n")


def once(args: argparse.Namespace, source: Path, out: Path, workers: int) -> dict[str, Any]:
    """One run: seconds from its first part to its last, and what was run in between."""
    load = os.getloadavg()[0]
    found: list[tuple[float, Done]] = []

    def progress(done: Done) -> None:
        found.append((time.perf_counter(), done))

    report = run(args.model, source, out, task=Score(), device=args.device, workers=workers,
                 part_rows=args.part_rows, progress=progress)  # fmt: skip
    counted = [done for _, done in found[workers:]]
    return {
        "seconds": found[-1][0] - found[0][0],
        "rows": sum(done.rows for done in counted),
        "tokens": sum(done.tokens for done in counted),
        "whole_seconds": report.seconds,
        "load_before": load,
        "device": report.device,
    }


def per_second(rounds: list[dict[str, Any]], what: str = "rows") -> float:
    return statistics.median(r[what] / r["seconds"] for r in rounds)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {str(n): [] for n in args.workers}
    gpus = device_count() if args.device == "cuda" else 0
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            args.model = made_up(Path(folder, "qwen2.5-0.5b.gguf"))
        with GGUFFile.open(resolve(args.model)) as file:
            config = ModelConfig.from_gguf(file)
        source = Path(folder, "in.jsonl")
        write_rows(source, config.vocab, args.rows, args.nt)
        with cluster.connected(None, cpus=max(args.workers), gpus=gpus):
            for turn in range(args.rounds):
                for workers in args.workers:
                    out = Path(folder, f"{turn}-{workers}")
                    runs[str(workers)].append(once(args, source, out, workers))
    return {
        **about(args),
        "device": next(iter(runs.values()))[0]["device"],
        "model": config.name,
        "nt": args.nt,
        "rows": args.rows,
        "part_rows": args.part_rows,
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "runs": runs,
        "ratios": {n: per_second(found) / per_second(next(iter(runs.values())))
                   for n, found in runs.items()},
    }  # fmt: skip


def made_up(path: Path) -> str:
    from pyruntime.tools.synth import main as synth

    with redirect_stdout(sys.stderr):
        synth([path.stem, str(path)])
    return str(path)


def about(args: argparse.Namespace) -> dict[str, Any]:
    if args.device == "cuda":
        device = Device(0)
        try:
            return identity(device, (), args.commit)
        finally:
            device.close()
    return {
        "commit": args.commit or head_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--device", choices=list(ROWS), default="cpu")
    parser.add_argument("--workers", type=int, nargs="+")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--part-rows", type=int)
    parser.add_argument("--nt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args()
    if args.workers is None:
        args.workers = sorted({1, device_count() if args.device == "cuda" else 2})
    rows, part_rows = ROWS[args.device]
    args.rows, args.part_rows = args.rows or rows, args.part_rows or part_rows
    record = measure(args)
    if args.save:
        save_record(args.save, "batch-bench", record)
    if args.json:
        print(json.dumps({"schema": "pyruntime.batch-bench/1", **record}))
    else:
        print(f"{record['model']} on {record['device']}")
        print(f"{'workers':>8}{'rows/s':>10}{'tok/s':>12}{'ratio':>8}{'load before':>14}")
        for n, found in record["runs"].items():
            load = statistics.median(r["load_before"] for r in found)
            rows, tokens = per_second(found), per_second(found, "tokens")
            print(f"{n:>8}{rows:>10.1f}{tokens:>12,.0f}{record['ratios'][n]:>8.2f}{load:>14.1f}")
    missed = record["ratios"].get("2", FLOOR) < FLOOR
    if missed and not args.json:
        print(f"two workers reach less than {FLOOR} times what one does")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
