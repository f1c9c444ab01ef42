"""Bank conflicts: how often shared memory must be read or written for one access of a warp.

Shared memory has 32 banks of 4 bytes; successive words lie in successive banks. A bank gives one
word at a time, to any number of lanes: equal words cost nothing (CUDA C++ Programming Guide,
"Shared Memory" of compute capability 5.x, to which later ones refer). Lanes are served in phases of
128 bytes:

    up to 4 bytes per lane   the whole warp
    8 bytes                  each half of the warp
    16 bytes                 each quarter (GTC 2019, session S9593, on 128-bit accesses)
    ldmatrix                 each 8x8 matrix, eight rows of 16 bytes: lanes 8i to 8i + 7 give the
                             addresses of matrix i (PTX ISA, "ldmatrix")

A phase takes as many wavefronts as the most words that one bank must give to it. All of this is
measured by tests/gpu/test_banks.py. The count is a bound from above where lanes of an 8- or 16-byte
load want the same address: hardware may then merge two phases (NVIDIA forum, thread 77228).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pyruntime.errors import InputError

BANKS, WORD, WARP = 32, 4, 32
SWIZZLES = (32, 64, 128)  # bytes; the patterns of CU_TENSOR_MAP_SWIZZLE_32B, _64B and _128B


@dataclass(frozen=True)
class Access:
    """A kind of instruction: `bytes` per lane, for the first `lanes` lanes, `phase` at a time."""

    name: str
    bytes: int
    lanes: int
    phase: int

    @property
    def matrices(self) -> int:
        """8x8 matrices of an ldmatrix; 0 for others."""
        return self.lanes // 8 if self.name.startswith("ldmatrix") else 0


def _accesses() -> dict[str, Access]:
    found = [Access(f"ldmatrix.x{n}", 16, 8 * n, 8) for n in (1, 2, 4)]
    for size in (1, 2, 4, 8, 16):
        phase = min(WARP, BANKS * WORD // size)
        found += [Access(f"{verb}{size}", size, WARP, phase) for verb in ("ld", "st")]
    return {access.name: access for access in found}


ACCESSES = _accesses()


@dataclass(frozen=True)
class Conflict:
    """Lanes of one phase that wait for one another in `banks`; each group shares a word."""

    phase: int
    banks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Served:
    """One access of a warp. `addresses`: bytes by lane, None where a lane takes no part.

    Raises:
        InputError: an address is negative or no multiple of the access's size (the hardware
            faults), or there are more lanes than the access has.
    """

    access: Access
    addresses: tuple[int | None, ...]

    def __post_init__(self) -> None:
        access = self.access
        if len(self.addresses) > access.lanes:
            raise InputError(f"{access.name}: {len(self.addresses)} lanes, it has {access.lanes}")
        for lane, address in enumerate(self.addresses):
            if address is not None and (address < 0 or address % access.bytes):
                raise InputError(
                    f"{access.name}: lane {lane} has address {address}, not a multiple of "
                    f"{access.bytes} from 0 on"
                )

    @cached_property
    def words(self) -> tuple[tuple[dict[int, list[int]], ...], ...]:
        """By phase and bank: word -> lanes that want it, words in the order of those lanes."""
        phases = []
        for first in range(0, self.access.lanes, self.access.phase):
            banks: tuple[dict[int, list[int]], ...] = tuple({} for _ in range(BANKS))
            for lane in range(first, min(first + self.access.phase, len(self.addresses))):
                address = self.addresses[lane]
                if address is None:
                    continue
                for word in range(address // WORD, (address + self.access.bytes - 1) // WORD + 1):
                    banks[word % BANKS].setdefault(word, []).append(lane)
            phases.append(banks)
        return tuple(phases)

    @property
    def ways(self) -> tuple[int, ...]:
        """Wavefronts of each phase: the most words that one bank must give."""
        return tuple(max(map(len, banks)) for banks in self.words)

    @property
    def wavefronts(self) -> int:
        """Wavefronts of the whole access."""
        return sum(self.ways)

    @property
    def ideal(self) -> int:
        """What it would be without conflicts: phases with a lane that takes part."""
        return sum(ways > 0 for ways in self.ways)

    @property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Who waits for whom; banks in which the same groups meet are taken together."""
        found: dict[tuple[int, tuple[tuple[int, ...], ...]], list[int]] = {}
        for phase, banks in enumerate(self.words):
            for bank, words in enumerate(banks):
                if len(words) > 1:
                    groups = tuple(map(tuple, words.values()))
                    found.setdefault((phase, groups), []).append(bank)
        return tuple(Conflict(p, tuple(banks), groups) for (p, groups), banks in found.items())

    def wavefront_of(self, lane: int, bank: int) -> int | None:
        """Which wavefront of its phase, from 1, serves a lane from a bank; None if none does."""
        words = self.words[lane // self.access.phase][bank]
        return next((i for i, lanes in enumerate(words.values(), 1) if lane in lanes), None)


def serve(access: Access, address: Callable[[int], int]) -> Served:
    """The access with lane -> byte address for each of its lanes."""
    return Served(access, tuple(map(address, range(access.lanes))))


def in_rows(access: Access, stride: int, *, lanes_per_row: int = 1, swizzle: int = 0) -> Served:
    """An access to rows that lie `stride` bytes apart.

    Loads and stores: `lanes_per_row` lanes side by side in each row. ldmatrix: the eight rows of
    each matrix; of four, two lie below one another and two beside (a 16x16 operand), as do two.

    Args:
        swizzle: 0, or the width in bytes of a pattern that TMA applies to addresses.
    """
    rows = 16 if access.matrices == 4 else 8

    def address(lane: int) -> int:
        if access.matrices:
            row, column = lane % rows, lane // rows
        else:
            row, column = divmod(lane, lanes_per_row)
        return swizzled(row * stride + column * access.bytes, swizzle)

    return serve(access, address)


def swizzled(address: int, width: int) -> int:
    """A byte address under a TMA swizzle: 16-byte chunks are permuted by the 128-byte line.

    The bits from 4 on are exchanged by an exclusive or with as many from 7 on: three of them for a
    width of 128 bytes, two for 64, one for 32, none for 0 (CUDA driver API, CUtensorMapSwizzle).
    """
    return address ^ (address >> 3 & max(width - 16, 0))


def smallest_pad(access: Access, stride: int, lanes_per_row: int = 1) -> int | None:
    """The fewest bytes, in steps of the access's size, to add to rows so that no lane waits."""
    for pad in range(0, BANKS * WORD, access.bytes):
        served = in_rows(access, stride + pad, lanes_per_row=lanes_per_row)
        if served.wavefronts == served.ideal:
            return pad
    return None


def picture(served: Served) -> Sequence[str]:
    """Lanes (down) by banks (across), each cell the wavefront of its phase that serves it."""
    digits = ".123456789abcdefghijklmnopqrstuvw"
    lines = ["bank      " + "".join(f"{b:<8}" for b in range(0, BANKS, 8)).rstrip()]
    for lane in range(len(served.addresses)):
        if lane and lane % served.access.phase == 0:
            lines.append("")
        row = "".join(digits[served.wavefront_of(lane, bank) or 0] for bank in range(BANKS))
        lines.append(f"lane {lane:2}   {row}")
    return lines
