"""What is read: files of rows, known by their contents, and the parts that they are cut into."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyruntime.errors import InputError

FORMATS = ("jsonl", "parquet")


@dataclass(frozen=True)
class Part:
    """Rows that are read, run and written together, by one worker.

    Attributes:
        index: its place among all parts.
        path: the file, absolute. first: lines, or rows of Parquet, before it in the file.
        rows: how many it has; lines of nothing but white space are none.
        start, size: of JSON lines the bytes; of Parquet the row group and the rows of it before.
    """

    index: int
    path: str
    first: int
    rows: int
    start: int
    size: int


@dataclass(frozen=True)
class Source:
    """All input: `form` is one of FORMATS, `files` what tells it apart from other input."""

    form: str
    files: list[dict[str, Any]]
    parts: list[Part]


def find(path: Path) -> tuple[str, list[Path]]:
    """The format, and the files in the order of their names, of a file or of a folder of such.

    Raises InputError, FileNotFoundError.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in found if file.suffix[1:] in FORMATS and file.name[0] not in "._"]
    forms = {file.suffix[1:] for file in files}
    if not forms:
        raise InputError(f"{path}: neither .jsonl nor .parquet")
    if len(forms) > 1:
        raise InputError(f"{path}: files of both formats, .jsonl and .parquet")
    return forms.pop(), files


def cut(path: Path, most: int) -> Source:
    """Reads all of the input once, and cuts it into parts of at most `most` rows.

    Raises InputError, OSError.
    """
    form, files = find(path)
    known: list[dict[str, Any]] = []
    parts: list[Part] = []
    for file in files:
        digest = hashlib.sha256()
        if form == "jsonl":
            pieces = list(_lines(file, digest, most))
        else:
            pieces = list(_groups(file, digest, most))
        for first, rows, start, size in pieces:
            parts.append(Part(len(parts), str(file.absolute()), first, rows, start, size))
        known.append(
            {"name": file.name, "bytes": file.stat().st_size, "sha256": digest.hexdigest()}
        )
    return Source(form, known, parts)


def _lines(path: Path, digest: Any, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Lines before, rows, offset and bytes of each part; `digest` sees the whole file."""
    first = rows = lines = start = size = 0
    with path.open("rb") as file:
        for line in file:
            digest.update(line)
            lines, size = lines + 1, size + len(line)
            rows += not line.isspace()
            if rows == most:
                yield first, rows, start, size
                first, rows, start, size = lines, 0, start + size, 0
    if rows:
        yield first, rows, start, size


def _groups(path: Path, digest: Any, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Rows before, rows, row group and rows before in the group of each part."""
    import pyarrow as pa
    from pyarrow import parquet

    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    try:
        metadata = parquet.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not Parquet: {error}") from None
    before = 0
    for group in range(metadata.num_row_groups):
        count = metadata.row_group(group).num_rows
        for at in range(0, count, most):
            yield before + at, min(most, count - at), group, at
        before += count
