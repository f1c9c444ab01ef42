"""What the reader gives, against gguf-py's own reader and writer."""

from __future__ import annotations

import itertools
import re
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from work import calls

from pyruntime.errors import GGUFError
from pyruntime.gguf import TYPES, GGUFFile, StringArray, by_name, type_name

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
MODELS = sorted(GOLDEN.glob("tiny-*.gguf"))


def write(
    path: Path,
    keys: dict[str, tuple[Any, gguf.GGUFValueType]] | None = None,
    tensors: Sequence[str] = ("t",),
) -> Path:
    """A file by gguf-py: keys as (value or list of values, type), f32 tensors [2, 4] of 0, 1, …"""
    writer = gguf.GGUFWriter(path, "llama")
    for key, (value, kind) in (keys or {}).items():
        if isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=kind)
        else:
            writer.add_key_value(key, value, kind)
    for number, name in enumerate(tensors):
        writer.add_tensor(name, np.full((2, 4), number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_type_is_as_in_ggml() -> None:
    for type_id, row in TYPES.items():
        kind = gguf.GGMLQuantizationType[row.name]
        assert (row.id, type_id) == (kind, kind)
        assert (row.block, row.bytes) == gguf.GGML_QUANT_SIZES[kind]
        assert by_name(row.suffix) is row
        assert row.nbytes(3 * row.block) == 3 * row.bytes
    assert len(TYPES) == 15


def test_names_of_other_types() -> None:
    assert type_name(12) == "Q4_K"
    assert type_name(16) == "type 16 (IQ2_XXS, not supported)"
    assert [type_name(i) for i in (4, 36)] == ["type 4 (removed)", "type 36 (removed)"]
    assert type_name(10**6) == "type 1000000 (unknown)"
    with pytest.raises(ValueError, match=r"'q9'; supported: F32, F16, .*IQ4_XS"):
        by_name("q9")


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_equal_to_gguf_py(path: Path) -> None:
    reference = gguf.GGUFReader(path)
    with GGUFFile.open(path) as file:
        assert file.version == 3
        assert file.size_bytes == path.stat().st_size
        expected = {
            name: field.contents()
            for name, field in reference.fields.items()
            if not name.startswith("GGUF.")
        }
        assert dict(file.metadata) == expected
        assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
        for tensor in reference.tensors:
            ours = file.tensors[tensor.name]
            assert ours.shape == tuple(reversed(tensor.shape.tolist()))
            assert (ours.type_id, ours.offset) == (tensor.tensor_type, tensor.data_offset)
            np.testing.assert_array_equal(
                file.read(tensor.name), tensor.data.reshape(-1).view("u1")
            )
            values = file.dequantize(tensor.name)
            assert values.dtype == np.float32
            assert values.shape == ours.shape
            want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(values, want)


def test_golden_files_cover_every_type() -> None:
    used = set[int]()
    for path in MODELS:
        with GGUFFile.open(path) as file:
            used |= {tensor.type_id for tensor in file.tensors.values()}
    assert used == set(TYPES)


def test_every_value_type(tmp_path: Path) -> None:
    kinds = gguf.GGUFValueType
    scalars: dict[str, tuple[Any, gguf.GGUFValueType]] = {
        "u8": (2**8 - 1, kinds.UINT8),
        "i8": (-(2**7), kinds.INT8),
        "u16": (2**16 - 1, kinds.UINT16),
        "i16": (-(2**15), kinds.INT16),
        "u32": (2**32 - 1, kinds.UINT32),
        "i32": (-(2**31), kinds.INT32),
        "u64": (2**64 - 1, kinds.UINT64),
        "i64": (-(2**63), kinds.INT64),
        "f32": (0.5, kinds.FLOAT32),
        "f64": (0.1, kinds.FLOAT64),
        "bool": (True, kinds.BOOL),
        "string": ("grüße\0\n", kinds.STRING),
    }
    arrays = {f"{key}s": ([value, value], kind) for key, (value, kind) in scalars.items()}
    with GGUFFile.open(write(tmp_path / "m.gguf", scalars | arrays)) as file:
        for key, (value, _) in scalars.items():
            assert type(file.metadata[key]) is type(value)
            assert file.metadata[key] == value
            assert list(file.metadata[f"{key}s"]) == [value, value]  # type: ignore[arg-type]


def test_string_array_behaves_like_a_list(tmp_path: Path) -> None:
    words = ["", "a", "bc", "é€😀", "d" * 300]
    path = write(tmp_path / "m.gguf", {"words": (words, gguf.GGUFValueType.STRING)})
    with GGUFFile.open(path) as file:
        array = file.metadata["words"]
    assert isinstance(array, StringArray)
    assert list(array) == words
    assert len(array) == 5
    assert array[-2] == words[-2]
    assert array[1:4] == words[1:4]
    assert array.index("bc") == 2
    assert "x" not in array
    with pytest.raises(IndexError):
        array[5]


def test_string_that_is_not_utf8_is_named_when_decoded(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"words": (["ab", "cX"], gguf.GGUFValueType.STRING)})
    content = path.read_bytes()
    at = content.index(b"cX") + 1
    path.write_bytes(content.replace(b"cX", b"c\xff"))
    with GGUFFile.open(path) as file:
        words = file.metadata["words"]
    assert isinstance(words, StringArray)
    assert words[0] == "ab"
    with pytest.raises(GGUFError, match=f"byte {at}: key 'words', string 1: is not UTF-8"):
        words[1]


def test_version_2_any_alignment_gaps_order_and_trailing_bytes(tmp_path: Path) -> None:
    """Legal oddities: version 2, alignment as u8, data in another order with gaps, a tail."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    header = b"GGUF" + struct.pack("<IQQ", 2, 2, 1)
    header += string("general.alignment") + struct.pack("<IB", 0, 8)
    header += string("late") + struct.pack("<IQIQ", 1, 2, 0, 64)
    header += string("early") + struct.pack("<IQQIQ", 2, 1, 3, 0, 8)
    header += bytes(-len(header) % 8)
    data = struct.pack("<2x3x3x 3f 44x 2f 5x", 1, 2, 3, 4, 5)
    path = tmp_path / "odd.gguf"
    path.write_bytes(header + data)
    with GGUFFile.open(path) as file:
        assert file.version == 2
        assert file.dequantize("late").tolist() == [4, 5]
        assert file.dequantize("early").tolist() == [[1], [2], [3]]


@pytest.mark.parametrize("type_id", [4, 5, 31, 32, 33, 36, 37, 38, 42, 10**6])
def test_unknown_types_are_listed_but_not_read(type_id: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tensors=("t", "x"))
    content = path.read_bytes()
    entry = content.index(b"x" + struct.pack("<IQQI", 2, 4, 2, 0))
    at = entry + 1 + 4 + 16
    path.write_bytes(content[:at] + struct.pack("<I", type_id) + content[at + 4 :])
    with GGUFFile.open(path) as file:
        tensor = file.tensors["x"]
        assert (tensor.type, tensor.type_id, tensor.nbytes) == (None, type_id, 0)
        assert file.read("t").size == 32
        for method in (file.read, file.dequantize):
            with pytest.raises(GGUFError, match=rf"byte {entry - 8}: tensor 'x': .*type {type_id}"):
                method("x")


def test_read_into_part_of_a_tensor(tmp_path: Path) -> None:
    with GGUFFile.open(write(tmp_path / "m.gguf", tensors=("s", "t"))) as file:
        whole = file.read("t")
        part = bytearray(7)
        file.read_into(file.tensors["t"], 5, memoryview(part))
        assert bytes(part) == whole[5:12].tobytes()
        halves = np.empty((2, 8), np.float16)
        file.read_into(file.tensors["t"], 0, halves.data)
        assert halves.tobytes() == whole.tobytes()
        for offset in (-1, 26):
            with pytest.raises(ValueError, match="not inside"):
                file.read_into(file.tensors["t"], offset, memoryview(part))
        with pytest.raises(GGUFError, match="tensor 'none': is missing"):
            file.read("none")


def test_float32_needs_no_gguf_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GGUFFile.open(write(tmp_path / "m.gguf", tensors=("s", "t"))) as file:
        monkeypatch.setitem(sys.modules, "gguf", None)  # an import of it fails
        values = file.dequantize("t")
    assert values.dtype == np.float32 and values.tolist() == [[1] * 4] * 2


def test_where_names_file_offset_and_item(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    with GGUFFile.open(path) as file:
        value_at = path.read_bytes().index(b"llama") - 8
        assert file.where() == str(path)
        assert file.where(key="none") == f"{path}: key 'none'"
        key = "general.architecture"
        assert file.where(key=key) == f"{path}: byte {value_at}: key '{key}'"
        entry = file.tensors["t"].entry
        assert file.where(tensor="t") == f"{path}: byte {entry}: tensor 't'"


def fingerprint(path: Path) -> str:
    with GGUFFile.open(path) as file:
        return file.fingerprint


def test_a_fingerprint_tells_files_apart(tmp_path: Path) -> None:
    """By a metadata value, and by any byte at the start or the end of a tensor's data."""
    content = bytearray((GOLDEN / "tiny-llama-q8_0.gguf").read_bytes())
    path = tmp_path / "m.gguf"

    def of(changes: dict[int, int]) -> str:
        changed = bytearray(content)
        for at, value in changes.items():
            changed[at] ^= value
        path.write_bytes(changed)
        return fingerprint(path)

    with GGUFFile.open(GOLDEN / "tiny-llama-q8_0.gguf") as file:
        tensor = max(file.tensors.values(), key=lambda tensor: tensor.nbytes)
        end = tensor.offset + tensor.nbytes
        places = [tensor.offset, tensor.offset + 4095, end - 4096, end - 1]
        small = min(file.tensors.values(), key=lambda tensor: tensor.nbytes)
        places += [small.offset, small.offset + small.nbytes - 1]
        places.append(content.index(b"tiny llama"))
        plain = file.fingerprint
    assert plain == of({}) and re.fullmatch("[0-9a-f]{64}", plain)
    assert len({plain, *(of({place: 1}) for place in places)}) == 1 + len(places)
    assert of({tensor.offset + tensor.nbytes // 2: 1}) == plain  # what it is said to miss


def test_a_fingerprint_is_over_all_shards(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    plain = fingerprint(paths[0])
    assert fingerprint(paths[1]) == plain
    content = bytearray(paths[2].read_bytes())
    content[-1] ^= 1  # of the last tensor
    paths[2].write_bytes(content)
    assert fingerprint(paths[0]) != plain


def test_a_fingerprint_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    with GGUFFile.open(path) as asked, GGUFFile.open(path) as other:
        first = asked.fingerprint
    assert asked.fingerprint == first
    with pytest.raises(GGUFError, match=r"m\.gguf: .*the file is closed"):
        _ = other.fingerprint


def test_threads_read_the_same(tmp_path: Path) -> None:
    with GGUFFile.open(GOLDEN / "tiny-llama-q4_k_m.gguf") as file:
        expected = {name: file.read(name).tobytes() for name in file.tensors}
        wrong: list[str] = []

        def read() -> None:
            for name in itertools.chain(expected, reversed(expected)):
                if file.read(name).tobytes() != expected[name]:
                    wrong.append(name)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_header_of_a_large_vocabulary_is_cheap(tmp_path: Path) -> None:
    """Two calls for each string, which is not decoded."""
    tokens = [f"t{i}" for i in range(152_064)]
    merges = [f"m m{i}" for i in range(151_387)]
    kind = gguf.GGUFValueType.STRING
    path = write(tmp_path / "v.gguf", {"tokens": (tokens, kind), "merges": (merges, kind)})
    files: list[GGUFFile] = []
    made = calls(lambda: files.append(GGUFFile.open(path)))
    tracemalloc.start()
    with GGUFFile.open(path):
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with files[0] as file:
        assert file.metadata["tokens"][151_935] == "t151935"  # type: ignore[index]
        assert file.metadata["merges"][151_386] == "m m151386"  # type: ignore[index]
    assert made < 2.5 * (len(tokens) + len(merges))
    assert peak < 20e6


def test_the_reader_imports_no_gguf_py() -> None:
    code = "import sys, pyruntime.gguf; print({'gguf', 'cuda'} & sys.modules.keys())"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def write_shards(folder: Path, total: int = 3) -> list[Path]:
    """A model of three shards that hold the tensors `w0`, `w1`, `w2`."""
    kinds = gguf.GGUFValueType
    paths = []
    for number in range(3):
        keys = {
            "split.no": (number, kinds.UINT16),
            "split.count": (3, kinds.UINT16),
            "split.tensors.count": (total, kinds.INT32),
            "number": (number, kinds.UINT8),
        }
        paths.append(write(folder / f"m-{number + 1:05}-of-00003.gguf", keys, [f"w{number}"]))
    return paths


@pytest.mark.parametrize("opened", [0, 2])
def test_shards_are_one_model(opened: int, tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    with GGUFFile.open(paths[opened]) as file:
        assert file.path == paths[opened]
        assert file.metadata["number"] == 0
        assert [tensor.shard for tensor in file.tensors.values()] == [0, 1, 2]
        assert file.size_bytes == sum(path.stat().st_size for path in paths)
        assert "-00003-of-00003.gguf: byte " in file.where(tensor="w2")


def test_wrong_shards(tmp_path: Path) -> None:
    first, second, third = write_shards(tmp_path)

    def refused(path: Path, words: str) -> None:
        with pytest.raises(GGUFError, match=words):
            GGUFFile.open(path)

    # swapped
    second.rename(tmp_path / "x")
    third.rename(second)
    refused(first, r"-00002-of-00003.gguf: byte \d+: key 'split.no': is 2, but .* be 1")
    # missing
    second.rename(third)
    refused(first, r"-00002-of-00003.gguf: cannot be opened: No such file")
    (tmp_path / "x").rename(second)
    # renamed to a file of its own, or of another count
    alone = tmp_path / "alone.gguf"
    first.rename(alone)
    refused(alone, r"alone.gguf: byte \d+: key 'split.count': is 3, but .* be 1")
    other = alone.rename(tmp_path / "m-00001-of-00001.gguf")
    refused(other, r"byte \d+: key 'split.count': is 3, but .* be 1")
    # a file that is no shard under a shard's name
    write(first)
    refused(first, r"m-00001-of-00003.gguf: key 'split.count': is missing, but .* be 3")
    # one tensor in two shards
    write_shards(tmp_path)
    path = second.read_bytes().replace(b"w1", b"w0")
    second.write_bytes(path)
    refused(first, r"-00002-of-00003.gguf: byte \d+: tensor 'w0': is in an earlier shard, too")
    # wrong number of tensors
    write_shards(tmp_path, total=4)
    refused(first, r"-00001-of-00003.gguf: byte \d+: key 'split.tensors.count': is 4, .* be 3")


def test_split_keys_of_a_merged_file(tmp_path: Path) -> None:
    """What gguf-split --merge leaves in a file."""
    kinds = gguf.GGUFValueType
    keys = {"split.no": (0, kinds.UINT16), "split.count": (0, kinds.UINT16)}
    keys["split.tensors.count"] = (1, kinds.INT32)
    with GGUFFile.open(write(tmp_path / "m.gguf", keys)) as file:
        assert len(file.tensors) == 1


def test_name_of_a_shard_that_cannot_be(tmp_path: Path) -> None:
    with GGUFFile.open(write(tmp_path / "m-00000-of-00000.gguf")) as file:
        assert list(file.tensors) == ["t"]
