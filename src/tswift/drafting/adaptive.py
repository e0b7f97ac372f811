"""One method for everybody: of several whole methods (arms of a bandit), plain decoding among them,
the fastest.

What drafts fastest depends on how long the text is, how much it repeats itself, and on the machine.
The text is the same whoever drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import truediv
from typing import TYPE_CHECKING

from tswift.decoding.drafter import Context, DeviceDraft, Drafter, DraftTree, LogitReader
from tswift.decoding.pass_costs import PassTimes

if TYPE_CHECKING:
    from tswift.decoding.device_state import DeviceState

_LOST_AT_FIRST = 3.0  # plain steps' time that trials may lose to the best arm at first
_LOST_SHARE = 0.01  # of the time that has passed, which they may lose after that
# counted steps of a trial: of an arm that is slower than so much of the best, and of others
_LEAST, _MOST = 3, 12
_SLOWER = 0.85
_STEPS_BEFORE_TRIALS = (
    6  # plain steps before the first trial, so that it is known what to compare with
)
_LOST_IN_A_TRIAL = 3.0  # plain steps' time lost, after which a trial ends at once
_WAIT_OF_EQUALS = 64.0  # plain steps' time until an arm as fast as the best is tried again
_WAIT_POWER = 2.0  # one that is half as fast waits 2 to this power times as long
_WAIT_PER_FAILURE = 1.3  # and this many times as long after every trial that it lost
_LONGEST_WAIT = 2048.0  # after which any is
# steps after which it is asked whether another arm is due, and of plain decoding that are timed
# together: what a step costs here is a share of a quick pass
_LEARNT_TOGETHER = 8
_FORGOTTEN_PER_STEP = 1 / 96  # of what is known of an arm, forgotten in each of its steps
# passes after a prompt that tell nothing of later ones: they took up to 1.3 times as long
_COLD_PASSES = 8
# times its usual seconds that a step counts for at most: the process may have been stopped
# meanwhile
_FAR = 8.0


class Arm:
    """What is known of an arm's speed.

    Args:
        times: of passes.
    """

    def __init__(self, times: PassTimes) -> None:
        # how many it took, and when the last one, in seconds of the decode
        self.steps = 0
        self.last = 0.0
        self.failures = 0  # trials that it lost, since it last might not draft or was the fastest
        self._times = times
        # of late: steps, tokens, seconds but for those of passes, and these by the costs, by place
        # of their number of nodes
        self._late = self._tokens = self._drafting = 0.0
        self._passes: dict[int, float] = {}

    @property
    def rate(self) -> float:
        """Tokens per second of late; 0 before the second step."""
        return self._tokens / self._seconds if self._late else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step of late; 0 before the second one."""
        return self._seconds / self._late if self._late else 0.0

    @property
    def _seconds(self) -> float:
        # passes count as what they take now, whatever they took when the arm was tried
        factor = self._times.factor
        return self._drafting + sum(s * factor(place) for place, s in self._passes.items())

    def learn(self, tokens: int, seconds: float, place: int, passing: float, count: int) -> None:
        """It took some steps: so many seconds, and passes of so many by the costs; ``place`` is
        that of their number of nodes.

        The first step does not count: what is used for the first time takes longer.
        """
        self.steps += count
        if self.steps > 1:
            self._keep((1 - _FORGOTTEN_PER_STEP) ** count)
            self._late += count
            self._tokens += tokens
            self._drafting += seconds
            self._passes[place] = self._passes.get(place, 0.0) + passing

    def reprice(self, factors: Sequence[float]) -> None:
        """As :meth:`Bandit.reprice`."""
        self._passes = {place: s * factors[place] for place, s in self._passes.items()}

    def wait(self, ratio: float) -> float:
        """Plain steps' time until its next trial, when the best arm is so many times as fast."""
        return min(
            _WAIT_OF_EQUALS * ratio**_WAIT_POWER * _WAIT_PER_FAILURE**self.failures, _LONGEST_WAIT
        )

    def age(self) -> None:
        """What is known of it is old: let it count for no more than a short trial."""
        if self._late > _LEAST:
            self._keep(_LEAST / self._late)

    def _keep(self, share: float) -> None:
        self._late *= share
        self._tokens *= share
        self._drafting *= share
        for place in self._passes:
            self._passes[place] *= share


