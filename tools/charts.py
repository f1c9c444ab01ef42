"""Pictures of records as SVG text: self-contained, the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

# Okabe and Ito's palette for all kinds of colour vision, then greys.
COLOURS = {
    "gate_up": "#0072b2", "down": "#56b4e9", "qkv": "#009e73", "o": "#8fd3b6", "head": "#00543e",
    "attention": "#d55e00", "rope": "#e69f00", "norm": "#f0e442", "embed": "#999999",
    "gather": "#555555", "softcap": "#bbbbbb", "schedule": "#dddddd",
    # Of products with int8 activations: shades of the fused ones', and what makes planes.
    "gate": "#0072b2", "up": "#4a9fd0", "q": "#009e73", "k": "#33b38f", "v": "#66c8ab",
    "gated": "#b5a800", "quantize": "#d8cd2b",
}  # fmt: skip
OTHER = "#cc79a7"
FONT = "font-family='system-ui, sans-serif' font-size='13'"
_WIDTH, _LEFT, _BAR = 960, 90, 44


def colour(role: str) -> str:
    """The colour of a role in every picture."""
    return COLOURS.get(role, OTHER)


def wall_svg(record: Mapping[str, Any]) -> str:
    """A wall record as two stacked bars: what was measured, and what the roofline leaves."""
    slices = sorted(record["slices"], key=lambda s: -s["ms"])
    total = sum(s["ms"] for s in slices)
    scale = (_WIDTH - _LEFT - 20) / total
    parts = [
        *_bar("measured", 34, [(s["role"], s["ms"], _told(s)) for s in slices], scale),
        *_bar("roofline", 92, [(s["role"], s["bound_ms"], _bound(s)) for s in slices], scale),
        *_axis(146, total, scale),
        *_legend(184, slices),
    ]
    height = 196 + 20 * ((len(slices) + 3) // 4)
    title = f"{record['model']['name']}, {record['nt']} tokens on {record['device']}"
    return _svg(height, title, parts)


def pairs_svg(record: Mapping[str, Any]) -> str:
    """An ab record's raw wall times, pair by pair: A against itself, then A against B."""
    series = [("A, A", record["noise"]["pairs"]), ("A, B", record["pairs"])]
    times: list[float] = [
        p[arm]["wall"] for _, pairs in series for p in pairs for arm in ("a", "b")
    ]
    low, high = min(times), max(times)
    margin = (high - low or high) * 0.08
    low, high = low - margin, high + margin
    top, bottom = 34, 254

    def y(ms: float) -> float:
        return bottom - (ms - low) / (high - low) * (bottom - top)

    count = sum(len(pairs) for _, pairs in series) + 1
    step = (_WIDTH - _LEFT - 20) / count
    parts, x = [], _LEFT + step / 2
    for ms in (low + margin, (low + high) / 2, high - margin):
        parts.append(
            f"<line x1='{_LEFT}' x2='{_WIDTH - 20}' y1='{y(ms):.1f}' y2='{y(ms):.1f}' "
            f"stroke='#ddd'/><text x='8' y='{y(ms) + 4:.1f}'>{ms:.3f} ms</text>"
        )
    for label, pairs in series:
        parts.append(f"<text x='{x:.1f}' y='{bottom + 22}'>{escape(label)}</text>")
        for pair in pairs:
            ends = [y(pair[arm]["wall"]) for arm in ("a", "b")]
            parts.append(
                f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{ends[0]:.1f}' y2='{ends[1]:.1f}' "
                "stroke='#bbb'/>"
            )
            other = "#d55e00" if label == "A, B" else "#0072b2"
            for end, fill, arm in zip(ends, ("#0072b2", other), ("a", "b"), strict=True):
                parts.append(
                    f"<circle cx='{x:.1f}' cy='{end:.1f}' r='4' fill='{fill}'>"
                    f"<title>{pair[arm]['wall']:.4f} ms</title></circle>"
                )
            x += step
        x += step
    title = f"{record['a']['label']} (blue) against {record['b']['label']} (red), wall time"
    return _svg(bottom + 34, title, parts)


def _bar(label: str, y: int, pieces: Sequence[tuple[str, float, str]], scale: float) -> list[str]:
    parts = [f"<text x='8' y='{y + _BAR // 2 + 5}'>{label}</text>"]
    x = float(_LEFT)
    for role, ms, told in pieces:
        width = ms * scale
        parts.append(
            f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{_BAR}' fill='{colour(role)}' "
            f"stroke='white' stroke-width='0.5'><title>{escape(told)}</title></rect>"
        )
        if width > 9 * len(role):
            dark = role in ("norm", "o", "down", "rope")
            fill = "#222" if dark else "white"
            parts.append(
                f"<text x='{x + width / 2:.1f}' y='{y + _BAR // 2 + 5}' text-anchor='middle' "
                f"fill='{fill}'>{escape(role)}</text>"
            )
        x += width
    return parts


def _axis(y: int, total: float, scale: float) -> list[str]:
    step = _round_step(total / 8)
    marks = [i * step for i in range(int(total / step) + 1)]
    return [
        f"<line x1='{_LEFT + t * scale:.1f}' x2='{_LEFT + t * scale:.1f}' y1='{y - 6}' y2='{y}' "
        f"stroke='#666'/><text x='{_LEFT + t * scale:.1f}' y='{y + 14}' text-anchor='middle' "
        f"fill='#666'>{t:g} ms</text>"
        for t in marks
    ]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `least`."""
    power = math.pow(10, math.floor(math.log10(least)))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least)


def _legend(y: int, slices: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = []
    for i, s in enumerate(slices):
        x, line = _LEFT + i % 4 * 216, y + 20 * (i // 4)
        parts.append(
            f"<rect x='{x}' y='{line - 10}' width='12' height='12' fill='{colour(s['role'])}'/>"
            f"<text x='{x + 18}' y='{line}'>{escape(s['role'])} {s['ms']:.3f} ms, "
            f"{100 * s['share']:.1f} %</text>"
        )
    return parts


def _told(s: Mapping[str, Any]) -> str:
    return f"{s['role']}: {s['ms']:.3f} ms, {100 * s['share']:.1f} %, {s['launches']} launches"


def _bound(s: Mapping[str, Any]) -> str:
    return f"{s['role']}: {s['bound_ms']:.3f} ms at the roofline's speeds"


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' "
        f"width='{_WIDTH}' height='{height}' role='img' {FONT}>"
        f"<rect width='100%' height='100%' fill='white'/>"
        f"<text x='8' y='20' font-weight='600'>{escape(title)}</text>{''.join(parts)}</svg>"
    )
