"""Where a cubin comes from: its architecture, the tool that wrote it and that tool's options."""

from __future__ import annotations

import struct

from pyruntime.cubin import attributes
from pyruntime.cubin.elf import Elf, printable


def arch_of(elf: Elf) -> str:
    """The name after -arch. ABI 7 (CUDA 12 below sm_100) and ABI 8 keep it in different bits."""
    if elf.abi_version < 8:
        return f"sm_{elf.flags & 0xFF}" + ("a" if elf.flags & 0x800 else "")
    # CUDA 12.9 flags the `a` variant in e_flags, 13 in attribute 9 of `.nv.compat`.
    compat = attributes.find(attributes.section(elf, ".nv.compat"), 0x09)
    specific = elf.flags & 0x8 or (compat is not None and compat.value == 1)
    return f"sm_{elf.flags >> 8 & 0xFF}" + ("a" if specific else "")


def tool_of(elf: Elf) -> tuple[str | None, str | None]:
    """Tool with version, and its options, from `.note.nv.tkinfo` (ABI 8 only).

    After the note's head of 12 bytes and the owner's name: two words, the offsets of four strings
    (tool, version, build, options, preceded by the object's), and the strings.
    """
    section = elf.by_name.get(".note.nv.tkinfo")
    if section is None or len(section.data) < 48:
        return None, None
    body = bytes(section.data[24:])
    strings = body[24:]
    tool, version, _, options = (
        printable(strings[at:].split(b"\0", 1)[0]).strip()
        for at in struct.unpack_from("<4I", body, 8)
    )
    return f"{tool} {version.rsplit(', ', 1)[-1]}".strip() or None, " ".join(
        options.split()
    ) or None
