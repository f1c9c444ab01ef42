"""A bounds-checked reader of 64-bit little-endian ELF files, as far as cubins need it.

Format: System V ABI, chapter 4 (object files); NVIDIA uses machine 190 (EM_CUDA).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from pyruntime.errors import CubinError

EM_CUDA = 190
EM_X86_64, EM_AARCH64 = 62, 183
ET_REL = 1
STT_FUNC = 2
# SHT_NULL, SHT_NOBITS, and the kind of `.nv_debug.shared`: their sizes are no bytes of the file.
_NO_BYTES = frozenset({0, 8, 0x7000000A})


def printable(raw: bytes) -> str:
    """Text from a file, safe for a terminal: control characters and bad UTF-8 become escapes."""
    text = raw.decode("utf-8", "surrogateescape")
    if text.isprintable():
        return text
    return raw.decode("latin-1").encode("unicode_escape").decode("ascii")


@dataclass(frozen=True)
class Section:
    """One section header."""

    name: str
    kind: int
    flags: int
    size: int
    link: int
    info: int
    file: Elf
    offset: int

    @property
    def data(self) -> memoryview:
        """A view of the section's bytes in the file, empty where it has none there.

        Raises:
            CubinError: the header points past the end of the file.
        """
        return self.file.bytes_at(self.offset, 0 if self.kind in _NO_BYTES else self.size)


@dataclass(frozen=True)
class Symbol:
    """One entry of `.symtab`; `section` is an index into `Elf.sections`."""

    name: str
    info: int
    other: int
    section: int
    value: int
    size: int


class Elf:
    """A parsed cubin, or the host file that holds one. `what` names the file in errors.

    Args:
        machines: the `e_machine` values to accept.

    Raises:
        CubinError: the bytes are no 64-bit little-endian ELF for one of `machines`, or a header
            points past the end.
    """

    def __init__(
        self, data: bytes | memoryview, what: str, machines: tuple[int, ...] = (EM_CUDA,)
    ) -> None:
        self.what = what
        self._data = memoryview(data)
        if data[:4] != b"\x7fELF":
            raise CubinError(f"{what}: not an ELF file (starts with {bytes(data[:8])!r})")
        if data[4:6] != b"\x02\x01":
            raise CubinError(f"{what}: not a 64-bit little-endian ELF file")
        self.os_abi, self.abi_version = self._unpack("BB", 7)
        self.kind, self.machine = self._unpack("<HH", 0x10)
        if self.machine not in machines:
            raise CubinError(
                f"{what}: an ELF file for machine {self.machine}, "
                f"not {' or '.join(map(str, machines))} ({EM_CUDA} is a cubin)"
            )
        (table,) = self._unpack("<Q", 0x28)
        (self.flags,) = self._unpack("<I", 0x30)
        entry, count, names = self._unpack("<HHH", 0x3A)
        if entry != 64 and count:
            raise CubinError(f"{what}: section headers of {entry} bytes, expected 64")
        headers = [self._unpack("<IIQQQQIIQQ", table + 64 * i) for i in range(count)]
        if names >= count:
            raise CubinError(f"{what}: no section name table (index {names} of {count})")
        strings = bytes(self.bytes_at(headers[names][4], headers[names][5]))
        self.sections = [
            Section(
                name=self._string(strings, h[0]),
                kind=h[1],
                flags=h[2],
                size=h[5],
                link=h[6],
                info=h[7],
                file=self,
                offset=h[4],
            )
            for h in headers
        ]
        self.by_name = {s.name: s for s in self.sections}

    def overruns(self) -> list[str]:
        """The names of sections that a header places past the end of the file: it was cut."""
        size = len(self._data)
        return [
            s.name for s in self.sections if s.kind not in _NO_BYTES and s.offset + s.size > size
        ]

    def symbols(self) -> Iterator[Symbol]:
        """The entries of `.symtab`, in file order."""
        table = self.by_name.get(".symtab")
        if table is None:
            return
        if table.link >= len(self.sections):
            raise CubinError(
                f"{self.what}: .symtab names string table {table.link}, which is absent"
            )
        strings = bytes(self.sections[table.link].data)
        for name, info, other, section, value, size in struct.iter_unpack(
            "<IBBHQQ", table.data[: len(table.data) // 24 * 24]
        ):
            yield Symbol(self._string(strings, name), info, other, section, value, size)

    def symbol_bytes(self, symbol: Symbol) -> memoryview:
        """The initial value of a data symbol."""
        if symbol.section >= len(self.sections):
            raise CubinError(f"{self.what}: symbol {symbol.name} lies in no section")
        data = self.sections[symbol.section].data
        if symbol.value + symbol.size > len(data):
            raise CubinError(f"{self.what}: symbol {symbol.name} runs past its section")
        return data[symbol.value : symbol.value + symbol.size]

    def bytes_at(self, offset: int, size: int) -> memoryview:
        if offset + size > len(self._data):
            raise CubinError(
                f"{self.what}: {size} bytes at offset {offset} run past the end ({len(self._data)})"
            )
        return self._data[offset : offset + size]

    def _unpack(self, fmt: str, offset: int) -> tuple[int, ...]:
        return struct.unpack(fmt, self.bytes_at(offset, struct.calcsize(fmt)))

    def _string(self, table: bytes, offset: int) -> str:
        end = table.find(0, offset)
        if end < 0:
            raise CubinError(f"{self.what}: a name at string offset {offset} has no end")
        return printable(table[offset:end])
