"""An audit as one self-contained HTML page with figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from pyruntime.cubin.audit import Audit
from pyruntime.cubin.ledger import ledger_of

from . import audit_text as words
from . import devices
from .ledger import PLANES, plane_rows, total_line
from .svg import Bar, Segment, bars, strips
from .tables import shown

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2733; background: #fff; margin: 2em auto;
  max-width: 940px; padding: 0 1em; }
h1 { font-size: 1.35em; margin-bottom: .2em; overflow-wrap: anywhere; }
h2 { font-size: 1.1em; margin: 1.8em 0 .4em; border-bottom: 1px solid #d5dbe1; }
.verdict { padding: .7em 1em; border-left: 6px solid #5b6b7b; background: #f1f4f7; }
.verdict b { font-size: 1.2em; margin-right: .6em; }
.rewrite { border-color: #c0392b; } .small-lever { border-color: #d68910; }
.book-it { border-color: #2471a3; } .close { border-color: #1e8449; }
table { border-collapse: collapse; font-size: .88em; display: block; overflow-x: auto; }
td, th { padding: .2em .7em; text-align: right; border-bottom: 1px solid #e6eaee; }
td:first-child, th:first-child { text-align: left; }
figure { margin: 1em 0; overflow-x: auto; } figcaption { font-weight: 600; font-size: .92em; }
svg { width: 100%; min-width: 620px; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: #1c2733; }
.plain { fill: #9fb3c8; } .binding, .bad { fill: #e59866; } .good { fill: #82c09a; }
.rest { fill: #eef1f4; } .reserve { fill: #c8ced4; } .marker { stroke: #c0392b; stroke-width: 2; }
.p0 { fill: #a9cce3; } .p1 { fill: #f5cba7; } .p2 { fill: #a9dfbf; } .p3 { fill: #d7bde2; }
.p4 { fill: #f9e79f; } .p5 { fill: #f5b7b1; }
.lever { font-weight: 600; color: #a04000; } .wrong { color: #c0392b; font-weight: 600; }
"""
_COLOURS = 6


def page(found: Audit) -> str:
    """The page; it needs nothing but itself."""
    title = f"{found.kernel.name} ({found.kernel.arch}) on {found.limits.device}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(_body(found, title))
        + "\n</body></html>\n"
    )


def _body(found: Audit, title: str) -> Iterator[str]:
    verdict = found.verdict
    yield f"<h1>{escape(title)}</h1>"
    yield f"<p>{escape(found.limits.products)}; code {found.kernel.code_sha256[:16]}</p>"
    style = verdict.word.replace(" ", "-")
    yield f'<p class="verdict {style}"><b>{escape(verdict.word)}</b>{escape(verdict.rule)}</p>'
    yield f"<h2>Cost</h2><p>{escape(words.cost(found))}</p>"
    yield from _cost(found)
    yield f"<h2>Structure</h2><p>{escape(words.structure(found))}</p>"
    yield from _structure(found)
    yield "<h2>Resources</h2>"
    yield from _resources(found)
    yield f"<h2>Behaviour</h2><p>{escape(words.behaviour(found))}</p>"
    if found.behaviour:
        yield _table(("counter", "value"), list(words.counters(found)))
    yield from _findings(found, "behaviour")
    yield f"<h2>Contradictions</h2><p>{len(found.contradictions) or 'none'}</p>"
    yield _list(f'<span class="wrong">{escape(told)}</span>' for told in found.contradictions)
    yield f"<h2>Contract</h2><p>{escape(words.contract(found))}</p>"
    yield _list(f'<span class="wrong">{escape(str(breach))}</span>' for breach in found.breaches)


def _cost(found: Audit) -> Iterator[str]:
    cost = found.cost
    if cost.share is None:
        return
    rows = [Bar("share of the whole", cost.share, f"{cost.share:.1%}")]
    if cost.value is not None:
        style = "good" if cost.value >= cost.bar else "bad"
        rows.append(Bar("worth of the possible gain", cost.value, f"{cost.value:.2%}", style))
    yield bars("What is at stake", rows, (cost.bar, f"bar {cost.bar:.1%}"))


def _structure(found: Audit) -> Iterator[str]:
    if found.structure:
        yield _table(words.STAGES, words.stage_rows(found))
        rows = [
            Bar(stage.name, stage.inside, f"{stage.inside}, {stage.unit}", f"p{i % _COLOURS}")
            for i, stage in enumerate(found.structure.stages)
            if stage.inside
        ]
        yield bars("Instructions in the main loop, by stage", rows)
    yield from _findings(found, "structure")


def _resources(found: Audit) -> Iterator[str]:
    kernel = found.kernel
    if kernel.spec and kernel.spec.planes:
        ledger = ledger_of(kernel.spec)
        yield _table(PLANES, plane_rows(ledger))
        yield f"<p>{escape(total_line(ledger, kernel.static_shared))}</p>"
        yield strips("Shared memory of a block", ledger.total, list(_planes(found)))
    has = found.occupancy
    if has is None or found.demand is None:
        yield "<p>Blocks per SM unknown: give --threads and --dynamic.</p>"
    else:
        yield _table(devices.HEADERS, [devices.row(found.demand, found.limits)])
        yield strips("Shared memory of an SM", found.limits.shared, [("blocks", _blocks(found))])
        yield bars(
            "Blocks per SM that each resource would allow",
            [
                Bar(name, count, str(count), "binding" if name in has.binding else "plain")
                for name, count in has.allowed.items()
            ],
        )
    yield from _findings(found, "resources")


def _planes(found: Audit) -> Iterator[tuple[str, list[Segment]]]:
    """The planes of their own in one row, those that reuse memory below them."""
    planes = found.kernel.spec.planes if found.kernel.spec else ()
    rows: dict[str, list[Segment]] = {}
    for i, p in enumerate(planes):
        name = f"on {p.on}" if p.on else "planes"
        segment = Segment(f"{p.name} {p.bytes:,} B", p.offset, p.bytes, f"p{i % _COLOURS}")
        rows.setdefault(name, []).append(segment)
    yield from rows.items()


def _blocks(found: Audit) -> list[Segment]:
    has, limits = found.occupancy, found.limits
    assert has is not None and found.demand is not None
    size, segments = found.demand.shared + limits.reserve, []
    for i in range(has.blocks):
        at = i * size
        segments.append(Segment(f"block {i + 1}", at, found.demand.shared, f"p{i % _COLOURS}"))
        reserve = Segment(f"reserve {limits.reserve:,} B", at + size - limits.reserve,
                          limits.reserve, "reserve")  # fmt: skip
        segments.append(reserve)
    left = limits.shared - has.blocks * size
    if left > 0:
        segments.append(Segment(f"free {left:,} B", has.blocks * size, left, "rest"))
    return segments


def _findings(found: Audit, line: str) -> Iterator[str]:
    yield _list(
        escape(f.text) + (f' <span class="lever">{f.lever.value}</span>' if f.lever else "")
        for f in found.findings
        if f.line == line
    )


def _list(items: Iterator[str]) -> str:
    text = "".join(f"<li>{item}</li>" for item in items)
    return f"<ul>{text}</ul>" if text else ""


def _table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def line(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(shown(c))}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line(headers, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
