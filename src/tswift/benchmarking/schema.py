"""What is wrong with a file's content, by its JSON schema: the part of that language that ``bench.schema.json`` speaks.

Keys that the schema does not know are let through: a later tswift may have written them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_LARGEST = 1e300  # of a number; whatever is computed from it is still finite


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: _number(value) and math.isfinite(value),
    "integer": lambda value: _number(value) and isinstance(value, int),
}


@cache
def bench_schema() -> Mapping[str, Any]:
    """The schema of ``bench.json``."""
    return json.loads((Path(__file__).parent / "bench.schema.json").read_text(encoding="utf-8"))


def complaints(value: Any, schema: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """What a value is or lacks against its schema, one by one, in words that go behind a file's name.

    Args:
        value: as parsed from JSON.
        schema: what it should be.
        place: where it is in the file, as ``samples[1].points[0]``.
    """
    if not schema:
        return
    names = schema.get("type", list(_TYPES))
    names = [names] if isinstance(names, str) else names
    if not any(_TYPES[name](value) for name in names):
        yield f"is damaged ({place or 'it'} is no {' or '.join(names)})"
    elif ("const" in schema and value != schema["const"]) or ("enum" in schema and value not in schema["enum"]):
        yield f"is damaged ({place or 'it'} is {value!r:.40})"
    elif isinstance(value, dict):
        yield from _of_object(value, schema, place)
    elif isinstance(value, list):
        yield from _of_list(value, schema, place)
    elif isinstance(value, str):
        if not re.search(schema.get("pattern", ""), value):
            yield f"is damaged ({place} is {value!r:.40})"
    elif _number(value):
        low, below, high = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
        fine = (low is None or value >= low) and (below is None or value > below) and (high is None or value <= high)
        if not fine:
            yield f"is damaged ({place} is {value!r:.40})"


def _of_object(value: Mapping[str, Any], schema: Mapping[str, Any], place: str) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"lacks {name!r}" + (f" in {place}" if place else "")
    rest = schema.get("additionalProperties", {})
    for name, item in value.items():
        known = schema.get("properties", {}).get(name, rest or {})
        yield from complaints(item, known, f"{place}.{name}" if place else name)


def _of_list(value: list[Any], schema: Mapping[str, Any], place: str) -> Iterator[str]:
    first = schema.get("prefixItems", [])
    if len(value) < schema.get("minItems", 0) or (first and len(value) > len(first)):
        yield f"is damaged ({place} has {len(value)} items)"
        return
    for index, item in enumerate(value):
        yield from complaints(item, first[index] if first else schema.get("items", {}), f"{place}[{index}]")
