"""The target model: a transformers model wrapped so that passes over draft trees use tswift's KV
caches.

All modeling code stays in transformers. Two of its extension points are used: an attention function
of our own, and extra keyword arguments, which reach that function from the model's call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from tswift.attention.backends import exact_attention
from tswift.attention.sdpa import (
    Attention,
    BatchInvariantAttention,
    BlockwiseAttention,
    MaskedAttention,
    ReferenceAttention,
    TreeAttention,
)
from tswift.caches import FullKV, KVBuffer, KVShape
from tswift.forward.cpu.kv_bounds import integer_steps
from tswift.forward.cpu.parts import Unfit
from tswift.forward.cpu.products import PackedEmbedding
from tswift.forward.cpu.program import weights_state
from tswift.forward.cpu.runner import CompiledRunner
from tswift.forward.cuda.fused_layers import rows_stand_alone
from tswift.forward.cuda.runner import ReplayedRunner
from tswift.forward.eager import EagerRunner
from tswift.forward.fallbacks import Fallbacks
from tswift.forward.hf import (
    Tap,
    UnsupportedModel,
    final_norm,
    output_of,
    output_rule,
    probe_attention,
)
from tswift.forward.passes import Attend, Forwarded, Nodes, Pass, T, rows_of
from tswift.forward.recurrent import (
    StatePass,
    StaticStatePass,
    device_kernel,
    passing,
    serve_states,
)
from tswift.models.architecture import max_positions, state_shape


class Target:
    """A model whose tokens are verified, or that drafts.

    Args:
        model: a causal language model of transformers; its attention is replaced by ours.
        attention: the backend.

    Raises:
        UnsupportedModel: the layers need an attention that we do not have.
    """

    def __init__(self, model: PreTrainedModel, attention: type[Attention] = TreeAttention) -> None:
        self.model = model.eval().requires_grad_(False)
        probe = probe_attention(model)
        self.backend = attention
        self.attention = attention.__name__
        self.most_nodes = attention.MAX_NODES  # of a draft tree; None if there is no such limit
        self._norm_tap: Tap | None = None
        self.has_pre_norm = False  # whether passes also return the states before the final norm
        self._layer_taps: dict[int, Tap] = {}
        self.tapped: tuple[int, ...] = ()  # layers whose states are asked for, in order
        # rows that every pass over the text is padded to, so that a token's bits do not depend on
        # how it was forwarded; None if passes are as wide as they happen to be
        self.fixed_rows: int | None = None
        # with these: a prompt is forwarded in chunks of PROMPT_CHUNK tokens all the same, as
        # products of few rows are slow. Their bits differ from those of narrow passes, so every
        # method has to forward the same tokens as the prompt
        self.chunked_prompt = False
        # with these: what was generated may be forwarded in chunks of PROMPT_CHUNK tokens, too,
        # as a token's bits are those of narrow passes there; a function where that is yet to be
        # tried
        self.chunked_text: bool | Callable[[Target], bool] = False
        self.fallbacks = Fallbacks()
        # the weights that the steps of int16 follow from
        self._bounded: list[tuple[int, int]] | None = None
        # a network of tswift.speculators that drafts, and reads states of the layers; None for none
        self.speculator: Any = None
        self.speculator_spec: Any = None
        self._decoder = model.get_decoder()
        self.output = output_of(model)
        self._embeddings = model.get_input_embeddings()
        config = model.config.get_text_config()
        lm_head = model.get_output_embeddings()
        # a quantised weight need not have the layer's shape, nor the type that it computes in
        self.vocab_size: int = getattr(lm_head, "out_features", None) or lm_head.weight.shape[0]
        self.hidden_size: int = config.hidden_size
        self.max_positions = max_positions(config)
        # windows, soft caps and sinks of the layers, in words (empty for none) and by layer
        self.attention_features = probe.attention_features
        self.layer_specs = probe.layer_specs
        self.device = probe.device
        self.dtype = probe.dtype
        states = state_shape(model.config, self.dtype, self.device)
        if states is not None:
            serve_states(model)
        self.kv_shape: KVShape = probe.kv_shape(states)
        self._layouts = probe.layouts
        self._layers = probe.kept
        # query heads per KV head, of layers where they are most
        self.groups = max(layout.groups for layout in self._layouts.values())
        self.runner = self._usual_runner()  # what makes its passes

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
    def on_cuda(self) -> bool:
        """Whether it is on a GPU, else it is on the CPU."""
        return self.device.type == "cuda"

    @property
    def replays(self) -> bool:
        """Whether passes over a full cache can be replayed while the text grows."""
        return self.runner.replays

    @torch.inference_mode()
    def tap(self, layers: Sequence[int] | None = None) -> None:
        """Let passes from now on also return the states before the final norm,
        or else those after layers, from 0.

        Call it before any are prepared.

        Raises:
            UnsupportedModel: the model has no final norm of a known name, or a layer's output is no
                such state.
        """
        if layers is None and self.has_pre_norm:
            return
        norm = None if layers is not None else final_norm(self._decoder)
        if norm is not None:
            self._norm_tap = Tap(norm, before=True)
            self.has_pre_norm = True
        elif not hasattr(self._decoder, "layers"):
            raise UnsupportedModel("no layers that tswift knows of")
        else:
            self.tapped = tuple(layers or ())
            self._layer_taps = {layer: Tap(self._decoder.layers[layer]) for layer in {*self.tapped}}
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        forwarded = self.forward_eager(Nodes(zero, zero, FullKV(self.kv_shape, 1)))
        if norm is not None and not torch.equal(norm(forwarded.pre_norm), forwarded.hidden):
            raise UnsupportedModel("something after its final norm")
        taps = forwarded.layer_states
        if norm is None and (
            taps is None or taps.shape != (1, len(self.tapped) * self.hidden_size)
        ):
            raise UnsupportedModel("layers whose outputs are no states")

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

    def serves(self, kv: KVBuffer | None = None) -> bool:
        """Whether the attention does all that the layers need over such a cache:
        windows need slots in order.

        None asks for the text's.
        """
        if not self.attention_features:
            return True
        return (
            self.backend.SPECS
            and "features" not in self.fallbacks
            and (kv is None or isinstance(kv, FullKV))
        )

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        """A program over tensors that stay in place, as one CUDA graph where that is possible."""
        return self.runner.capture(run)

    @torch.inference_mode()
    def compute_static(
        self, nodes: Nodes, length: Tensor, batch_invariant: bool = False
    ) -> Forwarded:
        """As :meth:`forward`, with the cache's length on the device (``[]`` int32), so that a graph
        serves any length.

        Only where :attr:`replays` is true, and :meth:`serves` for the cache.

        ``batch_invariant``: of any number of tokens that follow each other, by layers whose rows
        do not depend on how many there are: a token has the bits that a pass of the fixed rows
        gives it.
        """

        kv, count = nodes.kv, len(nodes)
        if batch_invariant:
            rows = count
            attends = self._attends(partial(BlockwiseAttention, self.backend), None, length, count)
        else:
            rows = self._rows(self.fixed_rows, nodes)
            attends = self._attends(self.backend, None, length, count, nodes.ancestors)
        states = None
        if kv.states is not None:
            kernel = device_kernel(kv.shape.device, kv.states.shape.wide)
            assert kernel is not None
            states = StaticStatePass(kv.states, count, nodes.ancestors, kernel)
        write = partial(self._store, kv, length)
        run = Pass(write, attends, count, rows, (kv, length), batch_invariant, states)
        return self._compute(nodes, run)

    def _store(
        self, kv: KVBuffer, length: Tensor, layer: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`KVBuffer.write`, by the attention, which reads a cache as it is."""
        self.backend.store(kv.keys[layer], kv.values[layer], keys, values, length)
        return kv.keys[layer], kv.values[layer]

    @torch.inference_mode()
    def forward(self, nodes: Nodes) -> Forwarded:
        """Forward the nodes of a tree in one pass.

        Raises:
            ValueError: there are more nodes than passes over the text have rows.
        """
        return self.runner.forward(nodes)

    def verify(
        self, nodes: Nodes, draw: Callable[..., T], by_program: bool
    ) -> tuple[Forwarded, Tensor, T]:
        """As :meth:`forward`, with the logits ``[n, V]`` and what is drawn from them.

        ``by_program``: whether ``draw`` may also be given the address of what logits are computed
        from: all is one C function then, where there is one for such passes.
        """
        found = self.runner.verify(nodes, draw) if by_program else None
        if found is not None:
            return found
        forwarded = self.forward(nodes)
        logits = self.logits(forwarded.hidden)
        return forwarded, logits, draw(logits)

    @torch.inference_mode()
    def forward_eager(self, nodes: Nodes, width: int | None = None) -> Forwarded:
        """As :meth:`forward`, by PyTorch whatever is prepared; in a pass over the text of so many
        rows, if any.
        """
        kv, ancestors = nodes.kv, nodes.ancestors
        rows = self._rows(width, nodes)
        masked: MaskedAttention | None = None
        special: type[Attention] | None = None
        if width is None or not isinstance(kv, FullKV):
            attention: Callable[..., Attention] = self.backend
            if not self.serves(kv):
                masked = MaskedAttention(
                    self.dtype, self.layer_specs, kv, nodes.positions, ancestors
                )
        else:  # with attention whose rows are exact
            attention = partial(exact_attention, self.backend)
            special = None if self.serves() else BatchInvariantAttention
        attends = self._attends(attention, special, kv.length, len(nodes), ancestors)
        if masked is not None:
            attends = [
                (partial(masked, layer), False) if spec else attends[layer]
                for layer, spec in enumerate(self.layer_specs)
            ]
        states = None if kv.states is None else StatePass(kv.states, len(nodes), ancestors)
        write = kv.write
        if kv.shape.steps_behind:
            length = torch.full((), kv.length, dtype=torch.int32, device=self.device)
            store = partial(self._store, kv, length)
            ours = masked is None and special is None

            def write(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
                by_kernel = ours or not self.layer_specs[layer]
                return (store if by_kernel else kv.write)(layer, keys, values)

        return self._compute(nodes, Pass(write, attends, len(nodes), rows, states=states))

    def _attends(
        self,
        usual: Callable[..., Attention | BlockwiseAttention],
        special: Callable[..., Attention] | None,
        *given: object,
    ) -> list[Attend]:
        """The attention of each layer in a pass; of windows, soft caps and sinks ``special``, if
        the usual one is not.

        Layers share it whose heads are of one number and size.
        """
        made: dict[object, Attention | BlockwiseAttention] = {}
        found: list[Attend] = []
        for layer, spec in zip(self._layers, self.layer_specs, strict=True):
            heads = layer.heads, layer.head_dim
            kind = special if special and spec else usual
            if (kind, heads) not in made:
                made[kind, heads] = kind(self._layouts[heads], *given)
            attend: Callable[..., Tensor] = made[kind, heads]
            padded = made[kind, heads].PADDED
            found.append((partial(attend, spec=spec) if spec else attend, padded))
        return found

    def _rows(self, width: int | None, nodes: Nodes) -> int:
        """Rows of a pass: those of :func:`rows_of`, unless each has its bits by itself.

        Raises:
            ValueError: as that.
        """
        rows = rows_of(width, nodes.kv, len(nodes))
        return len(nodes) if rows_stand_alone(self.model) else rows

    def _compute(self, nodes: Nodes, run: Pass) -> Forwarded:
        """Call the decoder."""
        tokens, positions = nodes.tokens, nodes.positions
        if run.rows > run.nodes:
            tokens, positions = (
                F.pad(row, (0, run.rows - run.nodes)) for row in (tokens, positions)
            )
        with nullcontext() if run.states is None else passing(run.states):
            out = self._decoder(
                input_ids=tokens.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                tswift=run,
            )
        pre_norm = self._norm_tap.take()[: run.nodes] if self._norm_tap else None
        states = {layer: tap.take()[: run.nodes] for layer, tap in self._layer_taps.items()}
        taps = torch.cat([states[layer] for layer in self.tapped], -1) if states else None
        padded = out.last_hidden_state[0]
        return Forwarded(padded[: run.nodes], run.queries, pre_norm, taps, padded)

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

    @torch.inference_mode()
    def embed(self, token: int | Tensor, scale: float | None = None) -> Tensor:
        """``[..., H]`` input embeddings of tokens, given as an integer or as ``[...]`` int64.

        ``scale``: a factor of the embeddings as they are stored, in place of what the model does
        to them.
        """
        tokens = torch.as_tensor(token).to(self.device, non_blocking=True)
        layer = self._embeddings
        if scale is None:
            return layer(tokens)
        if isinstance(layer, PackedEmbedding):
            return layer.scaled(tokens, scale)
        return F.embedding(tokens, layer.weight) * scale
