"""Under torchrun: the first rank does as ever, the others work along and are silent."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from tswift.cli.streams import BAD_INPUT, FAILED, OK
from tswift.errors import InputError

if TYPE_CHECKING:
    from tswift.models.ranks import Ranks

_TOGETHER = ("generate", "train", "train-draft")
_STOPPING = ("SIGINT", "SIGTERM", "SIGHUP")


def several() -> bool:
    """Whether torchrun has started this process beside others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def following() -> bool:
    """Whether this is one of the others."""
    return several() and os.environ["RANK"] != "0"


def refuse_copies(command: str) -> None:
    """Refuse a command that would do the same as many times as there are ranks.

    Raises:
        InputError: it is such a one.
    """
    if several() and command not in _TOGETHER:
        raise InputError(f"tswift {command} works in one process; start it without torchrun")


@contextmanager
def leading(device: str) -> Iterator[Ranks]:
    """The ranks that this process is the first of; it is alone without torchrun.

    Raises:
        InputError: they cannot have such devices.
        Gone: one of the others is not there any more.
    """
    from tswift.models.ranks import ALONE, join

    if not several():
        yield ALONE
        return
    ranks = join(device)
    try:
        with ranks.together():
            yield ranks
    except BaseException:
        ranks.speak()
        raise
    ranks.leave()


def follow(device: str) -> int:
    """Do what the first rank does, and return an exit code.

    What goes wrong is said by one rank: by the first, if it has found the same.
    """
    from tswift.jobs import following
    from tswift.models.ranks import Gone, join

    noted: list[int] = []
    for number in (getattr(signal, name) for name in _STOPPING if hasattr(signal, name)):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, partial(_note, noted))
    ranks = None
    try:
        ranks = join(device)
        following.follow(ranks, lambda: bool(noted))
        ranks.leave()
    except Gone:
        return OK if ranks and ranks.left() else FAILED
    except Exception as error:
        # before they have joined, all ranks of a machine find the same
        spoken = ranks.spoken() if ranks else os.environ["LOCAL_RANK"] != "0"
        if not spoken:
            kind = "" if isinstance(error, (InputError, RuntimeError)) else f"{type(error).__name__}: "
            message = " ".join(str(error).split())
            print(f"tswift: error: rank {os.environ['RANK']}: {kind}{message}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, InputError) else FAILED
    return OK


def _note(noted: list[int], number: int, frame: FrameType | None) -> None:
    """torchrun passes a signal on to all ranks: the first one must not tear a step apart that they make together."""
    noted.append(number)
    signal.signal(number, signal.SIG_DFL)
