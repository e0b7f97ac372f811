"""Set up a decode: check positions and memory, resolve options, make the drafter, and run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from numbers import Integral
from typing import TYPE_CHECKING, Any

from tswift.decoding.device_step_check import try_steps
from tswift.decoding.drafter import Step, WalkFn
from tswift.decoding.kept import KeptCaches
from tswift.decoding.loop import Decoding
from tswift.decoding.pass_costs import NOMINAL, PassCosts
from tswift.decoding.text import TextRules, TextStream, check_stop
from tswift.decoding.work import Work
from tswift.drafting.costs import costs_of
from tswift.drafting.methods import make_drafter, possible, resolved
from tswift.drafting.options import MEASURED, DraftOptions, find_method, refuse_unused
from tswift.errors import InputError, suggesting_names
from tswift.forward.notes import warn_of_fallbacks
from tswift.forward.passes import PROMPT_CHUNK
from tswift.loading import model as loading
from tswift.loading.model import LoadedModel
from tswift.memory import Demand, MemoryEstimate, check, promised, refuse_ids
from tswift.options import Option, checked
from tswift.sampling.parameters import MAX_TOP, SamplingParams, apply_eos_policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PARAMS = SamplingParams()
_OPTIONS = DraftOptions()
_RULES = TextRules()


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be decoded, and how; :func:`generate` explains the fields.

    Raises:
        InputError: a value of another type, named.
    """

    prompt: Sequence[int]  # token ids
    length: int
    method: str = "auto"
    params: SamplingParams = _PARAMS
    seed: int = 0
    options: DraftOptions = _OPTIONS
    stop_at_eos: bool = False
    ignore_eos: bool = False
    written: Sequence[int] = ()
    rules: TextRules = _RULES  # those of its ends are added to these
    texts: bool = False  # whether steps have their texts
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (
            ("length", int),
            ("method", str),
            ("seed", int),
            ("stop_at_eos", bool),
            ("ignore_eos", bool),
            ("logprobs", int | None),
        ):
            checked(kind, getattr(self, name), name)
        checked(int | None, self.rules.loop, "stop_on_loop", Option("", least=1))
        if self.stop_at_eos and self.ignore_eos:
            raise InputError("cannot be given together with stop_at_eos", "ignore_eos")
        for name, fine, expected in (
            ("prompt", _are_ids(self.prompt), "a text or token ids"),
            ("params", isinstance(self.params, SamplingParams), "SamplingParams"),
            ("options", isinstance(self.options, DraftOptions), "DraftOptions"),
            ("written", _are_ids(self.written), "token ids"),
        ):
            if not fine:
                raise InputError(f"must be {expected}, got {getattr(self, name)!r:.60}", name)

    def check(self, vocab_size: int) -> None:
        """Refuse what a model with such a vocabulary cannot decode: an empty prompt,
        no tokens to generate, ids.
        """
        if self.length <= len(self.written):
            so_far = f", as {len(self.written):,} tokens are there already" if self.written else ""
            raise InputError(
                f"must be at least {len(self.written) + 1:,}, got {self.length:,}{so_far}", "length"
            )
        if not self.prompt:
            raise InputError("has no tokens", "prompt")
        named = {
            name: getattr(self.params, name) for name in ("banned", "logit_bias", "stop_token_ids")
        }
        refuse_ids(vocab_size, prompt=self.prompt, written=self.written, **named)
        most = min(MAX_TOP, vocab_size)
        if self.logprobs is not None and not 0 <= self.logprobs <= most:
            raise InputError(f"must be between 0 and {most}, got {self.logprobs}", "logprobs")

    def text(
        self, tokenizer: PreTrainedTokenizerBase, rules: TextRules
    ) -> tuple[TextStream | None, str]:
        """What makes text of tokens, and finds stop strings and loops in it; and what it gave of
        those written so far. None where nobody wants it.
        """
        if not (rules.stop or rules.loop is not None or self.texts):
            return None, ""
        text = TextStream(tokenizer, rules)
        before = text.add(self.written)
        if text.looped:
            raise InputError("the text so far ends in a loop already", "stop_on_loop")
        if text.stopped is not None:
            raise InputError(f"the text so far has {text.stopped!r} in it already", "stop")
        return text, before


def _are_ids(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(token, Integral) for token in value)


@dataclass(frozen=True)
class Generation:
    """A decode ready to run."""

    decoding: Decoding  # its KV cache is allocated
    depth: int  # maximum tokens drafted along a path
    rules: TextRules  # with the token ids that end the text early
    params: SamplingParams  # banned end-of-text tokens included
    options: DraftOptions  # resolved
    need: MemoryEstimate
    costs: PassCosts = NOMINAL  # by which it chooses, where its method does
    # makes text of tokens, and finds stop strings and loops in it; None where nobody wants it
    text: TextStream | None = None
    before: str = ""  # the text of the tokens that were written before

    def steps(self) -> Iterator[Step]:
        """The steps of the decode; prefills first unless that was done."""
        return self.decoding.steps(self.rules.ends, self.text)

    def stepping(self) -> Work[Step]:
        """The next step of the prefilled decode."""
        return self.decoding.stepping(self.rules.ends, self.text)


