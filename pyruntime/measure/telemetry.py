"""What nvidia-smi sees while we measure; nothing where it is not installed."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
from types import TracebackType
from typing import Any

from pyruntime.driver.device import Device

PERIOD = 200  # milliseconds between readings
FIELDS = (
    "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw",
    "clocks_event_reasons.active",
)  # fmt: skip
# NVML's clock event reasons: slowdown by hardware, by software and hardware for heat.
THERMAL = 0x8 | 0x20 | 0x40


class Telemetry:
    """Readings of a device during a `with` block; then `record`."""

    def __init__(self, device: Device) -> None:
        address = [device.attribute(f"PCI_{x}_ID") for x in ("DOMAIN", "BUS", "DEVICE")]
        self._command = [
            shutil.which("nvidia-smi") or "", f"--query-gpu={','.join(FIELDS)}",
            "--format=csv,noheader,nounits", "-i", "{:08x}:{:02x}:{:02x}.0".format(*address),
            "-lms", str(PERIOD),
        ]  # fmt: skip
        self._text = ""

    def __enter__(self) -> Telemetry:
        self._process = None
        if self._command[0]:
            self._file = tempfile.TemporaryFile("w+")
            self._process = subprocess.Popen(
                self._command, stdout=self._file, stderr=subprocess.DEVNULL
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is None:
            return
        self._process.terminate()
        self._process.wait()
        self._file.seek(0)
        self._text = self._file.read()
        self._file.close()

    def record(self) -> dict[str, Any] | None:
        """See `parse`."""
        return parse(self._text)


def parse(text: str) -> dict[str, Any] | None:
    """Driver; lowest, median and highest clocks; highest °C and W; any thermal slowdown.

    None if there is no whole reading.
    """
    rows = [line.split(", ") for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(FIELDS)]
    if not rows:
        return None
    driver, sm, memory, celsius, watts, reasons = zip(*rows, strict=True)
    flags = [int(x, 16) for x in reasons if x.startswith("0x")]
    return {
        "driver": driver[0],
        "sm_mhz": _spread(sm),
        "memory_mhz": _spread(memory),
        "celsius": max(_numbers(celsius), default=None),
        "watts": max(_numbers(watts), default=None),
        "thermal_slowdown": any(f & THERMAL for f in flags) if flags else None,
    }


def _spread(texts: tuple[str, ...]) -> list[float] | None:
    values = _numbers(texts)
    return [min(values), statistics.median(values), max(values)] if values else None


def _numbers(texts: tuple[str, ...]) -> list[float]:
    """What is a number; nvidia-smi writes [N/A] where a reading is not to be had."""
    return [float(x) for x in texts if x.replace(".", "", 1).isdigit()]
