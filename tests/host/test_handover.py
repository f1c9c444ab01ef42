"""Exported caches: what they say, where they fit, and files that are none."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

import pyruntime
from pyruntime import Engine, Exported
from pyruntime.errors import HandoverError, NumericalError
from pyruntime.model.config import KV_DTYPES
from pyruntime.model.handover import describe

Load = Callable[..., Engine]

LLAMA, QWEN, GEMMA, FACTORS = (
    GOLDEN / f"tiny-{name}-q8_0.gguf" for name in ("llama", "qwen2", "gemma3", "rope-freqs")
)


def exported_by(engine: Engine, ids: list[int]) -> Exported:
    cache = engine.new_cache(32)
    if ids:
        engine.prefill(ids, cache=cache)
    return cache.export()


@pytest.fixture(scope="module")
def numpy_engine() -> Engine:
    return Engine.load(LLAMA, device="cpu", max_tokens=16, kv_tokens=64)


@pytest.fixture(scope="module")
def seed(numpy_engine: Engine) -> Exported:
    return exported_by(numpy_engine, [1, 2, 3])


def same(a: Exported, b: Exported) -> bool:
    return (
        a.header == b.header
        and np.array_equal(a.tokens, b.tokens)
        and a.arrays.keys() == b.arrays.keys()
        and all(a.arrays[n].tobytes() == b.arrays[n].tobytes() for n in a.arrays)
    )


# What is said


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("ids", [[], [7, 8, 9]])
def test_a_file_holds_all_of_it(
    load: Load, tmp_path: Path, device: str, kv_dtype: str, ids: list[int]
) -> None:
    engine = load(device=device, kv_dtype=kv_dtype)
    exported, path = exported_by(engine, ids), tmp_path / "kv"
    c, header = engine.config, exported.header
    assert exported.tokens.tolist() == ids and exported.positions == header["positions"] == len(ids)
    rows = (c.layers, c.kv_heads, len(ids))
    assert exported.arrays["k"].shape == exported.arrays["v"].shape == (*rows, c.head_dim)
    assert header["dtype"] == exported.arrays["v"].dtype
    if kv_dtype == "e4m3":
        assert exported.arrays["k_scale"].shape == exported.arrays["v_scale"].shape == rows
    assert (header["schema"], header["name"]) == ("pyruntime.kv/1", c.name)
    assert header["fingerprint"] == engine.fingerprint
    exported.save(path)
    assert same(Exported.load(path), exported)
    with np.load(path, allow_pickle=False) as file:  # it is an ordinary .npz
        assert json.loads(file["header"].tobytes()) == header
        assert np.array_equal(file["k"], exported.arrays["k"])


@pytest.mark.parametrize("path", [GEMMA, FACTORS], ids=lambda path: path.stem)
def test_every_form_of_rope_is_said(load: Load, path: Path) -> None:
    engine = load(model=path, device="cpu")
    header = exported_by(engine, [1]).header
    for form, rope in zip(("rope", "local_rope"), engine.config.ropes, strict=False):
        for key, value in asdict(rope).items():
            assert header[f"{form}.{key}"] == (list(value) if key == "factors" else value)
    assert ("local_rope.base" in header) == (path == GEMMA)
    assert bool(header["rope.factors"]) == (path == FACTORS)


def test_it_is_at_hand() -> None:
    assert pyruntime.Exported is Exported


# Where it fits


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model": QWEN}, "architecture is 'llama' there and 'qwen2' here"),
        ({"model": FACTORS}, "fingerprint is '\\w+' there and '\\w+' here"),
        ({"kv_dtype": "e4m3"}, "kv_dtype is 'f16' there and 'e4m3' here"),
    ],
    ids=["architecture", "file", "kv_dtype"],
)
def test_another_engine_refuses(
    load: Load, device: str, other: dict[str, Any], message: str
) -> None:
    exported = exported_by(load(device=device), [1, 2])
    engine = load(**{"device": device, **other})
    cache = engine.new_cache(8)
    engine.prefill([3], cache=cache)
    before = cache.export()
    with pytest.raises(HandoverError, match=f"does not fit this cache: {message}"):
        cache.import_(exported)
    assert same(cache.export(), before)


def test_every_field_must_be_equal(seed: Exported, numpy_engine: Engine) -> None:
    ours = describe(numpy_engine.config, numpy_engine.fingerprint, "f16", "float32", 99)
    seed.require(ours)
    for key in ours.keys() - {"positions"}:
        with pytest.raises(HandoverError, match=f": {key} is .* there and 'another' here"):
            seed.require({**ours, key: "another"})
    with pytest.raises(HandoverError, match=r"local_rope\.base is 'missing' there and 1\.0 here"):
        seed.require({**ours, "local_rope.base": 1.0})
    more = replace(seed, header={**seed.header, "local_rope.base": 1.0})
    with pytest.raises(HandoverError, match=r"local_rope\.base is 1\.0 there and 'missing' here"):
        more.require(ours)


def test_what_no_cache_of_the_model_holds_is_refused(seed: Exported, numpy_engine: Engine) -> None:
    for capacity, exported, message in (
        (2, seed, "there are 3 positions, and this one is for 2"),
        (8, replace(seed, tokens=np.array([1, 2, 10**6], np.int32)), "token id 1000000"),
    ):
        cache = numpy_engine.new_cache(capacity)
        numpy_engine.prefill([4], cache=cache)
        with pytest.raises(HandoverError, match=f"does not fit this cache: {message}"):
            cache.import_(exported)
        assert cache.tokens.tolist() == [4]


def test_one_of_numpy_and_one_of_a_gpu(load: Load, seed: Exported, numpy_engine: Engine) -> None:
    """Neither converts unasked; float32 keeps what float16 holds."""
    cache = load().new_cache(8)
    with pytest.raises(HandoverError, match="dtype is 'float32' there and 'float16' here"):
        cache.import_(seed)
    half = seed.astype("float16")
    cache.import_(half)
    back = cache.export()
    assert same(back, half)
    for name, array in seed.arrays.items():
        assert np.array_equal(back.arrays[name], array.astype(np.float16))
    ours = numpy_engine.new_cache(8)
    with pytest.raises(HandoverError, match="dtype is 'float16' there and 'float32' here"):
        ours.import_(back)
    ours.import_(back.astype("float32"))
    assert np.array_equal(ours.k[:, :, :3], half.arrays["k"])


def test_what_does_not_convert(load: Load, seed: Exported) -> None:
    with pytest.raises(ValueError, match="kv_dtype f16 cannot be had as 'uint8'"):
        seed.astype("uint8")
    large = replace(seed, arrays={**seed.arrays, "v": np.full_like(seed.arrays["v"], 65520)})
    with pytest.raises(NumericalError, match="'v' holds a value beyond"):
        large.astype("float16")
    codes = exported_by(load(device="cpu", kv_dtype="e4m3"), [1, 2])
    with pytest.raises(ValueError, match="kv_dtype e4m3 cannot"):
        codes.astype("float16")
    cache = load(kv_dtype="e4m3").new_cache(8)
    cache.import_(codes)  # codes are the same everywhere
    assert same(cache.export(), codes)


def test_arrays_in_another_order_are_taken(load: Load, seed: Exported) -> None:
    """Those that an application has put together."""
    half = seed.astype("float16")
    turned = {name: np.asfortranarray(array) for name, array in half.arrays.items()}
    cache = load().new_cache(8)
    cache.import_(replace(half, arrays=turned))
    assert same(cache.export(), half)


# Files that are none


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def entries(exported: Exported, **changed: Any) -> dict[str, Any]:
    """What a file holds, with keys of the header (if they are any) or arrays changed; None: out."""
    header = {k: changed.pop(k, v) for k, v in exported.header.items()}
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    found = {"header": text, "tokens": exported.tokens, **exported.arrays, **changed}
    return {name: array for name, array in found.items() if array is not None}


def compressed(exported: Exported) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **entries(exported))
    return file.getvalue()


def with_shape_of(exported: Exported, shape: str) -> bytes:
    """K's entry claims another shape; its checksum is right."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(npz(**entries(exported)))) as old,
        zipfile.ZipFile(file, "w") as new,
    ):
        for name in old.namelist():
            data = old.read(name)
            if name == "k.npy":
                start, end = data.index(b"("), data.index(b"\n", 20)
                data = data[:start] + f"{shape}, }}".encode().ljust(end - start) + data[end:]
            new.writestr(name, data)
    return file.getvalue()


