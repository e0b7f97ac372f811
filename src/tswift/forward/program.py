"""Passes of a Llama-like model on the CPU as one C function, compiled where the user has a C compiler.

Eagerly a pass of a small model takes longer to be said than to be computed: some 300 operators, each through Python and
PyTorch. Weights that lost nothing in bfloat16 are read as that, which halves the bytes and changes no product. A row's
bits depend on no other row, so every pass is exact, whatever its width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tswift.attention import native
from tswift.attention.sdpa import MAX_WIDTH
from tswift.caches import KVBuffer
from tswift.forward.integers import IntegerEmbedding, IntegerLinear, lay_together
from tswift.forward.passes import Forwarded
from tswift.forward.products import KINDS, C, library, multiply

MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # theirs
_ROTARY = ("default", "linear", "llama3", "yarn")  # whose rates are the same at every length
_FLOATS = nn.Parameter, torch.float32
CHUNK = 512  # prompt tokens forwarded at a time, as a chain
MAX_COPIED = 1 << 30  # bytes of a model's weights in float32; above, memory is worth more than time


class _Verification(ctypes.Structure):
    """``Verification`` in sampling/sampler.c."""

    _fields_: ClassVar = [
        (name, ctypes.c_void_p) for name in ["forward", "model", "run", "multiply", "lm_head", "hidden", "logits"]
    ]


T = TypeVar("T")


class Unfit(Exception):
    """Why a model's passes cannot be such a program, in one line."""


def weights_state(network: nn.Module) -> list[tuple[int, int]]:
    """Where weights are, and how often they were changed."""
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in network.parameters()]


class PackedLinear:
    """A linear layer of floats by the program: frozen weights, packed.

    Args:
        layer: as the modeling code has it.

    Raises:
        Unbuilt: there is no program here.
    """

    def __init__(self, layer: Any) -> None:
        program = library()
        weight, bias = _plain(layer.weight), getattr(layer, "bias", None)
        self.outputs, self.inputs = weight.shape
        self._bias = None if bias is None else _plain(bias).contiguous()
        kinds = (kind for kind in (torch.bfloat16, torch.float16) if torch.equal(weight.to(kind).float(), weight))
        kind = next(kinds, torch.float32)
        block = program.tswift_block()
        padded = nn.functional.pad(weight.to(kind), (0, 0, 0, -self.outputs % block))
        packed = padded.view(-1, block, self.inputs).transpose(1, 2)
        if kind == torch.bfloat16:  # the numbers of two vectors take turns
            packed = packed.unflatten(2, (-1, 2, program.tswift_lanes())).transpose(3, 4)
        self._packed = packed.contiguous()
        self.c = C.Linear(
            weight=self._packed.data_ptr(),
            bias=0 if self._bias is None else self._bias.data_ptr(),
            inputs=self.inputs,
            outputs=self.outputs,
            kind=KINDS[kind],
        )

    def __call__(self, input: Tensor) -> Tensor:
        """``[..., inputs]`` float32 to ``[..., outputs]``."""
        return multiply(self.c, input)


def _packed(layer: Any) -> PackedLinear | IntegerLinear:
    """A linear layer as the program has it: what has codes is packed already."""
    return layer if isinstance(layer, IntegerLinear) else PackedLinear(layer)


