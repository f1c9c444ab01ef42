"""The two roofs of a device, measured once: copy bandwidth, and the fastest matrix product."""

from __future__ import annotations

import json
import logging
import re
import statistics
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from pyruntime.cubin.installed import installed_code
from pyruntime.driver.device import driver_version
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.driver.timing import time_program
from pyruntime.hub import cache_folder
from pyruntime.measure.graph import Work
from pyruntime.measure.inplace import spans
from pyruntime.measure.records import architecture_of
from pyruntime.ops.gemm import gemm
from pyruntime.ops.gemm_choice import costs

log = logging.getLogger("pyruntime")

COPY_BYTES = 1 << 29
SIDE = 8192  # of the square product
ROUNDS = 7


@dataclass(frozen=True)
class Roofline:
    """Bytes (read and written) and FLOP per second, and where they come from.

    Attributes:
        gemm_kernel: the row of the table that was fastest on C = A Wᵀ of `gemm_side` squares, fp16
            in, f32 out.
        code: hash of that kernel's machine code.
    """

    bytes_per_s: float
    flop_per_s: float
    gemm_kernel: str
    gemm_side: int
    code: str
    device: str
    cuda: str
    date: str

    def milliseconds(self, work: Work) -> float:
        """Time of `work` at the roofs' speeds: our fastest square product, a copy. Not a bound."""
        return 1e3 * max(work.bytes / self.bytes_per_s, work.flop / self.flop_per_s)


def roofline(library: Library, *, again: bool = False) -> Roofline:
    """The device's roofs, from the user's cache if they were measured with this driver and kernel.

    Args:
        again: measure even so.
    """
    device = library.device
    code = installed_code(architecture_of(device))
    path = cache_path(device.name)
    if not again and (known := read(path)):
        current = known.device == device.name and known.cuda == driver_version()
        if current and code.get(known.gemm_kernel) == known.code:
            return known
    stream = Stream(device)
    kernel, flop_per_s = _fastest_product(library, stream)
    found = Roofline(
        bytes_per_s=_copy_bandwidth(stream),
        flop_per_s=flop_per_s,
        gemm_kernel=kernel,
        gemm_side=SIDE,
        code=code[kernel],
        device=device.name,
        cuda=driver_version(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    stream.close()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schema": "pyruntime.roofline/1", **asdict(found)}, indent=1))
    except OSError as error:
        log.warning("the roofs are not kept for the next time: %s", error)
    return found


def cache_path(device_name: str) -> Path:
    """Where a device's roofs are kept."""
    return cache_folder() / "roofline" / (re.sub(r"\W+", "-", device_name.lower()) + ".json")


def read(path: Path) -> Roofline | None:
    """What a cache file holds; None if it is missing or anything else."""
    try:
        record = json.loads(path.read_text())
        if record.pop("schema") != "pyruntime.roofline/1":
            return None
        return Roofline(**record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _copy_bandwidth(stream: Stream) -> float:
    array = DeviceArray(stream.device, (2 * COPY_BYTES,), np.uint8, what="copy buffer").fill(0)

    def copy() -> None:
        stream.copy_on_device(array.ptr, array.ptr + COPY_BYTES, COPY_BYTES)

    with stream.device.current():
        times = spans(stream, [copy] * (ROUNDS + 2))[2:]
    array.close()
    return 2 * COPY_BYTES / statistics.median(times) * 1e3


def _fastest_product(library: Library, stream: Stream) -> tuple[str, float]:
    """The GEMM row that is fastest on a large square of random-normal values, and its FLOP/s."""
    device = library.device
    block = np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(np.float16)
    values = np.resize(block, (SIDE, SIDE))
    a, w = (DeviceArray(device, values.shape, np.float16).upload(values) for _ in range(2))
    c = DeviceArray(device, values.shape, np.float32)
    rows = DeviceArray(device, (1,), np.int32).upload(np.array([SIDE], np.int32))
    times = {}
    able = [x for x in library.family("gemm") if x.spec.tile["epilogue"] == "f32"]
    for kernel in costs(able, SIDE, SIDE, SIDE, device):
        program = Program()
        gemm(
            program, library, a=a, w=w, c=c, rows=rows, max_rows=SIDE, epilogue="f32",
            kernel=kernel,
        )  # fmt: skip
        times[kernel.name] = statistics.median(time_program(program, stream, rounds=ROUNDS))
    for array in (a, w, c, rows):
        array.close()
    best = min(times, key=lambda name: times[name])
    return best, 2 * SIDE**3 / times[best] * 1e3
