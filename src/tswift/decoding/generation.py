"""From a loaded model and what is asked of it to a decode that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tswift.decoding.costs import costs_of, measure
from tswift.decoding.limits import Need, check
from tswift.decoding.loop import Decoding
from tswift.decoding.params import SamplingParams
from tswift.decoding.ranked import AgreedDrafter, in_step
from tswift.decoding.step import Step, Walk
from tswift.decoding.trust import try_steps
from tswift.drafting.making import make_drafter
from tswift.drafting.methods import find_method
from tswift.drafting.options import MEASURED, DraftOptions
from tswift.drafting.resolving import resolve
from tswift.errors import InputError
from tswift.models.costs import NOMINAL
from tswift.models.loaded import LoadedModel
from tswift.models.ranks import ALONE, Ranks

_PARAMS = SamplingParams()
_OPTIONS = DraftOptions()


@dataclass(frozen=True)
class Generation:
    """A decode ready to run.

    Attributes:
        decoding: the decode; its KV cache is allocated.
        depth: most tokens drafted along a path, for :class:`~tswift.decoding.stats.DecodeStats`.
        stop: token ids that end the text early.
        params: the sampling parameters, banned end-of-text tokens included.
        options: the drafting options with tree and nodes filled in.
        need: what it needs of positions and memory; of a rank, for its own part.
        ranks: those that make it together.
    """

    decoding: Decoding
    depth: int
    stop: tuple[int, ...]
    params: SamplingParams
    options: DraftOptions
    need: Need
    ranks: Ranks = ALONE

    def steps(self) -> Iterator[Step]:
        """The steps of the decode; prefills first unless that was done, as all ranks have to have done alike."""
        steps = self.decoding.steps(self.stop)
        return steps if self.ranks.count == 1 else in_step(steps, self.ranks)


def ending(params: SamplingParams, eos_ids: Sequence[int], stop_at_eos: bool) -> tuple[SamplingParams, tuple[int, ...]]:
    """How the text ends: by an end-of-text token, or at an exact length because those tokens are never drawn.

    Returns:
        The parameters to sample with, and the token ids to stop at.
    """
    if stop_at_eos:
        return params, tuple(eos_ids)
    return replace(params, banned=tuple(sorted({*params.banned, *eos_ids}))), ()


def begin(
    model: LoadedModel,
    prompt: Sequence[int],
    length: int,
    *,
    method: str = "tokenswift",
    params: SamplingParams = _PARAMS,
    seed: int = 0,
    options: DraftOptions = _OPTIONS,
    stop_at_eos: bool = False,
    written: Sequence[int] = (),
    walk: Callable[[int], Walk] | None = None,
) -> Generation:
    """Check what is asked, and allocate what it takes. See :func:`generate` for the arguments.

    Where ranks hold the model together, all of them have to call this, and what the first asks for counts.

    Args:
        walk: makes a walk for :class:`Decoding` from the most tokens that are drafted along a path.

    Raises:
        InputError: an empty prompt, a length that leaves nothing to generate, an unknown method, options that do not
            fit the model, or more positions or memory than there are; on any rank.
    """
    ranks = model.ranks
    prompt, length, method, params, seed, options, stop_at_eos, written = ranks.share(
        (prompt, length, method, params, seed, options, stop_at_eos, written)
    )
    with ranks.alike():
        if length <= len(written):
            so_far = f", as {len(written):,} tokens are there already" if written else ""
            raise InputError(f"must be at least {len(written) + 1:,}, got {length:,}{so_far}", "--len")
        if not prompt:
            raise InputError("has no tokens", "--prompt")
        params, stop = ending(params, model.eos_ids, stop_at_eos)
        if model.target.device.type == "cuda":
            try_steps(model.target, params)
        target = model.target.reference() if find_method(method).reference else model.target
        resolved = resolve(method, target, model.heads, options)
        need = check(target, len(prompt), length, method, resolved, draft=model.draft)
    costs = NOMINAL
    if resolved.costs == MEASURED and ranks.count == 1:
        costs = costs_of(target, model.heads)
    elif resolved.costs == MEASURED:  # by all together, and of one mind
        with ranks.together():
            costs = ranks.share(measure(target, model.heads))
    with ranks.alike():
        # clocks of ranks differ, and what they were told of costs does not
        drafting = resolved if ranks.count == 1 or not resolved.costs else replace(resolved, costs="nominal")
        positions = len(prompt) + length
        drafter = make_drafter(method, target, model.heads, drafting, model.draft, positions, costs, model.drafting)
        if ranks.count > 1:
            drafter = AgreedDrafter(drafter, ranks)
        decoding = Decoding(target, prompt, params, seed, drafter, length, walk and walk(drafter.depth), written)
    return Generation(decoding, drafter.depth, stop, params, resolved, need, ranks)


def generate(
    model: LoadedModel,
    prompt: str | Sequence[int],
    length: int,
    *,
    method: str = "tokenswift",
    params: SamplingParams = _PARAMS,
    seed: int = 0,
    options: DraftOptions = _OPTIONS,
    stop_at_eos: bool = False,
    written: Sequence[int] = (),
) -> Iterator[Step]:
    """Continue a text. The tokens depend on model, prompt, params and seed; never on the method or its options.

    Args:
        model: from :func:`tswift.load`.
        prompt: a text, or its token ids.
        length: tokens to generate, exactly unless ``stop_at_eos``; those in ``written`` count.
        method: one of ``tswift.drafting.methods.METHODS``.
        params: how each token is drawn.
        seed: any integer.
        options: how the method drafts; what it does not use is not looked at.
        stop_at_eos: end at an end-of-text token, which is the last one then. Otherwise those are never drawn.
        written: the tokens that an earlier call with the same arguments has generated so far: the text goes on as that
            call's would have. One that has come to its end is not to be gone on with: that is not looked at.

    Returns:
        An iterator of steps, each with one or more new tokens. The text so far is prefilled when the first is asked
        for.

    Raises:
        InputError: as :func:`begin`.
    """
    ids = model.encode(prompt) if isinstance(prompt, str) else list(prompt)
    run = begin(
        model,
        ids,
        length,
        method=method,
        params=params,
        seed=seed,
        options=options,
        stop_at_eos=stop_at_eos,
        written=written,
    )
    return run.steps()
