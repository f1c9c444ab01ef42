"""Fixtures for tests on a GPU: kernels, exact-size arrays, and a seeded generator."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray

from pyruntime.driver import api
from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.errors import DriverNotFoundError
from pyruntime.measure.series import REGIMES, Regime
from pyruntime.model.decoder import Decoder

# What a host says nothing about, and what starts processes, for which there is no emulation.
NOT_EMULATED = ("test_banks", "test_batch", "test_clock", "test_eval", "test_measure")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "/gpu/" not in item.nodeid:
            continue
        item.add_marker(pytest.mark.gpu)
        if config.getoption("--emulate") and item.path.stem in NOT_EMULATED:
            item.add_marker(pytest.mark.skip("not emulated"))


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Series that are not about speed need no cool GPU."""
    monkeypatch.setitem(REGIMES, "burst", Regime(rest=0.01, warm_up=0.1))


@pytest.fixture(autouse=True)
def poisoned_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start with NaN where attention will write.

    Without a first write initcheck takes that memory for uninitialised: it sees no TMA store.
    """
    made = Decoder.__init__

    def make(self: Decoder, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        self.activations["attended"].fill(0xFF)

    monkeypatch.setattr(Decoder, "__init__", make)


class Gpu:
    """Device 0 with its kernels."""

    def __init__(self) -> None:
        self.device = Device(0)
        self.library = Library(self.device)
        self.stream = Stream(self.device)

    def upload(self, values: NDArray[Any]) -> DeviceArray:
        """A copy in an allocation of exactly its size."""
        return DeviceArray(self.device, values.shape, values.dtype).upload(values)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike, fill: int = 0xFF) -> DeviceArray:
        """An array of one repeated byte; 0xFF is a NaN in every float format."""
        return DeviceArray(self.device, shape, dtype).fill(fill)

    def download(self, array: DeviceArray) -> NDArray[Any]:
        """A host copy."""
        return np.asarray(array)

    def run(self, program: Program) -> None:
        """Runs a program and waits; a failure of any launch raises."""
        with self.device.current():
            program.run(self.stream)
            self.stream.synchronize()


@pytest.fixture(scope="session", autouse=True)
def _emulation(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --emulate kernels run on the host."""
    architecture = request.config.getoption("--emulate")
    if architecture is None:
        yield
        return
    from compilers import cuda_includes, cxx
    from emulated_driver import EmulatedDriver

    try:
        cxx(), cuda_includes()
    except pytest.skip.Exception as missing:
        pytest.exit(f"--emulate: {missing}", returncode=3)
    driver = EmulatedDriver(architecture, request.config.getoption("--multiprocessors"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_driver", driver)
        yield
        gc.collect()  # what is dropped goes back to it
    assert driver.misuse == []


@pytest.fixture(scope="session", autouse=True)
def _needs_a_device(_emulation: None) -> None:
    """One message instead of hundreds of errors."""
    try:
        Device(0).close()
    except DriverNotFoundError as error:
        pytest.exit(f"these tests need a GPU: {error}", returncode=3)


@pytest.fixture(scope="session")
def gpu() -> Iterator[Gpu]:
    gpu = Gpu()
    yield gpu
    gpu.stream.close()
    gpu.library.close()
    gpu.device.close()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
