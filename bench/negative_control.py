"""What shows a missing wait in the Hopper attention kernels: the race checker, or a stress test?

    python bench/negative_control.py --build FOLDER
    python bench/negative_control.py --builds FOLDER [--save FILE] [--commit ID]

The first builds the kernels as they are and with one wait taken out at a time; it needs nvcc. The
second runs each build twice: by itself, where results are compared with float64 after launches that
leave NaN in shared memory, and under compute-sanitizer's racecheck; it needs a GPU and the
sanitizer. It exits 1 if the sound build fails, or if no broken one is told from it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pyruntime.cubin.installed import root
from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.measure.records import identity, save_record
from pyruntime.ops.attention import attention
from pyruntime.ops.attention_choice import Choice
from pyruntime.ops.attention_schedule import MAPS_LAYOUT, Schedule, Workspace, key_maps

ROOT = Path(__file__).resolve().parents[1]
KERNEL = ROOT / "cuda/kernels/sm_90a/attention_wgmma.cuh"
# What is wrong then -> a text of the kernel that occurs once, and what stands there instead.
BROKEN = {
    "k-early: K is used before it has come": (
        "      wait_k();\n      begin_turn();\n      ptx::wgmma_settle(scores);\n"
        "      ptx::wgmma_settle(o);",
        "      begin_turn();\n      ptx::wgmma_settle(scores);\n      ptx::wgmma_settle(o);",
    ),
    "v-early: V is used before it has come": (
        "      wait_v();\n      issue_values();\n      end_turn();",
        "      issue_values();\n      end_turn();",
    ),
    "o-early: O leaves before it is there": (
        "      ptx::barrier_wait(at(&s.staged[stage][w]), parity);\n",
        "",
    ),
}
CHANGES: dict[str, tuple[str, str] | None] = {"sound: as it is": None, **BROKEN}
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 128
ROWS, KEYS = 700, 900


def build(folder: Path) -> None:
    """The kernels that the test launches, for sm_90a, once for each change."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    for name, change in CHANGES.items():
        with tempfile.TemporaryDirectory() as scratch:
            cuda = Path(shutil.copytree(ROOT / "cuda", Path(scratch) / "cuda"))
            source = cuda / KERNEL.relative_to(ROOT / "cuda")
            text = source.read_text()
            if change is not None and text.count(change[0]) != 1:
                raise SystemExit(f"{KERNEL.name} does not hold this once: {change[0]!r}")
            if change is not None:
                source.write_text(text.replace(*change))
            target = folder / name.split(":")[0] / "sm_90a"
            target.mkdir(parents=True)
            shutil.copy(root() / "manifest.json", target.parent)
            shutil.copy(root() / "sm_90a/schedule.cubin", target)
            command = [nvcc, "-cubin", "-std=c++17", "-O3", "-gencode"]
            command += ["arch=compute_90a,code=sm_90a", "-o", str(target / "attention_wgmma.cubin")]
            subprocess.run([*command, source.with_suffix(".cu")], check=True, capture_output=True)
        print(f"built {name}", flush=True)


