"""What the compiler wrote into a cubin about its kernels: registers, memory, spills, parameters.

Nothing here needs a GPU or a CUDA tool. NVIDIA documents none of it; the rules were checked against
`ptxas -v` and `cuobjdump -res-usage` on cubins of CUDA 11.8 to 13.5 (sm_80 to sm_121).
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import cached_property

from pyruntime.cubin import attributes
from pyruntime.cubin.attributes import Attribute
from pyruntime.cubin.elf import ET_REL, STT_FUNC, Elf, Section, Symbol
from pyruntime.cubin.provenance import arch_of, tool_of
from pyruntime.cubin.sass import INSTRUCTION_BYTES
from pyruntime.cubin.spec import KernelSpec, specs_in
from pyruntime.errors import CubinError

_ENTRY = 0x10  # st_other of a kernel's symbol; device functions lack it
_UNKNOWN_STACK = 0xFFFFFFFF
# From sm_90 on `.nv.shared.<kernel>` begins with the bytes that the driver keeps for itself.
_RESERVED, _RESERVED_FROM = 1024, 90
# ptxas 12.4 writes no spill annotations and 12.8 does; older cubins with a stack stay unknown.
_ANNOTATED_FROM = 128
_SPILL_OPCODES = {0x387: "stores", 0x983: "loads", 0x388: "shared", 0x984: "shared"}
_WAIT_OPCODE = 0x82E  # griddepcontrol.wait from sm_90 to sm_120, by nvdisasm 13
_ACCESS_BYTES = (1, 1, 2, 2, 4, 8, 16, 16)
_USES = {
    0x0F: "external functions (printf, malloc, ...)",
    0x2B: "tensor cores (wmma/mma)",
    0x46: "system calls",
    0x51: "tcgen05 (one CTA)",
    0x52: "tcgen05 (two CTAs)",
    0x54: "setmaxnreg",
}


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter as the compiler laid it out, in bytes."""

    ordinal: int
    offset: int
    size: int


@dataclass(frozen=True)
class Spills:
    """Bytes that spill instructions move, as ptxas counts them.

    `stores` and `loads` go to local memory; `shared` counts those to and from shared memory.
    """

    stores: int = 0
    loads: int = 0
    shared: int = 0


@dataclass(frozen=True)
class KernelFacts:
    """One kernel. Sizes are bytes; None means that the file does not say.

    Attributes:
        static_shared: declared with a size in the kernel, without what the driver reserves; None in
            code that is not linked yet.
        stack: per thread, callees included; None where a recursion makes it unbounded.
        max_threads: the launch bound, None without one; `register_cap` likewise.
        required_threads: the exact block shape that a launch must have.
        cluster: blocks per cluster fixed at compile time.
        calls: device functions that were not inlined, by name.
        attributes: everything ptxas noted, known here or not.
        spec: the contract that this package's own kernels carry.
    """

    name: str
    arch: str
    registers: int | None
    static_shared: int | None
    stack: int | None
    spills: Spills | None
    barriers: int
    constant_bytes: int
    param_bytes: int
    params: tuple[Parameter, ...]
    max_threads: int | None
    required_threads: tuple[int, ...] | None
    register_cap: int | None
    cluster: tuple[int, ...] | None
    calls: tuple[str, ...]
    code: bytes
    attributes: tuple[Attribute, ...]
    spec: KernelSpec | None

    @property
    def dynamic_shared(self) -> int | None:
        """What a launch asks for beside the static part: known only from a spec."""
        return self.spec.smem_bytes if self.spec else None

    @property
    def threads(self) -> int | None:
        """Threads per block, where the file fixes them."""
        if self.spec:
            return self.spec.threads
        return math.prod(self.required_threads) if self.required_threads else None

    @cached_property
    def code_sha256(self) -> str:
        """Hash of the machine code."""
        return hashlib.sha256(self.code).hexdigest()

    @cached_property
    def waits(self) -> bool:
        """Whether there is an instruction that waits for the kernel before (opcode ACQBULK)."""
        low, high = self.code[::INSTRUCTION_BYTES], self.code[1::INSTRUCTION_BYTES]
        return any(a | (b & 15) << 8 == _WAIT_OPCODE for a, b in zip(low, high, strict=True))

    @property
    def uses(self) -> tuple[str, ...]:
        """Hardware and library features that the compiler flagged."""
        seen = {a.code for a in self.attributes}
        return tuple(text for code, text in _USES.items() if code in seen)


@dataclass(frozen=True)
class CubinFacts:
    """A cubin: `arch` such as "sm_90a"; `toolkit` such as "13.0"; `tool` and `options` of ptxas.

    `remarks` tells what could not be read though the rest could.
    """

    label: str
    arch: str
    abi: int
    toolkit: str | None
    tool: str | None
    options: str | None
    global_bytes: int
    constant_bytes: int
    kernels: tuple[KernelFacts, ...]
    remarks: tuple[str, ...]


