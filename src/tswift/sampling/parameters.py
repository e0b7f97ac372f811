"""How the next token is drawn: the sampling parameters, and what they do to logits, in float64.

A new filter touches this file alone: a field with the value that turns it off, and an entry in
``_FILTERS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from tswift.errors import InputError
from tswift.options import check_options, option, options_of, parse_numbers

if TYPE_CHECKING:  # imported by whoever has logits; ranges are checked without it
    from torch import Tensor, device

MAX_TOP = 20  # likeliest tokens whose log-probabilities can be asked for, as in OpenAI's interface
ALL = 1 << 40  # a penalty window longer than any text
_PANEL = "Sampling"
_MAX_BIAS = 100.0  # as in OpenAI's interface; in float64 it leaves the logits their digits


class Untyped(float):
    """A penalty that nobody typed: it is none at temperature 0, and ``usual`` elsewhere."""

    usual: float | None = None

    def at(self, temperature: float) -> Untyped:
        """The same penalty at a temperature."""
        usual = float(self) if self.usual is None else self.usual
        penalty = Untyped(usual if temperature else 1.0)
        penalty.usual = usual
        return penalty


class LogitBias(dict[int, float]):
    """What is added to the logits of some tokens, by token id.

    It is hashed, so it must not be changed.
    """

    def __init__(self, bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()) -> None:
        super().__init__(bias)
        self._hash = hash(frozenset(self.items()))

    def __hash__(self) -> int:  # type: ignore[override]
        return self._hash

    @classmethod
    def checked(cls, bias: object) -> LogitBias:
        """From a mapping of ids, which may be in decimal digits as in JSON,
        to numbers of -100 to 100, in order.
        """
        if not isinstance(bias, Mapping):
            raise InputError(f"must map token ids to numbers, got {bias!r:.60}", "logit_bias")
        found: dict[int, float] = {}
        for token, value in bias.items():
            number = isinstance(token, Integral) and not isinstance(token, bool)
            if not number and not (
                isinstance(token, str) and token.isdecimal() and len(token) < 20
            ):
                raise InputError(f"must map token ids to numbers, got {token!r:.60}", "logit_bias")
            if int(token) < 0 or int(token) in found:
                raise InputError(
                    f"{token} is {'given twice' if int(token) in found else 'no token id'}",
                    "logit_bias",
                )
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not number or not -_MAX_BIAS <= value <= _MAX_BIAS:
                most = f"{_MAX_BIAS:g}"
                raise InputError(
                    f"must be between -{most} and {most}, got {value!r:.60} for {token}",
                    "logit_bias",
                )
            found[int(token)] = float(value)
        return cls(sorted(found.items()))


def parse_bias(text: str) -> LogitBias:
    """The biases of ``42=-3.5,7=2``; InputError for anything else."""
    pairs = []
    for word in text.split(","):
        token, _, value = word.partition("=")
        try:
            pairs.append((token.strip(), float(value)))
        except ValueError:
            raise InputError(f"wants ID=VALUE, got {word!r:.60}") from None
    if len(dict(pairs)) < len(pairs):
        raise InputError(f"gives a token two values, got {text!r:.60}")
    return LogitBias.checked(dict(pairs))


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. The defaults are the paper's for LLaMA3.1-8b (table 10).

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens that together reach this probability; 1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one; 0 drops none.
        eta: epsilon of eta sampling (Hewitt et al., 2022); 0 drops none.
        penalty: theta of the contextual penalty (paper, section 3.5); 1 penalises nothing, and is
            the default at temperature 0.
        window: how many of the last tokens, prompt included, are penalised.
        presence_penalty: taken off the logit of every token in the generated text, as in OpenAI's
            interface.
        frequency_penalty: likewise, as often as the token is there.
        repetition_penalty: of transformers: logits of all tokens in prompt and text are divided by
            it where they are positive, and multiplied by it elsewhere; 1 changes nothing. It comes
            after the biases, and before presence and frequency.
        min_tokens: tokens to be generated before ``ends`` and ``stop_token_ids`` can be drawn.
        stop_token_ids: token ids that end the text.
        banned: token ids that are never drawn.
        ends: the model's end-of-text tokens, where those may be drawn.
        order: names of filters with commas between, in the order in which they are applied; the
            others come after them.
        logit_bias: numbers added to the logits of token ids before anything else, -100 to 100.

    Raises:
        InputError: a value outside its range, or of another type.
    """

    # beyond 1e100, warped logits overflow, and what is drawn means nothing
    temperature: float = option(
        1.0, "0 takes the most likely token.", panel=_PANEL, least=0, most=1e100
    )
    top_k: int = option(
        0, "Keep the K most likely; 0 keeps all.", panel=_PANEL, off=0, least=0, most=1 << 40
    )
    top_p: float = option(
        1.0, "Keep the likeliest up to this probability.", panel=_PANEL, off=1.0, above=0, most=1
    )
    min_p: float = option(
        0.1,
        "Drop tokens below this fraction of the top probability; 0 drops none.",
        panel=_PANEL,
        off=0.0,
        least=0,
        most=1,
    )
    eta: float = option(
        0.0,
        "Epsilon of eta sampling; 0 is off.",
        rare=True,
        panel=_PANEL,
        off=0.0,
        least=0,
        below=1,
    )
    penalty: float = option(
        Untyped(1.2),
        "Contextual penalty; 1 is none.",
        panel=_PANEL,
        shown="1.2, none at temperature 0",
        least=1,
        most=1e100,
    )
    window: int = option(
        1024, "Tokens the penalty looks back over.", rare=True, panel=_PANEL, least=0, most=ALL
    )
    presence_penalty: float = option(
        0.0,
        "Taken off the logits of generated tokens, -2 to 2.",
        rare=True,
        panel=_PANEL,
        least=-2,
        most=2,
    )
    frequency_penalty: float = option(
        0.0,
        "Taken off as often as a token was generated, -2 to 2.",
        rare=True,
        panel=_PANEL,
        least=-2,
        most=2,
    )
    repetition_penalty: float = option(
        1.0,
        "Penalty on all tokens of prompt and text, as in transformers; 1 is none.",
        rare=True,
        panel=_PANEL,
        above=0,
        most=1e100,
    )
    min_tokens: int = option(
        0,
        "No end of the text before so many tokens.",
        rare=True,
        panel=_PANEL,
        metavar="N",
        least=0,
        most=1 << 40,
    )
    stop_token_ids: tuple[int, ...] = option(
        (),
        "Token ids that end the text, with commas between.",
        rare=True,
        panel=_PANEL,
        shown="",
        parse=parse_numbers,
        metavar="IDS",
        least=0,
    )
    banned: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    order: str = ""
    logit_bias: Mapping[int, float] = option(
        LogitBias(),
        "Added to a token's logit, -100 to 100; repeatable, or with commas.",
        rare=True,
        panel=_PANEL,
        shown="",
        parse=parse_bias,
        metavar="ID=VALUE",
        repeat=True,
    )

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "logit_bias", LogitBias.checked(self.logit_bias))
        for name in ("penalty", "repetition_penalty"):
            if isinstance(penalty := getattr(self, name), Untyped):
                object.__setattr__(self, name, penalty.at(self.temperature))
        if 0 < self.temperature < 1e-100:
            raise InputError(f"must be 0 or at least 1e-100, got {self.temperature}", "temperature")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))  # JSON has lists
        for name in ("banned", "ends"):
            ids: object = getattr(self, name)
            if not isinstance(ids, tuple) or not all(
                isinstance(token, Integral) and int(token) >= 0 for token in ids
            ):
                raise InputError(f"must be a tuple of token ids, got {ids!r:.60}", name)
        named = str(self.order).split(",") if self.order else []
        if len({*named}) < len(named) or not {*named} <= _FILTERS.keys():
            raise InputError(
                f"must be of {', '.join(_FILTERS)}, with commas between, got {self.order!r:.60}",
                "order",
            )

    def __str__(self) -> str:
        """How a token is drawn, in words; token ids that are never drawn are left out."""
        said = ["the most likely token" if self.greedy else f"temperature {self.temperature:g}"]
        said += [f"{name.replace('_', '-')} {getattr(self, name):g}" for name in self.filters]
        if self.penalises:
            text = "all of the text" if self.window >= ALL else f"{self.window:,} tokens"
            said.append(f"penalty {self.penalty:g} over {text}")
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                said.append(f"{name.replace('_', ' ')} {getattr(self, name):g}")
        if self.repeats:
            said.append(f"repetition penalty {self.repetition_penalty:g}")
        if self.min_tokens:
            said.append(f"no end before {self.min_tokens:,} tokens")
        if self.logit_bias:
            said.append(f"{len(self.logit_bias)} logits biased")
        return ", ".join(said)

    @property
    def penalises(self) -> bool:
        """Whether the contextual penalty does anything."""
        return self.penalty != 1 and self.window > 0

    @property
    def counts(self) -> bool:
        """Whether it matters how often tokens are in the generated text."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def repeats(self) -> bool:
        """Whether the penalty of transformers does anything."""
        return self.repetition_penalty != 1

    @property
    def late(self) -> tuple[int, ...]:
        """Token ids that are not drawn before there are ``min_tokens``."""
        return tuple(dict.fromkeys((*self.ends, *self.stop_token_ids))) if self.min_tokens else ()

    def folded(self) -> SamplingParams:
        """The same distribution with one penalty less: where transformers' is the only one,
        it is the contextual one with a window that has no end.
        """
        if not self.repeats or self.repetition_penalty < 1 or self.penalises or self.counts:
            return self
        penalty = float(self.repetition_penalty)
        return replace(self, penalty=penalty, window=ALL, repetition_penalty=1.0)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, by no noise and no filter."""
        return self.temperature == 0

    @property
    def filters(self) -> tuple[str, ...]:
        """Names of the filters that may drop tokens, in the order in which they are applied;
        none if the draw is :attr:`greedy`.
        """
        names = dict.fromkeys([*(self.order.split(",") if self.order else ()), *_FILTERS])
        return tuple(name for name in names if not self.greedy and getattr(self, name) != OFF[name])

    def unfiltered(self) -> SamplingParams:
        """The same parameters with all filters off."""
        return replace(self, **OFF)


