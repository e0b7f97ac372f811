"""What the code costs its reader: ``PYTHONPATH=src python -m tests.house``,
from the root of the repository.

It prints the size of the sources in tokens (without comments and docstrings), how often ``Any`` is
used (its imports are not counted), the longest functions, circles of imports, and how many
functions a parameter passes on its way from the command line to where it acts.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import sys
import tempfile
import threading
import tokenize
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType

import tswift
from tswift.cli import main
from tswift.tables import Table

ROOT = Path(tswift.__file__).parent

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_COMMAND = ["generate", "--method", "tokenswift", "--quiet"]
# values that nothing else has, by the option that gives them
PARAMETERS = {
    "--prompt-text": "The ship had lain three days becalmed,",
    "--len": "137",
    "--temperature": "0.7313",
    "--kv-dtype": "float16",
    "--method": "tokenswift",
}
CHECKERS = {(str(ROOT / "options.py"), name) for name in ("checked", "_fault")}
_LONGEST = 8  # functions that are listed


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The syntax of a file: its module, and all below."""
    return [*ast.walk(ast.parse(path.read_text()))]


def tokens_of(path: Path) -> int:
    """Tokens of a Python file, comments, layout and docstrings left out."""
    docstrings = {
        node.body[0].lineno
        for node in nodes_of(path)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and ast.get_docstring(node) is not None
    }
    found = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return sum(
        token.type not in _LAYOUT
        and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in found
    )


def functions_of(path: Path) -> Iterator[tuple[int, str]]:
    """The functions of a file: lines of code without the docstring, and where they are."""
    for node in nodes_of(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[ast.get_docstring(node) is not None :]
            lines = 0 if not body else (body[-1].end_lineno or 0) - body[0].lineno + 1
            # of Triton: parts of one are only moved into others that are inlined again
            kernel = any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
            name = f"{node.name}, a kernel" if kernel else node.name
            yield lines, f"{path.relative_to(ROOT)}:{node.lineno} {name}"


def uses_of_any(path: Path) -> int:
    """How often a file says ``Any``, other than to import it."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes_of(path))


def imports_of(path: Path) -> set[str]:
    """The modules of ours that a file imports, also later, or for types alone."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tswift"):
            module = (node.module or "").removeprefix("tswift").lstrip(".")
            names |= {module} | {f"{module}.{alias.name}".lstrip(".") for alias in node.names}
    return names


def circles() -> list[list[str]]:
    """Modules that import each other, directly or by others."""
    names = {
        path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py")
    }
    arrows = {name: imports_of(path) & {*names.values()} for path, name in names.items()}
    reached = {name: {name} for name in arrows}
    for name in arrows:
        waiting = [*arrows[name]]
        while waiting:
            other = waiting.pop()
            if other not in reached[name] or other == name:
                waiting += [] if other in reached[name] else arrows[other]
            reached[name].add(other)
    pairs = {
        tuple(sorted((a, b))) for a in arrows for b in reached[a] if a != b and a in reached[b]
    }
    return [list(pair) for pair in sorted(pairs)]


def asked(pattern: str, but: str = "-") -> int:
    """How often the source says something, but in files that begin so."""
    files = {path.relative_to(ROOT).as_posix(): path for path in ROOT.rglob("*.py")}
    return sum(
        len(re.findall(pattern, path.read_text()))
        for name, path in files.items()
        if not name.startswith(but)
    )


def stops(words: list[str]) -> dict[str, list[str]]:
    """By parameter, the functions of ours that a command calls with its value itself as an
    argument, or within a mapping.
    """
    names: dict[object, str] = {}
    for name, value in PARAMETERS.items():
        names[float(value) if value.replace(".", "").isdigit() else value] = name
    seen: dict[str, dict[str, None]] = {name: {} for name in PARAMETERS}

    def named(found) -> set[str]:
        if isinstance(found, dict):
            return set().union(*map(named, found.values()))
        return {names[found]} if isinstance(found, (str, int, float)) and found in names else set()

    def look(frame: FrameType, event: str, argument):
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(f"{ROOT}/")
            and code.co_name[0] not in "<"
        ):
            count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 12)
            if (code.co_filename, code.co_name) in CHECKERS:
                return  # which look at it, and hand it on to nobody
            for argument in code.co_varnames[:count]:
                for name in named(frame.f_locals.get(argument)):
                    place = f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}"
                    seen[name].setdefault(place)

    _watched(look, lambda: main(words))
    return {name: list(places) for name, places in seen.items()}


def calls(functions: Collection[Callable[..., object]], words: list[str]) -> dict[str, int]:
    """How often a command calls each of some functions of ours."""
    codes = {each.__code__: each.__qualname__ for each in functions}
    counted = dict.fromkeys(codes.values(), 0)

    def look(frame: FrameType, event: str, argument):
        if event == "call" and frame.f_code in codes:
            counted[codes[frame.f_code]] += 1

    _watched(look, lambda: main(words))
    return counted


def _watched(look: Callable[[FrameType, str, object], None], run: Callable[[], object]):
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def command_of(folder: str) -> list[str]:
    given = [
        word for name, value in PARAMETERS.items() if name != "--method" for word in (name, value)
    ]
    return [*_COMMAND, *given, "--out", f"{folder}/run"]


def _sizes() -> Table:
    rows = []
    for name, root in (("src", ROOT), ("tests", Path(__file__).parent)):
        files = sorted(root.rglob("*.py"))
        lines = sum(path.read_text().count("\n") for path in files)
        counts = [sum(map(tokens_of, files)), lines, len(files), sum(map(uses_of_any, files))]
        rows.append([name, *(f"{count:,}" for count in counts)])
    return Table("Size", ("", "tokens", "lines", "files", "uses of Any"), rows, left=1)


def _report() -> Iterator[str]:
    yield _sizes().plain()
    longest = sorted(
        (each for path in ROOT.rglob("*.py") for each in functions_of(path)), reverse=True
    )[:_LONGEST]
    yield Table(
        "Longest functions", ("lines", ""), [[str(lines), name] for lines, name in longest]
    ).plain()
    yield _listed("circles of imports", [" <-> ".join(pair) for pair in circles()])
    with tempfile.TemporaryDirectory() as folder, _without_text():
        passed = stops(command_of(folder))
    for name, places in passed.items():
        yield _listed(f"stops of {name}", places)


def _listed(title: str, names: list[str]) -> str:
    return f"{title}: {len(names)}" + "".join(f"\n  {name}" for name in names) + "\n"


def _without_text() -> contextlib.AbstractContextManager[object]:
    """The text that a command prints is no part of the report."""
    return contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO()))


if __name__ == "__main__":
    for part in _report():
        print(part, file=sys.stderr)
