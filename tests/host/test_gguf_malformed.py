"""Files that are no good: each is refused with one class of error, at once, and says where."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from gguf_bytes import (
    ARCH,
    ARRAY,
    BOOL,
    F32,
    Q4_0,
    Q4_K,
    STRING,
    U8,
    U32,
    U64,
    gguf,
    pair,
    string,
    tensor,
    u32,
    u64,
)  # fmt: skip

from pyruntime.errors import GGUFError
from pyruntime.gguf import GGUFFile

KEY_AT = 24 + len(ARCH)  # offset of what follows the first pair


def keyed(type_id: int, value: bytes) -> bytes:
    """A file whose second key `k` has this value; the value is at byte KEY_AT + 13."""
    return gguf(ARCH, pair("k", type_id, value))


VALUE_AT = KEY_AT + 8 + 1 + 4


def aligned(type_id: int, value: bytes) -> bytes:
    return gguf(pair("general.alignment", type_id, value))


def one_tensor(dims: list[int], type_id: int = 0, offset: int = 0, data: int = 1024) -> bytes:
    return gguf(ARCH, tensors=(tensor("t", dims, type_id, offset),), data=data)


NESTED = b"".join(u32(ARRAY) + u64(1) for _ in range(10_000))
K = "key 'k'"
T = "tensor 't'"
ALIGNMENT = "key 'general.alignment'"
COMPLETE = gguf(
    ARCH,
    pair("k", ARRAY, u32(STRING) + u64(2) + string("a") + string("b")),
    tensors=(tensor("t", [32, 2], Q4_0, 0), tensor("s", [8], 0, 64)),
    data=96,
)

# name: (bytes of the file, byte offset in the message, key or tensor in it, words in it)
CASES: dict[str, tuple[bytes, int, str, str]] = {
    "empty": (b"", 0, "magic", "empty"),
    "three bytes": (b"GGU", 0, "magic", "ends after 3"),
    "magic only": (b"GGUF", 4, "version", "ends after 0"),
    "ggml": (b"lmgg" + bytes(60), 0, "magic", "GGML"),
    "ggjt": (b"tjgg" + bytes(60), 0, "magic", "GGJT"),
    "zip": (b"PK\3\4" + bytes(60), 0, "magic", "zip"),
    "html": (b"\n<!DOCTYPE html><html>", 0, "magic", "HTML"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid", 0, "magic", "Git LFS"),
    "other": (b"\x00\x01\x02\x03" + bytes(60), 0, "magic", "not a GGUF file"),
    "FUGG": (b"FUGG" + bytes(60), 0, "magic", "big-endian"),
    "version swapped": (b"GGUF" + struct.pack(">I", 3) + bytes(60), 4, "version", "big-endian"),
    **{f"version {v}": (gguf(version=v), 4, "version", str(v)) for v in (0, 1, 4, 2**32 - 1)},
    "n_tensors 2**63": (gguf(n_tensors=2**63), 8, "number of tensors", "more than"),
    "n_tensors 10**9": (gguf(n_tensors=10**9), 8, "number of tensors", "more than"),
    "n_tensors 1 of 0": (gguf(n_tensors=1), 24, "tensor 0 of 1", "ends after 0"),
    "n_keys 10**8": (gguf(n_keys=10**8) + bytes(20), 16, "number of keys", "more than"),
    "n_keys 9 of 1": (gguf(ARCH, n_keys=9), KEY_AT, "key 1 of 9", "ends after 0"),
    **{
        f"key length {n}": (gguf(ARCH, u64(n) + b"abcd"), KEY_AT, "key 1 of 2", f"{n} bytes")
        for n in (2**64 - 1, 10**12, 65536)
    },
    "key length remaining + 1": (
        gguf(ARCH, u64(5) + b"abcd"),
        KEY_AT + 8,
        "key 1 of 2",
        "needs 5 bytes, the file ends after 4",
    ),
    "key empty": (gguf(ARCH, pair("", U8, b"\1")), KEY_AT, "key 1 of 2", "0 bytes"),
    "key not UTF-8": (gguf(ARCH, pair(b"a\xff", U8, b"\1")), KEY_AT + 9, "key 1 of 2", "UTF-8"),
    "key with NUL": (gguf(ARCH, pair("a\0b", U8, b"\1")), KEY_AT, "key 1 of 2", "NUL"),
    "key twice": (gguf(ARCH, ARCH), KEY_AT, "key 'general.architecture'", "twice"),
    **{f"value type {t}": (keyed(t, bytes(9)), VALUE_AT, K, f"type {t}") for t in (13, 255)},
    "bool 2": (keyed(BOOL, b"\2"), VALUE_AT, K, "neither 0 nor 1"),
    "bool 255 in array": (
        keyed(ARRAY, u32(BOOL) + u64(3) + b"\0\1\xff"),
        VALUE_AT + 14,
        K,
        "neither 0 nor 1",
    ),
    "string value not UTF-8": (keyed(STRING, string(b"\xc3(")), VALUE_AT + 8, K, "UTF-8"),
    "string value of 2**64 - 1": (keyed(STRING, u64(2**64 - 1)), VALUE_AT + 8, K, "ends after"),
    "array of 2**63 u8": (keyed(ARRAY, u32(U8) + u64(2**63)), VALUE_AT + 4, K, "more than"),
    "array of 2**61 u64": (keyed(ARRAY, u32(U64) + u64(2**61)), VALUE_AT + 4, K, "more than"),
    "array longer than the file": (
        keyed(ARRAY, u32(U64) + u64(2) + bytes(15)),
        VALUE_AT + 12,
        K,
        "needs 16 bytes, the file ends after 15",
    ),
    "arrays of arrays": (keyed(ARRAY, NESTED), VALUE_AT, K, "arrays of arrays"),
    "empty array of arrays": (keyed(ARRAY, u32(ARRAY) + u64(0)), VALUE_AT, K, "arrays of arrays"),
    "empty array of type 13": (keyed(ARRAY, u32(13) + u64(0)), VALUE_AT + 12, K, "type 13"),
    "second string overruns": (
        keyed(ARRAY, u32(STRING) + u64(3) + string("abc") + u64(2**64 - 8) + bytes(40)),
        VALUE_AT + 12 + 11,
        "key 'k', string 1",
        "ends after 48",
    ),
    "third string is missing": (
        keyed(ARRAY, u32(STRING) + u64(3) + string("abc") + string("")),
        VALUE_AT + 12 + 19,
        "key 'k', string 2",
        "ends after 0",
    ),
    **{
        f"alignment {n}": (aligned(U32, u32(n)), 45 + 8, ALIGNMENT, "power of two")
        for n in (0, 3, 4, 13, 48, 131072, 2**31)
    },
    "alignment f32": (aligned(F32, struct.pack("<f", 32)), 53, ALIGNMENT, "power of two"),
    "alignment bool": (aligned(BOOL, b"\1"), 53, ALIGNMENT, "power of two"),
    "alignment string": (aligned(STRING, string("32")), 53, ALIGNMENT, "power of two"),
    "adapter": (
        gguf(ARCH, pair("general.type", STRING, string("adapter"))),
        KEY_AT + 24,
        "key 'general.type'",
        "LoRA adapter",
    ),
    **{
        f"n_dims {n}": (
            gguf(ARCH, tensors=(string("t") + u32(n) + u64(1) * 8,)),
            KEY_AT + 9,
            T,
            str(n),
        )
        for n in (0, 5, 2**32 - 1)
    },
    **{
        f"dims {dims}": (one_tensor(dims), KEY_AT + 13, T, "impossible shape")
        for dims in ([0], [32, 0], [2**63], [2**32, 2**31], [2**32, 2**32], [2**33] * 4)
    },
    "rows of 31 in Q4_0": (one_tensor([31, 2], Q4_0), KEY_AT + 13, T, "Q4_0 blocks of 32"),
    "rows of 32 in Q4_K": (one_tensor([32, 8], Q4_K), KEY_AT + 13, T, "Q4_K blocks of 256"),
    "offset misaligned": (one_tensor([8], offset=16), KEY_AT, T, "multiple of the alignment 32"),
    "offset 2**64 - 32": (one_tensor([8], offset=2**64 - 32), KEY_AT, T, "runs past"),
    "offset at the end": (one_tensor([8], offset=1024), KEY_AT, T, "runs past"),
    "unknown type past the end": (one_tensor([8], 36, 2048), KEY_AT, T, "runs past"),
    "one byte short": (one_tensor([8], data=31), KEY_AT, T, "runs past"),
    "half the data": (one_tensor([256, 64], Q4_K, data=64 * 72), KEY_AT, T, "runs past"),
    "product beyond the file": (one_tensor([2**40]), KEY_AT, T, "runs past"),
    "overlapping": (
        gguf(ARCH, tensors=(tensor("s", [16], 0, 32), tensor("t", [9], 0, 0)), data=128),
        KEY_AT,
        "tensor 's'",
        "overlaps tensor 't'",
    ),
    "same data twice": (
        gguf(ARCH, tensors=(tensor("s", [8], 0, 0), tensor("t", [8], 0, 0)), data=128),
        KEY_AT + 33,
        T,
        "overlaps tensor 's'",
    ),
    "tensor twice": (
        gguf(ARCH, tensors=(tensor("t", [8], 0, 0), tensor("t", [8], 0, 32)), data=128),
        KEY_AT + 33,
        T,
        "twice",
    ),
    "tensor name of 300": (
        gguf(ARCH, tensors=(tensor("n" * 300, [8], 0, 0),), data=32),
        KEY_AT,
        "tensor 0 of 1",
        "300 bytes",
    ),
    "tensor name empty": (
        gguf(ARCH, tensors=(tensor("", [8], 0, 0),), data=32),
        KEY_AT,
        "tensor 0 of 1",
        "0 bytes",
    ),
    "tensor name with NUL": (
        gguf(ARCH, tensors=(tensor("a\0", [8], 0, 0),), data=32),
        KEY_AT,
        "tensor 0 of 1",
        "NUL",
    ),
}


def refusal(path: Path) -> str:
    """The message with which `path` is refused, after checking what every refusal promises."""
    started = time.process_time()
    with pytest.raises(GGUFError) as caught:
        GGUFFile.open(path)
    # At once: 10**8 strings, which some files claim, would take more than 5 s to walk over.
    assert time.process_time() - started < 3
    message = str(caught.value)
    assert message.startswith(str(path)[:100]) and len(message) < 4000 and message.isprintable()
    tracemalloc.start()
    with pytest.raises(GGUFError):
        GGUFFile.open(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64e6
    return message


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, tmp_path: Path) -> None:
    content, offset, item, words = CASES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith(f"{path}: byte {offset}: {item}: ")
    assert words in message


def test_complete_file_is_accepted_and_each_truncation_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(COMPLETE)
    GGUFFile.open(path).close()
    for size in range(len(COMPLETE)):
        path.write_bytes(COMPLETE[:size])
        with pytest.raises(GGUFError, match=r": byte \d+: "):
            GGUFFile.open(path)


@pytest.mark.parametrize("element", [U8, F32, BOOL, STRING])
def test_empty_array_is_accepted(element: int, tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.write_bytes(keyed(ARRAY, u32(element) + u64(0)))
    with GGUFFile.open(path) as file:
        assert len(file.metadata["k"]) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["k" * 65535, "k" * 65536, "\x1b[31m\n\u202e" * 1000])
def test_message_about_long_or_hostile_key_is_short_and_printable(key: str, tmp_path: Path) -> None:
    path = tmp_path / ("p" * 200 + "\n.gguf")
    path.write_bytes(gguf(pair(key, 13, b"")))
    with pytest.raises(GGUFError) as caught:
        GGUFFile.open(path)
    assert len(str(caught.value)) < 4000
    assert str(caught.value).isprintable()


def sparse(path: Path, start: bytes, size: int) -> Path:
    path.write_bytes(start)
    os.truncate(path, size)
    return path


@pytest.mark.parametrize("element", [U8, STRING])
def test_array_of_1e8_in_sparse_file(element: int, tmp_path: Path) -> None:
    """10**8 empty strings, or bytes, that the file could well hold."""
    start = gguf(ARCH, string("k") + u32(ARRAY) + u32(element) + u64(10**8))
    assert K in refusal(sparse(tmp_path / "s.gguf", start, 10**9))


def test_string_of_1e9_in_sparse_file(tmp_path: Path) -> None:
    start = gguf(ARCH, string("k") + u32(STRING) + u64(10**9))
    assert K in refusal(sparse(tmp_path / "s.gguf", start, 2 * 10**9))


def test_counts_at_the_limit_in_sparse_file(tmp_path: Path) -> None:
    start = gguf(n_tensors=1 << 16, n_keys=1 << 16)
    assert "key 0 of 65536" in refusal(sparse(tmp_path / "s.gguf", start, 10**9))


def test_a_count_of_shards_that_the_file_does_not_confirm(tmp_path: Path) -> None:
    """Nobody looks for the other 99,998."""
    path = tmp_path / "m-00001-of-99999.gguf"
    path.write_bytes(gguf(ARCH))
    assert "key 'split.count': is missing" in refusal(path)


def test_directory_pipe_device_and_loop(tmp_path: Path) -> None:
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    assert "directory" in refusal(tmp_path)
    assert "pipe" in refusal(pipe)
    assert "device" in refusal(Path("/dev/zero"))
    assert "symbolic links" in refusal(loop)


def test_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "missing.gguf")
    with pytest.raises(GGUFError, match="null"):
        GGUFFile.open("a\0b.gguf")


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(COMPLETE[:-1])
    for bad in (path, tmp_path):
        with pytest.raises(GGUFError):
            GGUFFile.open(bad)
    # By their names: others of this process may come and go meanwhile.
    opened = {os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()}
    assert opened.isdisjoint({os.path.realpath(path), os.path.realpath(tmp_path)})


def test_file_that_shrinks_after_open(tmp_path: Path) -> None:
    path = tmp_path / "shrinks.gguf"
    path.write_bytes(COMPLETE)
    with GGUFFile.open(path) as file:
        os.truncate(path, len(COMPLETE) - 33)
        assert file.read("t").size == 36
        with pytest.raises(GGUFError, match=r"byte \d+: tensor 's': .*longer when it was opened"):
            file.read("s")
    with pytest.raises(GGUFError, match="closed"):
        file.read("t")