OFF: dict[str, Any] = {
    each.name: carried.off
    for each, carried in options_of(SamplingParams)
    if carried.off is not None
}


def apply_eos_policy(
    params: SamplingParams, eos_ids: Sequence[int], stop_at_eos: bool, ignore_eos: bool = False
) -> tuple[SamplingParams, tuple[int, ...]]:
    """Sampling parameters and the tokens that end a text.

    It ends at an end-of-text token, or such are drawn like any other, or never.
    """
    stop = params.stop_token_ids
    if ignore_eos:
        return params, stop
    if stop_at_eos:
        # what never matters is in no record
        return replace(params, ends=tuple(eos_ids) if params.min_tokens else ()), (*eos_ids, *stop)
    return replace(params, banned=tuple(sorted({*params.banned, *eos_ids}))), stop


def constants(params: SamplingParams, device: device | str) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`warp` reads: biased token ids (int64), their biases (float64), and banned ids
    (int64).
    """
    import torch

    ids, banned = (
        torch.tensor([*given], dtype=torch.int64) for given in (params.logit_bias, params.banned)
    )
    biases = torch.tensor([*params.logit_bias.values()], dtype=torch.float64)
    return tuple(held.to(device, non_blocking=True) for held in (ids, biases, banned))  # type: ignore[return-value]


def bias(
    logits: Tensor, params: SamplingParams, held: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """Add the biases to logits ``[n, V]`` and drop the banned ids, in place;
    ``held`` as for :func:`warp`.
    """
    if params.logit_bias or params.banned:
        ids, biases, banned = held or constants(params, logits.device)
        logits.index_add_(-1, ids, biases.to(logits.dtype).expand(len(logits), -1))
        logits.index_fill_(-1, banned, -math.inf)
    return logits


def repeated(logits: Tensor, there: Tensor, penalty: float) -> Tensor:
    """Logits with those lowered by a penalty whose tokens are ``there``."""
    # divisors are tensors: by a number CUDA does not divide, but multiplies by its reciprocal,
    # which rounds otherwise
    lower = (logits / logits.new_full((), penalty)).where(logits > 0, logits * penalty)
    return lower.where(there, logits)


def warp(
    logits: Tensor,
    seen: Tensor | None,
    params: SamplingParams,
    held: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Apply biases, filters and the penalty to rows of logits.

    Order, as in the reference: biases, banned ids, temperature, contextual penalty, min-p, eta,
    top-k, top-p; ``params.order`` may name another of the filters. At temperature 0 only what can
    change the most likely token is applied.

    Args:
        logits: ``[n, V]`` float64; changed in place.
        seen: ``[n, V]`` bool, the tokens in each row's penalty window; None to penalise nothing.
        params: the sampling parameters.
        held: the :func:`constants` on the logits' device; where they are not given, they are copied
            there.

    Returns:
        ``[n, V]`` float64, unnormalised log-probabilities, ``-inf`` where a token is dropped.
    """
    bias(logits, params, held)
    if not params.greedy and params.temperature != 1:
        logits /= logits.new_full((), params.temperature)
    if seen is not None:
        logits = repeated(logits, seen, params.penalty)
    for name in params.filters:
        logits = _FILTERS[name](logits, getattr(params, name))
    return logits


