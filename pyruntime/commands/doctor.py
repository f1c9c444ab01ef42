"""`pyruntime doctor`: driver, devices, cubins, and what is missing."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from pyruntime.commands.options import add_json, print_json


def main(argv: list[str]) -> int:
    """Runs the command; 0: a GPU is ready, 1: cubins are missing, 3: no usable driver or GPU."""
    parser = argparse.ArgumentParser("pyruntime doctor", description=__doc__)
    add_json(parser)
    args = parser.parse_args(argv)
    record = _record()
    if args.json:
        print_json("doctor", record)
    else:
        _print(record)
    if not record["devices"] or record["driver_refused"]:
        return 3
    return 1 if record["missing"] else 0


def _record() -> dict[str, Any]:
    from importlib.metadata import version

    from pyruntime import __version__
    from pyruntime.cubin.installed import manifest
    from pyruntime.errors import CubinError, DriverNotFoundError

    missing: list[str] = []
    record: dict[str, Any] = {
        "pyruntime": __version__,
        "python": sys.version.split()[0],
        "cuda_bindings": version("cuda-bindings"),
        "driver": None,
        "driver_refused": False,
        "devices": [],
        "cubins": None,
        "missing": missing,
    }
    try:
        record["cubins"] = manifest()
    except CubinError as error:
        missing.append(str(error))
    try:
        _add_devices(record, missing)
    except DriverNotFoundError as error:
        missing.append(str(error))
    return record


def _add_devices(record: dict[str, Any], missing: list[str]) -> None:
    from pyruntime.driver.device import device_count, driver_version
    from pyruntime.driver.library import check_driver
    from pyruntime.errors import CudaError, DriverNotFoundError

    record["driver"] = driver_version()
    if not device_count():
        missing.append("the driver shows no device")
    for ordinal in range(device_count()):
        try:
            _add_device(record, missing, ordinal)
        except CudaError as error:
            missing.append(f"cuda:{ordinal} does not answer: {error}")
    if record["cubins"]:
        try:
            check_driver()
        except DriverNotFoundError as error:
            record["driver_refused"] = True
            missing.append(str(error))


def _add_device(record: dict[str, Any], missing: list[str], ordinal: int) -> None:
    from pyruntime.cubin.installed import architecture_for
    from pyruntime.driver.device import Device

    device = Device(ordinal)
    try:
        free, total = device.memory()
        built = record["cubins"]["architectures"] if record["cubins"] else []
        arch = architecture_for(device.compute_capability, built)
        name = "sm_{}{}".format(*device.compute_capability)
        if arch is None:
            missing.append(f"no cubin for cuda:{ordinal} ({device.name}, {name})")
        record["devices"].append(
            {
                "ordinal": ordinal,
                "name": device.name,
                "architecture": name,
                "cubins": None if arch is None else f"sm_{arch}",
                "sms": device.sm_count,
                "memory_free": free,
                "memory_total": total,
                "shared_memory_per_block": device.smem_per_block,
            }
        )
    finally:
        device.close()


def _print(record: dict[str, Any]) -> None:
    print(f"pyruntime {record['pyruntime']}, Python {record['python']}, "
          f"cuda-bindings {record['cuda_bindings']}")  # fmt: skip
    print(f"driver    {'none' if record['driver'] is None else 'CUDA ' + record['driver']}")
    for d in record["devices"]:
        print(
            f"cuda:{d['ordinal']}    {d['name']}, {d['architecture']}, {d['sms']} SMs, "
            f"{d['memory_free']:,} of {d['memory_total']:,} bytes free, "
            f"cubins {d['cubins'] or 'none'}"
        )
    if cubins := record["cubins"]:
        archs = ", ".join(f"sm_{a}" for a in cubins["architectures"])
        print(f"cubins    {archs}; built by nvcc {cubins['nvcc_version']} ({cubins['nvcc']})")
    for text in record["missing"]:
        print(f"missing   {text}")
    if not record["devices"]:
        print("prompts will run on the CPU with NumPy")
