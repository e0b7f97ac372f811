"""The sampling rule: one token from one row of logits,
as a pure function of (logits, text so far, seed, position).

``next = argmax over kept tokens of (warped logit + gumbel(seed, position, token))``; no noise at
temperature 0. The Gumbel-max trick makes this an exact draw from the warped distribution.
Everything after the model's logits is float64. Noise is a pure function of (seed, position, token):
the same bits on any device, in any order, for any subset.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tswift.sampling.parameters import LogitBias, SamplingParams, bias, constants, repeated, warp
from tswift.sampling.sampler_c import MOST, CSampler, Drawn, c_sampler

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
# drawn where there is nothing to draw; in a draft tree, a candidate that does not exist
NO_TOKEN = -1
FAR = -(1 << 62)  # position of a token that is not in the text
_BLOCK = 16  # positions that noise is computed for at a time

Nodes = tuple[Tensor, Tensor, Tensor]  # tokens, positions and ancestors, as for Sampler.seen


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _splitmix(value: int) -> int:
    """SplitMix64's output function (Steele et al., 2014) on a Python integer."""
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    # a logical shift; int64 shifts are arithmetic
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(value: Tensor) -> Tensor:
    """As :func:`_splitmix`, of int64."""
    value = (value ^ _shift(value, 30)) * _signed(_MIX_1)
    value = (value ^ _shift(value, 27)) * _signed(_MIX_2)
    return value ^ _shift(value, 31)


def seed_stream(seed: int) -> int:
    """The int64 that a seed (any integer, taken modulo 2^64) adds to the noise of its positions."""
    return _signed(_splitmix(seed & _MASK))


def noise_bits(seed: int, positions: Sequence[int] | Tensor, tokens: Tensor) -> Tensor:
    """64 random bits for each of ``n`` positions and each token id: ``[n, m]`` int64,
    of the three integers alone.

    Positions in an int64 tensor on the tokens' device are not copied to it. ``tokens`` are ``[m]``
    int64, or ``[n, m]`` for others at each position.
    """
    if not isinstance(positions, Tensor):
        positions = torch.tensor(list(positions), dtype=torch.int64).to(
            tokens.device, non_blocking=True
        )
    start = _mixed((positions + 1) * _signed(_GOLDEN) + seed_stream(seed))
    return _mixed(start[:, None] + tokens * _signed(_GOLDEN))


