"""A data set in small parts through Ray, and what holds of its results on whatever device."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDEN

from pyruntime import Engine
from pyruntime.batch import Report, Score, run
from pyruntime.batch.worker import Done

MODEL = GOLDEN / "tiny-llama-q4_k_m.gguf"
ROWS, BAD, PART_ROWS = 81, (13, 40), 3
PARTS = ROWS // PART_ROWS


def need() -> None:
    """Skips the module where Ray or PyArrow is not installed."""
    for package in ("ray", "pyarrow"):
        pytest.importorskip(package, reason="needs pip install 'pyruntime-cuda[batch]'")


def write_source(path: Path) -> Path:
    """Prompts of some length, so that a part takes a while; those of BAD are no JSON."""
    random = np.random.default_rng(0)
    lines = []
    for n in range(ROWS):
        ids = random.integers(0, 259, 40 + n).tolist()
        lines.append(json.dumps({"n": n, "prompt": ids[:-4], "continuation": ids[-4:]}))
    for n in BAD:
        lines[n] = "not JSON"
    path.write_text("\n".join(lines))
    return path


def scored(source: Path, out: Path, *, device: str = "cpu", **options: Any) -> Report:
    return run(MODEL, source, out, task=Score(), device=device, part_rows=PART_ROWS, **options)


def contents(out: Path) -> dict[str, bytes]:
    """Of all files, those with a dot before their name included."""
    return {path.name: path.read_bytes() for path in out.iterdir()}


def of_one_worker(source: Path, out: Path, **options: Any) -> dict[str, bytes]:
    """The files that one worker writes, by name."""
    report = scored(source, out, workers=1, **options)
    assert (report.workers, report.resumed, report.parts) == (1, 0, PARTS)
    assert (report.rows, report.errors) == (ROWS, len(BAD))
    assert report.first_error.startswith("in.jsonl:") and "not JSON" in report.first_error
    return contents(out)


def check_rows(files: dict[str, bytes], *, atol: float) -> None:
    """The input's rows, in their order, with the log-probabilities that NumPy finds."""
    text = b"".join(files[name] for name in sorted(files) if name[0] != "_").decode()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["id"] for row in rows] == [f"in.jsonl:{n + 1}" for n in range(ROWS)]
    assert [n for n, row in enumerate(rows) if row["error"] is not None] == list(BAD)
    good = [row for row in rows if row["error"] is None]
    with Engine.load(MODEL, device="cpu") as engine:
        found = engine.score([r["prompt"] for r in good], [r["continuation"] for r in good])
    for row, expected in zip(good, found, strict=True):
        np.testing.assert_allclose(row["logprobs"], np.array(expected.log_probs, float), atol=atol)
        assert row["logprob"] == pytest.approx(sum(row["logprobs"]))


def check_two_workers(
    source: Path, out: Path, undisturbed: dict[str, bytes], **options: Any
) -> None:
    """They write what one writes, and a second run of the same nothing."""
    seen: list[Done] = []
    report = scored(source, out, progress=seen.append, workers=2, **options)
    assert report.workers == 2 and len({done.pid for done in seen}) == 2
    assert contents(out) == undisturbed
    again = scored(source, out, progress=seen.append, workers=2, **options)
    assert (again.resumed, again.errors, again.tokens) == (report.parts, len(BAD), 0)
    assert len(seen) == report.parts and contents(out) == undisturbed


def check_a_killed_worker(
    source: Path, out: Path, undisturbed: dict[str, bytes], **options: Any
) -> None:
    """Another goes on; no part is lost, none is reported twice, and all are the same."""
    seen, killed = [], []

    def kill_once(done: Done) -> None:
        seen.append(done)
        if not killed and done.pid != os.getpid():
            os.kill(done.pid, signal.SIGKILL)
            killed.append((done.pid, len(list(out.glob("part-*")))))

    report = scored(source, out, workers=1, progress=kill_once, **options)
    ((pid, parts),) = killed
    assert parts < report.parts, "it was killed half-way"
    assert {done.pid for done in seen} > {pid}, "another process has gone on"
    assert Counter(done.index for done in seen) == dict.fromkeys(range(report.parts), 1)
    assert {k: v for k, v in contents(out).items() if k[0] != "."} == undisturbed