def stress(launches: int) -> int:
    """Every kernel of the head dim on NaN data and on good data in turn; 1 if a result is wrong."""
    device = Device(0)
    library, stream = Library(device), Stream(device)
    rng = np.random.default_rng(0)

    def upload(values: Any) -> DeviceArray:
        return DeviceArray(device, values.shape, values.dtype).upload(values)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32).astype(np.float16)

    def case(q: Any, k: Any, v: Any, kernel: Any, pack: int) -> tuple[Program, DeviceArray, Any]:
        arrays = [upload(x) for x in (q, k, v)]
        maps = DeviceArray(device, *MAPS_LAYOUT).upload(key_maps(library, *arrays[1:]))
        table = np.zeros(1, "<4i4, <3u8")
        pointers = (arrays[1].ptr, arrays[2].ptr, maps.ptr)
        table[0] = ((0, ROWS, KEYS - ROWS, KEYS), pointers)
        live = upload(np.array([ROWS, 1, 0, 0], np.int32))
        sequences = upload(table.view(np.uint8))
        workspace = Workspace(
            library, head_dim=HEAD_DIM, heads=HEADS, max_rows=ROWS, max_sequences=1
        )
        schedule = Schedule(
            library, Choice(kernel, pack), live=live, sequences=sequences, heads=HEADS,
            kv_heads=KV_HEADS, max_rows=ROWS, max_sequences=1, workspace=workspace,
        )  # fmt: skip
        program, out = Program(), upload(np.zeros_like(q))
        schedule.record(program)
        attention(program, schedule, q=arrays[0], out=out, layer=0, scale=HEAD_DIM**-0.5)
        return program, out, (arrays, maps, live, sequences, workspace)

    q, k, v = normal(ROWS, HEADS * HEAD_DIM), *(normal(KV_HEADS, KEYS, HEAD_DIM) for _ in "kv")
    expected = _oracle(q, k, v)
    nan = [np.full_like(x, np.nan) for x in (q, k, v)]
    wrong = 0
    for kernel in library.family("attention"):
        tile = kernel.spec.tile
        if not Choice(kernel).scheduled or tile["hd"] != HEAD_DIM or tile["cap"]:
            continue
        for pack in (1, HEADS // KV_HEADS):
            good, out, kept = case(q, k, v, kernel, pack)
            bad, _, also_kept = case(*nan, kernel, pack)
            for _ in range(launches):
                with device.current():
                    bad.run(stream)
                    good.run(stream)
                    stream.synchronize()
                result = np.asarray(out).astype(np.float64)
                error = np.linalg.norm(result - expected) / np.linalg.norm(expected)
                wrong += not error < 1e-3
            del kept, also_kept
    print(f"wrong {wrong}")
    return int(wrong > 0)


def _oracle(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    by_head = q.reshape(ROWS, KV_HEADS, -1, HEAD_DIM).transpose(1, 2, 0, 3)
    scores = by_head @ k[:, None].transpose(0, 1, 3, 2) * HEAD_DIM**-0.5
    late = np.arange(KEYS) > KEYS - ROWS + np.arange(ROWS)[:, None]
    scores[..., late] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v[:, None]).transpose(2, 0, 1, 3).reshape(ROWS, -1)


def run(cubins: Path, *prefix: str, launches: int) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-P", __file__, "--stress", str(launches)]
    environment = os.environ | {"PYRUNTIME_CUBINS": str(cubins)}
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired as hung:
        output = (hung.stdout or b"").decode() if isinstance(hung.stdout, bytes) else ""
        return subprocess.CompletedProcess(command, 124, output, "")


def main() -> int:
    parser = argparse.ArgumentParser("negative_control", description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="make the builds; no GPU")
    parser.add_argument("--builds", type=Path, metavar="FOLDER", help="run them")
    parser.add_argument("--save", type=Path, default=ROOT / "bench/results/negative-control.json")
    parser.add_argument("--commit", help="recorded instead of asking git")
    parser.add_argument("--stress", type=int, metavar="LAUNCHES", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stress:
        return stress(args.stress)
    if args.build:
        build(args.build)
    if not args.builds:
        return 0
    record = identity(Device(0), (), args.commit)
    checker = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    found: dict[str, Any] = {}
    for name in CHANGES:
        cubins = args.builds / name.split(":")[0]
        alone = run(cubins, launches=20)
        checked = run(cubins, checker, "--tool", "racecheck", launches=1)
        hazards = re.search(r"RACECHECK SUMMARY: (\d+) hazard", checked.stdout + checked.stderr)
        found[name] = {
            "alone": _outcome(alone),
            "racecheck": _outcome(checked),
            "hazards": int(hazards[1]) if hazards else None,
        }
        print(f"{name:40} {found[name]}", flush=True)
        save_record(args.save, "negative-control", record | {"builds": found})
    sound, *broken = found.values()
    told = any(f["alone"] != "right" or f["hazards"] for f in broken)  # which ones: the record
    return int(sound != {"alone": "right", "racecheck": "right", "hazards": 0} or not told)


def _outcome(run: subprocess.CompletedProcess[str]) -> str:
    if run.returncode == 124:
        return "hangs"
    last = (run.stdout.strip().splitlines() or [""])[-1]
    known = re.search(r"^wrong (\d+)$", run.stdout, re.MULTILINE)
    if known is None:
        return f"fails: {(run.stderr.strip().splitlines() or [last])[-1]}"
    return f"wrong in {known[1]} launches" if int(known[1]) else "right"


if __name__ == "__main__":
    sys.exit(main())
