"""Plain tables for a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

_SHORTEST = 24


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Rows under headers: the first column left-aligned, the others right-aligned.

    Integers get thousands separators, None becomes "?". On a terminal the first column is
    shortened in the middle to fit; elsewhere nothing is.
    """
    cells = [list(headers), *([shown(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    if sys.stdout.isatty():
        rest = len(indent) + sum(w + 2 for w in widths[1:])
        room = max(shutil.get_terminal_size().columns - rest, _SHORTEST)
        widths[0] = min(widths[0], room)
    lines = [
        indent
        + "  ".join(
            [
                f"{shortened(row[0], widths[0]):<{widths[0]}}",
                *(f"{text:>{width}}" for text, width in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in cells
    ]
    return "\n".join(lines)


def shortened(text: str, width: int) -> str:
    """`text`, with its middle replaced by … where it is longer than `width`."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def shown(value: object) -> str:
    """A cell's text: thousands separators in integers, "?" for None."""
    if value is None:
        return "?"
    return f"{value:,}" if type(value) is int else str(value)
