"""Passes of a decoder on the CPU as one C function, compiled where the user has a C compiler.

By PyTorch a pass of a small model is some 300 operators, and calling them takes longer than
computing them. Weights that lost nothing in bfloat16 are read as that, which
halves the bytes and changes no product. A row's bits depend on no other row, so every pass is
exact, whatever its width.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import chain, count
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tswift.attention import native
from tswift.attention.sdpa import MAX_WIDTH, AttentionSpec
from tswift.caches import FullKV, KVBuffer
from tswift.forward.cpu.parts import (
    LayerParts,
    RecurrentParts,
    Unfit,
    in_float32,
    norm_weight,
    read_parts,
)
from tswift.forward.cpu.products import (
    C,
    PackedEmbedding,
    PackedLinear,
    lay_together,
    library,
    multiply,
)
from tswift.forward.passes import PROMPT_CHUNK, Forwarded, Nodes
from tswift.models.codes import LEAST_BLOCK, quantize
from tswift.native_build import parallel_region
from tswift.sampling.sampler_c import Verification

_FLOATS = nn.Parameter, torch.float32
DRAFT_BITS = 8  # of the codes of layers that only draft, and of their inputs
MAX_COPIED = 1 << 30  # bytes of a model's weights in float32; above, memory is worth more than time


T = TypeVar("T")


def weights_state(network: nn.Module) -> list[tuple[int, int]]:
    """Where weights are, and how often they were changed."""
    return [
        (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        for weight in network.parameters()
    ]


class PassProgram:
    """The passes of a model as one C function; its logits, too.

    Args:
        network: a causal language model of transformers in float32 on the CPU, whose weights stay
            as they are.
        kv_dtype: of the KV caches.
        specs: of the layers' attention; empty for nothing but softmax over scaled products.

    Raises:
        Unfit: it is no such model.
        Unbuilt: there is no program here.
    """

    most_nodes: ClassVar[int] = MAX_WIDTH  # of a pass

    def __init__(
        self,
        network: PreTrainedModel,
        kv_dtype: torch.dtype = torch.float32,
        specs: Sequence[AttentionSpec] = (),
    ) -> None:
        parts = read_parts(network, specs)
        _refuse_unfit(network, parts.head_dim)
        lay_together(network)
        self._kv_dtype = kv_dtype
        self._packed_state = weights_state(network)
        config = network.config.get_text_config()
        heads = config.num_attention_heads
        width = parts.head_dim
        kept = sum(layer.recurrent is None for layer in parts.layers)
        attention = native.library(width, kv_dtype)
        self._library = library()
        self._space = torch.empty(0, dtype=torch.float32)
        self._kept: list[object] = []  # what the C structures point to
        self._layers = (C.Layer * len(parts.layers))()
        places = {True: count(), False: count()}  # of layers with attention, and of recurrent ones
        for layer, made in zip(parts.layers, self._layers, strict=True):
            self._fill(made, layer)
            made.place = next(places[layer.recurrent is None])
        self._windowed = any(layer.spec.window for layer in parts.layers)
        self.lm_head_c = self._pack(parts.lm_head)
        self.lm_head_c.scale = parts.output_scale
        self.lm_head_c.softcap = parts.output_cap
        self._shape = kept, heads, width, config.hidden_size
        recurrent = next(
            (layer.recurrent for layer in parts.layers if layer.recurrent is not None), None
        )
        self._mixed = len(parts.layers) - kept, _mixed(recurrent)
        self.embeddings = self._embeddings(parts.embeddings)
        self._model = C.Model(
            layers=ctypes.addressof(self._layers),
            embeddings=ctypes.addressof(self.embeddings),
            norm=self._pointer(norm_weight(parts.norm)),
            rates=self._pointer(torch.stack([rates for rates, _ in parts.rotaries])),
            rotary_scales=self._pointer(torch.tensor([scale for _, scale in parts.rotaries])),
            attend=_address(attention.tswift_attend),
            attention_scratch=_address(attention.tswift_scratch),
            parallel=parallel_region(),
            count=len(parts.layers),
            kept=kept,
            hidden=config.hidden_size,
            inner=parts.layers[0].linears["down"].in_features,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            width=width,
            kind=native.KINDS[kv_dtype],
            most=MAX_WIDTH,
            rotaries=len(parts.rotaries),
            turned=2 * len(parts.rotaries[0][0]),
            widest=max(layer.spec.window or 0 for layer in parts.layers),
            gated=any(layer.gated for layer in parts.layers),
            gelu=parts.gelu,
            epsilon=parts.eps,
            embedding_scale=parts.embedding_scale,
            residual_scale=parts.residual_scale,
        )
        self._verification = Verification(
            forward=_address(self._library.tswift_forward),
            model=ctypes.addressof(self._model),
            multiply=_address(self._library.tswift_multiply),
            lm_head=ctypes.addressof(self.lm_head_c),
        )

    def _fill(self, made: ctypes.Structure, layer: LayerParts) -> None:
        """A layer's C structure."""
        for name, linear in layer.linears.items():
            if linear is not None:
                setattr(made, name, self._pack(linear))
        for name, norm in layer.norms.items():
            setattr(made, name, 0 if norm is None else self._pointer(norm_weight(norm)))
        if layer.recurrent is not None:
            made.recurrent = ctypes.addressof(self._recurrent(layer.recurrent))
        made.gated = layer.gated
        made.joint = layer.joint
        made.rotary = -1 if layer.rotary is None else layer.rotary
        made.window = layer.spec.window or 0
        made.softcap = layer.spec.softcap or 0
        made.scale = layer.scale * math.log2(math.e)  # scores are powers of two: see native.c

    def _recurrent(self, recurrent: RecurrentParts) -> ctypes.Structure:
        """The structure of a gated delta net."""
        taps = in_float32(recurrent.convolution.weight).squeeze(1).T
        if recurrent.convolution.bias is not None:
            raise Unfit("a convolution with a bias has no program")
        made: ctypes.Structure = C.Recurrent(
            self._pointer(taps),
            self._pointer(-in_float32(recurrent.module.A_log).exp()),
            self._pointer(recurrent.module.dt_bias),
            self._pointer(recurrent.norm.weight),
            *taps.shape,
            *(recurrent.heads, recurrent.group, recurrent.key_size, recurrent.value_size),
        )
        self._kept.append(made)
        return made

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        return multiply(self.lm_head_c, hidden)

    def _pack(self, layer: nn.Linear | PackedLinear) -> ctypes.Structure:
        packed = (
            layer if isinstance(layer, PackedLinear) else PackedLinear(layer.weight, layer.bias)
        )
        self._kept.append(packed)
        return packed.c

    def _embeddings(self, layer: nn.Embedding | PackedEmbedding) -> ctypes.Structure:
        """The embeddings' structure: packed, or floats row after row."""
        self._kept.append(layer)
        if isinstance(layer, PackedEmbedding):
            return layer.c
        vocab_size, hidden = layer.weight.shape
        return C.Linear(
            weight=self._pointer(layer.weight), inputs=hidden, outputs=vocab_size, block=1
        )

    def _pointer(self, weight: Tensor) -> int:
        kept = in_float32(weight).contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def outdated(self, network: PreTrainedModel) -> bool:
        """Whether the model's weights have been changed since: what is packed here are copies."""
        return self._packed_state != weights_state(network)

    def takes(self, kv: KVBuffer, nodes: int, chain: bool = False) -> bool:
        """Whether a pass over so many nodes, a tree's or a chain's, can be the program's."""
        fits = (
            0 < nodes <= (PROMPT_CHUNK if chain else self.most_nodes)
            and kv.length + nodes <= kv.capacity
        )
        # a window is cut by slots, which have to be positions
        ordered = not self._windowed or isinstance(kv, FullKV)
        return fits and ordered and kv.shape.dtype == self._kv_dtype

    def __call__(
        self, texts: Sequence[Nodes], pre_norm: bool, tapped: Sequence[int]
    ) -> list[Forwarded]:
        """A pass over several texts; for the arguments see :meth:`begin`."""
        run, forwarded = self.begin(texts, pre_norm, tapped)
        self._library.tswift_forward(ctypes.byref(self._model), ctypes.byref(run))
        return forwarded

    def verify(
        self, draw: Callable[..., T], nodes: Nodes, pre_norm: bool, tapped: Sequence[int]
    ) -> tuple[Forwarded, Tensor, T]:
        """A pass over one text, its logits, and what is drawn from them; for the other arguments
        see :meth:`begin`.
        """
        run, (forwarded,) = self.begin([nodes], pre_norm, tapped)
        logits = torch.empty(run.nodes, self.lm_head_c.outputs, dtype=torch.float32)
        asked = self._verification
        asked.run = ctypes.addressof(run)
        asked.hidden = run.hidden
        asked.logits = logits.data_ptr()
        return forwarded, logits, draw(logits, verification=ctypes.addressof(asked))

    def begin(
        self, texts: Sequence[Nodes], pre_norm: bool = False, tapped: Sequence[int] = ()
    ) -> tuple[ctypes.Structure, list[Forwarded]]:
        """What the C function is to be called with for a pass, and where it will leave the result
        of each text.

        Args:
            texts: their nodes, with a cache each. A chain of more than :attr:`most_nodes` has to
                be alone.
            pre_norm: whether the states before the final norm are asked for.
            tapped: the layers after which the states are.
        """
        kept, heads, width, hidden = self._shape
        sizes = [*map(len, texts)]
        count = sum(sizes)
        states = torch.empty(2, count, hidden, dtype=torch.float32)
        layers = len(self._layers)
        inner = torch.empty(layers, count, hidden, dtype=torch.float32) if tapped else None
        mixed = None
        if texts[0].kv.states is not None:
            # of a long chain, as in prompts, only the end is kept: it is accepted as a whole
            layers, size = self._mixed if max(sizes) <= self.most_nodes else (1, self._mixed[1])
            mixed = torch.empty(layers, count, size, dtype=torch.float32)
        tokens = _joined([nodes.tokens for nodes in texts])
        positions = _joined([nodes.positions for nodes in texts])
        held: list[object] = [tokens, positions, mixed]
        made: list[ctypes.Structure] = []
        found: list[Forwarded] = []
        first = 0
        for nodes, size in zip(texts, sizes, strict=True):
            kv, ancestors = nodes.kv, nodes.ancestors
            ancestors = None if ancestors is None or size == 1 else ancestors.contiguous()
            queries = torch.empty(kept, heads, size, width, dtype=torch.float32)
            text = C.Text(
                *(each.data_ptr() for each in kv.buffers),
                0 if ancestors is None else ancestors.data_ptr(),
                queries.data_ptr(),
                first=first,
                nodes=size,
                prefix=kv.length,
                by_layer=kv.buffers[0].stride(0),
                by_head=kv.buffers[0].stride(1),
            )
            rows = slice(first, first + size)
            if mixed is not None:
                self._remember(text, nodes, mixed[:, rows])
            held.append(ancestors)
            made.append(text)
            after = None if inner is None else inner[:, rows]
            own = states if count == size else states[:, rows]  # alone it takes no time
            found.append(_Result(own, queries, pre_norm, after, tapped))
            first += size
        whole = made[0] if len(made) == 1 else (C.Text * len(made))(*made)
        steps = texts[0].kv.shape.steps
        run = C.Pass(
            tokens.data_ptr(),
            positions.data_ptr(),
            ctypes.addressof(whole),
            states.data_ptr(),
            states.data_ptr() + count * hidden * states.itemsize,
            0 if inner is None else inner.data_ptr(),
            0,
            0 if steps is None else steps.data_ptr(),
            0 if mixed is None else mixed.data_ptr(),
            0 if mixed is None or len(mixed) == 1 else mixed.stride(0),
            count=len(made),
            nodes=count,
        )
        run.kept = whole, held  # as long as it is
        self._make_room(run)
        return run, found

    def _make_room(self, run: ctypes.Structure) -> None:
        """Threads and working space of a pass."""
        run.threads = torch.get_num_threads()
        size = self._library.tswift_space(ctypes.byref(self._model), ctypes.byref(run))
        if len(self._space) < size:  # kept, as memory that is new has to be mapped
            self._space = torch.empty(size, dtype=torch.float32)
        run.space = self._space.data_ptr()

    def _remember(self, text: ctypes.Structure, nodes: Nodes, mixed: Tensor) -> None:
        """Let a pass read a text's states, and leave behind how they go on by what is accepted,
        given the text's products.
        """
        states = nodes.kv.states
        assert states is not None
        text.rows = states.rows.data_ptr()
        text.matrices = states.matrices.data_ptr()
        chain = nodes.ancestors is None or bool(nodes.ancestors[-1].all())
        if chain:
            text.rows_after, text.matrices_after = (each.data_ptr() for each in states.ahead)
        states.chain = len(nodes) if chain else 0
        states.replays = [partial(self._go_on, states.rows, states.matrices, mixed)]

    def _go_on(self, rows: Tensor, matrices: Tensor, mixed: Tensor, nodes: Sequence[int]) -> None:
        """Step all states by accepted nodes of a pass, given its products."""
        if len(mixed) < self._mixed[0]:
            raise ValueError("a long chain is committed as a whole")
        accepted = mixed[:, list(nodes)]
        text = C.Text(
            rows=rows.data_ptr(),
            rows_after=rows.data_ptr(),
            matrices=matrices.data_ptr(),
            matrices_after=matrices.data_ptr(),
            nodes=len(nodes),
        )
        run = C.Pass(
            texts=ctypes.addressof(text),
            mixed=accepted.data_ptr(),
            by_recurrent=accepted.stride(0),
            count=1,
            nodes=len(nodes),
        )
        self._make_room(run)
        self._library.tswift_go_on(ctypes.byref(self._model), ctypes.byref(run))


