"""Memory of logits that are gone serves later calls, and nothing that is still in use does."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from dlpack_consumer import Consumer
from fake_driver import INVALID_VALUE, OUT_OF_MEMORY, FakeDriver
from goldens import GOLDEN
from threads import finish, start

from pyruntime import Engine
from pyruntime.driver.device import Device
from pyruntime.driver.memory import DeviceArray
from pyruntime.errors import CudaError, OutOfMemoryError, WaitTimeoutError

Load = Callable[..., Engine]
MODEL = GOLDEN / "tiny-llama-q8_0.gguf"
ROOM = 256  # bytes to spare


@pytest.fixture
def device(driver: FakeDriver) -> Iterator[Device]:
    device = Device(0)
    device.spare.most = ROOM
    yield device
    device.close()


def array(device: Device, nbytes: int = 64) -> DeviceArray:
    return DeviceArray(device, (nbytes // 4,), np.int32, what="made-up array", spare=True)


def gone(device: Device, nbytes: int = 64) -> int:
    """The address of an array that was dropped."""
    return array(device, nbytes).ptr


# Arrays


def test_a_later_array_of_the_same_size_gets_it(driver: FakeDriver, device: Device) -> None:
    address = gone(device)
    assert device.spare.nbytes == device.allocated == 64
    other = array(device, 128)
    assert other.ptr != address
    plain = DeviceArray(device, (64,), np.uint8)
    assert plain.ptr != address
    same = DeviceArray(device, (64,), np.uint8, spare=True)
    assert same.ptr == address and device.spare.nbytes == 0
    assert driver.calls["cuMemAlloc"] == 3 and driver.calls["cuMemFree"] == 0
    assert device.allocated == 64 + 128 + 64
    array(device)  # there is none left
    assert driver.calls["cuMemAlloc"] == 4


def test_no_more_is_kept_than_there_is_room(driver: FakeDriver, device: Device) -> None:
    several = [array(device, nbytes) for nbytes in (128, 96, 64, 32)]
    while several:
        del several[0]
    assert device.spare.nbytes == device.allocated == 128 + 96 + 32
    assert driver.held()["arrays"] == 3 and driver.calls["cuMemFree"] == 1


def test_a_view_keeps_it(device: Device) -> None:
    owner = array(device)
    view = owner.view(8, (4,), np.int32)
    address = owner.ptr
    del owner
    other = array(device)
    assert other.ptr != address
    del view
    assert array(device).ptr == address


@pytest.mark.parametrize("of", ["array", "view"])
def test_what_dlpack_has_shared_is_freed(driver: FakeDriver, device: Device, of: str) -> None:
    """Once nobody has it: freeing waits for work that consumers have put on their streams."""
    owner: Any = array(device)
    shared = owner if of == "array" else owner.view(0, (4,), np.int32)
    consumer = Consumer(shared.__dlpack__())
    address = owner.ptr
    del owner, shared
    assert array(device).ptr != address and address in driver.live["arrays"]
    consumer.close()
    assert address not in driver.live["arrays"]


@pytest.mark.parametrize("of", ["array", "view"])
def test_what_the_array_interface_has_shared_is_freed(
    driver: FakeDriver, device: Device, of: str
) -> None:
    owner: Any = array(device)
    shared = owner if of == "array" else owner.view(0, (4,), np.int32)
    assert shared.__cuda_array_interface__["data"][0] == owner.ptr
    del owner, shared
    assert "arrays" not in driver.held()


def test_what_is_closed_is_freed(driver: FakeDriver, device: Device) -> None:
    closed = array(device)
    closed.close()
    del closed
    assert driver.held().get("arrays", 0) == device.allocated == 0


def test_a_device_that_is_closed_keeps_nothing(driver: FakeDriver) -> None:
    device = Device(0)
    device.spare.most = ROOM
    gone(device)
    alive = array(device)
    device.close()
    assert driver.held() == {"arrays": 1, "contexts": 1}
    del alive
    assert driver.held() == {}


def test_one_that_cannot_be_freed_does_not_keep_the_device(driver: FakeDriver) -> None:
    driver.cuDevicePrimaryCtxRetain(0)  # somebody else's, so that the context stays
    device = Device(0)
    device.spare.most = ROOM
    gone(device)
    driver.fail["cuMemFree"] = (0, INVALID_VALUE)
    with pytest.raises(CudaError, match="cuMemFree"):
        device.close()
    assert driver.held() == {"arrays": 1, "contexts": 1}


def test_memory_for_something_else_is_made_of_it(driver: FakeDriver, device: Device) -> None:
    gone(device)
    driver.fail["cuMemAlloc"] = (0, OUT_OF_MEMORY)
    other = DeviceArray(device, (32,), np.uint8)
    assert device.spare.nbytes == 0 and device.allocated == other.nbytes
    driver.fail["cuMemAlloc"] = (0, OUT_OF_MEMORY)
    with pytest.raises(OutOfMemoryError, match="made-up array: 64 bytes asked for"):
        array(device)
    assert driver.calls["cuMemAlloc"] == 4  # with nothing to spare it is not tried again
    assert device.allocated == other.nbytes


def test_threads_never_have_the_same(driver: FakeDriver, device: Device) -> None:
    held: set[int] = set()
    twice: list[int] = []
    over = threading.Barrier(4)

    def work() -> None:
        over.wait()
        for _ in range(300):
            mine = [array(device, nbytes) for nbytes in (64, 32, 64)]
            addresses = {one.ptr for one in mine}
            twice.extend(addresses & held)
            held.update(addresses)
            held.difference_update(addresses)
            mine.clear()

    finish(*(start(work) for _ in range(4)))
    assert not twice and device.allocated == device.spare.nbytes <= ROOM
    assert device.allocated == sum(a.nbytes for a in driver.live["arrays"].values())


# Engines


def test_calls_in_a_row_allocate_nothing(driver: FakeDriver, load: Load) -> None:
    """Where each result lives until the next one is there."""
    engine = load()
    result = engine.prefill([1, 2])
    seen = {result.logits.ptr}
    result = engine.prefill([1, 2])
    seen.add(result.logits.ptr)
    driver.calls.clear()
    for _ in range(6):
        result = engine.prefill([1, 2])
        assert result.logits.ptr in seen
    assert driver.calls["cuMemAlloc"] == driver.calls["cuMemFree"] == 0
    assert driver.calls["cuCtxPushCurrent"] == driver.calls["cuCtxPopCurrent"] == 6


def test_an_engine_keeps_no_more_than_its_plan_says(driver: FakeDriver, load: Load) -> None:
    engine = load(model=MODEL)
    results = [engine.prefill([1, 2], logits=logits) for logits in ("last", "all", "last")]
    assert len({result.logits.ptr for result in results}) == 3
    results.clear()
    planned = Engine.plan(MODEL, max_tokens=16, kv_tokens=64, weights=engine.weights)
    device = engine.model.device
    assert device.spare.nbytes == planned.nbytes["logits"]
    assert device.allocated == planned.total  # the engine's own cache is the one of the plan


def test_a_cache_that_needs_the_last_bytes_gets_them(driver: FakeDriver, load: Load) -> None:
    engine = load()
    engine.prefill([1])
    device = engine.model.device
    cache, spare = engine.new_cache(8), device.spare.nbytes
    driver.total = device.allocated - spare  # with another one and without what is spare
    cache.close()
    assert spare
    engine.new_cache(8).close()
    assert device.spare.nbytes == 0
    driver.total -= 1
    with pytest.raises(OutOfMemoryError):
        engine.new_cache(8)


@pytest.mark.parametrize("warm", [[], [1]])
def test_logits_of_a_call_whose_time_ran_out_are_not_lent_again(
    driver: FakeDriver, load: Load, warm: list[int]
) -> None:
    """As long as the GPU may write them."""
    engine = load()
    engine.warm(warm)
    spare = engine.model.device.spare
    engine.prefill([1])
    assert spare.nbytes
    driver.slow = math.inf
    with pytest.raises(WaitTimeoutError):
        engine.prefill([1], timeout=0.01)
    gc.collect()
    assert spare.nbytes == 0 and driver.working
    driver.slow = 0
    engine.prefill([1])  # waits for that first
    assert spare.nbytes
