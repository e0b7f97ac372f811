"""Options of commands, made from the fields of the dataclasses that they fill."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
from typer.models import OptionInfo

from tswift.cli.output import INTERRUPTED
from tswift.errors import InputError, Object, find_path, renaming
from tswift.options import (
    DRAFTING,
    Option,
    Values,
    changed,
    described,
    fields_of,
    options_of,
    type_of,
)

Config = TypeVar("Config")


@dataclass(frozen=True)
class Typed:
    """What stood on the command line."""

    values: Values  # by the fields' names, those that were typed
    command: Sequence[str]  # all words
    parameters: Sequence[Any]  # of the command, as typer has them

    def of(self, kind: type) -> Object:
        """Of these values, those of a dataclass's fields."""
        return fields_of(kind, self.values)

    def make(self, kind: type[Config]) -> Config:
        """A dataclass with what was typed of it; the rest are its defaults."""
        return changed(kind(), self.values)


def takes(
    *kinds: type,
    without: Sequence[str] = (),
    shown: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each option of some dataclasses;
    it is called with a :class:`Typed` first.

    Args:
        kinds: the dataclasses.
        without: fields that are no options of this command.
        shown: what the help says of a default, by field, where it is another here.
        texts: all of an option's help, by field, where it is another here.
    """
    carried = {
        each.name: (kind, each.default, option)
        for kind in kinds
        for each, option in options_of(kind)
    }
    for name in without:
        carried.pop(name, None)

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

        @wraps(function)
        def command(context: typer.Context, **values: object) -> None:
            # the usual option goes through no function's hands
            values = {
                name: _found(value, name) if isinstance(value, (Path, list)) else value
                for name, value in values.items()
            }
            typed = {
                name: _value(name, values[name], option)
                if option.parse is not None or option.repeat
                else values[name]
                for name, (_, _, option) in carried.items()
                if values[name] not in (None, [])
            }
            for each in context.command.params:
                if all({*way} & {*context.obj} for way in (each.opts, each.secondary_opts)):
                    raise InputError("is given both ways", each.name)
            for own_option in (_HELP_ALL, _THREADS):
                values.pop(own_option.name, None)
            others = {name: value for name, value in values.items() if name not in carried}
            try:
                function(Typed(typed, context.obj, context.command.params), **others)
            except KeyboardInterrupt as stop:  # which signal it was, typer does not ask
                raise typer.Exit(getattr(stop, "code", INTERRUPTED)) from None

        parameters = [
            inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        ]
        for name, (kind, default, option) in carried.items():
            hint = type_of(kind, name)
            # a second list is refused: it would silently take the place of the first
            several = option.repeat or get_origin(hint) in (tuple, Sequence)
            if option.parse is not None:
                hint = str
            elif several:
                hint = get_args(hint)[0]
            if several:
                hint = list[hint]  # type: ignore[valid-type]
            text = (shown or {}).get(name)
            text = (
                described(default, option) if text is None else f"{option.help} (default: {text})"
            )
            parameters.append(_parameter(name, hint, option, (texts or {}).get(name, text)))
        parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        if any(kind.__name__ == "ModelConfig" for kind in kinds):
            parameters.append(_THREADS)
        if any(option.rare or option.panel == DRAFTING for _, _, option in carried.values()):
            parameters.append(_HELP_ALL)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorated


def _value(name: str, value: Any, option: Option) -> object:
    if option.parse is None:
        return tuple(value) if option.repeat else value
    with renaming(name):
        if isinstance(value, list):
            value = ",".join(value if option.repeat else [once(name, value)])
        return option.parse(value)


def as_typed(error: InputError, parameters: Sequence[Any]) -> str:
    """An error's line, in which the parameters of a command are called as it calls them."""
    flags = {parameter.name: parameter.opts[0] for parameter in parameters}

    def flag(field: str) -> str:
        plain = field if " " in field or field.isupper() else f"--{field.replace('_', '-')}"
        return flags.get(field) or flags.get(f"{field}s") or plain

    message = re.sub(r"`(\w+)`", lambda match: flag(match[1]), error.message)
    return message if error.field is None else f"{flag(error.field)}: {message}"


def once(name: str, values: Sequence[str]) -> str:
    """The value of an option that was typed; InputError if it was typed more than once."""
    if len(values) > 1:
        raise InputError("is given twice", name)
    return values[0]


def _parameter(name: str, hint: Any, option: Option, text: str) -> inspect.Parameter:
    flag = option.flag or "--" + name.replace("_", "-")
    if hint is bool and option.flag is None and not option.switch:
        flag += f"/--no-{flag.removeprefix('--')}"
    declared = typer.Option(
        flag,
        *option.also,
        help=text,
        rich_help_panel=option.panel or None,
        show_default=False,
        metavar=option.metavar,
        hidden=option.rare or option.panel == DRAFTING,
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=Annotated[hint | None, declared], default=None)


def finding_paths(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, whose files and folders have the ``~`` that the shell left expanded,
    and can exist.
    """

    @wraps(command)
    def found(**values: object) -> None:
        command(**{name: _found(value, name) for name, value in values.items()})

    return found


def _found(value: object, name: str) -> object:
    if isinstance(value, list):
        return [_found(each, name) for each in value]
    return find_path(value, name) if isinstance(value, Path) else value


def option(panel: str, text: str, *names: str, rare: bool = False) -> OptionInfo:
    """An option of one command alone, whose help says its default."""
    return typer.Option(
        *names,
        help=text,
        rich_help_panel=panel or None,
        show_default=False,
        hidden=rare or panel == DRAFTING,
    )


def _say_all(context: typer.Context, wanted: bool) -> None:
    """Print the help with the options that ``--help`` leaves out."""
    if not wanted:
        return
    hidden = [each for each in context.command.params if getattr(each, "hidden", False)]
    for each in hidden:
        each.hidden = False  # type: ignore[attr-defined]
    typer.echo(context.get_help())
    for each in hidden:
        each.hidden = True  # type: ignore[attr-defined]
    raise typer.Exit()


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all",
            help="Show all options, those of drafting and rare ones too, and exit.",
            is_eager=True,
            callback=_say_all,
        ),
    ],
    default=False,
)


def _use_threads(wanted: int | None) -> None:
    """Have PyTorch and the C programs use so many threads."""
    if wanted is None:
        return
    os.environ["OMP_NUM_THREADS"] = str(wanted)
    if "torch" in sys.modules:  # which has looked there already
        import torch

        torch.set_num_threads(wanted)


_THREADS = inspect.Parameter(
    "threads",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        int | None,
        typer.Option(
            "--threads",
            "-t",
            help="Threads of the processor. (default: one for each core)",
            rich_help_panel="Model",
            show_default=False,
            hidden=True,
            min=1,
            max=1024,
            callback=_use_threads,
        ),
    ],
    default=None,
)
_OUTPUT = "Output"
Trees = Annotated[
    list[str] | None,
    option(
        DRAFTING,
        "auto or 1,2,2,2 for all methods, or METHOD=1,2,2,2; repeatable. (default: by device)",
        "--tree",
    ),
]
Json = Annotated[
    Path | None, option(_OUTPUT, "Write everything to a JSON file; - is stdout.", "--json")
]
Quiet = Annotated[bool, option(_OUTPUT, "Nothing on stderr but errors.", "--quiet")]
NoProgress = Annotated[
    bool, option(_OUTPUT, "No progress bar and no progress lines.", "--no-progress")
]
