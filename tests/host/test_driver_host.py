"""The driver layer's own logic, without a driver."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import re
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compilers import cuda_includes
from fake_driver import GLOBAL, RELAXED, THREAD_LOCAL, FakeDriver

from pyruntime.cubin.spec import KernelSpec, Param
from pyruntime.driver import api
from pyruntime.driver.device import Device, _Current
from pyruntime.driver.library import Kernel, Library, kept
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.errors import (
    ArchMismatchError,
    CubinError,
    CudaError,
    EngineError,
    OutOfMemoryError,
)
from pyruntime.ops.gemm import choice
from pyruntime.ops.qkv import rotating

INVALID_IMAGE = 200  # CUresult

SPEC = KernelSpec(
    name="demo_x",
    threads=128,
    min_blocks=1,
    smem_bytes=1024,
    param_bytes=192,
    tile={},
    params=(Param("map", "T", 0), Param("p", "P", 128), Param("n", "i", 136), Param("s", "f", 140)),
    planes=(),
)
KERNEL = Kernel(SPEC, object(), 32)


class Status(int):
    name = "CUDA_ERROR_INVALID_VALUE"


class Pointer:
    ptr = 0x7F0000000000


def test_parameters_are_packed_at_their_offsets() -> None:
    block = KERNEL.pack({"map": bytes(range(128)), "p": Pointer(), "n": -5, "s": 0.5})
    assert ctypes.addressof(block) % 64 == 0 and len(block) == SPEC.param_bytes
    raw = bytes(block)
    assert raw[:128] == bytes(range(128))
    assert struct.unpack_from("<Qif", raw, 128) == (Pointer.ptr, -5, 0.5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n": None}, "parameter n"),
        ({"n": 2**31}, "parameter n"),
        ({"s": "1"}, "parameter s"),
        ({"p": -1}, "parameter p"),
        ({"extra": 1}, "unknown .'extra'"),
    ],
)
def test_a_wrong_parameter_is_named(change: dict[str, object], text: str) -> None:
    params = {"map": b"", "p": 0, "n": 1, "s": 1.0, **change}
    with pytest.raises(TypeError, match=text):
        KERNEL.pack(params)


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(TypeError, match=r"missing \['map', 'n', 's'\]"):
        KERNEL.pack({"p": 0})


@pytest.mark.parametrize("grid", [0, (1, 65536), (1, 1, 65536), 2**31, (1, 0)])
def test_a_grid_out_of_range_is_refused(grid: int | tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="demo_x: grid"):
        Program().add(KERNEL, grid=grid, map=b"", p=0, n=1, s=1.0)  # type: ignore[arg-type]


def test_a_program_counts_the_launches_of_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [0]

    def launch(*_: object) -> tuple[Status]:
        return (Status(answers[0]),)

    driver = SimpleNamespace(
        cuLaunchKernelEx=launch, CUlaunchConfig=SimpleNamespace, CUlaunchAttributeID=None
    )
    monkeypatch.setattr(api, "_driver", driver)
    kernels = [Kernel(SPEC, object(), 32) for _ in range(2)]
    program = Program()
    for kernel in (kernels[0], kernels[1], kernels[0]):
        program.add(kernel, grid=1, map=b"", p=0, n=1, s=1.0)
    for _ in range(3):
        program.run(SimpleNamespace(handle=0))  # type: ignore[arg-type]
    answers[0] = 1
    with pytest.raises(CudaError, match="demo_x"):
        program.run(SimpleNamespace(handle=0))  # type: ignore[arg-type]
    assert [kernel.launches for kernel in kernels] == [6, 3]


def test_what_loses_a_context_is_what_the_header_says() -> None:
    """And uncorrectable errors, a context that was destroyed, and an unknown error."""
    folders = [Path(option.removeprefix("-I")) for option in cuda_includes()]
    header = next(path for folder in folders if (path := folder / "cuda.h").exists()).read_text()
    values = header.split("enum cudaError_enum")[1].split("CUresult;")[0]
    lost = {
        int(code)
        for said, code in re.findall(r"/\*\*(.*?)\*/\s*CUDA_\w+\s*=\s*(\d+)", values, re.DOTALL)
        if re.search(r"must[\s*]+be[\s*]+(terminated|destroyed)", said)
    }
    assert len(lost) > 10 and lost | {214, 220, 709, 999} == api.STICKY


def test_a_failure_names_call_code_and_what() -> None:
    error = api.failure("cuLaunchKernelEx", Status(1), "kernel x, grid (1, 1, 1)")
    assert str(error) == (
        "cuLaunchKernelEx failed: CUDA_ERROR_INVALID_VALUE (1); kernel x, grid (1, 1, 1)"
    )


Launched = list[tuple[str, int, int, list[Any]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Launches on a driver of the bindings' types alone: function, stream, arguments, attributes
    that count."""
    from cuda.bindings import driver

    calls: Launched = []

    class Driver:
        def __getattr__(self, name: str) -> Any:
            return getattr(driver, name)

        def cuLaunchKernelEx(  # noqa: N802
            self, config: Any, function: str, arguments: int, extra: int
        ) -> tuple[int]:
            shape = (config.blockDimX, config.blockDimY, config.blockDimZ, config.sharedMemBytes)
            assert shape == (SPEC.threads, 1, 1, SPEC.smem_bytes)
            attributes = config.attrs[: config.numAttrs]
            calls.append((function, int(config.hStream), arguments, attributes))
            return (0,)

    monkeypatch.setattr(api, "_driver", Driver())
    return calls


