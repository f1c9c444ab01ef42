"""Checks this tree on a GPU and records what was run: tests, sanitizers, benchmarks.

    python tools/device_check.py [--part tests|sanitizers|bench] [--commit ID] [--smollm2 FILE]
    python tools/device_check.py --stale

The record, bench/results/device.json, is keyed to the machine code that ran: the sha256 of each
kernel's `.text`. `--stale` compares those with what the sources compile to now (it compiles only if
a file under cuda/ has changed) and exits 1 naming the kernels that have to be run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "bench/results/device.json"
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
BENCHES = ("dequant", "gemm", "attention", "prefill")
# They time what is short, or watch the device's free memory.
ALONE = ("test_banks", "test_clock", "test_driver", "test_graphs", "test_measure", "test_overlap")
SIDE_BY_SIDE = 6
BLAS_THREADS = 3  # of each: reference results are computed on the CPU
SANITIZED = "gpu and smoke"  # the tests that run under the sanitizers


def main(argv: list[str] | None = None) -> int:
    """Runs the parts asked for (all by default); 0 if everything passed."""
    parser = argparse.ArgumentParser("device_check", description="check this tree on a GPU")
    parser.add_argument("--part", choices=("tests", "sanitizers", "bench"), action="append")
    parser.add_argument("--stale", action="store_true", help="is the record that of these sources?")
    parser.add_argument("--commit", help="recorded instead of asking git")
    parser.add_argument(
        "--smollm2", type=Path, help="SmolLM2's GGUF file, for its tests and figures"
    )
    args = parser.parse_args(argv)
    if args.stale:
        return _stale()
    if args.smollm2:
        os.environ["PYRUNTIME_TEST_SMOLLM2"] = str(args.smollm2.resolve())
    os.environ["OPENBLAS_NUM_THREADS"] = str(BLAS_THREADS)
    record = _identity(args.commit)
    parts = {"tests": _tests, "sanitizers": _sanitizers, "bench": _bench}
    passed = True
    for name in args.part or list(parts):
        started = time.perf_counter()
        result = parts[name]()
        result["seconds"] = round(time.perf_counter() - started, 1)
        result |= {key: record[key] for key in ("commit", "date", "host")}
        passed &= bool(result["passed"])
        _merge(record, name, result)
        print(f"{name}: {'passed' if result['passed'] else 'FAILED'} in {result['seconds']} s")
    return 0 if passed else 1


def _merge(identity: dict[str, Any], part: str, result: dict[str, Any]) -> None:
    """Writes one part's result; parts of other machine code are dropped, not mixed in.

    Each part says of which commit and host code it is.
    """
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if record.get("kernels") != identity["kernels"]:
        record = {}
    record = {**record, **identity, part: result}
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def _identity(commit: str | None) -> dict[str, Any]:
    from pyruntime.cubin.installed import cubins_for, installed_code
    from pyruntime.driver.device import Device, driver_version
    from pyruntime.measure.records import head_commit

    device = Device(0)
    architecture = next(iter(cubins_for(device.compute_capability, device.name))).parent.name
    identity = {
        "schema": "pyruntime.device/1",
        "commit": commit or head_commit(ROOT) or "unknown",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device.name,
        "driver": driver_version(),
        "architecture": architecture,
        "sources": _tree_hash("cuda"),
        "host": _tree_hash("pyruntime"),
        "kernels": installed_code(architecture),
    }
    device.close()
    return identity


def _tree_hash(folder: str) -> str:
    """sha256 over the paths and contents of the source files of a folder."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / folder).rglob("*")):
        if path.is_file() and path.suffix in (".py", ".cu", ".cuh", ".def"):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _pytest(
    marker: str, *where: Path, prefix: tuple[str, ...] = (), timeout: int
) -> dict[str, Any]:
    command = [
        *prefix, sys.executable, "-P", "-m", "pytest", "-q", "-m", marker, "-p", "no:cacheprovider",
        "--timeout", str(timeout), *map(str, where),
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True, check=False)  # fmt: skip
    print(run.stdout, flush=True)
    # pytest's closing line; a sanitizer's summary may follow it.
    closing = re.findall(
        r"^.*\b(?:passed|failed|error)\b.* in [\d.]+s.*$", run.stdout, re.MULTILINE
    )
    words = re.findall(r"(\d+) (passed|failed|skipped|errors?)", closing[-1] if closing else "")
    counts = {word: int(n) for n, word in words}
    return {
        "passed": run.returncode == 0 and counts.get("passed", 0) > 0,
        "counts": counts,
        "failures": re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE),
        "output": run.stdout,
    }


