"""The one decode loop: prefill, then step by step until the text is as long as wanted.

Plain autoregressive decoding is this loop with a draft of nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.drafter import Context, Drafter
from tswift.decoding.finite import not_finite
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.decoding.step import AcceptFn, NoTokenLeft, Step, decode_step
from tswift.kv.full import FullKV
from tswift.models.target import Show, Target


class Decoding:
    """A decode: a model, a prompt, sampling parameters and a seed, which together fix the text.

    Args:
        target: the model.
        prompt: at least one token id.
        params: the sampling parameters.
        seed: any integer.
        drafter: how to draft; it decides the speed and nothing else. It holds state: a new one for every decode.
        length: most tokens that will be generated, for which the KV cache is allocated; those written count.
        walk: which drafted tokens to accept, to time a given acceptance; the text is not the model's then. None accepts
            what the sampling rule draws.
        written: the tokens that the decode has generated already. It goes on after them as if it had never stopped.

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
        self._prefilled = False
        self._stepper: DeviceStepper | None = None
        self._plain: DeviceStepper | None = None

    def prefill(self, show: Show | None = None, along: Sequence[Decoding] = ()) -> float:
        """Forward the text so far, all but its last token, which is the first draft's root.

        Args:
            show: called after every chunk with the tokens forwarded so far and those to forward in all.
            along: decodes of the same text by the same model, whose prefill this is, too.

        Returns:
            The seconds it took.

        Raises:
            ValueError: they are of other texts.
        """
        together = (self, *along)
        if any(each._prefilled for each in together):
            raise RuntimeError("this decode has been prefilled already")
        if any(each._context.text != self._context.text for each in along):
            raise ValueError("the decodes are not of the same text")
        started = time.perf_counter()
        for each in together:
            each._context.sampler.extend(each._context.text)
        text = self._context.text[:-1]
        for forwarded in self._target.chunks(text, self._kv):
            for each in together:
                each._context.last = forwarded
                each._drafter.prefilled(each._context, forwarded)
            if show is not None:
                show(self._kv.length, len(text))
        for each in along:
            each._kv.take(self._kv)
        self._target.synchronize()
        prefilled = time.perf_counter() - started
        started = time.perf_counter() - prefilled
        for each in together:
            context = each._context
            if context.last is not None:
                context.path = range(len(context.last.hidden))
            each._drafter.committed(context)
            each._prefilled = True
            if self._target.replays:
                each._stepper = DeviceStepper(self._target, context, each._drafter)
        self._target.synchronize()
        return time.perf_counter() - started

    def steps(self, stop: Collection[int] = ()) -> Iterator[Step]:
        """Generate exactly what is left of ``length``, less if one of ``stop`` is drawn (it is the last one then).

        Raises:
            NotFinite: the model gave NaN or infinity where a token was to be drawn. That step adds nothing.
        """
        if not self._prefilled:
            self.prefill()
        left, self._left = self._left, 0
        if not left:
            raise RuntimeError("the steps of a decode can be taken once")
        while left > 0:
            step = self._step(self._stepper, self._context, self._drafter, left, stop, self._walk)
            left = 0 if step.tokens[-1] in stop else left - len(step.tokens)
            yield step

    def settle(self) -> float:
        """Wait until the device has done all that the steps so far gave it to do; returns the seconds that took."""
        started = time.perf_counter()
        self._target.synchronize()
        return time.perf_counter() - started

    def plain(self, count: int) -> list[Step]:
        """What plain decoding does and costs from here on: up to ``count`` one-token steps, all taken back.

        Call it between two steps. Text, KV cache and the steps to come are as if it had not been called. It goes no
        further than one token beyond the length asked for.
        """
        own, kv, plain = self._context, self._kv, Drafter()
        held = kv.length
        aside = replace(own, text=list(own.text), sampler=own.sampler.copy())
        if self._stepper is not None and self._plain is None:
            self._plain = DeviceStepper(self._target, aside, plain)
        elif self._plain is not None:  # a captured program goes on with the tensors that it was captured with
            self._plain.restart(aside.text, own.sampler)
        try:
            return [self._step(self._plain, aside, plain, 1, (), None) for _ in range(min(count, self._last - held))]
        finally:
            kv.length = held

    def _step(
        self,
        stepper: DeviceStepper | None,
        context: Context,
        drafter: Drafter,
        wanted: int,
        stop: Collection[int],
        walk: AcceptFn | None,
    ) -> Step:
        try:
            if stepper is not None:
                return stepper.step(wanted, stop, walk)
            return decode_step(self._target, context, drafter, wanted, stop, walk)
        except NoTokenLeft as nothing:
            params = context.sampler.params
            raise not_finite(self._target, context.kv, context.text, nothing.logits, params) from None