def gumbel(seed: int, positions: Sequence[int] | Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise ``[n, m]`` (float64) for each (position, token id); never infinite."""
    # 52 bits and a half: the largest value is still below 1 in float64
    uniform = (_shift(noise_bits(seed, positions, tokens), 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


class NoTokenLeft(Exception):
    """There is nothing to draw from the logits ``[V]`` after the root;
    the text and the cache are as they were.
    """

    def __init__(self, logits: Tensor) -> None:
        super().__init__("nothing to draw")
        self.logits = logits


class _Rule:
    """What drawing with some parameters takes, made once:
    a sampler and its copies come back to it.
    """

    def __init__(self, params: SamplingParams, seed: int, tokens: Tensor, prompt: int) -> None:
        self.params = params
        # what is left to be done to lowered logits
        self.after_lowering = replace(params, logit_bias=LogitBias()) if params.repeats else params
        self._seed = seed
        self._tokens = tokens
        self._prompt = prompt
        self.repeats = params.repeats
        self.constants = constants(params, tokens.device)
        self.constants_after_lowering = constants(self.after_lowering, tokens.device)
        self.late = torch.tensor(params.late, dtype=torch.int64).to(tokens.device)
        self.first = prompt + params.min_tokens  # position where ends may be drawn
        # by candidates of a row, 0: draws
        self.kernels: dict[tuple[torch.dtype, int], Any] = {}  # TritonSamplers

    @functools.cached_property
    def program(self) -> CSampler | None:
        """The C program; None where there is none."""
        stream = seed_stream(self._seed)
        return c_sampler(self.params, stream, len(self._tokens), self._prompt)


def _copied(numbers: Tensor) -> Tensor:
    """A copy.

    On a CPU one thread makes it: those that PyTorch would wake spin afterwards, in the way of a
    pass's own.
    """
    return numbers.clone() if numbers.is_cuda else torch.from_numpy(numbers.numpy().copy())


class Sampler:
    """The sampling rule bound to its parameters and seed (any integer),
    with the penalty window of a growing text.

    ``vocab_size`` is ``V``, ``device`` where logits will be, ``prompt`` how many tokens of the text
    were not generated. ValueError for a banned or biased id outside of ``V``.

    Attributes:
        newest: ``[V]`` int64, the position of each token's last occurrence in the text, kept if
            that ``matters``; changed in place.
        counts: ``[V]`` float64, how often each token was generated, kept if that matters; changed
            in place.
        length: tokens in the text so far.
        after_lowering: the parameters with what :meth:`lowered` has done left out.
        penalises: whether the contextual penalty does anything.
        counting: whether it matters how often tokens are in the generated text.
        needs_positions: whether it matters where tokens are in the text.
        kernels: those in use, by the dtype of logits and the number of candidates; 0 for the draw.
        fault: why :func:`~tswift.sampling.kernels.use_kernels` has left drawing or ranking to
            PyTorch; None if it has not.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        device: torch.device,
        prompt: int = 0,
    ) -> None:
        self.seed = seed
        self.length = 0
        self.prompt = prompt
        self.counts = torch.zeros(
            vocab_size if params.counts else 0, dtype=torch.float64, device=device
        )
        self._tokens = torch.arange(vocab_size, device=device)
        self._on_host = self._tokens.is_cpu
        self.newest = torch.full((vocab_size,), FAR, dtype=torch.int64, device=device)
        self._noise = _noise_blocks(seed, self._tokens)  # shared by copies
        self._rules: dict[SamplingParams, _Rule] = {}
        self.fault: str | None = None
        self.params = params

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters, :meth:`~SamplingParams.folded`. To set them may copy to the
        device, so that no draw has to.
        """
        return self._rule.params

    @params.setter
    def params(self, params: SamplingParams) -> None:
        vocab_size = len(self._tokens)
        params = params.folded()
        named = {"banned": params.banned, "biased": params.logit_bias, "late": params.late}
        for name, ids in named.items():
            if any(not 0 <= token < vocab_size for token in ids):
                raise ValueError(
                    f"{name} ids must be below the vocabulary's size {vocab_size}, got {[*ids]}"
                )
        if params not in self._rules:
            self._rules[params] = _Rule(params, self.seed, self._tokens, self.prompt)
        self._rule = self._rules[params]
        self.after_lowering = self._rule.after_lowering
        self.kernels = self._rule.kernels
        self.penalises = params.penalises
        self.counting = params.counts
        self.needs_positions = params.penalises or params.repeats

    def copy(self) -> Sampler:
        """A sampler in the same state, whose text grows by itself from here on."""
        twin = copy(self)
        twin.newest = _copied(self.newest)
        twin.counts = _copied(self.counts)
        return twin

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text whose last ``window`` are penalised."""
        count = len(tokens)
        generated = tokens[max(0, self.prompt - self.length) :] if self.counting else ()
        if self._on_host:
            newest, counts = self.newest.numpy(), self.counts.numpy()
            for position, token in enumerate(tokens if self.needs_positions else (), self.length):
                newest[token] = position
            for token in generated:
                counts[token] += 1
        elif count and (self.needs_positions or generated):
            ids = torch.tensor(tokens).to(self.newest.device, non_blocking=True)
            positions = torch.arange(self.length, self.length + count, device=ids.device)
            self.extend_rows(ids, positions, count)
            self.count_rows(ids[count - len(generated) :], count)
        self.length += count

    def extend_rows(self, tokens: Tensor, positions: Tensor, count: Tensor | int) -> None:
        """As :meth:`extend`, of the first ``count`` tokens ``[m]`` on the device, at positions
        ``[m]``; a tensor there is 0-d int64.

        Nothing is waited for, and ``length`` is the caller's to move on. Tokens after those may be
        ``NO_TOKEN``.
        """
        if self.needs_positions:
            appended = torch.arange(len(tokens), device=tokens.device) < count
            self.newest.scatter_reduce_(
                0, self._ids(tokens), positions.where(appended, FAR), "amax"
            )

    def count_rows(self, tokens: Tensor, count: Tensor | int) -> None:
        """As :meth:`extend_rows`, for what was generated."""
        if self.counting:
            appended = torch.arange(len(tokens), device=tokens.device) < count
            self.counts.index_add_(0, self._ids(tokens), appended.double())

    def lowered_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of what :meth:`lowered` makes of a model's logits."""
        return torch.float64 if self.counting or self._rule.repeats else dtype

    def _ids(self, tokens: Tensor) -> Tensor:
        """Token ids to index with."""
        return tokens.clamp(0, len(self._tokens) - 1)

    def seen(self, tokens: Tensor, positions: Tensor, ancestors: Tensor) -> Tensor | None:
        """Which tokens each draft node penalises: those among the last ``window`` up to and
        including the node.

        Args:
            tokens: ``[n]`` token of each node, the root (the text's last token) first. Of a node
                that is ``NO_TOKEN`` and of those below it, the result means nothing.
            positions: ``[n]`` position of each node's token in the text.
            ancestors: ``[n, n]`` bool, true where the column is an ancestor of the row, or the row
                itself.

        Returns:
            ``[n, V]`` bool, or None if nothing is penalised.
        """
        if not self.penalises:
            return None
        window = self.params.window
        near = ancestors & (positions[:, None] - positions < window)
        return self._with_path(self.newest > (positions - window)[:, None], tokens, near)

    def _with_path(self, found: Tensor, tokens: Tensor, near: Tensor) -> Tensor:
        """The tokens found in the text, ``[n, V]`` bool, and those of a node's ancestors that are
        near ``[n, n]``.
        """
        if len(tokens) > 1:
            tokens = self._ids(tokens)
            # what is not near is replaced by the node's own token, so that nothing has to be
            # counted
            found.scatter_(1, torch.where(near, tokens, tokens[:, None]), True)
        return found

    def lowered(
        self, logits: Tensor, tokens: Tensor, positions: Tensor, ancestors: Tensor
    ) -> Tensor:
        """Logits ``[n, V]`` after the nodes of a draft tree, less what repetition, presence and
        frequency take off (in float64), and without the ends for which it is too early.

        Nodes are as for :meth:`seen`. Of the generated text the root is a part, and each node's
        drafted ancestors are. Where tokens are penalised for their repetition, biases have been
        added.
        """
        if len(self._rule.late):
            logits = self._without_early_ends(logits, positions + 1)
        if self._rule.repeats:
            there = (self.newest > FAR).repeat(len(tokens), 1)
            logits = self._repeated(logits, self._with_path(there, tokens, ancestors))
        if not self.counting:
            return logits
        counts = self.counts.repeat(len(tokens), 1)
        drafted = ancestors[:, 1:].to(torch.float64)
        counts.scatter_add_(1, self._ids(tokens)[1:].expand_as(drafted), drafted)
        return logits.double() - self._taken(counts)

    def _without_early_ends(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Logits ``[n, V]`` of tokens at ``positions`` ``[n]``, less the ends that are not drawn
        there.
        """
        rule = self._rule
        early = (positions < rule.first)[:, None]
        ends = logits.index_select(1, rule.late).masked_fill(early, -math.inf)
        return logits.index_copy(1, rule.late, ends)

    def _repeated(self, logits: Tensor, there: Tensor) -> Tensor:
        own = self.params
        logits = bias(logits.to(torch.float64, copy=True), own, self._rule.constants)
        return repeated(logits, there, own.repetition_penalty)

    def lowered_draft(self, logits: Tensor) -> Tensor:
        """As :meth:`lowered`, roughly: a draft's logits, by what was generated alone, in their own
        dtype.
        """
        dtype = logits.dtype
        if self._rule.repeats:
            logits = self._repeated(logits, self.newest > FAR)
        if self.counting:
            logits = logits - self._taken(self.counts)
        return logits.to(dtype)

    def _taken(self, counts: Tensor) -> Tensor:
        """What presence and frequency take off logits, by how often tokens were generated."""
        own = self.params
        return own.frequency_penalty * counts + own.presence_penalty * (counts > 0).double()

    def along(self, logits: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """As :meth:`lowered` and :meth:`seen`, after each of ``tokens``,
        the first of which ends the text.

        The text is extended by the others.
        """
        device = self._tokens.device
        count = len(tokens)
        positions = torch.arange(self.length - 1, self.length - 1 + count, device=device)
        causal = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        ids = torch.tensor(tokens, device=device)
        found = self.lowered(logits, ids, positions, causal), self.seen(ids, positions, causal)
        self.extend(tokens[1:])
        return found

    def noise(self, positions: Sequence[int] | Tensor) -> Tensor:
        """Gumbel noise ``[n, V]`` (float64) for tokens to be drawn at these positions;
        zero if the draw is greedy.

        For positions in a tensor it is computed without a wait; for others it is kept, by blocks.
        """
        if self.params.greedy:
            return torch.zeros((), dtype=torch.float64, device=self._tokens.device)
        if isinstance(positions, Tensor):
            return gumbel(self.seed, positions, self._tokens)
        return torch.stack(
            [self._noise(position // _BLOCK)[position % _BLOCK] for position in positions]
        )

    def warp(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """What the filters and the penalty leave of logits ``[n, V]`` of any dtype:
        ``[n, V]`` float64.
        """
        return warp(
            logits.to(torch.float64, copy=True),
            seen,
            self.after_lowering,
            self._rule.constants_after_lowering,
        )

    def scores(
        self, logits: Tensor, seen: Tensor | None, positions: Sequence[int] | Tensor
    ) -> Tensor:
        """What the rule takes the argmax of: ``[n, V]`` float64 from logits ``[n, V]`` of tokens at
        ``positions``.
        """
        return self.warp(logits, seen) + self.noise(positions)

    def draw(
        self, logits: Tensor, seen: Tensor | None, positions: Sequence[int] | Tensor
    ) -> list[int]:
        """The tokens at ``positions``, one for each row of ``logits`` ``[n, V]``.

        A row with NaN or infinity, or with no token left, draws ``NO_TOKEN``; a banned token's
        logit does not count. Whatever the filters, the best score is not finite then, so that no
        other check (and wait) is needed.
        """
        return _drawn(*self.candidates(logits, seen, positions, 1, drawn=True)).tolist()

    def draw_nodes(
        self,
        logits: Tensor,
        nodes: Nodes,
        parents: list[int] | None = None,
        with_runner_up: bool = False,
        verification: int | None = None,
    ) -> Drawn:
        """The tokens drawn after the nodes of a draft tree, for the host, which waits for them.

        With ``parents``, nodes that the drawn tokens do not lead to from the root may be left out:
        they draw ``NO_TOKEN`` then. Runners-up and leads over them are for drafts: Triton's kernels
        may swap two tokens whose scores differ in the last place. All else is as for
        :meth:`CSampler.follow`, which there has to be for a ``verification``.
        """
        if parents is not None and (program := self.program(logits.dtype)) is not None:
            newest = self.newest if self.needs_positions else None
            counts = self.counts if self.counting else None
            given = newest, counts, verification, with_runner_up
            followed = program.follow(logits, nodes, parents, *given)
            if followed is not None:
                return followed
        if not with_runner_up and (self.lowered_dtype(logits.dtype), 0) in self.kernels:
            return self.draw_rows(logits, *nodes).tolist(), []
        logits = self.lowered(logits, *nodes)
        seen = self.seen(*nodes)
        places = nodes[1] + 1
        if not with_runner_up:
            return self.draw(logits, seen, places.tolist()), []
        tokens, scores = self.candidates(logits, seen, places, 2, drawn=True)
        # together, as each tolist waits for the device; float64 holds every token id
        drawn, others, *found = torch.stack(
            [_drawn(tokens, scores), tokens[:, 1], *scores.T]
        ).tolist()
        leads = map(operator.sub, *found)
        return [*map(int, drawn)], [*zip(map(int, others), leads, strict=True)]

    def program(self, dtype: torch.dtype) -> CSampler | None:
        """The C program that draws from logits of a dtype, if there is one."""
        if not self._on_host or dtype not in CSampler.DTYPES:
            return None
        return self._rule.program

    def draw_rows(
        self, logits: Tensor, tokens: Tensor, positions: Tensor, ancestors: Tensor
    ) -> Tensor:
        """As :meth:`draw`, the token drawn after every node of a draft tree, without a wait.

        All that is read is on the logits' device, ``newest`` too, so a CUDA graph can be captured
        of it and replayed. Logits are ``[n, V]``, the nodes those of :meth:`seen`: the tokens drawn
        come next. ``[n]`` int64.
        """
        logits = self.lowered(logits, tokens, positions, ancestors)
        fused = self.kernels.get((logits.dtype, 0))
        if fused is not None and len(logits) <= fused.MAX_NODES:
            return fused.draw(logits, tokens, positions, ancestors, self.newest)
        return _drawn(
            *self._ranked(logits, self.seen(tokens, positions, ancestors), positions + 1, 1)
        )

    def candidates(
        self,
        logits: Tensor,
        seen: Tensor | None,
        positions: Sequence[int] | Tensor | None,
        count: int,
        drawn: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The tokens most likely to be drawn, as guessed from a draft's logits, without a wait.

        Args:
            logits: ``[n, V]``.
            seen: ``[n, V]`` bool, or ``[1, V]`` for all rows: the tokens in the penalty window;
                None for none.
            positions: ``[n]``, where the tokens will be drawn: ranked with the noise of that place.
                None ranks them without noise.
            count: number of each row.
            drawn: whether the first of each row is to be the one that is drawn, where not kernels
                rank some others beside it.

        Returns:
            ``[n, count]`` tokens, best first, and their scores (float64), ``-inf`` for a token that
            is never drawn. Fewer columns where the vocabulary has no more.
        """
        count = min(count, logits.shape[-1])
        alike = (seen is None or len(seen) in (1, len(logits))) and (
            positions is None or len(positions) == len(logits)
        )
        fused = None
        if alike and not isinstance(positions, Sequence) and not (drawn and count == 1):
            fused = self.kernels.get((logits.dtype, count))
        program = self.program(logits.dtype) if alike and count <= MOST else None
        if program is not None and fused is None:
            places = positions.tolist() if isinstance(positions, Tensor) else positions
            tokens, scores, unsure = program.rank(logits, count, places, seen)
            for row in unsure if drawn else ():
                own = seen[row : row + 1] if seen is not None and len(seen) > 1 else seen
                place = places and places[row : row + 1]
                ranked = self._ranked(logits[row : row + 1], own, place, count)
                tokens[row], scores[row] = ranked
            return tokens, scores
        if positions is not None and len(self._rule.late):
            there = torch.as_tensor(positions).to(logits.device, non_blocking=True)
            logits = self._without_early_ends(logits, there)
        if fused is not None:
            return fused.candidates(logits, seen, positions, count)
        return self._ranked(logits, seen, positions, count)

    def _ranked(
        self,
        logits: Tensor,
        seen: Tensor | None,
        positions: Sequence[int] | Tensor | None,
        count: int,
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`candidates`, by PyTorch; of one, of equals it is the first."""
        scores = (
            self.warp(logits, seen) if positions is None else self.scores(logits, seen, positions)
        )
        if count > 1:
            best = scores.topk(count)
            return best.indices, best.values
        # not scores.max(-1): on a few thousand tokens PyTorch calls all threads together for that,
        # and not for argmax
        first = scores.argmax(-1, keepdim=True)
        return first, scores.gather(-1, first)


def _noise_blocks(seed: int, tokens: Tensor) -> Callable[[int], Tensor]:
    """Noise of so many positions at a time; the blocks near the newest position are kept."""
    return functools.lru_cache(5)(
        lambda index: gumbel(seed, range(index * _BLOCK, (index + 1) * _BLOCK), tokens)
    )


def _drawn(tokens: Tensor, scores: Tensor) -> Tensor:
    """``[n]``: what is drawn where tokens ``[n, count]`` are the best, by their scores."""
    return tokens[:, 0].where(scores[:, 0].abs() < math.inf, NO_TOKEN)


def row_type(top: int) -> np.dtype[np.void]:
    """A token's log-probabilities (natural logarithms, float64), as arrays and files hold them.

    ``raw`` is by the model's own distribution; ``warped`` by that which the token is drawn from,
    after biases, penalty, temperature and filters; at temperature 0, where nothing is drawn, after
    biases and penalty. Then the ``top`` likeliest tokens by each: ``raw_ids`` and ``raw_top``,
    ``warped_ids`` and ``warped_top``, ``-inf`` where the filters leave fewer.
    """
    ids = ("<u4", (top,))
    logs = ("<f8", (top,))
    fields = {
        "raw": "<f8",
        "warped": "<f8",
        "raw_ids": ids,
        "raw_top": logs,
        "warped_ids": ids,
        "warped_top": logs,
    }
    return np.dtype(list(fields.items())[: 6 if top else 2])  # type: ignore[arg-type]


class LogprobRecorder:
    """Log-probabilities of a text's tokens and of ``top`` likeliest ones;
    ``sampler`` knows the text up to ``last``.
    """

    def __init__(self, sampler: Sampler, last: int, top: int) -> None:
        self._sampler = sampler.copy()
        self._last = last
        self._top = top

    def record(self, logits: Tensor, tokens: Sequence[int]) -> NDArray[np.void]:
        """The rows ``[n]`` of :func:`row_type` of the text's next tokens, which were drawn from
        logits ``[n, V]``.
        """
        lowered, seen = self._sampler.along(logits, [self._last, *tokens[:-1]])
        self._sampler.extend(tokens[-1:])
        self._last = tokens[-1]
        rows = np.empty(len(tokens), row_type(self._top))
        drawn = torch.tensor(tokens).to(logits.device)[:, None]
        for name, scores in (
            ("raw", logits.double()),
            ("warped", self._sampler.warp(lowered, seen)),
        ):
            logs = scores.log_softmax(-1)
            rows[name] = logs.gather(1, drawn).squeeze(1).numpy(force=True)
            if self._top:
                best = logs.topk(self._top)
                rows[f"{name}_ids"] = best.indices.numpy(force=True)
                rows[f"{name}_top"] = best.values.numpy(force=True)
        return rows
