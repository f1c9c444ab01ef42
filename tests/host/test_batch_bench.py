"""The benchmark of data sets runs from end to end; its times are not looked at."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batches import need
from fake_driver import FakeDriver
from goldens import GOLDEN

from pyruntime.batch.worker import Done
from pyruntime.measure.records import load_record

pytestmark = pytest.mark.filterwarnings("default")  # Ray has its own

need()

ROOT = Path(__file__).parents[2]
MODEL = GOLDEN / "tiny-llama-q8_0.gguf"


def test_batch_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import batch

    out = tmp_path / "batch.json"
    options = ["--rows", "12", "--part-rows", "2", "--nt", "10", "--rounds", "1", "--json"]
    options += ["--save", str(out), "--commit", "abc", "--workers", "1", "2"]
    monkeypatch.setattr(sys, "argv", ["batch.py", str(MODEL), *options])
    code = batch.main()
    record = load_record(out, "batch-bench")
    assert json.loads(capsys.readouterr().out) == record
    assert code == (record["ratios"]["2"] < batch.FLOOR) and record["ratios"]["1"] == 1
    for workers, (run,) in record["runs"].items():
        assert run["rows"] == 12 - 2 * int(workers) and run["whole_seconds"] > run["seconds"] > 0
        assert run["tokens"] == 10 * run["rows"]
    assert (record["commit"], record["device"], record["nt"]) == ("abc", "cpu (NumPy)", 10)


def test_batch_bench_on_gpus(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Without Ray and engines: what is asked of them, and what the record is tied to."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import batch

    asked = []

    def run(*_: Any, device: str, workers: int, progress: Callable[[Done], Any], **__: Any) -> Any:
        asked.append((device, workers))
        for index in range(4):
            progress(Done(index, 1, rows=2, tokens=18))
        return SimpleNamespace(seconds=1.0, device="a GPU")

    monkeypatch.setattr(batch, "run", run)
    monkeypatch.setattr(batch, "device_count", lambda: 4)
    monkeypatch.setattr(batch.cluster, "connected", lambda *_, **__: nullcontext())
    out = tmp_path / "batch.json"
    options = ["--device", "cuda", "--rounds", "2", "--rows", "8", "--save", str(out)]
    monkeypatch.setattr(sys, "argv", ["batch.py", str(MODEL), *options])
    assert batch.main() == 0
    assert asked == [("cuda", 1), ("cuda", 4)] * 2
    record = load_record(out, "batch-bench")
    assert (record["gpus"], record["device"], record["part_rows"]) == (4, "a GPU", 512)
    assert record["architecture"] == "sm_90a" and record["cuda"]
    assert [run["tokens"] for run in record["runs"]["1"]] == [3 * 18] * 2
    assert len(capsys.readouterr().out.splitlines()) == 4