class PassProgram:
    """The passes of a model as one C function; its logits, too.

    Args:
        network: a causal language model of transformers in float32 on the CPU, whose weights stay as they are.
        kv_dtype: of the KV caches.

    Raises:
        Unfit: it is no such model.
        Unbuilt: there is no program here.
    """

    most_nodes: ClassVar[int] = MAX_WIDTH  # of a pass

    def __init__(self, network: PreTrainedModel, kv_dtype: torch.dtype = torch.float32) -> None:
        _refuse_unfit(network)
        lay_together(network)
        self._kv_dtype = kv_dtype
        self._packed_state = weights_state(network)
        config, decoder = network.config, network.get_decoder()
        layers, width = decoder.layers, decoder.layers[0].self_attn.head_dim
        attention = native.library(width, kv_dtype)
        self._library = library()
        self._space = torch.empty(0, dtype=torch.float32)
        self._kept: list[Any] = []  # what the C structures point to
        self._layers = (C.Layer * len(layers))()
        for layer, made in zip(layers, self._layers, strict=True):
            own, mlp = layer.self_attn, layer.mlp
            made.queries = self._pack(own.q_proj)
            made.keys = self._pack(own.k_proj)
            made.values = self._pack(own.v_proj)
            made.output = self._pack(own.o_proj)
            made.gate = self._pack(mlp.gate_proj)
            made.let = self._pack(mlp.up_proj)
            made.down = self._pack(mlp.down_proj)
            made.before = self._pointer(layer.input_layernorm.weight)
            made.after = self._pointer(layer.post_attention_layernorm.weight)
            made.query_norm, made.key_norm = (
                self._pointer(getattr(own, name).weight) if hasattr(own, name) else 0 for name in ("q_norm", "k_norm")
            )
        self.lm_head = _packed(network.get_output_embeddings())  # hidden states to logits
        self.lm_head_c = self.lm_head.c
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._shape = len(layers), heads, width, config.hidden_size
        self.embeddings = self._embeddings(decoder.embed_tokens)
        rotary = decoder.rotary_emb
        self._model = C.Model(
            ctypes.addressof(self._layers),
            ctypes.addressof(self.embeddings),
            self._pointer(decoder.norm.weight),
            self._pointer(rotary.inv_freq.float()),
            _address(attention.tswift_attend),
            _address(attention.tswift_scratch),
            native.parallel_region(),
            len(layers),
            config.hidden_size,
            config.intermediate_size,
            heads,
            kv_heads,
            width,
            native.KINDS[kv_dtype],
            MAX_WIDTH,
            config.rms_norm_eps,
            rotary.attention_scaling,
            layers[0].self_attn.scaling * 1.4426950408889634,  # powers of two: see native.c
        )
        self._verification = _Verification(
            forward=_address(self._library.tswift_forward),
            model=ctypes.addressof(self._model),
            multiply=_address(self._library.tswift_multiply),
            lm_head=ctypes.addressof(self.lm_head_c),
        )

    def _pack(self, layer: nn.Module) -> Any:
        packed = _packed(layer)
        self._kept.append(packed)
        return packed.c

    def _embeddings(self, layer: Any) -> Any:
        """The embeddings' structure: codes, or floats row after row."""
        self._kept.append(layer)
        if isinstance(layer, IntegerEmbedding):
            return layer.c
        vocab_size, hidden = layer.weight.shape
        return C.Linear(weight=self._pointer(layer.weight), inputs=hidden, outputs=vocab_size)

    def _pointer(self, weight: Tensor) -> int:
        kept = _plain(weight).contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def outdated(self, network: PreTrainedModel) -> bool:
        """Whether the model's weights have been changed since: what is packed here are copies."""
        return self._packed_state != weights_state(network)

    def takes(self, kv: KVBuffer, nodes: int, chain: bool = False) -> bool:
        """Whether a pass over so many nodes, a tree's or a chain's, can be the program's."""
        fits = 0 < nodes <= (CHUNK if chain else self.most_nodes) and kv.length + nodes <= kv.capacity
        return fits and kv.shape.dtype == self._kv_dtype

    def __call__(self, *given: Any) -> Forwarded:
        """As :meth:`~tswift.forward.target.Target.forward`; for the arguments see :meth:`begin`."""
        run, forwarded = self.begin(*given)
        self._library.tswift_forward(ctypes.byref(self._model), ctypes.byref(run))
        return forwarded

    def verify(self, follow: Callable[..., T], *given: Any) -> tuple[Forwarded, Tensor, T]:
        """As :meth:`~tswift.forward.target.Target.verify`; for the other arguments see :meth:`begin`."""
        run, forwarded = self.begin(*given)
        logits = torch.empty(run.nodes, self.lm_head_c.outputs, dtype=torch.float32)
        asked = self._verification
        asked.run, asked.hidden, asked.logits = ctypes.addressof(run), run.hidden, logits.data_ptr()
        return forwarded, logits, follow(logits, verification=ctypes.addressof(asked))

    def begin(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: KVBuffer,
        ancestors: Tensor | None,
        pre_norm: bool = False,
        tapped: Sequence[int] = (),
    ) -> tuple[Any, Forwarded]:
        """What the C function is to be called with for a pass, and where it will leave the result.

        Args:
            tokens, positions, kv, ancestors: as for :meth:`~tswift.forward.target.Target.forward`.
            pre_norm: whether the states before the final norm are asked for.
            tapped: the layers after which the states are.
        """
        layers, heads, width, hidden = self._shape
        nodes, threads = len(tokens), torch.get_num_threads()
        states = torch.empty(2, nodes, hidden, dtype=torch.float32)
        queries = torch.empty(layers, heads, nodes, width, dtype=torch.float32)
        inner = torch.empty(layers, nodes, hidden, dtype=torch.float32) if tapped else None
        tokens, positions = tokens.contiguous(), positions.contiguous()
        ancestors = None if ancestors is None or nodes == 1 else ancestors.contiguous()
        run = C.Pass(
            tokens.data_ptr(),
            positions.data_ptr(),
            kv.keys.data_ptr(),
            kv.values.data_ptr(),
            0 if ancestors is None else ancestors.data_ptr(),
            states.data_ptr(),
            states.data_ptr() + nodes * hidden * states.itemsize,
            queries.data_ptr(),
            0 if inner is None else inner.data_ptr(),
            0,
            0 if kv.shape.steps is None else kv.shape.steps.data_ptr(),
            nodes,
            kv.length,
            kv.keys.stride(0),
            kv.keys.stride(1),
            threads,
        )
        size = self._library.tswift_space(ctypes.byref(self._model), ctypes.byref(run))
        if len(self._space) < size:  # kept, as memory that is new has to be mapped
            self._space = torch.empty(size, dtype=torch.float32)
        run.space = self._space.data_ptr()
        run.kept = tokens, positions, ancestors  # as long as it is
        return run, _Result(states, queries, pre_norm, inner, tapped)


