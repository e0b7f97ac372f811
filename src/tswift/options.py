"""Options: frozen dataclasses whose fields carry their range, help and default.

The command line, records and checks are made from the fields; nothing here imports torch, so that
``--help`` and bad values need not wait for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from numbers import Integral, Real
from operator import ge, gt, le, lt
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from tswift.errors import InputError, Object, did_you_mean

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
    off: object = None  # the value with which a filter does nothing
    # of what was typed, where it is more than a number, a name or a flag
    parse: Callable[[str], object] | None = None
    flag: str | None = None  # its name on the command line, where that is not the field's
    switch: bool = False  # a flag that nothing turns off
    metavar: str | None = None  # what ``--help`` calls its value
    repeat: bool = False  # it may be given several times; what is parsed is joined by commas
    also: tuple[str, ...] = ()  # other names on the command line
    # a training that is resumed may change it: it changes no weight, or only by rounding
    free: bool = False
    rare: bool = False  # only ``--help-all`` lists it
    # what else a value has to be, in words that follow ``must``, and a test of it
    rule: tuple[str, Callable[[Any], object]] | None = None


_ANY = Option("")


def option(default: Any, help: str, **carried: Any) -> Any:
    """A dataclass field that is an option; see :class:`Option` for what it can carry."""
    return field(default=default, metadata={_KEY: Option(help, **carried)})


def switch(help: str, **carried: Any) -> Any:
    """A dataclass field that is an option, off unless it is typed; it has no ``--no-``."""
    return option(False, help, shown="", switch=True, **carried)


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
    made = Object()
    for each in fields(options):  # type: ignore[arg-type]
        if _PART in each.metadata:
            made[each.name] = changed(getattr(options, each.name), values)
        elif _GIVEN in each.metadata:
            made[each.name] = getattr(options, each.name) | values.keys()
        elif _KEY in each.metadata and each.name in values:
            made[each.name] = values[each.name]
    return replace(options, **made)  # type: ignore[type-var]


def given_options(options: object, names: Collection[str] = ()) -> Object:
    """The options of a dataclass, by name, that are among some names or are not the default."""
    values = ((each, getattr(options, each.name)) for each, _ in options_of(options))
    return {
        each.name: value for each, value in values if each.name in names or value != each.default
    }


def options_of(kind: Any) -> Iterator[tuple[Field[object], Option]]:
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
def _hints(kind: Hashable) -> Object:
    return get_type_hints(kind, include_extras=True)


def type_of(kind: Hashable, name: str) -> object:
    """The type of a field without ``None``; several as a tuple."""
    return _plain(_hints(kind)[name])


def _plain(hint: object) -> object:
    several = get_origin(hint) in (Union, UnionType)
    plain = [part for part in (get_args(hint) if several else (hint,)) if part is not NoneType]
    return plain[0] if len(plain) == 1 else tuple(plain)


def check_options(options: Any) -> None:
    """Check the type, range and choices of every option of a dataclass;
    InputError names the first wrong one.
    """
    for each, carried in options_of(options):
        hint = _hints(options.__class__)[each.name]
        checked(hint, getattr(options, each.name), each.name, carried)


def checked(hint: object, value: Any, place: str, carried: Option = _ANY) -> Any:
    """A value, as JSON has it, as a field of this type has it:
    an object as a dataclass, some lists as tuples.

    An ``Annotated`` type carries an :class:`Option` of its own.

    Raises:
        InputError: its ``field`` is the place of the first value that is wrong, such as
            ``samples[1].seed`` in ``samples``.
    """
    origin = get_origin(hint)
    parts = get_args(hint)
    if is_dataclass(hint):
        return _made(hint, value, place)
    if origin is Annotated:
        carried = parts[1]
        value = checked(parts[0], value, place, carried)
        if carried.rule is not None and not carried.rule[1](value):
            raise InputError(f"must {carried.rule[0]}, got {value!r:.60}", place)
        return value
    if NoneType in parts:
        return None if value is None else checked(_plain(hint), value, place, carried)
    must = None
    if origin is dict:
        if isinstance(value, dict):
            items = value.items()
            return {name: checked(parts[1], one, f"{place}.{name}") for name, one in items}
        must = "be an object"
    elif origin in (list, tuple):
        several = isinstance(value, (list, tuple))
        each = origin is list or parts[-1] is Ellipsis
        kinds = parts[:1] * len(value) if several and each else parts
        if several and len(kinds) == len(value):
            made = zip(kinds, value, strict=True)
            # several values of an option are one to who typed them
            return origin(
                checked(*one, place if carried.help else f"{place}[{n}]", carried)
                for n, one in enumerate(made)
            )
        must = "be a list" if each else f"be a list of {len(parts)}"
    elif origin is Literal:
        must = None if repr(value) == repr(parts[0]) else f"be {parts[0]!r}"
    else:
        must = _fault(value, hint, carried)
    if must is not None:
        close = did_you_mean(value, carried.choices) if isinstance(value, str) else ""
        raise InputError(f"must {must}, got {value!r:.60}{close}", place)
    return value


def _made(kind: Any, content: object, place: str) -> Any:
    """A dataclass of what JSON has of it; its ``gather`` says what of that goes where."""
    if not isinstance(content, Mapping):
        raise InputError(f"must be an object, got {content!r:.60}", place)
    known = kind.gather(content) if hasattr(kind, "gather") else content
    hints = _hints(kind)
    if unknown := known.keys() - hints.keys():
        raise InputError("is no field", f"{place}.{min(unknown)}")
    made = {}
    for each in fields(kind):
        where = f"{place}.{each.name}"
        if each.name in known:
            own = where if each.name in content else place
            made[each.name] = checked(hints[each.name], known[each.name], own)
        elif each.default is each.default_factory is MISSING:
            raise InputError("is missing", where)
    try:
        return kind(**made)
    except ValueError as error:
        raise InputError(str(error), place) from None


def _fault(value: Any, expected: object, carried: Option) -> str | None:
    """What a value must be; None if it is right."""
    number = not isinstance(value, bool) and isinstance(
        value, Integral if expected is int else Real
    )
    if expected is bool:
        return None if type(value) is bool else "be yes or no"
    if expected in (int, float) and not number:
        return "be an integer" if expected is int else "be a number"
    if expected is float and isinstance(value, Integral) and abs(int(value)) >> 62:
        return "be a number below 2^62, or have a decimal point"
    if expected is str and not isinstance(value, str):
        return "be a text"
    if expected is Path and not isinstance(value, (str, Path)):
        return "be a path"
    if carried.choices and value not in carried.choices:
        return f"be one of {', '.join(carried.choices)}"
    if expected in (int, float) and not (isinstance(value, Integral) or math.isfinite(value)):
        return f"be {_range(value, carried) or 'a finite number'}"
    limits = ((getattr(carried, name), within) for name, (_, within) in _BOUNDS.items())
    fits = all(limit is None or within(value, limit) for limit, within in limits)
    return None if fits else f"be {_range(value, carried)}"


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


def of_json(values: Values) -> Object:
    """Options that were read from JSON, which has lists where options are tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


def values_of(options: object) -> Object:
    """A dataclass's options by name, those of its parts among them."""
    found = Object()
    for each in fields(options):  # type: ignore[arg-type]
        value = getattr(options, each.name)
        if _PART in each.metadata:
            found |= values_of(value)
        elif _KEY in each.metadata:
            found[each.name] = value
    return found


def refuse_changes(what: str, asked: Values, *known: Values, free: Collection[str] = ()) -> None:
    """No option is silently ignored: what goes on keeps its options, but for those that are free.

    Args:
        what: goes on.
        asked: of it now.
        known: what it was made with, as any of these say.
    """
    for name, value in asked.items():
        own, *others = (each.get(name) for each in known)
        if name not in free and _plain_json(value) not in map(_plain_json, (own, *others)):
            own = "none" if own is None else own
            raise InputError(f"{what} was made with {own}, got {value}; it keeps its options", name)


def _plain_json(value: object) -> object:
    return json.loads(json.dumps(value, default=str))


def fields_of(kind: type, values: Values) -> Object:
    """Of some values by name, those of a dataclass's options."""
    return {each.name: values[each.name] for each, _ in options_of(kind) if each.name in values}
