"""Passes of a Llama-like model on the CPU as one C function, compiled where the user has a C compiler.

Eagerly a pass of a small model takes longer to be said than to be computed: some 300 operators, each through Python and
PyTorch. Weights that lost nothing in bfloat16 are read as that, which halves the bytes and changes no product. A row's
bits depend on no other row, so every pass is exact, whatever its width.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tswift.attention import native
from tswift.attention.native import build, widest_vectors
from tswift.attention.sdpa import MOST_WIDTH
from tswift.kv import KVBuffer
from tswift.models.passes import Forwarded

_SOURCE = Path(__file__).with_name("program.c")
MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROTARY = ("default", "linear", "llama3", "yarn")  # whose rates are the same at every length
_FLOATS = nn.Parameter, torch.float32
MOST_COPIED = 1 << 30  # bytes of a model's weights in float32; above, memory is worth more than time


def _structures(source: str) -> Any:
    """The structures that a C file declares, by name: of pointers, numbers, and structures that come before."""
    known: dict[str, Any] = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}
    plain = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    for declared, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", plain, re.DOTALL):
        fields: list[tuple[str, Any]] = []
        for line in filter(None, map(str.strip, declared.split(";"))):
            kind, names = line.split(maxsplit=1)
            pointers = [(each, ctypes.c_void_p) for each in re.findall(r"\*(\w+)", names)]
            fields += pointers or [(each.strip(), known[kind]) for each in names.split(",")]
        known[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return SimpleNamespace(**known)


_C = _structures(_SOURCE.read_text())


class _Verification(ctypes.Structure):
    """``Verification`` in decoding/drawing.c."""

    _fields_: ClassVar = [
        (name, ctypes.c_void_p) for name in ["forward", "model", "run", "multiply", "lm_head", "hidden", "logits"]
    ]


T = TypeVar("T")


class Unfit(Exception):
    """Why a model's passes cannot be such a program, in one line."""


def library() -> ctypes.CDLL:
    """The compiled program.

    Raises:
        Unbuilt: there is none here; it says why.
    """
    built = build(_SOURCE, options=widest_vectors())
    for function in (built.tswift_block, built.tswift_lanes, built.tswift_space):
        function.restype = ctypes.c_int64
    return built


def weights_state(network: nn.Module) -> list[tuple[int, int]]:
    """Where weights are, and how often they were changed."""
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in network.parameters()]


