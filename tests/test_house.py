"""What the code costs its reader does not grow unseen: see tests/house.py."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

from tests.helpers import needs_program
from tests.house import (
    ROOT,
    asked,
    calls,
    circles,
    command_of,
    nodes_of,
    stops,
    tokens_of,
    uses_of_any,
)
from tswift import remembered
from tswift.cli import main
from tswift.drafting.methods import resolve
from tswift.forward.cpu.program import PassProgram
from tswift.models.hashes import weights_hash

MOST = 6  # functions that hold a parameter on its way
# What may only become fewer: where the device is asked, and how passes are made; tokens of the
# sources, and what they say of types with ``Any``. What has to raise one of these says in its issue
# and its commit what that buys.
DEVICES, RUNNERS = 45, 13
TOKENS, ANYS = 259_952, 128


def test_modules_import_each_other_in_no_circle():
    assert circles() == []


def test_what_is_decided_once_is_asked_seldom():
    assert asked(r"device\.type\b") <= DEVICES
    assert asked(r"target\.replays\b|\brunner\.", but="forward/") <= RUNNERS


def test_the_sources_grow_no_more():
    paths = [*ROOT.rglob("*.py")]
    assert sum(map(tokens_of, paths)) <= TOKENS
    assert sum(map(uses_of_any, paths)) <= ANYS


@needs_program
def test_what_a_command_decides_it_decides_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(remembered, "cache_folder", lambda: tmp_path)
    once = (resolve, weights_hash, PassProgram.__init__)
    command = f"generate --len 5 --prompt-text a --quiet --out {tmp_path}".split()
    main([*command[:-1], f"{tmp_path}/first"])  # whose checks are remembered
    assert calls(once, [*command[:-1], f"{tmp_path}/second"]) == dict.fromkeys(
        [each.__qualname__ for each in once], 1
    )
    capsys.readouterr()  # the text


@pytest.mark.slow
def test_a_parameter_has_a_short_way(tmp_path, capsys):
    passed = stops(command_of(str(tmp_path)))
    capsys.readouterr()  # the text
    for name, places in passed.items():
        assert 0 < len(places) <= MOST, (name, places)


# -------------------------------------------------------------------------------------------------
# Imports point down: from the command line to the attention, never back


# from the top; a package may import what stands beside it or below
ORDER = [
    {"__main__", "cli"},
    {"benchmarking", "training", "serving"},
    {"jobs", "custom_generate"},
    {"__init__"},
    {"engine"},
    {"memory"},
    {"drafting"},
    {"decoding"},
    {"loading"},
    {"speculators"},
    {"forward"},
    {"models", "sampling"},
    {"caches", "attention"},
    {"checking"},
    {"options", "tables", "native_build", "files", "machine", "remembered"},
    {"errors", "stages"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def imported(path: Path) -> set[str]:
    """The packages of ours that a module imports, also within functions, but for types alone."""
    found = set()
    for_types = {
        below
        for node in nodes_of(path)[0].body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for below in ast.walk(node)
    }
    for node in nodes_of(path):
        if node in for_types:
            continue
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


def test_every_package_has_its_place():
    names = {path.stem for path in ROOT.glob("*.py")} | {
        path.parent.name for path in ROOT.glob("*/__init__.py")
    }
    assert names == LEVEL.keys()


def test_every_room_says_what_it_is_for():
    for path in ROOT.rglob("__init__.py"):
        said = ast.get_docstring(nodes_of(path)[0]) or ""
        assert "\n\n" in said, f"{path.relative_to(ROOT)} has no paragraph"
        inside = {module.stem for module in path.parent.glob("*.py")}
        assert path.parent == ROOT or inside & set(re.findall(r"\w+", said)), path


def test_imports_point_down():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        wrong += [
            f"{path.relative_to(ROOT)} imports {name}"
            for name in imported(path)
            if LEVEL[name] < LEVEL[own] and name != "__init__"
        ]
    assert not wrong


def outside(path: Path) -> set[str]:
    """The packages of others that a module imports, also within functions."""
    nodes = nodes_of(path)
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "tswift", ""}


def test_what_is_imported_is_declared():
    declared = (Path(__file__).parents[1] / "pyproject.toml").read_text().replace("-", "_")
    imports = set().union(*map(outside, ROOT.rglob("*.py")))
    assert {name for name in imports if not re.search(rf'"{name}\b', declared)} == set()


def test_references_in_docstrings_lead_somewhere():
    wrong = []
    for path in ROOT.rglob("*.py"):
        for name in re.findall(
            r":(?:class|meth|func|data|mod|attr):`~?(tswift\.[\w.]+)`", path.read_text()
        ):
            module = name
            parts = list[str]()
            while not (ROOT.parent / f"{module.replace('.', '/')}.py").exists() and "." in module:
                module, _, last = module.rpartition(".")
                parts.insert(0, last)
            found: object = importlib.import_module(module)
            for part in parts:
                found = getattr(found, part, None) or getattr(
                    found, "__dataclass_fields__", {}
                ).get(part)
            if found is None:
                wrong.append(f"{path.name}: {name}")
    assert not wrong


def test_no_kernel_is_chosen_by_the_clock():
    """Another process could have others then, whose sums have another order: a text that is resumed
    or verified would have other bits.
    """
    choosing = re.compile(r"torch\.compile|_inductor|autotune|cudnn\.benchmark")
    assert not [path.name for path in ROOT.rglob("*.py") if choosing.search(path.read_text())]
