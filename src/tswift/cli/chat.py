"""``tswift chat``: turns at a terminal."""

from __future__ import annotations

import signal
import sys
from functools import partial
from secrets import randbits
from typing import TYPE_CHECKING

import typer

from tswift.cli import options
from tswift.cli.output import complain, loading_notice, tell, write_stdout
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError
from tswift.jobs.config import RunConfig, TextConfig
from tswift.models.config import ModelConfig, refuse_missing_heads
from tswift.sampling.generation_config import PAPERS, SOURCES
from tswift.sampling.parameters import SamplingParams

if TYPE_CHECKING:
    from tswift.jobs.chat import Chat
    from tswift.jobs.job import Signals

_BYE, _CLEAR = "/bye", "/clear"
# not of a conversation
_OF_A_RUN = ("prompt", "prompt_text", "prefill", "chat", "out", "logprobs", "preset")
_MOST_TOKENS = 2048


@options.takes(
    ModelConfig,
    TextConfig,
    RunConfig,
    SamplingParams,
    DraftOptions,
    without=_OF_A_RUN,
    shown={"seed": "drawn", "system": "none", "stop_at_eos": "yes"},
    texts={"length": f"Most tokens of an answer. (default: {_MOST_TOKENS:,})"},
)
def chat(typed: options.Typed, quiet: options.Quiet = False) -> None:
    """Talk with a model: a line is what you say, and its answer is written as it is made.

    Ctrl-C ends an answer, Ctrl-D or /bye the conversation, and /clear begins another. Nothing is
    kept on the disk.
    """
    values = {"length": _MOST_TOKENS, "seed": randbits(31), **typed.values}
    config = RunConfig.of(**values, prompt_text="a line", chat=True)
    refuse_missing_heads(typed.values.get("heads"))
    _, system = config.read()

    say = partial(tell, quiet=quiet)
    with loading_notice(config.model.model, quiet):
        from tswift.jobs.chat import Chat
        from tswift.jobs.job import Signals
        from tswift.loading.model import load_model

        model = load_model(config.to_load())
        talk = Chat(model, config, system)
    source = SOURCES[talk.config.sampling_from or PAPERS]
    drawn = f"{talk.params} ({source}), seed {config.text.seed}"
    say(f"{config.method}, sampling: {drawn}; ends {model.ends}")
    for note in talk.config.idle(talk.params):
        say(note)
    say(f"Ctrl-C ends an answer, Ctrl-D or {_BYE} the conversation; {_CLEAR} begins another")
    with Signals() as signals:
        while (said := _read(signals)) is not None:
            if said.strip() == _CLEAR:
                talk = Chat(model, config, system)
            elif said.strip() and _answer(talk, said, signals):
                say(
                    f"{talk.stats.tokens:,} tokens, {talk.stats.tokens_per_second:,.1f} tokens/s; "
                    f"{talk.kept:,} tokens of what was said were in the cache"
                )
    if signals.number not in (0, signal.SIGINT):
        raise typer.Exit(128 + signals.number)


def _read(signals: Signals) -> str | None:
    """What the user says next; None if that is nothing more."""
    while signals.number in (0, signal.SIGINT):
        signals.patience = signals.number = 0  # a signal comes at once
        try:
            if sys.stdin.isatty() and sys.stderr.isatty():
                print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        except UnicodeDecodeError:
            complain("what was said is not UTF-8 text")
            continue
        return None if not line or line.strip() == _BYE else line.rstrip("\r\n")
    return None


def _answer(talk: Chat, said: str, signals: Signals) -> bool:
    """Write the answer, up to its end or a signal; returns whether there is one."""
    answered = True
    try:
        pieces = talk.answer(said)
        for piece in pieces:
            write_stdout(piece)
            signals.patience = 1  # from now on a step is finished first
            if signals.number:
                pieces.close()  # type: ignore[attr-defined]
                break
    except KeyboardInterrupt:
        pass
    except InputError as error:
        full = f"; {_CLEAR} begins another conversation" if error.field == "length" else ""
        complain(error.message + full)
        answered = False
    write_stdout("\n")
    return answered
