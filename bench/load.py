"""Loading a model onto a GPU: seconds by readers, slots and slot size, and where they go.

    python bench/load.py FILE [--readers 4 8 16] [--slots 16 24] [--mib 2 4 8] [--save OUT]

The first load of the process, before all others, makes the CUDA context and brings the file into
the page cache; it is reported apart. Then every combination is loaded in each round, and the
fastest ROUNDS times more with a stopwatch on its steps and on the driver's functions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from threading import RLock
from typing import Any
from unittest.mock import patch

from pyruntime import Engine
from pyruntime.cubin.installed import installed_code
from pyruntime.driver import api
from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.gguf import GGUFFile
from pyruntime.measure.records import identity, save_record
from pyruntime.model import loader
from pyruntime.model.config import ModelConfig
from pyruntime.model.decoder import Decoder
from pyruntime.model.weights import Weights
from pyruntime.text.tokenizer import Tokenizer

ROUNDS = 5
STEPS = {  # the whole, its steps one after the other, and what an engine does when asked
    "load": (Engine, "load"),
    "header": (GGUFFile, "open"),
    "config": (ModelConfig, "from_gguf"),
    "library": (Library, "__init__"),
    "weights": (Weights, "__init__"),
    "decoder": (Decoder, "__init__"),
    "rotary tables": (Decoder, "reserve_positions"),
    "recording": (Decoder, "recorded"),
    "tokenizer": (Tokenizer, "from_metadata"),
}
PARTS = {  # of these, in any thread
    "file.read_into": (GGUFFile, "read_into"),
    "file.dequantize": (GGUFFile, "dequantize"),
    "array.upload": (DeviceArray, "upload"),
    "record dequantize": (loader, "dequantize"),
    "program.run": (Program, "run"),
    "driver": (api, "call"),  # by function
    "driver's things": (api, "make"),  # likewise
}
Setting = tuple[int, int, int]  # readers, slots, MiB of a slot
Spent = dict[str, tuple[int, float]]  # label: calls, seconds of all threads together


@contextmanager
def stopwatch() -> Iterator[Spent]:
    """Counts and times what STEPS and PARTS name, in a `with` block."""
    spent: Spent = defaultdict(lambda: (0, 0.0))
    lock = RLock()  # a finalizer may come in the middle, and calls the driver

    def timed(label: str, owner: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                seconds = time.perf_counter() - began
                key = args[0] if owner is api else label
                with lock:
                    spent[key] = spent[key][0] + 1, spent[key][1] + seconds

        return run

    with ExitStack() as patches:
        for label, (owner, name) in (STEPS | PARTS).items():
            run: Any = timed(label, owner, getattr(owner, name))
            if isinstance(vars(owner)[name], classmethod):
                run = staticmethod(run)
            patches.enter_context(patch.object(owner, name, run))
        yield spent


def load(path: Path, setting: Setting) -> tuple[float, list[str]]:
    """Seconds to load, and the kernels that ran."""
    loader.READERS, loader.SLOTS = setting[:2]
    loader.SLOT_BYTES = setting[2] << 20
    began = time.perf_counter()
    with Engine.load(path, device="cuda:0") as engine:
        return time.perf_counter() - began, list(engine.launches())


def breakdown(path: Path, rounds: int) -> dict[str, Any]:
    """Calls and milliseconds of each round by label, of the setting that was loaded last."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        with stopwatch() as spent:
            engine = Engine.load(path, device="cuda:0")
            if engine.has_vocabulary:
                _ = engine.tokenizer
        engine.close()
        for label, (calls, seconds) in spent.items():
            row = found.setdefault(label, {"calls": calls, "ms": []})
            row["ms"].append(1e3 * seconds)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--readers", type=int, nargs="+", default=[loader.READERS])
    parser.add_argument("--slots", type=int, nargs="+", default=[loader.SLOTS])
    parser.add_argument("--mib", type=int, nargs="+", default=[loader.SLOT_BYTES >> 20])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--commit", help="recorded instead of asking git")
    args = parser.parse_args()
    settings: list[Setting] = list(product(args.readers, args.slots, args.mib))
    first, kernels = load(args.file, settings[0])
    device = Device(0)  # keeps the context
    seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for _ in range(args.rounds):
        for setting in settings:
            seconds[setting].append(load(args.file, setting)[0])
    best = min(settings, key=lambda setting: statistics.median(seconds[setting]))
    load(args.file, best)
    record = identity(device, (), args.commit)
    code = installed_code(record["architecture"])
    record |= {
        "kernels": {name: code[name] for name in sorted(kernels)},
        "file": args.file.name,
        "file_bytes": args.file.stat().st_size,
        "cpus": len(os.sched_getaffinity(0)),
        "first_seconds": first,
        "settings": [named(setting) | {"seconds": seconds[setting]} for setting in settings],
        "fastest": named(best),
        "breakdown": breakdown(args.file, args.rounds),
    }
    device.close()
    if args.save:
        save_record(args.save, "load", record)
    if args.json:
        print(json.dumps(record))
    else:
        report(record)
    return 0


def named(setting: Setting) -> dict[str, Any]:
    return dict(zip(("readers", "slots", "mib"), setting, strict=True))


def report(record: dict[str, Any]) -> None:
    nbytes = record["file_bytes"]
    print(f"{record['file']}: {nbytes:,} bytes, {record['device']}, {record['cpus']} cores")
    print(f"first load, with imports and context: {record['first_seconds']:.3f} s")
    print("readers slots  MiB       ms    least   GB/s")
    for row in record["settings"]:
        median, least = statistics.median(row["seconds"]), min(row["seconds"])
        print(
            f"{row['readers']:>7}{row['slots']:>6}{row['mib']:>5}{1e3 * median:>9.1f}"
            f"{1e3 * least:>9.1f}{nbytes / median / 1e9:>7.1f}"
        )
    print("fastest:", ", ".join(f"{value} {name}" for name, value in record["fastest"].items()))
    rows = record["breakdown"]
    median = {label: statistics.median(row["ms"]) for label, row in rows.items()}
    within = sorted(rows.keys() - STEPS.keys(), key=lambda label: -median[label])
    for title, labels in (("step", STEPS), ("within, all threads together", within)):
        print(f"{title:<30}calls       ms")
        for label in labels:
            if label in rows:
                print(f"  {label:<28}{rows[label]['calls']:>5}{median[label]:>9.2f}")


if __name__ == "__main__":
    sys.exit(main())
