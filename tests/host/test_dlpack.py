"""Device arrays for others: what a capsule says, and how long the memory behind it lives."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dlpack_consumer import Consumer
from fake_driver import FakeDriver

from pyruntime import Engine
from pyruntime.driver import dlpack
from pyruntime.driver.device import Device
from pyruntime.driver.memory import DeviceArray

TESTS = Path(__file__).parents[1]
CUDA, CPU = 2, 1  # kDLCUDA, kDLCPU
CODES = {"i": 0, "u": 1, "f": 2}  # DLDataTypeCode by NumPy's kind
DTYPES = ("float32", "float16", "uint8", "int32")

versioned_numpy = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="this NumPy makes legacy capsules only"
)
both = pytest.mark.parametrize("version", [None, pytest.param((1, 0), marks=versioned_numpy)])


@pytest.fixture
def device(driver: FakeDriver) -> Iterator[Device]:
    device = Device(0)
    yield device
    device.close()


def arrays(driver: FakeDriver) -> int:
    """Allocations that live."""
    return driver.held().get("arrays", 0)


# What is said


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_capsule_describes_the_array(
    device: Device, dtype: str, version: tuple[int, int] | None
) -> None:
    device.ordinal = 3
    array = DeviceArray(device, (2, 3, 5), dtype)
    consumer = Consumer(array.__dlpack__(max_version=version))
    tensor, managed = consumer.tensor, consumer.managed
    assert tensor.data == array.ptr and tensor.byte_offset == 0
    assert (tensor.device_type, tensor.device_id) == (CUDA, 3) == array.__dlpack_device__()
    assert (tensor.code, tensor.bits, tensor.lanes) == (
        CODES[np.dtype(dtype).kind], 8 * np.dtype(dtype).itemsize, 1,
    )  # fmt: skip
    assert tensor.shape[: tensor.ndim] == [2, 3, 5]
    if tensor.strides:  # before DLPack 1.2 a null stands for row-major order, too
        assert tensor.strides[: tensor.ndim] == [15, 5, 1]
    if version:
        assert managed.major == 1 and managed.flags == 0  # neither read-only nor a copy
    consumer.close()


@pytest.mark.parametrize(
    ("most", "name"),
    [(None, b"dltensor"), ((0, 8), b"dltensor")]
    + [
        pytest.param(most, b"dltensor_versioned", marks=versioned_numpy)
        for most in ((1, 0), (1, 3), (2, 0))
    ],
)
def test_the_consumers_version_chooses_the_capsule(
    device: Device, most: tuple[int, int] | None, name: bytes
) -> None:
    consumer = Consumer(DeviceArray(device, (2,), "f4").__dlpack__(max_version=most))
    assert consumer.name == name
    consumer.close()


@pytest.mark.parametrize("shape", [(0,), (0, 7), (3, 0, 2)])
@both
def test_nothing_has_no_address(
    device: Device, shape: tuple[int, ...], version: tuple[int, int] | None
) -> None:
    array = DeviceArray(device, shape, "f2")
    consumer = Consumer(array.__dlpack__(max_version=version))
    tensor = consumer.tensor
    assert tensor.data is None and tensor.shape[: tensor.ndim] == list(shape)
    consumer.close()
    assert array.__cuda_array_interface__["data"] == (0, False)
    assert np.asarray(array).shape == shape


def test_the_cuda_array_interface_is_version_3_without_a_stream(device: Device) -> None:
    array = DeviceArray(device, (4, 2), "f2")
    assert array.__cuda_array_interface__ == {
        "version": 3, "shape": (4, 2), "typestr": "<f2", "data": (array.ptr, False),
        "strides": None, "stream": None,
    }  # fmt: skip


def test_views_are_exported_from_where_they_begin(device: Device) -> None:
    array = DeviceArray(device, (6, 10), "f4")
    rows = array.rows(2, 5)
    nested = rows.view(8, (3,), "i4")
    for view, offset, shape in ((rows, 80, [3, 10]), (nested, 88, [3])):
        consumer = Consumer(view.__dlpack__())
        assert consumer.tensor.data == array.ptr + offset
        assert consumer.tensor.shape[: consumer.tensor.ndim] == shape
        assert view.__cuda_array_interface__["data"] == (array.ptr + offset, False)
        consumer.close()


def test_codes_of_an_e4m3_cache_are_uint8(load: Callable[..., Engine]) -> None:
    cache = load(kv_dtype="e4m3").new_cache(8)
    for array, code, bits in ((cache.k, 1, 8), (cache.v, 1, 8), (cache.k_scale, 2, 32)):
        consumer = Consumer(array.__dlpack__())
        tensor = consumer.tensor
        assert (tensor.data, tensor.code, tensor.bits) == (array.ptr, code, bits)
        assert tensor.shape[: tensor.ndim] == list(array.shape)
        consumer.close()
    cache.close()


# What is refused


@pytest.mark.parametrize("stream", [None, 1, 2, -1, 0x7F00_0000_1230])
def test_no_stream_is_waited_for(driver: FakeDriver, device: Device, stream: int | None) -> None:
    array = DeviceArray(device, (2,), "f4")
    before = driver.calls.copy()
    capsule = array.__dlpack__(stream=stream)
    assert driver.calls == before
    del capsule


@pytest.mark.parametrize("stream", [0, -2, 1.0, "1"])
def test_what_is_no_stream_is_refused(driver: FakeDriver, device: Device, stream: Any) -> None:
    array = DeviceArray(device, (2,), "f4")
    with pytest.raises(ValueError, match=rf"stream={stream!r} is no CUDA stream"):
        array.__dlpack__(stream=stream)
    array.close()
    assert arrays(driver) == 0


def test_other_devices_and_copies_are_refused(driver: FakeDriver, device: Device) -> None:
    array = DeviceArray(device, (2,), "f4", what="logits")
    for other in ((CPU, 0), (CUDA, 1)):
        with pytest.raises(BufferError, match=r"logits: .* lies on cuda:0, not on .*np\.asarray"):
            array.__dlpack__(dl_device=other)
    with pytest.raises(BufferError, match=r"logits: .* is shared, not copied"):
        array.__dlpack__(copy=True)
    Consumer(array.__dlpack__(dl_device=(CUDA, 0), copy=False)).close()
    array.close()
    assert arrays(driver) == 0


EXPORTS: list[Callable[[DeviceArray], object]] = [
    lambda array: array.__dlpack__(),
    lambda array: array.__cuda_array_interface__,
    np.asarray,
    lambda array: array.rows(0, 0),
]


@pytest.mark.parametrize("export", EXPORTS, ids=["dlpack", "interface", "asarray", "view"])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_what_has_been_closed_is_refused_by_name(
    device: Device, export: Callable[[DeviceArray], object], shape: tuple[int, ...]
) -> None:
    """So is a view of it, which still has an address."""
    array = DeviceArray(device, shape, "f4", what="cache k")
    view = array.rows(0, min(1, shape[0]))
    array.close()
    for closed in (array, view):
        with pytest.raises(ValueError, match=r"cache k: this array \[\d, 3\] .* has been closed"):
            export(closed)


# How long the memory lives


@both
@pytest.mark.parametrize("order", ["consumers first", "array first", "closed first", "between"])
def test_memory_lives_as_long_as_its_last_user(
    driver: FakeDriver, device: Device, order: str, version: tuple[int, int] | None
) -> None:
    array = DeviceArray(device, (4,), "f4")
    first, second = (Consumer(array.__dlpack__(max_version=version)) for _ in range(2))
    assert first.tensor.data == second.tensor.data

    def drop() -> None:
        nonlocal array
        del array

    def close() -> None:
        array.close()
        array.close()

    users: dict[str, list[Callable[[], None]]] = {
        "consumers first": [first.close, second.close, close],
        "array first": [drop, first.close, second.close],
        "closed first": [close, first.close, second.close],
        "between": [second.close, drop, first.close],
    }
    for user in users[order]:
        assert (arrays(driver), device.allocated) == (1, 16)
        user()
    assert (arrays(driver), device.allocated) == (0, 0)
    assert driver.calls["cuMemFree"] == 1


@both
def test_a_capsule_that_nobody_consumes_gives_the_memory_back(
    driver: FakeDriver, device: Device, version: tuple[int, int] | None
) -> None:
    capsule = DeviceArray(device, (4,), "f4").__dlpack__(max_version=version)
    assert arrays(driver) == 1
    del capsule
    assert arrays(driver) == 0


@both
def test_a_consumed_capsule_has_nothing_left_to_give(
    driver: FakeDriver, device: Device, version: tuple[int, int] | None
) -> None:
    capsule = DeviceArray(device, (4,), "f4").__dlpack__(max_version=version)
    consumer = Consumer(capsule)
    with pytest.raises(KeyError):  # by its name now
        Consumer(capsule)
    del capsule
    assert arrays(driver) == 1
    consumer.close()
    assert arrays(driver) == 0


def test_a_consumers_refusal_is_the_error_that_comes_out(
    driver: FakeDriver, device: Device
) -> None:
    """NumPy drops the capsule, unconsumed, while its own exception is set."""
    array = DeviceArray(device, (4,), "f4")
    with pytest.raises((BufferError, RuntimeError), match=r"(?i)unsupported device"):
        np.from_dlpack(array)  # type: ignore[arg-type]
    array.close()
    assert arrays(driver) == 0


def test_numpy_shares_memory_that_is_called_the_hosts(
    driver: FakeDriver, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the fake driver's is: a consumer in C, from its `from_dlpack` to its deleter."""
    monkeypatch.setattr(dlpack, "CUDA", CPU)
    array = DeviceArray(device, (3, 4), "f2").upload(np.arange(12).reshape(3, 4))
    shared = np.from_dlpack(array.rows(1, 3))  # type: ignore[arg-type]
    array.upload(np.asarray(array) + 1)
    array.close()
    assert shared.dtype == "f2" and np.array_equal(shared, [[5, 6, 7, 8], [9, 10, 11, 12]])
    del shared
    assert arrays(driver) == 0


