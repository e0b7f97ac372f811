"""The target model: a transformers model wrapped so that passes over draft trees use tswift's KV
caches.

All modeling code stays in transformers. Two of its extension points are used: an attention function
of our own, and extra keyword arguments, which reach that function from the model's call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tswift.attention.sdpa import (
    Attention,
    ReferenceAttention,
    TreeAttention,
)
from tswift.caches import KVBuffer
from tswift.forward.cpu.kv_bounds import integer_steps
from tswift.forward.cpu.parts import Unfit
from tswift.forward.cpu.program import weights_state
from tswift.forward.cpu.runner import CompiledRunner
from tswift.forward.cuda.runner import ReplayedRunner
from tswift.forward.eager import EagerRunner, WrappedModel
from tswift.forward.fallbacks import Fallbacks
from tswift.forward.hf import (
    output_of,
    output_rule,
)
from tswift.forward.passes import Forwarded, Nodes, T
from tswift.sampling.sampler_c import Drawn


class Target(WrappedModel):
    """A model whose tokens are verified, or that drafts.

    Args:
        model: a causal language model of transformers; its attention is replaced by ours.
        attention: the backend.

    Raises:
        UnsupportedModel: the layers need an attention that we do not have.
    """

    def __init__(self, model: PreTrainedModel, attention: type[Attention] = TreeAttention) -> None:
        super().__init__(model, attention)
        # with these: a prompt is forwarded in chunks of PROMPT_CHUNK tokens all the same, as
        # products of few rows are slow. Their bits differ from those of narrow passes, so every
        # method has to forward the same tokens as the prompt
        self.chunked_prompt = False
        # with these: what was generated may be forwarded in chunks of PROMPT_CHUNK tokens, too,
        # as a token's bits are those of narrow passes there; a function where that is yet to be
        # tried
        self.chunked_text: bool | Callable[[Target], bool] = False
        # the weights that the steps of int16 follow from
        self._bounded: list[tuple[int, int]] | None = None
        # a network of tswift.speculators that drafts, and reads states of the layers; None for none
        self.speculator: Any = None
        self.speculator_spec: Any = None
        self.runner = self._usual_runner()

    def reference(self) -> Target:
        """The same model with the slow attention of reference implementations, for comparison."""
        twin = copy(self)
        twin.fallbacks = Fallbacks(self.fallbacks)
        twin.fixed_rows = None
        # it reads what the others read, and converts nothing on the way
        shape = self.kv_shape
        twin.kv_shape = replace(shape, dtype=self.dtype, rounds_to=shape.dtype, steps_behind=False)
        twin.backend = ReferenceAttention
        twin.attention = ReferenceAttention.__name__
        twin.most_nodes = ReferenceAttention.MAX_NODES
        twin.runner = EagerRunner(twin)
        return twin

    def set_fixed_rows(
        self,
        rows: int | None,
        chunked_prompt: bool = False,
        chunked_text: bool | Callable[[Target], bool] = False,
    ) -> None:
        """Pad every pass over the text to ``rows`` rows, so that all run the same kernels.

        Args:
            rows: None for passes as wide as they happen to be.
            chunked_prompt: forward prompts in chunks of PROMPT_CHUNK tokens all the same.
            chunked_text: and what was generated, where that gives a token the same bits.
        """
        self.fixed_rows = rows
        self.chunked_prompt = chunked_prompt
        self.chunked_text = chunked_text

    def _usual_runner(self) -> EagerRunner:
        return ReplayedRunner(self) if self.backend.STATIC else EagerRunner(self)

    def use_program(self, wanted: bool = True) -> None:
        """Let a C program make passes over caches in their dtype; or PyTorch again.

        Raises:
            Unfit: there is none for the model.
            Unbuilt: there is none here.
        """
        self.runner = CompiledRunner(self) if wanted else self._usual_runner()

    def set_speculator(self, speculator: Any) -> None:
        """Have a published drafter, which reads states of its layers."""
        self.speculator = speculator
        self.speculator_spec = speculator.spec

    def set_kv_dtype(self, kv_dtype: torch.dtype) -> None:
        """Keep keys and values in another dtype from now on; before any are prepared.

        Raises:
            Unfit: a model whose keys and values have no known bounds, which int16 needs.
        """
        steps = integer_steps(self.model) if kv_dtype == torch.int16 else None
        behind = kv_dtype == torch.int8 and self.backend.STEPS_BEHIND
        before = self.kv_shape
        self.kv_shape = replace(before, dtype=kv_dtype, steps=steps, steps_behind=behind)
        try:
            self.runner = self.runner.rebuilt()
        except Unfit:
            self.kv_shape = before
            raise
        self._bounded = None if steps is None else weights_state(self.model)

    @property
    def apart(self) -> str | None:
        """Why each text has passes of its own; None where several texts may share one."""
        if self.runner.most_rows is not None:
            return None
        if self.on_cuda:
            return "a pass on a GPU is over one text"
        return self.fallbacks.get("exact", "its passes are not exact, which --exact may change")

    @property
    def replays(self) -> bool:
        """Whether passes over a full cache can be replayed while the text grows."""
        return self.runner.replays

    @torch.inference_mode()
    def renew(self) -> None:
        """Follow weights that have been changed: bound keys and values anew, as the runner does
        with what it made of them.
        """
        if self._bounded not in (None, now := weights_state(self.model)):
            assert self.kv_shape.steps is not None
            # in place: caches and copies of the shape have it
            self.kv_shape.steps.copy_(integer_steps(self.model))
            self._bounded = now
        self.runner.renew()

    @torch.inference_mode()
    def prepare(self, kv: KVBuffer, limit: int) -> None:
        """Prepare passes of up to ``limit`` nodes over a cache, where they can be replayed."""
        self.runner.prepare(kv, limit)

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        """A program over tensors that stay in place, as one CUDA graph where that is possible."""
        return self.runner.capture(run)

    @torch.inference_mode()
    def forward(self, nodes: Nodes) -> Forwarded:
        """Forward the nodes of a tree in one pass.

        Raises:
            ValueError: there are more nodes than passes over the text have rows.
        """
        return self.runner.forward(nodes)

    def verify(self, asks: Sequence[Ask]) -> list[Verified]:
        """As :meth:`forward`, for several texts with a cache each, in as few passes as keep their
        bits; with the logits, and what is drawn from them.
        """
        if len(asks) == 1:  # at once: of a small model a pass takes as long as little else
            return _verified(self, asks)
        return [found for some in _packed(self.runner, asks) for found in _verified(self, some)]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, V]`` logits of the hidden states ``[n, H]`` of a pass over the text,
        in the model's dtype.
        """
        return self.runner.logits(hidden)

    def open_logits(self, hidden: Tensor, rule: tuple[float, float] | None = None) -> Tensor:
        """``[..., V]`` logits of hidden states ``[..., H]`` for a draft or a loss:
        gradients flow back.

        ``rule``: a factor and a cap in place of the model's own, as of :func:`output_rule`.
        """
        if rule is not None and rule != output_rule(self.model.config):
            return output_of(self.model, rule=rule)(hidden)
        return self.runner.open_logits(hidden)