class Bandit:
    """Chooses an arm for every step: the fastest,
    and now and then another one for a trial of a few steps.

    What trials lose to the fastest arm is accounted for: none begins once they have lost an
    allowance and a share of all the time. And the slower an arm was and the more trials it has
    lost, the longer it waits, until the text changes so that it may pay again.

    Args:
        arms: how many; the first is plain decoding, with which it begins.
        times: of passes.

    Attributes:
        chosen: the arm that takes the next step.
    """

    def __init__(self, arms: int, times: PassTimes | None = None) -> None:
        self._times = times or PassTimes()
        self.arms = [Arm(self._times) for _ in range(arms)]
        self._paid = [True] * arms  # whether each had a prospect when that was asked last
        self.chosen = 0
        self._best = 0
        self._trial = 0  # counted steps that are left of a trial
        self._steps = 0
        self._unsettled = 0  # of these, since an arm was chosen
        self._now = 0.0  # seconds of the decode
        self._usual = inf  # seconds of a step of the chosen arm, or of others if none is known
        # seconds that trials may lose yet, and that this one has lost
        self._allowed = self._lost = 0.0

    def reprice(self, factors: Sequence[float]) -> None:
        """Passes cost so many times as much from now on, by place of their number of nodes."""
        for arm in self.arms:
            arm.reprice(factors)

    @property
    def steady(self) -> bool:
        """Whether plain decoding goes on without a trial: its steps may be timed together then."""
        return not self.chosen and not self._trial and self._steps >= _STEPS_BEFORE_TRIALS

    @property
    def stays(self) -> bool:
        """Whether the chosen arm takes the step after the coming one, too; a trial may end with any
        step.
        """
        return (
            not self._trial
            and self._unsettled < _LEARNT_TOGETHER - 1
            and self._steps != _STEPS_BEFORE_TRIALS - 1
        )

    def learn(
        self,
        tokens: int,
        seconds: float,
        overhead: float = 0.0,
        nodes: int = 1,
        passing: float = 0.0,
        count: int = 1,
        may_pay: Callable[[int], bool] = lambda arm: True,
    ) -> None:
        """The chosen arm took a step; choose another one, if that is due.

        Args:
            tokens: that it added.
            seconds: that it took, but for ``passing``.
            overhead: what it took beforehand to catch up with the text, which is no part of its
                pace.
            nodes: of its pass.
            passing: seconds of that by the costs; 0 where it is part of the seconds.
            count: steps that it took; more than one only where they were :attr:`steady`.
            may_pay: whether a trial of an arm has any prospect now. It is not kept: what it knows
                of the decode would live as long as the bandit.
        """
        arm = self.arms[self.chosen]
        plain = self.arms[0]
        seconds = max(min(seconds, _FAR * count * self._usual), 1e-9)
        place = self._times.place(nodes)
        arm.learn(tokens, seconds, place, passing, count)
        seconds += passing * self._times.factor(place)
        self._now += seconds + overhead
        arm.last = self._now
        self._steps += count
        if self._trial:
            lost = seconds - tokens / self.arms[self._best].rate
            if arm.steps == 1:
                # what is used for the first time takes long once, and others are not to wait for
                # that
                lost = min(lost, plain.step_s)
            else:
                self._allowed -= overhead
            self._continue(arm, lost, may_pay)
            return
        self._allowed += _LOST_SHARE * (seconds + overhead)
        if self._steps == _STEPS_BEFORE_TRIALS:
            self._allowed = _LOST_AT_FIRST * plain.step_s
        self._unsettled += count
        if self._unsettled >= _LEARNT_TOGETHER or self._steps == _STEPS_BEFORE_TRIALS:
            self._settle(may_pay)

    def _continue(self, arm: Arm, lost: float, may_pay: Callable[[int], bool]) -> None:
        """Account for a step of a trial, and end it where that is due."""
        self._lost += lost
        self._allowed -= lost
        self._trial -= arm.steps > 1
        tried = _MOST - self._trial
        slower = arm.rate < _SLOWER * self.arms[self._best].rate
        if (
            tried == _MOST
            or (tried >= _LEAST and slower)
            or (tried > 1 and self._lost > _LOST_IN_A_TRIAL * self.arms[0].step_s)
        ):
            self._trial = 0
            arm.failures += 1
            self._settle(may_pay)

    def _settle(self, may_pay: Callable[[int], bool]) -> None:
        """Choose the fastest arm, or a trial of one that has waited long enough and may lose as
        much as it would.
        """
        self._best = max(range(len(self.arms)), key=lambda index: self.arms[index].rate)
        best = self.arms[self._best]
        best.failures = 0
        self._unsettled = 0
        plain = self.arms[0].step_s
        self._allowed = min(self._allowed, 4 * _LOST_AT_FIRST * plain)
        longest = 1.0
        self.chosen = self._best
        for index, arm in enumerate(self.arms):
            paid = self._paid[index]
            self._paid[index] = index == self._best or may_pay(index)
            if index == self._best or not self._paid[index]:
                continue
            if not arm.rate:
                loss = _LOST_IN_A_TRIAL * plain
                waited = inf
            else:
                ratio = best.rate / arm.rate
                loss = min(_LEAST * arm.step_s * (1 - 1 / ratio), _LOST_IN_A_TRIAL * plain)
                arm.failures = arm.failures if paid else 0
                waited = inf if not paid else (self._now - arm.last) / (arm.wait(ratio) * plain)
            if waited > longest and self._allowed >= loss:
                self.chosen = index
                longest = waited
        if self.chosen != self._best:
            self.arms[self.chosen].age()
            self._trial = _MOST
            self._lost = 0.0
        usual = self.arms[self.chosen].step_s
        self._usual = usual or max(arm.step_s for arm in self.arms)


