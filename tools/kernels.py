"""The kernels that a command is asked about, by name and architecture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from pyruntime.cubin.facts import KernelFacts
from pyruntime.cubin.installed import architecture_for
from pyruntime.cubin.limits import Limits
from pyruntime.cubin.records import kernels_of, read_all
from pyruntime.errors import CubinError, InputError


def kernels_named(
    pattern: str, paths: Iterable[Path]
) -> tuple[dict[str, dict[str, KernelFacts]], list[str]]:
    """name -> architecture -> kernel, and why other cubins were not read.

    Args:
        pattern: a name, or a pattern such as gemm_*.
        paths: files and folders; none given: the installed cubins.

    Raises:
        CubinError: no kernel is named so (the text lists some, near ones first, or says that it is
            a file), or see `read_all`.
    """
    cubins, unread = read_all(paths)
    found: dict[str, dict[str, KernelFacts]] = {}
    for _, kernel in kernels_of(cubins):
        if fnmatchcase(kernel.name, pattern):
            found.setdefault(kernel.name, {}).setdefault(kernel.arch, kernel)
    if not found:
        if Path(pattern).exists():
            raise CubinError(f"{pattern} is a file: name a kernel before it, or '*' for all")
        names = sorted({kernel.name for _, kernel in kernels_of(cubins)})
        raise CubinError(f"no kernel {pattern}{_near(pattern, names)}")
    return found, unread


def listed(names: Sequence[str], most: int) -> str:
    """The first `most` names, and whether there are more."""
    return ", ".join([*names[:most], *(["…"] if len(names) > most else [])])


def _near(pattern: str, names: list[str]) -> str:
    """The names that contain the text of a pattern come first."""
    text = pattern.strip("*")
    near = [name for name in names if text and text in name]
    there = f"there are: {listed([*near, *(n for n in names if n not in near)], 20) or 'none'}"
    if not near:
        return f"; {there}"
    start = "" if all(name.startswith(text) for name in near) else "*"
    return f", but {start}{text}* names {len(near)}; {there}"


def refuse_fixed(
    kernels: Iterable[KernelFacts], *, threads: int | None, dynamic: int | None
) -> None:
    """Refuses another size than that which every one of the kernels fixes. Raises InputError."""
    chosen = list(kernels)
    for option, given, fixed in (
        ("--threads", threads, [kernel.threads for kernel in chosen]),
        ("--dynamic", dynamic, [kernel.dynamic_shared for kernel in chosen]),
    ):
        if given is not None and not {None, given} & set(fixed):
            raise InputError(f"{option} {given}: {chosen[0].name} fixes it itself, at {fixed[0]:,}")


def variant_for(limits: Limits, variants: dict[str, KernelFacts]) -> tuple[KernelFacts, bool]:
    """The variant that a device would load, and whether it runs there (else it is the first)."""
    number = int(limits.arch[3:])
    names = [arch[3:] for arch in variants]
    best = architecture_for((number // 10, number % 10), names)
    return variants[f"sm_{best}" if best else next(iter(variants))], best is not None