CASES: dict[str, tuple[Callable[[Exported], bytes], str]] = {
    "empty": (lambda e: b"", "not a zip file"),
    "another format": (lambda e: (GOLDEN / "make_windows.py").read_bytes(), "not a zip file"),
    "another .npz": (lambda e: npz(a=np.zeros(3)), r"holds \['a\.npy'\]"),
    "no K": (lambda e: npz(**entries(e, k=None)), "holds tokens, v instead of tokens, k, v"),
    "no tokens": (lambda e: npz(**entries(e, tokens=None)), "holds "),
    "scales": (
        lambda e: npz(**entries(e, k_scale=np.zeros(3, "f4"))),
        "holds tokens, k, v, k_scale",
    ),
    "one more": (lambda e: npz(**entries(e, x=np.zeros(3))), "holds "),
    "compressed": (compressed, "is compressed"),
    "a pickle": (lambda e: npz(**entries(e, k=np.array([{}], object))), "'k.npy' is no C-ordered"),
    "Fortran": (
        lambda e: npz(**entries(e, k=np.asfortranarray(e.arrays["k"]))),
        "'k.npy' is no C-ordered array",
    ),
    "big-endian": (
        lambda e: npz(**entries(e, k=e.arrays["k"].astype(">f4"))),
        "'k.npy' is no C-ordered array",
    ),
    "float16": (
        lambda e: npz(**entries(e, k=e.arrays["k"].astype("f2"))),
        "'k' is float16 .* by the header float32",
    ),
    "fewer tokens": (lambda e: npz(**entries(e, tokens=e.tokens[1:])), r"'tokens' is int32 \[2\]"),
    "huge": (lambda e: with_shape_of(e, "(9, 9, 9, 999999)"), "'k.npy' has .* bytes for "),
    "too huge": (lambda e: with_shape_of(e, "(" + "9" * 12 + ",)"), "'k.npy' has .* bytes for "),
    "no JSON": (lambda e: npz(**entries(e, header=e.tokens)), "'header' is no JSON: "),
    "a list": (
        lambda e: npz(**entries(e, header=np.frombuffer(b"[1]", np.uint8))),
        "the schema is None",
    ),
    "schema": (lambda e: npz(**entries(e, schema="pyruntime.kv/2")), "schema is 'pyruntime.kv/2'"),
    "sizes": (lambda e: npz(**entries(e, layers="2")), "layers, .* are "),
    "a size below 0": (lambda e: npz(**entries(e, positions=-1)), "layers, .* are "),
    "no kv_dtype": (lambda e: npz(**entries(e, kv_dtype=["f16"])), r"kv_dtype \['f16'\] are "),
    "no dtype": (lambda e: npz(**entries(e, dtype="uint8")), "kv_dtype 'f16' are 'uint8'"),
    "layers": (lambda e: npz(**entries(e, layers=3)), r"'k' is float32 .* by the header .*\[3, "),
}


