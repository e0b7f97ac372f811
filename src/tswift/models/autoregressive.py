"""A layer that drafts token by token: it reads the last states and tokens of the text, and then its own guesses.

Its input at a token of the text is the model's hidden state there and the token after it; its output is the state that
the model would have one token later, which is its next input. It attends to a window of such inputs by their distances,
so how long the text is cannot be seen. The inputs are those of EAGLE (Li et al., 2024).
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD_DIM = 64
_THETA = 10_000.0  # of the rotation by distance
_AHEAD = 64  # places for which rotations are kept ready


class AutoregressiveLayer(nn.Module):
    """Attention over a window, query heads of 64 on one key and value head, then a step as a conditioned head's.

    ``h <- h + O attention([norm(h); norm(e)])``, ``h <- h + B silu(A [norm(h); norm(e)])``.

    Args:
        hidden_size: width of the model's hidden states.
        inner: width between A and B.
        queries: query heads.
        eps: of the norms.
    """

    def __init__(self, hidden_size: int, inner: int, queries: int, eps: float) -> None:
        super().__init__()
        self.queries = queries
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.embedding_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.attention = nn.Linear(2 * hidden_size, (queries + 2) * HEAD_DIM, bias=False)
        self.output = nn.Linear(queries * HEAD_DIM, hidden_size, bias=False)
        self.mix_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.mix = nn.Linear(2 * hidden_size, inner, bias=False)
        self.linear = nn.Linear(inner, hidden_size, bias=False)
        self.post_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.linear.weight)

    def project(self, hidden: Tensor, told: Tensor) -> Tensor:
        """Queries, key and value ``[..., queries + 2, 64]`` of states and normed embeddings ``[..., H]``."""
        both: Tensor = self.attention(torch.cat([self.input_layernorm(hidden), told], dim=-1))
        return both.unflatten(-1, (self.queries + 2, HEAD_DIM))

    def keys_and_values(self, hidden: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values alone, each ``[n, 64]``, of states and embeddings ``[n, H]``."""
        both = torch.cat([self.input_layernorm(hidden), self.embedding_layernorm(embeddings)], dim=-1)
        keys, values = F.linear(both, self.attention.weight[self.queries * HEAD_DIM :]).chunk(2, dim=-1)
        return keys, values

    def refine(self, hidden: Tensor, told: Tensor, read: Tensor) -> Tensor:
        """The state one token later, ``[..., H]``, given what the attention read ``[..., queries, 64]``."""
        hidden = hidden + self.output(read.flatten(-2))
        both = torch.cat([self.mix_layernorm(hidden), told], dim=-1)
        return hidden + self.linear(F.silu(self.mix(both)))

    def unroll(self, hidden: Tensor, embeddings: Tensor, window: int) -> list[Tensor]:
        """What it says from every token of a text on, fed with its own states.

        Args:
            hidden: ``[B, T, H]`` of the model.
            embeddings: ``[count, B, T, H]`` of the tokens that follow each, the next one first.
            window: inputs of the model's that it attends to, that of the token itself included, at least two; its own
                guesses come on top.

        Returns:
            ``count`` times ``[B, T, H]`` states.
        """
        length, count = hidden.shape[1], len(embeddings)
        spare = -length % window
        hidden = F.pad(hidden, (0, 0, 0, spare))
        places = torch.arange(length + spare + count, device=hidden.device)
        turns = [turn.to(hidden.dtype) for turn in rotations(places)]
        keys: list[Tensor] = []  # those of the text, then what each place has of its own
        values: list[Tensor] = []
        states = []
        for step in range(count):
            told: Tensor = self.embedding_layernorm(F.pad(embeddings[step], (0, 0, 0, spare)))
            projected = self.project(hidden, told)
            turned = rotate(
                projected[..., :-1, :], *(turn[step : step + length + spare].unsqueeze(1) for turn in turns)
            )
            keys.append(turned[..., -1, :])
            values.append(projected[..., -1, :])
            read = _attend_near(turned[..., :-1, :], keys, values, window)
            hidden = self.refine(hidden, told, read)
            states.append(hidden[:, :length])
        return states


