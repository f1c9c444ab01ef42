"""What attention and its schedules refuse and record, on a driver made of host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyruntime.driver.device import Device
from pyruntime.driver.library import Kernel, Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.errors import OutOfMemoryError
from pyruntime.ops.attention import attention
from pyruntime.ops.attention_choice import Choice, packings
from pyruntime.ops.attention_schedule import (
    MAPS_LAYOUT,
    Schedule,
    Workspace,
    key_maps,
    map_boxes,
    workspace_layout,
)


@pytest.fixture
def library(driver: Any) -> Iterator[Library]:
    device = Device(0)
    library = Library(device)
    yield library
    library.close()
    device.close()


def kernel(library: Library, **wanted: Any) -> Kernel:
    """The first in the table whose tile has all of this."""
    for found in library.family("attention"):
        if {"cap": 0, **wanted}.items() <= ({"cap": 0} | found.spec.tile).items():
            return found
    pytest.skip(f"no kernel of {wanted} in the cubins for {library.device.name}")


def schedule(library: Library, choice: Choice, **changes: Any) -> Schedule:
    live, sequences = (DeviceArray(library.device, (40,), np.uint8) for _ in range(2))
    numbers = {"heads": 4, "kv_heads": 2, "max_rows": 5, "max_sequences": 1}
    return Schedule(library, choice, live=live, sequences=sequences, **(numbers | changes))


def workspace(library: Library, rows: int = 5) -> Workspace:
    return Workspace(library, head_dim=64, heads=4, max_rows=rows, max_sequences=1)


def test_schedules_refuse(library: Library) -> None:
    fast, ladder = (Choice(kernel(library, variant=name, hd=64)) for name in ("fast", "r48"))
    for change, text in (
        ({"kv_heads": 3}, "4 heads on 3 K/V heads"),
        ({"kv_heads": 0}, "4 heads on 0 K/V heads"),
        ({"window": 0}, "a window of 0 keys"),
        ({"window": -5}, "a window of -5 keys"),
    ):
        with pytest.raises(ValueError, match=f"attention: {text}"):
            schedule(library, fast, **change)
    with pytest.raises(ValueError, match=f"{ladder.kernel.name} knows no window"):
        schedule(library, ladder, window=9)
    schedule(library, fast, window=1 << 40)
    schedule(library, ladder)


def test_schedules_refuse_what_their_workspace_is_too_small_for(library: Library) -> None:
    """What a kernel would write past its end."""
    choice = Choice(kernel(library, variant="wgmma", hd=64))
    room = workspace(library)
    for change, text in (
        ({"workspace": None}, "needs a workspace"),
        ({"heads": 8}, "8 heads of 64 dims in a workspace for 4 of 64"),
        ({"max_rows": 6}, "6 rows, 1 sequences, place 0 in a workspace for 5, 1, 1 schedules"),
        ({"max_sequences": 2}, "5 rows, 2 sequences"),
        ({"place": 1}, "place 1 "),
        ({"place": -1}, "place -1 "),
    ):
        with pytest.raises(ValueError, match=f"attention: .*{text}"):
            schedule(library, choice, **({"workspace": room} | change))
    with pytest.raises(ValueError, match="4 heads of 64 dims in a workspace for 4 of 128"):
        wide = Workspace(library, head_dim=128, heads=4, max_rows=5, max_sequences=1)
        schedule(library, choice, workspace=wide)
    many = Workspace(library, head_dim=64, heads=4, max_rows=5, max_sequences=5000)
    schedule(library, choice, workspace=many, max_sequences=4096)
    with pytest.raises(ValueError, match="4097 sequences; a schedule holds 1 to 4096"):
        schedule(library, choice, workspace=many, max_sequences=4097)
    schedule(library, choice, workspace=room)


def test_scheduled_kernels_refuse(library: Library) -> None:
    own = kernel(library, variant="wgmma", hd=64)
    with pytest.raises(ValueError, match="attention: 3 heads in a tile of 4/2"):
        schedule(library, Choice(own, 3), workspace=workspace(library))
    with pytest.raises(ValueError, match=f"{own.name} needs a workspace"):
        schedule(library, Choice(own))


def test_attention_refuses(library: Library) -> None:
    plain = Choice(kernel(library, variant="fast", hd=128))
    capped = Choice(kernel(library, variant="fast", hd=128, cap=1))

    def refused(text: str, shape: tuple[int, ...] = (5, 512), **changes: Any) -> None:
        q = DeviceArray(library.device, shape, changes.pop("dtype", np.float16))
        arguments = {"choice": plain, "out": q, "layer": 0, "scale": 1.0} | changes
        kind = schedule(library, arguments.pop("choice"))
        with pytest.raises(ValueError, match=f"attention: {text}"):
            attention(Program(), kind, q=q, **arguments)

    refused("q float32", dtype=np.float32)
    other = DeviceArray(library.device, (6, 512), np.float16)
    refused(r"q float16 \(5, 512\), out float16 \(6, 512\)", out=other)
    refused(r"q \(5, 320\) for 4 heads of 128 dims", (5, 320))
    refused(r"q \(5, 4, 128\) for 4 heads", (5, 4, 128))
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        refused(f"scale {scale} is not a positive", scale=scale)
    for softcap in (0.0, -1.0, float("nan"), float("inf")):
        refused(f"soft-cap {softcap} is not a positive", choice=capped, softcap=softcap)
    refused(f"soft-cap 50.0 with kernel {plain.kernel.name}", softcap=50.0)
    refused(f"soft-cap None with kernel {capped.kernel.name}", choice=capped)


def test_only_scheduled_kernels_are_given_a_list(library: Library) -> None:
    own = kernel(library, variant="wgmma", hd=64)
    for choice in (Choice(kernel(library, variant="fast", hd=64)), *packings(own, 4, 2)):
        program, space = Program(), workspace(library)
        kind = schedule(library, choice, workspace=space)
        kind.record(program)
        q = DeviceArray(library.device, (5, 256), np.float16)
        for layer in (0, 1):
            attention(program, kind, q=q, out=q, layer=layer, scale=1.0)
        families = [launch.kernel.spec.family for launch in program.launches]
        assert families == ["schedule"] * choice.scheduled + ["attention"] * 2
        space.close()


def test_every_list_fits_its_workspace(library: Library) -> None:
    """Parts of all tiles and an end for every block, in any packing."""
    for head_dim, heads, kv_heads in ((64, 9, 3), (64, 64, 1), (64, 33, 1), (128, 28, 4)):
        for found in library.family("attention"):
            if found.spec.tile["hd"] != head_dim:
                continue
            for choice in filter(lambda c: c.scheduled, packings(found, heads, kv_heads)):
                for rows, sequences in ((1, 1), (64, 1), (65, 3), (1000, 64), (10000, 1)):
                    layout = workspace_layout(head_dim, heads, rows, sequences)
                    # The most tiles: all sequences but one have one row, or nothing.
                    tiles = sequences - 1 + -(-(rows - sequences + 1) // choice.tokens)
                    parts = tiles * heads // choice.pack + choice.workers(library.device.sm_count)
                    assert parts <= layout["parts"][0][1], (choice, rows, sequences)


def test_maps_hold_a_pair_for_each_box(library: Library) -> None:
    for head_dim in (64, 96, 128, 256):
        boxes = map_boxes(library, head_dim)
        assert boxes == sorted(set(boxes)) and 2 * 128 * len(boxes) <= MAPS_LAYOUT[0][0]
        k, v = (DeviceArray(library.device, (3, 2, 9, head_dim), np.float16) for _ in "kv")
        maps = key_maps(library, k, v)
        assert (maps.shape, maps.dtype) == MAPS_LAYOUT


def test_a_workspace_without_room_leaves_nothing(library: Library, driver: Any) -> None:
    before = driver.held()
    driver.fail["cuMemAlloc"] = (3, 2)
    with pytest.raises(OutOfMemoryError, match="attention workspace, partial_rows"):
        workspace(library)
    assert driver.held() == before


def test_launches_for_benchmarks_are_of_one_prompt(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from attention_launches import Prompt

    def halves(*shape: int) -> DeviceArray:
        return DeviceArray(library.device, shape, np.float16)

    q, out, k, v = halves(20, 256), halves(20, 256), halves(2, 20, 64), halves(2, 20, 64)
    stream = Stream(library.device)
    prompt = Prompt(library, stream, q=q, out=out, k=k, v=v)
    assert np.asarray(prompt._block.live)[:2].tolist() == [20, 1]
    program = prompt.program(Choice(kernel(library, variant="fast", hd=64)), 3)
    with library.device.current():
        prompt.run(program)
    assert len(program.launches) == 3
    stream.close()
