"""Where the blocks of a product leave sums for one another: see `Division` in
cuda/kernels/sm_90a/gemm_division.cuh."""

from __future__ import annotations

from pyruntime.driver.library import Library
from pyruntime.driver.memory import DeviceArray
from pyruntime.ops.gemm_choice import SLOTS

_TILE, _WARPS = 128 * 256, 8  # sums of the largest tile; warps of a block that have some

Layout = dict[str, tuple[tuple[int, ...], str]]
# Its size depends neither on the device nor on a model.
WORKSPACE_LAYOUT: Layout = {
    "sums": ((SLOTS, _TILE), "float32"),
    "raised": ((SLOTS, _WARPS), "int32"),
}


class GemmWorkspace:
    """Device memory that matrix products share, of which one runs at a time.

    Attributes:
        sums: float32 [SLOTS, a tile's]. raised: int32 [SLOTS, warps], zero between launches.
    """

    def __init__(self, library: Library) -> None:
        self._arrays: dict[str, DeviceArray] = {}
        try:
            for name, (shape, dtype) in WORKSPACE_LAYOUT.items():
                what = f"gemm workspace, {name}"
                self._arrays[name] = DeviceArray(library.device, shape, dtype, what=what)
            self.sums, self.raised = self._arrays["sums"], self._arrays["raised"].fill(0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        for array in self._arrays.values():
            array.close()
