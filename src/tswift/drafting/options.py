"""How a method drafts: its options, and the defaults by device.

A CUDA pass reads each key once for all rows of its KV head; a row is one query head at one node. Up to about 128 rows
the matrix products keep up with the memory, beyond that every row costs. So the fewer query heads share a KV head, the
larger the tree. That is an estimate: it has not been measured on a GPU. On a CPU every node costs: two more than eight
add 2% to a step's tokens and more to its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from tswift.attention.layout import ROWS
from tswift.errors import InputError

_CUDA_NODES = (8, 128)  # fewest and most
_SLACK = 0.2  # a verification may take so much longer than a pass over one node
_CPU_NODES = 8
_TREES: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {"medusa": (3, 3, 3), "tokenswift": (1, 3, 3, 3)},  # the paper's
    "cpu": {"medusa": (2, 2, 2, 2), "tokenswift": (1, 2, 2, 2, 2)},
}


def usual_tree(method: str, device: torch.device, levels: int) -> tuple[int, ...]:
    """Candidates per level of a method's tree, if nothing else is said: at most ``levels``.

    A tree with more nodes than are to be verified is cut to its most promising ones, which is better than fewer
    candidates per level.
    """
    return _TREES["cpu" if device.type == "cpu" else "cuda"][method][:levels]


def usual_nodes(device: torch.device, groups: int) -> int:
    """Most nodes of a draft tree, if nothing else is said: on CUDA as many as fill :data:`ROWS`.

    Args:
        device: where the model is.
        groups: query heads per KV head.
    """
    if device.type == "cpu":
        return _CPU_NODES
    fewest, most = _CUDA_NODES
    return min(most, max(fewest, ROWS // groups))


def verify_nodes(context: int, groups: int, most: int, weight_tokens: float) -> int:
    """Most nodes of a verification on CUDA that takes at most 1.2 times a pass over one node, by the cost model.

    A pass takes the time to read the weights, and for the keys and values the longer of reading and multiplying them.

    Args:
        context: tokens in the cache.
        groups: query heads per KV head.
        most: nodes asked for; never more.
        weight_tokens: bytes of the weights that a pass reads, over those of one token's keys and values.
    """
    rows = ROWS * (1 + _SLACK * (weight_tokens + context) / max(1, context))
    return max(1, min(most, int(rows / groups)))


FULL = "full"
AUTO = "auto"  # the tree that pays
MEASURED = "measured"
COSTS = (MEASURED, "nominal")  # by which is judged what pays
KV = (FULL, "partial", "dynamic", "streaming", "snapkv")  # what drafting can read

_MOST_PATHS = 10_000
_LONGEST = 1000  # chain
_BY_DEFAULT = ("--nodes", "--gamma", "--budget", "--recall")  # what need not be said
_LARGEST = 1 << 31  # of any number here; what a machine has room for is a matter of its memory


@dataclass(frozen=True)
class DraftOptions:
    """How a method drafts. The defaults are the paper's, except where the device makes another tree pay.

    Attributes:
        tree: candidates per drafted level; ``auto`` for those that promise most tokens per second, chosen anew in every
            step; None for the device's default. Its length is the paper's gamma + 1 where the LM head drafts the first
            level (tokenswift), and gamma where only heads draft (medusa).
        nodes: most nodes of a draft tree, root included; None for the device's default.
        ngrams: continuations of one token that are reused (the paper's k).
        reuse_recent: also reuse what is still in the penalty window.
        gamma: tokens drafted along a path, where it is a chain; heads to use of the default tree, or of a tree that is
            ``auto``, where heads draft. None for the method's default, or all.
        inner_gamma: tokens that the small model drafts for the draft, where there are two.
        kv: what drafting reads: ``full``, or which tokens a partial cache holds, ``partial`` (selected once),
            ``dynamic``, ``streaming`` or ``snapkv``; None for the method's default.
        budget: tokens of the partial KV cache; None for the method's default.
        sinks: first tokens that the partial cache always holds.
        shared_noise: rank candidates with the noise the target will draw with.
        costs: what passes cost where it is chosen which ones pay: ``measured`` on this machine, or ``nominal``, for
            choices that are the same everywhere; None for measured.
        recall: likeliest tokens kept of what the target thought after each token, to be recalled where the text stands
            like that again, if the tree is ``auto``; 0 to recall nothing, and reuse n-grams. None for 64.

    Raises:
        InputError: a value outside its range, or of another type.
    """

    tree: tuple[int, ...] | str | None = None
    nodes: int | None = None
    ngrams: int = 20
    reuse_recent: bool = False
    gamma: int | None = None
    inner_gamma: int = 2
    kv: str | None = None
    budget: int | None = None
    sinks: int = 16
    shared_noise: bool = True
    costs: str | None = None
    recall: int | None = None

    def __post_init__(self) -> None:
        widths = (1,) if self.tree in (None, AUTO) else self.tree
        if not (isinstance(widths, tuple) and widths and all(type(width) is int and width > 0 for width in widths)):
            raise InputError(f"wants auto, or numbers above 0, such as 1,3,3,3, got {self.tree!r:.80}", "--tree")
        if prod(widths) > _MOST_PATHS:
            raise InputError(f"has {prod(widths):,} paths, at most {_MOST_PATHS:,} are possible", "--tree")
        if isinstance(self.tree, tuple) and self.gamma is not None:
            raise InputError("cannot be given together with --tree", "--gamma")
        if self.kv not in (None, *KV):
            raise InputError(f"is one of {', '.join(KV)}, got {self.kv!r:.40}", "--kv")
        if self.costs not in (None, *COSTS):
            raise InputError(f"is one of {', '.join(COSTS)}, got {self.costs!r:.40}", "--costs")
        for option, value, least in (
            ("--nodes", self.nodes, 2),
            ("--ngrams", self.ngrams, 0),
            ("--gamma", self.gamma, 0),
            ("--recall", self.recall, 0),
            ("--inner-gamma", self.inner_gamma, 1),
            ("--budget", self.budget, 64),
            ("--sinks", self.sinks, 0),
        ):
            if type(value) is not int and not (value is None and option in _BY_DEFAULT):
                raise InputError(f"wants an integer, got {value!r:.40}", option)
            if value is not None and value < least:
                raise InputError(f"must be at least {least}, got {value}", option)
            most = _LONGEST if option in ("--gamma", "--inner-gamma") else _LARGEST
            if value is not None and value > most:
                raise InputError(f"must be at most {most:,}, got {value:,}", option)
        if self.budget is not None:
            refuse_sinks(self.sinks, self.budget)
        for option, flag in (("--reuse-recent", self.reuse_recent), ("--shared-noise", self.shared_noise)):
            if type(flag) is not bool:
                raise InputError(f"is yes or no, got {flag!r:.40}", option)


def refuse_sinks(sinks: int, budget: int) -> None:
    """Refuse more sinks than a quarter of a budget.

    Raises:
        InputError: there are.
    """
    if sinks > budget // 4:
        raise InputError(f"must be at most a quarter of --budget {budget}, got {sinks}", "--sinks")
