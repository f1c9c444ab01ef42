"""The files of one model: a single one, or the shards that llama.cpp's gguf-split writes."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from pyruntime.gguf.header import Header, key_item, read_header
from pyruntime.gguf.source import Source
from pyruntime.gguf.tensors import tensor_item

_SHARD_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.ASCII)


def open_shards(path: Path) -> tuple[list[Source], list[Header]]:
    """Open the model that `path` is, or is one shard of: all its files, in order.

    Raises GGUFError, also where the files' `split.*` keys contradict their names or each other.
    """
    sources: list[Source] = []
    headers: list[Header] = []
    names: set[str] = set()
    with ExitStack() as on_error:
        paths = _shard_paths(path)
        for index, file in enumerate(paths):
            source = Source(file)
            on_error.callback(source.close)
            header = read_header(source, index)
            _check_split(source, header, "split.no", index, 0)
            # gguf-split sets the count of a file that it merged to 0.
            if len(paths) > 1 or header.metadata.get("split.count") != 0:
                _check_split(source, header, "split.count", len(paths), 1)
            for name in header.tensors.keys() & names:
                at = header.tensors[name].entry
                raise source.error("is in an earlier shard, too", at, tensor_item(name))
            names |= header.tensors.keys()
            sources.append(source)
            headers.append(header)
        _check_split(sources[0], headers[0], "split.tensors.count", len(names), len(names))
        on_error.pop_all()  # keep them open
    return sources, headers


def _shard_paths(path: Path) -> list[Path]:
    """All files of the model, by the name of one. A name of no or one shard: that file alone."""
    match = _SHARD_NAME.search(path.name)
    if not match:
        return [path]
    stem, number, count = path.name[: match.start()], int(match[1]), int(match[2])
    if not 1 <= number <= count or count == 1:
        return [path]
    # A count that the file itself does not confirm is not followed to other files.
    source = Source(path)
    try:
        _check_split(source, read_header(source, number - 1), "split.count", count, 1)
    finally:
        source.close()
    return [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def _check_split(source: Source, header: Header, key: str, expected: int, default: int) -> None:
    value = header.metadata.get(key, default)
    if type(value) is not int or value != expected:
        found = f"is {value}" if key in header.metadata else "is missing"
        problem = f"{found}, but by the name and content of the files it should be {expected}"
        raise source.error(problem, header.key_offsets.get(key), key_item(key))
