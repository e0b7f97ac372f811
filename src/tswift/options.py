"""Options: frozen dataclasses whose fields carry their range, help and default.

The command line, records and checks are made from the fields; nothing here imports torch, so that
``--help`` and bad values need not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from operator import ge, gt, le, lt
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tswift.errors import InputError, did_you_mean

DRAFTING = "Drafting"  # the panel that only ``--help-all`` lists
_KEY, _PART, _GIVEN = "option", "part", "given"  # in a field's metadata
T = TypeVar("T")
Values = Mapping[str, Any]  # of options, by their names
_BOUNDS = {
    "least": ("at least", ge),
    "above": ("above", gt),
    "most": ("at most", le),
    "below": ("below", lt),
}
_TECHNICAL = 1 << 31  # upper bounds from here on only keep numbers from overflowing


@dataclass(frozen=True)
class Option:
    """What an option's field carries."""

    help: str  # one sentence
    panel: str = ""  # where ``--help`` lists it
    # how the help says the default; None to say the default itself, empty to say nothing
    shown: str | None = None
    least: float | None = None  # bounds of a number, or of each in a tuple: >=, >, <=, <
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()  # the values that a name may have
    off: Any = None  # the value with which a filter does nothing
    # of what was typed, where it is more than a number, a name or a flag
    parse: Callable[[str], Any] | None = None
    flag: str | None = None  # its name on the command line, where that is not the field's
    metavar: str | None = None  # what ``--help`` calls its value
    repeat: bool = False  # it may be given several times; what is parsed is joined by commas
    also: tuple[str, ...] = ()  # other names on the command line
    # a training that is resumed may change it: it changes no weight, or only by rounding
    free: bool = False
    rare: bool = False  # only ``--help-all`` lists it


def option(default: Any, help: str, **carried: Any) -> Any:
    """A dataclass field that is an option; see :class:`Option` for what it can carry."""
    return field(default=default, metadata={_KEY: Option(help, **carried)})


def part(kind: type) -> Any:
    """A dataclass field that holds a dataclass of options."""
    return field(default_factory=kind, metadata={_PART: kind})


def given_names() -> Any:
    """A dataclass field for the names of the options that were given, wherever they are;
    the rest are defaults.
    """
    return field(default=frozenset(), compare=False, metadata={_GIVEN: True})


def changed(options: T, values: Values) -> T:
    """The same options with some changed by their names, those of its parts among them."""
    made: dict[str, object] = {}
    for each in fields(options):  # type: ignore[arg-type]
        if _PART in each.metadata:
            made[each.name] = changed(getattr(options, each.name), values)
        elif _GIVEN in each.metadata:
            made[each.name] = getattr(options, each.name) | values.keys()
        elif _KEY in each.metadata and each.name in values:
            made[each.name] = values[each.name]
    return replace(options, **made)  # type: ignore[type-var]


def given_options(options: object, names: Collection[str] = ()) -> dict[str, object]:
    """The options of a dataclass, by name, that are among some names or are not the default."""
    values = ((each, getattr(options, each.name)) for each, _ in options_of(options))
    return {
        each.name: value for each, value in values if each.name in names or value != each.default
    }


def options_of(kind: Any) -> Iterator[tuple[Field[Any], Option]]:
    """The fields of a dataclass that are options, in order."""
    for each in fields(kind):
        if _KEY in each.metadata:
            yield each, each.metadata[_KEY]


def described(default: object, carried: Option) -> str:
    """An option's help with its default at the end."""
    shown = carried.shown
    if shown is None and default not in (None, MISSING):
        shown = (
            {True: "yes", False: "no"}[default] if isinstance(default, bool) else _number(default)
        )
    return f"{carried.help} (default: {shown})" if shown else carried.help


@cache
def type_of(kind: Hashable, name: str) -> tuple[Any, bool]:
    """The type of a field without ``None``, and whether ``None`` is a value of it."""
    hint = get_type_hints(kind)[name]
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain = [part for part in parts if part is not NoneType]
    return (plain[0] if len(plain) == 1 else tuple(plain)), NoneType in parts


def check_options(options: Any) -> None:
    """Check the type, range and choices of every option of a dataclass;
    InputError names the first wrong one.
    """
    for each, carried in options_of(options):
        value = getattr(options, each.name)
        kind: Any = type(options)
        expected, optional = type_of(kind, each.name)
        if value is None and optional:
            continue
        several = get_origin(expected) is tuple
        if several and not isinstance(value, (tuple, list)):  # a record of JSON has lists
            raise InputError(f"must be a list, got {value!r:.60}", each.name)
        values = tuple(value) if several else (value,)
        fault = _fault(values, get_args(expected)[0] if several else expected, carried)
        if fault is not None:
            raise InputError(fault, each.name)


def _fault(values: Sequence[Any], expected: type, carried: Option) -> str | None:
    """What the first wrong one of an option's values must be; None if all are right."""
    for value in values:
        number = isinstance(value, Integral if expected is int else Real) and not isinstance(
            value, bool
        )
        if expected is bool:
            must = None if type(value) is bool else "be yes or no"
        elif expected in (int, float) and not number:
            must = "be an integer" if expected is int else "be a number"
        elif expected is float and isinstance(value, Integral) and abs(int(value)) >> 62:
            must = "be a number below 2^62, or have a decimal point"
        elif expected is str and not isinstance(value, str):
            must = "be a text"
        elif expected is Path and not isinstance(value, (str, Path)):
            must = "be a path"
        elif carried.choices and value not in carried.choices:
            must = f"be one of {', '.join(carried.choices)}"
        elif expected in (int, float) and not (isinstance(value, Integral) or math.isfinite(value)):
            must = f"be {_range(value, carried) or 'a finite number'}"
        else:
            limits = ((getattr(carried, name), within) for name, (_, within) in _BOUNDS.items())
            fits = all(limit is None or within(value, limit) for limit, within in limits)
            must = None if fits else f"be {_range(value, carried)}"
        if must is not None:
            close = did_you_mean(value, carried.choices) if isinstance(value, str) else ""
            return f"must {must}, got {value!r:.60}{close}"
    return None


def _range(value: object, carried: Option) -> str:
    bounds = {
        name: getattr(carried, name) for name in _BOUNDS if getattr(carried, name) is not None
    }
    if (most := bounds.get("most", 0)) >= _TECHNICAL:  # nobody wants to read it but who went beyond
        if value > most:
            return f"at most {_number(most)}"
        del bounds["most"]
    if bounds.keys() == {"least", "most"}:
        return f"between {_number(bounds['least'])} and {_number(bounds['most'])}"
    return " and ".join(f"{_BOUNDS[name][0]} {_number(bound)}" for name, bound in bounds.items())


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def parse_numbers(text: str) -> tuple[int, ...]:
    """The numbers of ``1000,20_000``; InputError if it is no such thing."""
    try:
        return tuple(int(word.replace("_", "")) for word in text.split(","))
    except ValueError:
        raise InputError(f"wants numbers and commas, got {text!r}") from None


def parse_shard(words: str) -> tuple[int, int]:
    """``I/N``: the Ith of N shards, from 1."""
    index, _, count = words.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 0 < int(index) <= int(count)):
        raise InputError(f"wants I/N, the Ith of N shards, got {words!r:.40}", "shard")
    return int(index), int(count)


def of_json(values: Values) -> dict[str, Any]:
    """Options that were read from JSON, which has lists where options are tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


def fields_of(kind: type, values: Values) -> dict[str, Any]:
    """Of some values by name, those of a dataclass's options."""
    return {each.name: values[each.name] for each, _ in options_of(kind) if each.name in values}
