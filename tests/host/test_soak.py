"""The soak runs, in NumPy and on a fake driver, and it sees a wrong row and a strange error."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver
from goldens import GOLDEN

from pyruntime import Engine

ROOT = Path(__file__).parents[2]
PATH = GOLDEN / "tiny-qwen2-q8_0.gguf"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs it for 2 seconds, and returns its exit code and record."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import soak

    def run(device: str) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "soak.json"
        options = ["--device", device, "--minutes", "0.03", "--threads", "4", "--json", str(out)]
        monkeypatch.setattr(sys, "argv", ["soak.py", str(PATH), *options])
        return soak.main(), json.loads(out.read_text())

    return run


def by_a_worker() -> bool:
    """Whether this is a call of the soak, and not one by which it learns what is right."""
    return threading.current_thread() is not threading.main_thread()


def test_in_numpy(soak: Any) -> None:
    code, record = soak("cpu")
    assert (code, record["faults"]) == (0, [])
    assert {"one", "thread interrupted", "engine closed under its callers"} <= set(
        record["outcomes"]
    )


def test_on_a_fake_driver(soak: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without interrupts: one between a context's push and the block leaves it pushed."""
    monkeypatch.setattr(sys.modules["soak"], "_interrupt", lambda thread: None)
    monkeypatch.setattr(sys.modules["soak"], "HOST_SLACK", FakeDriver.total)
    code, record = soak("cuda:0")
    assert (code, record["faults"]) == (0, [])
    assert driver.misuse == [] and driver.held() == {}


def test_a_wrong_row_is_a_fault(soak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Engine.prefill

    def spoiled(engine: Engine, ids: Any, **options: Any) -> Any:
        result = given(engine, ids, **options)
        if by_a_worker() and not isinstance(result, list) and result.logits is not None:
            result.logits[0, 0] += 100
        return result

    monkeypatch.setattr(Engine, "prefill", spoiled)
    code, record = soak("cpu")
    assert code == 1 and "WrongRowError" in record["faults"][0]


def test_an_error_that_belongs_to_no_fault_is_one(
    soak: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Engine.prefill

    def failing(engine: Engine, ids: Any, **options: Any) -> Any:
        if by_a_worker():
            raise TypeError("made up")
        return given(engine, ids, **options)

    monkeypatch.setattr(Engine, "prefill", failing)
    code, record = soak("cpu")
    assert code == 1 and "made up" in record["faults"][0]
