"""`pyruntime gate`: fails when a kernel breaks a rule or takes more than the baseline says.

A rule is a condition over the fields of `inspect --json`, such as
'spill_bytes == 0 and registers <= 128', and over two of the machine code, which need nvdisasm
(pip install 'pyruntime-cuda[sass]'): mma, the tensor-core instruction that the main loop has most
of, or 'none', and slots_per_mma, the instructions that a warp issues there for each of them. What a
file does not tell breaks a rule that needs it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pyruntime.commands.options import add_json, print_json
from pyruntime.cubin import baseline as baselines
from pyruntime.cubin.expression import Rule
from pyruntime.cubin.nvdisasm import disassemble
from pyruntime.cubin.records import CODE_FIELDS, code_record, kernel_record, kernels_of, read_all
from pyruntime.errors import CubinError, InputError

# Fields of a kernel that a rule cannot compare: lists and nested records.
_NO_NUMBERS = {"params", "cluster", "required_threads", "calls", "uses", "attributes", "spec"}


@dataclass(frozen=True)
class Finding:
    """A kernel that breaks a rule: `text` gives the figure and the limit."""

    kernel: str
    rule: str
    text: str


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    0: every kernel passes, 1: some do not, 2: unreadable, no kernel, or no nvdisasm for a rule that
    needs it.
    """
    parser = argparse.ArgumentParser("pyruntime gate", description=__doc__)
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="FILE", help="default: the installed cubins"
    )
    parser.add_argument("--rule", action="append", default=[], help="may be repeated")
    parser.add_argument(
        "--baseline", type=Path, metavar="TOML", help="nothing may be worse than this"
    )
    parser.add_argument(
        "--write-baseline", type=Path, metavar="TOML", help="record today's figures there and stop"
    )
    parser.add_argument("--kernel", metavar="GLOB", default="*", help="only kernels named so")
    add_json(parser)
    args = parser.parse_args(argv)
    if not (args.rule or args.baseline or args.write_baseline):
        parser.error("give --rule, --baseline or --write-baseline")
    rules = [Rule(text) for text in args.rule]
    cubins, unread = read_all(args.paths)
    if unread:
        raise CubinError("; ".join(unread))
    kernels = [k for _, k in kernels_of(cubins) if fnmatchcase(k.name, args.kernel)]
    if not kernels:
        raise InputError(f"nothing to gate: no kernel matches {args.kernel}")
    records = [kernel_record(kernel) for kernel in kernels]
    if args.write_baseline:
        recorded = baselines.baseline_of(cubins)
        baselines.write_baseline(args.write_baseline, recorded)
        print(f"wrote {args.write_baseline}: {len(recorded)} kernels")
        return 0
    if of_code := any(rule.names & set(CODE_FIELDS) for rule in rules):
        for record, code in zip(records, disassemble(kernels), strict=True):
            record |= code_record(code)
    findings = _broken(rules, records)
    if args.baseline:
        findings += _worse(args.baseline, records, args.kernel)
    margins = {} if findings else _margins(rules, records)
    if args.json:
        print_json(
            "gate",
            {
                "kernels": len(records),
                "rules": args.rule,
                "baseline": str(args.baseline) if args.baseline else None,
                "findings": [vars(f) for f in findings],
                "margins": {
                    field: {"margin": margin, "kernel": kernel}
                    for field, (margin, kernel) in margins.items()
                },
                "code": {
                    baselines.key_of(record): {field: record[field] for field in CODE_FIELDS}
                    for record in records
                    if of_code
                },
            },
        )
    else:
        _print(findings, len(records), rules, args.baseline, margins)
        _print_slots(records)
    return 1 if findings else 0


def _broken(rules: list[Rule], records: list[dict[str, Any]]) -> list[Finding]:
    findings = []
    for rule in rules:
        for record in records:
            fields = dict.fromkeys(CODE_FIELDS) | {
                n: v for n, v in record.items() if n not in _NO_NUMBERS
            }
            holds = rule.holds(fields)
            if holds:
                continue
            figures = ", ".join(f"{n} {_figure(fields[n])}" for n in sorted(rule.names))
            text = figures if holds is False else f"cannot be decided: {figures}"
            findings.append(Finding(baselines.key_of(record), rule.text, text))
    return findings


def _worse(path: Path, records: list[dict[str, Any]], pattern: str) -> list[Finding]:
    known = baselines.read_baseline(path)
    findings = [
        Finding(baselines.key_of(record), "baseline", text)
        for record in records
        for text in baselines.against(known, record)
    ]
    there = {baselines.key_of(record) for record in records}
    gone = [k for k in known if k not in there and fnmatchcase(k.rsplit(" ", 1)[0], pattern)]
    return findings + [Finding(k, "baseline", "is in the baseline but not here") for k in gone]


def _margins(rules: list[Rule], records: list[dict[str, Any]]) -> dict[str, tuple[float, str]]:
    """field -> the smallest distance from its limit, and the kernel that has it."""
    closest: dict[str, tuple[float, str]] = {}
    for rule in rules:
        for record in records:
            for field, margin in rule.margins(record).items():
                if field not in closest or margin < closest[field][0]:
                    closest[field] = margin, baselines.key_of(record)
    return closest


def _print(
    findings: list[Finding],
    kernels: int,
    rules: list[Rule],
    baseline: Path | None,
    margins: dict[str, tuple[float, str]],
) -> None:
    for f in findings:
        print(f"FAIL {f.kernel}: {f.text}  [{f.rule}]")
    parts = [f"{len(rules)} rule(s)"] if rules else []
    parts += [f"baseline {baseline}"] if baseline else []
    verdict = f"{len(findings)} finding(s)" if findings else "pass"
    print(f"{verdict}: {kernels} kernel(s), {', '.join(parts)}")
    for field, (margin, kernel) in margins.items():
        print(f"  closest to its limit: {field} of {kernel}, margin {_figure(margin)}")


def _print_slots(records: list[dict[str, Any]]) -> None:
    for record in records:
        if record.get("slots_per_mma") is not None:
            slots = f"{_figure(record['slots_per_mma'])} issue slots per {record['mma']}"
            print(f"  {baselines.key_of(record)}: {slots} in the main loop")


def _figure(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