class Memory:
    """What a layer has seen of a text that it drafts for: keys and values of a window, each new one over the oldest.

    Args:
        layer: whose they are.
        window: as for :meth:`AutoregressiveLayer.unroll`.
        held_back: newest inputs that are not attended to yet, since drafting begins with them: 1 where it begins with
            the state before the root's, 0 where it begins with the root's own.

    Attributes:
        span: how many of a text's newest inputs make a difference.
    """

    def __init__(self, layer: AutoregressiveLayer, window: int, held_back: int) -> None:
        weight = layer.output.weight
        self._layer, self._held_back = layer, held_back
        self._slots = window - 1  # the window's last is the input that drafting begins with
        self.span = self._slots + held_back
        self._seen = 0
        self._held = weight.new_zeros(self._slots, 2, HEAD_DIM)  # keys, turned by their places, and values
        self._waiting = weight.new_zeros(2, 0, len(weight))
        self._first, self._turns = 0, weight.new_zeros(2, 0, HEAD_DIM)

    def copy(self) -> Memory:
        """The same memory, which goes on by itself."""
        twin = copy(self)
        twin._held = self._held.clone()
        return twin

    @torch.inference_mode()
    def follow(self, hidden: Tensor, embeddings: Tensor) -> None:
        """Take notice of a text that has grown.

        Args:
            hidden: ``[m, H]`` states of the model, of its newest tokens but the last.
            embeddings: ``[m, H]`` of the tokens after these.
        """
        pairs = torch.cat([self._waiting, torch.stack([hidden, embeddings])], dim=1)
        ready = max(0, pairs.shape[1] - self._held_back)
        self._waiting = pairs[:, ready:]
        states, tokens = pairs[:, max(0, ready - self._slots) : ready]
        begin, self._seen = self._seen + ready - len(states), self._seen + ready
        keys, values = self._layer.keys_and_values(states, tokens)
        new = torch.stack([rotate(keys, *self._turned(begin, len(states))), values], dim=1)
        slot = begin % self._slots
        room = self._slots - slot
        self._held[slot : slot + len(new)] = new[:room]
        self._held[: max(0, len(new) - room)] = new[room:]

    @torch.inference_mode()
    def step(self, states: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """One more token of some branches.

        Args:
            states: ``[..., S]``, as the step before returned them, of the branches that are gone on with: what drafting
                has added to the window goes along. At first the model's, ``[..., H]``.
            embeddings: ``[..., H]`` of the tokens drafted before.

        Returns:
            States for the next step, and those to feed to the LM head ``[..., H]``.
        """
        layer, width = self._layer, embeddings.shape[-1]
        hidden, own = states[..., :width], states[..., width:]
        told = layer.embedding_layernorm(embeddings)
        projected = layer.project(hidden, told)
        turned = rotate(projected[..., :-1, :], *self._turned(self._seen + own.shape[-1] // (2 * HEAD_DIM), 1))
        own = torch.cat([own, turned[..., -1, :], projected[..., -1, :]], dim=-1)
        held = self._held[: self._seen].expand(*own.shape[:-1], -1, -1, -1)
        pairs = torch.cat([held, own.unflatten(-1, (-1, 2, HEAD_DIM))], dim=-3)
        # not PyTorch's own attention: for so few rows it takes twice as long
        scores = turned[..., :-1, :] * HEAD_DIM**-0.5 @ pairs[..., 0, :].transpose(-1, -2)
        read = scores.softmax(-1) @ pairs[..., 1, :]
        hidden = layer.refine(hidden, told, read)
        return torch.cat([hidden, own], dim=-1), layer.post_layernorm(hidden)

    def _turned(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[count, 64]`` of consecutive places."""
        begin = first - self._first
        if not 0 <= begin <= self._turns.shape[1] - count:
            self._first, begin = first, 0
            places = torch.arange(first, first + count + _AHEAD, device=self._held.device)
            self._turns = torch.stack(rotations(places)).to(self._held.dtype)
        return self._turns[0, begin : begin + count], self._turns[1, begin : begin + count]


def rotations(places: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[n, 64]`` (float64) that turn queries and keys at ``n`` places, as RoPE does."""
    speeds = _THETA ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64, device=places.device) / HEAD_DIM)
    angles = (places.double().unsqueeze(-1) * speeds).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(vectors: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Vectors ``[..., 64]``, turned."""
    first, second = vectors.chunk(2, dim=-1)
    return vectors * cosines + torch.cat([-second, first], dim=-1) * sines


def _attend_near(query: Tensor, keys: list[Tensor], values: list[Tensor], window: int) -> Tensor:
    """Attention to the last ``window`` keys of a text, and to those that each place has of its own.

    Args:
        query: ``[B, T, queries, 64]``, T a multiple of the window.
        keys, values: each ``[B, T, 64]``: first those of the text, of which each place sees its own and those before;
            of the others it sees its own alone.
        window: how many.

    Returns:
        As ``query``.
    """
    rows, length, queries, _ = query.shape
    blocks = query.reshape(rows, length // window, window * queries, HEAD_DIM) * HEAD_DIM**-0.5
    # of each block of places, the keys of the block and of the one before: [B, blocks, 64, 2 window]
    near_keys, near_values = (
        F.pad(each[0], (0, 0, window, 0)).unfold(1, 2 * window, window) for each in (keys, values)
    )
    place = torch.arange(window, device=query.device).repeat_interleave(queries).unsqueeze(-1) + window
    other = torch.arange(2 * window, device=query.device)
    far = (other > place) | (other <= place - window)
    scores = (blocks @ near_keys).masked_fill(far, -torch.inf)
    scores[:, 0].masked_fill_(other < window, -torch.inf)  # before the text there is nothing
    ahead = [(blocks.view_as(query) * key.unsqueeze(2)).sum(-1).view(*blocks.shape[:3], 1) for key in keys[1:]]
    weights = torch.cat([scores, *ahead], dim=-1).softmax(-1).to(near_values.dtype)
    read = (weights[..., : 2 * window] @ near_values.transpose(-1, -2)).view_as(query)
    for index, value in enumerate(values[1:]):
        read = read + weights[..., 2 * window + index].reshape(rows, length, queries, 1) * value.unsqueeze(2)
    return read
