"""The benchmark of data sets runs from end to end; its times are not looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from goldens import GOLDEN

from pyruntime.measure.records import load_record

pytestmark = pytest.mark.filterwarnings("default")  # Ray has its own

for package in ("ray", "pyarrow"):
    pytest.importorskip(package, reason=f"{package} is not installed (.ci/run installs it)")

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
    assert (record["commit"], record["device"], record["nt"]) == ("abc", "cpu (NumPy)", 10)
