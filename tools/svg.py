"""Figures as inline SVG: horizontal bars, and strips of segments. No script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .tables import shortened

WIDTH = 900
_LABEL, _RIGHT, _ROW = 250, 190, 24  # pixels
_CHARACTERS = 38  # of a label


@dataclass(frozen=True)
class Bar:
    """One row: `value` sets its length, `text` stands behind it, `style` is its CSS class."""

    label: str
    value: float
    text: str
    style: str = "plain"


@dataclass(frozen=True)
class Segment:
    """A part of a strip from `start` on, in the strip's units."""

    label: str
    start: float
    size: float
    style: str


def bars(title: str, rows: Sequence[Bar], marker: tuple[float, str] | None = None) -> str:
    """Horizontal bars from one zero; `marker` is a value to draw a line at, and its name."""
    most = max([row.value for row in rows] + ([marker[0]] if marker else []), default=0) or 1
    room = WIDTH - _LABEL - _RIGHT
    parts, y = [], 6
    for row in rows:
        length = room * row.value / most
        label = escape(shortened(row.label, _CHARACTERS))
        parts.append(f'<text x="{_LABEL - 8}" y="{y + 13}" text-anchor="end">{label}</text>')
        parts.append(
            f'<rect class="{row.style}" x="{_LABEL}" y="{y}" width="{length:.1f}" height="17"/>'
        )
        parts.append(f'<text x="{_LABEL + length + 6:.1f}" y="{y + 13}">{escape(row.text)}</text>')
        y += _ROW
    if marker:
        x = _LABEL + room * marker[0] / most
        parts.append(f'<line class="marker" x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{y + 2}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{y + 15}" text-anchor="middle">{escape(marker[1])}</text>'
        )
        y += _ROW
    return _figure(title, y, parts)


def strips(title: str, total: float, rows: Sequence[tuple[str, Sequence[Segment]]]) -> str:
    """Rows of segments on one scale from 0 to `total`. Names that do not fit are tooltips only."""
    room = WIDTH - _LABEL - 20
    parts, y = [], 6
    for name, segments in rows:
        label = escape(shortened(name, _CHARACTERS))
        parts.append(f'<text x="{_LABEL - 8}" y="{y + 19}" text-anchor="end">{label}</text>')
        for part in segments:
            x, length = _LABEL + room * part.start / total, room * part.size / total
            told = escape(part.label)
            parts.append(
                f'<rect class="{part.style}" x="{x:.1f}" y="{y}" width="{max(length, 1):.1f}" '
                f'height="28"><title>{told}</title></rect>'
            )
            if length > 7.5 * len(part.label) + 6:
                middle = f'x="{x + length / 2:.1f}" y="{y + 19}" text-anchor="middle"'
                parts.append(f"<text {middle}>{told}</text>")
        y += 34
    return _figure(title, y, parts)


def _figure(title: str, height: int, parts: Sequence[str]) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg></figure>"
    )