def _tests() -> dict[str, Any]:
    """All GPU tests: files side by side, but those that mind company one by one, at the end."""
    files = sorted((ROOT / "tests/gpu").glob("test_*.py"))
    alone = [file for file in files if file.stem in ALONE]
    together = sorted(set(files) - set(alone), key=lambda file: -file.stat().st_size)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        runs = list(pool.map(lambda file: _pytest("gpu", file, timeout=300), together))
    runs += [_pytest("gpu", file, timeout=300) for file in alone]
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run["counts"])
    return {
        "passed": all(run["passed"] for run in runs),
        "counts": dict(counts),
        "failures": [failure for run in runs for failure in run["failures"]],
    }


def _sanitizers() -> dict[str, Any]:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        print("compute-sanitizer is not installed", file=sys.stderr)
        return {"passed": False, "missing": "compute-sanitizer"}
    with ThreadPoolExecutor(len(SANITIZERS)) as pool:
        runs = pool.map(lambda name: _sanitizer(tool, name), SANITIZERS)
        results = dict(zip(SANITIZERS, runs, strict=True))
    return {"passed": all(r["passed"] for r in results.values()), **results}


def _sanitizer(tool: str, name: str) -> dict[str, Any]:
    options = ["--tool", name, "--error-exitcode", "86", "--launch-timeout", "0"]
    if name == "memcheck":
        options += ["--padding", "64"]
    run = _pytest(SANITIZED, ROOT / "tests/gpu", prefix=(tool, *options), timeout=480)
    found = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", run["output"])
    del run["output"]
    run["findings"] = int(found[1] or found[2]) if found else None
    run["passed"] &= run["findings"] == 0
    print(f"{name}: {run['findings']} findings, {run['counts']}", flush=True)
    return run


def _bench() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    passed = True
    for name in BENCHES:
        run = subprocess.run(
            [sys.executable, f"bench/{name}.py", "--json"], cwd=ROOT, stdout=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
        passed &= run.returncode == 0
        figures[name] = json.loads(run.stdout) if run.returncode == 0 else None
    return {"passed": passed, "figures": figures}


def _stale() -> int:
    if not RECORD.exists():
        print(f"{RECORD.relative_to(ROOT)} does not exist: nothing was ever run on a GPU")
        return 1
    record = json.loads(RECORD.read_text())
    if record["host"] != _tree_hash("pyruntime"):
        print("note: files under pyruntime/ have changed since the record")
    if record["sources"] == _tree_hash("cuda"):
        print(f"the record is that of these kernels ({len(record['kernels'])})")
        return 0
    current = _compile(record["architecture"].removeprefix("sm_"))
    recorded = record["kernels"]
    changed = sorted(n for n in current if recorded.get(n) != current[n])
    gone = sorted(recorded.keys() - current.keys())
    if not changed and not gone:
        print("sources under cuda/ have changed, the machine code has not")
        return 0
    print(
        f"to run again on a GPU: {', '.join(changed) or 'none'}; gone: {', '.join(gone) or 'none'}"
    )
    return 1


def _compile(arch: str) -> dict[str, str]:
    """Machine code hashes of the current sources."""
    sys.path.append(str(ROOT))  # reading cubins needs nothing that has to be installed first
    from pyruntime.cubin.installed import code_hashes

    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise SystemExit("no nvcc on PATH or in /usr/local/cuda: the sources cannot be compared")
    hashes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        kernels = ROOT / "cuda/kernels"
        for source in sorted([*kernels.glob("*.cu"), *kernels.glob(f"sm_{arch}/*.cu")]):
            cubin = Path(folder, f"{source.stem}.cubin")
            target = f"arch=compute_{arch},code=sm_{arch}"
            command = [nvcc, "-cubin", "-std=c++17", "-O3", "-gencode", target]
            command += ["-o", str(cubin), str(source)]
            jobs.append((cubin, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
        for cubin, job in jobs:
            errors = job.communicate()[1]
            if job.returncode:
                raise SystemExit(f"{nvcc} failed on {cubin.stem}.cu:\n{errors}")
            hashes |= code_hashes(cubin.read_bytes(), cubin.name)
    return hashes


if __name__ == "__main__":
    sys.exit(main())
