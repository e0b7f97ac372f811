"""Drafting from layers that read the target's states: heads, and published drafters."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product, takewhile
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from tswift.decoding.device_step import HostBlock
from tswift.decoding.drafter import Context, DraftTree, Source
from tswift.decoding.drawing import MOST
from tswift.decoding.sampling import Sampler
from tswift.drafting.dynamic_tree import GAP, GUESSES, CandidateTree, DraftModel
from tswift.kv import WindowKV
from tswift.models.drafters import BlockDrafter, EagleDrafter
from tswift.models.heads import Heads
from tswift.models.passes import Forwarded, PassCosts
from tswift.models.target import Target


class HeadSource(Source):
    """Every level's best candidates, combined into a tree (paper, section 3.2).

    Chained and Medusa heads know no drafted token, so every candidate of a level may follow every one of the level
    before. Conditioned heads are told the best candidate of the level before, and theirs may follow that one only.

    Args:
        target: for its LM head and embeddings.
        heads: the heads.
        level: what makes a drafting pass over the root, from whose state they start: the LM head on it gives the first
            level (paper, section 3.3). Its keys and values are not kept: a partial cache is filled with the exact ones
            of verification. None to start from the pass that drew the root, whose state knows nothing of the root.
        tree: candidates per level.
        shared_noise: rank candidates by what the target would draw with the noise of their position, not by what is
            likely. The noise is a pure function, so this is no peeking: it only makes for better guesses.

    Attributes:
        width: candidates of each level in :meth:`guess`.
    """

    name = "heads"

    def __init__(
        self, target: Target, heads: Heads, level: DraftModel | None, tree: Sequence[int], shared_noise: bool
    ) -> None:
        self.target, self._heads, self.level, self.tree, self._shared_noise = target, heads, level, tree, shared_noise
        self.width = min(max(tree), target.vocab_size)
        self._guessed: tuple[Any, Any] | None = None

    @cached_property
    def nodes(self) -> list[tuple[int, int, int]]:
        """The tree's nodes below the root in order of promise: parent (0 the root), level, and rank there."""
        levels = range(len(self.tree))
        if self._heads.conditioned:
            ranks = [(0,) * level + (rank,) for level in levels for rank in range(self.tree[level])]
            # the path of best candidates first, then side steps from it
            paths = sorted(ranks, key=lambda path: (path[-1], -len(path) if path[-1] == 0 else len(path)))
        else:
            # few side steps first, and early ones: a late one is reached only if all before it was right
            paths = sorted(product(*map(range, self.tree)), key=lambda path: (sum(path), [-rank for rank in path]))
        tree = DraftTree(0, 1 + sum(map(len, paths)), len(self.tree))
        for path in paths:
            tree.add(path, self.name)  # ranks in the place of tokens
        return [(tree.parents[node], tree.depths[node] - 1, tree.tokens[node]) for node in range(1, len(tree))]

    def price(self, costs: PassCosts, context: Context) -> float:
        """Seconds that a draft takes by these costs."""
        reading = costs.seconds(1, self.level.keys or context.kv.length) if self.level else 0.0
        return reading + len(self.tree) * costs.level

    def read(self, context: Context) -> tuple[Forwarded, int] | None:
        """The pass that the heads start from, and its node; None before the first pass."""
        if self.level is None:
            return None if context.last is None else (context.last, context.node)
        model = self.level.target
        root, position = torch.tensor([context.text[-1:], [context.position]]).to(model.device, non_blocking=True)
        return model.forward(root, position, self.level.cache(context), None), 0

    def start(self, context: Context) -> None:
        """Have the device guess every level; nothing is waited for."""
        read = self.read(context)
        if read is None:
            return
        forwarded, node = read
        hidden, raw = forwarded.hidden[node], None if forwarded.raw is None else forwarded.raw[node]
        first, root = context.position + 1, context.text[-1]
        given = hidden, raw, root, range(first, first + len(self.tree)), context.sampler
        self._guessed = self.guess_by_program(*given) or self.guess(*given)

    def _candidates(self) -> list[tuple[list[int], list[float]]]:
        """Tokens and scores of every level, best first: those that can be drawn; no levels before the first pass."""
        if self._guessed is None:
            return []
        (tokens, scores), self._guessed = self._guessed, None
        if isinstance(tokens, Tensor):  # the one wait for the device
            tokens, scores = torch.stack([tokens.double(), scores]).flatten(1).tolist()
        levels = []
        for level, width in enumerate(self.tree):
            start = level * self.width
            count = sum(map(isfinite, scores[start : start + min(width, self.width)]))  # what is broken is no guess
            levels.append(([*map(int, tokens[start : start + count])], scores[start : start + count]))
        return levels

    def propose(self, tree: DraftTree, context: Context) -> None:
        """Add the combinations of the levels' best candidates."""
        levels = [tokens for tokens, _ in self._candidates()]
        nodes: list[int | None] = [0]
        for parent, level, rank in self.nodes if levels else ():
            below, tokens = nodes[parent], levels[level]
            nodes.append(None if below is None or rank >= len(tokens) else tree.grow(below, tokens[rank], self.name))

    def guess(
        self,
        hidden: Tensor,
        raw: Tensor | None,
        root: int | Tensor,
        places: Sequence[int] | Tensor,
        sampler: Sampler,
    ) -> tuple[Tensor, Tensor]:
        """The best candidates of every level; nothing is waited for, and a CUDA graph can be captured of it.

        Args:
            hidden: ``[H]`` last hidden state.
            raw: the same before the final norm; for heads that start there.
            root: the text's last token.
            places: of each level, the position of its tokens in the text; numbers, or ``[levels]`` on the device.
            sampler: the sampling rule.

        Returns:
            ``[levels, width]`` tokens, best first, and their scores (float64), ``-inf`` for a token that is never
            drawn.
        """
        state, out, levels = raw if self._heads.pre_norm else hidden, hidden, len(self.tree)
        assert state is not None
        root_place = (
            places[:1] - 1
            if isinstance(places, Tensor)
            else torch.tensor([places[0] - 1]).to(hidden.device, non_blocking=True)
        )
        seen = sampler.seen(root_place, root_place, torch.ones(1, 1, dtype=torch.bool, device=hidden.device))

        def best(logits: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
            return sampler.candidates(logits, seen, places[start:end] if self._shared_noise else None, self.width)

        if not self._heads.conditioned:
            first = hidden if self.level else None
            return best(self._heads.levels(state, self.target.open_logits, first, levels), 0, levels)
        found: list[tuple[Tensor, Tensor]] = []
        for level in range(levels):
            if level or self.level is None:
                index = level - (self.level is not None)
                state, out = self._heads.step(index, state, self.target.embed(root))
            found.append(best(self.target.open_logits(out.unsqueeze(0)), level, level + 1))
            root = found[-1][0][0, 0]
        tokens, scores = zip(*found, strict=True)
        return torch.cat(tokens), torch.cat(scores)

    def guess_by_program(
        self, hidden: Tensor, raw: Tensor | None, root: int, places: range, sampler: Sampler
    ) -> tuple[list[int], list[float]] | None:
        """As :meth:`guess`, on the host level after level, all by one C function; None where there is none."""
        heads, model = getattr(self._heads, "program", None), self.target.program
        draw = sampler.program(torch.float32)
        if not (heads and model and draw and self._heads.conditioned and self.width <= MOST):
            return None
        state, first, levels = raw if self._heads.pre_norm else hidden, hidden if self.level else None, len(self.tree)

        def run(ranking: ctypes.Structure, rank: int) -> None:
            heads.guess(model, state, first, root, levels, ranking, rank, self.width)

        newest = sampler.newest if sampler.params.penalises else None
        noisy = places if self._shared_noise else None
        return draw.rank_levels(run, noisy, levels, self.width, (root, places[0] - 1), newest)

    def committed(self, context: Context, most: int) -> None:
        """Keep the drafting pass's cache up."""
        if self.level is not None:
            self.level.committed(context, most)


WIDTH = 4  # candidates of a level
_BRANCHES = 3  # nodes of a level below which the next one's may follow


class HeadTreeSource(HeadSource):
    """The same candidates for a tree that is pruned to what pays, with chances by their gap to the others."""

    def propose(self, tree: CandidateTree, context: Context) -> None:  # type: ignore[override]
        """Propose every level's candidates below the likeliest nodes that they may follow."""
        nodes = [0]
        for level, (tokens, scores) in enumerate(self._candidates()[: tree.depth]):
            about = (min(level, 1) if self.level else 1,)
            children = [
                child for node in nodes for child in tree.propose_ranked(node, tokens, scores, self.name, about)
            ]
            nodes = sorted(children, key=lambda node: -tree.path_prob[node])[:_BRANCHES]
            if self._heads.conditioned:
                nodes = children[:1]  # the next level has been told this token


BEAM = 5  # nodes of a level that are gone on with
_LEVELS = 6  # levels are told apart up to this one
_LEVEL = 0.1  # of a pass over one node that ranking a level takes about, where it has not been measured


class NetworkSource(Source):
    """Candidates of a published drafter below the likeliest branches, level by level, all of them in one round.

    The drafter reads the target's states and a window of its own. A round is a program of static sizes: what the last
    step committed goes into the window, and each level's candidates below the likeliest few of the level before are
    ranked with the noise of their position. The host waits once, for all.

    Args:
        network: the drafter.
        levels: tokens drafted along a path.
        window: tokens that its cache holds, and how many of them are the text's first.
        shared_noise: rank candidates by what the target would draw with the noise of their position.
        longest: most tokens that a step commits, usually.
        widths: candidates per level; None for the best four.
    """

    def __init__(
        self,
        network: BlockDrafter | EagleDrafter,
        levels: int,
        window: tuple[int, int],
        shared_noise: bool,
        longest: int,
        widths: Sequence[int] | None = None,
    ) -> None:
        target, spec, device = network.target, network.spec, network.target.device
        self.name = "block" if spec.block else "eagle"
        self._network, self._target, self._levels, self._shared_noise = network, target, levels, shared_noise
        self._widths, self._proposed = widths, False
        self._width = min(WIDTH if widths is None else max(widths), target.vocab_size)
        self.kv = WindowKV(spec.kv_shape(target.dtype, device), *window, spec.slots(levels, BEAM))
        self._rows = min(longest, window[0] - window[1])
        single, several = dict.fromkeys(("root", "position", "last"), 1), ("following", "places", "slots")
        self._block = HostBlock(single | dict.fromkeys(several, self._rows), device)
        self._taps = torch.zeros(self._rows, spec.tap_count * spec.tap_size, dtype=target.dtype, device=device)
        self._new, self._first = self._taps[:0], 0  # taps of the newest tokens, and the first one's place
        guesses = [GUESSES[min(rank, len(GUESSES) - 1)] for rank in range(self._width)]
        self._guesses = torch.tensor(guesses, dtype=torch.float64, device=device)
        self._ranks = torch.arange(self._width, device=device)
        weights = [sum(weight.numel() for weight in each.parameters()) for each in (network, target.model)]
        self._share = weights[0] / weights[1]
        self._alone = torch.ones(1, 1, dtype=torch.bool, device=device)
        self._sampler: Sampler | None = None
        self._run: Callable[[], Tensor] | None = None
        self._found: Tensor | None = None

    @torch.inference_mode()
    def prefilled(self, context: Context, forwarded: Forwarded) -> None:
        """Take in the pass over the next chunk of the prompt."""
        assert forwarded.taps is not None
        self._new = torch.cat([self._new, forwarded.taps])
        self._flush(context.text)

    @torch.inference_mode()
    def committed(self, context: Context, most: int = 0) -> None:
        """Keep the states of new tokens; the next round takes them into the window."""
        count = context.kv.length - self._first - len(self._new)
        if count <= 0 or context.last is None:
            return
        assert context.last.taps is not None
        nodes = torch.tensor(context.path[-count:]).to(self._target.device, non_blocking=True)
        self._new = torch.cat([self._new, context.last.taps.index_select(0, nodes)])
        if len(self._new) > self._rows:
            self._flush(context.text)

    def _flush(self, text: Sequence[int]) -> None:
        """Take new tokens into the window, but for the last one, from which the next round begins."""
        staying = self.kv.staying(range(self._first, self._first + len(self._new) - 1))
        if staying:
            packed = [[place - self._first, text[place + 1], place, self.kv.slot(place)] for place in staying]
            rows, following, places, slots = torch.tensor(packed).to(self._target.device, non_blocking=True).unbind(1)
            self._network.remember(self._new.index_select(0, rows), following, places, slots, self.kv)
            self.kv.hold(slots)
        self._keep_last()

    def _keep_last(self) -> None:
        self._first += max(0, len(self._new) - 1)
        self._new = self._new[-1:].clone()

    @torch.inference_mode()
    def start(self, context: Context) -> None:
        """Have the device draft every level; nothing is waited for."""
        self._found, count = None, len(self._new)
        if not count:
            return
        host, text, spare = self._block.host, context.text, [self.kv.budget] * (self._rows - count)
        places = range(self._first, self._first + count)
        host["root"][:], host["position"][:], host["last"][:] = text[-1], context.position, count - 1
        host["following"][:] = text[places.start + 1 : places.stop + 1] + [0] * len(spare)
        host["places"][:] = [*places, *[0] * len(spare)]
        host["slots"][:] = [*map(self.kv.slot, places), *spare]
        self._block.send()
        self._taps[:count] = self._new
        self._keep_last()
        if self._run is None or self._sampler is not context.sampler:  # the program reads where its penalty window is
            self._sampler = context.sampler
            context.sampler.fuse(self._target.dtype, self._width)
            self._run = self._target.capture(self._round)
        self._found = self._run()

    def _round(self) -> Tensor:
        """The program: ``[levels, BEAM, 1 + 2 * width]`` float64: of each node its place among the candidates of the
        level before, and the candidates below it with their scores."""
        given, sampler, network = self._block.device, self._sampler, self._network
        assert sampler is not None
        states = network.remember(self._taps, given["following"], given["places"], given["slots"], self.kv)
        self.kv.hold(given["slots"])
        tokens, position = given["root"], given["position"]
        begun = network.begin(states.index_select(0, given["last"]), tokens, position, self.kv, self.kv.held)
        after = sampler.seen(position, position, self._alone)
        reach = torch.ones(1, dtype=torch.float64, device=tokens.device)
        found = torch.zeros(self._levels, BEAM, 1 + 2 * self._width, dtype=torch.float64, device=tokens.device)
        picked, rows, paths = torch.zeros_like(tokens), None, tokens.new_zeros(1, 0)
        for level in range(self._levels):
            count = len(tokens)
            logits, seen = begun(level, rows, tokens), after
            if seen is not None and level:
                seen = seen.repeat(count, 1).scatter_(1, paths, True)
                logits = logits.expand(count, -1)
            places: Tensor | list[int] | None = None
            if self._shared_noise:
                places = (position + 1 + level).expand(len(logits))
                places = places if self._target.replays else places.tolist()  # as numbers, whose noise is kept
            best, scores = (each.expand(count, -1) for each in sampler.candidates(logits, seen, places, self._width))
            if self._widths is not None:
                scores = scores.where(self._ranks < self._widths[level], -torch.inf)
            found[level, :count] = torch.cat([picked[:, None].double(), best.double(), scores], 1)
            if level == self._levels - 1:
                break
            reach, picked = self._promise(reach, scores).flatten().topk(min(BEAM, count * self._width))
            rows, tokens = picked // self._width, best.flatten()[picked]
            paths = torch.cat([paths[rows], tokens[:, None]], 1)
        return found

    def _promise(self, reach: Tensor, scores: Tensor) -> Tensor:
        """``[n, width]`` chances of candidates by their scores' gaps, to choose what is gone on with."""
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
        nodes: list[int | None] = [0]  # of the level's rows, and whether they are the best all the way down
        best, below = [True], list[int | None]()
        for level in range(min(self._levels, tree.depth)):
            if level:
                picked = [int(row[0]) for row in found[level][: min(BEAM, len(below))]]
                nodes = [below[index] for index in picked]
                best = [best[index // self._width] and index % self._width == 0 for index in picked]
            below = []
            for row, node in enumerate(nodes):
                scores = [*takewhile(isfinite, found[level][row][1 + self._width :])] if node is not None else []
                tokens = [int(token) for token in found[level][row][1 : 1 + len(scores)]]
                children = tree.propose_ranked(node or 0, tokens, scores, self.name, (min(level, _LEVELS), best[row]))
                below += [*children, *[None] * (self._width - len(children))]

    def price(self, costs: PassCosts, context: Context) -> float:
        """Seconds of a round: passes in proportion to the weights, and the ranking of every level."""
        if not self._proposed:
            return 0.0
        level = costs.level or _LEVEL * costs.seconds(1, 0)
        block = self._network.spec.block
        passes = costs.seconds(block, 0) if block else self._levels * costs.seconds(BEAM, 0)
        return self._share * passes + self._levels * level
