"""The decode loop: prefill, then step by step until the text is as long as wanted.

A step drafts a tree, verifies it in one pass, and keeps what the sampling rule would have drawn: the rule is applied
once at every node, at the node's own position and with its own penalty window, and the walk from the root follows the
drawn tokens. So the text is that of plain decoding, which is this loop with a draft of nothing. A draft that is itself
decoded, by another model or over another cache, takes the same step.

Beside it: the figures of a decode, as the paper defines them, and decoding by several ranks in lockstep, where rank 0
decides when to stop and no rank goes on from other tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.drafter import REUSE, AcceptFn, Context, CutFn, Drafter, DraftTree, Step
from tswift.decoding.drawing import Drawn
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import NO_TOKEN, LogprobRecorder, NoTokenLeft, Sampler
from tswift.decoding.text import TextStream
from tswift.distributed import Dist, guard
from tswift.errors import Fault
from tswift.kv import FullKV, KVBuffer
from tswift.models.passes import Forwarded
from tswift.models.target import OnProgress, Target

_MOST, _LONGEST = 1 << 53, 1e12  # of what is counted, and seconds of a decode


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{value!r:.40} is no count")
    return value


@dataclass
class DecodeStats:
    """Counters of the steps seen so far.

    Attributes:
        depth: most tokens drafted along a path, by which alpha is divided: the paper's gamma + 1 for tokenswift; one
            less for medusa and reuse; 24 to 31 for dynamic trees, so compare tokens per step rather than alpha.
        passes: verification passes over the target.
        tokens: tokens generated.
        nodes: tree nodes verified, roots included.
        seconds: wall time of the steps, without prefill.
        accepted: number of steps that accepted 0, 1, ... drafted tokens.
        sizes: number of steps that verified 1, 2, ... nodes.
        choices: number of steps by drafter; empty where there is only one.
        reused: accepted tokens of steps whose last one came from a retrieved n-gram.
    """

    depth: int
    passes: int = 0
    tokens: int = 0
    nodes: int = 0
    seconds: float = 0.0
    accepted: Counter[int] = field(default_factory=Counter)
    reused: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)

    def add(self, step: Step) -> None:
        """Count one step."""
        self.passes += 1
        self.tokens += len(step.tokens)
        self.nodes += step.nodes
        self.seconds += step.seconds
        self.accepted[step.accepted] += 1
        self.sizes[step.nodes] += 1
        if step.choice:
            self.choices[step.choice] += 1
        if step.source == REUSE:
            self.reused += step.accepted

    def copy(self) -> DecodeStats:
        """A snapshot."""
        return deepcopy(self)

    def counters(self) -> dict[str, Any]:
        """All counters but tokens, ready for JSON."""
        return {
            name: {str(key): steps for key, steps in sorted(each.items())} if isinstance(each, Counter) else each
            for name, each in vars(self).items()
            if name not in ("depth", "tokens")
        }

    @classmethod
    def counted(cls, depth: int, tokens: int, counters: Mapping[str, Any]) -> DecodeStats:
        """From what :meth:`counters` gave; zeros if that is empty. ValueError if it is broken."""
        if not counters:
            return cls(depth, tokens=tokens)
        try:
            counted: dict[str, Any] = {name: _count(counters[name]) for name in ("passes", "nodes", "reused")}
            for name in ("accepted", "sizes"):
                counted[name] = Counter({_count(int(each)): _count(steps) for each, steps in counters[name].items()})
            counted["choices"] = Counter({str(name): _count(steps) for name, steps in counters["choices"].items()})
            seconds = counters["seconds"]
            if not 0 <= seconds < _LONGEST:
                raise ValueError(f"{seconds!r:.40} seconds")
            return cls(depth, tokens=tokens, seconds=float(seconds), **counted)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"its counters are broken ({error!r})") from None

    @property
    def alpha(self) -> float:
        """Acceptance rate: accepted draft tokens / (depth * passes); 0 where nothing is drafted."""
        return self._rate(sum(count * steps for count, steps in self.accepted.items()))

    @property
    def beta(self) -> float:
        """The part of alpha from steps whose longest accepted path came from a retrieved n-gram."""
        return self._rate(self.reused)

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens per verification pass."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def _rate(self, accepted: int) -> float:
        drafted = self.depth * self.passes
        return accepted / drafted if drafted else 0.0


def distinct(tokens: Sequence[int], n: int) -> float:
    """Distinct-n: unique n-grams / n-grams; 0 for a text shorter than n."""
    ids = np.asarray(tokens)
    if len(ids) < n:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(ids, n)
    return len(np.unique(grams, axis=0)) / len(grams)


_TOKENS = 512  # looked at together


def decode_step(
    target: Target,
    context: Context,
    drafter: Drafter,
    wanted: int,
    cut: CutFn = len,
    walk: AcceptFn | None = None,
    leads: bool = False,
) -> Step:
    """Take a step: at least one token is added to the context's text, and what was forwarded to its cache.

    Args:
        target, context, drafter: the model that draws, the decode, which moves on, and what proposes the draft tree.
        wanted: most tokens to add.
        cut: how many of the tokens drawn belong to the text.
        walk: as for :class:`Decoding`.
        leads: whether to give each token's runner-up and its lead over that.

    Raises:
        NoTokenLeft: nothing can be drawn.
    """
    started = time.perf_counter()
    with torch.inference_mode():
        tree = drafter.propose(context, wanted)
        forwarded, drawn, path, others = _verify(target, context, tree, walk, leads)
        if len(tree) > 1 and any(drawn[node] == NO_TOKEN for node in path):
            # not yet a fault: a drafted token may overflow in the model, and its NaN spreads in the pass
            tree = DraftTree(context.text[-1], limit=1)
            forwarded, drawn, path, others = _verify(target, context, tree, walk, leads)
        if drawn[path[-1]] == NO_TOKEN:
            raise NoTokenLeft(target.logits(forwarded.hidden)[0])
        new = [tree.tokens[node] for node in path[1:]] + [drawn[path[-1]]]
        kept = new[: cut(new)]
        logprobs = None
        if context.recorder is not None and context.logits is not None:
            logprobs = context.recorder.record(context.logits[path[: len(kept)]], kept)
        context.kv.commit(path)
        context.text += new
        context.sampler.extend(new)
        context.last, context.path = forwarded, path
        drafter.committed(context)
    accepted = min(len(path) - 1, len(kept))
    source = tree.sources[path[accepted]]
    near = tuple(others[node] for node in path[: len(kept)]) if leads else ()
    seconds = time.perf_counter() - started
    return Step(tuple(kept), accepted, source, len(tree), seconds, near, drafter.choice, logprobs)


def _verify(
    target: Target, context: Context, tree: DraftTree, walk: AcceptFn | None, leads: bool
) -> tuple[Forwarded, list[int], list[int], list[tuple[int, float]]]:
    """One pass over a tree, the token drawn after each node, the accepted nodes, and the leads if asked for."""
    places = [context.position + depth for depth in tree.depths]
    tokens, positions = torch.from_numpy(np.array([tree.tokens, places])).to(target.device, non_blocking=True)
    ancestors = tree.ancestors().to(target.device, non_blocking=True)
    sampler, nodes, parents = context.sampler, (tokens, positions, ancestors), None if walk else tree.parents
    found: Drawn | None = None
    if target.verifies(context.kv, len(tree)) and parents and sampler.program(torch.float32):
        follow = partial(sampler.follow, nodes=nodes, parents=parents, leads=leads)
        forwarded, logits, found = target.verify(tokens, positions, context.kv, ancestors, follow)
    else:
        forwarded = target.forward(tokens, positions, context.kv, ancestors)
        logits = target.logits(forwarded.hidden)
    context.logits = logits
    drawn, others = found or sampler.draw_nodes(logits, nodes, parents, leads)
    return forwarded, drawn, walk(tree, drawn) if walk else tree.walk(drawn), others


class Decoding:
    """A decode: a model, a prompt, sampling parameters and a seed, which together fix the text.

    Args:
        target, prompt, params, seed: the model, at least one token id, the sampling parameters, and any integer.
        drafter: decides the speed and nothing else. It holds state: a new one for every decode.
        length: most tokens to generate, those in ``written`` included; the KV cache is allocated for them.
        walk: which drafted tokens to accept, to time a given acceptance; the text is not the model's then. None accepts
            what the sampling rule draws.
        written: tokens generated already. The decode goes on after them as if it had never stopped.
        logprobs: give each step its tokens' log-probabilities, and those of so many likeliest ones; None for not.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, or a length that leaves nothing to generate.
    """

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        drafter: Drafter,
        length: int,
        walk: AcceptFn | None = None,
        written: Sequence[int] = (),
        logprobs: int | None = None,
    ) -> None:
        if not prompt:
            raise ValueError("prompt must have at least one token")
        for name, ids in (("prompt", prompt), ("written", written)):
            if not all(0 <= token < target.vocab_size for token in ids):
                raise ValueError(f"{name} has token ids outside the vocabulary of {target.vocab_size}")
        if length <= len(written):
            raise ValueError(f"length must be at least {len(written) + 1}, got {length}")
        self._target, self._drafter, self._left, self._walk = target, drafter, length - len(written), walk
        sampler = Sampler(params, seed, target.vocab_size, target.device)
        self._kv = FullKV(target.kv_shape, len(prompt) + length + drafter.limit)
        self._context = Context([*prompt, *written], sampler, self._kv)
        self._last = len(prompt) + length  # positions that may be committed
        self._logprobs = logprobs
        self._prefilled = False
        self._stepper: DeviceStepper | None = None
        self._plain: DeviceStepper | None = None

    def prefill(self, on_progress: OnProgress | None = None, others: Sequence[Decoding] = ()) -> float:
        """Forward the text so far, all but its last token, which is the first draft's root; returns the seconds taken.

        ``on_progress`` is called after every chunk with the tokens forwarded so far and in all. Other
        decodes of the same text by the same model, ``others``, are prefilled by this, too.

        Raises:
            ValueError: the texts differ.
            NotFinite: the model gave keys or values that are NaN or infinite.
        """
        together = (self, *others)
        if any(each._prefilled for each in together):
            raise RuntimeError("this decode has been prefilled already")
        if any(each._context.text != self._context.text for each in others):
            raise ValueError("the decodes are not of the same text")
        started = time.perf_counter()
        for each in together:
            each._context.sampler.extend(each._context.text)
        text = self._context.text[:-1]
        for forwarded in self._target.chunks(text, self._kv):
            for each in together:
                each._context.last = forwarded
                each._drafter.prefilled(each._context, forwarded)
            if on_progress is not None:
                on_progress(self._kv.length, len(text))
        refuse_broken(self._target, self._kv, self._context.text, self._context.sampler.params)
        for each in others:
            each._kv.take(self._kv)
        for each in together:
            context = each._context
            if each._logprobs is not None:
                context.recorder = LogprobRecorder(context.sampler, context.text[-1], each._logprobs)
            if context.last is not None:
                context.path = range(len(context.last.hidden))
            each._drafter.committed(context)
            each._prefilled = True
            if self._target.replays:
                each._stepper = DeviceStepper(self._target, context, each._drafter)
        self._target.synchronize()
        return time.perf_counter() - started

    def steps(self, stop: Collection[int] = (), text: TextStream | None = None) -> Iterator[Step]:
        """Generate up to ``length`` tokens, or up to and including the first that ends the text.

        Tokens of ``stop`` end it, and the stop strings of ``text``, to which what is generated is added.

        Raises:
            NotFinite: the model gave NaN or infinity where a token was to be drawn. That step adds nothing.
        """
        if not self._prefilled:
            self.prefill()
        left, self._left = self._left, 0
        if not left:
            raise RuntimeError("the steps of a decode can be taken once")
        ended = False

        def cut(tokens: Sequence[int]) -> int:
            nonlocal ended
            for count, token in enumerate(tokens, start=1):
                if text is not None:
                    text.add((token,))
                ended = token in stop or (text is not None and text.stopped is not None)
                if ended:
                    return count
            return len(tokens)

        while left > 0 and not ended:
            step = self._step(self._stepper, self._context, self._drafter, left, cut, self._walk)
            left -= len(step.tokens)
            yield step

    def settle(self) -> float:
        """Wait for the device's work on the steps so far; returns the seconds that took."""
        started = time.perf_counter()
        self._target.synchronize()
        return time.perf_counter() - started

    def plain(self, count: int) -> list[Step]:
        """Up to ``count`` steps of plain decoding from here on, all taken back: what they draw, and what they cost.

        Called between two steps, it changes neither the text nor the steps to come. It goes at most one token beyond
        the length asked for.
        """
        own, kv, plain = self._context, self._kv, Drafter()
        held = kv.length
        aside = replace(own, text=list(own.text), sampler=own.sampler.copy(), recorder=None)
        if self._stepper is not None and self._plain is None:
            self._plain = DeviceStepper(self._target, aside, plain)
        elif self._plain is not None:  # a captured program goes on with the tensors that it was captured with
            self._plain.restart(aside.text, own.sampler)
        try:
            return [self._step(self._plain, aside, plain, 1, len, None) for _ in range(min(count, self._last - held))]
        finally:
            kv.length = held

    def _step(
        self,
        stepper: DeviceStepper | None,
        context: Context,
        drafter: Drafter,
        wanted: int,
        cut: CutFn,
        walk: AcceptFn | None,
    ) -> Step:
        try:
            if stepper is not None:
                return stepper.step(wanted, cut, walk)
            return decode_step(self._target, context, drafter, wanted, cut, walk)
        except NoTokenLeft as nothing:
            params = context.sampler.params
            raise not_finite(self._target, context.kv, context.text, nothing.logits, params) from None


