"""Heads: small networks that draft the tokens after the next one from one hidden state of the model.

Chained and conditioned heads refine one state step by step and share the model's LM head; conditioned ones also read
the token drafted before. Medusa's heads are independent, and each has an LM head of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tswift.attention.native import Unbuilt
from tswift.models.linear import use_onednn
from tswift.models.program import MOST_COPIED, HeadProgram

FORMAT = "tswift-heads-1"


class Heads(nn.Module):
    """Heads of one kind for a model; head i (from 0) drafts the token i+2 places after the state's own.

    Args:
        hidden_size: width of the model's hidden states.
        heads: their modules.
        pre_norm: whether they start from the state before the model's final norm, not after it; ``raw`` in files.

    Attributes:
        kind: name in the heads file.
        fields: names of what else :meth:`about` says and the class is made from, after hidden size and count.
        conditioned: whether a head reads the token drafted just before its own.
        count: number of heads.
        base: fingerprint of the model that they were made for; None if unknown.
    """

    kind: str
    fields: tuple[str, ...]
    conditioned = False
    base: str | None = None

    def __init__(self, hidden_size: int, heads: Iterable[nn.Module], pre_norm: bool = False) -> None:
        super().__init__()
        self.hidden_size, self.pre_norm = hidden_size, pre_norm
        self.heads = nn.ModuleList(heads)
        self.count = len(self.heads)

    def forward(self, hidden: Tensor, embeddings: Tensor | None = None, count: int | None = None) -> Tensor:
        """``[count, ..., H]`` states to feed to the LM head.

        Args:
            hidden: ``[..., H]``.
            embeddings: ``[count, ..., H]`` input embeddings of the tokens before those drafted; for conditioned heads.
            count: number of heads to run; None for all.
        """
        raise NotImplementedError

    def step(self, index: int, hidden: Tensor, embedding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run one head of a chain: from ``[..., H]`` to the refined state and the one to feed to the LM head.

        Args:
            index: of the head.
            hidden: state of the head before, or of the model for the first.
            embedding: input embedding of the token drafted before; for conditioned heads only.
        """
        raise NotImplementedError

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
            first: ``[H]`` state whose logits by the model's LM head come before those of the heads; None for none.
            levels: how many; None for all.
        """
        before = [] if first is None else [first.unsqueeze(0)]
        count = self.count if levels is None else levels - len(before)
        return lm_head(torch.cat([*before, self(hidden, count=count)]) if count else before[0])

    def about(self) -> dict[str, Any]:
        """What :func:`build` needs to rebuild them, for a file."""
        about = {"kind": self.kind, "count": self.count, "hidden_size": self.hidden_size, "raw": self.pre_norm}
        return about | {name: getattr(self, name) for name in self.fields}

    def save(self, path: Path, dtype: torch.dtype = torch.bfloat16, base: str | None = None) -> None:
        """Write :meth:`about` and the weights, in ``dtype``, into one file; ``base`` None keeps what is known."""
        about = {"format": FORMAT, **self.about()}
        base = self.base if base is None else base
        if base is not None:
            about["base"] = base
        tensors = {name: value.detach().to(dtype).contiguous() for name, value in self.state_dict().items()}
        save_file(tensors, path, metadata={"tswift": json.dumps(about)})


class ChainedHead(nn.Module):
    """One residual step from the hidden state for token t+i to the one for token t+i+1."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.linear = nn.Linear(hidden_size, hidden_size, bias=False)
        self.post_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """The refined state, same shape as ``hidden``."""
        return hidden + self.linear(self.input_layernorm(hidden))


