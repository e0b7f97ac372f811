"""Work that stops where it wants a pass: decodes side by side, in passes that they share.

A step, a prefill and a whole job are generators: they yield an :class:`~tswift.forward.target.Ask`
and go on with what the pass came to, or None where other texts may have a turn. :func:`alone` does
one to its end; :func:`side_by_side` does several, and is the only loop over texts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from tswift.errors import InputError, SlowWarning
from tswift.forward.target import Ask, Target, Verified

R = TypeVar("R")
_USUAL = 8  # texts
Work = Generator[Ask | None, Verified | None, R]


def alone(work: Work[R]) -> R:
    """Do work whose passes nobody shares."""
    answer: Verified | BaseException | None = None
    while True:
        try:
            ask = _go_on(work, answer)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        answer = None if ask is None else _answers([ask])[0]


def texts_at_once(target: Target, asked: int | None = None) -> int:
    """How many texts share passes: as asked for, else as many as usually pay.

    Raises:
        InputError: texts cannot share passes of this model.
    """
    if asked is None:
        return _USUAL if target.apart is None else 1
    if asked > 1 and target.apart is not None:
        raise InputError(f"must be 1, as {target.apart}", "parallel")
    return asked


def side_by_side(more: Callable[[int], Work[None] | None], width: int = 1) -> None:
    """Do work of several texts, at most ``width`` at a time.

    In each round all that want a pass share passes. One at a time reads its prompt, a chunk in each
    round, and is begun when no other does: so it can have what those before it have read.

    Args:
        more: the next work, told how many are under way; None if there is none now, which is the
            end where none is.

    Raises:
        BaseException: the first error of any. What is under way goes on to its end before, unless
            it was an interrupt, or that nobody reads stdout, which goes to all.
    """
    asks: dict[Work[None], Ask | None] = {}
    failed: BaseException | None = None

    def go_on(work: Work[None], answer: Verified | BaseException | None) -> None:
        try:
            asks[work] = _go_on(work, answer)
        except StopIteration:
            asks.pop(work, None)
        except BaseException as error:
            asks.pop(work, None)
            note(error)

    def note(error: BaseException) -> None:
        nonlocal failed
        failed = error if isinstance(error, KeyboardInterrupt) else failed or error

    # a function, as a text is not to outlive its last round in a local name
    def a_round() -> bool:
        if isinstance(failed, KeyboardInterrupt | OSError):
            for work in [*asks]:
                go_on(work, failed)
        while len(asks) < width and not failed and None not in asks.values():
            if (new := more(len(asks))) is None:
                break
            go_on(new, None)
        if not asks:
            return False
        wanted = {work: ask for work, ask in asks.items() if ask is not None}
        reading = [work for work, ask in asks.items() if ask is None]
        for work, answer in zip(wanted, _answers([*wanted.values()]), strict=True):
            go_on(work, answer)
        for work in reading:
            go_on(work, None)
        return True

    goes_on = True
    while goes_on:
        try:
            goes_on = a_round()
        except BaseException as error:  # of ``more``, or an interrupt between two texts
            note(error)
    if failed is not None:
        raise failed


def _go_on(work: Work[R], answer: Verified | BaseException | None) -> Ask | None:
    """Let work go on with what its pass came to, or the error that there was."""
    return work.throw(answer) if isinstance(answer, BaseException) else work.send(answer)


def _answers(asks: Sequence[Ask]) -> Sequence[Verified | BaseException]:
    """What passes come to: one that all share, if they are of one model; where that fails, as one
    of wide trees may for lack of memory, each text's own.
    """
    if not asks:
        return ()
    if len({id(ask.target) for ask in asks}) == 1:
        try:
            return asks[0].target.verify(asks)
        except BaseException as error:  # no name is to hold it: its traceback has this frame
            if len(asks) == 1 or isinstance(error, KeyboardInterrupt):
                return [error] * len(asks)
            told = f"a pass that texts share failed ({error!r:.200}): each makes its own instead"
            warnings.warn(told, SlowWarning, stacklevel=2)
    return [answer for ask in asks for answer in _answers([ask])]
