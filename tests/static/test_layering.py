"""Imports point one way only, and each rule that has one home has no second."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# layer -> layers of this package that its modules may import, besides itself.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "schema": {"errors"},
    "turns": {"errors"},
    "cubin": {"errors", "schema"},
    "gguf": {"errors"},
    "text": {"errors", "gguf"},
    "hub": {"errors"},
    "driver": {"errors", "cubin"},
    "ops": {"errors", "cubin", "driver"},
    "model": {"errors", "turns", "gguf", "driver", "ops"},
    "reference": {"errors", "turns", "gguf", "model"},
    "options": {"errors", "driver", "model", "ops"},
    "engine": {"options", "errors", "turns", "gguf", "driver", "model", "reference", "text", "hub"},
    "measure": {"errors", "schema", "cubin", "driver", "ops", "model", "hub", "engine"},
    "clients": {"errors", "text", "engine"},
    "commands": {
        "clients",
        "options",
        "errors",
        "cubin",
        "gguf",
        "driver",
        "model",
        "text",
        "hub",
        "engine",
        "",
    },
    "serve": {"errors", "model", "engine", "measure", "commands", "tools"},
    "batch": {"errors", "schema", "gguf", "hub", "driver", "model", "engine", "commands", ""},
    "__main__": {"cli", ""},
    "cli": {"errors", "commands", "tools", "serve", "batch", ""},
    "tools": {"errors", "cubin", "gguf", "driver", "hub", "engine", "measure", "commands", ""},
    "": {"errors", "engine", "model"},
}


def layer_of(module: str) -> str:
    """`pyruntime.gguf.reader` -> "gguf"; the package itself is ""."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "pyruntime":
                found |= {f"pyruntime.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def sources() -> list[tuple[Path, str]]:
    package = [(p, layer_of(_module(p))) for p in sorted((ROOT / "pyruntime").rglob("*.py"))]
    return package + [(p, "tools") for p in sorted((ROOT / "tools").glob("*.py"))]


def _module(path: Path) -> str:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return module.removesuffix(".__init__")


@pytest.mark.parametrize(("path", "layer"), sources(), ids=lambda v: str(v).split("/")[-1])
def test_arrows(path: Path, layer: str) -> None:
    names = {m for m in imports(path) if m.split(".")[0] == "pyruntime"}
    known = {"__version__", "Engine", "Exported", "Result", "PyruntimeError"}
    used = {layer_of(m) for m in names if layer_of(m) not in known}
    assert used <= ALLOWED[layer] | {layer, ""}


def test_only_the_api_imports_the_bindings() -> None:
    users = {
        str(path.relative_to(ROOT))
        for path, _ in sources()
        if any(m.split(".")[0] == "cuda" and m != "cuda.pathfinder" for m in imports(path))
    }
    assert users == {"pyruntime/driver/api.py"}


def test_only_one_place_names_dynamic_shared_memory() -> None:
    pattern = re.compile(r"extern\s+__shared__|(?<!extern )__shared__\s+\w")
    users = {
        path.name
        for path in (ROOT / "cuda").rglob("*.cu*")
        if pattern.search(re.sub(r"//.*", "", path.read_text()))
    }
    assert users == {"spec.cuh"}


def test_cuda_includes_point_down() -> None:
    order = ["core", "quant", "kernels"]
    for path in (ROOT / "cuda").rglob("*.cu*"):
        own = order.index(path.relative_to(ROOT / "cuda").parts[0])
        for target in re.findall(r'#include "(?:\.\./)+(\w+)/', path.read_text()):
            assert order.index(target) <= own, f"{path.name} includes {target}"
