"""Cubins found in fat binaries, object files, libraries and folders, compressed or not."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from pyruntime.cubin import fatbin, lz4
from pyruntime.cubin.containers import members
from pyruntime.cubin.facts import read_cubin
from pyruntime.errors import CubinError

DATA = Path(__file__).parents[1] / "data" / "cubins"
HOST_FILES = ("host-lz4.fatbin", "host-zstd.fatbin", "host.o", "libhost.so")


@pytest.mark.parametrize("name", HOST_FILES)
def test_every_container_holds_the_same_kernels(name: str) -> None:
    found = members(DATA / name)
    assert [m.label for m in found] == [f"{DATA / name}[0] sm_80", f"{DATA / name}[1] sm_90"]
    for member, arch in zip(found, ("sm_80", "sm_90"), strict=True):
        facts = read_cubin(member.data(), member.label)
        assert facts.arch == arch
        assert {k.name: k.static_shared for k in facts.kernels} == {
            "_Z3sumPfi": 1024, "_Z5twicePf": 0,
        }  # fmt: skip


def test_compressed_and_plain_cubins_are_equal() -> None:
    """The code is the same whichever way it was stored (LZ4, zstd, not at all)."""
    stored = [[m.data() for m in members(DATA / name)] for name in HOST_FILES]
    assert stored[0] == stored[1] == stored[2] == stored[3]


def test_compression_is_named() -> None:
    for name, compression in (("host-lz4.fatbin", "LZ4"), ("host-zstd.fatbin", "zstd")):
        data = memoryview((DATA / name).read_bytes())
        assert {e.compression for e in fatbin.entries(data, name)} == {compression}


def test_ptx_decompresses_to_text() -> None:
    texts = []
    for name in ("host-lz4.fatbin", "host-zstd.fatbin"):
        data = memoryview((DATA / name).read_bytes())
        (entry,) = (e for e in fatbin.entries(data, name) if e.kind == fatbin.PTX)
        texts.append(entry.unpack(name))
        assert len(texts[-1]) == entry.size
    assert texts[0] == texts[1] and b".target sm_90" in texts[0]


def test_zstd_without_the_system_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(CubinError, match=r"host-zstd.fatbin\[0\] sm_80: compressed with zstd"):
        members(DATA / "host-zstd.fatbin")[0].data()


def test_code_that_is_not_linked_yet() -> None:
    (member,) = members(DATA / "unlinked.o")
    facts = read_cubin(member.data(), member.label)
    assert facts.remarks == ("not linked yet: shared memory and stack are this file's part only",)
    assert {k.name: k.static_shared for k in facts.kernels} == {
        "_Z3sumPfi": 1024, "_Z5twicePf": None,
    }  # fmt: skip


def test_a_folder_skips_what_is_no_device_code(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    shutil.copy(DATA / "nvcc-13.0-sm_80.cubin", tmp_path / "deep" / "a.cubin")
    shutil.copy(DATA / "libhost.so", tmp_path / "b.so")
    (tmp_path / "notes.txt").write_text("no code")
    (tmp_path / "broken.cubin").write_bytes(bytes(100))
    found = members(tmp_path)
    assert [m.label.removeprefix(f"{tmp_path}/") for m in found] == [
        "b.so[0] sm_80", "b.so[1] sm_90", "broken.cubin", "deep/a.cubin",
    ]  # fmt: skip
    with pytest.raises(CubinError, match=r"broken.cubin: zeros, not a cubin"):
        found[2].data()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "an empty file"),
        (bytes(4096), "zeros, not a cubin"),
        (b"//\n.version 9.0\n.target sm_90\n", "PTX text, not a cubin"),
        (b"!<arch>\nx", "a static library"),
        (b"PK\x03\x04", "a zip archive"),
        (b"hello, world", "not a cubin, fat binary or ELF file"),
        (b"\x7fELF\x01\x01\x01", "not a 64-bit little-endian ELF file"),
        (b"\x7fELF", "not a 64-bit little-endian ELF file"),
    ],
)
def test_other_files_are_named_for_what_they_are(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "kernel.cubin"
    path.write_bytes(content)
    with pytest.raises(CubinError, match=says):
        members(path)


def test_host_programs_without_device_code(tmp_path: Path) -> None:
    with pytest.raises(CubinError, match="no device code"):
        members(Path("/bin/sh").resolve())
    with pytest.raises(CubinError, match="No such file"):
        members(tmp_path / "missing.cubin")
    with pytest.raises(CubinError, match="no device code in 0 files"):
        members(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CubinError, match="not a regular file"):
        members(tmp_path / "pipe")


def test_a_fat_binary_with_ptx_only(tmp_path: Path) -> None:
    data = (DATA / "host-lz4.fatbin").read_bytes()
    start = 16 + sum(
        int.from_bytes(data[at + 4 : at + 8], "little")
        + int.from_bytes(data[at + 8 : at + 16], "little")
        for at in (16, 0xB70)
    )
    path = tmp_path / "ptx.fatbin"
    path.write_bytes(data[:8] + (len(data) - start).to_bytes(8, "little") + data[start:])
    with pytest.raises(CubinError, match="holds no cubin, only PTX for 90"):
        members(path)


@pytest.mark.parametrize("name", HOST_FILES)
def test_damage_is_a_cubin_error(name: str, tmp_path: Path) -> None:
    """Truncated anywhere, or with bytes overwritten: an answer or a CubinError, nothing else."""
    random.seed(name)
    whole = (DATA / name).read_bytes()
    path = tmp_path / name
    refused = 0
    for trial in range(300):
        data = bytearray(whole)
        if trial % 2:
            del data[random.randrange(len(data)) :]
        else:
            for _ in range(8):
                data[random.randrange(min(len(data), 9000))] = random.randrange(256)
        path.write_bytes(data)
        try:
            for member in members(path):
                read_cubin(member.data(), member.label)
        except CubinError as error:
            refused += 1
            assert name in str(error)
    assert refused > 100


def test_lz4_examples() -> None:
    """A run (a match that overlaps what it writes), long lengths, and literals only."""

    def unpack(data: bytes, size: int) -> bytes:
        return lz4.decompress(memoryview(data), size, "block")

    assert unpack(b"\x30abc", 3) == b"abc"
    assert unpack(b"\x1fa\x01\x00\x05\x10b", 26) == b"a" * 25 + b"b"
    literals = bytes(range(256)) * 2
    assert unpack(b"\xf0\xff\xf2" + literals, 512) == literals
    for bad in (b"\x30ab", b"\x10a\x02\x00", b"\x10a\x00\x00", b"\xf0\xff", b"\x30abc\x00"):
        with pytest.raises(CubinError, match="block: a damaged LZ4 block"):
            unpack(bad, 3)
