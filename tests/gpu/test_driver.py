"""The driver layer and the engine on a GPU as a guest in a larger process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from typing import Any

import numpy as np
import pytest
from goldens import model_path

from pyruntime import Engine
from pyruntime.driver.device import Device
from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Launch, Program
from pyruntime.errors import CubinError, CudaError, OutOfMemoryError

PATH = model_path("tiny-llama-q4_k_m")


def load(**options: Any) -> Engine:
    return Engine.load(PATH, device="cuda:0", max_tokens=256, **options)


def run_alone(code: str) -> str:
    """A script in a process of its own (it may lose its context); returns what it printed."""
    script = f"PATH = {str(PATH)!r}\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_in_the_same_process_keeps_its_context() -> None:
    torch = pytest.importorskip("torch")
    before = torch.arange(1000, device="cuda").float()
    with load() as engine:
        result = engine.prefill([1, 2, 3])
        here = torch.as_tensor(result.logits, device="cuda")
        assert here.data_ptr() == result.logits.ptr
        assert np.array_equal(here.cpu().numpy(), np.asarray(result.logits))
        assert float((before * 2).sum()) == 999000.0
    assert float((before * 3).sum()) == 1498500.0


def test_closing_gives_all_memory_back() -> None:
    device = Device(0)
    load().close()  # what the driver keeps for modules and the context comes with the first
    free = device.memory()[0]
    for _ in range(20):
        with load() as engine:
            engine.prefill([1, 2, 3])
    assert abs(device.memory()[0] - free) < 2 << 20
    device.close()


def test_results_outlive_their_engine() -> None:
    with load() as engine:
        result = engine.prefill([1, 2, 3])
        expected = np.asarray(result.logits)
    assert np.array_equal(np.asarray(result.logits), expected)


def test_logits_in_memory_of_earlier_ones_are_whole() -> None:
    with load() as engine:
        prompts = ([1, 2, 3], [4] * 40, [5])
        kept = [engine.prefill(ids).logits for ids in prompts]
        expected = [np.asarray(logits) for logits in kept]
        addresses = set()
        for _ in range(3):
            for ids, logits in zip(prompts, expected, strict=True):
                result = engine.prefill(ids)
                assert np.array_equal(np.asarray(result.logits), logits)
                addresses.add(result.logits.ptr)
        assert len(addresses) == 2 and not addresses & {logits.ptr for logits in kept}


def test_a_cache_of_another_engine_is_refused() -> None:
    with load() as engine, load() as other, pytest.raises(ValueError, match="another model"):
        engine.prefill([1], cache=other.new_cache(4))


@pytest.mark.parametrize("weights", ["fp16", "per-layer", "int8"])
@pytest.mark.parametrize("kv_dtype", ["f16", "e4m3"])
def test_plan_is_what_load_allocates(kv_dtype: str, weights: str) -> None:
    device = Device(0)
    load().close()
    free = device.memory()[0]
    library = Library(device)  # an engine has one: its machine code is in no plan
    code = free - device.memory()[0]
    library.close()
    options: dict[str, Any] = {"kv_tokens": 8192, "kv_dtype": kv_dtype, "weights": weights}
    with load(**options) as engine:
        cache = engine.new_cache(8192)
        used = free - device.memory()[0]
        planned = Engine.plan(PATH, max_tokens=256, **options)
        held = engine.model.device.allocated
        cache.close()
    assert held == planned.total - planned.nbytes["logits"]
    # The driver hands out memory in pieces of 2 MiB; small arrays share them.
    assert abs(used - code - held) <= 8 << 20
    device.close()


def test_a_failed_launch_names_kernel_grid_and_bytes(gpu: Any) -> None:
    kernel, *_ = gpu.library.family("norm")
    params = dict.fromkeys((p.name for p in kernel.spec.params), 0)
    launch = Launch(kernel, (3, 1, 1), {**params, "eps": 0.0}, "norm")
    launch.config.blockDimX = 4096  # more threads than a block can have
    with pytest.raises(
        CudaError, match=rf"cuLaunchKernelEx.*{kernel.name}, grid \(3, 1, 1\).* B shared"
    ):
        gpu.run(Program([launch]))


def test_a_row_beyond_the_device_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(0)
    monkeypatch.setattr(Device, "smem_per_block", 40_000)
    library = Library(device)
    name = next(iter(library.refused))
    with pytest.raises(CubinError, match=rf"{name} asks for [\d,]+ B of dynamic.*allows 40,000 B"):
        library[name]
    library.close()
    device.close()


def test_too_little_memory_is_said_with_numbers() -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"[\d,]+ bytes of device memory are needed .weights"
    ):
        load(memory_budget=100_000)
    with load() as engine:
        device = engine._model.device
        with pytest.raises(OutOfMemoryError, match=r"huge: [\d,]+ bytes asked for, [\d,]+ of"):
            DeviceArray(device, (1 << 50,), np.uint8, what="huge")
        assert np.isfinite(np.asarray(engine.prefill([1, 2]).logits)).all()


def test_threads_are_served_one_after_the_other() -> None:
    with load() as engine:
        prompts = [np.arange(1, n) % 259 for n in (3, 17, 64, 100)]
        expected = [np.asarray(engine.prefill(p, logits="all").logits) for p in prompts]
        caches = [engine.new_cache(128) for _ in prompts]
        wrong: list[int] = []

        def work(i: int) -> None:
            for _ in range(20):
                caches[i].length = 0
                logits = np.asarray(
                    engine.prefill(prompts[i], cache=caches[i], logits="all").logits
                )
                if not np.array_equal(logits, expected[i]):
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_after_a_lost_context_all_work_is_refused() -> None:
    printed = run_alone("""
        from pyruntime import Engine
        from pyruntime.errors import CudaError, EngineError
        engine = Engine.load(PATH, device="cuda:0", max_tokens=64)
        engine._model._decoder.activations["x"].ptr = 64  # an address that is not ours
        for _ in range(2):
            try:
                engine.prefill([1, 2, 3])
            except (CudaError, EngineError) as error:
                print(type(error).__name__, error)
        engine.close()
    """)
    first, second = printed.splitlines()
    assert first.startswith("CudaError") and "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in first
    assert second.startswith("EngineError") and "CUDA_ERROR_ILLEGAL_ADDRESS" in second


def test_a_forked_child_is_refused() -> None:
    printed = run_alone("""
        import os
        from pyruntime import Engine
        from pyruntime.errors import EngineError
        engine = Engine.load(PATH, device="cuda:0", max_tokens=64)
        child = os.fork()
        if child == 0:
            try:
                engine.prefill([1])
            except EngineError as error:
                print("child:", error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        engine.prefill([1])
        print("parent works")
    """)
    assert "child: this engine belongs to the parent process" in printed
    assert "parent works" in printed
