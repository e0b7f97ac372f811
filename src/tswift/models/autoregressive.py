"""A layer that drafts token by token: it reads the last states and tokens of the text, and then its own guesses.

Its input at a token of the text is the model's hidden state there and the token after it; its output is the state that
the model would have one token later, which is its next input. It attends to a window of such inputs by their distances,
so how long the text is cannot be seen. The inputs are those of EAGLE (Li et al., 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD_DIM = 64
_THETA = 10_000.0  # of the rotation by distance
_BLOCK = 64  # positions whose rotations are kept


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

    def project(self, hidden: Tensor, told: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[..., queries, 64]``, keys, values ``[..., 64]`` of states and normed embeddings ``[..., H]``."""
        both = self.attention(torch.cat([self.input_layernorm(hidden), told], dim=-1))
        query, key, value = both.split([self.queries * HEAD_DIM, HEAD_DIM, HEAD_DIM], dim=-1)
        return query.unflatten(-1, (self.queries, HEAD_DIM)), key, value

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
        query, key, value = self.project(hidden, self._told(embeddings[0], spare))
        keys, values = rotate(key, *(turn[: length + spare] for turn in turns)), value
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        states = []
        for step in range(count):
            here = [turn[step : step + length + spare] for turn in turns]
            told = self._told(embeddings[step], spare)
            if step:
                query, key, value = self.project(hidden, told)
                own_keys.append(rotate(key, *here))
                own_values.append(value)
            query = rotate(query, *(turn.unsqueeze(1) for turn in here))
            read = _attend_near(query, keys, values, own_keys, own_values, window)
            hidden = self.refine(hidden, told, read)
            states.append(hidden[:, :length])
        return states

    def _told(self, embedding: Tensor, spare: int) -> Tensor:
        told: Tensor = self.embedding_layernorm(F.pad(embedding, (0, 0, 0, spare)))
        return told


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
        self._keys = weight.new_zeros(self._slots, HEAD_DIM)
        self._values = torch.zeros_like(self._keys)
        self._empty = weight.new_full((self._slots,), -torch.inf)
        self._waiting = (weight.new_zeros(0, weight.shape[0]),) * 2
        self._block, self._turns = -1, rotations(torch.zeros(0, device=weight.device))

    @torch.inference_mode()
    def follow(self, hidden: Tensor, embeddings: Tensor) -> None:
        """Take notice of a text that has grown.

        Args:
            hidden: ``[m, H]`` states of the model, of its newest tokens but the last.
            embeddings: ``[m, H]`` of the tokens after these.
        """
        pairs = [torch.cat(pair) for pair in zip(self._waiting, (hidden, embeddings), strict=True)]
        ready = max(0, len(pairs[0]) - self._held_back)
        self._waiting = (pairs[0][ready:], pairs[1][ready:])
        states, told = (pair[max(0, ready - self._slots) : ready] for pair in pairs)
        _, keys, values = self._layer.project(states, self._layer.embedding_layernorm(told))
        self._seen += ready
        places = torch.arange(self._seen - len(states), self._seen, device=keys.device)
        slots = places % self._slots
        self._keys[slots] = rotate(keys, *(turn.to(keys.dtype) for turn in rotations(places)))
        self._values[slots] = values
        self._empty[slots] = 0

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
        query, key, value = layer.project(hidden, told)
        cosine, sine = self._turn(self._seen + own.shape[-1] // (2 * HEAD_DIM), key.dtype)
        own = torch.cat([own, rotate(key, cosine, sine), value], dim=-1)
        pairs = own.unflatten(-1, (-1, 2, HEAD_DIM))
        query = rotate(query, cosine, sine) * HEAD_DIM**-0.5
        near = query @ self._keys.T + self._empty
        ahead = query @ pairs[..., 0, :].transpose(-1, -2)
        weights = torch.cat([near, ahead], dim=-1).softmax(-1)
        read = weights[..., : self._slots] @ self._values + weights[..., self._slots :] @ pairs[..., 1, :]
        hidden = layer.refine(hidden, told, read)
        return torch.cat([hidden, own], dim=-1), layer.post_layernorm(hidden)

    def _turn(self, place: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        block, line = divmod(place, _BLOCK)
        if block != self._block:
            places = torch.arange(block * _BLOCK, (block + 1) * _BLOCK, device=self._keys.device)
            cosines, sines = rotations(places)
            self._block, self._turns = block, (cosines.to(dtype), sines.to(dtype))
        return self._turns[0][line], self._turns[1][line]


def rotations(places: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[n, 64]`` (float64) that turn queries and keys at ``n`` places, as RoPE does."""
    speeds = _THETA ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64, device=places.device) / HEAD_DIM)
    angles = (places.double().unsqueeze(-1) * speeds).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(vectors: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Vectors ``[..., 64]``, turned."""
    first, second = vectors.chunk(2, dim=-1)
    return vectors * cosines + torch.cat([-second, first], dim=-1) * sines


def _attend_near(
    query: Tensor, keys: Tensor, values: Tensor, own_keys: list[Tensor], own_values: list[Tensor], window: int
) -> Tensor:
    """Attention to the last ``window`` keys and to those that each place has of its own.

    Args:
        query: ``[B, T, queries, 64]``, T a multiple of the window.
        keys, values: ``[B, T, 64]``.
        own_keys, own_values: each ``[B, T, 64]``.
        window: how many.

    Returns:
        As ``query``.
    """
    rows, length, queries, _ = query.shape
    blocks = query.view(rows, length // window, window * queries, HEAD_DIM) * HEAD_DIM**-0.5
    # of each block of places, the keys of the block and of the one before: [B, blocks, 64, 2 window]
    near_keys, near_values = (F.pad(each, (0, 0, window, 0)).unfold(1, 2 * window, window) for each in (keys, values))
    place = torch.arange(window, device=query.device).repeat_interleave(queries).unsqueeze(-1) + window
    other = torch.arange(2 * window, device=query.device)
    far = (other > place) | (other <= place - window)
    scores = (blocks @ near_keys).masked_fill(far, -torch.inf)
    scores[:, 0].masked_fill_(other < window, -torch.inf)  # before the text there is nothing
    ahead = [(blocks.view_as(query) * key.unsqueeze(2)).sum(-1).view(*blocks.shape[:3], 1) for key in own_keys]
    weights = torch.cat([scores, *ahead], dim=-1).softmax(-1).to(values.dtype)
    read = (weights[..., : 2 * window] @ near_values.transpose(-1, -2)).view_as(query)
    for index, value in enumerate(own_values):
        read = read + weights[..., 2 * window + index].reshape(rows, length, queries, 1) * value.unsqueeze(2)
    return read
