"""The negative control takes out what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_wait_to_take_out_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from negative_control import BROKEN, KERNEL

    text = KERNEL.read_text()
    assert [text.count(old) for old, _ in BROKEN.values()] == [1] * len(BROKEN)
    assert all(old != new for old, new in BROKEN.values())
