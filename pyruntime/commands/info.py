"""`pyruntime info`: what a GGUF file holds and what running it takes."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from pyruntime.commands.options import add_json, add_model, print_json, printable

if TYPE_CHECKING:
    from pyruntime.gguf import GGUFFile

SHOWN = 60  # characters of a value, in text


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser("pyruntime info", description=__doc__)
    add_model(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor (text output)")
    add_json(parser)
    args = parser.parse_args(argv)
    from pyruntime.gguf import GGUFFile
    from pyruntime.hub import resolve

    with GGUFFile.open(resolve(args.model)) as file:
        record = _record(file)
    if args.json:
        print_json("info", record)
    else:
        _print(record, args.tensors)
    return 0


def _record(file: GGUFFile) -> dict[str, Any]:
    from pyruntime.gguf import type_name

    tensors = file.tensors.values()
    mix: Counter[str] = Counter()
    for t in tensors:
        mix[type_name(t.type_id)] += t.nbytes
    return {
        "path": str(file.path),
        "bytes": file.size_bytes,
        "version": file.version,
        "metadata": {key: _plain(value) for key, value in file.metadata.items()},
        "parameters": sum(math.prod(t.shape) for t in tensors),
        "types": dict(mix.most_common()),
        "tensors": [
            {
                "name": t.name,
                "shape": list(t.shape),
                "type": type_name(t.type_id),
                "bytes": t.nbytes,
            }
            for t in tensors
        ],
        **_needs(file),
    }


def _needs(file: GGUFFile) -> dict[str, Any]:
    """Whether it can be loaded, and the memory for that in bytes."""
    from pyruntime.errors import UnsupportedModelError
    from pyruntime.model.config import ModelConfig
    from pyruntime.model.footprint import modes, plan
    from pyruntime.options import MAX_TOKENS

    try:
        config = ModelConfig.from_gguf(file)
    except UnsupportedModelError as error:
        return {"supported": False, "reason": str(error), "memory": None}
    tokens = min(MAX_TOKENS, config.context_length)
    plans = [
        plan(file, config, max_tokens=tokens, kv_tokens=tokens, weights=weights)
        for weights in modes(file, config)
    ]
    return {
        "supported": True,
        "reason": None,
        "memory": {
            "tokens": tokens,
            **{p.weights: {**p.nbytes, "total": p.total} for p in plans},
        },
    }


def _plain(value: Any) -> Any:
    """A metadata value as JSON: arrays by length and first elements, non-finite floats as text."""
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return {
        "length": len(value),
        "first": [_plain(getattr(v, "item", lambda v=v: v)()) for v in value[:8]],
    }


def _print(record: dict[str, Any], every_tensor: bool) -> None:
    print(f"{record['path']}: GGUF v{record['version']}, {record['bytes']:,} bytes")
    width = min(max((len(key) for key in record["metadata"]), default=0), SHOWN)
    for key, value in record["metadata"].items():
        text = value if not isinstance(value, dict) else f"{value['length']} x {value['first']}"
        print(f"  {_short(key):<{width}}  {_short(str(text))}")
    print(f"{len(record['tensors'])} tensors, {record['parameters']:,} parameters")
    if every_tensor:
        for t in record["tensors"]:
            print(f"  {_short(t['name']):<32} {t['type']:<6} {'x'.join(map(str, t['shape']))}")
    counts = Counter(t["type"] for t in record["tensors"])
    for name, nbytes in record["types"].items():
        print(f"  {name:<8} {counts[name]:>5} tensors {nbytes:>16,} bytes")
    if not record["supported"]:
        print(f"not supported: {record['reason']}")
        return
    memory = dict(record["memory"])
    print(f"device memory for {memory.pop('tokens')} tokens, in bytes, by --weights:")
    print(f"  {'':<12}" + "".join(f" {weights:>16}" for weights in memory))
    for name in memory["per-layer"]:  # has every category
        row = (nbytes.get(name, 0) for nbytes in memory.values())
        print(f"  {name:<12}" + "".join(f" {nbytes:>16,}" for nbytes in row))


def _short(text: str) -> str:
    line = printable(text[: SHOWN + 1])
    return line[:SHOWN] + " ..." if len(line) > SHOWN else line
