"""Writes docs/campaign.md and its pictures from the records in bench/results.

What has not been recorded is named with the command that records it. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import campaign_int8
import campaign_measured as measured
import campaign_source as source

from pyruntime.measure.records import load_record
from pyruntime.tools.charts import pairs_svg, wall_svg

BENCH = Path(__file__).parent
KINDS = ("wall", "ab", "lever", "ladder", "peers", *campaign_int8.COMMANDS)

_HEAD = """# The campaign, run again

<!-- Written by bench/campaign.py from bench/results; do not edit. -->

A public campaign (yusiwen/minfer) took one prefill attention kernel through five forms on a GB10
and wrote down what each was worth. The five forms are rows of our kernel table, with one contract,
each selectable: `Engine.load(..., attention="r46")`. This page is that table measured again with
the tools of [measuring.md](measuring.md), and what became of the campaign's conclusions.
"""
_OLDER = """ Since then Hopper has attention kernels of
its own ([attention.md](attention.md)) and launches overlap: neither is on record here."""


def read_records(folder: Path) -> dict[str, Any]:
    """Every record by file name without .json. Raises InputError for a file that is none."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        kind = path.stem if path.stem in KINDS else path.stem.split("-")[0]
        if kind in KINDS and not path.name.endswith(".trace.json"):
            found[path.stem] = load_record(path, kind)
    return found


def provenance(records: Mapping[str, Any]) -> list[str]:
    """The commits that the records are of, and whether they hold today's kernels of Hopper."""
    commits = sorted({record["commit"][:12] for record in records.values() if record.get("commit")})
    if not commits:
        return []
    others = [record for name, record in records.items() if name not in campaign_int8.COMMANDS]
    kernels = {name for record in others for name in record.get("kernels") or ()}
    older = not any(name.startswith("attention_wgmma") for name in kernels)
    return [f"The records are of commit {', '.join(commits)}.{_OLDER * older}", ""]


def page(records: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    history = tomllib.loads((BENCH / "history.toml").read_text())["variant"]
    sections = (
        measured.ladder(records, history),
        measured.duel(records),
        measured.walls(records),
        measured.levers(records),
        measured.peers(records),
        campaign_int8.int8(records),
        source.carried_over(records, history),
        source.faults(),
        source.commands(),
    )
    return "\n".join(
        [_HEAD, *provenance(records), *(line for section in sections for line in section)]
    )


def pictures(records: Mapping[str, Any]) -> dict[str, str]:
    """SVG text by file name."""
    found = {
        f"campaign-{name}.svg": wall_svg(wall)
        for name, wall in measured.walls_at_nt(records).items()
    }
    record = measured.against_base(records, "r48")
    if record and record["times"]:
        found["campaign-ab.svg"] = pairs_svg(record)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    parser.add_argument("--docs", type=Path, default=BENCH.parent / "docs")
    args = parser.parse_args()
    records = read_records(args.results)
    (args.docs / "images").mkdir(parents=True, exist_ok=True)
    (args.docs / "campaign.md").write_text(page(records))
    for name, svg in pictures(records).items():
        (args.docs / "images" / name).write_text(svg)
    print(
        f"{args.docs / 'campaign.md'} from {len(records)} records: {', '.join(records) or 'none'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
