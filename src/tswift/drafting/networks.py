"""Drafting with published drafters (DSpark, DFlash, EAGLE-3, MTP heads, assistants),
which read states of the target.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from itertools import takewhile
from math import isfinite

import torch
from torch import Tensor

from tswift.caches import KVBuffer, WindowKV
from tswift.decoding.device_state import HostBlock
from tswift.decoding.drafter import Context, Source
from tswift.decoding.pass_costs import PassCosts
from tswift.drafting.dynamic_tree import GAP, GUESSES, CandidateTree
from tswift.drafting.heads import WIDTH
from tswift.forward.passes import Forwarded
from tswift.sampling.kernels import use_kernels
from tswift.sampling.rule import Sampler
from tswift.speculators.draft_network import DraftNetwork

BEAM = 5  # nodes of a level that are gone on with


_LEVELS = 6  # levels are told apart up to this one


# of a pass over one node that ranking a level takes about, where it has not been measured
_LEVEL = 0.1


class NetworkSource(Source):
    """Candidates of a published drafter below the likeliest branches, level by level,
    all of them in one round.

    The drafter reads the target's states and a window of its own. A round is a program of static
    sizes: what the last step committed goes into the window, and each level's candidates below the
    likeliest few of the level before are ranked with the noise of their position. The host waits
    once, for all.

    Args:
        network: the drafter.
        levels: tokens drafted along a path.
        window: tokens that its cache holds, and how many of them are the text's first.
        shared_noise: rank candidates by what the target would draw with the noise of their
            position.
        longest: most tokens that a step commits, usually.
        widths: candidates per level; None for the best four.
    """

    def __init__(
        self,
        network: DraftNetwork,
        levels: int,
        window: tuple[int, int],
        shared_noise: bool,
        longest: int,
        widths: Sequence[int] | None = None,
    ) -> None:
        target = network.target
        spec = network.spec
        device = network.target.device
        self.name = spec.method
        self._network = network
        self._target = target
        self._levels = levels
        self._shared_noise = shared_noise
        self._widths = widths
        self._proposed = False
        self._width = min(WIDTH if widths is None else max(widths), target.vocab_size)
        self.kv = WindowKV(spec.kv_shape(target.dtype, device), *window, spec.slots(levels, BEAM))
        self._rows = min(longest, window[0] - window[1])
        single = dict.fromkeys(("root", "position", "last"), 1)
        several = ("following", "places", "slots")
        self._block = HostBlock(single | dict.fromkeys(several, self._rows), device)
        self._taps = torch.zeros(
            self._rows, spec.tap_count * spec.tap_size, dtype=target.dtype, device=device
        )
        # taps of the newest tokens, and the first one's place
        self._new = self._taps[:0]
        self._first = 0
        guesses = [GUESSES[min(rank, len(GUESSES) - 1)] for rank in range(self._width)]
        self._guesses = torch.tensor(guesses, dtype=torch.float64, device=device)
        self._ranks = torch.arange(self._width, device=device)
        weights = [
            sum(weight.numel() for weight in each.parameters()) for each in (network, target.model)
        ]
        self._share = weights[0] / weights[1]
        self._alone = torch.ones(1, 1, dtype=torch.bool, device=device)
        self._on_host = not (target.on_cuda or target.replays)
        self._seconds = 0.0  # of the last round, which a host has waited for
        self._sampler: Sampler | None = None
        self._whole: KVBuffer | None = None  # the model's own
        self._run: Callable[[], Tensor] | None = None
        self._found: Tensor | None = None

    def _read(self, forwarded: Forwarded) -> Tensor:
        """``[n, M * H]``: what the drafter reads of a pass."""
        reads_hidden = self._network.spec.reads_hidden
        states = forwarded.hidden if reads_hidden else forwarded.layer_states
        assert states is not None
        return states

    @torch.inference_mode()
    def prefilled(self, context: Context, forwarded: Forwarded) -> None:
        """Take in the pass over the next chunk of the prompt."""
        self._new = torch.cat([self._new, self._read(forwarded)])
        self._flush(context)

    @torch.inference_mode()
    def committed(self, context: Context, most: int = 0) -> None:
        """Keep the states of new tokens; the next round takes them into the window."""
        count = context.kv.length - self._first - len(self._new)
        if context.last is None and count > 0:  # nobody has seen the passes over these
            self._first = context.kv.length
        if count <= 0 or context.last is None:
            return
        nodes = torch.tensor(context.path[-count:]).to(self._target.device, non_blocking=True)
        self._new = torch.cat([self._new, self._read(context.last).index_select(0, nodes)])
        if len(self._new) > self._rows:
            self._flush(context)

    def _flush(self, context: Context) -> None:
        """Take new tokens into the window, but for the last one,
        from which the next round begins.
        """
        staying = self.kv.staying(range(self._first, self._first + len(self._new) - 1))
        if staying:
            packed = [
                [place - self._first, context.text[place + 1], place, self.kv.slot(place)]
                for place in staying
            ]
            rows, following, places, slots = (
                torch.tensor(packed).to(self._target.device, non_blocking=True).unbind(1)
            )
            self.kv.hold(slots)
            self._network.remember(
                self._new.index_select(0, rows), following, places, slots, self.kv, context.kv
            )
        self._keep_last()

    def _keep_last(self) -> None:
        self._first += max(0, len(self._new) - 1)
        self._new = self._new[-1:].clone()

    @torch.inference_mode()
    def start(self, context: Context) -> None:
        """Have the device draft every level; nothing is waited for."""
        self._found = None
        count = len(self._new)
        if not count:
            return
        host = self._block.host
        text = context.text
        spare = [self.kv.budget] * (self._rows - count)
        places = range(self._first, self._first + count)
        host["root"][:] = text[-1]
        host["position"][:] = context.position
        host["last"][:] = count - 1
        host["following"][:] = text[places.start + 1 : places.stop + 1] + [0] * len(spare)
        host["places"][:] = [*places, *[0] * len(spare)]
        host["slots"][:] = [*map(self.kv.slot, places), *spare]
        self._block.send()
        self._taps[:count] = self._new
        self._keep_last()
        if self._run is None or self._sampler is not context.sampler:
            # the program reads where its penalty window is, and the model's keys and values
            self._sampler = context.sampler
            self._whole = context.kv
            use_kernels(context.sampler, self._target.dtype, self._width)
            # where the target's passes are not replayed, graphs are not trusted, or there is no use
            # for them
            own_self = weakref.proxy(self)  # or it would hold itself, and both caches, for long
            run = lambda: own_self._round()  # noqa: E731
            self._run = self._target.capture(run) if self._target.replays else run
        began = time.perf_counter()
        self._found = self._run()
        self._seconds = time.perf_counter() - began

    def _round(self) -> Tensor:
        """The program: ``[levels, BEAM, 1 + 2 * width]`` float64: of each node its place among the
        candidates of the level before, and the candidates below it with their scores."""
        given = self._block.device
        sampler = self._sampler
        network = self._network
        assert sampler is not None
        assert self._whole is not None
        # a host needs no static sizes
        new = slice(int(given["last"]) + 1 if self._on_host else None)
        slots = given["slots"][new]
        self.kv.hold(slots)
        states = network.remember(
            self._taps[new],
            given["following"][new],
            given["places"][new],
            slots,
            self.kv,
            self._whole,
        )
        tokens = given["root"]
        position = given["position"]
        begun = network.begin(
            states.index_select(0, given["last"]), tokens, position, self.kv, self.kv.held
        )
        after = sampler.seen(position, position, self._alone)
        reach = torch.ones(1, dtype=torch.float64, device=tokens.device)
        found = torch.zeros(
            self._levels, BEAM, 1 + 2 * self._width, dtype=torch.float64, device=tokens.device
        )
        picked = torch.zeros_like(tokens)
        rows = None
        paths = tokens.new_zeros(1, 0)
        for level in range(self._levels):
            count = len(tokens)
            logits = sampler.lowered_draft(begun(level, rows, tokens))
            seen = after
            if seen is not None and level:
                seen = seen.repeat(count, 1).scatter_(1, paths, True)
                logits = logits.expand(count, -1)
            places: Tensor | list[int] | None = None
            if self._shared_noise:
                places = (position + 1 + level).expand(len(logits))
                if self._on_host:
                    places = places.tolist()  # as numbers, whose noise is kept
            best, scores = (
                each.expand(count, -1)
                for each in sampler.candidates(logits, seen, places, self._width)
            )
            if self._widths is not None:
                scores = scores.where(self._ranks < self._widths[level], -torch.inf)
            found[level, :count] = torch.cat([picked[:, None].double(), best.double(), scores], 1)
            if level == self._levels - 1:
                break
            reach, picked = (
                self._promise(reach, scores).flatten().topk(min(BEAM, count * self._width))
            )
            rows = picked // self._width
            tokens = best.flatten()[picked]
            paths = torch.cat([paths[rows], tokens[:, None]], 1)
        return found

    def _promise(self, reach: Tensor, scores: Tensor) -> Tensor:
        """``[n, width]`` chances of candidates by their scores' gaps,
        to choose what is gone on with.
        """
        first = scores[:, :1]
        second = scores[:, 1:2] if self._width > 1 else first - GAP
        gaps = torch.cat([first - second, first - scores[:, 1:]], 1)
        steps = (gaps / GAP).round().nan_to_num(0.0).clamp(0, len(GUESSES[0]) - 1).long()
        chances = self._guesses.expand(len(steps), -1, -1).gather(2, steps[:, :, None])[:, :, 0]
        return (reach[:, None] * chances).where(scores.isfinite(), 0.0)

    def propose(self, tree: CandidateTree, context: Context) -> None:
        """Offer what the round found."""
        self._proposed = self._found is not None
        if self._found is None:
            return
        found, self._found = self._found.tolist(), None  # the one wait for the device
        # of the level's rows, and whether they are the best all the way down
        nodes: list[int | None] = [0]
        best = [True]
        below = list[int | None]()
        for level in range(min(self._levels, tree.depth)):
            if level:
                picked = [int(row[0]) for row in found[level][: min(BEAM, len(below))]]
                nodes = [below[index] for index in picked]
                best = [best[index // self._width] and index % self._width == 0 for index in picked]
            below = []
            for row, node in enumerate(nodes):
                scores = (
                    [*takewhile(isfinite, found[level][row][1 + self._width :])]
                    if node is not None
                    else []
                )
                tokens = [int(token) for token in found[level][row][1 : 1 + len(scores)]]
                children = tree.propose_ranked(
                    node or 0, tokens, scores, self.name, (min(level, _LEVELS), best[row])
                )
                below += [*children, *[None] * (self._width - len(children))]

    def draft_seconds(self, costs: PassCosts, context: Context) -> float:
        """Seconds of a round: the last one's on a host; else passes in proportion to the weights,
        and the ranking of every level.
        """
        if not self._proposed:
            return 0.0
        if self._on_host:
            return self._seconds
        level = costs.level or _LEVEL * costs.seconds(1, 0)
        block = self._network.spec.block
        passes = costs.seconds(block, 0) if block else self._levels * costs.seconds(BEAM, 0)
        return self._share * passes + self._levels * level
