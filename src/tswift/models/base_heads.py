"""Heads that guess the tokens after the next one from one hidden state: what those of any kind can do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FORMAT = "tswift-heads-1"


class Heads(nn.Module):
    """Heads of one kind for a model; head i (from 0) guesses the token i+2 places after the state's own.

    Args:
        hidden_size: width of the model's hidden states.
        heads: one by one.
        raw: whether they start from the state before the model's final norm, not after it.

    Attributes:
        kind: name in the heads file.
        conditioned: whether a head is told the token drafted just before the one it guesses.
        count: number of heads.
        base: what tells the model that they were made for; None if nobody said.
    """

    kind: str
    conditioned = False
    base: str | None = None

    def __init__(self, hidden_size: int, heads: Iterable[nn.Module], raw: bool = False) -> None:
        super().__init__()
        self.hidden_size, self.raw = hidden_size, raw
        self.heads = nn.ModuleList(heads)
        self.count = len(self.heads)

    def forward(self, hidden: Tensor, embeddings: Tensor | None = None, most: int | None = None) -> Tensor:
        """States to feed to the LM head: ``[count, ..., H]``.

        Args:
            hidden: ``[..., H]``.
            embeddings: ``[count, ..., H]`` input embeddings of the tokens before those guessed; for conditioned heads.
            most: how many heads to ask; None for all.
        """
        raise NotImplementedError

    def step(self, index: int, hidden: Tensor, embedding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One head of a chain.

        Args:
            index: which one.
            hidden: ``[..., H]`` state of the head before, or of the model for the first.
            embedding: ``[..., H]`` input embedding of the token drafted before; for conditioned heads only.

        Returns:
            The refined state, for the next head, and the state to feed to the LM head; both ``[..., H]``.
        """
        raise NotImplementedError

    def levels(
        self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor], first: Tensor | None = None, most: int | None = None
    ) -> Tensor:
        """``[levels, V]`` logits of heads that are told nothing.

        Args:
            hidden: ``[H]``, where they start.
            lm_head: the model's; called once, as it is large and has to be read.
            first: ``[H]`` state whose logits by the model's LM head come before those of the heads; None for none.
            most: levels wanted; None for all.
        """
        before = [] if first is None else [first.unsqueeze(0)]
        wanted = self.count if most is None else most - len(before)
        return lm_head(torch.cat([*before, self(hidden, most=wanted)]) if wanted else before[0])

    def about(self) -> dict[str, Any]:
        """What is needed to rebuild them, for a file."""
        return {"kind": self.kind, "count": self.count, "hidden_size": self.hidden_size, "raw": self.raw}

    def save(self, path: Path, dtype: torch.dtype = torch.bfloat16, base: str | None = None) -> None:
        """Write the weights and what is needed to rebuild them into one safetensors file.

        Args:
            path: the file; replaced if it is there.
            dtype: to write the weights in.
            base: what tells the model that they were made for. None keeps what is known.
        """
        about = {"format": FORMAT, **self.about()}
        base = self.base if base is None else base
        if base is not None:
            about["base"] = base
        tensors = {name: value.detach().to(dtype).contiguous() for name, value in self.state_dict().items()}
        save_file(tensors, path, metadata={"tswift": json.dumps(about)})
