"""The benchmark of the service runs from end to end; its times are not looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from goldens import GOLDEN
from serving import need

from pyruntime.measure.records import load_record

need()

ROOT = Path(__file__).parents[2]
MODEL = GOLDEN / "tiny-llama-q8_0.gguf"


@pytest.mark.parametrize("as_json", [False, True])
def test_serve_bench(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    as_json: bool,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import serve

    out = tmp_path / "serve.json"
    options = ["--device", "cpu", "--nt", "20", "--clients", "1", "3", "--seconds", "0.2"]
    options += ["--rounds", "2", "--save", str(out), "--commit", "abc"]
    monkeypatch.setattr(
        sys, "argv", ["serve.py", str(MODEL), *options, "--json" if as_json else "--parts"]
    )
    assert serve.main() == 0
    record = load_record(out, "serve-bench")
    printed = capsys.readouterr().out
    if as_json:
        assert {"schema": "pyruntime.serve-bench/1", **json.loads(printed)} == record
    else:
        assert len(printed.splitlines()) == 9
    assert list(record["rows"]) == ["next 1", "next 3", "score 1", "score 3"]
    for row in record["rows"].values():
        for way in ("bare", "served"):
            assert len(row[way]) == 2 and all(r["requests"] >= 1 for r in row[way])
        for served in row["served"]:
            assert list(served["parts_ms"]) == ["engine", "score", "read", "write"]
            assert min(served["parts_ms"].values()) > 0
    assert (record["commit"], record["device"], record["nt"]) == ("abc", "cpu (NumPy)", 20)
