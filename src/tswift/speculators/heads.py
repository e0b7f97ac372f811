"""Heads: small networks that draft the tokens after the next one from one hidden state of the
model; and the LM head that they draft by.

Chained and conditioned heads refine one state step by step and share the model's LM head;
conditioned ones also read the token drafted before. Medusa's heads are independent, and each has an
LM head of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tswift.forward.cpu.products import PackedLinear, lay_together, multiply
from tswift.forward.cpu.program import DRAFT_BITS, MAX_COPIED, HeadProgram, rounded_linear
from tswift.forward.hf import output_of
from tswift.forward.target import Target
from tswift.machine import return_free_memory
from tswift.models.codes import Packed
from tswift.models.shapes import HEADS, fill_randomly
from tswift.native_build import Unbuilt

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FORMAT = "tswift-heads-1"
DRAFT_IDS = "draft_ids"  # name of the tensor
OWN = "tswift"  # layout, and key of the metadata
_COPIED = 1 << 24  # weights of a whole LM head that may be held once more


class DraftHead:
    """The LM head of a model for its drafts: rows of the model's, where a C function multiplies
    them as its codes, or as codes of 8 bits if it has none.

    It decides what is drafted, and never what is drawn: the target draws from all tokens, by its
    own LM head.

    Args:
        target: the model.
        ids: ``[N]`` int32, ascending: the draft vocabulary; None for all tokens.

    Attributes:
        c: the layer as products.c has it, with outputs for what is drafted alone; None if PyTorch
            computes it.
    """

    def __init__(self, target: Target, ids: Tensor | None) -> None:
        self.target = target
        self.ids = ids
        self.program = target.runner.program
        self._places = None if ids is None else ids.to(target.device, torch.int64)
        own = None if self.program is None else self.program.lm_head_c
        lm_head = target.model.get_output_embeddings()
        self._linear: Any = None  # None to ask the model for the logits of all tokens
        if self._places is not None and own is not None and own.bits:
            bias = None if lm_head.bias is None else lm_head.bias[self._places]
            self._linear = PackedLinear(lm_head.packed.chosen(self._places), bias, DRAFT_BITS)
        elif ids is not None or (
            own is not None and not own.bits and own.inputs * own.outputs <= _COPIED
        ):
            linear = lm_head_rows(lm_head, self._places, target.dtype)
            self._linear = rounded_linear(linear) if linear and own is not None else linear
        self.c: Any = own if ids is None else None
        if self._linear is not None and own is not None:
            lay_together(self._linear)
            self.c = self._linear.c
            self.c.scale = own.scale
            self.c.softcap = own.softcap
            return_free_memory()  # what was computed on the way is several times as large

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[..., V]`` logits of hidden states ``[..., H]``:
        minus infinity for tokens that are not drafted.
        """
        if self._linear is None:
            found = self.target.open_logits(hidden)
            drafted = found if self._places is None else found[..., self._places]
        elif self.c is not None:
            drafted = multiply(self.c, hidden.float())
        else:
            drafted = output_of(self.target.model, self._linear)(hidden)
        if self._places is None:
            return drafted
        logits = drafted.new_full((*drafted.shape[:-1], self.target.vocab_size), -inf)
        return logits.index_copy_(-1, self._places, drafted)


def lm_head_rows(lm_head: Any, ids: Tensor | None, dtype: torch.dtype) -> nn.Linear | None:
    """Rows of an LM head as a layer, ``ids`` None for all;
    None if its weights are not plain numbers.
    """
    packed, bias = getattr(lm_head, "packed", None), getattr(lm_head, "bias", None)
    weight = lm_head._parameters.get("weight")  # codes would make all their weights to say it
    if isinstance(packed, Packed):
        rows = packed.whole() if ids is None else packed.rows(ids)
    elif type(weight) is nn.Parameter and weight.is_floating_point() and weight.dim() == 2:
        rows = weight.detach() if ids is None else weight.detach()[ids]
    else:
        return None
    weights = {"weight": rows}
    if bias is not None:
        weights["bias"] = bias.detach() if ids is None else bias.detach()[ids]
    linear = nn.Linear(rows.shape[1], len(rows), bias is not None, device="meta")
    linear.load_state_dict({name: each.to(dtype) for name, each in weights.items()}, assign=True)
    return linear.requires_grad_(False)


