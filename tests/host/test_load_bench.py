"""The benchmark of loading runs from end to end on a fake driver; its times are not looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_driver import FakeDriver
from goldens import GOLDEN

from pyruntime.measure.records import load_record
from pyruntime.model import loader

ROOT = Path(__file__).parents[2]
PATH = GOLDEN / "tiny-qwen2-q8_0.gguf"


@pytest.mark.parametrize("as_json", [False, True])
def test_load_bench(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    as_json: bool,
) -> None:
    for name in ("READERS", "SLOTS", "SLOT_BYTES"):  # the benchmark sets them
        monkeypatch.setattr(loader, name, getattr(loader, name))
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import load

    out = tmp_path / "load.json"
    options = ["--readers", "1", "3", "--slots", "4", "--mib", "1", "2", "--rounds", "2"]
    options += ["--save", str(out), "--commit", "abc", *(["--json"] if as_json else [])]
    monkeypatch.setattr(sys, "argv", ["load.py", str(PATH), *options])
    assert load.main() == 0
    record = load_record(out, "load")
    printed = capsys.readouterr().out
    if as_json:
        assert {"schema": "pyruntime.load/1", **json.loads(printed)} == record
    else:
        assert "readers slots  MiB" in printed and "file.read_into" in printed
    assert [(x["readers"], x["slots"], x["mib"]) for x in record["settings"]] == [
        (1, 4, 1), (1, 4, 2), (3, 4, 1), (3, 4, 2)
    ]  # fmt: skip
    assert all(len(x["seconds"]) == 2 for x in record["settings"])
    assert any(name.startswith("dequant_") for name in record["kernels"])
    calls = {label: row["calls"] for label, row in record["breakdown"].items()}
    steps = load.STEPS.keys() - {"tokenizer"}  # the file has no vocabulary
    assert {label: calls[label] for label in steps} == dict.fromkeys(steps, 1)
    assert calls["file.read_into"] > calls["program.run"] > 10
    assert driver.held() == {}