@dataclass(frozen=True)
class Ask:
    """What one text wants of a pass, which other texts may share.

    Attributes:
        target: whose pass.
        nodes: what to forward.
        draw: draws tokens from their logits ``[n, V]``.
        by_program: whether ``draw`` may also be given the address of what logits are computed from:
            all is one C function then, where there is one for such passes.
    """

    target: Target
    nodes: Nodes
    draw: Callable[..., Drawn]
    by_program: bool = False


class Verified(NamedTuple):
    """What a pass came to for one of its texts.

    Attributes:
        forwarded, logits: its nodes' part of the pass, and their logits ``[n, V]``.
        drawn: what was drawn from those.
        share: seconds that the pass took with logits and draws, as much of them as its nodes are
            of all.
        texts: that shared the pass.
    """

    forwarded: Forwarded
    logits: Tensor
    drawn: Drawn
    share: float
    texts: int = 1


def _packed(runner: EagerRunner, asks: Sequence[Ask]) -> list[list[Ask]]:
    """What is asked for by pass."""
    packed: list[list[Ask]] = []
    left = 0
    for ask in asks:
        most = runner.most_rows if runner.joins(ask.nodes) else None
        if most is None or len(ask.nodes) > left:
            packed.append([])
            left = most or 0
        packed[-1].append(ask)
        left -= len(ask.nodes)
    return packed


def _verified(target: Target, asks: Sequence[Ask]) -> list[Verified]:
    """As :meth:`Target.verify`, in one pass."""
    started = time.perf_counter()
    ask, alone = asks[0], len(asks) == 1
    one = target.runner.verify(ask.nodes, ask.draw) if alone and ask.by_program else None
    if one is not None:
        return [Verified(*one, time.perf_counter() - started)]
    texts = [ask.nodes for ask in asks]
    forwarded = [target.forward(ask.nodes)] if alone else target.runner.forward_together(texts)
    hidden = [each.hidden for each in forwarded]
    logits = target.logits(hidden[0] if alone else torch.cat(hidden))
    rows = logits.split([*map(len, texts)])
    drawn = [ask.draw(own) for ask, own in zip(asks, rows, strict=True)]
    found = zip(forwarded, rows, drawn, strict=True)
    by_row = (time.perf_counter() - started) / sum(map(len, texts))
    return [
        Verified(*each, by_row * len(own), len(asks))
        for each, own in zip(found, texts, strict=True)
    ]