def row(function: str, **tile: int | str) -> Kernel:
    return Kernel(dataclasses.replace(SPEC, tile=tile), function, 32)


PARAMS: dict[str, Any] = {"map": b"", "p": 0, "n": 1, "s": 1.0}


def test_a_kernel_with_clusters_is_launched_with_its_attribute(launched: Launched) -> None:
    clustered = row("clustered", cluster=3)
    program = Program()
    program.add(row("plain"), grid=4, **PARAMS)
    program.add(clustered, grid=(6, 5), **PARAMS)
    with pytest.raises(ValueError, match=r"demo_x: grid \(4, 1, 1\) in clusters of 3"):
        program.add(clustered, grid=4, **PARAMS)
    for handle in (7, 9):
        program.run(Stream(None, handle))  # type: ignore[arg-type]
    functions = [(function, stream) for function, stream, *_ in launched]
    assert functions == [("plain", 7), ("clustered", 7), ("plain", 9), ("clustered", 9)]
    assert [arguments for _, _, arguments, _ in launched[2:]] == [
        launch.arguments for launch in program.launches
    ]
    config = program.launches[1].config
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (6, 5, 1)
    assert [len(attributes) for *_, attributes in launched] == [0, 1, 0, 1]
    (attribute,) = launched[-1][-1]
    assert attribute.id.name == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
    size = attribute.value.clusterDim
    assert (size.x, size.y, size.z) == (3, 1, 1)


def overlapping(launched: Launched) -> list[bool]:
    """Which launches may start before the one before has ended; forgets them."""
    name = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    found = []
    for *_, attributes in launched:
        dependent = [x.value for x in attributes if x.id.name == name]
        assert all(value.programmaticStreamSerializationAllowed == 1 for value in dependent)
        found.append(bool(dependent))
    launched.clear()
    return found


def test_dependent_kernels_overlap_from_the_second_launch_of_a_run_on(launched: Launched) -> None:
    program, after = Program(), Program()
    for kernel in (
        row("a", dependent=1), row("b", dependent=1, cluster=2), row("c"), row("d", dependent=1),
    ):  # fmt: skip
        program.add(kernel, grid=2, **PARAMS)
    after.add(row("e", dependent=1), grid=2, **PARAMS)
    stream: Any = Stream(None, 7)  # type: ignore[arg-type]
    for _ in range(2):
        program.run(stream)
        assert overlapping(launched) == [False, True, False, True]
    for overlap, attributes_of_each in ((True, [0, 2, 0, 1, 1]), (False, [0, 1, 0, 0, 0])):
        program.run(stream, overlap=overlap)
        after.enqueue(stream, overlap=overlap, follows=True)
        assert [function for function, *_ in launched] == list("abcde")
        assert [len(attributes) for *_, attributes in launched] == attributes_of_each
        assert overlapping(launched) == [False, overlap, False, overlap, overlap]
    after.run(stream)  # a run of its own
    assert overlapping(launched) == [False]
    assert [x.kernel.launches for x in (*program.launches, *after.launches)] == [4, 4, 4, 4, 1]


def test_a_launch_has_the_role_of_its_block_or_its_family() -> None:
    program = Program()
    params: dict[str, Any] = {"map": b"", "p": 0, "n": 1, "s": 1.0}
    program.add(KERNEL, grid=1, **params)
    with program.role("qkv"):
        program.add(KERNEL, grid=1, **params)
    program.add(KERNEL, grid=1, **params)
    assert [launch.role for launch in program.launches] == ["demo", "qkv", "demo"]