class NotFinite(Fault):
    """There is nothing to draw: logits are NaN or infinite, or the sampling parameters leave no token."""


def broken(logits: Tensor) -> Tensor:
    """Which rows of ``[n, V]`` have NaN or infinity: ``[n]`` bool; ``-inf`` is a token that cannot be drawn."""
    return ~(logits.amax(-1) < torch.inf)


@torch.inference_mode()
def not_finite(target: Target, kv: KVBuffer, text: Sequence[int], logits: Tensor, params: SamplingParams) -> NotFinite:
    """The error where nothing can be drawn: a second pass finds the first output that is not finite.

    ``text`` has the tokens that the cache holds, which keeps its length, and the one after them, which gave ``logits``
    ``[V]``.
    """
    held = kv.length
    if not broken(logits[None]).item():
        asked = f"temperature {params.temperature}, penalty {params.penalty} and {len(params.banned):,} banned ids"
        return NotFinite(
            f"there is nothing to draw at position {held + 1:,}: the logits are finite; {asked} leave none of them so"
        )
    what = f"the logits for position {held + 1:,} are {'NaN' if logits.isnan().any() else 'infinite'}"
    start = _first_broken(kv)
    try:
        kv.length = held if start is None else start
        first = kv.length
        found = target.first_broken(text[first : min(first + _TOKENS, held + 1)], kv)
    finally:
        kv.length = held
    if found is None:
        what += "" if start is None else f", and keys or values of position {start:,} are not finite"
        return NotFinite(f"{what}; a second pass gave finite ones: the memory or the device may be faulty")
    name, node = found
    kind = str(target.dtype).removeprefix("torch.")
    return NotFinite(
        f"{what}; the first output that is not finite is that of {name} at position {first + node:,}: "
        f"its weights are broken, or {kind} is too narrow for the model"
    )


