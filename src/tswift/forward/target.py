"""The target model: a transformers model wrapped so that passes over draft trees use tswift's KV
caches.

All modeling code stays in transformers. Two of its extension points are used: an attention function
of our own, and extra keyword arguments, which reach that function from the model's call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from tswift.attention.backends import exact_attention
from tswift.attention.sdpa import (
    Attention,
    AttentionByHeads,
    BatchInvariantAttention,
    BlockwiseAttention,
    Layout,
    MaskedAttention,
    PerLayerAttention,
    ReferenceAttention,
    TreeAttention,
)
from tswift.caches import FullKV, KVBuffer, KVShape
from tswift.forward.cpu.parts import Unfit
from tswift.forward.cpu.products import PackedEmbedding
from tswift.forward.cpu.program import PassProgram, integer_steps, weights_state
from tswift.forward.cuda.graphs import Graphs, StaticPass, sizes
from tswift.forward.hf import (
    Tap,
    UnsupportedModel,
    final_norm,
    output_of,
    output_rule,
    probe_attention,
)
from tswift.forward.passes import Attending, Forwarded, Pass, T
from tswift.forward.recurrent import (
    StatePass,
    StaticStatePass,
    device_kernel,
    passing,
    serve_states,
)
from tswift.models.architecture import max_positions, state_shape
from tswift.native_build import Unbuilt

if TYPE_CHECKING:
    from tswift.speculators.draft_network import DraftNetwork
    from tswift.speculators.spec import SpeculatorSpec


class Fallbacks(dict[str, str]):
    """Why something slower or less exact stands in for a part of a model, by that part.

    For the "attention" that should serve here, for its "features" (windows, soft caps, sinks), for
    kernels between the "layers"' products, for "steps" on the device (then no pass is replayed),
    for CUDA "graphs", for the "sampler"'s kernels, for "exact" passes, for "wide" ones over a text,
    for the kernels that walk "trees" and that step "states", for the "cache" of another dtype, for
    "draft weights" of fewer bits.
    """

    def __init__(self, *known: Mapping[str, str]) -> None:
        super().__init__(*known)
        self.told: set[str] = set()  # reasons that a warning has given

    def note(self, part: str, reason: str | None) -> None:
        """Keep the reason; None if nothing stands in for the part any more."""
        if reason:
            self[part] = reason
        else:
            self.pop(part, None)

    @property
    def graph_fault(self) -> str | None:
        """Why passes are not replayed as CUDA graphs although they could be;
        None if nothing went wrong.
        """
        return self.get("steps") or self.get("graphs")


class Target:
    """A model whose tokens are verified, or that drafts.

    Args:
        model: a causal language model of transformers; its attention is replaced by ours.
        attention: the backend.
        copied: the target of whose weights the model has a copy, and whose caches it is to read.

    Raises:
        UnsupportedModel: the layers need an attention that we do not have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: type[Attention] = TreeAttention,
        copied: Target | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        probe = probe_attention(model)
        self.backend = attention
        self.attention = attention.__name__
        self.most_nodes = attention.MAX_NODES  # of a draft tree; None if there is no such limit
        self._graphs: Graphs | None = None
        self._norm_tap: Tap | None = None
        self.has_pre_norm = False  # whether passes also return the states before the final norm
        self._layer_taps: dict[int, Tap] = {}
        self._tapped: tuple[int, ...] = ()  # layers whose states are asked for, in order
        self.passes: WeakKeyDictionary[KVBuffer, list[StaticPass]] = WeakKeyDictionary()
        # rows that every pass over the text is padded to, so that a token's bits do not depend on
        # how it was forwarded; None if passes are as wide as they happen to be
        self.width: int | None = None
        # with a width: a prompt is forwarded in chunks of PROMPT_CHUNK tokens all the same, as
        # products of few rows are slow. Their bits differ from those of narrow passes, so every
        # method has to forward the same tokens as the prompt
        self.chunked_prompt = False
        # with a width: what was generated may be forwarded in chunks of PROMPT_CHUNK tokens, too,
        # as a token's bits are those of narrow passes there; a function where that is yet to be
        # tried
        self.chunked_text: bool | Callable[[Target], bool] = False
        self.fallbacks = Fallbacks()
        # a C function that makes passes of up to MAX_WIDTH nodes, and the logits; None if PyTorch
        # makes them
        self.program: PassProgram | None = None
        # the weights that the steps of int16 follow from
        self._bounded: list[tuple[int, int]] | None = None
        self.speculator: DraftNetwork | None = None  # it reads states of the layers
        self.speculator_spec: SpeculatorSpec | None = None
        self._decoder = model.get_decoder()
        self._output = output_of(model)
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
        # over ranks: passes are collective, and not replayed
        self.split = (getattr(model, "tp_size", None) or 1) > 1
        states = state_shape(model.config, self.dtype, self.device)
        if states is not None:
            serve_states(model)
        self.kv_shape: KVShape = probe.kv_shape(states) if copied is None else copied.kv_shape
        if copied is not None:
            self.fallbacks.note("features", copied.fallbacks.get("features"))
        self._layouts = probe.layouts
        # query heads per KV head, of layers where they are most
        self.groups = max(layout.groups for layout in self._layouts.values())

    def reference(self) -> Target:
        """The same model with the slow attention of reference implementations, for comparison."""
        twin = copy(self)
        twin.fallbacks = Fallbacks(self.fallbacks)
        twin.width = twin.program = None
        # it reads what the others read, and converts nothing on the way
        twin.kv_shape = replace(self.kv_shape, dtype=self.dtype, rounded=self.kv_shape.dtype)
        twin.backend = ReferenceAttention
        twin.attention = ReferenceAttention.__name__
        twin.most_nodes = ReferenceAttention.MAX_NODES
        twin.passes = WeakKeyDictionary()
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
        self.width = rows
        self.chunked_prompt = chunked_prompt
        self.chunked_text = chunked_text

    def pack(self, wanted: bool = True) -> None:
        """Let a C program make passes over caches in their dtype; or PyTorch again.

        Raises:
            Unfit: there is none for the model.
            Unbuilt: there is none here.
        """
        dtype = self.kv_shape.dtype
        self.program = PassProgram(self.model, dtype, self.layer_specs) if wanted else None

    def set_speculator(self, speculator: DraftNetwork) -> None:
        """Have a published drafter, which reads states of its layers."""
        self.speculator = speculator
        self.speculator_spec = speculator.spec

    def set_kv_dtype(self, kv_dtype: torch.dtype) -> None:
        """Keep keys and values in another dtype from now on; before any are prepared.

        Raises:
            Unfit: a model whose keys and values have no known bounds, which int16 needs.
        """
        steps = integer_steps(self.model) if kv_dtype == torch.int16 else None
        if self.program is not None:
            try:
                self.program = PassProgram(self.model, kv_dtype, self.layer_specs)
            except Unbuilt:
                self.program = None
        self.kv_shape = replace(self.kv_shape, dtype=kv_dtype, steps=steps)
        self._bounded = None if steps is None else weights_state(self.model)

    @property
    def replays(self) -> bool:
        """Whether passes over a full cache can be replayed while the text grows."""
        states = self.kv_shape.states
        known = self.backend.STATIC and self.serves() and not self.split
        return (
            known
            and "steps" not in self.fallbacks
            and (states is None or device_kernel(states.device, states.wide) is not None)
        )

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
            self._tapped = tuple(layers or ())
            self._layer_taps = {
                layer: Tap(self._decoder.layers[layer]) for layer in {*self._tapped}
            }
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        forwarded = self.forward_eager(zero, zero, FullKV(self.kv_shape, 1))
        if norm is not None and not torch.equal(norm(forwarded.pre_norm), forwarded.hidden):
            raise UnsupportedModel("something after its final norm")
        taps = forwarded.layer_states
        if norm is None and (
            taps is None or taps.shape != (1, len(self._tapped) * self.hidden_size)
        ):
            raise UnsupportedModel("layers whose outputs are no states")

    @torch.inference_mode()
    def renew(self) -> None:
        """Follow weights that have been changed: pack the program's, and bound keys and values,
        anew.
        """
        if self._bounded not in (None, now := weights_state(self.model)):
            assert self.kv_shape.steps is not None
            # in place: caches and copies of the shape have it
            self.kv_shape.steps.copy_(integer_steps(self.model))
            self._bounded = now
        if self.program is not None and self.program.outdated(self.model):
            try:
                self.pack()
            except Unfit:
                # rows that PyTorch computes have not been found to be exact
                self.program = self.width = None

    @torch.inference_mode()
    def prepare(self, kv: KVBuffer, limit: int) -> None:
        """Prepare static passes of up to ``limit`` nodes over a cache,
        where the attention allows it.

        On CUDA there is a graph for each of a few sizes; elsewhere a static pass is run like any
        other. There must always be room for ``limit`` nodes after the cache's length.
        """
        if self.replays and kv not in self.passes and self.serves(kv):
            self.passes[kv] = [
                StaticPass(self.compute_static, self.capture, kv, size) for size in sizes(limit)
            ]

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
        if self._graphs is None:
            if self.device.type != "cuda":
                return run
            self._graphs = Graphs(self.device)
        captured = self._graphs.capture(run)
        self.fallbacks.note("graphs", self._graphs.failure)
        return captured

    @torch.inference_mode()
    def compute_static(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: KVBuffer,
        length: Tensor,
        ancestors: Tensor | None,
        batch_invariant: bool = False,
    ) -> Forwarded:
        """As :meth:`forward`, with the cache's length on the device (``[]`` int32), so that a graph
        serves any length.

        Only where :attr:`replays` is true, and :meth:`serves` for the cache.

        ``batch_invariant``: of any number of tokens that follow each other, by layers whose rows
        do not depend on how many there are: a token has the bits that a pass of the fixed rows
        gives it.
        """

        def write(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            self.backend.store(kv.keys[layer], kv.values[layer], keys, values, length)
            return kv.keys[layer], kv.values[layer]

        nodes = len(tokens)
        if batch_invariant:
            rows = nodes
            attend = _each(self._layouts, partial(BlockwiseAttention, self.backend), length, nodes)
        else:
            rows = rows_of(self.width, kv, nodes)
            attend = _each(self._layouts, self.backend, length, nodes, ancestors)
        special = PerLayerAttention(attend, self.layer_specs) if self.attention_features else None
        states = None
        if kv.states is not None:
            kernel = device_kernel(kv.shape.device, kv.states.shape.wide)
            assert kernel is not None
            states = StaticStatePass(kv.states, nodes, ancestors, kernel)
        run = Pass(write, attend, special, nodes, rows, (kv, length), batch_invariant, states)
        return self._compute(tokens, positions, run)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, kv: KVBuffer, ancestors: Tensor | None
    ) -> Forwarded:
        """Forward the nodes of a tree in one pass;
        their keys and values go to the cache's scratch slots.

        Args:
            tokens: ``[n]`` int64.
            positions: ``[n]`` int64.
            kv: the cache; nothing is committed.
            ancestors: ``[n, n]`` bool, true where the column is an ancestor of the row, or the row
                itself; None where every node descends from all before it.

        Raises:
            ValueError: there are more nodes than passes over the text have rows.
        """
        nodes = len(tokens)
        passes = self.passes.get(kv, ())
        for static in passes:
            if static.nodes >= nodes:
                for each in passes:  # all at once: a later capture would count as a slow step
                    each.capture(kv.length)
                return static(tokens, positions, ancestors, kv.length)
        if self.program is not None and self.program.takes(kv, nodes, chain=ancestors is None):
            if ancestors is not None:
                rows_of(self.width, kv, nodes)
            return self.program(tokens, positions, kv, ancestors, self.has_pre_norm, self._tapped)
        return self.forward_eager(tokens, positions, kv, ancestors, self.width)

    def verify(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: KVBuffer,
        ancestors: Tensor,
        follow: Callable[..., T],
    ) -> tuple[Forwarded, Tensor, T] | None:
        """As :meth:`forward`, with the logits ``[n, V]`` and what is drawn from them,
        all by one C function.

        Args:
            tokens, positions, kv, ancestors: as for :meth:`forward`.
            follow: draws, given the logits and the address of what they are computed from.

        Returns:
            None where no C function makes such passes.
        """
        program = self.program
        nodes = len(tokens)
        if program is None or kv in self.passes or not program.takes(kv, nodes):
            return None
        rows_of(self.width, kv, nodes)
        return program.verify(
            follow, tokens, positions, kv, ancestors, self.has_pre_norm, self._tapped
        )

    @torch.inference_mode()
    def forward_eager(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: KVBuffer,
        ancestors: Tensor | None = None,
        width: int | None = None,
    ) -> Forwarded:
        """As :meth:`forward`, by PyTorch whatever is prepared; in a pass over the text of so many
        rows, if any.
        """
        nodes = len(tokens)
        rows = rows_of(width, kv, nodes)
        special: MaskedAttention | PerLayerAttention | None = None
        given = kv.length, nodes, ancestors
        if width is None or not isinstance(kv, FullKV):
            known = attend = _each(self._layouts, self.backend, *given)
            if not self.serves(kv):
                special = MaskedAttention(self.dtype, self.layer_specs, kv, positions, ancestors)
        else:  # with attention whose rows are exact
            known = attend = _each(self._layouts, partial(exact_attention, self.backend), *given)
            if not self.serves():
                known = _each(self._layouts, BatchInvariantAttention, *given)
        if self.attention_features and special is None:
            special = PerLayerAttention(known, self.layer_specs)
        states = None if kv.states is None else StatePass(kv.states, nodes, ancestors)
        return self._compute(
            tokens, positions, Pass(kv.write, attend, special, nodes, rows, states=states)
        )

    def _compute(self, tokens: Tensor, positions: Tensor, run: Pass) -> Forwarded:
        """Call the decoder."""
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
        taps = torch.cat([states[layer] for layer in self._tapped], -1) if states else None
        padded = out.last_hidden_state[0]
        return Forwarded(padded[: run.nodes], run.queries, pre_norm, taps, padded)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, V]`` logits of the hidden states ``[n, H]`` of a pass over the text,
        in the model's dtype.
        """
        if self.program is not None:
            return self.program.lm_head(hidden)
        if self.width is None:
            return self._output(hidden)
        parts = hidden.split(self.width)
        if len(parts[-1]) < self.width:
            parts = (*parts[:-1], F.pad(parts[-1], (0, 0, 0, self.width - len(parts[-1]))))
        logits = [self._output(part) for part in parts]
        logits[-1] = logits[-1][: len(hidden) - (len(parts) - 1) * self.width]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def open_logits(self, hidden: Tensor, rule: tuple[float, float] | None = None) -> Tensor:
        """``[..., V]`` logits of hidden states ``[..., H]`` for a draft or a loss:
        gradients flow back.

        ``rule``: a factor and a cap in place of the model's own, as of :func:`output_rule`.
        """
        if rule is not None and rule != output_rule(self.model.config):
            return output_of(self.model, rule=rule)(hidden)
        learns = hidden.requires_grad and torch.is_grad_enabled()
        return (
            self._output(hidden) if self.program is None or learns else self.program.lm_head(hidden)
        )

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
        packed = isinstance(layer, PackedEmbedding)
        stored = layer.packed.rows(tokens) if packed else F.embedding(tokens, layer.weight)
        return stored * scale


def _each(
    layouts: Mapping[tuple[int, int], Layout],
    attention: Callable[..., Attention | BlockwiseAttention],
    *given: object,
) -> Attending:
    """An attention of a pass; where layers have heads of several numbers and sizes,
    one for each of these.
    """
    made = {heads: attention(layout, *given) for heads, layout in layouts.items()}
    return AttentionByHeads(made) if len(made) > 1 else next(iter(made.values()))


def rows_of(width: int | None, kv: KVBuffer, nodes: int) -> int:
    """Rows of a pass: the fixed width for one over the text, if there is one; drafts need none."""
    if width is None or not isinstance(kv, FullKV):
        return nodes
    if nodes > width:
        raise ValueError(f"a pass of {nodes} nodes does not fit in {width} rows")
    return width
