"""The formats: rows of a part in, the same rows with columns of results out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyruntime.batch.parts import Part
from pyruntime.batch.tasks import Item, Task
from pyruntime.errors import InputError

Values = dict[str, Any]  # of a row by column


@dataclass
class Row:
    """A row of the input.

    Attributes:
        id: its own, or where it stands: "file:line".
        values: the columns that the task asks for, None for one that is not there.
        error: why there are no values.
        text: of JSON lines the object as it was written, but for the id that it lacked.
    """

    id: Any
    values: Values = field(default_factory=dict)
    error: str | None = None
    text: str = ""


@dataclass(frozen=True)
class Columns:
    """Names of columns: of the input's ids, and what those of the results begin with."""

    task: Task
    id: str
    prefix: str

    @property
    def results(self) -> list[str]:
        """Of the output, beside the input's."""
        return [self.prefix + name for name in (*self.task.results, "error")]


class JsonLines:
    """An object a line. What the input says of a row is written as it was read."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._error = columns.results[-1]

    def read(self, part: Part) -> tuple[list[Row], None]:
        path = Path(part.path)
        with path.open("rb") as file:
            file.seek(part.start)
            lines = file.read(part.size).split(b"\n")
        numbered = enumerate(map(bytes.strip, lines), part.first + 1)
        return [self._row(line, f"{path.name}:{n}", n == 1) for n, line in numbered if line], None

    def _row(self, line: bytes, place: str, begins: bool) -> Row:
        columns = self._columns
        row = Row(place, text=json.dumps({columns.id: place}))
        try:
            text = line.decode("utf-8-sig" if begins else "utf-8")
            found = json.loads(text, parse_constant=_refuse)
        except RecursionError:
            row.error = "not JSON: nested too deeply"
            return row
        except ValueError as error:
            row.error = f"not JSON: {error}"
            return row
        if not isinstance(found, dict):
            row.error = "not a JSON object"
            return row
        row.id = found.get(columns.id, place)
        row.text = text if columns.id in found else _joined(text, {columns.id: place})
        row.values = {name: found.get(name) for name in columns.task.columns}
        if taken := [name for name in columns.results if name in found]:
            row.error = f"it has a column {taken[0]!r} already, which --prefix would leave alone"
        return row

    def write(self, path: Path, rows: Sequence[Row], rest: None, results: Sequence[Item]) -> None:
        names = self._columns.task.results
        with path.open("w", encoding="utf-8", newline="\n") as file:
            for row, item in zip(rows, results, strict=True):
                added = {self._columns.prefix + name: item.values.get(name) for name in names}
                file.write(_joined(row.text, {**added, self._error: item.error}) + "\n")

    def summary(self, path: Path) -> tuple[int, int]:
        fine = f"{json.dumps(self._error)}: null}}\n".encode()
        rows = errors = 0
        with path.open("rb") as file:
            for line in file:
                rows += 1
                errors += not line.endswith(fine)
        return rows, errors


def _joined(text: str, more: Values) -> str:
    """An object's text with more members at its end."""
    begun = text[:-1].rstrip()
    return f"{begun}{'' if begun == '{' else ', '}{json.dumps(more, allow_nan=False)[1:]}"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number")


class Parquet:
    """Tables. Every part of the output has the input's columns and those of the results."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._held: tuple[tuple[str, int] | None, Any] = (None, None)  # the last row group

    def check(self, path: Path) -> None:
        """Refuses a file whose columns do not suit. Raises InputError, naming them."""
        from pyarrow import parquet

        names = parquet.read_schema(path).names
        if missing := [name for name in self._columns.task.columns if name not in names]:
            raise InputError(f"{path}: no column {missing[0]!r}; there are {', '.join(names)}")
        if taken := [name for name in self._columns.results if name in names]:
            raise InputError(f"{path}: a column {taken[0]!r} already; --prefix renames results")

    def read(self, part: Part) -> tuple[list[Row], Any]:
        from pyarrow import parquet

        key = (part.path, part.start)
        if self._held[0] != key:
            self._held = (None, None)  # before another one is read
            with parquet.ParquetFile(part.path) as file:
                self._held = (key, file.read_row_group(part.start))
        table = self._held[1].slice(part.size, part.rows)
        places = [f"{Path(part.path).name}:{part.first + n + 1}" for n in range(part.rows)]
        columns = self._columns
        ids = table[columns.id].to_pylist() if columns.id in table.column_names else places
        wanted = {name: table[name].to_pylist() for name in columns.task.columns}
        rows = [
            Row(id, {name: values[n] for name, values in wanted.items()})
            for n, id in enumerate(ids)
        ]
        return rows, table

    def write(self, path: Path, rows: Sequence[Row], rest: Any, results: Sequence[Item]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        columns, table = self._columns, rest
        if columns.id not in table.column_names:
            table = table.append_column(columns.id, pa.array([r.id for r in rows], pa.string()))
        kinds = {"number": pa.float64(), "numbers": pa.list_(pa.float32())}
        for name, kind in columns.task.results.items():
            values = pa.array([item.values.get(name) for item in results], kinds[kind])
            table = table.append_column(columns.prefix + name, values)
        errors = pa.array([item.error for item in results], pa.string())
        table = table.append_column(columns.results[-1], errors)
        parquet.write_table(table, path)

    def summary(self, path: Path) -> tuple[int, int]:
        from pyarrow import parquet

        errors = parquet.read_table(path, columns=[self._columns.results[-1]])[0]
        return len(errors), len(errors) - errors.null_count


def of(form: str, columns: Columns) -> JsonLines | Parquet:
    """The format of a name in `parts.FORMATS`."""
    return JsonLines(columns) if form == "jsonl" else Parquet(columns)