def refuse_broken(target: Target, kv: KVBuffer, text: Sequence[int], params: SamplingParams) -> None:
    """Raise :class:`NotFinite` for NaN in a cache of integers: the C program would take that for a number."""
    if kv.shape.dtype == torch.int16 and _first_broken(kv) is not None:
        raise not_finite(target, kv, text, torch.full((1,), torch.nan), params)


def _first_broken(kv: KVBuffer) -> int | None:
    """The first token in the cache whose keys or values are not finite in some layer."""
    for start in range(0, kv.length, _TOKENS):
        fine = torch.ones(min(_TOKENS, kv.length - start), dtype=torch.bool, device=kv.keys.device)
        for buffer in (kv.keys, kv.values):
            fine &= ~kv.shape.broken(buffer[:, :, start : start + len(fine)]).any(-1).any(0).any(0)
        if not fine.all():
            return start + int((~fine).nonzero()[0])
    return None


def agree(drafter: Drafter, ranks: Dist) -> None:
    """Have a drafter check, before each pass, that all ranks have drafted the same tree; it raises a Fault if not."""
    own = drafter.propose

    def propose(context: Context, wanted: int) -> DraftTree:
        tree = own(context, wanted)
        if drafter.limit > 1:
            _refuse_different("drafts", ranks.gather(_digest(tree.parents, _digest(tree.tokens))))
        return tree

    drafter.propose = propose  # type: ignore[method-assign]


