"""The kernel contract: what `cuda/core/spec.cuh` exported into a cubin, read back without a GPU."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from pyruntime.cubin.elf import Elf
from pyruntime.errors import CubinError

MAGIC = 0x53525950
ABI = 1
_HEAD = struct.Struct("<6I128s1024s1024s")
_PLANE = re.compile(r"(\w+)@(\d+)\+(\d+)/(\d+)\*(\d+)(?:=(\w+))?")
_PARAM = re.compile(r"(\w+):(\w)@(\d+)")

# letter -> struct format; the other half of spec::code in spec.cuh.
LETTERS = {"P": "Q", "i": "i", "u": "I", "l": "q", "f": "f", "T": "128s"}


@dataclass(frozen=True)
class Param:
    """A field of the parameter struct: `letter` is a key of `LETTERS`, `offset` in bytes."""

    name: str
    letter: str
    offset: int


@dataclass(frozen=True)
class Plane:
    """A region of dynamic shared memory. `on` names the plane whose memory it reuses, if any."""

    name: str
    offset: int
    bytes: int
    row_stride: int
    element: int
    on: str | None


@dataclass(frozen=True)
class KernelSpec:
    """What a kernel asks of its launcher, in bytes; `tile` holds the row's named constants."""

    name: str
    threads: int
    min_blocks: int
    smem_bytes: int
    param_bytes: int
    tile: dict[str, int | str]
    params: tuple[Param, ...]
    planes: tuple[Plane, ...]

    @property
    def family(self) -> str:
        """The part of the name before the first underscore."""
        return self.name.split("_", 1)[0]

    @property
    def cluster(self) -> int:
        """Blocks of a cluster, along x; 1 if the kernel asks for none."""
        return int(self.tile.get("cluster", 1))

    @property
    def dependent(self) -> bool:
        """Whether it waits by itself for the kernel before it, so may start before that ends."""
        return bool(self.tile.get("dependent", 0))


def read_specs(data: bytes, what: str) -> dict[str, KernelSpec]:
    """All kernel specs in a cubin, by kernel name.

    Args:
        data: the cubin's bytes.
        what: names the cubin in errors.

    Raises:
        CubinError: not a cubin, or a spec of another magic number or version.
    """
    return specs_in(Elf(data, what))


def specs_in(elf: Elf) -> dict[str, KernelSpec]:
    """As `read_specs`, from a cubin that is parsed already."""
    suffix = "_spec"
    found = [s for s in elf.symbols() if s.name.endswith(suffix) and s.size == _HEAD.size]
    return {
        s.name[: -len(suffix)]: _parse(s.name[: -len(suffix)], elf.symbol_bytes(s), elf.what)
        for s in found
    }


def _parse(name: str, data: memoryview, what: str) -> KernelSpec:
    magic, abi, threads, min_blocks, smem, params, *texts = _HEAD.unpack(data)
    if magic != MAGIC or abi != ABI:
        raise CubinError(
            f"{what}: kernel {name} carries contract {magic:#x} version {abi}, "
            f"expected {MAGIC:#x} version {ABI}"
        )
    try:
        tile, signature, planes = (t.rstrip(b"\0").decode("ascii").split() for t in texts)
        return _spec(name, threads, min_blocks, smem, params, tile, signature, planes)
    except (ValueError, TypeError) as error:
        raise CubinError(f"{what}: kernel {name}: its contract cannot be read: {error}") from None


def _spec(
    name: str,
    threads: int,
    min_blocks: int,
    smem: int,
    params: int,
    tile: list[str],
    signature: list[str],
    planes: list[str],
) -> KernelSpec:
    pairs = (item.split("=", 1) for item in tile)
    return KernelSpec(
        name=name,
        threads=threads,
        min_blocks=min_blocks,
        smem_bytes=smem,
        param_bytes=params,
        tile={k: int(v) if v.isdigit() else v for k, v in pairs},
        params=tuple(
            Param(n, c, int(o)) for n, c, o in (_groups(_PARAM, item) for item in signature)
        ),
        planes=tuple(
            Plane(n, int(o), int(b), int(r), int(e), on)
            for n, o, b, r, e, on in (_groups(_PLANE, item) for item in planes)
        ),
    )


def _groups(pattern: re.Pattern[str], item: str) -> tuple[str, ...]:
    match = pattern.fullmatch(item)
    if match is None:
        raise ValueError(f"{item!r} in it")
    return match.groups()
