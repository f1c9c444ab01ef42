"""Device arrays in torch and CuPy: they share the memory, and keep it where the protocol can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from goldens import model_path

from pyruntime import Engine

IDS = [1, 2, 3, 4, 5]
Share = Callable[[Any], Any]


def load(**options: Any) -> Engine:
    return Engine.load(
        model_path("tiny-llama-q4_k_m"), device="cuda:0", max_tokens=64, kv_tokens=64, **options
    )


def address(shared: Any) -> int:
    """Of a tensor of torch or an array of CuPy."""
    return int(shared.__cuda_array_interface__["data"][0])


def by_dlpack(library: Any) -> Share:
    share: Share = library.from_dlpack
    return share


def by_interface(library: Any) -> Share:
    if library.__name__ == "cupy":
        asarray: Share = library.asarray
        return asarray
    return lambda array: library.as_tensor(array, device="cuda")


protocols = pytest.mark.parametrize("protocol", [by_dlpack, by_interface])


@protocols
def test_torch_computes_with_a_result_on_a_stream_of_its_own(
    protocol: Callable[[Any], Share],
) -> None:
    torch = pytest.importorskip("torch")
    share = protocol(torch)
    with load() as engine, torch.cuda.stream(torch.cuda.Stream()):
        logits = engine.prefill(IDS, logits="all").logits
        expected = np.asarray(logits)
        shared, last = share(logits), share(logits.rows(4, 5))
        assert (shared.dtype, tuple(shared.shape)) == (torch.float32, expected.shape)
        assert (address(shared), address(last)) == (logits.ptr, logits.ptr + 4 * last.numel() * 4)
        assert np.array_equal((shared * 2).cpu().numpy(), expected * 2)
        assert np.array_equal(last.cpu().numpy(), expected[4:])


@protocols
def test_cupy_computes_with_a_result_on_a_stream_of_its_own(
    protocol: Callable[[Any], Share],
) -> None:
    cupy = pytest.importorskip("cupy")
    share = protocol(cupy)
    with load() as engine, cupy.cuda.Stream(non_blocking=True):
        logits = engine.prefill(IDS, logits="all").logits
        expected = np.asarray(logits)
        shared = share(logits)
        assert (shared.dtype, shared.shape) == (np.float32, expected.shape)
        assert address(shared) == logits.ptr
        assert np.array_equal((shared * 2).get(), expected * 2)


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_a_consumer_keeps_a_result_that_all_others_have_left(name: str) -> None:
    library = pytest.importorskip(name)
    with load() as engine:
        result = engine.prefill(IDS)
        logits, expected = result.logits, np.asarray(result.logits)
        shared = library.from_dlpack(logits)
        logits.close()
    assert logits.device.allocated == logits.nbytes
    doubled = shared * 2
    found = doubled.get() if name == "cupy" else doubled.cpu().numpy()
    assert np.array_equal(found, expected * 2)
    del shared
    assert logits.device.allocated == 0


@pytest.mark.parametrize("kv_dtype", ["f16", "e4m3"])
def test_torch_shares_the_arrays_of_a_cache(kv_dtype: str) -> None:
    """Codes of e4m3 are uint8 there, too."""
    torch = pytest.importorskip("torch")
    with load(kv_dtype=kv_dtype) as engine:
        cache = engine.new_cache(8)
        arrays = [a for a in (cache.k, cache.v, cache.k_scale, cache.v_scale) if a is not None]
        for array in arrays:
            array.fill(0)
        engine.prefill(IDS, cache=cache)
        for array in arrays:
            shared = torch.from_dlpack(array)
            assert address(shared) == array.ptr
            assert str(shared.dtype) == f"torch.{array.dtype}"
            assert shared.any() and np.array_equal(shared.cpu().numpy(), np.asarray(array))
            del shared
        cache.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int32"])
def test_torch_writes_what_we_read(gpu: Any, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    array = gpu.upload(np.arange(12).reshape(3, 4).astype(dtype))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.from_dlpack(array.rows(1, 2)).add_(100)
    stream.synchronize()
    assert np.array_equal(np.asarray(array), [[0, 1, 2, 3], [104, 105, 106, 107], [8, 9, 10, 11]])
    nothing = torch.from_dlpack(array.rows(3, 3))
    assert tuple(nothing.shape) == (0, 4) and nothing.is_cuda
