"""The structure of a kernel: its stages, the unit that runs each, and what is wrong with them.

Stages are the classes of instructions in the main loop, with the planes of shared memory that a
stage of this class is likely to touch (by element and row alone: addresses are not followed).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyruntime.cubin.loops import INDIRECT, Loop, loops
from pyruntime.cubin.sass import Instruction
from pyruntime.cubin.spec import KernelSpec
from pyruntime.cubin.verdict import Finding, Lever

# class -> what a stage of it does
_STAGES = {
    "async copy": "fill",
    "ldmatrix": "read operands",
    "tensor": "matrix products",
    "tensor memory": "move accumulators",
    "special": "exponentials, reciprocals, roots",
    "fp32": "arithmetic",
    "fp16": "arithmetic in halves",
    "fp64": "arithmetic in doubles",
    "convert": "conversions",
    "lanes": "reductions over lanes",
    "shared": "exchange",
    "global": "read and write",
    "local": "spills and arrays",
    "integer": "addresses, masks, unpacking",
    "barrier": "wait",
}
_MANY_FMA = 0.4  # of a loop's instructions: what a product on the FP32 pipes looks like


@dataclass(frozen=True)
class Stage:
    """What one class of instructions does. `inside` and `whole` count them; `most` names them."""

    name: str
    unit: str
    planes: tuple[str, ...]
    inside: int
    whole: int
    most: str


@dataclass(frozen=True)
class Structure:
    """`main` is the loop that does the work: the smallest with nearly all of the products."""

    instructions: tuple[Instruction, ...]
    loops: tuple[Loop, ...]
    main: Loop | None
    stages: tuple[Stage, ...]
    findings: tuple[Finding, ...]

    @property
    def inside(self) -> tuple[Instruction, ...]:
        """The instructions of the main loop; all, if there is no loop."""
        if self.main is None:
            return self.instructions
        return tuple(self.instructions[i] for i in sorted(self.main.body))

    @property
    def mma(self) -> str:
        """The tensor-core instruction that the main loop has most of, such as "IMMA"; or "none"."""
        return max(self._products, key=self._products.__getitem__, default="none")

    @property
    def slots_per_mma(self) -> float | None:
        """Instructions that a warp issues in the main loop for each `mma`.

        None: there is none, or an indirect branch may close a loop in which there are products.
        """
        if any(i.name in INDIRECT for i in self.instructions) and (
            any(i.name in INDIRECT for i in self.inside)
            or self._products.total() < self.count("tensor")
        ):
            return None
        return len(self.inside) / self._products[self.mma] if self._products else None

    @property
    def _products(self) -> Counter[str]:
        loop = self.inside if self.main else ()
        return Counter(i.name for i in loop if i.kind.name == "tensor")

    def count(self, kind: str) -> int:
        """Instructions of a class in the whole kernel."""
        return sum(i.kind.name == kind for i in self.instructions)


def structure(instructions: Sequence[Instruction], spec: KernelSpec | None) -> Structure:
    """What the instructions of a kernel show; `spec` names the planes."""
    code, found = tuple(instructions), loops(instructions)
    main = _main(code, found)
    inside = [code[i] for i in sorted(main.body)] if main else list(code)
    stages = tuple(_stages(code, inside, spec))
    return Structure(code, found, main, stages, tuple(_findings(code, inside, found)))


def _main(code: Sequence[Instruction], found: Sequence[Loop]) -> Loop | None:
    def weight(loop: Loop) -> int:
        return sum(code[i].kind.name == kind for i in loop.body) if kind else len(loop.body)

    kind = (
        "tensor" if any(code[i].kind.name == "tensor" for loop in found for i in loop.body) else ""
    )
    most = max(map(weight, found), default=0)
    near = [loop for loop in found if 10 * weight(loop) >= 9 * most]
    return min(near, key=lambda loop: len(loop.body), default=None)


def _stages(
    code: Sequence[Instruction], inside: Sequence[Instruction], spec: KernelSpec | None
) -> Iterable[Stage]:
    for kind, name in _STAGES.items():
        whole = [i for i in code if i.kind.name == kind]
        here = [i for i in inside if i.kind.name == kind]
        if not whole:
            continue
        planes = _planes(kind, spec)
        most = Counter(i.opcode for i in here or whole).most_common(2)
        yield Stage(
            name=f"{name} {', '.join(planes)}".strip(),
            unit=whole[0].kind.unit,
            planes=planes,
            inside=len(here),
            whole=len(whole),
            most=", ".join(f"{opcode} {count}" for opcode, count in most),
        )


def _planes(kind: str, spec: KernelSpec | None) -> tuple[str, ...]:
    """Planes that a stage may touch: operands of 16 bits or less lie in rows of whole 16 bytes."""
    planes = spec.planes if spec else ()
    operands = [
        p
        for p in planes
        if p.element <= 2 and p.row_stride % 16 == 0 and p.bytes >= 8 * p.row_stride
    ]
    if kind == "ldmatrix":
        return tuple(p.name for p in operands)
    if kind == "async copy":  # into memory of its own
        return tuple(p.name for p in operands or planes if not p.on)
    if kind == "shared":
        return tuple(p.name for p in planes if p.on or p not in operands)
    return ()


def _findings(
    code: Sequence[Instruction], inside: Sequence[Instruction], found: Sequence[Loop]
) -> Iterable[Finding]:
    yield from _products(code, inside, found)
    looped = Counter(code[i].kind.name for i in frozenset().union(*(loop.body for loop in found)))
    if looped["local"]:
        yield _see(f"{looped['local']} accesses to local memory inside loops", Lever.SMALL)
    if looped["fp64"]:
        yield _see(f"{looped['fp64']} instructions in double precision inside loops", Lever.SMALL)
    waits = {i.operands.rpartition(",")[2] for i in inside if i.opcode == "DEPBAR.LE"}
    if waits and any(i.name == "LDGSTS" for i in inside):
        left = ", ".join(str(int(count, 16)) for count in sorted(waits))
        drained = " (each waits for all of them)" if left == "0" else ""
        yield _see(f"copies in flight after a wait: {left} groups{drained}")
    if unclear := sum(i.name in INDIRECT for i in code):
        yield _see(f"{unclear} indirect branches: loops may be missing")
    if others := sorted({i.name for i in code if i.kind.name == "other"}):
        yield _see(f"instructions that are not known here: {', '.join(others)}")


def _products(
    code: Sequence[Instruction], inside: Sequence[Instruction], found: Sequence[Loop]
) -> Iterable[Finding]:
    """Where the products run, and how their operands and results get there and away."""
    units = sorted({i.opcode for i in inside if i.kind.name == "tensor"})
    if not units:
        names = Counter(i.name for i in inside if i.kind.name != "padding")
        fma, working = names["FFMA"] + names["FFMA2"], sum(names.values())
        if fma >= _MANY_FMA * working and names["LDS"]:
            text = f"the products run on the FP32 pipes ({fma} FFMA of {working} instructions"
            yield _see(f"{text} in the main loop, no tensor core)", Lever.REWRITE)
        return
    yield _see(f"the products run on tensor cores ({', '.join(units)})")
    with_products = [
        loop for loop in found if any(code[i].kind.name == "tensor" for i in loop.body)
    ]
    for loop in with_products:
        if any(other.name.startswith(f"{loop.name}.") for other in with_products):
            continue  # its other stores are the way out, once per tile
        names = Counter(code[i].name for i in loop.body if code[i].kind.name != "padding")
        stored = names["STS"] + names["STSM"]
        where = f"loop {loop.name}"
        if names["LDG"] and stored and not names["LDGSTS"]:
            text = f"operands reach shared memory through registers (LDG, STS in {where})"
            yield _see(text, Lever.SMALL)
        elif stored and names["LDS"] + names["LDSM"] and not names["STG"] + names["UTMASTG"]:
            text = "results make a round trip through shared memory between the products"
            yield _see(f"{text} ({stored} stores in {where})", Lever.REWRITE)


def _see(text: str, lever: Lever | None = None) -> Finding:
    return Finding("structure", text, lever)