def _keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(min_p), -math.inf)


def _keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    if top_k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)


def _keep_eta(logits: Tensor, epsilon: float) -> Tensor:
    log_probs = logits.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(probs * log_probs.masked_fill(probs == 0, 0)).sum(-1, keepdim=True)
    least = (math.sqrt(epsilon) * (-entropy).exp()).clamp(max=epsilon)
    drop = (probs < least) & (logits < logits.amax(-1, keepdim=True))
    return logits.masked_fill(drop, -math.inf)


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    probs = logits.softmax(-1)
    # on the CPU only as many are sorted as it takes; elsewhere to find that out would be a wait for
    # the device
    best = _enough(probs, top_p) if probs.is_cpu else _sorted(probs)
    return logits.masked_fill(_too_much(probs, top_p, best), -math.inf)


def _too_much(probs: Tensor, top_p: float, best: Tensor) -> Tensor:
    """Which tokens go: those whose more likely ones (``best``, in order) together reach ``top_p``
    without them.
    """
    # of a row with NaN none reaches it
    kept = (best.cumsum(-1) - best < top_p).sum(-1, keepdim=True).clamp_(min=1)
    return probs < best.gather(-1, kept - 1)


def _sorted(probs: Tensor) -> Tensor:
    return probs.sort(-1, descending=True).values


def _enough(probs: Tensor, top_p: float) -> Tensor:
    """The largest probabilities of each row in order,
    as many as it takes for ``top_p`` in all of them.
    """
    vocab = probs.shape[-1]
    count = min(128, vocab)
    while True:
        best = probs.topk(count).values
        if count == vocab or bool((best.cumsum(-1)[:, -1] >= top_p).all()):
            return best
        count = min(8 * count, vocab)


# in the order of the reference
_FILTERS: dict[str, Callable[..., Tensor]] = {
    "min_p": _keep_min_p,
    "eta": _keep_eta,
    "top_k": _keep_top_k,
    "top_p": _keep_top_p,
}
