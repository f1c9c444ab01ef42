"""A recorded list of launches: parameters are encoded once, running it only calls the driver.

Where kernels can (cuda/core/spec.cuh), a launch may start before the one before it has ended
(programmatic dependent launch, CUDA programming guide, "Programmatic Dependent Launch and
Synchronization"): its launch latency and prologue then run under the other's tail. This holds
between two kernels that follow each other in the stream. The first launch of a run, and whatever
the stream holds after its last (a copy, an event), waits for all before it.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

from pyruntime.driver import api
from pyruntime.driver.library import Kernel
from pyruntime.driver.memory import DeviceArray
from pyruntime.driver.stream import Stream


class Launch:
    """One kernel launch with everything encoded but the stream. `role`: what it is for."""

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int, int], params: dict[str, Any], role: str
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.role = role
        self.stream: Any = None  # the handle that the configs hold
        self._owned = dict(params)  # arrays that the encoded addresses point into
        self._block = kernel.pack(params)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._block))
        self.arguments = ctypes.addressof(self._pointers)
        self.function = kernel.function

    @cached_property
    def config(self) -> Any:
        """Of a launch that waits for all before it; see `Kernel.config`."""
        return self.kernel.config(self.grid)

    @cached_property
    def overlapping(self) -> Any:
        """Of a launch that may overlap with the one before it; see `Kernel.config`."""
        return self.kernel.config(self.grid, overlapping=True)

    def bind(self, stream: Any) -> None:
        """Writes a stream's handle into both configs: that takes longer than to look whether it is
        there already."""
        self.config.hStream = self.overlapping.hStream = self.stream = stream

    def point(self, name: str, array: DeviceArray) -> None:
        """Points parameter `name` to another array, which the caller keeps alive."""
        self.kernel.pack_one(self._block, name, array)
        self._owned.pop(name, None)

    def __str__(self) -> str:
        spec = self.kernel.spec
        return (
            f"kernel {spec.name}, grid {self.grid}, {spec.threads} threads, "
            f"{spec.smem_bytes:,} B shared"
        )


class Program:
    """Launches to run in order. It keeps every array alive that its parameters point into.

    Attributes:
        launches: in order. counts: how many each kernel has.
    """

    def __init__(self, launches: Iterable[Launch] = ()) -> None:
        self.launches = list(launches)
        self.counts = Counter(launch.kernel for launch in self.launches)
        self._role = ""
        self._cuts: list[int] = []

    @contextmanager
    def role(self, name: str) -> Iterator[None]:
        """Labels what is added in a `with` block; otherwise a kernel's family is its role."""
        self._role = name
        try:
            yield
        finally:
            self._role = ""

    def add(
        self, kernel: Kernel, *, grid: tuple[int, int, int] | tuple[int, int] | int, **params: Any
    ) -> None:
        """Appends a launch of `grid` blocks (x, y, z) with parameters by their exported names.

        Raises:
            ValueError: a grid dimension is beyond what CUDA allows, or no whole clusters.
            TypeError: see `Kernel.pack`.
        """
        x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
        if not (0 < x < 2**31 and 0 < y < 65536 and 0 < z < 65536):
            raise ValueError(f"kernel {kernel.name}: grid {(x, y, z)} is out of range")
        if x % kernel.spec.cluster:
            raise ValueError(
                f"kernel {kernel.name}: grid {(x, y, z)} in clusters of {kernel.spec.cluster}"
            )
        self.launches.append(Launch(kernel, (x, y, z), params, self._role or kernel.spec.family))
        self.counts[kernel] += 1

    def cut(self) -> None:
        """Ends a section here."""
        self._cuts.append(len(self.launches))

    @cached_property
    def sections(self) -> list[Program]:
        """The launches between cuts, one program more than cuts; for when all have been added."""
        bounds = pairwise([0, *self._cuts, len(self.launches)])
        return [Program(self.launches[start:stop]) for start, stop in bounds]

    def run(self, stream: Stream, *, overlap: bool = True) -> None:
        """Enqueues every launch on `stream`, see `enqueue`, and counts it."""
        self.enqueue(stream, overlap=overlap)
        self.count()

    def enqueue(self, stream: Stream, *, overlap: bool = True, follows: bool = False) -> None:
        """Enqueues every launch on `stream`; the device's context must be current.

        What kernels read before they wait for the one before must not be written by any launch of
        the run: weights, counts of rows, the sequence table. (But a kernel that lets no other start
        before it has written may write what later ones read so: see spec.cuh.) If another stream
        writes it, the run begins behind a wait for that: its first launch, and so all, come after.

        Args:
            overlap: whether launches from the second on may start before the one before has ended.
                Results are the same bits; without it, each launch has the GPU to itself.
            follows: whether this goes on with a run whose last launch is the last thing on
                `stream`: then the first launch is not the first of its run.

        Raises:
            CudaError: a launch failed; the text names kernel, grid and bytes.
        """
        launch_kernel = api.bindings().cuLaunchKernelEx
        handle = stream.handle
        overlaps = overlap and follows
        for launch in self.launches:
            if launch.stream is not handle:
                launch.bind(handle)
            config = launch.overlapping if overlaps else launch.config
            (status,) = launch_kernel(config, launch.function, launch.arguments, 0)
            if status:
                raise api.failure("cuLaunchKernelEx", status, str(launch))
            overlaps = overlap

    def count(self, runs: int = 1) -> None:
        """Adds the launches of so many runs to those of their kernels."""
        for kernel, count in self.counts.items():
            kernel.launches += count * runs
