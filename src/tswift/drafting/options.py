"""The methods and their options: which fields a method uses, its defaults, and what goes together.

Nothing here imports torch. ``drafting/methods.py`` builds the drafters, and fills in what depends
on model and device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod

from tswift.errors import InputError, Object, no_such
from tswift.options import DRAFTING, Values, check_options, given_options, option

FULL = "full"
AUTO_TREE = "auto"  # the tree that pays
AUTO_METHOD = "auto"
MEASURED = "measured"
COSTS = (MEASURED, "nominal")  # by which is judged what pays
KV = (FULL, "partial", "dynamic", "streaming", "snapkv")  # what drafting can read
NGRAMS, SINKS = 20, 16  # the paper's, where nothing else is said

_MAX_PATHS = 10_000
_LONGEST = 1000  # chain
_LARGEST = 1 << 31  # of any number here; what a machine has room for is a matter of its memory


def parse_tree(text: str) -> tuple[int, ...] | str:
    """The levels of a tree such as ``1,3,3,3``; ``auto`` is one, too.

    Raises:
        InputError: it is no such thing.
    """
    if text == AUTO_TREE:
        return text
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError:
        raise InputError(
            f"wants auto, or numbers and commas, such as 1,3,3,3, got {text!r}", "tree"
        ) from None


@dataclass(frozen=True)
class DraftOptions:
    """How a method drafts.

    The defaults are the paper's, except where the device makes another tree pay.

    None is the default of the method, or of the device. The length of a tree is the paper's gamma +
    1 where the LM head drafts the first level (tokenswift), and gamma where only heads draft
    (medusa).

    Raises:
        InputError: a value outside its range, or of another type.
    """

    tree: tuple[int, ...] | str | None = option(
        None,
        "Candidates per drafted level, as 1,3,3,3; or auto.",
        panel=DRAFTING,
        shown="by device",
        parse=parse_tree,
    )
    nodes: int | None = option(
        None,
        "Most nodes of a draft tree.",
        panel=DRAFTING,
        shown="by device",
        least=2,
        most=_LARGEST,
    )
    ngrams: int | None = option(
        None,
        "4-grams reused per token.",
        panel=DRAFTING,
        shown=str(NGRAMS),
        least=0,
        most=_LARGEST,
    )
    reuse_recent: bool = option(
        False, "Reuse text in the penalty window too.", panel=DRAFTING, shown="no"
    )
    gamma: int | None = option(
        None,
        "Tokens of a drafted chain, or heads to use of the default tree.",
        panel=DRAFTING,
        shown="by method",
        least=0,
        most=_LONGEST,
    )
    inner_gamma: int = option(
        2,
        "Tokens the small model drafts for triforce's draft.",
        panel=DRAFTING,
        least=1,
        most=_LONGEST,
    )
    kv: str | None = option(
        None,
        f"What drafting reads: {', '.join(KV)}.",
        panel=DRAFTING,
        shown="by method",
        choices=KV,
    )
    budget: int | None = option(
        None,
        "Tokens of the partial KV cache.",
        panel=DRAFTING,
        shown="by method",
        least=64,
        most=_LARGEST,
    )
    sinks: int | None = option(
        None,
        "Attention sinks: leading tokens that the partial cache keeps.",
        panel=DRAFTING,
        shown=str(SINKS),
        least=0,
        most=_LARGEST,
    )
    shared_noise: bool = option(
        True, "Rank drafts with the sampler's own Gumbel noise.", panel=DRAFTING
    )
    costs: str | None = option(
        None,
        "measured or nominal: costs of passes that trees are sized by; never changes the text.",
        panel=DRAFTING,
        shown=MEASURED,
        choices=COSTS,
    )
    recall: int | None = option(
        None,
        "With --tree auto: top K logits kept per position, reused as drafts where the same "
        "context recurs; 0 reuses n-grams.",
        panel=DRAFTING,
        shown="64",
        least=0,
        most=1024,  # they are kept in order one by one, and more than some hundred gain nothing
    )

    def __post_init__(self) -> None:
        check_options(self)
        widths = (1,) if self.tree in (None, AUTO_TREE) else self.tree
        if not (
            isinstance(widths, tuple)
            and widths
            and all(type(width) is int and width > 0 for width in widths)
        ):
            raise InputError(
                f"wants auto, or numbers above 0, such as 1,3,3,3, got {self.tree!r:.80}", "tree"
            )
        if prod(widths) > _MAX_PATHS:
            raise InputError(
                f"has {prod(widths):,} paths, at most {_MAX_PATHS:,} are possible", "tree"
            )
        if isinstance(self.tree, tuple) and self.gamma is not None:
            raise InputError("cannot be given together with `tree`", "gamma")
        if self.budget is not None and self.sinks is not None:
            refuse_sinks(self.sinks, self.budget)

    def changed(self) -> Object:
        """The fields that are not the default, by name."""
        return given_options(self)


class RecordedOptions(DraftOptions):
    """Options as a run once resolved them: none of them counts as typed."""


class ResolvedOptions(DraftOptions):
    """Options with the defaults of a method, a model and its device filled in."""


def refuse_sinks(sinks: int, budget: int) -> None:
    """Refuse more sinks than a quarter of a budget."""
    if sinks > budget // 4:
        raise InputError(f"must be at most a quarter of `budget` {budget}, got {sinks}", "sinks")


@dataclass(frozen=True)
class Method:
    """A decoding method."""

    name: str = field(default="", kw_only=True)  # as users type it: its key in METHODS
    uses: frozenset[str] = frozenset()  # the fields of DraftOptions that it looks at
    by_lm_head: int = 0  # levels of its tree that the LM head drafts, before those of the heads
    kv: tuple[str, ...] = ()  # what it can read while drafting; the first is the default
    gamma: int | None = None  # length of its chain, if not said otherwise; None if it drafts none
    budget: int = 4096  # tokens of its partial cache, if not said otherwise
    cuda_tree: tuple[int, ...] = ()  # of its heads on CUDA, if not said otherwise: the paper's
    cpu_tree: tuple[int, ...] = ()  # and on a CPU
    # of LOADED, what it cannot do without, and what it drafts with where that is there
    needs: tuple[str, ...] = ()
    may_use: tuple[str, ...] = ()
    # passes of the target draft: over a partial cache, unless drafting reads the full one
    drafts_itself: bool = False
    speculator_kinds: tuple[str, ...] = ()  # the kinds of published drafters of which it needs one
    # it reads the text as reference implementations do, slowly, to be measured beside ``ar``
    reference: bool = False

    @property
    def loads(self) -> frozenset[str]:
        """What it can draft with of what is loaded beside the model,
        by the options that name it.
        """
        return frozenset(self.needs + self.may_use)


# options that name what methods draft with
LOADED = ("heads", "draft_model", "drafter")
OF_CHOICE = frozenset({"costs", "recall"})  # where it is chosen anew in every step what pays
OF_NGRAMS = frozenset({"ngrams", "reuse_recent"})
OF_PARTIAL = frozenset({"budget", "sinks"})
OF_CASCADE = OF_PARTIAL | {"kv", "gamma"}

_OF_TREES = frozenset({"tree", "nodes", "shared_noise"}) | OF_CHOICE
_OF_REUSE = frozenset({"nodes"}) | OF_NGRAMS
_OF_CHAINS = frozenset({"gamma", "shared_noise"})


def _usually(kv: str, known: Sequence[str] = KV) -> tuple[str, ...]:
    """Of the caches that drafting can read, the usual one first."""
    return (kv, *(other for other in known if other != kv))


_CASCADE = Method(
    frozenset({"nodes"}) | OF_CHOICE | _OF_CHAINS | OF_CASCADE,
    kv=_usually("streaming", KV[1:]),
    gamma=24,
    budget=1024,
    may_use=("heads",),
    drafts_itself=True,
)
_DRAFTER = Method(_OF_TREES | OF_PARTIAL, budget=2048, needs=("drafter",))

_METHODS = {
    "ar": Method(),
    "medusa": Method(_OF_TREES, needs=("heads",), cuda_tree=(3, 3, 3), cpu_tree=(2, 2, 2, 2)),
    "tokenswift": Method(
        _OF_TREES | _OF_REUSE | OF_PARTIAL | {"kv"},
        by_lm_head=1,
        cuda_tree=(1, 3, 3, 3),
        cpu_tree=(1, 2, 2, 2, 2),
        kv=_usually("dynamic"),
        needs=("heads",),
        drafts_itself=True,
    ),
    "cascade": _CASCADE,
    "recall": Method(frozenset({"nodes", "shared_noise"}) | OF_CHOICE),
    "reuse": Method(_OF_REUSE),
    "magicdec": Method(
        _OF_CHAINS | OF_PARTIAL | {"kv"},
        kv=_usually("snapkv"),
        gamma=4,
        drafts_itself=True,
    ),
    "standalone": Method(
        _OF_CHAINS | OF_PARTIAL | {"kv"},
        kv=("streaming", FULL),
        gamma=4,
        budget=512,
        needs=("draft_model",),
    ),
    "triforce": Method(
        _OF_CHAINS | OF_PARTIAL | {"inner_gamma"},
        gamma=6,
        needs=("draft_model",),
        drafts_itself=True,
    ),
    "block": replace(_DRAFTER, speculator_kinds=("dspark", "dflash", "dflash2")),
    "eagle": replace(_DRAFTER, speculator_kinds=("eagle3", "assistant")),
    # the head is in the model's own checkpoint
    "mtp": replace(_DRAFTER, needs=(), speculator_kinds=("mtp",)),
    "auto": replace(_CASCADE, may_use=LOADED),
    "ar-reference": Method(reference=True),
}
METHODS = {name: replace(method, name=name) for name, method in _METHODS.items()}


def find_method(name: str) -> Method:
    """The method of a name.

    Raises:
        InputError: there is none.
    """
    if name not in METHODS:
        raise no_such("method", name, METHODS, "method")
    return METHODS[name]


def used(method: Method, options: DraftOptions) -> frozenset[str]:
    """Names of the options that a method reads; which they are depends on their values."""
    uses = method.uses
    tree = options.tree or (AUTO_TREE if method.speculator_kinds else None)
    if "kv" in uses and options.kv == FULL:
        uses -= OF_PARTIAL
    if "tree" in uses and tree != AUTO_TREE:
        uses -= OF_CHOICE
    elif "tree" in uses and options.recall != 0:  # recalls instead
        uses -= OF_NGRAMS
    return uses


def used_options(method: Method, options: DraftOptions) -> Object:
    """The options that a method looks at, by name; of resolved ones those that have a value."""
    looked_at = used(method, options)
    return {
        name: value
        for name, value in asdict(options).items()
        if name in looked_at and value is not None
    }


def varies(method: Method, options: DraftOptions) -> bool:
    """Whether how far a method drafts differs from step to step: by what pays,
    or by what it finds in the text.
    """
    uses = used(method, options)
    return bool(uses & OF_CHOICE) or OF_NGRAMS <= uses <= _OF_REUSE


def refuse_unused(
    methods: Sequence[str],
    given: Values,
    trees: Mapping[str, tuple[int, ...] | str] | None = None,
) -> None:
    """No option is silently ignored: refuse what none of the methods uses.

    Args:
        methods: names.
        given: fields of ``DraftOptions`` that were given; None for what was not.
        trees: those of single methods, where they have others than the one that was given.

    Raises:
        InputError: no such method, or an option for none of them.
    """
    options = DraftOptions(kv=given.get("kv"), tree=given.get("tree"), recall=given.get("recall"))
    trees = trees or {}
    looked_at = {
        name
        for method in methods
        for name in used(
            find_method(method), replace(options, tree=trees.get(method, options.tree))
        )
    }
    if "tree" in looked_at:
        looked_at |= {"gamma"}
    for name, value in given.items():
        if value is not None and name not in looked_at:
            message = (
                f"{methods[0]} does not use it"
                if len(methods) == 1
                else f"none of {', '.join(methods)} uses it"
            )
            message += " with `kv` full" if options.kv == FULL else ""
            message += " without `tree` auto" if name in OF_CHOICE and "tree" in looked_at else ""
            reused = name in OF_NGRAMS and any(
                name in find_method(method).uses for method in methods
            )
            message += " with `tree` auto, but for `recall` 0" if reused else ""
            raise InputError(message, name)