class _Result(Forwarded):
    """A pass's, of which tensors are made when they are asked for: plain decoding asks for none."""

    def __init__(
        self, states: Tensor, queries: Tensor, pre_norm: bool, inner: Tensor | None, tapped: Sequence[int]
    ) -> None:
        self.__dict__.update(_states=states, _queries=queries, _pre_norm=pre_norm, _inner=inner, _tapped=tapped)

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
        return None if inner is None else torch.cat([inner[layer] for layer in self.__dict__["_tapped"]], -1)


class HeadProgram:
    """The steps of a chain of heads, each as one C function.

    Args:
        heads: one by one, in float32 on the CPU, whose weights stay as they are.
        hidden_size: width of their states.
        eps: of their norms.

    Raises:
        Unbuilt: there is no program here.
    """

    def __init__(self, heads: Iterable[Any], hidden_size: int, eps: float) -> None:
        self._library, self._parallel = library(), native.parallel_region()
        self._hidden = hidden_size
        self._kept: list[Any] = []  # what the C structures point to
        heads = list(heads)
        self._heads = (C.Head * len(heads))()
        self._space = torch.empty(0, dtype=torch.float32)
        self._guess = C.Guess(heads=ctypes.addressof(self._heads), parallel=self._parallel, hidden=hidden_size)
        for head, made in zip(heads, self._heads, strict=True):
            linear, made.hidden, made.epsilon = PackedLinear(head.linear), hidden_size, eps
            made.linear = linear.c
            norms = {"input_norm": head.input_layernorm, "after": head.post_layernorm}
            if hasattr(head, "mix"):
                mix = PackedLinear(head.mix)
                made.mix, norms["embedding_norm"] = mix.c, head.embedding_layernorm
                self._kept.append(mix)
            for name, norm in norms.items():
                weight = _plain(norm.weight).contiguous()
                setattr(made, name, weight.data_ptr())
                self._kept.append(weight)
            self._kept.append(linear)

    def __call__(self, index: int, hidden: Tensor, embedding: Tensor | None) -> tuple[Tensor, Tensor]:
        """As :meth:`~tswift.speculators.heads.Heads.step`."""
        hidden = hidden.contiguous()
        rows = hidden.numel() // self._hidden
        embeddings = None if embedding is None else embedding.expand(hidden.shape).contiguous()
        refined, out = torch.empty_like(hidden), torch.empty_like(hidden)
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
            model: whose embeddings and LM head they use.
            state: ``[H]``, where the heads start.
            first: ``[H]`` state whose logits come before those of the heads; None for none.
            root: the text's last token.
            levels: how many.
            ranking: what the C function that ranks candidates is to be called with, for the first level.
            rank: that function's address.
            count: candidates of a level.
        """
        states = [None if each is None else each.contiguous() for each in (state, first)]
        size = 8 * self._hidden + model.lm_head_c.outputs
        if len(self._space) < size:  # kept, as memory that is new is far from the processor
            self._space = torch.empty(size, dtype=torch.float32)
        given = self._guess
        given.state, given.first = (None if each is None else each.data_ptr() for each in states)
        given.lm_head, given.embeddings = ctypes.addressof(model.lm_head_c), ctypes.addressof(model.embeddings)
        given.ranking, given.rank, given.space = ctypes.addressof(ranking), rank, self._space.data_ptr()
        given.levels, given.count, given.root, given.threads = levels, count, root, torch.get_num_threads()
        self._library.tswift_guess(ctypes.byref(given))


def slower_than_float32(network: PreTrainedModel) -> bool:
    """Whether a model on the CPU has no program for its dtype alone, and would have one in float32."""
    narrow = network.device.type == "cpu" and network.dtype in (torch.bfloat16, torch.float16)
    return narrow and type(network).__name__ in MODELS and _float32_bytes(network) <= MAX_COPIED


def _float32_bytes(network: PreTrainedModel) -> int:
    return sum(weight.numel() for weight in network.parameters()) * torch.float32.itemsize


def may_serve(config: Any) -> bool:
    """Whether the program takes models of a configuration, as far as that tells."""
    if config.model_type not in _TYPES or not _computes(config):
        return False
    windows = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return not windows and native.takes(width)


def _computes(config: Any) -> bool:
    """Whether the program knows a model's activation and position encoding."""
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    return getattr(config, "hidden_act", None) == "silu" and rotary in _ROTARY


