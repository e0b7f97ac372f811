"""Passes that PyTorch makes, layer after layer: the runner that every model can have.

A target's runner is chosen when a model is loaded: this one, that of replayed passes
(``forward/cuda/runner.py``) by the attention that it is wrapped with, or that of a C program
(``forward/cpu/runner.py``) where ``forward/adapting.py`` finds that it gives the same logits. It is
exchanged where weights or the cache's dtype change. The others are this one wherever they have
nothing better for a pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

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
    TreeAttention,
)
from tswift.caches import FullKV, KVBuffer, KVShape
from tswift.forward.cpu.products import PackedEmbedding
from tswift.forward.cuda.fused_layers import rows_stand_alone
from tswift.forward.fallbacks import Fallbacks
from tswift.forward.hf import (
    Tap,
    UnsupportedModel,
    final_norm,
    output_of,
    probe_attention,
)
from tswift.forward.passes import Attend, Forwarded, Nodes, Pass, PassTogether, T, rows_of
from tswift.forward.recurrent import (
    StatePass,
    StaticStatePass,
    device_kernel,
    passing,
    serve_states,
)
from tswift.models.architecture import max_positions, state_shape

if TYPE_CHECKING:
    from tswift.forward.cpu.program import PassProgram
    from tswift.forward.cuda.graphs import StaticPass


class WrappedModel:
    """A model whose passes PyTorch makes over tswift's caches.

    Attributes:
        runner: what makes its passes.
    """

    runner: EagerRunner

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
        self.fallbacks = Fallbacks()
        self.caches: WeakSet[FullKV] = WeakSet()  # of decodes that somebody holds
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

    @property
    def on_cuda(self) -> bool:
        """Whether it is on a GPU, else it is on the CPU."""
        return self.device.type == "cuda"

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
        states = []
        if kv.states is not None:
            kernel = device_kernel(kv.shape.device, kv.states.shape.wide)
            assert kernel is not None
            states = [StaticStatePass(kv.states, count, nodes.ancestors, kernel)]
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
    def forward_eager(self, nodes: Nodes, width: int | None = None) -> Forwarded:
        """As :meth:`forward`, by PyTorch whatever is prepared; in a pass over the text of so many
        rows, if any.
        """
        return self._compute(nodes, self._pass_over(nodes, width, self._rows(width, nodes)))

    @torch.inference_mode()
    def forward_texts(self, texts: Sequence[Nodes], width: int) -> list[Forwarded]:
        """As :meth:`forward_eager`, of several texts in one pass of the width."""
        parts = [self._pass_over(nodes, width, len(nodes)) for nodes in texts]
        tokens = torch.cat([nodes.tokens for nodes in texts])
        positions = torch.cat([nodes.positions for nodes in texts])
        parts[-1].rows += width - len(tokens)
        whole = self._compute(Nodes(tokens, positions, texts[0].kv), PassTogether(parts))
        found = []
        first = 0
        for part in parts:
            rows = slice(first, first := first + part.nodes)
            pre_norm, taps = (
                None if each is None else each[rows]
                for each in (whole.pre_norm, whole.layer_states)
            )
            found.append(Forwarded(whole.hidden[rows], part.queries, pre_norm, taps))
        return found

    def _pass_over(self, nodes: Nodes, width: int | None, rows: int) -> Pass:
        """What a pass of so many rows has of a text; for the width see :meth:`forward_eager`."""
        kv, ancestors = nodes.kv, nodes.ancestors
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
        states = [] if kv.states is None else [StatePass(kv.states, len(nodes), ancestors)]
        write = kv.write
        if kv.shape.steps_behind:
            length = torch.full((), kv.length, dtype=torch.int32, device=self.device)
            store = partial(self._store, kv, length)
            ours = masked is None and special is None

            def write(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
                by_kernel = ours or not self.layer_specs[layer]
                return (store if by_kernel else kv.write)(layer, keys, values)

        return Pass(write, attends, len(nodes), rows, states=states)

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

    def _compute(self, nodes: Nodes, run: Pass | PassTogether) -> Forwarded:
        """Call the decoder."""
        tokens, positions = nodes.tokens, nodes.positions
        if run.rows > run.nodes:
            tokens, positions = (
                F.pad(row, (0, run.rows - run.nodes)) for row in (tokens, positions)
            )
        with passing(run.states):
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


class EagerRunner:
    """Makes a target's passes by PyTorch.

    Attributes:
        replays: whether passes over a full cache can be replayed while the text grows.
        passes: those that are prepared, by their cache.
        program: the C program that makes passes; None where PyTorch does.
    """

    replays: bool = False
    passes: Mapping[KVBuffer, Sequence[StaticPass]] = {}
    program: PassProgram | None = None

    def __init__(self, target: WrappedModel) -> None:
        self._target = weakref.ref(target)  # one that nobody has any more is free to go at once

    def __deepcopy__(self, memo: dict[int, WrappedModel]) -> EagerRunner:
        return type(self)(memo[id(self.target)])  # a copied target's

    @property
    def exact_rows(self) -> int | None:
        """Most nodes of passes whose rows are exact by themselves;
        None where they have to be padded to one width.
        """
        return None

    @property
    def target(self) -> WrappedModel:
        """Whose passes it makes."""
        target = self._target()
        assert target is not None
        return target

    def takes(self, kv: KVBuffer, nodes: int, chain: bool = False) -> bool:
        """Whether a pass over so many nodes, a tree's or a chain's, is one call for all layers."""
        return False

    def prepare(self, kv: KVBuffer, limit: int) -> None:
        """Prepare passes of up to ``limit`` nodes over a cache, where they can be replayed."""

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        """A program over tensors that stay in place, as one launch where that is possible."""
        return run

    def renew(self) -> None:
        """Follow weights that have been changed."""

    def rebuilt(self) -> EagerRunner:
        """The runner for caches of the dtype that the target has now."""
        return self

    def forward(self, nodes: Nodes) -> Forwarded:
        """As :meth:`~tswift.forward.target.Target.forward`."""
        return self.target.forward_eager(nodes, self.target.fixed_rows)

    @property
    def most_rows(self) -> int | None:
        """Most rows of a pass over several texts, in which each has the bits that it has alone;
        None where a text has a pass of its own.
        """
        target = self.target
        return None if target.on_cuda or target.backend.STATIC else target.fixed_rows

    def joins(self, nodes: Nodes) -> bool:
        """Whether nodes may be in a pass with other texts."""
        return isinstance(nodes.kv, FullKV)

    def forward_together(self, texts: Sequence[Nodes]) -> list[Forwarded]:
        """A pass of several texts, all of which :meth:`joins` takes, of no more than
        :attr:`most_rows`.
        """
        assert self.target.fixed_rows is not None
        return self.target.forward_texts(texts, self.target.fixed_rows)

    def verify(self, nodes: Nodes, draw: Callable[..., T]) -> tuple[Forwarded, Tensor, T] | None:
        """A pass over one text, its logits and what is drawn from them as one C function; None
        where there is none.
        """
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, V]`` logits of hidden states ``[n, H]``, in passes of the fixed width if any."""
        width, output = self.target.fixed_rows, self.target.output
        if width is None:
            return output(hidden)
        parts = hidden.split(width)
        if len(parts[-1]) < width and self.exact_rows is None:
            parts = (*parts[:-1], F.pad(parts[-1], (0, 0, 0, width - len(parts[-1]))))
        logits = [output(part) for part in parts]
        logits[-1] = logits[-1][: len(hidden) - (len(parts) - 1) * width]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def open_logits(self, hidden: Tensor) -> Tensor:
        """``[..., V]`` logits for a draft or a loss; gradients flow back."""
        return self.target.output(hidden)
