"""Two builds compared kernel by kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pyruntime.cubin.facts import CubinFacts, KernelFacts
from pyruntime.cubin.records import kernel_record, kernels_of

# Fields of `kernel_record` that are compared.
FIELDS = (
    "arch", "registers", "static_shared", "dynamic_shared", "stack", "spill_stores", "spill_loads",
    "spill_shared", "barriers", "constant_bytes", "param_bytes", "threads", "max_threads",
    "register_cap", "cluster", "code_bytes", "blocks",
)  # fmt: skip

Figure = int | str | list[int] | None


@dataclass(frozen=True)
class Change:
    """A kernel that both builds have. `fields`: name -> (before, after), where they differ."""

    before: KernelFacts
    after: KernelFacts
    fields: dict[str, tuple[Figure, Figure]]

    @property
    def name(self) -> str:
        """Its name."""
        return self.after.name

    @property
    def arch(self) -> str:
        """Its architecture, the later one if they differ."""
        return self.after.arch

    @property
    def same_code(self) -> bool:
        """Whether the machine code is equal, byte by byte."""
        return self.before.code == self.after.code


@dataclass(frozen=True)
class Difference:
    """Kernels by "name (arch)"; where each build has one architecture only, by name."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    common: tuple[Change, ...]

    @property
    def changed(self) -> tuple[Change, ...]:
        """Kernels whose code or figures differ."""
        return tuple(c for c in self.common if c.fields or not c.same_code)


def compare(before: Iterable[CubinFacts], after: Iterable[CubinFacts]) -> Difference:
    """What changed from one build to another."""
    old, new = list(before), list(after)
    by_name = len({c.arch for c in old}) == 1 == len({c.arch for c in new})
    a, b = _index(old, by_name), _index(new, by_name)
    return Difference(
        added=tuple(k for k in b if k not in a),
        removed=tuple(k for k in a if k not in b),
        common=tuple(_change(a[k], b[k]) for k in a if k in b),
    )


def _index(cubins: list[CubinFacts], by_name: bool) -> dict[str, KernelFacts]:
    seen: Counter[str] = Counter()
    found = {}
    for _, kernel in kernels_of(cubins):
        key = kernel.name if by_name else f"{kernel.name} ({kernel.arch})"
        seen[key] += 1  # files of one program may each have a static kernel of the same name
        found[key if seen[key] == 1 else f"{key} #{seen[key]}"] = kernel
    return found


def _change(before: KernelFacts, after: KernelFacts) -> Change:
    a, b = kernel_record(before), kernel_record(after)
    return Change(before, after, {f: (a[f], b[f]) for f in FIELDS if a[f] != b[f]})