def _joined(parts: list[Tensor]) -> Tensor:
    """Tensors one after the other; one alone as it is, which takes no time."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


class _Result(Forwarded):
    """A pass's, of which tensors are made when they are asked for: plain decoding asks for none."""

    def __init__(
        self,
        states: Tensor,
        queries: Tensor,
        pre_norm: bool,
        inner: Tensor | None,
        tapped: Sequence[int],
    ) -> None:
        self.__dict__.update(
            _states=states, _queries=queries, _pre_norm=pre_norm, _inner=inner, _tapped=tapped
        )

    @cached_property
    def hidden(self) -> Tensor:  # type: ignore[override]
        return self.__dict__["_states"][0]  # type: ignore[no-any-return]

    @cached_property
    def queries(self) -> list[Tensor]:  # type: ignore[override]
        return list(self.__dict__["_queries"].unbind())

    @cached_property
    def pre_norm(self) -> Tensor | None:  # type: ignore[override]
        return self.__dict__["_states"][1] if self.__dict__["_pre_norm"] else None

    @cached_property
    def layer_states(self) -> Tensor | None:  # type: ignore[override]
        inner = self.__dict__["_inner"]
        return (
            None
            if inner is None
            else torch.cat([inner[layer] for layer in self.__dict__["_tapped"]], -1)
        )


