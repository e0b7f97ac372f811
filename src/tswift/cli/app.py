"""The ``tswift`` command: its subcommands, and one line for whatever the user got wrong."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any

import typer

import tswift
from tswift.cli.bench import bench, compare
from tswift.cli.chat import chat
from tswift.cli.generate import generate
from tswift.cli.options import as_typed
from tswift.cli.output import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    OK,
    complain,
    open_closed,
    warnings_in_a_line,
)
from tswift.cli.serve import serve
from tswift.cli.tools import env, export_generate, heads, roofline, runs
from tswift.cli.train import train
from tswift.cli.verify import verify
from tswift.errors import TRACEBACK, DecodeError, InputError

# transformers imports torchao if it can, which need not fit PyTorch
_TALKATIVE = ("torchao", "torch.utils._pytree")
_OBJECTS = 50_000  # made between two looks for garbage: imports make millions that stay
_ONE_PROCESS = "bench measures its grid in one process; several take seeds or prompts of their own"
# options and commands that there were once, and what to tell somebody who types one
GONE = {
    "--draft-weights": "a copy of fewer bits hardly drafted faster (0.93 to 0.98 of a step's time "
    "on an H200); the text is the same without it",
    "--merge": _ONE_PROCESS,
    "--shard": _ONE_PROCESS,
    "train-draft": "python -m recipes.draft in tswift's repository trains a small model to draft, "
    "and --draft-model takes it",
}


def _in_one_line(command: Callable[..., None]) -> str:
    """What a command does, each paragraph without the breaks of the source's lines."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.getdoc(command) or "")


app = typer.Typer(add_completion=False, rich_markup_mode="rich")
for each in (
    generate,
    chat,
    serve,
    compare,
    runs,
    verify,
    bench,
    roofline,
    env,
    export_generate,
    train,
):
    app.command(help=_in_one_line(each))(each)
app.add_typer(heads, name="heads")


@app.callback(invoke_without_command=True)
def _tswift(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Generate long texts with language models,
    faster than plain decoding and token for token the same.
    """
    if version:
        typer.echo(f"tswift {tswift.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        _refuse_copies(context.invoked_subcommand)
        return
    raise typer.Exit()


def _several() -> bool:
    """Whether torchrun has started this process beside others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _following() -> bool:
    """Whether this is a rank other than 0."""
    return _several() and os.environ["RANK"] != "0"


def _refuse_copies(command: str) -> None:
    """Refuse a command that would do the same work once per rank."""
    if _several() and command != "train":
        raise InputError(
            f"tswift {command} works in one process, and no model is split over ranks any more; "
            "start it without torchrun"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``tswift`` and return its exit code.

    0 fine; 1 a regression, another text than plain decoding's, or writing failed; 2 bad input, said
    in one line on stderr; 130 interrupted, 143 and 129 stopped by SIGTERM and SIGHUP; 141 nobody
    reads stdout any more.
    """
    open_closed()
    gc.set_threshold(_OBJECTS, 50, 100)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with warnings_in_a_line(quiet=_following()):  # rank 0 says it
            code = _command().main(
                args=words, prog_name="tswift", standalone_mode=False, obj=["tswift", *words]
            )
    except InputError as error:
        command = _command()
        for word in words:
            command = getattr(command, "commands", {}).get(word, command)
        return _bad_input(as_typed(error, command.params))
    except DecodeError as error:
        return _failed(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except OSError as error:  # a full disk, as a rule
        return _failed(f"{error.filename or 'writing'}: {error.strerror or error}")
    except Exception as error:
        # Typer's own usage errors, known by their method: their class has moved between click and
        # typer
        if hasattr(error, "format_message"):
            return _bad_input(_usage(error.format_message()))
        if os.environ.get(TRACEBACK):
            raise
        if _ran_out(error):
            return _failed("no memory is left; a smaller --len, --nodes or --budget needs less")
        kind = type(error).__name__
        return _failed(
            f"unexpected {kind}: {error}; a mistake in tswift; {TRACEBACK}=1 shows where"
        )
    return code if isinstance(code, int) else OK


def _ran_out(error: Exception) -> bool:
    if "torch" not in sys.modules:  # it is not imported to say so
        return isinstance(error, MemoryError)
    from tswift.machine import ran_out

    return ran_out(error)


@cache
def _command() -> Any:
    """The command as typer builds it, which takes a while."""
    return typer.main.get_command(app)


def _usage(message: str) -> str:
    """Typer's line, or that of an option or a command that is gone."""
    unknown = re.match(r"No such (?:option|command)\W*?(-*\w[\w-]*)", message)
    name = "" if unknown is None else unknown[1]
    return f"{name} is gone: {GONE[name]}" if name in GONE else message


def _bad_input(message: str) -> int:
    if not _following():  # all of them find the same, and the first one says it
        complain(message)
    return BAD_INPUT


def _failed(message: str) -> int:
    complain(message)
    return FAILED