class PackedLinear:
    """Linear layers with the same input as one product, by the program: frozen weights, packed.

    Args:
        layers: as the modeling code has them; their outputs are joined in this order.

    Raises:
        Unbuilt: there is no program here.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._library = library()
        weight = torch.cat([_plain(layer.weight) for layer in layers])
        biases = [getattr(layer, "bias", None) for layer in layers]
        sizes = [len(_plain(layer.weight)) for layer in layers]
        given = zip(biases, sizes, strict=True)
        joined = [torch.zeros(size) if bias is None else _plain(bias) for bias, size in given]
        self._bias = None if all(bias is None for bias in biases) else torch.cat(joined)
        self.outputs, self.inputs = weight.shape
        half = torch.equal(weight.bfloat16().float(), weight)
        block = self._library.tswift_block()
        padded = torch.zeros(-(-self.outputs // block) * block, self.inputs, dtype=weight.dtype)
        padded[: self.outputs] = weight
        packed = padded.view(-1, block, self.inputs).transpose(1, 2)
        if half:  # the numbers of two vectors take turns
            packed = packed.bfloat16().unflatten(2, (-1, 2, self._library.tswift_lanes())).transpose(3, 4)
        self._packed = packed.contiguous()
        bias = 0 if self._bias is None else self._bias.data_ptr()
        self.c = _C.Linear(self._packed.data_ptr(), bias, self.inputs, self.outputs, int(half))
        self._address = ctypes.addressof(self.c)
        self._parallel = native.parallel_region()

    def __call__(self, input: Tensor) -> Tensor:
        """``[..., inputs]`` float32 to ``[..., outputs]``."""
        given = input.contiguous()
        out = torch.empty(*given.shape[:-1], self.outputs, dtype=torch.float32)
        self._library.tswift_multiply(
            ctypes.c_void_p(self._address),
            ctypes.c_void_p(given.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(given.numel() // self.inputs),
            ctypes.c_void_p(self._parallel),
            ctypes.c_int64(torch.get_num_threads()),
        )
        return out


class PassProgram:
    """The passes of a model as one C function; its logits, too.

    Args:
        network: a causal language model of transformers in float32 on the CPU, whose weights stay as they are.
        kv_dtype: of the KV caches.

    Raises:
        Unfit: it is no such model.
        Unbuilt: there is no program here.
    """

    most_nodes: ClassVar[int] = MOST_WIDTH  # of a pass

    def __init__(self, network: PreTrainedModel, kv_dtype: torch.dtype = torch.float32) -> None:
        _refuse_unfit(network)
        self._kv_dtype = kv_dtype
        self._packed_state = weights_state(network)
        config, decoder = network.config, network.get_decoder()
        layers, width = decoder.layers, decoder.layers[0].self_attn.head_dim
        attention = native.library(width, kv_dtype)
        self._library = library()
        self._space = torch.empty(0, dtype=torch.float32)
        self._kept: list[Any] = []  # what the C structures point to
        self._layers = (_C.Layer * len(layers))()
        for layer, made in zip(layers, self._layers, strict=True):
            own, mlp = layer.self_attn, layer.mlp
            made.joined = self._pack(own.q_proj, own.k_proj, own.v_proj)
            made.output, made.down = self._pack(own.o_proj), self._pack(mlp.down_proj)
            made.gates = self._pack(mlp.gate_proj, mlp.up_proj)
            made.before = self._pointer(layer.input_layernorm.weight)
            made.after = self._pointer(layer.post_attention_layernorm.weight)
            made.query_norm, made.key_norm = (
                self._pointer(getattr(own, name).weight) if hasattr(own, name) else 0 for name in ("q_norm", "k_norm")
            )
        self.lm_head = PackedLinear([network.get_output_embeddings()])  # hidden states to logits
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._shape = len(layers), heads, width, config.hidden_size
        self.embeddings = self._pointer(decoder.embed_tokens.weight)  # ``[V, H]`` float32
        rotary = decoder.rotary_emb
        self._model = _C.Model(
            ctypes.addressof(self._layers),
            self.embeddings,
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
            config.rms_norm_eps,
            rotary.attention_scaling,
            layers[0].self_attn.scaling * 1.4426950408889634,  # powers of two: see native.c
        )
        self._verification = _Verification(
            forward=_address(self._library.tswift_forward),
            model=ctypes.addressof(self._model),
            multiply=_address(self._library.tswift_multiply),
            lm_head=ctypes.addressof(self.lm_head.c),
        )

    def _pack(self, *layers: nn.Module) -> Any:
        packed = PackedLinear(layers)
        self._kept.append(packed)
        return packed.c

    def _pointer(self, weight: Tensor) -> int:
        kept = _plain(weight).contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def outdated(self, network: PreTrainedModel) -> bool:
        """Whether the model's weights have been changed since: what is packed here are copies."""
        return self._packed_state != weights_state(network)

    def takes(self, kv: KVBuffer, nodes: int) -> bool:
        """Whether a pass over so many nodes can be the program's; more are for the stock operators."""
        fits = 0 < nodes <= self.most_nodes and kv.length + nodes <= kv.capacity
        return fits and kv.shape.dtype == self._kv_dtype

    def __call__(self, *given: Any) -> Forwarded:
        """As :meth:`~tswift.models.target.Target.forward`; for the arguments see :meth:`begin`."""
        run, forwarded = self.begin(*given)
        self._library.tswift_forward(ctypes.byref(self._model), ctypes.byref(run))
        return forwarded

    def verify(self, follow: Callable[..., T], *given: Any) -> tuple[Forwarded, Tensor, T]:
        """As :meth:`~tswift.models.target.Target.verify`; for the other arguments see :meth:`begin`."""
        run, forwarded = self.begin(*given)
        logits = torch.empty(run.nodes, self.lm_head.outputs, dtype=torch.float32)
        asked = self._verification
        asked.run, asked.hidden, asked.logits = ctypes.addressof(run), run.hidden, logits.data_ptr()
        return forwarded, logits, follow(logits, verification=ctypes.addressof(asked))

    def begin(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: KVBuffer,
        ancestors: Tensor | None,
        raw: bool = False,
        tapped: Sequence[int] = (),
    ) -> tuple[Any, Forwarded]:
        """What the C function is to be called with for a pass, and where it will leave the result.

        Args:
            tokens, positions, kv, ancestors: as for :meth:`~tswift.models.target.Target.forward`.
            raw: whether the states before the final norm are asked for.
            tapped: the layers after which the states are.
        """
        layers, heads, width, hidden = self._shape
        nodes, threads = len(tokens), torch.get_num_threads()
        states = torch.empty(2, nodes, hidden, dtype=torch.float32)
        queries = torch.empty(layers, heads, nodes, width, dtype=torch.float32)
        inner = torch.empty(layers, nodes, hidden, dtype=torch.float32) if tapped else None
        tokens, positions = tokens.contiguous(), positions.contiguous()
        ancestors = None if ancestors is None or nodes == 1 else ancestors.contiguous()
        run = _C.Pass(
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
        return run, _Result(states, queries, raw, inner, tapped)


class _Result(Forwarded):
    """A pass's, of which tensors are made when they are asked for: plain decoding asks for none."""

    def __init__(self, states: Tensor, queries: Tensor, raw: bool, inner: Tensor | None, tapped: Sequence[int]) -> None:
        self.__dict__.update(_states=states, _queries=queries, _raw=raw, _inner=inner, _tapped=tapped)

    @cached_property
    def hidden(self) -> Tensor:  # type: ignore[override]
        return self.__dict__["_states"][0]  # type: ignore[no-any-return]

    @cached_property
    def queries(self) -> list[Tensor]:  # type: ignore[override]
        return list(self.__dict__["_queries"].unbind())

    @cached_property
    def raw(self) -> Tensor | None:  # type: ignore[override]
        return self.__dict__["_states"][1] if self.__dict__["_raw"] else None

    @cached_property
    def taps(self) -> Tensor | None:  # type: ignore[override]
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
        self._heads = (_C.Head * len(heads))()
        self._space = torch.empty(0, dtype=torch.float32)
        self._guess = _C.Guess(heads=ctypes.addressof(self._heads), parallel=self._parallel, hidden=hidden_size)
        for head, made in zip(heads, self._heads, strict=True):
            linear, made.hidden, made.epsilon = PackedLinear([head.linear]), hidden_size, eps
            made.linear = linear.c
            norms = {"input_norm": head.input_layernorm, "after": head.post_layernorm}
            if hasattr(head, "mix"):
                mix = PackedLinear([head.mix])
                made.mix, norms["embedding_norm"] = mix.c, head.embedding_layernorm
                self._kept.append(mix)
            for name, norm in norms.items():
                weight = _plain(norm.weight).contiguous()
                setattr(made, name, weight.data_ptr())
                self._kept.append(weight)
            self._kept.append(linear)

    def __call__(self, index: int, hidden: Tensor, embedding: Tensor | None) -> tuple[Tensor, Tensor]:
        """As :meth:`~tswift.models.heads.Heads.step`."""
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
        size = 7 * self._hidden + model.lm_head.outputs
        if len(self._space) < size:  # kept, as memory that is new is far from the processor
            self._space = torch.empty(size, dtype=torch.float32)
        given = self._guess
        given.state, given.first = (None if each is None else each.data_ptr() for each in states)
        given.lm_head, given.embeddings = ctypes.addressof(model.lm_head.c), model.embeddings
        given.ranking, given.rank, given.space = ctypes.addressof(ranking), rank, self._space.data_ptr()
        given.levels, given.count, given.root, given.threads = levels, count, root, torch.get_num_threads()
        self._library.tswift_guess(ctypes.byref(given))


def _refuse_unfit(network: PreTrainedModel) -> None:
    kind = type(network).__name__
    if kind not in MODELS:
        raise Unfit(f"{kind} has no program")
    weights, config = list(network.parameters()), network.config
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    size = sum(weight.numel() for weight in weights) * torch.float32.itemsize
    for reason, wrong in {
        "its weights are not plain float32": {(type(each), each.dtype) for each in weights} != {_FLOATS},
        "it is not on the CPU": any(weight.device.type != "cpu" for weight in weights),
        "its weights are too large to be held twice": size > MOST_COPIED,
        "its activation or position encoding has no program": config.hidden_act != "silu" or rotary not in _ROTARY,
        "its heads are of a size that native attention does not take": not native.takes(
            network.get_decoder().layers[0].self_attn.head_dim
        ),
    }.items():
        if wrong:
            raise Unfit(reason)


def integer_steps(network: PreTrainedModel) -> Tensor:
    """The finest steps in which 16 bits hold every key and value that the weights can give.

    Returns:
        As in :class:`~tswift.kv.KVShape`.

    Raises:
        Unfit: the modeling code is not known to put them together from a norm, a linear layer and a rotation.
    """
    if type(network).__name__ not in MODELS:
        raise Unfit(f"{type(network).__name__} has no bounds")
    config, layers = network.config, network.get_decoder().layers
    turned = float(network.get_decoder().rotary_emb.attention_scaling)

    def most(linear: Any, norm: Tensor) -> Tensor:
        # what a norm puts out is at most the root of its size times its weights, and its product with a row follows
        bound = (_plain(linear.weight) * _plain(norm)).norm(dim=1) * config.hidden_size**0.5
        return bound if linear.bias is None else bound + _plain(linear.bias).abs()

    bounds = []
    for layer in layers:
        own, norm = layer.self_attn, layer.input_layernorm.weight
        if any(type(each.weight) is not nn.Parameter for each in (own.k_proj, own.v_proj)):
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