def lockstep(steps: Iterator[Step], ranks: Dist) -> Iterator[Step]:
    """The steps of a decode, each begun once all ranks want it and have the same text; a rank that stops ends all.

    Raises:
        KeyboardInterrupt: another rank wants no more (raised on rank 0; on others the iterator ends).
        Fault: another rank has drawn other tokens.
        Gone: another rank has died.
    """
    drawn = 0
    while True:
        with guard():
            unwilling = _unwilling(ranks, True, drawn)
            step = None if unwilling else next(steps, None)
        if unwilling:
            if ranks.first:
                raise KeyboardInterrupt(f"rank {unwilling[0]} was asked to stop")
            return
        if step is None:
            if ranks.first:
                break
            continue  # rank 0 has yet to say so
        drawn = _digest(step.tokens, drawn)
        try:
            yield step
        except GeneratorExit:
            break
    with suppress(RuntimeError):  # a dead rank need not be told
        _unwilling(ranks, False, drawn)


def _unwilling(ranks: Dist, willing: bool, drawn: int) -> list[int]:
    """The ranks that want no other step; all must have drawn the same."""
    answers = ranks.gather(int(willing), drawn)
    _refuse_different("tokens", [digest for _, *digest in answers])
    return [rank for rank, (theirs, _) in enumerate(answers) if not theirs]


def _refuse_different(what: str, digests: Sequence[Sequence[int]]) -> None:
    if any(theirs != digests[0] for theirs in digests):
        raise Fault(f"the {len(digests)} ranks have different {what}: they do not compute alike")


def _digest(tokens: Sequence[int], before: int = 0) -> int:
    return crc32(np.asarray(tokens, dtype="<i8").tobytes(), before)
