"""As much of torch as bench/peers.py needs, without numbers: tensors have a shape and nothing else.

What it is asked to compute must fit in shape. A replayed graph moves the clock of a timed driver.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from timed_driver import TimedDriver

REPLAY_MS = 0.5


class Tensor:
    """Of a shape; `zero` where it is a difference."""

    def __init__(self, *shape: int, zero: bool = False) -> None:
        self.shape, self.zero = shape, zero

    def normal_(self, std: float = 1.0) -> Tensor:
        return self

    def float(self) -> Tensor:
        return self

    @property
    def T(self) -> Tensor:  # noqa: N802
        return Tensor(*self.shape[::-1])

    def transpose(self, a: int, b: int) -> Tensor:
        shape = list(self.shape)
        shape[a], shape[b] = shape[b], shape[a]
        return Tensor(*shape)

    def __getitem__(self, index: slice | None) -> Tensor:
        if index is None:
            return Tensor(1, *self.shape)
        return Tensor(len(range(self.shape[0])[index]), *self.shape[1:])

    def __sub__(self, other: Tensor) -> Tensor:
        assert self.shape == other.shape
        return Tensor(*self.shape, zero=True)

    def norm(self) -> float:
        return 0.0 if self.zero else 1.0


def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    assert a.shape[1] == b.shape[0] and out.shape == (a.shape[0], b.shape[1])


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
    assert is_causal and enable_gqa and k.shape == v.shape and len(q.shape) == 4
    assert q.shape[2:] == k.shape[2:] and q.shape[1] % k.shape[1] == 0
    return q


def install(monkeypatch: pytest.MonkeyPatch, driver: TimedDriver) -> None:
    """Puts it in torch's place for a test; modules that have imported it are imported anew."""

    def module(name: str, **members: Any) -> ModuleType:
        found = ModuleType(name)
        found.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, found)
        return found

    def replay(graph: Any) -> None:
        driver.now += REPLAY_MS

    def empty(*shape: int, dtype: str, device: str) -> Tensor:
        return Tensor(*shape)

    def as_tensor(array: Any, device: str) -> Tensor:
        return Tensor(*array.shape)

    functional = module("torch.nn.functional", scaled_dot_product_attention=attention)
    backends = module(
        "torch.nn.attention",
        SDPBackend=SimpleNamespace(CUDNN_ATTENTION="cudnn"),
        sdpa_kernel=lambda backend: nullcontext(),
    )
    module(
        "torch",
        __version__="0",
        version=SimpleNamespace(cuda="13.0"),
        backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 9)),
        nn=module("torch.nn", functional=functional, attention=backends),
        cuda=SimpleNamespace(
            Stream=lambda: SimpleNamespace(cuda_stream=0),
            set_stream=lambda stream: None,
            empty_cache=lambda: None,
            CUDAGraph=type("CUDAGraph", (), {"replay": replay}),
            graph=lambda graph, stream, capture_error_mode: nullcontext(),
        ),
        Tensor=Tensor,
        float16="float16",
        mm=mm,
        empty=empty,
        as_tensor=as_tensor,
    )
    for name in ("stopwatch", "contestants", "peers_contest"):
        monkeypatch.delitem(sys.modules, name, raising=False)