@pytest.mark.parametrize("case", CASES)
def test_a_malformed_file(seed: Exported, tmp_path: Path, case: str) -> None:
    make, message = CASES[case]
    path = tmp_path / "kv.npz"
    path.write_bytes(make(seed))
    with pytest.raises(HandoverError, match=rf"kv\.npz: no exported K/V cache: .*{message}"):
        Exported.load(path)


def test_the_cases_begin_with_a_good_file(seed: Exported, tmp_path: Path) -> None:
    path = tmp_path / "kv.npz"
    for content in (npz(**entries(seed)), with_shape_of(seed, str(seed.arrays["k"].shape))):
        path.write_bytes(content)
        assert same(Exported.load(path), seed)


def test_files_that_cannot_be_opened(seed: Exported, tmp_path: Path) -> None:
    with pytest.raises(HandoverError, match=r"none: .*: No such file or directory"):
        Exported.load(tmp_path / "none")
    with pytest.raises(HandoverError, match="Is a directory"):
        Exported.load(tmp_path)
    with pytest.raises(HandoverError, match=r"none/kv: cannot be written: No such file"):
        seed.save(tmp_path / "none" / "kv")


@pytest.fixture(scope="module")
def content(seed: Exported, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("seed") / "kv"
    seed.save(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "victim"


@settings(max_examples=300)
@given(
    place=st.one_of(st.floats(0, 1), st.integers(-1000, 1000)),
    count=st.sampled_from([0, 1, 2, 4, 100, 10**7]),
    new=st.binary(max_size=8),
)
def test_an_edited_file(
    seed: Exported, content: bytes, victim: Path, place: float, count: int, new: bytes
) -> None:
    """It is refused, or what was changed says nothing (a date, say)."""
    at = int(place * len(content)) if isinstance(place, float) else place % len(content)
    victim.write_bytes(content[:at] + new + content[at + count :])
    try:
        assert same(Exported.load(victim), seed)
    except HandoverError as error:
        assert str(error).startswith(f"{victim}: ") and len(str(error)) < 2000
