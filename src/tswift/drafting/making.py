"""What a method has for one decode: its drafter, and the room of its caches."""

from __future__ import annotations

from tswift.decoding.drafter import Drafter
from tswift.drafting import recipes
from tswift.drafting.levels import CHUNK
from tswift.drafting.methods import find_method, used
from tswift.drafting.options import FULL, DraftOptions
from tswift.drafting.recall import Recall
from tswift.drafting.resolving import resolve
from tswift.errors import InputError
from tswift.models.base_heads import Heads
from tswift.models.costs import NOMINAL, PassCosts
from tswift.models.target import Target


def make_drafter(
    name: str,
    target: Target,
    heads: Heads | None,
    options: DraftOptions,
    draft: Target | None = None,
    positions: int | None = None,
    costs: PassCosts = NOMINAL,
    drafting: Target | None = None,
    draft_costs: PassCosts | None = None,
) -> Drafter:
    """The drafter of a method, for one decode.

    Args:
        name: of the method.
        target: the model.
        heads: its heads, if it has any.
        options: as asked for.
        draft: a smaller model with the same vocabulary, if there is one.
        positions: most tokens of prompt and text together; None for as many as the models can do.
        costs: what passes cost, for methods that choose which ones pay.
        drafting: what drafting passes of the model run on; None for itself.
        draft_costs: what those cost; None for as much as others.

    Raises:
        InputError: as :func:`resolve`, or there is no smaller model where one is needed.
    """
    method, options = find_method(name), resolve(name, target, heads, options)
    if method.draft and draft is None:
        raise InputError(f"{name} drafts with a smaller model, and there is none", "--draft-model")
    positions = positions or target.max_positions
    models = recipes.Models(target, drafting or target, heads, draft, positions, costs, draft_costs or costs)
    return method.make(models, options)


def partial_slots(name: str, options: DraftOptions) -> int:
    """Tokens that a method's partial cache of the target has room for, by resolved options; 0 if it has none."""
    method = find_method(name)
    if not method.partial or options.kv == FULL:
        return 0
    chain = 0 if method.gamma is None else options.gamma or method.gamma  # in a tree it counts levels, drafted by heads
    return (
        (options.budget or method.budget)
        + chain
        + (recipes.INNER_NODES if method.heads else 1)
        + (options.inner_gamma if method.draft else 0)
    )


def recall_bytes(name: str, options: DraftOptions, positions: int, vocab_size: int) -> int:
    """Bytes of the machine's own memory that a method recalls a text with, by resolved options; 0 if it does not.

    Args:
        name: of the method.
        options: resolved ones.
        positions: tokens of prompt and text together.
        vocab_size: of the model.
    """
    kept = options.recall if "recall" in used(name, options) else 0
    return Recall.bytes_for(positions, vocab_size, kept) if kept else 0


def draft_slots(name: str, options: DraftOptions, positions: int) -> int:
    """Tokens that the cache of a method's smaller model has room for, by resolved options; 0 if it has none."""
    method = find_method(name)
    if not method.draft:
        return 0
    budget, ahead = recipes.own_size(options, positions, between=method.partial)
    return budget + 2 * ahead + CHUNK
