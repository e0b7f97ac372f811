"""The decode loop: prefill, then step by step until the text is as long as wanted.

A step drafts a tree, verifies it in one pass, and keeps what the sampling rule would have drawn:
the rule is applied once at every node, at the node's own position and with its own penalty window,
and the walk from the root follows the drawn tokens. So the text is that of plain decoding, which is
this loop with a draft of nothing. A draft that is itself decoded, by another model or over another
cache, takes the same step.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tswift.caches import FullKV, KVBuffer
from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.drafter import Context, Drafter, DraftTree, Step, WalkFn
from tswift.decoding.step import Stepper, Walked
from tswift.decoding.text import TextStream
from tswift.decoding.work import Work, alone
from tswift.errors import DecodeError
from tswift.forward.passes import Nodes
from tswift.forward.target import Ask, Target
from tswift.forward.text import OnProgress, chunks, first_broken
from tswift.machine import synchronize
from tswift.sampling.kernels import use_kernels
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import NO_TOKEN, LogprobRecorder, NoTokenLeft, Sampler

_TOKENS = 512  # looked at together


class HostStepper(Stepper[DraftTree]):
    """Takes steps whose trees are walked by the host.

    Args:
        target, context, drafter, simulate: as for :class:`Stepper`.
        with_runner_up: give each token's runner-up and its lead over that.
    """

    def __init__(
        self,
        target: Target,
        context: Context,
        drafter: Drafter,
        simulate: WalkFn | None = None,
        with_runner_up: bool = False,
    ) -> None:
        super().__init__(target, context, drafter, simulate)
        self._with_runner_up = with_runner_up
        self._propose = partial(drafter.propose, context)

    def _walk(self, proposed: DraftTree) -> Work[Walked]:
        tree, target, context = proposed, self._target, self._context
        places = [context.position + depth for depth in tree.depths]
        tokens, positions = torch.from_numpy(np.array([tree.tokens, places])).to(
            target.device, non_blocking=True
        )
        ancestors = tree.ancestors().to(target.device, non_blocking=True)
        sampler = context.sampler
        draw = partial(
            sampler.draw_nodes,
            nodes=(tokens, positions, ancestors),
            parents=None if self._simulate else tree.parents,
            with_runner_up=self._with_runner_up,
        )
        nodes = Nodes(tokens, positions, context.kv, ancestors)
        by_program = not self._simulate and sampler.program(torch.float32) is not None
        asked = time.perf_counter()
        answer = yield Ask(target, nodes, draw, by_program)
        assert answer is not None
        self._elsewhere += time.perf_counter() - asked - answer.share
        context.texts = answer.texts
        drawn, leads = answer.drawn
        context.digest = None
        path = self._simulate(tree, drawn) if self._simulate else tree.walk(drawn)
        new = [tree.tokens[node] for node in path[1:]] + [drawn[path[-1]]]
        if any(drawn[node] == NO_TOKEN for node in path):
            path = []
        drafted = max(tree.depths) if self._drafter.varies else None
        return Walked(
            path, new, tree.sources, len(tree), answer.forwarded, answer.logits, leads, drafted
        )

    def _without_draft(self, proposed: DraftTree) -> DraftTree | None:
        return DraftTree(self._context.text[-1], limit=1) if len(proposed) > 1 else None

    def _commit(self, walked: Walked) -> None:
        self._context.kv.commit(walked.path)
        self._context.sampler.extend(walked.tokens)


def stepper_for(
    target: Target,
    context: Context,
    drafter: Drafter,
    simulate: WalkFn | None = None,
    ahead: bool = False,
) -> HostStepper | DeviceStepper:
    """What takes the steps of a decode over its full cache: see :class:`Stepper`,
    and ``ahead`` of :class:`DeviceStepper`.
    """
    if target.replays:
        return DeviceStepper(target, context, drafter, simulate, ahead)
    return HostStepper(target, context, drafter, simulate)


class Decoding:
    """A decode: a model, a prompt, sampling parameters and a seed, which together fix the text.

    Args:
        target, prompt, params, seed: the model, at least one token id, the sampling parameters, and
            any integer.
        drafter: decides the speed and nothing else. It holds state: a new one for every decode.
        length: most tokens to generate, those in ``written`` included; the KV cache is allocated
            for them.
        simulate: chooses the drafted tokens to accept, to time a given acceptance; the text is not
            the model's then. None accepts what the sampling rule draws.
        written: tokens generated already. The decode goes on after them as if it had never stopped.
        logprobs: give each step its tokens' log-probabilities, and those of so many likeliest ones;
            None for not.
        kv: a cache for so many tokens, and the most nodes of a draft tree; what it holds of the
            text's beginning is not forwarded. None for a new one.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, or a length that leaves nothing
            to generate.
    """

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        drafter: Drafter,
        length: int,
        simulate: WalkFn | None = None,
        written: Sequence[int] = (),
        logprobs: int | None = None,
        kv: FullKV | None = None,
    ) -> None:
        if not prompt:
            raise ValueError("prompt must have at least one token")
        for name, ids in (("prompt", prompt), ("written", written)):
            if not all(0 <= token < target.vocab_size for token in ids):
                raise ValueError(
                    f"{name} has token ids outside the vocabulary of {target.vocab_size}"
                )
        if length <= len(written):
            raise ValueError(f"length must be at least {len(written) + 1}, got {length}")
        self._target = target
        self._drafter = drafter
        self._left = length - len(written)
        self._ended = False
        self._simulate = simulate
        sampler = Sampler(params, seed, target.vocab_size, target.device, prompt=len(prompt))
        self._kv = kv or FullKV(target.kv_shape, len(prompt) + length + drafter.limit)
        self._kv.wanted = len(prompt) + length + drafter.limit
        target.caches.add(self._kv)
        self._context = Context([*prompt, *written], sampler, self._kv)
        self._prompt = len(prompt)
        self._last = len(prompt) + length  # positions that may be committed
        self._logprobs = logprobs
        self.copied = self._kv.length  # tokens that are not forwarded
        self._prefilled = False
        self._stepper: HostStepper | DeviceStepper | None = None
        self._plain: HostStepper | DeviceStepper | None = None

    def prefill(
        self, on_progress: OnProgress | None = None, others: Sequence[Decoding] = ()
    ) -> float:
        """Prefill at once: see :meth:`prefilling`."""
        return alone(self.prefilling(on_progress, others))

    def prefilling(
        self, on_progress: OnProgress | None = None, others: Sequence[Decoding] = ()
    ) -> Work[float]:
        """Forward the text so far, all but its last token, which is the first draft's root;
        returns the seconds taken.

        ``on_progress`` is called after every chunk with the tokens forwarded so far and in all.
        Other decodes of the same text by the same model, ``others``, are prefilled by this, too.

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
        if self.copied:
            # the drafter's histories know of them that they came
            begun = replace(self._context, text=text[: self.copied + 1])
            for history in self._drafter.histories:
                history.committed(begun)
        for forwarded in chunks(self._target, text[self.copied :], self._kv, self._prompt - 1):
            self._kv.remember()
            for each in together:
                each._context.last = forwarded
                each._drafter.prefilled(each._context, forwarded)
            if on_progress is not None:
                on_progress(self._kv.length, len(text))
            paused = time.perf_counter()
            yield None
            started += time.perf_counter() - paused
        refuse_broken(self._target, self._kv, self._context.text, self._context.sampler.params)
        for each in others:
            each._kv.copy_from(self._kv)
        for each in together:
            context = each._context
            if each._logprobs is not None:
                context.recorder = LogprobRecorder(
                    context.sampler, context.text[-1], each._logprobs
                )
            if context.last is not None:
                context.path = range(len(context.last.hidden))
            each._drafter.committed(context)
            each._prefilled = True
            use_kernels(context.sampler, self._target.dtype)
            each._stepper = stepper_for(
                self._target,
                context,
                each._drafter,
                each._simulate,
                ahead=each._simulate is None,
            )
        synchronize(self._target.device)
        return time.perf_counter() - started

    @property
    def held(self) -> tuple[list[int], int, FullKV]:
        """The tokens that the cache holds, how many of the text are its prompt, and the cache."""
        return self._context.text[: self._kv.length], self._prompt, self._kv

    @property
    def ended(self) -> bool:
        """Whether the text is as long as wanted, or has come to its end."""
        return self._ended or self._left <= 0

    def steps(self, stop: Collection[int] = (), text: TextStream | None = None) -> Iterator[Step]:
        """Generate up to ``length`` tokens, or up to and including the first that ends the text;
        see :meth:`stepping`.
        """
        if not self._prefilled:
            self.prefill()
        if self.ended:
            raise RuntimeError("the steps of a decode can be taken once")
        while not self.ended:
            yield alone(self.stepping(stop, text))

    def stepping(self, stop: Collection[int] = (), text: TextStream | None = None) -> Work[Step]:
        """Take the next step of a prefilled decode.

        Tokens of ``stop`` end the text, and stop strings and loops of ``text``, to which what is
        generated is added; with that, steps have their texts, the last one what was held back, too.

        Raises:
            NotFinite: the model gave NaN or infinity where a token was to be drawn. That step adds
                nothing.
        """
        pieces: list[str] = []

        def truncate(tokens: Sequence[int]) -> int:
            for count, token in enumerate(tokens, start=1):
                self._ended = token in stop
                if text is not None:
                    pieces.append(text.add((token,)))
                    self._ended = self._ended or text.ended
                if self._ended:
                    return count
            return len(tokens)

        assert self._stepper is not None
        with self._finite(self._context):
            step = yield from self._stepper.stepping(self._left, truncate)
        self._left -= len(step.tokens)
        if text is not None:
            if self.ended:  # nothing is to come that could complete it
                pieces.append(text.finish())
            step = replace(step, text="".join(pieces))
        return step

    def settle(self) -> float:
        """Wait for the device's work on the steps so far; returns the seconds that took."""
        started = time.perf_counter()
        synchronize(self._target.device)
        return time.perf_counter() - started

    def plain(self, count: int) -> list[Step]:
        """Up to ``count`` steps of plain decoding from here on, all taken back: what they draw,
        and what they cost.

        Called between two steps, it changes neither the text nor the steps to come. It goes at most
        one token beyond the length asked for.
        """
        own = self._context
        kv = self._kv
        mark = kv.mark()
        sampler = own.sampler.copy()
        if self._stepper is not None and self._stepper.runs_ahead:
            # the sampler knows of a token to come
            sampler = Sampler(
                sampler.params,
                sampler.seed,
                self._target.vocab_size,
                self._target.device,
                self._prompt,
            )
            sampler.extend(own.text)
        aside = replace(own, text=list(own.text), sampler=sampler, recorder=None)
        if self._plain is None:
            self._plain = stepper_for(self._target, aside, Drafter())
        else:
            # a captured program goes on with the tensors that it was captured with
            self._plain.restart(aside.text, sampler)
        try:
            with self._finite(aside):
                return [self._plain.step(1) for _ in range(min(count, self._last - mark.length))]
        finally:
            kv.rewind(mark)

    @contextmanager
    def _finite(self, context: Context) -> Iterator[None]:
        """Tell where logits are not finite, if nothing can be drawn."""
        try:
            yield
        except NoTokenLeft as nothing:
            params = context.sampler.params
            raise not_finite(
                self._target, context.kv, context.text, nothing.logits, params
            ) from None