@pytest.mark.parametrize(
    ("write", "call"),
    [
        (lambda array: array.upload(np.ones(4)), "cuMemcpyHtoD"),
        (lambda array: array.fill(1), "cuMemsetD8"),
    ],
    ids=["upload", "fill"],
)
def test_what_is_written_is_there_before_any_stream_reads_it(
    driver: FakeDriver, write: Callable[[DeviceArray], object], call: str
) -> None:
    """Streams that do not block do not wait for the default stream, where both happen."""
    called: list[str] = []
    device = Device(0)
    array = DeviceArray(device, (4,), np.float32)
    driver.hook = lambda name, arguments: called.append(name)
    write(array)
    assert "cuStreamSynchronize" in called[called.index(call) :]
    array.close()
    device.close()
    assert driver.held() == {}


def test_a_context_is_pushed_where_another_one_is_current(driver: FakeDriver) -> None:
    """And the thread's capture mode is changed by the outermost block alone, which sets it back."""
    device = Device(0)
    first, second = _Current("first"), _Current("second")
    called: list[tuple[Any, ...]] = []
    driver.hook = lambda name, arguments: called.append((name, *arguments))
    mode = "cuThreadExchangeStreamCaptureMode"
    driver.cuThreadExchangeStreamCaptureMode(THREAD_LOCAL)  # as the caller may have
    with first, first, pytest.raises(KeyError), second, first, first:
        raise KeyError
    pushes = [("cuCtxPushCurrent", context) for context in ("first", "second", "first")]
    pops = [("cuCtxPopCurrent",)] * 3
    assert called[1:] == [(mode, RELAXED), *pushes, *pops, (mode, THREAD_LOCAL)]
    called.clear()
    with first:
        pass
    assert called == [(mode, RELAXED), pushes[0], pops[0], (mode, THREAD_LOCAL)]
    driver.cuThreadExchangeStreamCaptureMode(GLOBAL)
    device.close()


def test_a_device_counts_what_its_arrays_hold(driver: FakeDriver) -> None:
    """Views are part of their base; what could not be allocated was never held."""
    device = Device(0)
    first = DeviceArray(device, (3, 5), np.float32)
    second = DeviceArray(device, (7,), np.uint8)
    view = first.rows(0, 2)
    assert (device.allocated, device.peak) == (67, 67)
    view.close()
    first.close()
    first.close()
    with pytest.raises(OutOfMemoryError):
        DeviceArray(device, (driver.total,), np.uint8)
    assert (device.allocated, device.peak) == (7, 67)
    third = DeviceArray(device, (80,), np.uint8)
    assert (device.allocated, device.peak) == (87, 87)
    for array in (second, third):
        array.close()
    assert (device.allocated, device.peak) == (0, 87)
    device.close()


@pytest.mark.parametrize(("urgent", "priority"), [(False, 0), (True, -5)])
def test_an_urgent_stream_has_the_greatest_priority(
    driver: FakeDriver, urgent: bool, priority: int
) -> None:
    made: list[int] = []
    driver.hook = lambda name, arguments: (
        made.append(arguments[1]) if name == "cuStreamCreateWithPriority" else None
    )
    device = Device(0)
    Stream(device, urgent=urgent).close()
    device.close()
    assert made == [priority]


def test_columns_are_copied_to_rows_of_another_width(driver: FakeDriver) -> None:
    device = Device(0)
    dense = np.arange(12, dtype=np.float32).reshape(3, 4)
    source, target = DeviceArray(device, (3, 4), np.float32), DeviceArray(device, (3, 9), "f4")
    source.upload(dense)
    stream = Stream(device)
    with device.current():
        stream.copy_columns(target.ptr + 4 * 2, 4 * 9, source.ptr, 4 * 4, 3)
    expected = np.zeros((3, 9))
    expected[:, 2:6] = dense
    assert np.array_equal(target, expected)
    for thing in (source, target, stream, device):
        thing.close()


def test_sections_of_a_program_are_what_lies_between_cuts() -> None:
    program = Program()
    for cut_before in (False, True, False, True):
        if cut_before:
            program.cut()
        program.add(KERNEL, grid=1, **PARAMS)
    first, second, third = program.launches[:1], program.launches[1:3], program.launches[3:]
    assert [section.launches for section in program.sections] == [first, second, third]
    (whole,) = Program(program.launches).sections
    assert whole.launches == program.launches