@both
def test_a_consumer_keeps_the_owner_of_a_view(
    driver: FakeDriver, device: Device, version: tuple[int, int] | None
) -> None:
    array = DeviceArray(device, (4, 4), "f4")
    consumer = Consumer(array.rows(1, 3).view(4, (2,), "f4").__dlpack__(max_version=version))
    array.close()
    del array
    gc.collect()
    assert arrays(driver) == 1
    consumer.close()
    assert arrays(driver) == 0


def test_a_result_outlives_its_engine_and_ends_in_another_thread(
    driver: FakeDriver, load: Callable[..., Engine]
) -> None:
    with load() as engine:
        result = engine.prefill([1, 2])
        cache = engine.new_cache(8)
        consumers = [Consumer(array.__dlpack__()) for array in (result.logits, cache.k)]
        cache.close()
    del result, engine
    gc.collect()
    assert driver.held() == {"arrays": 2, "contexts": 1}
    for consumer in consumers:
        thread = threading.Thread(target=consumer.close)
        thread.start()
        thread.join()
    assert driver.held() == {}


def test_an_array_closed_while_it_is_exported_is_exported_whole(
    driver: FakeDriver, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, as soon as that cannot take the memory away any more."""
    lend = DeviceArray._lend

    def lend_and_close(array: DeviceArray) -> object:
        lease = lend(array)
        array.close()
        return lease

    monkeypatch.setattr(DeviceArray, "_lend", lend_and_close)
    array = DeviceArray(device, (4,), "f4")
    address = array.ptr
    consumer = Consumer(array.__dlpack__())
    assert consumer.tensor.data == address in driver.live["arrays"]
    consumer.close()
    assert arrays(driver) == 0


LATE = """
import ctypes
from dlpack_consumer import Consumer
from fake_driver import FakeDriver
from pyruntime.driver import api
from pyruntime.driver import dlpack
from pyruntime.driver.device import Device
from pyruntime.driver.memory import DeviceArray

fake = FakeDriver()
api._driver = fake
array = DeviceArray(Device(0), (4,), "f4")
consumer, idle = Consumer(array.__dlpack__()), array.__dlpack__()
at_exit = ctypes.CDLL(None)["__cxa_atexit"]
at_exit.argtypes = [ctypes.c_void_p] * 3
assert at_exit(consumer.managed.deleter, consumer.address, None) == 0
print("armed")
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "__cxa_atexit"), reason="another C library")
def test_a_deleter_may_be_called_after_the_interpreter_has_ended() -> None:
    """As by the destructor of a static object of a C++ library."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{LATE}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "armed\n", "")
