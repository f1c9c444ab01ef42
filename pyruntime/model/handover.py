"""K/V of one sequence on its way from one cache to another: in host memory, or in a file.

A file is an .npz that NumPy reads, too: `header` (JSON in uint8), `tokens`, `k`, `v`, and of an
e4m3 cache `k_scale` and `v_scale`; nothing is compressed, and there are no pickles.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyruntime.errors import HandoverError, NumericalError, reason
from pyruntime.gguf.source import shown
from pyruntime.model.config import ModelConfig

SCHEMA = "pyruntime.kv/1"
LAYOUT = (
    "k, v: [layer][kv head][position][head dim], k after RoPE; "
    "k_scale, v_scale: [layer][kv head][position]"
)
# What `k` and `v` can be, by what a cache is for: fp16 on a GPU, and in NumPy in float32.
_DTYPES = {"f16": ("float16", "float32"), "e4m3": ("uint8",)}
_ROPES = ("rope", "local_rope")  # the forms of `ModelConfig.ropes`

_ARRAYS = ("k", "v", "k_scale", "v_scale")
_ENTRIES = {f"{name}.npy" for name in ("header", "tokens", *_ARRAYS)}
_MAGIC = b"\x93NUMPY\x01\x00"  # of the .npy format, version 1.0
_HEADER = re.compile(
    rb"\{'descr': '(<f2|<f4|<i4|\|u1)', 'fortran_order': False, 'shape': \(([\d, ]*)\), \} *\n"
)
_UNREADABLE = (OSError, ValueError, EOFError, RuntimeError, struct.error, zipfile.BadZipFile)

Layout = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


def describe(
    config: ModelConfig, fingerprint: str, kv_dtype: str, dtype: str, positions: int
) -> dict[str, Any]:
    """The header of `positions` positions of a cache: all that must be equal where they go to.

    Args:
        fingerprint: of the model, see `GGUFFile.fingerprint`.
        kv_dtype: "f16" or "e4m3". dtype: what K and V are held in, such as "float16".
    """
    ropes = [
        {f"{form}.{key}": value for key, value in asdict(rope).items()}
        for form, rope in zip(_ROPES, config.ropes, strict=False)
    ]
    for rope in ropes:
        rope |= {key: list(value) for key, value in rope.items() if isinstance(value, tuple)}
    return {
        "schema": SCHEMA,
        "architecture": config.arch,
        "name": config.name,
        "fingerprint": fingerprint,
        "layers": config.layers,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "kv_dtype": kv_dtype,
        "dtype": dtype,
        "layout": LAYOUT,
        "positions": positions,
        **{key: value for rope in ropes for key, value in rope.items()},
    }


def misfit(problem: str) -> HandoverError:
    """The error for what cannot go where it should."""
    return HandoverError(f"what was exported does not fit this cache: {problem}")


@dataclass(frozen=True, eq=False)
class Exported:
    """What a cache held, in host memory; `AnyCache.export` makes it, `AnyCache.import_` takes it.

    Attributes:
        header: as `describe` makes it.
        tokens: int32 [positions], the ids.
        arrays: by name: `k`, `v` [layers, kv heads, positions, head dim] of the header's dtype, and
            for e4m3 `k_scale`, `v_scale`, float32 [layers, kv heads, positions].

    Raises:
        HandoverError: the arrays are not those that the header speaks of. Their values, and what
            the header says of the model, are compared with nothing here: `import_` does that.
    """

    header: Mapping[str, Any]
    tokens: NDArray[np.int32]
    arrays: Mapping[str, NDArray[Any]]

    def __post_init__(self) -> None:
        header = self.header if isinstance(self.header, Mapping) else {}
        if header.get("schema") != SCHEMA:
            raise HandoverError(f"the schema is {header.get('schema')!r:.100}, not {SCHEMA!r}")
        held = {"tokens": self.tokens, **self.arrays}
        wanted = _layout(header)
        if held.keys() != wanted.keys():
            raise HandoverError(f"it holds {', '.join(held)} instead of {', '.join(wanted)}")
        for name, (shape, dtype) in wanted.items():
            array = held[name]
            if array.shape != shape or array.dtype != dtype:
                raise HandoverError(
                    f"'{name}' is {array.dtype} {list(array.shape)}, and by the header "
                    f"{dtype} {list(shape)}"
                )

    @property
    def positions(self) -> int:
        """How many there are."""
        return len(self.tokens)

    def astype(self, dtype: str) -> Exported:
        """The same with K and V in "float16", as a GPU holds them, or "float32", as NumPy does.

        A cache takes no other dtype than its own, so this stands between the two. float32 keeps
        every float16 number; float16 rounds to the nearest.

        Raises:
            NumericalError: a number is beyond float16's range, or a NaN.
            ValueError: another dtype, or an e4m3 cache: its codes are the same on every backend.
        """
        header = {**self.header, "dtype": dtype}
        if header["kv_dtype"] != "f16" or dtype not in _DTYPES["f16"]:
            raise ValueError(f"K and V of kv_dtype {header['kv_dtype']} cannot be had as {dtype!r}")
        with np.errstate(over="ignore"):
            arrays = {name: array.astype(dtype) for name, array in self.arrays.items()}
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise NumericalError(f"'{name}' holds a value beyond fp16's ±65504 or a NaN")
        return Exported(header, self.tokens, arrays)

    def require(self, ours: Mapping[str, Any]) -> None:
        """Raises HandoverError, naming the first field that differs, unless `ours` is the header.

        That is but for `positions`.
        """
        for key in [*ours, *(self.header.keys() - ours.keys())]:
            there, here = (header.get(key, "missing") for header in (self.header, ours))
            if key != "positions" and there != here:
                sides = f"{shown(repr(there))} there and {shown(repr(here))} here"
                raise misfit(f"{shown(key)} is {sides}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file `path`, over one that is there. Raises HandoverError."""
        text = json.dumps(dict(self.header), allow_nan=False).encode()
        arrays = {"header": np.frombuffer(text, np.uint8), "tokens": self.tokens, **self.arrays}
        try:
            with Path(path).open("wb") as file:
                np.savez(file, **{k: np.ascontiguousarray(a) for k, a in arrays.items()})  # type: ignore[arg-type]
        except OSError as error:
            raise HandoverError(f"{path}: cannot be written: {reason(error)}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Exported:
        """Reads what `save` wrote.

        Raises HandoverError, naming the file and what is wrong, for whatever else it is. Memory is
        asked for as the file's size has it, whatever stands in the file.
        """
        try:
            with zipfile.ZipFile(os.fspath(path)) as archive:
                names = dict.fromkeys(archive.namelist())
                if not {"header.npy", "tokens.npy"} <= names.keys() <= _ENTRIES:
                    raise HandoverError(f"it holds {shown(repr([*names]))}")
                arrays = {name.removesuffix(".npy"): _array(archive, name) for name in names}
            header = _parsed(arrays.pop("header").tobytes())
            return cls(header, arrays.pop("tokens"), arrays)
        except (HandoverError, *_UNREADABLE) as error:
            raise HandoverError(f"{path}: no exported K/V cache: {reason(error)}") from error


def _layout(header: Mapping[str, Any]) -> Layout:
    """Shape and dtype of every array that a header speaks of."""
    sizes: list[Any] = [header.get(key) for key in ("layers", "kv_heads", "positions", "head_dim")]
    kv_dtype: Any = header.get("kv_dtype")
    dtype: Any = header.get("dtype")
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise HandoverError(f"layers, KV heads, positions and head dim are {sizes!r:.100}")
    if not any(kv_dtype == kind and dtype in known for kind, known in _DTYPES.items()):
        raise HandoverError(f"K and V of kv_dtype {kv_dtype!r:.100} are {dtype!r:.100}")
    shape = tuple(sizes)
    layout: Layout = {"tokens": (shape[2:3], np.dtype(np.int32))}
    layout |= dict.fromkeys(_ARRAYS[:2], (shape, np.dtype(dtype)))
    if kv_dtype == "e4m3":
        layout |= dict.fromkeys(_ARRAYS[2:], (shape[:3], np.dtype(np.float32)))
    return layout


def _parsed(header: bytes) -> Any:
    try:
        return json.loads(header)
    except ValueError as error:
        raise HandoverError(f"'header' is no JSON: {error}") from None


def _array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """An entry of an .npz file as an array that cannot be written to."""
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise HandoverError(f"'{name}' is compressed")
    data = archive.read(name)
    begin = len(_MAGIC) + 2
    start = begin + int.from_bytes(data[len(_MAGIC) : begin], "little")
    found = _HEADER.fullmatch(data, begin, start)
    if not data.startswith(_MAGIC) or found is None:
        raise HandoverError(f"'{name}' is no C-ordered array of numbers in the .npy format 1.0")
    dtype = np.dtype(found[1].decode())
    shape = tuple(map(int, re.findall(rb"\d+", found[2])))
    if start + math.prod(shape) * dtype.itemsize != len(data):
        claimed = shown(str(list(shape)))
        raise HandoverError(f"'{name}' has {len(data) - start} bytes for {claimed} of {dtype}")
    return np.ndarray(shape, dtype, data, start)