def rounded_linear(layer: nn.Linear) -> PackedLinear:
    """A linear layer for drafts: it and its inputs are rounded to 8 bits,
    if its inputs make whole blocks.

    That changes guesses now and then: the bundled heads draft as many tokens a step as unrounded,
    to within 1%.
    """
    if layer.in_features % LEAST_BLOCK:
        return PackedLinear(layer.weight, layer.bias)
    return PackedLinear(quantize(layer.weight, DRAFT_BITS), layer.bias, DRAFT_BITS)


class HeadProgram:
    """The steps of a chain of heads, each as one C function.

    Their matrices are rounded to codes of 8 bits.

    Args:
        heads: one by one, in float32 on the CPU, whose weights stay as they are.
        hidden_size: width of their states.
        eps: of their norms.

    Raises:
        Unbuilt: there is no program here.
    """

    def __init__(self, heads: Iterable[Any], hidden_size: int, eps: float) -> None:
        self._library = library()
        self._parallel = parallel_region()
        self._hidden = hidden_size
        self._kept: list[object] = []  # what the C structures point to
        heads = list(heads)
        layers = [
            [
                rounded_linear(getattr(head, name))
                for name in ("mix", "linear")
                if hasattr(head, name)
            ]
            for head in heads
        ]
        lay_together(nn.ModuleList(chain(*layers)))
        self._heads = (C.Head * len(heads))()
        self._space = torch.empty(0, dtype=torch.float32)
        self._guess = C.Guess(
            heads=ctypes.addressof(self._heads), parallel=self._parallel, hidden=hidden_size
        )
        for head, own, made in zip(heads, layers, self._heads, strict=True):
            made.hidden = hidden_size
            made.epsilon = eps
            made.linear = own[-1].c
            norms = {"input_norm": head.input_layernorm, "after": head.post_layernorm}
            if len(own) > 1:
                made.mix = own[0].c
                norms["embedding_norm"] = head.embedding_layernorm
            for name, norm in norms.items():
                weight = in_float32(norm.weight).contiguous()
                setattr(made, name, weight.data_ptr())
                self._kept.append(weight)
            self._kept.append(own)

    def __call__(
        self, index: int, hidden: Tensor, embedding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`~tswift.speculators.heads.Heads.step`."""
        hidden = hidden.contiguous()
        rows = hidden.numel() // self._hidden
        embeddings = None if embedding is None else embedding.expand(hidden.shape).contiguous()
        refined = torch.empty_like(hidden)
        out = torch.empty_like(hidden)
        space = torch.empty(4 * hidden.numel(), dtype=torch.float32)
        self._library.tswift_head(
            ctypes.byref(self._heads[index]),
            *(
                ctypes.c_void_p(None if each is None else each.data_ptr())
                for each in (hidden, embeddings, refined, out, space)
            ),
            ctypes.c_int64(rows),
            ctypes.c_void_p(self._parallel),
            ctypes.c_int64(torch.get_num_threads()),
        )
        return refined, out

    def guess(
        self,
        model: PassProgram,
        lm_head: ctypes.Structure,
        state: Tensor,
        first: Tensor | None,
        root: int,
        levels: int,
        ranking: ctypes.Structure,
        rank: int,
        count: int,
    ) -> None:
        """Levels of candidates, each from a head that is told the best one of the level before.

        Args:
            model: whose embeddings they use.
            lm_head: what makes logits of states.
            state: ``[H]``, where the heads start.
            first: ``[H]`` state whose logits come before those of the heads; None for none.
            root: the text's last token.
            levels: how many.
            ranking: what the C function that ranks candidates is to be called with, for the first
                level.
            rank: that function's address.
            count: candidates of a level.
        """
        states = [None if each is None else each.contiguous() for each in (state, first)]
        size = 8 * self._hidden + lm_head.outputs  # type: ignore[attr-defined]
        if len(self._space) < size:  # kept, as memory that is new is far from the processor
            self._space = torch.empty(size, dtype=torch.float32)
        given = self._guess
        given.state, given.first = (None if each is None else each.data_ptr() for each in states)
        given.lm_head = ctypes.addressof(lm_head)
        given.embeddings = ctypes.addressof(model.embeddings)
        given.ranking = ctypes.addressof(ranking)
        given.rank = rank
        given.space = self._space.data_ptr()
        given.levels = levels
        given.count = count
        given.root = root
        given.threads = torch.get_num_threads()
        self._library.tswift_guess(ctypes.byref(given))


def too_large_to_copy(network: PreTrainedModel) -> bool:
    """Whether a network in float32 is too large for a second, packed copy beside it."""
    return (
        sum(weight.numel() for weight in network.parameters()) * torch.float32.itemsize > MAX_COPIED
    )


def may_serve(network: PreTrainedModel) -> bool:
    """Whether the program takes a model, as far as its modules tell; they may have no weights."""
    try:
        return native.takes(read_parts(network).head_dim)
    except Exception:  # what is wrong with a configuration is told when the model is loaded
        return False


def _mixed(recurrent: RecurrentParts | None) -> int:
    """Numbers of a row of a recurrent layer's products, as in program.c."""
    if recurrent is None:
        return 0
    values = recurrent.heads * recurrent.value_size
    channels = values + 2 * recurrent.heads // recurrent.group * recurrent.key_size
    return channels + values + 2 * recurrent.heads


def _refuse_unfit(network: PreTrainedModel, head_dim: int) -> None:
    weights = list(network.parameters())
    for reason, wrong in {
        "its weights are not plain float32": {(type(each), each.dtype) for each in weights}
        != {_FLOATS},
        "it is not on the CPU": not all(weight.is_cpu for weight in weights),
        "its weights are too large to be held twice": too_large_to_copy(network),
        "its heads are of a size that native attention does not take": not native.takes(head_dim),
    }.items():
        if wrong:
            raise Unfit(reason)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
