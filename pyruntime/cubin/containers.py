"""Cubins in any file that can hold them: .cubin, fat binary, .o, .so, executable, or a folder."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyruntime.cubin import fatbin
from pyruntime.cubin.elf import EM_AARCH64, EM_CUDA, EM_X86_64, ET_REL, Elf
from pyruntime.errors import CubinError

_REFUSED = {
    b"!<arch>\n": "a static library; unpack it first (ar x)",
    b"PK": "a zip archive (a wheel?); unpack it first",
    b"MZ": "a Windows program, which is not read",
    b"BC\xc0\xde": "LLVM bitcode, not machine code",
}


@dataclass(frozen=True)
class Member:
    """A cubin inside a file. `label` names file, position and architecture."""

    label: str
    content: memoryview | fatbin.Entry | CubinError

    def data(self) -> bytes:
        """The cubin's bytes.

        Raises:
            CubinError: it is damaged, or compressed in a way that cannot be undone here.
        """
        if isinstance(self.content, CubinError):
            raise self.content
        if isinstance(self.content, fatbin.Entry):
            return self.content.unpack(self.label)
        return bytes(self.content)


def members(path: Path) -> list[Member]:
    """The cubins in a file, or in all files below a folder that hold any.

    A broken file inside a folder becomes a member whose `data()` raises.

    Raises:
        CubinError: there is no device code; the text says what was found instead.
    """
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
        found = [member for file in files for member in _in_folder(file)]
        if not found:
            raise CubinError(f"{path}: no device code in {len(files)} files")
        return found
    found = list(_in_file(path))
    if not found:
        raise CubinError(f"{path}: no device code (an ELF file without a fat binary section)")
    return found


def _in_folder(path: Path) -> Iterator[Member]:
    try:
        with path.open("rb") as file:
            head = file.read(4)
        if head in (b"\x7fELF", fatbin.MAGIC) or path.suffix in (".cubin", ".fatbin"):
            yield from _in_file(path)
    except OSError as error:
        yield Member(str(path), CubinError(f"{path}: {error.strerror}"))
    except CubinError as error:
        if path.suffix in (".cubin", ".fatbin"):
            yield Member(str(path), error)


def _in_file(path: Path) -> Iterator[Member]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CubinError(f"{path}: not a regular file")
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise CubinError(f"{path}: {error.strerror}") from None
    what = str(path)
    head = bytes(data[:4096])
    if head.startswith(fatbin.MAGIC):
        yield from _in_fatbin(data, what)
    elif head.startswith(b"\x7fELF"):
        elf = Elf(data, what, (EM_CUDA, EM_X86_64, EM_AARCH64))
        if elf.machine == EM_CUDA:
            yield Member(what, data)
            return
        yield from _in_host(elf)
    else:
        raise CubinError(f"{what}: {_description(head)}")


def _in_host(elf: Elf) -> Iterator[Member]:
    linked, relocatable = (elf.by_name.get(n) for n in (".nv_fatbin", "__nv_relfatbin"))
    if linked:
        yield from _in_fatbin(linked.data, elf.what)
    # A linked program also keeps what its device code was linked from: the same kernels again.
    if relocatable and (elf.kind == ET_REL or not linked):
        yield from _in_fatbin(relocatable.data, elf.what)


def _in_fatbin(data: memoryview, what: str) -> Iterator[Member]:
    others = []
    found = False
    for index, entry in enumerate(fatbin.entries(data, what)):
        if entry.kind == fatbin.CUBIN:
            found = True
            yield Member(f"{what}[{index}] sm_{entry.arch}", entry)
        else:
            kind = {fatbin.PTX: "PTX", fatbin.LTO_IR: "LTO IR"}.get(entry.kind, f"{entry.kind}")
            others.append(f"{kind} for {entry.arch}")
    if others and not found:
        raise CubinError(f"{what}: holds no cubin, only {', '.join(others)}")


def _description(head: bytes) -> str:
    if not head:
        return "an empty file"
    for magic, text in _REFUSED.items():
        if head.startswith(magic):
            return text
    if b".version" in head and b".target" in head:
        return "PTX text, not a cubin; ptxas or nvcc -cubin makes one of it"
    if not any(head):
        return "zeros, not a cubin"
    return f"not a cubin, fat binary or ELF file (starts with {head[:8]!r})"