def _refuse_unfit(network: PreTrainedModel) -> None:
    kind = type(network).__name__
    if kind not in MODELS:
        raise Unfit(f"{kind} has no program")
    weights, config = list(network.parameters()), network.config
    for reason, wrong in {
        "its weights are not plain float32": {(type(each), each.dtype) for each in weights} != {_FLOATS},
        "it is not on the CPU": any(weight.device.type != "cpu" for weight in weights),
        "its weights are too large to be held twice": _float32_bytes(network) > MAX_COPIED,
        "its activation or position encoding has no program": not _computes(config),
        "its heads are of a size that native attention does not take": not native.takes(
            network.get_decoder().layers[0].self_attn.head_dim
        ),
    }.items():
        if wrong:
            raise Unfit(reason)


def integer_steps(network: PreTrainedModel) -> Tensor:
    """The finest steps in which 16 bits hold every key and value that the weights can give.

    Returns:
        As in :class:`~tswift.caches.KVShape`.

    Raises:
        Unfit: the modeling code is not known to put them together from a norm, a linear layer and a rotation.
    """
    if type(network).__name__ not in MODELS:
        raise Unfit(f"{type(network).__name__} has no bounds")
    config, layers = network.config, network.get_decoder().layers
    turned = float(network.get_decoder().rotary_emb.attention_scaling)

    def most(linear: Any, norm: Tensor) -> Tensor:
        # what a norm puts out is at most the root of its size times its weights, and its product with a row follows
        weight = linear.codes().dequantized() if isinstance(linear, IntegerLinear) else _plain(linear.weight)
        bound = (weight * _plain(norm)).norm(dim=1) * config.hidden_size**0.5
        return bound if linear.bias is None else bound + _plain(linear.bias).abs()

    bounds = []
    for layer in layers:
        own, norm = layer.self_attn, layer.input_layernorm.weight
        linears = own.k_proj, own.v_proj
        if not all(isinstance(each, IntegerLinear) or type(each.weight) is nn.Parameter for each in linears):
            raise Unfit("its weights are quantised or split")
        keys, values = (most(each, norm).view(config.num_key_value_heads, -1) for each in (own.k_proj, own.v_proj))
        if hasattr(own, "k_norm"):
            keys = (_plain(own.k_norm.weight).abs() * own.head_dim**0.5).expand_as(keys)
        pair = keys.unflatten(1, (2, -1)).norm(dim=1) * turned  # which rotation mixes
        bounds.append(torch.stack([torch.cat([pair, pair], 1), values]))
    return torch.stack(bounds, 1).clamp_min(1e-30) / (2**15 - 1)


def _plain(weight: Any) -> Tensor:
    plain: Tensor = weight.detach().to(torch.float32)
    return plain


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
