"""Machine instructions (SASS): what they are for, which unit runs them, how they are scheduled.

Opcodes are those of the instruction set tables in NVIDIA's "CUDA Binary Utilities" (Ampere to
Blackwell). The control codes are not documented there. Their place in the 128 bits of an
instruction is that of Jia et al. 2018, "Dissecting the NVIDIA Volta GPU Architecture via
Microbenchmarking", section 2.1; that it still holds up to sm_120 is tested: what a load brings is
waited for on the barrier that the load names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

INSTRUCTION_BYTES = 16
JUMPS = frozenset({"BRA", "JMP"})  # to a place that the instruction names
_NO_BARRIER = 7


@dataclass(frozen=True)
class Kind:
    """A class of instructions. `unit` is the part of an SM that runs them."""

    name: str
    unit: str
    opcodes: frozenset[str]


def _kind(name: str, unit: str, opcodes: str) -> Kind:
    return Kind(name, unit, frozenset(opcodes.split()))


# What no set lists and begins with U runs on the uniform datapath.
_UNIFORM = Kind("uniform", "uniform datapath", frozenset())
_PADDING = _kind("padding", "none", "NOP")
_OTHER = Kind("other", "not known here", frozenset())
KINDS = (
    _kind("tensor", "tensor cores", """HMMA IMMA DMMA BMMA QMMA OMMA HGMMA QGMMA IGMMA BGMMA
        UTCHMMA UTCQMMA UTCIMMA UTCOMMA"""),
    _kind("tensor memory", "tensor memory", """LDTM STTM LDT STT UTCCP UTCSHIFT UTCBAR UTCATOMSWS
        UTMEMALLOC"""),
    _kind("fp32", "FP32 pipes", """FFMA FMUL FADD FMNMX FMNMX3 FSEL FSET FSETP FCHK FSWZADD FFMA32I
        FMUL32I FADD32I FFMA2 FMUL2 FADD2 FHADD FHFMA"""),
    _kind("fp16", "FP16 pipes", """HFMA2 HADD2 HMUL2 HMNMX2 HSET2 HSETP2 HFMA2_32I HADD2_32I
        HMUL2_32I VHMNMX"""),
    _kind("fp64", "FP64 pipes", "DFMA DADD DMUL DSETP"),
    _kind("special", "special function unit", "MUFU"),
    _kind("convert", "conversions", "F2F F2I I2F I2I F2FP F2IP I2FP I2IP FRND"),
    _kind("integer", "integer pipes", """IMAD IADD IADD3 IADD32I LEA LOP LOP3 LOP32I SHF SHL SHR
        ISETP IABS IMNMX IMUL IMUL32I ISCADD ISCADD32I IDP IDP4A VIADD VIADDMNMX VIMNMX VIMNMX3
        VABSDIFF VABSDIFF4 POPC FLO BREV BMSK SGXT PLOP3 PSETP P2R R2P"""),
    _UNIFORM,
    _kind("move", "moves", """MOV MOV32I SEL PRMT S2R S2UR CS2R CS2UR B2R R2B R2UR BMOV LEPC
        GETLMEMBASE SETLMEMBASE SETCTAID RPCMOV"""),
    _kind("async copy", "copies past the registers", """LDGSTS UTMALDG UTMASTG UTMAREDG UTMAPF
        UBLKCP UBLKPF UBLKRED UTMACCTL UTMACMDFLUSH"""),
    _kind("ldmatrix", "shared memory", "LDSM"),
    _kind("shared", "shared memory", "LDS STS STSM ATOMS STAS REDAS"),
    _kind("global", "L1, L2, device memory", """LDG STG LD ST ATOM ATOMG RED REDG LDGMC UREDGR
        USTGR"""),
    _kind("local", "local memory (spills, arrays)", "LDL STL"),
    _kind("constant", "constant cache", "LDC ULDC LDCU"),
    _kind("texture", "texture unit", "TEX TLD TLD4 TMML TXD TXQ SULD SUST SUATOM SURED"),
    _kind("lanes", "exchange between lanes", "SHFL MOVM VOTE VOTEU MATCH REDUX CREDUX QSPC ELECT"),
    _kind("barrier", "waiting", """BAR SYNCS DEPBAR LDGDEPBAR MEMBAR FENCE ERRBAR CGAERRBAR CCTL
        CCTLL CCTLT ARRIVES WARPGROUP WARPGROUPSET UCGABAR_ARV UCGABAR_WAIT ACQBULK NANOSLEEP"""),
    _kind("control", "branches", """BRA BRX BRXU JMP JMX JMXU CALL RET EXIT KILL BSSY BSYNC BREAK
        WARPSYNC ENDCOLLECTIVE YIELD PREEXIT USETMAXREG BPT PMTRIG CSMTEST UCLEA"""),
    _PADDING,
    _OTHER,
)  # fmt: skip
_BY_OPCODE = {opcode: kind for kind in KINDS for opcode in kind.opcodes}


@dataclass(frozen=True)
class Control:
    """How the compiler schedules an instruction.

    Attributes:
        stall: cycles until the warp may issue its next one.
        yields: another warp is preferred next.
        writes, reads: the barrier (0 to 5) that opens when the result is there, and when the
            operands have been read; None if none.
        waits: bit i: wait for barrier i first.
        reuse: bit i: keep operand i in the operand cache.
    """

    stall: int
    yields: bool
    writes: int | None
    reads: int | None
    waits: int
    reuse: int

    def __str__(self) -> str:
        """In the notation of maxas: waits, read and write barrier, yield, stall."""
        waits = "".join(str(i) if self.waits >> i & 1 else "-" for i in range(6))
        barriers = ("-" if b is None else str(b) for b in (self.reads, self.writes))
        return "B{}:R{}:W{}:{}:S{:02}".format(
            waits, *barriers, "Y" if self.yields else "-", self.stall
        )


@dataclass(frozen=True)
class Instruction:
    """One instruction. `offset` and `target` are bytes from the kernel's start."""

    offset: int
    opcode: str
    operands: str
    predicate: str
    target: int | None
    encoding: int

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".", 1)[0]

    @property
    def kind(self) -> Kind:
        """Its class; what can never run (predicate @!PT) is padding."""
        if self.predicate == "@!PT":
            return _PADDING
        name = self.name
        return _BY_OPCODE.get(name) or (_UNIFORM if name.startswith("U") else _OTHER)

    @property
    def conditional(self) -> bool:
        """Whether it may be passed over: by its predicate, or a branch's own condition."""
        own = self.name in JUMPS and "," in self.operands
        return self.predicate not in ("", "@PT", "@UPT") or own

    @property
    def control(self) -> Control:
        """Its control codes, from bit 105 of the encoding on."""
        bits = self.encoding >> 105
        writes, reads = bits >> 5 & 7, bits >> 8 & 7
        return Control(
            stall=bits & 15,
            yields=not bits >> 4 & 1,
            writes=None if writes == _NO_BARRIER else writes,
            reads=None if reads == _NO_BARRIER else reads,
            waits=bits >> 11 & 63,
            reuse=bits >> 17 & 15,
        )

    def __str__(self) -> str:
        return f"{self.predicate + ' ' if self.predicate else ''}{self.opcode} {self.operands}"


def mix(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Instructions by class, in the order of `KINDS`; classes without any are left out."""
    counts = Counter(instruction.kind.name for instruction in instructions)
    return {kind.name: counts[kind.name] for kind in KINDS if counts[kind.name]}
