"""Kernels loaded from the installed cubins, ready to launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cached_property, wraps
from typing import Any, TypeVar, TypeVarTuple

from pyruntime.cubin.installed import cubins_for, manifest
from pyruntime.cubin.spec import LETTERS, KernelSpec, read_specs
from pyruntime.driver import api
from pyruntime.driver.device import Device, driver_version
from pyruntime.errors import CubinError, CudaError, DriverNotFoundError

_BLOCK_ALIGNMENT = 64  # a CUtensorMap inside the parameter struct
_MOST_KEPT = 256  # answers of a function

T = TypeVar("T")
Key = TypeVarTuple("Key")


class Kernel:
    """One kernel with its contract. Its shared-memory limit has been raised to what it asks for.

    Attributes:
        launches: how often it has been launched by programs that were counted, see `Program.count`.
        clusters: clusters of its that the device holds at a time; None for kernels without.
    """

    def __init__(
        self, spec: KernelSpec, function: Any, registers: int, clusters: int | None = None
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.function = function
        self.registers = registers
        self.launches = 0
        self.clusters = clusters

    @cached_property
    def _params(self) -> dict[str, tuple[struct.Struct, int]]:
        """How parameters are encoded, and where."""
        return {
            p.name: (struct.Struct("<" + LETTERS[p.letter]), p.offset) for p in self.spec.params
        }

    def pack(self, params: dict[str, Any]) -> ctypes.Array[ctypes.c_char]:
        """Encodes parameters by name into the kernel's parameter struct.

        Pointers are ints or objects with `.ptr`.

        Raises:
            TypeError: a parameter is missing, unknown, or of the wrong kind.
        """
        if params.keys() != (expected := self._params.keys()):
            raise TypeError(
                f"kernel {self.name}: missing {sorted(expected - params.keys())}, "
                f"unknown {sorted(params.keys() - expected)}"
            )
        raw = ctypes.create_string_buffer(self.spec.param_bytes + _BLOCK_ALIGNMENT)
        shift = -ctypes.addressof(raw) % _BLOCK_ALIGNMENT
        raw_type = ctypes.c_char * self.spec.param_bytes
        block = raw_type.from_buffer(raw, shift)
        for name, value in params.items():
            self.pack_one(block, name, value)
        return block

    def pack_one(self, block: ctypes.Array[ctypes.c_char], name: str, value: Any) -> None:
        """Encodes one parameter into a block that `pack` made. Raises TypeError as it does."""
        form, offset = self._params[name]
        try:
            form.pack_into(block, offset, getattr(value, "ptr", value))
        except (struct.error, OverflowError) as error:
            raise TypeError(f"kernel {self.name}, parameter {name}: {error}") from None

    def config(self, grid: tuple[int, int, int], *, overlapping: bool = False) -> Any:
        """The CUlaunchConfig of a launch, whole but for the stream.

        `overlapping`, it may start before the kernel before it has ended, if it is dependent.
        """
        config = api.bindings().CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.spec.threads, 1, 1
        config.sharedMemBytes = self.spec.smem_bytes
        config.attrs = self._attributes
        config.numAttrs = len(self._attributes) - (self.spec.dependent and not overlapping)
        return config

    @cached_property
    def _attributes(self) -> list[Any]:  # making one takes longer than a config
        driver, found = api.bindings(), []
        ids = driver.CUlaunchAttributeID
        if self.spec.cluster > 1:
            cluster = driver.CUlaunchAttribute()
            cluster.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = cluster.value.clusterDim
            size.x, size.y, size.z = self.spec.cluster, 1, 1
            found.append(cluster)
        if self.spec.dependent:
            dependent = driver.CUlaunchAttribute()  # the last one: a full wait leaves it out
            dependent.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            dependent.value.programmaticStreamSerializationAllowed = 1
            found.append(dependent)
        return found


class Library:
    """All kernels that run on a device, loaded eagerly so that no launch ever loads anything.

    Attributes:
        refused: kernels whose row asks for more than this device has, with the reason.
        answers: what functions that are `kept` have said of it, by function and arguments.

    Raises:
        ArchMismatchError, CubinError: see `cubins_for`; CudaError: the driver refused a cubin.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.refused: dict[str, str] = {}
        self.answers: dict[Callable[..., Any], dict[Hashable, Any]] = {}
        self._kernels: dict[str, Kernel] = {}
        self._families: dict[str, list[Kernel]] = {}
        self._modules = []
        check_driver()
        cubins = cubins_for(device.compute_capability, device.name)
        try:
            with device.current():
                for path, data in cubins.items():
                    module = api.call("cuModuleLoadData", data, what=f"{path} on {device.name}")
                    self._modules.append(module)
                    for spec in read_specs(data, str(path)).values():
                        self._add(module, spec)
        except BaseException:
            with suppress(CudaError):  # the first failure is the one to report
                self.close()
            raise

    def _add(self, module: Any, spec: KernelSpec) -> None:
        function = api.call("cuModuleGetFunction", module, spec.name.encode(), what=spec.name)
        api.call("cuFuncLoad", function, what=spec.name)
        static = _attribute(function, "SHARED_SIZE_BYTES")
        limit = self.device.smem_per_block
        if static + spec.smem_bytes > limit:
            self.refused[spec.name] = (
                f"{spec.name} asks for {spec.smem_bytes:,} B of dynamic and {static:,} B of static "
                f"shared memory per block, beside {self.device.smem_reserved:,} B reserved; "
                f"{self.device.name} allows {limit:,} B"
            )
            return
        most = _attribute(function, "MAX_THREADS_PER_BLOCK")
        if spec.threads > most:
            raise CubinError(f"{spec.name} wants {spec.threads} threads; the driver allows {most}")
        attribute = api.constant(
            "CUfunction_attribute", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        )
        api.call(
            "cuFuncSetAttribute", function, attribute, spec.smem_bytes, what=f"kernel {spec.name}"
        )
        kernel = Kernel(spec, function, _attribute(function, "NUM_REGS"))
        if spec.cluster > 1:
            one = kernel.config((spec.cluster, 1, 1))
            found = api.call("cuOccupancyMaxActiveClusters", function, one, what=spec.name)
            kernel.clusters = int(found)
            if not kernel.clusters:
                self.refused[spec.name] = (
                    f"{spec.name} asks for clusters of {spec.cluster} blocks; "
                    f"{self.device.name} has no room for one"
                )
                return
        self._kernels[spec.name] = kernel
        self._families.setdefault(spec.family, []).append(kernel)

    def __getitem__(self, name: str) -> Kernel:
        """The kernel `name`.

        Raises:
            CubinError: there is none, or its row does not fit this device.
        """
        if name in self.refused:
            raise CubinError(self.refused[name])
        if name not in self._kernels:
            raise CubinError(f"no kernel {name} in the cubins for {self.device.name}")
        return self._kernels[name]

    def family(self, name: str) -> list[Kernel]:
        """The usable kernels of a family (the first word of their names), in table order.

        Raises:
            CubinError: there is none; the text says which rows were refused and why.
        """
        if name not in self._families:
            reasons = [r for n, r in self.refused.items() if n.split("_", 1)[0] == name]
            raise CubinError("; ".join(reasons) or f"no kernel of family {name} in the cubins")
        return self._families[name]

    def launches(self) -> dict[str, int]:
        """Launches so far by kernel name; kernels that never ran are left out."""
        return {k.name: k.launches for k in self._kernels.values() if k.launches}

    def blocks_per_sm(self, kernel: Kernel) -> int:
        """How many blocks of `kernel` the driver says an SM holds at once."""
        spec = kernel.spec
        with self.device.current():
            return int(
                api.call(
                    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                    kernel.function,
                    spec.threads,
                    spec.smem_bytes,
                    what=f"kernel {spec.name}",
                )
            )

    def close(self) -> None:
        """Unloads the modules. Idempotent."""
        modules, self._modules = self._modules, []
        self._kernels.clear()
        self._families.clear()
        self.answers.clear()
        with self.device.current():
            for module in modules:
                api.call("cuModuleUnload", module)


def kept(function: Callable[[Library, *Key], T]) -> Callable[[Library, *Key], T]:
    """Keeps what `function` gives for a library and hashable arguments until the library closes."""

    @wraps(function)
    def recall(library: Library, *key: *Key) -> T:
        answers = library.answers.setdefault(function, {})
        try:
            found: T = answers[key]
        except KeyError:
            found = function(library, *key)
            if len(answers) >= _MOST_KEPT:
                answers.clear()
            answers[key] = found
        return found

    return recall


def check_driver() -> None:
    """Refuses a driver older than the cubins: it loads those of its CUDA major version or older.

    Raises:
        DriverNotFoundError: with both versions.
    """
    built, driver = manifest()["nvcc_version"], driver_version()
    if int(driver.split(".")[0]) < int(built.split(".")[0]):
        raise DriverNotFoundError(
            f"the driver supports CUDA {driver}; the cubins were built by nvcc {built} and need "
            f"{built.split('.')[0]}.0 or newer"
        )


def _attribute(function: Any, name: str) -> int:
    member = api.constant("CUfunction_attribute", f"CU_FUNC_ATTRIBUTE_{name}")
    return int(api.call("cuFuncGetAttribute", member, function))
