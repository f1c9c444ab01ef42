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
    def see(text: str, lever: Lever | None = None) -> Finding:
        return Finding("structure", text, lever)

    here = Counter(i.kind.name for i in inside)
    names = Counter(i.name for i in inside if i.kind.name != "padding")
    looped = Counter(code[i].kind.name for i in frozenset().union(*(loop.body for loop in found)))
    working = sum(names.values())
    copied = names["LDG"] and names["STS"] and not here["async copy"]
    if here["tensor"]:
        units = ", ".join(sorted({i.opcode for i in inside if i.kind.name == "tensor"}))
        yield see(f"the products run on tensor cores ({units})")
        if copied:
            yield see("operands reach shared memory through registers (LDG, STS)", Lever.SMALL)
        elif names["STS"] and names["LDS"] + here["ldmatrix"]:
            yield see(
                f"results make a round trip through shared memory between the products "
                f"({names['STS']} STS in the main loop)",
                Lever.REWRITE,
            )
    elif names["FFMA"] + names["FFMA2"] >= _MANY_FMA * working and here["shared"]:
        yield see(
            f"the products run on the FP32 pipes ({names['FFMA'] + names['FFMA2']} FFMA of "
            f"{working} instructions in the main loop, no tensor core)",
            Lever.REWRITE,
        )
    if looped["local"]:
        yield see(f"{looped['local']} accesses to local memory inside loops", Lever.SMALL)
    if looped["fp64"]:
        yield see(f"{looped['fp64']} instructions in double precision inside loops", Lever.SMALL)
    waits = [i for i in inside if i.name == "DEPBAR" and i.opcode != "DEPBAR" and "," in i.operands]
    if waits and here["async copy"]:
        left = sorted({int(i.operands.rsplit(",", 1)[1], 16) for i in waits})
        drained = " (each waits for all of them)" if left == [0] else ""
        yield see(f"copies in flight after a wait: {', '.join(map(str, left))} groups{drained}")
    if unclear := sum(i.name in INDIRECT for i in code):
        yield see(f"{unclear} indirect branches: loops may be missing")
    if others := sorted({i.name for i in code if i.kind.name == "other"}):
        yield see(f"instructions that are not known here: {', '.join(others)}")