def test_each_library_opts_its_kernels_in_to_what_they_ask_for(driver: FakeDriver) -> None:
    """A limit is of a function in a context, and 49,152 bytes with static ones are beyond the usual
    one, too: so all are raised, whatever they ask for, each time."""
    asked: dict[str, int] = {}
    driver.hook = lambda name, given: (
        asked.update({given[0]: given[2]}) if name == "cuFuncSetAttribute" else None
    )
    device = Device(0)
    for _ in range(2):
        asked.clear()
        library = Library(device)
        kernels = [kernel for found in library._families.values() for kernel in found]
        assert asked == {kernel.function: kernel.spec.smem_bytes for kernel in kernels}
        library.close()
    device.close()


def test_what_fits_a_block_is_read_of_the_device_as_an_int_of_31_bits(driver: FakeDriver) -> None:
    """Static bytes count, and one driver reports bit 32 besides."""
    device = Device(0)
    library = Library(device)
    most = max(k.spec.smem_bytes for found in library._families.values() for k in found)
    library.close()
    for static, fits in ((0, True), (1, False)):
        driver.attributes |= {
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": (1 << 32) + most, "SHARED_SIZE_BYTES": static,
        }  # fmt: skip
        other = Device(0)
        library = Library(other)
        assert other.smem_per_block == most and (not library.refused) == fits
        for name in library.refused:
            with pytest.raises(CubinError, match=f"{name} asks for .* 1 B of static .* {most:,} B"):
                library[name]
        library.close()
        other.close()
    device.close()


def test_cubins_that_do_not_fit_the_device_are_named(driver: FakeDriver) -> None:
    """Those of another architecture before the driver sees them."""
    driver.fail["cuModuleLoadData"] = (1, INVALID_IMAGE)
    device = Device(0)
    with pytest.raises(CudaError, match=r"INVALID_IMAGE \(200\); .*\.cubin on Made-up GPU$"):
        Library(device)
    device.close()
    driver.attributes |= {"COMPUTE_CAPABILITY_MAJOR": 7, "COMPUTE_CAPABILITY_MINOR": 5}
    old, loaded = Device(0), driver.calls["cuModuleLoadData"]
    with pytest.raises(ArchMismatchError, match=r"no cubin runs on Made-up GPU \(sm_75\): .*sm_"):
        Library(old)
    assert driver.calls["cuModuleLoadData"] == loaded
    old.close()
    assert driver.held() == {}


def test_what_a_library_was_asked_goes_with_it(driver: FakeDriver) -> None:
    device = Device(0)
    library = Library(device)
    row = choice(library, "f32", 64, 256, 512, False)
    assert choice(library, "f32", 64, 256, 512, False) is row
    rotating(library, 64, 256, 512, False)
    library.close()
    with pytest.raises(CubinError, match="no kernel of family gemm"):
        choice(library, "f32", 64, 256, 512, False)
    gone = weakref.ref(library)
    del library
    gc.collect()
    assert gone() is None
    device.close()


def test_answers_are_kept_and_not_without_end(driver: FakeDriver) -> None:
    device, asked = Device(0), list[int]()
    library, other = Library(device), Library(device)

    @kept
    def answer(library: Library, number: int) -> int | None:
        asked.append(number)
        return number or None

    for _ in range(2):
        assert [answer(library, n) for n in (0, 1)] == [None, 1]
    assert asked == [0, 1] and answer(other, 1) == 1 and asked == [0, 1, 1]
    for n in range(1000):
        answer(library, n)
    assert len(asked) == 1001 and len(library.answers[answer.__wrapped__]) <= 256
    for thing in (library, other, device):
        thing.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("before", [True, False])
def test_a_child_has_no_driver_that_its_parent_had(
    monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """One that was forked before the driver was initialised has its own."""
    driver = SimpleNamespace(cuInit=lambda flags: (0,))
    monkeypatch.setattr("cuda.bindings.driver", driver)
    monkeypatch.setattr(api, "_driver", None)
    if before:
        api.bindings()
    child = os.fork()
    if not child:
        try:
            os._exit(0 if api.bindings() is driver else 1)
        except EngineError as error:
            os._exit(2 if "forked child" in str(error) else 3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (2 if before else 0)
    assert api.bindings() is driver
