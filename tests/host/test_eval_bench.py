"""The benchmark of the harness's model runs from end to end; its times are not looked at."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from models import write_talking_model

from pyruntime.measure.records import load_record

pytest.importorskip("lm_eval", reason="needs pip install 'pyruntime-cuda[eval]'")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("as_json", [False, True])
def test_eval_bench(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    as_json: bool,
) -> None:
    """A letter is a token of this model."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    spec = importlib.util.find_spec("eval")
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)

    out, model = tmp_path / "eval.json", write_talking_model(tmp_path / "talking.gguf")
    options = ["--device", "cpu", "--nt", "20", "--prompts", "3", "--generated", "5"]
    options += ["--rounds", "2", "--save", str(out), "--commit", "abc"]
    monkeypatch.setattr(
        sys, "argv", ["eval.py", str(model), *options, *(["--json"] if as_json else [])]
    )
    assert bench.main() == 0
    record, printed = load_record(out, "eval-bench"), capsys.readouterr().out
    if as_json:
        assert json.loads(printed) == record
    else:
        assert len(printed.splitlines()) == 5
    assert (record["commit"], record["device"], record["nt"]) == ("abc", "cpu (NumPy)", 20)
    for kind, requests in (("answers", 12), ("texts", 3), ("greedy", 3)):
        assert [r["requests"] for r in record["runs"][kind]] == [requests] * 2
        assert all(r["seconds"] > 0 for r in record["runs"][kind])
    for kind, tokens in (("texts", 3 * 80), ("greedy", 3 * (20 + 4))):
        assert {r["tokens"] for r in record["runs"][kind]} == {tokens}
