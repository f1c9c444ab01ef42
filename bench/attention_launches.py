"""Launches of our attention over one fresh prompt, for benchmarks that time nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.program import Program
from pyruntime.driver.stream import Stream
from pyruntime.model.batch import NONE
from pyruntime.model.batch import Prompt as Part
from pyruntime.model.live import LiveBlock
from pyruntime.ops.attention import attention
from pyruntime.ops.attention_choice import Choice
from pyruntime.ops.attention_schedule import MAPS_LAYOUT, Schedule, Workspace, key_maps


class Prompt:
    """A prompt in device memory; its programs may run while this is kept.

    Args:
        q, out: float16 [rows, heads * head dim].
        k, v: float16 [K/V heads, rows, head dim].
    """

    def __init__(
        self,
        library: Library,
        stream: Stream,
        *,
        q: DeviceArray,
        out: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
    ) -> None:
        self._library, self._stream, self._q, self._out = library, stream, q, out
        self._kv_heads, self._rows, self._head_dim = k.shape
        self._heads = q.shape[1] // self._head_dim
        maps = DeviceArray(library.device, *MAPS_LAYOUT).upload(key_maps(library, k, v))
        self._arrays = (k, v, maps)
        addresses = tuple(array.ptr for array in self._arrays)
        cache = SimpleNamespace(stride=self._rows, addresses=addresses)
        self._block, ids = LiveBlock(library.device, self._rows), np.zeros(self._rows, np.int32)
        self._block.fill([Part(ids, cache)], [0], NONE)
        with library.device.current():
            self._block.upload(stream)
        self._workspace = Workspace(
            library, head_dim=self._head_dim, heads=self._heads, max_rows=self._rows,
            max_sequences=1,
        )  # fmt: skip

    def program(self, choice: Choice, launches: int) -> Program:
        """So many launches one after the other, as layers are, with one list for all of them."""
        program = Program()
        schedule = Schedule(
            self._library, choice, live=self._block.live, sequences=self._block.sequences,
            heads=self._heads, kv_heads=self._kv_heads, max_rows=self._rows, max_sequences=1,
            workspace=self._workspace,
        )  # fmt: skip
        schedule.record(program)
        for _ in range(launches):
            attention(
                program, schedule, q=self._q, out=self._out, layer=0, scale=self._head_dim**-0.5
            )
        return program

    def run(self, program: Program) -> None:
        """Enqueues one of its programs; the device's context must be current."""
        program.run(self._stream)
