"""Heads that guess the tokens after the next one from one hidden state, and their file format.

A chained head (TokenSwift, section 3.2) refines the hidden state of the head before it and shares the model's own LM
head: ``h <- h + W norm1(h)``, ``logits = lm_head(norm2(h))``.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tswift.errors import InputError

FORMAT = "tswift-heads-1"


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


class ChainedHeads(nn.Module):
    """A chain of residual heads over a shared LM head.

    Args:
        hidden_size: width of the model's hidden states.
        count: number of heads; head i (from 0) guesses the token i+2 places after the state's own.
        eps: epsilon of the two norms of each head.
    """

    kind = "chained"

    def __init__(self, hidden_size: int, count: int = 3, eps: float = 1e-5) -> None:
        super().__init__()
        self.hidden_size, self.count, self.eps = hidden_size, count, eps
        self.heads = nn.ModuleList(ChainedHead(hidden_size, eps) for _ in range(count))

    def forward(self, hidden: Tensor) -> Tensor:
        """States to feed the LM head: ``[count, *hidden.shape]`` for ``hidden`` of shape ``[..., H]``."""
        states = []
        for head in self.heads:
            hidden = head(hidden)
            states.append(head.post_layernorm(hidden))  # type: ignore[operator, union-attr]
        return torch.stack(states)

    def save(self, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the weights and what is needed to rebuild them into one safetensors file."""
        about = {
            "format": FORMAT,
            "kind": self.kind,
            "count": self.count,
            "hidden_size": self.hidden_size,
            "eps": self.eps,
        }
        tensors = {name: value.detach().to(dtype).contiguous() for name, value in self.state_dict().items()}
        save_file(tensors, path, metadata={"tswift": json.dumps(about)})


def load_heads(path: Path, hidden_size: int, dtype: torch.dtype, device: torch.device) -> ChainedHeads:
    """Read a heads file written by :meth:`ChainedHeads.save`.

    Raises:
        InputError: the file is no such file, or its heads were made for another hidden size.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["tswift"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about["format"] != FORMAT or about["kind"] != ChainedHeads.kind:
            raise InputError(f"{path} holds heads of format {about['format']}, kind {about['kind']}", "--heads")
        heads = ChainedHeads(about["hidden_size"], about["count"], about["eps"])
        heads.load_state_dict(tensors)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", "--heads") from None
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise InputError(f"{path} is not a tswift heads file ({str(error).splitlines()[0]})", "--heads") from None
    if heads.hidden_size != hidden_size:
        raise InputError(f"{path} was made for hidden size {heads.hidden_size}, the model has {hidden_size}", "--heads")
    return heads.to(dtype=dtype, device=device).eval().requires_grad_(False)
