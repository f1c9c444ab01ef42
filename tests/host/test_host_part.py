"""What the host does for a pass that is replayed: calls of the driver, and functions of ours.

After a rest all of it is cold, and the GPU waits for what comes before the graph is launched. So
these are counts that nothing should add to unseen, not times.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver
from goldens import GOLDEN

import pyruntime
from pyruntime import Engine
from pyruntime.model.live import RESULT_BYTES

PACKAGE = str(Path(pyruntime.__file__).parent)
DRIVER = [
    "cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent", "cuGraphLaunch", "cuStreamSynchronize",
    "cuEventElapsedTime", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode",
]  # fmt: skip
MOVE = "cuGraphExecKernelNodeSetParams"  # where the logits of the call before are held
# Of weights "per-layer", whose output matrix comes in blocks, over two streams.
ENDS = DRIVER[:3], ["cuMemcpyDtoHAsync", "cuEventRecord", *DRIVER[3:]]
BEFORE = {"fp16": 27, "per-layer": 54}  # functions until the (first) graph is launched
WHOLE = 42  # and of the call, where it is the only graph
MOVED = 6, 9  # what there is more of either
STEP = 44  # functions of a step of `generate`

Load = Callable[..., Engine]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("given", ["array", "list", "cache"])
@pytest.mark.parametrize("weights", ["fp16", "per-layer"])
def test_a_replayed_prefill(
    driver: FakeDriver, load: Load, weights: str, given: str, held: bool
) -> None:
    engine = load(weights=weights)
    ids: Any = [1, 2, 3] if given == "list" else np.array([1, 2, 3])
    cache = engine.new_cache(8) if given == "cache" else None
    order: list[str] = []
    functions: list[str] = []
    before: list[int] = []

    def called(name: str, arguments: tuple[Any, ...]) -> None:
        order.append(name)
        if name == "cuGraphLaunch":
            before.append(len(functions))

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            functions.append(frame.f_code.co_name)

    result = None
    for replayed in (False, False, False, True):
        if not held:
            result = None
        if cache is not None:
            cache.truncate(0)
        if replayed:
            driver.hook = called
            sys.setprofile(count)
        try:
            result = engine.prefill(ids, cache=cache)
        finally:
            sys.setprofile(None)
            driver.hook = lambda name, arguments: None
    assert result is not None and result.tokens == 3
    if weights == "fp16":
        assert order == ([*DRIVER[:2], MOVE, *DRIVER[2:]] if held else DRIVER)
    else:
        first, last = ENDS
        assert order[: len(first)] == first and order[-len(last) :] == last
    more = MOVED if held else (0, 0)
    assert before[0] <= BEFORE[weights] + more[0], Counter(functions[: before[0]])
    if weights == "fp16":
        assert len(functions) <= WHOLE + more[1], Counter(functions)


@pytest.mark.parametrize(
    ("stem", "weights"),
    [("qwen2-q4_k_m", "fp16"), ("qwen2-q4_k_m", "int8"), ("gemma2-q8_0", "fp16")],
)
def test_a_step_of_generate(
    driver: FakeDriver, load: Load, monkeypatch: pytest.MonkeyPatch, stem: str, weights: str
) -> None:
    """It takes the same calls, of which none brings logits, however many tokens there are."""
    monkeypatch.setattr(Engine, "_stop_ids", frozenset())
    engine = load(model=GOLDEN / f"tiny-{stem}.gguf", weights=weights)
    engine.generate([1, 2], 4)
    order: list[str] = []
    functions: list[str] = []
    replayed: list[tuple[int, int]] = []

    def called(name: str, arguments: tuple[Any, ...]) -> None:
        order.append(name)
        if name == "cuGraphLaunch":
            replayed.append((len(order), len(functions)))

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            functions.append(frame.f_code.co_name)

    driver.hook = called
    sys.setprofile(count)
    try:
        engine.generate([1, 2], 5)
    finally:
        sys.setprofile(None)
        driver.hook = lambda name, arguments: None
    assert len(replayed) == 5
    for (first, made), (last, ended) in pairwise(replayed):
        assert order[first:last] == [*DRIVER[3:], *DRIVER[:3]]
        assert ended - made <= STEP, Counter(functions[made:ended])
    for handle in driver.live["execs"]:
        copies = [given for name, given in driver.graphs[handle].calls if "DtoH" in name]
        assert [nbytes for _, _, nbytes, _ in copies] == [RESULT_BYTES]
