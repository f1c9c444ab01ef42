"""A recorded list of launches: parameters are encoded once, running it only calls the driver."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pyruntime.driver import api
from pyruntime.driver.library import Kernel, cluster_launch
from pyruntime.driver.stream import Stream


class Launch:
    """One kernel launch with everything encoded but the stream. `role`: what it is for."""

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int, int], params: dict[str, Any], role: str
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.role = role
        self._owned = list(params.values())  # arrays that the encoded addresses point into
        self._block = kernel.pack(params)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._block))
        spec = kernel.spec
        self.head = (kernel.function, *grid, spec.threads, 1, 1, spec.smem_bytes)
        self.clustered = cluster_launch(spec, grid) if spec.cluster > 1 else None
        self.arguments = ctypes.addressof(self._pointers)

    def __str__(self) -> str:
        spec = self.kernel.spec
        return (
            f"kernel {spec.name}, grid {self.grid}, {spec.threads} threads, "
            f"{spec.smem_bytes:,} B shared"
        )


class Program:
    """Launches to run in order. It keeps every array alive that its parameters point into."""

    def __init__(self, launches: Iterable[Launch] = ()) -> None:
        self.launches = list(launches)
        self._counts = Counter(launch.kernel for launch in self.launches)
        self._role = ""

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
        self._counts[kernel] += 1

    def run(self, stream: Stream) -> None:
        """Enqueues every launch on `stream` and counts it; the device's context must be current.

        Raises:
            CudaError: a launch failed; the text names kernel, grid and bytes.
        """
        driver = api.bindings()
        launch_kernel, launch_clusters = driver.cuLaunchKernel, driver.cuLaunchKernelEx
        handle = stream.handle
        for launch in self.launches:
            if launch.clustered is None:
                (status,) = launch_kernel(*launch.head, handle, launch.arguments, 0)
            else:
                launch.clustered.hStream = handle
                function = launch.kernel.function
                (status,) = launch_clusters(launch.clustered, function, launch.arguments, 0)
            if status:
                raise api.failure("cuLaunchKernel", status, str(launch))
        for kernel, count in self._counts.items():
            kernel.launches += count