class NotFinite(DecodeError):
    """There is nothing to draw: logits are NaN or infinite,
    or the sampling parameters leave no token.
    """


def broken(logits: Tensor) -> Tensor:
    """Which rows of ``[n, V]`` have NaN or infinity: ``[n]`` bool;
    ``-inf`` is a token that cannot be drawn.
    """
    return ~(logits.amax(-1) < torch.inf)


@torch.inference_mode()
def not_finite(
    target: Target, kv: KVBuffer, text: Sequence[int], logits: Tensor, params: SamplingParams
) -> NotFinite:
    """The error where nothing can be drawn: a second pass finds the first output that is not
    finite.

    ``text`` has the tokens that the cache holds, which keeps its length, and the one after them,
    which gave ``logits`` ``[V]``.
    """
    held = kv.length
    if not broken(logits[None]).item():
        asked = (
            f"temperature {params.temperature}, penalty {params.penalty} and "
            f"{len(params.banned):,} banned ids"
        )
        return NotFinite(
            f"there is nothing to draw at position {held + 1:,}: the logits are finite; {asked} "
            "leave none of them so"
        )
    what = (
        f"the logits for position {held + 1:,} are {'NaN' if logits.isnan().any() else 'infinite'}"
    )
    # no way leads back to the states at that place
    start = _first_lost(kv) if kv.states is None else None
    try:
        kv.length = held if start is None else start
        first = kv.length
        found = first_broken(target, text[first : min(first + _TOKENS, held + 1)], kv)
    finally:
        kv.length = held
    if found is None:
        what += (
            "" if start is None else f", and keys or values of position {start:,} are not finite"
        )
        return NotFinite(
            f"{what}; a second pass gave finite ones: the memory or the device may be faulty"
        )
    name, node = found
    kind = str(target.dtype).removeprefix("torch.")
    return NotFinite(
        f"{what}; the first output that is not finite is that of {name} at position "
        f"{first + node:,}: its weights are broken, or {kind} is too narrow for the model"
    )


def refuse_broken(target: Target, kv: FullKV, text: Sequence[int], params: SamplingParams) -> None:
    """Raise :class:`NotFinite` for NaN in a cache of integers: the C program would take that for a
    number.
    """
    if not kv.shape.dtype.is_floating_point:
        if _first_lost(kv, kv.sound) is not None:
            raise not_finite(target, kv, text, torch.full((1,), torch.nan), params)
        kv.sound = kv.length


def _first_lost(kv: KVBuffer, begin: int = 0) -> int | None:
    """The first token in the cache, from a place on, whose keys or values are not finite in some
    layer.
    """
    for start in range(begin, kv.length, _TOKENS):
        fine = torch.ones(min(_TOKENS, kv.length - start), dtype=torch.bool, device=kv.shape.device)
        for buffer in kv.buffers:
            fine &= ~kv.shape.broken(buffer[:, :, start : start + len(fine)]).any(-1).any(0).any(0)
        if not fine.all():
            return start + int((~fine).nonzero()[0])
    return None
