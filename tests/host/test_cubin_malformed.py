"""Cubins that are damaged, empty, huge or hostile: an answer or a CubinError, nothing else."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import pytest

from pyruntime.cubin.elf import Elf
from pyruntime.cubin.facts import read_cubin
from pyruntime.errors import CubinError

DATA = Path(__file__).parents[1] / "data" / "cubins"
CUBINS = sorted(p.name for p in DATA.glob("*.cubin"))
ENTRY = 0x10


def synthetic(kernels: int) -> bytes:
    """A minimal ABI 8 cubin for sm_90 with so many kernels of 16 bytes of code."""
    names = [f"k{i}" for i in range(kernels)]
    info = b"".join(struct.pack("<BBHII", 4, 0x2F, 8, i + 1, 32 + i % 100) for i in range(kernels))
    texts = [(f".text.{n}", 1, bytes(16)) for n in names]
    strings = b"\0" + b"".join(n.encode() + b"\0" for n in names)
    symbols = bytes(24)
    offset = 1
    for i, name in enumerate(names):
        symbols += struct.pack("<IBBHQQ", offset, 0x12, ENTRY, 5 + i, 0, 16)
        offset += len(name) + 1
    sections = [("", 0, b""), (".shstrtab", 3, b""), (".strtab", 3, strings),
                (".symtab", 2, symbols), (".nv.info", 0x70000000, info), *texts]  # fmt: skip
    name_table = b"".join(name.encode() + b"\0" for name, *_ in sections)
    sections[1] = (".shstrtab", 3, name_table)
    body, headers, at = b"", b"", 0
    for name, kind, data in sections:
        link = 2 if name == ".symtab" else 0
        headers += struct.pack(
            "<IIQQQQIIQQ", at, kind, 0, 0, 64 + len(body), len(data), link, 0, 1, 0
        )
        at += len(name) + 1
        body += data
    head = b"\x7fELF\x02\x01\x01\x41\x08" + bytes(7)
    head += struct.pack(
        "<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), 90 << 8 | 4, 64, 0, 0, 64,
        len(sections), 1,
    )  # fmt: skip
    return head + body + headers


def test_no_kernels() -> None:
    assert read_cubin(synthetic(0), "empty").kernels == ()


def test_five_thousand_kernels() -> None:
    data = synthetic(5000)
    start = time.process_time()
    found = read_cubin(data, "many")
    assert time.process_time() - start < 5
    assert [k.registers for k in found.kernels] == [32 + i % 100 for i in range(5000)]


@pytest.mark.parametrize("name", CUBINS)
def test_truncated_anywhere(name: str) -> None:
    data = (DATA / name).read_bytes()
    end = struct.unpack_from("<Q", data, 0x20)[0]  # program headers come last; they are not read
    for size in [*range(200), *range(200, end, 997)]:
        try:
            remarks = read_cubin(data[:size], name).remarks
        except CubinError as error:
            assert name in str(error)
        else:
            assert any("lies past the end" in remark for remark in remarks)


@pytest.mark.parametrize("name", CUBINS)
def test_zeroed_from_anywhere_or_overwritten(name: str) -> None:
    random.seed(name)
    whole = (DATA / name).read_bytes()
    for trial in range(200):
        data = bytearray(whole)
        if trial % 2:
            start = random.randrange(len(data))
            data[start:] = bytes(len(data) - start)
        else:
            for _ in range(random.choice([1, 20])):
                data[random.randrange(len(data))] = random.randrange(256)
        try:
            read_cubin(bytes(data), name)
        except CubinError as error:
            assert name in str(error) and len(str(error)) < 4000


@pytest.mark.parametrize("value", [2**31, 2**40, 2**63, 2**64 - 1])
def test_huge_section_offsets_and_sizes(value: int) -> None:
    name = "nvcc-13.0-sm_90a.cubin"
    whole = (DATA / name).read_bytes()
    table = struct.unpack_from("<Q", whole, 0x28)[0]
    needed = {".shstrtab", ".symtab", ".strtab", ".nv.info", ".nv.info.plain", ".text.plain"}
    for index, section in enumerate(Elf(whole, name).sections):
        for field in (0x18, 0x20):
            data = bytearray(whole)
            struct.pack_into("<Q", data, table + 64 * index + field, value)
            try:
                remarks = read_cubin(bytes(data), name).remarks
            except CubinError as error:
                assert "run past the end" in str(error)
            else:
                assert section.name not in needed
                assert remarks or section.kind in (0, 8)  # no bytes in the file
    data = bytearray(whole)
    struct.pack_into("<Q", data, 0x28, value)
    with pytest.raises(CubinError, match="run past the end"):
        read_cubin(bytes(data), name)


def test_names_cannot_command_a_terminal() -> None:
    data = (DATA / "nvcc-13.0-sm_90a.cubin").read_bytes().replace(b"plain\0", b"\x1b[2J\xff\0")
    assert r"\x1b[2J\xff" in {k.name for k in read_cubin(data, "hostile").kernels}


def test_a_contract_of_another_version_is_a_remark() -> None:
    name = "nvcc-13.0-sm_90a.cubin"
    data = (DATA / name).read_bytes().replace(b"SRYP"[::-1], b"SRYX"[::-1])
    found = read_cubin(data, name)
    (kernel,) = (k for k in found.kernels if k.name == "tile_t128")
    assert kernel.spec is None and kernel.registers
    assert len(found.remarks) == 1 and "tile_t128 carries contract" in found.remarks[0]