class ConditionedHead(nn.Module):
    """One residual step that also reads the token drafted before: ``h <- h + B silu(A [norm(h); norm(e)])``."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.embedding_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.mix = nn.Linear(2 * hidden_size, 2 * hidden_size, bias=False)
        self.linear = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.post_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """The refined state, same shape as ``hidden``."""
        both = torch.cat([self.input_layernorm(hidden), self.embedding_layernorm(embedding)], dim=-1)
        return hidden + self.linear(nn.functional.silu(self.mix(both)))


class _RefiningHeads(Heads):
    """A chain of heads over the model's own LM head."""

    head: type[ChainedHead] | type[ConditionedHead]
    fields = ("eps",)

    def __init__(self, hidden_size: int, count: int = 3, eps: float = 1e-5, pre_norm: bool = False) -> None:
        super().__init__(hidden_size, (self.head(hidden_size, eps) for _ in range(count)), pre_norm)
        self.eps = eps
        self.program: HeadProgram | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the program: what is made of a copy may change its weights."""
        return {**self.__dict__, "program": None}

    def step(self, index: int, hidden: Tensor, embedding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As :meth:`Heads.step`."""
        learns = torch.is_grad_enabled() and hidden.requires_grad
        if self.program is not None and hidden.dtype == torch.float32 and not learns:
            return self.program(index, hidden, embedding)
        head = self.heads[index]
        hidden = head(hidden, embedding) if self.conditioned else head(hidden)
        return hidden, head.post_layernorm(hidden)  # type: ignore[operator, union-attr]

    def forward(self, hidden: Tensor, embeddings: Tensor | None = None, count: int | None = None) -> Tensor:
        """As :meth:`Heads.forward`."""
        states = []
        for index in range(self.count if count is None else count):
            hidden, out = self.step(index, hidden, embeddings[index] if embeddings is not None else None)
            states.append(out)
        return torch.stack(states)


class ChainedHeads(_RefiningHeads):
    """TokenSwift's heads: each refines the state of the one before, and reads no drafted token."""

    kind, head = "chained", ChainedHead


class ConditionedHeads(_RefiningHeads):
    """Heads that also read the token drafted before theirs.

    With shared noise a drafter almost always knows that token, and need not average over what it might have been.
    """

    kind, conditioned, head = "conditioned", True, ConditionedHead


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

    kind, fields = "medusa", ("vocab_size", "layers")

    def __init__(self, hidden_size: int, count: int, vocab_size: int, layers: int = 1) -> None:
        super().__init__(hidden_size, (MedusaHead(hidden_size, vocab_size, layers) for _ in range(count)))
        self.vocab_size, self.layers = vocab_size, layers

    def forward(self, hidden: Tensor, embeddings: Tensor | None = None, count: int | None = None) -> Tensor:
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
        return torch.stack([*before, *(head.lm_head(head(hidden)) for head in heads)])  # type: ignore[operator, union-attr]


def prepare(heads: Heads) -> None:
    """Have heads that were loaded compute fast; their weights stay as they are from now on."""
    use_onednn(heads)
    weights = list(heads.parameters())
    plain = all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in weights)
    small = sum(weight.numel() for weight in weights) * torch.float32.itemsize <= MOST_COPIED
    if isinstance(heads, _RefiningHeads) and plain and small:
        with suppress(Unbuilt):  # PyTorch computes them then
            heads.program = HeadProgram(heads.heads, heads.hidden_size, heads.eps)


# Those that can be made for any model: they need its LM head and nothing of their own.
HEAD_TYPES: dict[str, type[ChainedHeads] | type[ConditionedHeads]] = {
    heads.kind: heads for heads in (ChainedHeads, ConditionedHeads)
}


def build(about: Mapping[str, Any]) -> Heads:
    """Heads with uninitialised weights, from :meth:`Heads.about`.

    Raises:
        KeyError: something is missing, or there is no such kind.
        TypeError, ValueError, RuntimeError: a value is of the wrong type, or impossible.
    """
    pre_norm, kind = about.get("raw", False), {**HEAD_TYPES, MedusaHeads.kind: MedusaHeads}[about["kind"]]
    if type(pre_norm) is not bool:
        raise TypeError(f"raw is {pre_norm!r:.40}")
    heads = kind(about["hidden_size"], about["count"], *(about[name] for name in kind.fields))
    heads.pre_norm = pre_norm
    return heads
