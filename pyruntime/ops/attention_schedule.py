"""How attention over live sequences is divided among the blocks of a kernel."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.tensormap import tensor_map
from pyruntime.ops.attention_choice import WARPGROUP_ROWS, Choice, serves

UNLIMITED = 1 << 30  # a window that is none; positions less it stay in 32 bits
_PART_BYTES = 64  # sizeof(attention::Part)
_MAP_BYTES = 128
_BOXES = 2  # heights of box that kernels for one head dim have at most
# Parts, in warpgroups, that keys may be split into, and blocks that a device works with, at most:
# the sizes of a workspace do not depend on the device.
_SUMS, _WORKERS = 792, 1024

Layout = dict[str, tuple[tuple[int, ...], str]]


class Workspace:
    """Device memory that schedules and scheduled kernels share; one forward pass at a time.

    Args:
        max_rows, max_sequences: of a forward pass.
        schedules: in one, for different windows.
    """

    def __init__(
        self,
        library: Library,
        *,
        head_dim: int,
        heads: int,
        max_rows: int,
        max_sequences: int,
        schedules: int = 1,
    ) -> None:
        self.head_dim, self.heads, self.schedules = head_dim, heads, schedules
        self.max_rows, self.max_sequences = max_rows, max_sequences
        layout = workspace_layout(head_dim, heads, max_rows, max_sequences, schedules)
        self.arrays: dict[str, DeviceArray] = {}
        try:
            for name, (shape, dtype) in layout.items():
                what = f"attention workspace, {name}"
                self.arrays[name] = DeviceArray(library.device, shape, dtype, what=what)
            for name in ("counters", "arrived"):
                self.arrays[name].fill(0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        for array in self.arrays.values():
            array.close()


def workspace_layout(
    head_dim: int, heads: int, max_rows: int, max_sequences: int, schedules: int = 1
) -> Layout:
    """Shape and dtype of each array of a `Workspace`."""
    # However many heads are packed, more than half of a warpgroup's rows are in use.
    tiles = heads * (-(-2 * max_rows // WARPGROUP_ROWS) + max_sequences)
    return {
        "parts": ((schedules, tiles + _SUMS + _WORKERS, _PART_BYTES), "uint8"),
        "counters": ((2,), "int32"),
        "partial": ((_SUMS, head_dim // 2, 128), "float32"),
        "partial_rows": ((_SUMS, 128, 4), "float32"),
        "arrived": ((_SUMS,), "uint32"),
    }


class Schedule:
    """The division of one kind of attention layers: their kernel, and a list made once per pass.

    Args:
        choice: see `ops.attention_choice.choose`.
        live, sequences: `Live` and `Sequence` of cuda/core/live.cuh.
        max_rows: the most rows that any one sequence will have when this runs.
        max_sequences: the most sequences that `live` will hold.
        window: keys that a row sees, itself included; all before it by default.
        workspace: for scheduled kernels.
        place: among the schedules of the workspace.

    Raises:
        ValueError: a number out of range, or no workspace for a scheduled kernel.
    """

    def __init__(
        self,
        library: Library,
        choice: Choice,
        *,
        live: DeviceArray,
        sequences: DeviceArray,
        heads: int,
        kv_heads: int,
        max_rows: int,
        max_sequences: int,
        window: int | None = None,
        workspace: Workspace | None = None,
        place: int = 0,
    ) -> None:
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"attention: {heads} heads on {kv_heads} K/V heads")
        if window is not None and window < 1:
            raise ValueError(f"attention: a window of {window} keys")
        if choice.pack != 1 and choice.pack != heads // kv_heads:
            raise ValueError(f"attention: {choice.pack} heads in a tile of {heads}/{kv_heads}")
        if window is not None and not serves(
            choice.kernel.spec, windowed=True, capped=bool(choice.kernel.spec.tile.get("cap", 0))
        ):
            raise ValueError(f"attention: {choice.kernel.name} knows no window")
        if choice.scheduled:
            _check(library, choice, workspace, heads, max_rows, max_sequences, place)
        self.choice = choice
        self.live, self.sequences = live, sequences
        self.heads, self.kv_heads = heads, kv_heads
        self.max_rows, self.max_sequences = max_rows, max_sequences
        self.window = UNLIMITED if window is None else min(window, UNLIMITED)
        self._library = library
        self._arrays: dict[str, DeviceArray] = {}
        if workspace is not None:
            parts = workspace.arrays["parts"].rows(place, place + 1)
            self._arrays = workspace.arrays | {"parts": parts}

    def record(self, program: Program) -> None:
        """Records the making of the list, once per forward pass and before its first attention."""
        if not self.choice.scheduled:
            return
        (kernel,) = self._library.family("schedule")
        choice, arrays = self.choice, self._arrays
        columns, workers = self.heads // choice.pack, self.workers
        # With this many tiles each worker has several of the longest: nothing to gain.
        busy = -(-self.max_rows // choice.tokens) * columns >= 4 * workers
        splits = choice.splits and not busy
        program.add(
            kernel,
            grid=1,
            live=self.live,
            sequences=self.sequences,
            parts=arrays["parts"],
            max_split=_SUMS // choice.warpgroups if splits else 0,
            rows=choice.tokens,
            keys=int(choice.kernel.spec.tile["tkv"]),
            window=self.window,
            columns=columns,
            kv_heads=self.kv_heads,
            key_bytes=2 * 2 * int(choice.kernel.spec.tile["hd"]),
            workers=workers,
        )

    @property
    def workers(self) -> int:
        """Blocks of a scheduled kernel."""
        return self.choice.workers(self._library.device.sm_count)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """Those that every launch of a scheduled kernel takes from here."""
        names = ("parts", "counters", "partial", "partial_rows", "arrived")
        tile = self.choice.kernel.spec.tile
        return {name: self._arrays[name] for name in names} | {
            "box": map_boxes(self._library, int(tile["hd"])).index(int(tile["tkv"])),
            "pack": self.choice.pack,
            "inverse": -(-(1 << 16) // self.choice.pack),
            "window": self.window,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
        }


def _check(
    library: Library,
    choice: Choice,
    workspace: Workspace | None,
    heads: int,
    max_rows: int,
    max_sequences: int,
    place: int,
) -> None:
    """Refuses what the lists or the sums of a scheduled kernel have no room for."""
    if workspace is None:
        raise ValueError(f"attention: {choice.kernel.name} needs a workspace")
    w, head_dim = workspace, choice.kernel.spec.tile["hd"]
    if (head_dim, heads) != (w.head_dim, w.heads):
        raise ValueError(
            f"attention: {heads} heads of {head_dim} dims in a workspace for {w.heads} of "
            f"{w.head_dim}"
        )
    if max_rows > w.max_rows or max_sequences > w.max_sequences or not 0 <= place < w.schedules:
        raise ValueError(
            f"attention: {max_rows} rows, {max_sequences} sequences, place {place} in a workspace "
            f"for {w.max_rows}, {w.max_sequences}, {w.schedules} schedules"
        )
    (maker,) = library.family("schedule")
    if not 1 <= max_sequences <= (most := int(maker.spec.tile["sequences"])):
        raise ValueError(f"attention: {max_sequences} sequences; a schedule holds 1 to {most}")
    if (workers := choice.workers(library.device.sm_count)) > _WORKERS:
        raise ValueError(f"attention: {workers} blocks at work; a workspace is for {_WORKERS}")


def map_boxes(library: Library, head_dim: int) -> list[int]:
    """Keys of the boxes that scheduled kernels copy, ascending."""
    choices = [Choice(k) for k in library.family("attention")]
    tiles = [c.kernel.spec.tile for c in choices if c.scheduled]
    return sorted({int(t["tkv"]) for t in tiles if t["hd"] == head_dim})


MAPS_LAYOUT = ((2 * _BOXES * _MAP_BYTES,), "uint8")  # `Sequence::maps` of one cache


def key_maps(library: Library, k: DeviceArray, v: DeviceArray, first: int = 0) -> NDArray[np.uint8]:
    """The maps of a cache from position `first` on, as MAPS_LAYOUT; zeros where no kernel needs
    them.

    Args:
        k, v: float16 [..., capacity, head dim].
    """
    *outer, capacity, head_dim = k.shape
    shape = (math.prod(outer), capacity, head_dim)
    columns = min(head_dim, WARPGROUP_ROWS)
    boxes = map_boxes(library, head_dim)
    maps = [tensor_map(x, (1, box, columns), shape, first=first) for box in boxes for x in (k, v)]
    return np.frombuffer(b"".join(maps).ljust(MAPS_LAYOUT[0][0], b"\0"), np.uint8)
