"""Machine code to instructions, by NVIDIA's nvdisasm (extra `sass`)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from pyruntime.cubin.facts import KernelFacts
from pyruntime.cubin.sass import INSTRUCTION_BYTES, Instruction
from pyruntime.errors import ToolError

_TIMEOUT = 600  # seconds; 10 MB of code take about 15
_TARGET = re.compile(r"0x[0-9a-f]+$")


@cache
def find() -> Path:
    """Where nvdisasm is.

    Raises:
        ToolError: nowhere; the text lists where it was looked for.
    """
    looked = []
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        found = find_nvidia_binary_utility("nvdisasm")
        looked.append("the wheel nvidia-cuda-nvdisasm")
    except ImportError:
        found = None
        looked.append("not in wheels (cuda-pathfinder is missing)")
    for name in ("CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH"):
        folder = os.environ.get(name)
        looked.append(f"{name} ({folder or 'not set'})")
        found = found or (folder and shutil.which("nvdisasm", path=f"{folder}/bin"))
    looked.append("PATH")
    found = found or shutil.which("nvdisasm")
    if not found:
        raise ToolError(
            f"nvdisasm was not found; looked in {', '.join(looked)}. "
            "pip install 'pyruntime-cuda[sass]' brings it"
        )
    return Path(found)


def disassemble(kernels: Iterable[KernelFacts]) -> list[tuple[Instruction, ...]]:
    """The instructions of each kernel, device functions that were not inlined at its end.

    Raises:
        ToolError: nvdisasm is not there, is too old for JSON, or does not know the architecture.
    """
    asked = list(kernels)
    found: dict[int, tuple[Instruction, ...]] = {}
    groups: dict[str, list[tuple[int, bytes]]] = {}
    for index, kernel in enumerate(asked):
        groups.setdefault(kernel.arch, []).append((index, kernel.code))
    # One run for all of an architecture, as starting the program costs more than its work, and
    # architectures side by side.
    codes = [b"".join(code for _, code in group) for group in groups.values()]
    with ThreadPoolExecutor() as pool:
        listings = list(pool.map(_run, groups, codes))
    for group, listing in zip(groups.values(), listings, strict=True):
        at = 0
        for index, code in group:
            count = len(code) // INSTRUCTION_BYTES
            found[index] = tuple(_instructions(listing[at : at + count], code, at))
            at += count
    return [found[index] for index in range(len(asked))]


def _run(arch: str, code: bytes) -> list[dict[str, Any]]:
    if not code:
        return []
    tool = find()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "code")
        path.write_bytes(code)
        try:
            done = subprocess.run(
                [tool, "-json", "-b", arch.replace("sm_", "SM"), path],
                capture_output=True, text=True, check=False, timeout=_TIMEOUT,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolError(f"{tool}: {error}") from None
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().split("\n", 1)[0]
        raise ToolError(f"{tool} on {arch}: {reason or f'exit code {done.returncode}'}")
    try:
        _, (function,) = json.loads(done.stdout)
        listing: list[dict[str, Any]] = function["sass-instructions"]
    except (ValueError, KeyError) as error:
        raise ToolError(f"{tool} on {arch}: no JSON as of version 13: {error}") from None
    if len(listing) * INSTRUCTION_BYTES != len(code):
        raise ToolError(f"{tool} on {arch}: {len(listing)} instructions in {len(code)} bytes")
    return listing


def _instructions(
    listing: Sequence[dict[str, Any]], code: bytes, first: int
) -> Iterable[Instruction]:
    """Instructions of the kernel that begins `first` instructions into what was disassembled."""
    for i, entry in enumerate(listing):
        flow = "control-flow" in entry.get("other-attributes", {})
        operands = entry.get("operands", "")
        target = _TARGET.search(operands) if flow else None
        place = int(target[0], 16) - first * INSTRUCTION_BYTES if target else None
        if target:
            operands = f"{operands[: target.start()]}{place:#x}"
        at = i * INSTRUCTION_BYTES
        yield Instruction(
            offset=at,
            opcode=entry["opcode"],
            operands=operands,
            predicate=entry.get("predicate", ""),
            target=place,
            encoding=int.from_bytes(code[at : at + INSTRUCTION_BYTES], "little"),
        )
