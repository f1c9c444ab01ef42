"""Every attention variant in whole prefills: the kernel's time in place, its share, its resources.

One engine per variant, one wall per prompt length. The record, bench/results/ladder.json, is what
docs/campaign.md shows beside the figures of bench/history.toml.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from pyruntime import Engine
from pyruntime.errors import DriverNotFoundError
from pyruntime.measure.launches import gpu_model, kernel_figures
from pyruntime.measure.records import save_record
from pyruntime.measure.roofline import roofline
from pyruntime.measure.wall import measure_wall
from pyruntime.tools.arms import require_gpu

VARIANTS = ("r46_base", "r46", "r48", "r50", "r57", "fast", "auto")
TOKENS = (512, 2048, 3325, 8192)
KEPT = ("device", "architecture", "cuda", "commit", "date", "model", "regime")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The record, written as it grows."""
    record: dict[str, Any] = {"variants": {}}
    for variant in args.variants:
        most = max(args.nt)
        with Engine.load(args.model, device="cuda:0", max_tokens=most, attention=variant) as engine:
            roof = roofline(gpu_model(engine).library)
            for nt in args.nt:
                wall = measure_wall(
                    engine, nt, roof, regime="burst", rounds=args.rounds, commit=args.commit
                )
                record |= {key: wall[key] for key in KEPT}
                found = record["variants"].setdefault(variant, {"nt": {}, "kernels": {}})
                found["nt"][str(nt)] = figures(wall)
                (attention,) = (s for s in wall["slices"] if s["role"] == "attention")
                found["kernels"] |= kernel_figures(set(attention["kernels"]), wall["architecture"])
                save_record(args.save, "ladder", record)
                print(f"{variant:<9} {nt:>5} {told(found['nt'][str(nt)])}", flush=True)
    return record


def figures(wall: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of one wall, in milliseconds."""
    (attention,) = (s for s in wall["slices"] if s["role"] == "attention")
    return {
        "attention_ms": attention["ms"] / attention["launches"],
        "share": attention["share"],
        "tflop_per_s": attention["tflop_per_s"],
        "kernels": attention["kernels"],
        "busy_ms": wall["busy_ms"],
        "wall_ms": wall["wall_ms"],
        "sm_mhz": wall["sm_mhz"],
        "failed_checks": [c["text"] for c in wall["checks"] if not c["passed"]],
    }


def told(row: dict[str, Any]) -> str:
    """One line of a terminal."""
    failed = "".join(f"  FAILED {text}" for text in row["failed_checks"])
    return (
        f"{1e3 * row['attention_ms']:9.1f} us a launch, {100 * row['share']:5.2f} % of "
        f"{statistics.median(row['busy_ms']):.3f} ms  {', '.join(row['kernels'])}{failed}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a Qwen2.5-7B shaped file")
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--nt", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path, default=Path("bench/results/ladder.json"))
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args()
    try:
        require_gpu("ladder")
    except DriverNotFoundError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    record = measure(args)
    rows = [row for v in record["variants"].values() for row in v["nt"].values()]
    return 1 if any(row["failed_checks"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
