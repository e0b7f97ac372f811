"""One method for everybody: of several whole methods (arms of a bandit), plain decoding among them,
the fastest.

What drafts fastest depends on how long the text is, how much it repeats itself, and on the machine.
The text is the same whoever drafts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from tswift.decoding.drafter import Context, DeviceDraft, Drafter, DraftTree
from tswift.forward.passes import PassCosts

if TYPE_CHECKING:
    from tswift.decoding.device_step import DeviceState

_ALLOWANCE = 4.0  # plain steps' time that trials may lose to the best arm at first
_SHARE = 0.015  # of the time that has passed, which they may lose after that
# counted steps of a trial: of an arm that is slower than so much of the best, and of others
_LEAST, _MOST = 3, 12
_SLOWER = 0.85
_LOSS = 4.0  # plain steps' time lost, after which a trial ends at once
_WAIT = 64.0  # plain steps' time until an arm as fast as the best is tried again
_PATIENCE = 2.0  # one that is half as fast waits 2 to this power times as long
_LONGEST = 2048.0  # after which any is
_EVERY = 4  # steps after which it is asked whether another arm is due
_MEMORY = 1 / 96  # of what is known of an arm, forgotten in each of its steps
# times its usual seconds that a step counts for at most: the process may have been stopped
# meanwhile
_FAR = 8.0


class Arm:
    """What is known of an arm's speed."""

    def __init__(self) -> None:
        # how many it took, and when the last one, in seconds of the decode
        self.steps, self.last = 0, 0.0
        self._late = [0.0, 0.0, 0.0]  # steps, tokens and seconds of late

    @property
    def rate(self) -> float:
        """Tokens per second of late; 0 before the second step."""
        return self._late[1] / self._late[2] if self._late[0] else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step of late; 0 before the second one."""
        return self._late[2] / self._late[0] if self._late[0] else 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """It took a step.

        The first does not count: what is used for the first time takes longer.
        """
        self.steps += 1
        if self.steps > 1:
            self._late = [
                was + (new - _MEMORY * was)
                for was, new in zip(self._late, (1, tokens, seconds), strict=True)
            ]

    def age(self) -> None:
        """What is known of it is old: let it count for no more than a short trial."""
        if self._late[0] > _LEAST:
            self._late = [_LEAST / self._late[0] * was for was in self._late]


class Bandit:
    """Chooses an arm for every step: the fastest,
    and now and then another one for a trial of a few steps.

    What trials lose to the fastest arm is accounted for: none begins once they have lost an
    allowance and a share of all the time. And the slower an arm was, the longer it waits.

    Args:
        arms: how many; the first is plain decoding, with which it begins.

    Attributes:
        chosen: the arm that takes the next step.
    """

    def __init__(self, arms: int) -> None:
        self.arms = [Arm() for _ in range(arms)]
        self.chosen = 0
        self._best = 0
        self._trial = 0  # counted steps that are left of a trial
        self._steps = 0
        self._now = 0.0  # seconds of the decode
        # seconds that trials may lose yet, and that this one has lost
        self._allowed = self._lost = 0.0

    def learn(self, tokens: int, seconds: float, overhead: float = 0.0) -> None:
        """The chosen arm took a step; choose another one, if that is due.

        ``overhead`` is what it took beforehand to catch up with the text, which is no part of its
        pace.
        """
        arm, plain = self.arms[self.chosen], self.arms[0]
        usual = arm.step_s or max(other.step_s for other in self.arms)
        seconds = max(min(seconds, _FAR * usual) if usual else seconds, 1e-9)
        arm.learn(tokens, seconds)
        self._now += seconds + overhead
        arm.last = self._now
        self._steps += 1
        if self._trial:
            lost = seconds - tokens / self.arms[self._best].rate
            if arm.steps == 1:
                # what is used for the first time takes long once, and others are not to wait for
                # that
                lost = min(lost, plain.step_s)
            else:
                self._allowed -= overhead
            self._continue(arm, lost)
            return
        self._allowed = min(
            self._allowed + _SHARE * (seconds + overhead), 4 * _ALLOWANCE * plain.step_s
        )
        if self._steps == 2:
            self._allowed = _ALLOWANCE * plain.step_s
        if self._steps % _EVERY == 0 or self._steps == 2:
            self._settle()

    def _continue(self, arm: Arm, lost: float) -> None:
        """Account for a step of a trial, and end it where that is due."""
        self._lost += lost
        self._allowed -= lost
        self._trial -= arm.steps > 1
        tried = _MOST - self._trial
        slower = arm.rate < _SLOWER * self.arms[self._best].rate
        if (
            tried == _MOST
            or (tried >= _LEAST and slower)
            or (tried > 1 and self._lost > _LOSS * self.arms[0].step_s)
        ):
            self._trial = 0
            self._settle()

    def _settle(self) -> None:
        """Choose the fastest arm, or a trial of one that has waited long enough and may lose as
        much as it would.
        """
        self._best = max(range(len(self.arms)), key=lambda index: self.arms[index].rate)
        best = self.arms[self._best]
        plain = self.arms[0].step_s
        longest = 1.0
        self.chosen = self._best
        for index, arm in enumerate(self.arms):
            if not arm.rate:
                loss = _LOSS * plain
                waited = inf
            else:
                ratio = best.rate / arm.rate
                loss = min(_LEAST * arm.step_s * (1 - 1 / ratio), _LOSS * plain)
                waited = (self._now - arm.last) / (min(_WAIT * ratio**_PATIENCE, _LONGEST) * plain)
            if index != self._best and waited > longest and self._allowed >= loss:
                self.chosen, longest = index, waited
        if self.chosen != self._best:
            self.arms[self.chosen].age()
            self._trial, self._lost = _MOST, 0.0


@dataclass
class AdaptiveDrafter(Drafter):
    """Drafts by the arm that a bandit chooses.

    The others stand aside: each catches up with the text when chosen.

    Attributes:
        arms: drafters by name, the first of which drafts nothing.
        costs: by which seconds are told, so that choices are the same everywhere; None for those of
            the clock.
    """

    arms: Mapping[str, Drafter] = field(default_factory=dict)
    costs: PassCosts | None = None

    def __post_init__(self) -> None:
        self._names, self._drafters = list(self.arms), list(self.arms.values())
        self.bandit = Bandit(len(self.arms))
        self._drafted: int | None = None  # the arm that drafted last
        self._length = 0  # of the text then
        self._seconds = self._started = self._overhead = 0.0
        # the arm that drafts on the device, and nodes of its tree
        self._on_device: Drafter | None = None
        self._nodes = 0

    def on_device(self, state: DeviceState) -> DeviceDraft | None:
        """As :meth:`Drafter.on_device`: that of the first arm that has one."""
        for drafter in self._drafters:
            if (draft := drafter.on_device(state)) is not None:
                self._on_device = drafter
                self._nodes = len(draft.sources)
                return draft
        return None

    @property
    def proposes(self) -> bool:
        """As :attr:`Drafter.proposes`: the trees of the other arms."""
        return True

    @property
    def drafts_next(self) -> bool:
        """As :attr:`Drafter.drafts_next`."""
        return self._drafters[self.bandit.chosen] is self._on_device

    def drafts_itself(self, context: Context) -> bool:
        """As :meth:`Drafter.drafts_itself`."""
        if self.drafts_next:
            drafter = self._begin(context)
            if self.costs is not None:
                seconds = self.costs.seconds(self._nodes, context.kv.length)
                self._seconds = drafter.draft_seconds(self.costs, context) + seconds
        return self.drafts_next

    def _begin(self, context: Context) -> Drafter:
        """Begin a step of the arm that was chosen."""
        self._started = time.perf_counter()
        self._length = len(context.text)
        self._drafted = self.bandit.chosen
        return self._drafters[self._drafted]

    @property
    def choice(self) -> str:
        """As :attr:`Drafter.choice`."""
        return "" if self._drafted is None else self._names[self._drafted]

    def propose(self, context: Context, max_new: int) -> DraftTree:
        """As :meth:`Drafter.propose`."""
        drafter = self._begin(context)
        tree = drafter.propose(context, max_new)
        if self.costs is not None:
            self._seconds = drafter.draft_seconds(self.costs, context) + self.costs.seconds(
                len(tree), context.kv.length
            )
        return tree

    def learn(self, context: Context) -> None:
        """As :meth:`Drafter.learn`."""
        if self._drafted is None:
            return
        self._drafters[self._drafted].learn(context)
        if self.costs is None:
            self._seconds += time.perf_counter() - self._started
        self.bandit.learn(len(context.text) - self._length, self._seconds, self._overhead)

    def keep_up(self, context: Context, most: int) -> None:
        """As :meth:`Drafter.keep_up`, for the arm that takes the next step."""
        started = time.perf_counter()
        drafter = self._drafters[self.bandit.chosen]
        super().keep_up(context, most)
        for each in [drafter] if self._drafted is not None else self._drafters:
            # the prompt is for all
            each.keep_up(context, each.depth + 1)
        self._seconds = self._overhead = 0.0
        if self.costs is None and self.bandit.chosen == self._drafted:
            self._seconds = time.perf_counter() - started
        elif self.costs is None:
            self._overhead = time.perf_counter() - started
