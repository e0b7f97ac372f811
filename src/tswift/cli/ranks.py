"""Under torchrun: rank 0 runs the command as ever; the other ranks work in lockstep with it and print nothing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from tswift.cli.streams import BAD_INPUT, FAILED, OK
from tswift.errors import InputError

if TYPE_CHECKING:
    from tswift.distributed import Dist

_TOGETHER = ("generate", "train", "train-draft")
_STOPPING = ("SIGINT", "SIGTERM", "SIGHUP")


def several() -> bool:
    """Whether torchrun has started this process beside others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def following() -> bool:
    """Whether this is a rank other than 0."""
    return several() and os.environ["RANK"] != "0"


def refuse_copies(command: str) -> None:
    """Refuse a command that would do the same work once per rank."""
    if several() and command not in _TOGETHER:
        raise InputError(f"tswift {command} works in one process; start it without torchrun")


@contextmanager
def leading(device: str) -> Iterator[Dist]:
    """The ranks, connected, for rank 0; a single process without torchrun.

    Raises:
        InputError: they cannot have such devices.
        Gone: one of the others has died.
    """
    from tswift.distributed import ALONE, guard, join

    if not several():
        yield ALONE
        return
    ranks = join(device)
    try:
        with guard():
            yield ranks
    except BaseException:
        ranks.report()
        raise
    ranks.leave()


def follow(device: str) -> int:
    """Do what rank 0 does, and return an exit code. An error is printed by one rank: by rank 0, if it has the same."""
    from tswift.distributed import Gone, join

    noted: list[int] = []
    for number in (getattr(signal, name) for name in _STOPPING if hasattr(signal, name)):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, partial(_note, noted))
    ranks = None
    try:
        ranks = join(device)
        _work(ranks, lambda: bool(noted))
        ranks.leave()
    except Gone as error:
        if ranks is None:
            print(f"tswift: error: rank {os.environ['RANK']}: {error}", file=sys.stderr)
        return OK if ranks and ranks.left() else FAILED
    except Exception as error:
        # before they have connected, all ranks of a machine find the same
        reported = ranks.reported() if ranks else os.environ["LOCAL_RANK"] != "0"
        if not reported:
            from tswift.cli.app import as_typed

            kind = "" if isinstance(error, (InputError, RuntimeError)) else f"{type(error).__name__}: "
            told = as_typed(error, sys.argv[1:]) if isinstance(error, InputError) else str(error)
            message = " ".join(told.split())
            print(f"tswift: error: rank {os.environ['RANK']}: {kind}{message}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, InputError) else FAILED
    return OK


def _work(ranks: Dist, stopping: Callable[[], bool]) -> None:
    """Worker loop: load the same model and decode in lockstep with rank 0, with no output; ``stopping`` ends it."""
    from tswift import engine
    from tswift.distributed import guard
    from tswift.models import load

    model = load.load(ranks=ranks)  # rank 0 says what; so for begin
    with guard():
        generation = engine.begin(model, (), 0)
        generation.decoding.prefill()
    for _ in generation.steps():
        if stopping():
            break


def _note(noted: list[int], number: int, frame: FrameType | None) -> None:
    """torchrun passes a signal on to all ranks: rank 0 must not tear a step apart that they make together."""
    noted.append(number)
    signal.signal(number, signal.SIG_DFL)
