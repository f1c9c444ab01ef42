"""A wall record as files: HTML page, PNG, Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from .charts import colour, wall_svg

# Heading and text of every column; those of HTML are the terminal's.
COLUMNS = (
    "role", "ms", "share", "launches", "GFLOP", "MB", "us/GMAC", "TFLOP/s", "TB/s", "of roofline",
)  # fmt: skip


def row(s: Mapping[str, Any]) -> tuple[str, ...]:
    """A slice as the texts under `COLUMNS`."""

    def figure(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    return (
        s["role"],
        f"{s['ms']:.3f}",
        f"{100 * s['share']:.2f} %",
        f"{s['launches']}",
        figure(s["flop"] / 1e9, 1),
        figure(s["bytes"] / 1e6, 1),
        figure(s["us_per_gmac"], 2),
        figure(s["tflop_per_s"] if s["flop"] else None, 1),
        figure(s["tb_per_s"], 3),
        "-" if s["of_roofline"] is None else f"{100 * s['of_roofline']:.1f} %",
    )


def trace(record: Mapping[str, Any]) -> dict[str, Any]:
    """The launches one after another, for chrome://tracing and ui.perfetto.dev."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": record["device"]}},
        {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "launches"}},
    ]
    at = 0.0
    for launch in record["launches"]:
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": 0,
                "name": launch["role"],
                "cat": launch["role"],
                "ts": round(1e3 * at, 3),
                "dur": round(1e3 * launch["ms"], 3),
                "args": {"kernel": launch["kernel"]},
            }
        )
        at += launch["ms"]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def page(record: Mapping[str, Any]) -> str:
    """A page that needs no other file."""
    slices = record["slices"]
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    body = "".join(
        f"<tr><td><span class='dot' style='background:{colour(s['role'])}'></span>"
        + "</td><td>".join(map(escape, row(s)))
        + "</td></tr>"
        for s in sorted(slices, key=lambda s: -s["ms"])
    )
    checks = "".join(
        f"<li class='{'ok' if c['passed'] else 'bad'}'><b>{escape(c['name'])}</b>: "
        f"{escape(c['text'])}</li>"
        for c in record["checks"]
    )
    gap = "".join(
        f"<tr><td>{escape(part['name'])}</td><td>{part['ms']:.3f} ms</td></tr>"
        for part in record["gap"]
    )
    title = f"Wall of {record['model']['name']} at {record['nt']} tokens"
    facts = ", ".join(facts_of(record))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{escape(facts)}</p>{wall_svg(record)}"
        f"<table id='slices'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"<h2>From GPU-busy to the wall</h2><table id='gap'><tbody>{gap}</tbody></table>"
        f"<h2>Checks</h2><ul>{checks}</ul></body></html>\n"
    )


def facts_of(record: Mapping[str, Any]) -> list[str]:
    """What the measurement is tied to, in words."""
    roof = record["roofline"]
    clock = record["sm_mhz"]
    return [
        record["device"],
        f"CUDA {record['cuda']}",
        f"commit {(record['commit'] or 'unknown')[:12]}",
        record["date"],
        f"{record['regime']} clocks" + (f" ({clock:.0f} MHz)" if clock else ""),
        f"roofline {roof['flop_per_s'] / 1e12:.0f} TFLOP/s ({roof['gemm_kernel']} on "
        f"{roof['gemm_side']} squares) and {roof['bytes_per_s'] / 1e12:.2f} TB/s (copy), "
        f"measured {roof['date'][:10]}",
    ]


def write_files(record: Mapping[str, Any], prefix: Path) -> list[Path]:
    """PREFIX.html, PREFIX.trace.json and, where matplotlib is installed, PREFIX.png."""
    written = [prefix.with_name(prefix.name + end) for end in (".html", ".trace.json")]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    written[0].write_text(page(record))
    written[1].write_text(json.dumps(trace(record)))
    try:
        import matplotlib.figure  # noqa: F401  (an extra: is it there?)
    except ModuleNotFoundError:
        return written
    written.append(prefix.with_name(prefix.name + ".png"))
    write_png(record, written[-1])
    return written


def write_png(record: Mapping[str, Any], path: Path) -> None:
    """The stacked bars as PNG. Raises ModuleNotFoundError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.subplots()
    slices = sorted(record["slices"], key=lambda s: -s["ms"])
    for bar, key in (("roofline", "bound_ms"), ("measured", "ms")):
        left = 0.0
        for s in slices:
            label = f"{s['role']} {100 * s['share']:.1f} %" if key == "ms" else None
            axes.barh(
                bar, s[key], left=left, color=colour(s["role"]), edgecolor="white", label=label
            )
            left += s[key]
    axes.set_xlabel("ms")
    axes.set_title(f"{record['model']['name']}, {record['nt']} tokens on {record['device']}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=5, frameon=False)
    figure.savefig(path, dpi=144)


_STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em;color:#222}"
    "svg{max-width:100%;height:auto}table{border-collapse:collapse;margin:1em 0}"
    "td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}"
    ".dot{display:inline-block;width:.7em;height:.7em;margin-right:.5em}"
    ".ok::marker{content:'\\2713  '}.bad::marker{content:'\\2717  '}.bad{color:#b00020}"
)