def begin(
    model: LoadedModel,
    request: Request,
    simulate: Callable[[int], WalkFn] | None = None,
    kept: KeptCaches | None = None,
) -> Generation:
    """Check a request, and allocate the caches.

    Args:
        simulate: makes that of :class:`Decoding` from the most tokens drafted along a path.
        kept: caches of the model's earlier texts, from which a new one may be begun.

    Raises:
        InputError: an empty prompt, a length that leaves nothing to generate, an unknown method,
            options that do not fit the model, or more positions or memory than there are.
    """
    request.check(model.target.vocab_size)
    params, ends = apply_eos_policy(
        request.params, model.eos_ids, request.stop_at_eos, request.ignore_eos
    )
    rules = replace(request.rules, ends=frozenset(ends), least=params.min_tokens)
    text = request.text(model.tokenizer, rules)
    if model.target.on_cuda:
        try_steps(model.target, params)
        warn_of_fallbacks(model.target)
    method = find_method(request.method)
    target = model.target.reference() if method.reference else model.target
    draft = model.draft is not None
    options = resolved(method, target, model.heads, request.options, draft)
    demand = Demand(len(request.prompt), request.length, request.method, options)
    need = check(target, demand, draft=model.draft, spare=kept.nbytes if kept else 0)
    # its own, as they change with how many texts share passes
    costs = replace(costs_of(target, model.heads) if options.costs == MEASURED else NOMINAL)
    drafter = make_drafter(
        request.method, target, model.heads, options, model.draft, need.positions, costs
    )
    kv = None
    if kept is not None:
        text_so_far = [*request.prompt, *request.written]
        room = need.positions + drafter.limit
        # a draft begins from the states of the last token, a network's from those of many
        back = 1 if target.speculator is None else PROMPT_CHUNK
        needed = need.total_bytes + promised(target)
        kv = kept.begin(target, text_so_far, len(request.prompt), room, back, needed)
    decoding = Decoding(
        target,
        request.prompt,
        params,
        request.seed,
        drafter,
        request.length,
        simulate and simulate(drafter.depth),
        request.written,
        request.logprobs,
        kv,
    )
    if kept is not None:
        kept.running.add(decoding)
    return Generation(decoding, drafter.depth, rules, params, options, need, costs, *text)


@wraps(loading.load)
def load(*given: Any, **named: Any) -> LoadedModel:
    """As :func:`tswift.loading.model.load`; the model also names the methods that decode it."""
    model = loading.load(*given, **named)
    methods = possible(model.target, model.heads, draft=model.draft is not None)
    return replace(model, methods=methods)


@partial(suggesting_names, parts={"params": SamplingParams, "options": DraftOptions})
def generate(
    model: LoadedModel,
    prompt: str | Sequence[int],
    length: int,
    *,
    method: str = "auto",
    params: SamplingParams = _PARAMS,
    seed: int = 0,
    options: DraftOptions | None = None,
    stop_at_eos: bool = False,
    ignore_eos: bool = False,
    written: Sequence[int] = (),
    stop: str | Sequence[str] = (),
    logprobs: int | None = None,
    stop_on_loop: int | None = None,
    include_stop_str_in_output: bool = False,
    skip_special_tokens: bool = True,
) -> Iterator[Step]:
    """Continue a text.

    The tokens depend on model, prompt, params and seed; never on the method or its options.

    Args:
        model: from ``tswift.load``.
        prompt: a text, or its token ids.
        length: tokens to generate, exactly unless ``stop_at_eos``; those in ``written`` count.
        method: one of ``tswift.drafting.options.METHODS``.
        params: how each token is drawn.
        seed: any integer.
        options: how the method drafts; an option that it does not use is refused if it is not the
            default.
        stop_at_eos: end at an end-of-text token, which is the last one then. Otherwise those are
            never drawn.
        ignore_eos: draw end-of-text tokens like any other, and go on after them.
        written: the tokens that an earlier call with the same arguments has generated so far: the
            text goes on as that call's would have. It must not have come to its end; that is not
            checked of end-of-text tokens.
        stop: strings that end the text. The last token is the one that completes the first of them;
            see ``tswift.decoding.text.TextStream`` for the text up to there.
        logprobs: give each step the log-probabilities of its tokens, and of so many likeliest ones
            (0 to 20): ``Step.logprobs``, see ``tswift.sampling.rule.row_type``.
        stop_on_loop: end the text when its last tokens, thrice so many, are a loop of at most so
            many.
        include_stop_str_in_output: the steps' texts have what ended the text: the stop string, or
            the token, unless that is skipped.
        skip_special_tokens: they have no special tokens.

    Returns:
        An iterator of steps, each with one or more new tokens. The text so far is prefilled when
        the first is asked for.

    Raises:
        InputError: a wrong argument, which is named.
    """
    if not isinstance(model, LoadedModel):
        raise InputError(f"must be what tswift.load returns, got {model!r:.60}", "model")
    request = Request(
        prompt=model.encode(prompt) if isinstance(prompt, str) else prompt,
        length=length,
        method=method,
        params=params,
        seed=seed,
        options=_OPTIONS if options is None else options,
        stop_at_eos=stop_at_eos,
        ignore_eos=ignore_eos,
        written=written,
        rules=TextRules(
            check_stop(stop),
            stop_on_loop,
            skip_special=skip_special_tokens,
            include_stop=include_stop_str_in_output,
            include_end=include_stop_str_in_output,
        ),
        texts=hasattr(model.tokenizer, "backend_tokenizer"),  # random weights have none
        logprobs=logprobs,
    )
    refuse_unused([method], request.options.changed())
    return begin(model, request).steps()
