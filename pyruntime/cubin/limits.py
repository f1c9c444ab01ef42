"""What one multiprocessor (SM) of each architecture has: the only table of device limits.

Sources: CUDA programming guide, appendix "Compute Capabilities", tables of device and memory
information; named barriers per SM as `cuda_occupancy.h` of CUDA 13.0 counts them (from 9.0 on).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pyruntime.errors import CubinError

WARP = 32
THREADS_PER_BLOCK = 1024
REGISTERS_PER_THREAD = 255
REGISTER_UNIT = 256  # registers are given to a warp in these steps
SHARED_UNIT = 128  # bytes of shared memory are given to a block in these steps
PARTITIONS = 4  # an SM's registers and warp slots are split over these
DEFAULT_RESERVE = 1024  # bytes of shared memory per block that the driver keeps, from sm_80 on


@dataclass(frozen=True)
class Limits:
    """Limits of one SM. Memory in bytes.

    Attributes:
        device: what to call it: "sm_90", or a product name for a live device.
        products: examples of GPUs with this architecture.
        shared_per_block: the most that a block can opt in to, static part included.
        barriers: named barriers per SM; None where they never limit.
        sms: number of SMs; None for an architecture, which has GPUs of many sizes.
    """

    device: str
    arch: str
    products: str
    warps: int
    blocks: int
    shared: int
    shared_per_block: int
    barriers: int | None
    registers: int = 65536
    reserve: int = DEFAULT_RESERVE
    sms: int | None = None


# arch: products, warps, blocks, shared KB, shared KB per block, barriers
_TABLE: dict[str, tuple[str, int, int, int, int, int | None]] = {
    "sm_80": ("A100", 64, 32, 164, 163, None),
    "sm_86": ("RTX 30, A10, A40", 48, 16, 100, 99, None),
    "sm_87": ("Jetson Orin", 48, 16, 164, 163, None),
    "sm_89": ("RTX 40, L4, L40", 48, 24, 100, 99, None),
    "sm_90": ("H100, H200", 64, 32, 228, 227, 64),
    "sm_100": ("B200, GB200", 64, 32, 228, 227, 64),
    "sm_103": ("B300, GB300", 64, 32, 228, 227, 64),
    "sm_110": ("Jetson Thor", 48, 24, 228, 227, 24),
    "sm_120": ("RTX 50, RTX PRO 6000", 48, 24, 100, 99, 24),
    "sm_121": ("GB10 (DGX Spark)", 48, 24, 100, 99, 24),
}
_RENAMED = {"sm_101": "sm_110"}  # Thor's name in CUDA 12

ARCHITECTURES = tuple(_TABLE)


def limits_of(arch: str) -> Limits:
    """The limits of an architecture such as "sm_90", "90a" or "sm_90a".

    Raises:
        CubinError: it is not in the table; the text lists what is.
    """
    match = re.fullmatch(r"(?:sm_?)?(\d+)[af]?", arch)
    name = f"sm_{match[1]}" if match else arch
    name = _RENAMED.get(name, name)
    if name not in _TABLE:
        raise CubinError(f"no limits known for {arch}; known are {', '.join(ARCHITECTURES)}")
    products, warps, blocks, shared, per_block, barriers = _TABLE[name]
    return Limits(name, name, products, warps, blocks, shared << 10, per_block << 10, barriers)
