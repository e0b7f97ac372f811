"""Imports point down: from the command line to the attention, never back (DESIGN.md, "The house")."""

from __future__ import annotations

import ast
from pathlib import Path

import tswift

ROOT = Path(tswift.__file__).parent
# from the top; a package may import what stands beside it or below
ORDER = [
    {"__main__", "cli"},
    {"benchmarking", "training", "serving"},
    {"jobs", "custom_generate"},
    {"__init__"},
    {"engine"},
    {"drafting"},
    {"decoding"},
    {"models"},
    {"kv", "attention"},
    {"options", "distributed"},
    {"errors"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def imported(path: Path) -> set[str]:
    """The packages of ours that a module imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "tswift":
            modules = [f"tswift.{alias.name}" for alias in node.names]
        for name in modules:
            parts = name.split(".")
            if parts[0] == "tswift":
                known = len(parts) > 1 and parts[1] in LEVEL
                found.add(parts[1] if known else "__init__")
    return found


def test_every_package_has_its_place() -> None:
    names = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert names == LEVEL.keys()


def test_imports_point_down() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        wrong += [
            f"{path.relative_to(ROOT)} imports {name}"
            for name in imported(path)
            if LEVEL[name] < LEVEL[own] and name != "__init__"
        ]
    assert not wrong
