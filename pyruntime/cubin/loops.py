"""Loops in machine code: from the branches to the natural loops and how they nest.

A back edge is a branch to a block that dominates its own (Aho, Lam, Sethi, Ullman, "Compilers",
section 9.6); a jump back out of a slow path that was moved to the kernel's end is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pyruntime.cubin.sass import INSTRUCTION_BYTES, JUMPS, Instruction

_ENDS = frozenset({"EXIT", "RET", "KILL", "BRX", "BRXU", "JMX", "JMXU"})
INDIRECT = frozenset({"BRX", "BRXU", "JMX", "JMXU"})  # where they lead is not in the instruction


@dataclass(frozen=True)
class Loop:
    """A loop. `name` is its place in the nest ("1.2"); `body` are indices of instructions."""

    name: str
    header: int
    body: frozenset[int]

    @property
    def depth(self) -> int:
        """1 for an outermost loop."""
        return self.name.count(".") + 1


def loops(instructions: Sequence[Instruction]) -> tuple[Loop, ...]:
    """The loops of a kernel by address, each before those inside it."""
    if not instructions:
        return ()
    starts, successors = blocks(instructions)
    order, before = _walk(successors, _roots(instructions, starts))
    dominators = _dominators(order, before)
    bodies: dict[int, set[int]] = {}
    for block in order:
        for header in successors[block]:
            if _dominates(dominators, header, block):
                bodies.setdefault(header, {header}).update(_body(header, block, before))
    return _nest(instructions, starts, bodies)


def blocks(
    instructions: Sequence[Instruction],
) -> tuple[list[int], dict[int, list[int]]]:
    """First instructions of the basic blocks, and block -> blocks that may follow."""
    count = len(instructions)
    leaders = {0}
    for i, instruction in enumerate(instructions):
        if instruction.target is not None or instruction.name in _ENDS:
            leaders |= {i + 1} if i + 1 < count else set()
            if (to := _index(instruction, count)) is not None:
                leaders.add(to)
    starts = sorted(leaders)
    block_of = {start: block for block, start in enumerate(starts)}
    successors: dict[int, list[int]] = {}
    for block, end in enumerate([*starts[1:], count]):
        last = instructions[end - 1]
        after = []
        to = _index(last, count)
        if to is not None and last.name in (*JUMPS, "WARPSYNC"):
            after.append(block_of[to])
        falls = last.conditional if last.name in _ENDS | JUMPS else True
        if falls and end < count:
            after.append(block_of[end])
        successors[block] = after
    return starts, successors


def _index(instruction: Instruction, count: int) -> int | None:
    if instruction.target is None or instruction.target % INSTRUCTION_BYTES:
        return None
    index = instruction.target // INSTRUCTION_BYTES
    return index if 0 <= index < count else None


def _roots(instructions: Sequence[Instruction], starts: list[int]) -> list[int]:
    """The block of the entry, and those of functions that are called."""
    called = {_index(i, len(instructions)) for i in instructions if i.name == "CALL"}
    return [block for block, start in enumerate(starts) if start == 0 or start in called]


def _walk(
    successors: dict[int, list[int]], roots: list[int]
) -> tuple[list[int], dict[int, list[int]]]:
    """Blocks that are reached in reverse postorder, and block -> those before it (-1: a root)."""
    before: dict[int, list[int]] = {root: [-1] for root in roots}
    seen: set[int] = set()
    post: list[int] = []
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        block, left = stack.pop()
        if left:
            post.append(block)
        elif block not in seen:
            seen.add(block)
            stack.append((block, True))
            for following in successors[block]:
                before.setdefault(following, []).append(block)
                stack.append((following, False))
    return post[::-1], before


def _dominators(order: list[int], before: dict[int, list[int]]) -> dict[int, int]:
    """block -> its immediate dominator (Cooper, Harvey, Kennedy 2001); -1 is above the roots."""
    rank = {block: i for i, block in enumerate(order)} | {-1: -1}
    above = {-1: -1}
    changed = True
    while changed:
        changed = False
        for block in order:
            known = [b for b in before[block] if b in above]
            new = known[0]
            for other in known[1:]:
                while new != other:
                    if rank[new] > rank[other]:
                        new = above[new]
                    else:
                        other = above[other]
            if above.get(block) != new:
                above[block] = new
                changed = True
    return above


def _dominates(above: dict[int, int], upper: int, block: int) -> bool:
    while block not in (upper, -1):
        block = above[block]
    return block == upper


def _body(header: int, end: int, before: dict[int, list[int]]) -> set[int]:
    """Blocks from which `end` is reached without passing `header`."""
    body, left = {header, end}, [end] if end != header else []
    while left:
        for block in before[left.pop()]:
            if block not in body:
                body.add(block)
                left.append(block)
    return body


def _nest(
    instructions: Sequence[Instruction], starts: list[int], bodies: dict[int, set[int]]
) -> tuple[Loop, ...]:
    ends = [*starts[1:], len(instructions)]
    outer = {
        header: min((h for h in bodies if h != header and header in bodies[h]),
                    key=lambda h: len(bodies[h]), default=None)
        for header in bodies
    }  # fmt: skip
    names: dict[int | None, str] = {None: ""}
    children: Counter[int | None] = Counter()
    for header in sorted(bodies, key=lambda h: (_depth(outer, h), h)):
        parent = outer[header]
        children[parent] += 1
        names[header] = f"{names[parent]}.{children[parent]}".lstrip(".")
    found = [
        Loop(
            name=names[header],
            header=instructions[starts[header]].offset,
            body=frozenset(
                i for block in bodies[header] for i in range(starts[block], ends[block])
            ),
        )
        for header in bodies
    ]
    return tuple(sorted(found, key=lambda loop: [int(n) for n in loop.name.split(".")]))


def _depth(outer: dict[int, int | None], header: int) -> int:
    parent = outer[header]
    return 0 if parent is None else 1 + _depth(outer, parent)
