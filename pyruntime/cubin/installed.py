"""The cubins that the build installed beside the package (or in the folder `PYRUNTIME_CUBINS`)."""

from __future__ import annotations

import hashlib
import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from pyruntime.cubin.elf import Elf
from pyruntime.cubin.spec import KernelSpec, read_specs
from pyruntime.errors import ArchMismatchError, CubinError

_ARCH = re.compile(r"(\d+)([af]?)")
_VARIABLE = "PYRUNTIME_CUBINS"


def root() -> Path:
    """The folder that holds `manifest.json` and one folder `sm_<arch>` per architecture."""
    override = os.environ.get(_VARIABLE)
    # Through importlib, since an editable install keeps data files apart from the sources.
    return Path(override) if override else Path(str(files("pyruntime").joinpath("cubins")))


def manifest() -> dict[str, Any]:
    """What the build recorded: `nvcc`, `nvcc_version`, `flags`, `architectures`.

    Raises:
        CubinError: there are no cubins (a source tree that was never built, or a wrong
            `PYRUNTIME_CUBINS`), or no valid manifest.
    """
    path = root() / "manifest.json"
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        if os.environ.get(_VARIABLE):
            lacks = f"there is no {path.name}" if path.parent.is_dir() else "no such folder"
            raise CubinError(f"{_VARIABLE}={path.parent}: {lacks}") from None
        raise CubinError(
            f"no cubins in {path.parent}: this copy of pyruntime is a source tree that was not "
            "built; run 'pip install .' there, then use the installed package from another folder"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CubinError(f"{path}: unreadable manifest: {error}") from None
    texts = ("nvcc", "nvcc_version", "flags")
    if (
        not isinstance(record, dict)
        or record.get("schema") != "pyruntime.cubins/1"
        or not all(isinstance(record.get(key), str) for key in texts)
        or not isinstance(record.get("architectures"), list)
        or not all(isinstance(arch, str) for arch in record["architectures"])
    ):
        raise CubinError(f"{path}: not a pyruntime.cubins/1 manifest")
    return record


def architecture_for(compute_capability: tuple[int, int], architectures: list[str]) -> str | None:
    """The best of `architectures` for a device, or None.

    A cubin runs on its own major version and the same or a later minor one; with suffix `a` on
    exactly its own version (CUDA C++ programming guide, "Binary compatibility").
    """
    major, minor = compute_capability

    def rank(arch: str) -> tuple[int, bool] | None:
        match = _ARCH.fullmatch(arch)
        if match is None:
            return None
        number, suffix = int(match[1]), match[2]
        exact = number == 10 * major + minor
        if number // 10 != major or number % 10 > minor or (suffix == "a" and not exact):
            return None
        return number, suffix != ""

    ranked = [(r, arch) for arch in architectures if (r := rank(arch)) is not None]
    return max(ranked)[1] if ranked else None


def cubins_for(compute_capability: tuple[int, int], device_name: str) -> dict[Path, bytes]:
    """Path and bytes of every cubin to load on a device.

    Raises:
        ArchMismatchError: none fits; the text names the device and the architectures built.
        CubinError: see `manifest`, or the folder of a recorded architecture is gone.
    """
    architectures: list[str] = manifest()["architectures"]
    arch = architecture_for(compute_capability, architectures)
    if arch is None:
        raise ArchMismatchError(
            f"no cubin runs on {device_name} (sm_{compute_capability[0]}{compute_capability[1]}): "
            f"this build holds {', '.join(f'sm_{a}' for a in architectures)}; "
            "rebuild with PYRUNTIME_CUDA_ARCHS naming the device's architecture"
        )
    paths = sorted((root() / f"sm_{arch}").glob("*.cubin"))
    if not paths:
        raise CubinError(f"{root() / f'sm_{arch}'}: no cubins, though the manifest lists sm_{arch}")
    return {path: path.read_bytes() for path in paths}


def installed_specs() -> list[KernelSpec]:
    """Specs of the kernels of every architecture. Raises CubinError: see `manifest`."""
    return [
        spec
        for arch in manifest()["architectures"]
        for path in sorted((root() / f"sm_{arch}").glob("*.cubin"))
        for spec in read_specs(path.read_bytes(), str(path)).values()
    ]


def code_hashes(cubin: bytes, what: str) -> dict[str, str]:
    """sha256 of the machine code of each kernel in a cubin, by name.

    Args:
        what: names the cubin in errors.

    Raises:
        CubinError: not a cubin.
    """
    prefix = ".text."
    return {
        s.name.removeprefix(prefix): hashlib.sha256(s.data).hexdigest()
        for s in Elf(cubin, what).sections
        if s.name.startswith(prefix)
    }


def installed_code(architecture: str) -> dict[str, str]:
    """`code_hashes` of all installed cubins of an architecture such as "sm_90a"; {} if none."""
    hashes: dict[str, str] = {}
    for path in sorted((root() / architecture).glob("*.cubin")):
        hashes |= code_hashes(path.read_bytes(), str(path))
    return hashes
