"""Heads that guess the tokens after the next one from one hidden state, and their file format.

A chained head (TokenSwift, section 3.2) refines the hidden state of the head before it and shares the model's own LM
head: ``h <- h + W norm1(h)``, ``logits = lm_head(norm2(h))``. A conditioned head is also told the last drafted token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


class Heads(nn.Module):
    """A chain of heads over a shared LM head; what the kinds have in common.

    Args:
        hidden_size: width of the model's hidden states.
        count: number of heads; head i (from 0) guesses the token i+2 places after the state's own.
        eps: epsilon of the norms.

    Attributes:
        kind: name in the heads file.
        conditioned: whether a head is told the token drafted just before the one it guesses.
    """

    kind: str
    conditioned: bool

    def __init__(
        self, head: type[ChainedHead] | type[ConditionedHead], hidden_size: int, count: int, eps: float
    ) -> None:
        super().__init__()
        self.hidden_size, self.count, self.eps = hidden_size, count, eps
        self.base: str | None = None
        self.heads = nn.ModuleList(head(hidden_size, eps) for _ in range(count))

    def step(self, index: int, hidden: Tensor, embedding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One head.

        Args:
            index: which one.
            hidden: ``[..., H]`` state of the head before, or of the model for the first.
            embedding: ``[..., H]`` input embedding of the token drafted before; for conditioned heads only.

        Returns:
            The refined state, for the next head, and the state to feed to the LM head; both ``[..., H]``.
        """
        head = self.heads[index]
        hidden = head(hidden, embedding) if self.conditioned else head(hidden)
        return hidden, head.post_layernorm(hidden)  # type: ignore[operator, union-attr]

    def forward(self, hidden: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """States to feed to the LM head: ``[count, ..., H]``.

        Args:
            hidden: ``[..., H]``.
            embeddings: ``[count, ..., H]`` input embeddings of the tokens before those guessed; for conditioned heads.
        """
        states = []
        for index in range(self.count):
            hidden, out = self.step(index, hidden, embeddings[index] if embeddings is not None else None)
            states.append(out)
        return torch.stack(states)

    def save(self, path: Path, dtype: torch.dtype = torch.bfloat16, base: str | None = None) -> None:
        """Write the weights and what is needed to rebuild them into one safetensors file.

        Args:
            path: the file; replaced if it is there.
            dtype: to write the weights in.
            base: what tells the model that they were made for:
                :func:`~tswift.models.fingerprint.fingerprint_in_any_dtype`. None keeps what is known.
        """
        about = {
            "format": FORMAT,
            "kind": self.kind,
            "count": self.count,
            "hidden_size": self.hidden_size,
            "eps": self.eps,
        }
        base = self.base if base is None else base
        if base is not None:
            about["base"] = base
        tensors = {name: value.detach().to(dtype).contiguous() for name, value in self.state_dict().items()}
        save_file(tensors, path, metadata={"tswift": json.dumps(about)})


class ChainedHeads(Heads):
    """TokenSwift's heads: each refines the state of the one before, and knows nothing of what was drafted."""

    kind, conditioned = "chained", False

    def __init__(self, hidden_size: int, count: int = 3, eps: float = 1e-5) -> None:
        super().__init__(ChainedHead, hidden_size, count, eps)


class ConditionedHeads(Heads):
    """Heads that are told the token drafted before the one they guess.

    With shared noise a drafter almost always knows that token, and need not average over what it might have been.
    """

    kind, conditioned = "conditioned", True

    def __init__(self, hidden_size: int, count: int = 3, eps: float = 1e-5) -> None:
        super().__init__(ConditionedHead, hidden_size, count, eps)


KINDS: dict[str, type[ChainedHeads] | type[ConditionedHeads]] = {
    kind.kind: kind for kind in (ChainedHeads, ConditionedHeads)
}


def load_heads(path: Path, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Heads:
    """Read a heads file written by :meth:`Heads.save`.

    Raises:
        InputError: the file is no such file, holds numbers that are none, or its heads were made for another hidden
            size.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["tswift"])
            names = file.keys()
            _check(about, path, hidden_size, len(names))
            tensors = {name: file.get_tensor(name) for name in names}
        with torch.device("meta"):
            heads = KINDS[about["kind"]](hidden_size, about["count"], about["eps"])
        heads.load_state_dict(tensors, assign=True)
        heads.base = about.get("base")
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", "--heads") from None
    except KeyError as error:
        raise _no_heads(path, f"there is no {error} in its metadata") from None
    except (SafetensorError, TypeError, ValueError, RuntimeError, OSError, MemoryError) as error:
        raise _no_heads(path, " ".join(str(error).split())[:200]) from None
    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() and tensor.isfinite().all()):
            raise InputError(f"{path} is broken: {name} holds something else than finite numbers", "--heads")
    return heads.to(dtype=dtype, device=device).eval().requires_grad_(False)


def _check(about: Any, path: Path, hidden_size: int, tensors: int) -> None:
    """Refuse metadata that describe no heads, or no heads for this model, before anything of that size is made."""
    if not isinstance(about, dict):
        raise _no_heads(path, "its metadata are no JSON object")
    if about["format"] != FORMAT or not isinstance(about["kind"], str) or about["kind"] not in KINDS:
        raise InputError(f"{path} holds heads of format {about['format']!s:.40}, kind {about['kind']!s:.40}", "--heads")
    size, count, eps, base = about["hidden_size"], about["count"], about["eps"], about.get("base")
    if type(size) is not int or type(count) is not int or not 0 < count <= tensors:
        raise _no_heads(path, f"it says it has {count!r:.40} heads for hidden size {size!r:.40}")
    if type(eps) not in (int, float) or not 0 <= eps < 1:
        raise _no_heads(path, f"its eps is {eps!r:.40}")
    if not (base is None or isinstance(base, str)):
        raise _no_heads(path, f"its base model is {base!r:.40}")
    if size != hidden_size:
        raise InputError(f"{path} was made for hidden size {size}, the model has {hidden_size}", "--heads")


def _no_heads(path: Path, reason: str) -> InputError:
    return InputError(f"{path} is not a tswift heads file ({reason})", "--heads")
