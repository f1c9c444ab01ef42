"""The attribute stream of `.nv.info` sections (EIATTR), in which ptxas notes what a kernel needs.

An attribute is a format byte, a code byte and 16 bits, which are the value (formats 1 to 3) or the
number of bytes that follow (format 4). The codes are not documented; their names below are those
that cuobjdump prints. Codes above 0x55 mean different things to different toolkits: no names.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pyruntime.cubin.elf import Elf
from pyruntime.errors import CubinError

# In code order from 0x00.
_NAMES = """
    ERROR PAD IMAGE_SLOT JUMPTABLE_RELOCS CTAIDZ_USED MAX_THREADS IMAGE_OFFSET IMAGE_SIZE
    TEXTURE_NORMALIZED SAMPLER_INIT PARAM_CBANK SMEM_PARAM_OFFSETS CBANK_PARAM_OFFSETS
    SYNC_STACK TEXID_SAMPID_MAP EXTERNS REQNTID FRAME_SIZE MIN_STACK_SIZE
    SAMPLER_FORCE_UNNORMALIZED BINDLESS_IMAGE_OFFSETS BINDLESS_TEXTURE_BANK
    BINDLESS_SURFACE_BANK KPARAM_INFO SMEM_PARAM_SIZE CBANK_PARAM_SIZE QUERY_NUMATTRIB
    MAXREG_COUNT EXIT_INSTR_OFFSETS S2RCTAID_INSTR_OFFSETS CRS_STACK_SIZE NEED_CNP_WRAPPER
    NEED_CNP_PATCH EXPLICIT_CACHING ISTYPEP_USED MAX_STACK_SIZE SUQ_USED
    LD_CACHEMOD_INSTR_OFFSETS LOAD_CACHE_REQUEST ATOM_SYS_INSTR_OFFSETS
    COOP_GROUP_INSTR_OFFSETS COOP_GROUP_MASK_REGIDS SW1850030_WAR WMMA_USED HAS_PRE_V10_OBJECT
    ATOMF16_EMUL_INSTR_OFFSETS ATOM16_EMUL_INSTR_REG_MAP REGCOUNT SW2393858_WAR
    INT_WARP_WIDE_INSTR_OFFSETS SHARED_SCRATCH STATISTICS INDIRECT_BRANCH_TARGETS
    SW2861232_WAR SW_WAR CUDA_API_VERSION NUM_MBARRIERS MBARRIER_INSTR_OFFSETS
    COROUTINE_RESUME_OFFSETS SAM_REGION_STACK_SIZE PER_REG_TARGET_PERF_STATS CTA_PER_CLUSTER
    EXPLICIT_CLUSTER MAX_CLUSTER_RANK INSTR_REG_MAP RESERVED_SMEM_USED RESERVED_SMEM_0_SIZE
    UCODE_SECTION_DATA UNUSED_LOAD_BYTE_OFFSET KPARAM_INFO_V2 SYSCALL_OFFSETS
    SW_WAR_MEMBAR_SYS_INSTR_OFFSETS GRAPHICS_GLOBAL_CBANK SHADER_TYPE VRC_CTA_INIT_COUNT
    TOOLS_PATCH_FUNC NUM_BARRIERS TEXMODE_INDEPENDENT PERF_STATISTICS AT_ENTRY_FRAGMENTS
    SPARSE_MMA_MASK TCGEN05_1CTA_USED TCGEN05_2CTA_USED GEN_ERRBAR_AT_EXIT REG_RECONFIG
    ANNOTATIONS
    """.split()  # noqa: SIM905 (86 names, a list of literals would hide the order)


@dataclass(frozen=True)
class Attribute:
    """One attribute: `value` is a number of up to 16 bits, or the bytes of a sized one."""

    code: int
    value: int | bytes

    @property
    def name(self) -> str:
        """cuobjdump's name after EIATTR_, or the code in hex."""
        return _NAMES[self.code] if self.code < len(_NAMES) else f"0x{self.code:02x}"

    @property
    def words(self) -> tuple[int, ...]:
        """The value as unsigned 32-bit words; bytes after the last whole word are left out."""
        if isinstance(self.value, int):
            return (self.value,)
        count = len(self.value) // 4
        return struct.unpack_from(f"<{count}I", self.value)

    @property
    def text(self) -> str:
        """The value in hex."""
        return f"0x{self.value:x}" if isinstance(self.value, int) else self.value.hex()


def read(data: memoryview, what: str) -> Iterator[Attribute]:
    """The attributes of one section, in file order.

    Raises:
        CubinError: the stream is cut off or has a format byte that is not 1 to 4.
    """
    at = 0
    while at + 4 <= len(data):
        form, code, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == 4:
            if at + value > len(data):
                raise CubinError(f"{what}: attribute 0x{code:02x} is cut off at offset {at}")
            yield Attribute(code, bytes(data[at : at + value]))
            at += value + -value % 4
        elif form in (1, 2, 3):
            yield Attribute(code, value & 0xFF if form == 2 else value)
        elif form or code or value:  # zeros pad a section
            raise CubinError(f"{what}: attribute format {form} at offset {at - 4}")


def section(elf: Elf, name: str) -> tuple[Attribute, ...]:
    """The attributes of a cubin's section, none if it is absent."""
    found = elf.by_name.get(name)
    return tuple(read(found.data, f"{elf.what}: {name}")) if found else ()


def find(attributes: Iterable[Attribute], code: int) -> Attribute | None:
    """The first attribute with a code."""
    return next((a for a in attributes if a.code == code), None)


def word(attributes: Iterable[Attribute], code: int) -> int | None:
    """The first word of the first attribute with a code."""
    attribute = find(attributes, code)
    return attribute.words[0] if attribute and attribute.words else None