def read_cubin(data: bytes, label: str) -> CubinFacts:
    """All that a cubin says about itself and its kernels, in symbol order.

    Args:
        label: names the cubin in the result and in errors.

    Raises:
        CubinError: not a cubin, or damaged.
    """
    elf = Elf(data, label)
    symbols = list(elf.symbols())
    arch = arch_of(elf)
    remarks = (
        ["not linked yet: shared memory and stack are this file's part only"]
        if elf.kind == ET_REL
        else []
    )
    remarks += [f"section {name} lies past the end of the file" for name in elf.overruns()]
    try:
        specs = specs_in(elf)
    except CubinError as error:  # of another version of this package
        specs = {}
        remarks.append(str(error))
    noted: dict[str, dict[int, int]] = {}
    for attribute in attributes.section(elf, ".nv.info"):
        if len(attribute.words) == 2 and attribute.words[0] < len(symbols):
            name = symbols[attribute.words[0]].name
            noted.setdefault(name, {})[attribute.code] = attribute.words[1]
    functions = [s for s in symbols if s.info & 15 == STT_FUNC and s.section]
    calls: dict[str, list[str]] = {}
    for s in functions:  # a function that stayed one is called $kernel$function
        if s.name.startswith("$") and "$" in s.name[1:]:
            kernel, function = s.name[1:].split("$", 1)
            calls.setdefault(kernel, []).append(function)
    kernels = tuple(
        _kernel(elf, s, arch, noted.get(s.name, {}), calls.get(s.name, []), specs.get(s.name))
        for s in functions
        if s.other & _ENTRY
    )
    tool, options = tool_of(elf)
    apis = {attributes.word(k.attributes, 0x37) for k in kernels} - {None}
    return CubinFacts(
        label=label,
        arch=arch,
        abi=elf.abi_version,
        toolkit="/".join(f"{a // 10}.{a % 10}" for a in sorted(filter(None, apis))) or None,
        tool=tool,
        options=options,
        global_bytes=sum(_size(elf, n) for n in (".nv.global", ".nv.global.init")),
        constant_bytes=_size(elf, ".nv.constant3"),
        kernels=kernels,
        remarks=tuple(remarks),
    )


def _kernel(
    elf: Elf,
    symbol: Symbol,
    arch: str,
    noted: dict[int, int],
    calls: list[str],
    spec: KernelSpec | None,
) -> KernelFacts:
    name = symbol.name
    found = attributes.section(elf, f".nv.info.{name}")
    if symbol.section >= len(elf.sections):
        raise CubinError(
            f"{elf.what}: kernel {name} lies in section {symbol.section}, which is absent"
        )
    text = elf.sections[symbol.section]
    code = bytes(text.data)
    # The kernel's own frame, and the sum over its calls as ptxas or (linked code) nvlink knows it.
    stack = max(noted.get(code, 0) for code in (0x11, 0x12, 0x23))
    cluster = attributes.find(found, 0x3D)
    cap = attributes.word(found, 0x1B)
    bound, exact = attributes.find(found, 0x05), attributes.find(found, 0x10)
    return KernelFacts(
        name=name,
        arch=arch,
        registers=noted.get(0x2F, text.info >> 24 or None),
        static_shared=_static_shared(elf, name, arch),
        stack=None if stack == _UNKNOWN_STACK else stack,
        spills=_spills(elf, name, code, found, stack),
        barriers=_barriers(elf, text, found),
        constant_bytes=_size(elf, f".nv.constant0.{name}"),
        param_bytes=attributes.word(found, 0x19) or 0,
        params=_parameters(found),
        max_threads=math.prod(bound.words) if bound else None,
        required_threads=exact.words if exact else None,
        register_cap=None if cap == 255 else cap,
        cluster=cluster.words if cluster and any(cluster.words) else None,
        calls=tuple(calls),
        code=code,
        attributes=found,
        spec=spec,
    )


def _static_shared(elf: Elf, name: str, arch: str) -> int | None:
    section = elf.by_name.get(f".nv.shared.{name}")
    if elf.kind == ET_REL:  # the reserve comes when linked; so may memory that files share
        return section.size if section else None
    if section is None:
        return 0
    reserved = _RESERVED if int(arch[3:].rstrip("a")) >= _RESERVED_FROM else 0
    return max(section.size - reserved, 0)


def _spills(
    elf: Elf, name: str, code: bytes, found: tuple[Attribute, ...], stack: int
) -> Spills | None:
    """Spills from the annotations (code offset of each spill instruction, after a kind of 1)."""
    marks = [a.words for a in found if a.code == 0x55]
    if not marks:
        told = (attributes.word(found, 0x37) or 0) >= _ANNOTATED_FROM
        return Spills() if told or stack == 0 else None
    counts = {"stores": 0, "loads": 0, "shared": 0}
    for words in marks:
        for kind, offset in zip(words[::2], words[1::2], strict=False):
            if kind != 1:
                continue
            if offset + 16 > len(code):
                raise CubinError(f"{elf.what}: {name}: a spill is noted at {offset}, past the code")
            low, high = struct.unpack_from("<QQ", code, offset)
            where = _SPILL_OPCODES.get(low & 0xFFF)
            if where:
                counts[where] += _ACCESS_BYTES[high >> 9 & 7]
    return Spills(**counts)


def _barriers(elf: Elf, text: Section, found: tuple[Attribute, ...]) -> int:
    """Named barriers, as the highest id in use plus one."""
    if elf.abi_version < 8:
        return text.flags >> 20 & 0x7F
    return attributes.word(found, 0x4C) or 0


def _parameters(found: tuple[Attribute, ...]) -> tuple[Parameter, ...]:
    params = []
    for attribute in found:
        if attribute.code in (0x17, 0x45) and len(attribute.words) == 3:
            _, place, size = attribute.words
            # The second form serves more than 4 KB; its top byte holds flags.
            size = size >> 18 if attribute.code == 0x17 else size & 0xFFFFFF
            params.append(Parameter(place & 0xFFFF, place >> 16, size))
    return tuple(sorted(params, key=lambda p: p.ordinal))


def _size(elf: Elf, name: str) -> int:
    section = elf.by_name.get(name)
    return section.size if section else 0