class Heads(nn.Module):
    """Heads of one kind for a model; head i (from 0) drafts the token i+2 places after the state's
    own.

    Args:
        hidden_size: width of the model's hidden states.
        heads: their modules.
        pre_norm: whether they start from the state before the model's final norm, not after it;
            ``raw`` in files.
    """

    kind: str  # name in the heads file
    # what else about() says and the class is made from, after hidden size and count
    fields: tuple[str, ...]
    conditioned = False  # whether a head reads the token drafted just before its own
    # int32, ascending: the draft vocabulary, of which all drafted tokens are; None for any
    draft_ids: Tensor | None
    base: str | None = None  # fingerprint of the model that they were made for; None if unknown
    program: HeadProgram | None = None  # C functions of their steps; None if PyTorch computes them
    _draft_head: DraftHead | None = None

    def __init__(
        self, hidden_size: int, heads: Iterable[nn.Module], pre_norm: bool = False
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.pre_norm = pre_norm
        self.heads: Any = nn.ModuleList(heads)
        self.count = len(self.heads)
        # no weight: state_dict() is what is trained
        self.register_buffer(DRAFT_IDS, None, persistent=False)

    def __getstate__(self) -> dict[str, object]:
        """Without what was made of weights: a copy's may change."""
        return {**self.__dict__, "program": None, "_draft_head": None}

    def draft_head(self, target: Target) -> DraftHead:
        """The LM head that they draft by for a model, made when it is first asked for."""
        known = self._draft_head
        now = target, self.draft_ids, target.runner.program
        if known is None or any(
            x is not y for x, y in zip((known.target, known.ids, known.program), now, strict=True)
        ):
            self._draft_head = known = DraftHead(target, self.draft_ids)
        return known

    def forward(
        self, hidden: Tensor, embeddings: Tensor | None = None, count: int | None = None
    ) -> Tensor:
        """``[count, ..., H]`` states to feed to the LM head.

        Args:
            hidden: ``[..., H]``.
            embeddings: ``[count, ..., H]`` input embeddings of the tokens before those drafted; for
                conditioned heads.
            count: number of heads to run; None for all.
        """
        states = []
        for index in range(self.count if count is None else count):
            hidden, out = self.step(
                index, hidden, None if embeddings is None else embeddings[index]
            )
            states.append(out)
        return torch.stack(states)

    def step(
        self, index: int, hidden: Tensor, embedding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one head of a chain: from ``[..., H]`` to the refined state and the one to feed to
        the LM head.

        Args:
            index: of the head.
            hidden: state of the head before, or of the model for the first.
            embedding: input embedding of the token drafted before; for conditioned heads only.
        """
        learns = torch.is_grad_enabled() and hidden.requires_grad
        if self.program is not None and hidden.dtype == torch.float32 and not learns:
            return self.program(index, hidden, embedding)
        head = self.heads[index]
        hidden = head(hidden, embedding)
        return hidden, head.post_layernorm(hidden)

    def levels(
        self,
        hidden: Tensor,
        lm_head: Callable[[Tensor], Tensor],
        first: Tensor | None = None,
        levels: int | None = None,
    ) -> Tensor:
        """``[levels, V]`` logits of heads that read no drafted token.

        Args:
            hidden: ``[H]`` state that they start from.
            lm_head: the model's; called once, as it is large and has to be read.
            first: ``[H]`` state whose logits by the model's LM head come before those of the heads;
                None for none.
            levels: how many; None for all.
        """
        before = [] if first is None else [first.unsqueeze(0)]
        count = self.count if levels is None else levels - len(before)
        return lm_head(torch.cat([*before, self(hidden, count=count)]) if count else before[0])

    def about(self) -> dict[str, Any]:
        """What :func:`build` needs to rebuild them, for a file."""
        about = {
            "kind": self.kind,
            "count": self.count,
            "hidden_size": self.hidden_size,
            "raw": self.pre_norm,
        }
        if self.draft_ids is not None:
            about["draft_vocabulary"] = len(self.draft_ids)
        return about | {name: getattr(self, name) for name in self.fields}

    def save(
        self, path: Path, dtype: torch.dtype = torch.bfloat16, base: str | None = None
    ) -> None:
        """Write :meth:`about`, the weights in ``dtype``, and the draft vocabulary into one file.

        ``base`` None keeps what is known.
        """
        base = self.base if base is None else base
        about = {"format": FORMAT, **self.about(), **({} if base is None else {"base": base})}
        tensors = {
            name: value.detach().to(dtype).contiguous() for name, value in self.state_dict().items()
        }
        if self.draft_ids is not None:
            tensors[DRAFT_IDS] = self.draft_ids.to(torch.int32).contiguous()
        save_file(tensors, path, metadata={OWN: json.dumps(about)})


class RefiningHead(nn.Module):
    """One residual step from the state for token t+i to the one for t+i+1,
    perhaps by the token drafted before.

    It is ``h <- h + B norm(h)``, or ``h <- h + B silu(A [norm(h); norm(e)])``.
    """

    def __init__(self, hidden_size: int, eps: float, conditioned: bool) -> None:
        super().__init__()
        # hashes of weights, which runs and benchmarks keep, are taken in this order
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        if conditioned:
            self.embedding_layernorm = nn.RMSNorm(hidden_size, eps=eps)
            self.mix = nn.Linear(2 * hidden_size, 2 * hidden_size, bias=False)
        self.linear = nn.Linear((1 + conditioned) * hidden_size, hidden_size, bias=False)
        self.post_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden: Tensor, embedding: Tensor | None = None) -> Tensor:
        """The refined state, same shape as ``hidden``."""
        inner = self.input_layernorm(hidden)
        if embedding is not None:
            inner = nn.functional.silu(
                self.mix(torch.cat([inner, self.embedding_layernorm(embedding)], dim=-1))
            )
        return hidden + self.linear(inner)


class ChainedHeads(Heads):
    """TokenSwift's heads: each refines the state of the one before, and reads no drafted token."""

    kind = "chained"
    fields = ("eps",)

    def __init__(
        self, hidden_size: int, count: int = HEADS, eps: float = 1e-5, pre_norm: bool = False
    ) -> None:
        heads = (RefiningHead(hidden_size, eps, self.conditioned) for _ in range(count))
        super().__init__(hidden_size, heads, pre_norm)
        self.eps = eps


class ConditionedHeads(ChainedHeads):
    """Heads that also read the token drafted before theirs.

    With shared noise a drafter almost always knows that token, and need not average over what it
    might have been.
    """

    kind = "conditioned"
    conditioned = True


class MedusaHead(nn.Module):
    """Residual blocks ``h <- h + silu(W h + b)``, and an LM head (Cai et al., 2024)."""

    def __init__(self, hidden_size: int, vocab_size: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(layers))
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """The state for its LM head, same shape as ``hidden``."""
        for block in self.blocks:
            hidden = hidden + nn.functional.silu(block(hidden))
        return hidden


class MedusaHeads(Heads):
    """Medusa's heads: independent of each other, with LM heads of their own."""

    kind = "medusa"
    fields = ("vocab_size", "layers")

    def __init__(self, hidden_size: int, count: int, vocab_size: int, layers: int = 1) -> None:
        super().__init__(
            hidden_size, (MedusaHead(hidden_size, vocab_size, layers) for _ in range(count))
        )
        self.vocab_size = vocab_size
        self.layers = layers

    def forward(
        self, hidden: Tensor, embeddings: Tensor | None = None, count: int | None = None
    ) -> Tensor:
        """As :meth:`Heads.forward`; a state is for its head's own LM head."""
        return torch.stack([head(hidden) for head in self.heads[:count]])

    def levels(
        self,
        hidden: Tensor,
        lm_head: Callable[[Tensor], Tensor],
        first: Tensor | None = None,
        levels: int | None = None,
    ) -> Tensor:
        """As :meth:`Heads.levels`."""
        before = [] if first is None else [lm_head(first)]
        heads = self.heads[: None if levels is None else levels - len(before)]
        return torch.stack([*before, *(head.lm_head(head(hidden)) for head in heads)])


# Those that can be made for any model: they need its LM head and nothing of their own.
HEAD_TYPES: dict[str, type[ChainedHeads]] = {
    heads.kind: heads for heads in (ChainedHeads, ConditionedHeads)
}
KINDS: dict[str, type[Any]] = {**HEAD_TYPES, MedusaHeads.kind: MedusaHeads}


def build(about: Mapping[str, Any]) -> Heads:
    """Heads with uninitialised weights and draft vocabulary, from :meth:`Heads.about`."""
    kind = KINDS[about["kind"]]
    heads: Heads = kind(
        about["hidden_size"], about["count"], *(about[name] for name in kind.fields)
    )
    heads.pre_norm = about.get("raw", False)
    if drafted := about.get("draft_vocabulary"):
        heads.draft_ids = torch.empty(drafted, dtype=torch.int32)
    return heads


def prepare(heads: Heads) -> Heads:
    """Have heads that were loaded compute fast; their weights stay as they are from now on."""
    weights = list(heads.parameters())
    plain = all(weight.dtype == torch.float32 and weight.is_cpu for weight in weights)
    small = sum(weight.numel() for weight in weights) * torch.float32.itemsize <= MAX_COPIED
    if isinstance(heads, ChainedHeads) and plain and small:
        with suppress(Unbuilt):  # PyTorch computes them then
            heads.program = HeadProgram(heads.heads, heads.hidden_size, heads.eps)
    return heads


def random_heads(
    kind: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> Heads:
    """Heads of a kind in ``HEAD_TYPES`` with random weights, for the model of a configuration."""
    with torch.device(device):
        heads = HEAD_TYPES[kind](config.hidden_size, HEADS, config.rms_norm_eps)
    fill_randomly(heads.to(dtype))
    return prepare(heads.eval().requires_grad_(False))