@dataclass
class AdaptiveDrafter(Drafter):
    """Drafts by the arm that a bandit chooses.

    The others stand aside: each catches up with the text when chosen. A step counts as what its
    arm took to draft, and as what passes of that size usually take: so arms are not told apart by
    what else the machine did when they were tried.

    Attributes:
        arms: drafters by name, the first of which drafts nothing.
        times: of passes.
        clock: whether drafting is timed; otherwise costs tell its seconds, too, so that choices are
            the same everywhere.
        times_whole_steps: whether a timed step counts as what it took, its pass included:
            for passes so quick that more is lost by telling them apart.
    """

    arms: Mapping[str, Drafter] = field(default_factory=dict)
    times: PassTimes = field(default_factory=PassTimes)
    clock: bool = False
    times_whole_steps: bool = False
    host_proposes_too = True  # the trees of the other arms

    def __post_init__(self) -> None:
        self._names = list(self.arms)
        self._drafters = list(self.arms.values())
        self.bandit = Bandit(len(self.arms), self.times)
        self._drafted: int | None = None  # the arm that drafted last
        # what the bandit does not know yet: steps, and the text's length before them; seconds of
        # drafts, of what they took beforehand to catch up, and of passes
        self._steps = self._length = 0
        self._drafting = self._overhead = self._passed = 0.0
        self._cold = _COLD_PASSES  # passes that do not count yet
        self._nodes = self._keys = 0  # of that
        # the arm that drafts on the device, and nodes of its tree
        self._on_device: Drafter | None = None
        self._device_nodes = 0

    def on_device(self, state: DeviceState) -> DeviceDraft | None:
        """As :meth:`Drafter.on_device`: that of the first arm that has one."""
        for drafter in self._drafters:
            if (draft := drafter.on_device(state)) is not None:
                self._on_device = drafter
                self._device_nodes = len(draft.sources)
                return draft
        return None

    def device_drafts(self, on: bool = False) -> bool:
        """As :meth:`Drafter.device_drafts`."""
        # what reads other states than a digest of logits would find them overwritten
        stays = self.bandit.stays and all(isinstance(each, LogitReader) for each in self.histories)
        return self._drafters[self.bandit.chosen] is self._on_device and (stays or not on)

    def begin_device_step(self, context: Context) -> bool:
        """As :meth:`Drafter.begin_device_step`."""
        if begins := self.device_drafts():
            self._verifies(self._begin(), context, self._device_nodes)
        return begins

    def _begin(self) -> Drafter:
        """Begin a step of the arm that was chosen."""
        self._drafted = self.bandit.chosen
        return self._drafters[self._drafted]

    def _verifies(self, drafter: Drafter, context: Context, nodes: int) -> None:
        """The draft is there, and a pass over so many nodes begins."""
        self._nodes = nodes
        self._keys = context.kv.length
        if not self.clock:
            self._drafting += drafter.draft_seconds(self.times.costs, context)

    @property
    def choice(self) -> str:
        """As :attr:`Drafter.choice`."""
        return "" if self._drafted is None else self._names[self._drafted]

    def propose(self, context: Context, max_new: int) -> DraftTree:
        """As :meth:`Drafter.propose`."""
        drafter = self._begin()
        tree = drafter.propose(context, max_new)
        self._verifies(drafter, context, len(tree))
        return tree

    def learn(self, context: Context) -> None:
        """As :meth:`Drafter.learn`."""
        if self._drafted is None:
            self._length = len(context.text)
            return
        costs = self.times.costs
        if costs.texts != context.texts:
            before = [costs.seconds(nodes, self._keys) for nodes in costs.nodes]
            costs.share(context.texts)
            now = [costs.seconds(nodes, self._keys) for nodes in costs.nodes]
            self.bandit.reprice([*map(truediv, now, before)])
        self._passed += context.passing
        self._drafting += context.drafting if self.clock else 0.0
        self._steps += 1
        drafter = self._drafters[self._drafted]
        drafter.learn(context)
        if self.bandit.steady and self._steps < _LEARNT_TOGETHER:
            return
        count = self._steps
        tokens = len(context.text) - self._length
        seconds, passing = self._drafting, 0.0
        if self.clock and (
            self.times_whole_steps or drafter is self._on_device
        ):  # the draft included
            seconds += self._passed
        else:
            passing = count * costs.seconds(self._nodes, self._keys)
            if self._cold > 0:
                self._cold -= count
            else:
                self.times.learn(self._nodes, passing, self._passed, count)
        self.bandit.learn(
            *(tokens, seconds, self._overhead, self._nodes, passing, count),
            may_pay=lambda arm: self._drafters[arm].may_pay(costs, context),
        )
        self._steps = 0
        self._length = len(context.text)
        self._drafting = self._overhead = self._passed = 0.0

    def keep_up(self, context: Context, most: int) -> None:
        """As :meth:`Drafter.keep_up`, for the arm that takes the next step."""
        super().keep_up(context, most)
        started = time.perf_counter()
        drafter = self._drafters[self.bandit.chosen]
        for each in [drafter] if self._drafted is not None else self._drafters:
            # the prompt is for all
            each.keep_up(context, each.depth + 1)
        if self.clock:
            spent = time.perf_counter() - started
            if self.bandit.chosen == self._drafted:
                self._drafting += spent
            else:
                self._overhead += spent
