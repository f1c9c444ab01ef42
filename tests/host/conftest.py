"""Fixtures for tests of what the package does with a driver, on a machine without one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_driver import FakeDriver
from goldens import GOLDEN

from pyruntime import Engine
from pyruntime.cubin.installed import manifest
from pyruntime.driver import api


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A fake driver in CUDA's place, which nobody misuses."""
    fake = FakeDriver()
    monkeypatch.setattr(api, "_driver", fake)
    yield fake
    # What the test has dropped goes back to this driver, not to that of a later test.
    fake.hook = lambda name, arguments: None
    gc.collect()
    assert fake.misuse == []


@pytest.fixture(params=["fast", "wgmma"])
def attention(request: pytest.FixtureRequest) -> str:
    """A variant without a schedule, and one with."""
    if request.param == "wgmma" and "90a" not in manifest()["architectures"]:
        pytest.skip("no cubins for sm_90a are installed")
    return str(request.param)


@pytest.fixture
def load(driver: FakeDriver) -> Iterator[Callable[..., Engine]]:
    """Loads a small model, on the fake driver's device if no other is named, for 16 rows a pass."""
    path = GOLDEN / "tiny-llama-q8_0.gguf"
    engines = weakref.WeakSet[Engine]()

    def load(**options: Any) -> Engine:
        defaults = {"model": path, "device": "cuda:0", "max_tokens": 16, "kv_tokens": 64}
        engine = Engine.load(**{**defaults, **options})
        engines.add(engine)
        return engine

    yield load
    driver.hook = lambda name, arguments: None
    driver.fail.clear()
    for engine in list(engines):
        engine.close()
