"""Whatever is done to a valid header, the reader gives an answer or a GGUFError, and soon."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from work import calls

from pyruntime.errors import GGUFError
from pyruntime.gguf import GGUFFile, StringArray


def seed_file(path: Path) -> bytes:
    """A small file with keys of every type, arrays, quantized tensors and a raised alignment."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    for kind in gguf.GGUFValueType:
        name = kind.name.lower()
        if kind == gguf.GGUFValueType.STRING:
            writer.add_key_value(name, "text", kind)
            writer.add_key_value(f"{name}s", ["one", "", "three"], gguf.GGUFValueType.ARRAY)
        elif kind != gguf.GGUFValueType.ARRAY:
            writer.add_key_value(name, 1, kind)
            writer.add_key_value(f"{name}s", [1, 0, 1], gguf.GGUFValueType.ARRAY, sub_type=kind)
    values = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    writer.add_tensor("f32", values)
    for kind in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0):
        writer.add_tensor(kind.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return seed_file(tmp_path_factory.mktemp("seed") / "seed.gguf")


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "victim.gguf"


def read(path: Path) -> None:
    """Reads all there is, or is refused as it should be."""
    try:
        with GGUFFile.open(path) as file:
            for value in file.metadata.values():
                if isinstance(value, StringArray):
                    list(value)
            for tensor in file.tensors.values():
                if tensor.type is not None:
                    assert file.read(tensor.name).size == tensor.nbytes
    except GGUFError as error:
        assert str(error).startswith(f"{path}: ")
        assert len(str(error)) < 4000
        assert str(error).isprintable()


# An edit replaces `count` bytes at `place` (in parts of the file) by others: made-up ones,
# a number near a power of two, or a piece of the file.
PLACE = st.floats(0, 1)
COUNT = st.sampled_from([0, 1, 4, 8, 40, 10**6])
NUMBER = st.builds(
    lambda bits, more, size: ((1 << bits) + more).to_bytes(16, "little")[:size],
    st.sampled_from([1, 8, 16, 31, 32, 61, 63, 64]),
    st.integers(-1, 1),
    st.sampled_from([4, 8]),
)
EDITS = st.lists(
    st.tuples(PLACE, COUNT, st.one_of(st.binary(max_size=8), NUMBER, st.tuples(PLACE, COUNT))),
    min_size=1,
    max_size=4,
)


@settings(max_examples=500)
@given(edits=EDITS)
def test_edited_header(
    seed: bytes, victim: Path, edits: list[tuple[float, int, bytes | tuple[float, int]]]
) -> None:
    content = seed
    for place, count, new in edits:
        if isinstance(new, tuple):
            start = int(new[0] * len(content))
            new = content[start : start + new[1]]
        at = int(place * len(content))
        content = content[:at] + new + content[at + count :]
    victim.write_bytes(content)
    assert calls(lambda: read(victim)) < 5000  # the seed takes 1,500


def test_seed_is_valid(seed: bytes, victim: Path) -> None:
    victim.write_bytes(seed)
    with GGUFFile.open(victim) as file:
        assert len(file.metadata) == 2 + 2 * (len(gguf.GGUFValueType) - 1)
        assert len(file.tensors) == 3
