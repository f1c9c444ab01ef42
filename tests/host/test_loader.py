"""Weights arrive whole, however the file is cut into pieces, on a driver that copies late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from threading import Lock
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver
from goldens import GOLDEN

from pyruntime import Engine
from pyruntime.driver import api
from pyruntime.driver.memory import DeviceArray
from pyruntime.errors import NumericalError
from pyruntime.gguf import GGUFFile
from pyruntime.model import loader

PATH = GOLDEN / "tiny-qwen2-q8_0.gguf"


class LateDriver(FakeDriver):
    """Copies to the device when their stream is waited for, and not before."""

    def __init__(self) -> None:
        super().__init__()
        self.late: defaultdict[Any, list[tuple[Any, ...]]] = defaultdict(list)

    def _result(self, name: str, *arguments: Any) -> Any:
        match name, arguments:
            case "cuMemcpyHtoDAsync", (*copy, stream):
                self.late[stream].append((*copy, stream))
                return None
            case "cuStreamSynchronize", (stream,):
                for copy in self.late.pop(stream, ()):
                    super()._result("cuMemcpyHtoDAsync", *copy)
        return super()._result(name, *arguments)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDriver]:
    fake = LateDriver()
    monkeypatch.setattr(api, "_driver", fake)
    yield fake
    assert fake.misuse == [] and fake.held() == {} and not fake.late


@pytest.mark.parametrize("slot_bytes", [1, 5000, 1 << 20])
@pytest.mark.parametrize(("readers", "slots"), [(1, 1), (4, 2), (4, 6)])
def test_weights_arrive_whole(
    driver: LateDriver, monkeypatch: pytest.MonkeyPatch, slot_bytes: int, readers: int, slots: int
) -> None:
    """Also rows that are longer than a slot, and more readers than slots."""
    for name, value in {"SLOT_BYTES": slot_bytes, "READERS": readers, "SLOTS": slots}.items():
        monkeypatch.setattr(loader, name, value)
    pieces: list[int] = []
    with (
        GGUFFile.open(PATH) as file,
        Engine.load(PATH, device="cuda:0", max_tokens=16, progress=pieces.append) as engine,
    ):
        matrices = [t.nbytes for t in file.tensors.values() if len(t.shape) == 2]
        assert sum(pieces) == sum(matrices)
        assert sum(engine.launches().values()) == driver.calls["cuLaunchKernelEx"]
        weights = engine.model.weights
        embedding = np.asarray(weights.outer["embedding"])
        assert np.array_equal(embedding.ravel(), file.read("token_embd.weight"))
        for layer, arrays in enumerate(weights.layers):
            biases = [file.dequantize(f"blk.{layer}.attn_{x}.bias") for x in "qkv"]
            assert np.array_equal(np.asarray(arrays["qkv_bias"]), np.concatenate(biases))
            norm = file.dequantize(f"blk.{layer}.attn_norm.weight")
            assert np.array_equal(np.asarray(arrays["attn_norm"]), norm)


def test_a_small_model_makes_no_more_slots_than_pieces(driver: LateDriver) -> None:
    pieces: list[int] = []
    Engine.load(PATH, device="cuda:0", max_tokens=16, progress=pieces.append).close()
    assert driver.calls["cuMemHostAlloc"] == min(len(pieces), loader.SLOTS) + 1  # the live block's


def test_an_interrupted_load_waits_for_its_copies(driver: LateDriver) -> None:
    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Engine.load(PATH, device="cuda:0", max_tokens=16, progress=interrupt)
    assert driver.calls["cuMemcpyHtoDAsync"] and not driver.late


def test_a_weight_out_of_range_names_its_tensor(
    driver: LateDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    atomically = Lock()

    def overflowing(*_: Any, site: int, overflow: DeviceArray, **__: Any) -> None:
        if site >= 3:  # the embedding, the output, q, k
            with atomically:
                overflow.upload(np.minimum(np.asarray(overflow), site))

    monkeypatch.setattr(loader, "dequantize", overflowing)
    with pytest.raises(NumericalError, match=r"gguf: tensor 'blk\.0\.attn_k\.weight' holds"):
        Engine.load(PATH, device="cuda:0", max_tokens=16)
