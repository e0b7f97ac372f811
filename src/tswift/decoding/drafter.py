"""What drafting and verification share: the draft tree, the decode under way, its steps,
and the draft sources.

A method is a list of sources; plain decoding has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tswift.caches import KVBuffer
from tswift.decoding.pass_costs import WORTH_A_TRIAL, PassCosts
from tswift.forward.passes import Forwarded
from tswift.sampling.rule import Sampler

if TYPE_CHECKING:
    from tswift.decoding.device_state import DeviceState
    from tswift.forward.target import Target
    from tswift.sampling.rule import LogprobRecorder


WalkFn = Callable[["DraftTree", Sequence[int]], list[int]]  # as DraftTree.walk
TruncateFn = Callable[[Sequence[int]], int]  # of tokens in order, how many belong to the text
_ALONE = torch.ones(1, 1, dtype=torch.bool)  # a node without ancestors but itself
_CHANCE = 0.9  # that a drafted token comes true, in texts where most do
REUSE = "reuse"  # the source of reused n-grams, whose accepted tokens are counted apart


class DraftTree:
    """A trie of at most ``limit`` tokens, the root included,
    and ``depth`` tokens along a path below it.

    Node 0 is the root: the text's last token, known but not yet forwarded. Parents come before
    their children.

    Attributes:
        tokens, parents, depths: one entry per node.
        sources: name of the draft source that proposed the node first; empty for the root.
        children: of every node, by token.
    """

    def __init__(self, root: int, limit: int = 128, depth: int = 128) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.sources = [""]
        self.children: list[dict[int, int]] = [{}]
        self._limit = limit
        self.depth = depth

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def full(self) -> bool:
        """Whether no node can be added any more."""
        return len(self) >= self._limit

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that carries ``token``, if there is one."""
        return self.children[node].get(token)

    def grow(self, node: int, token: int, source: str) -> int | None:
        """The child of ``node`` that carries ``token``, added if missing;
        None if the tree is full or too deep.
        """
        known = self.child(node, token)
        if known is not None:
            return known
        if self.full or self.depths[node] >= self.depth:
            return None
        self.tokens.append(token)
        self.parents.append(node)
        self.depths.append(self.depths[node] + 1)
        self.sources.append(source)
        grown = self.children[node][token] = len(self.children)
        self.children.append({})
        return grown

    def add(self, path: Iterable[int], source: str) -> None:
        """Add a path of tokens below the root, as far as the limit allows."""
        node = 0
        for token in path:
            grown = self.grow(node, token, source)
            if grown is None:
                return
            node = grown

    def ancestors(self) -> Tensor:
        """``[n, n]`` bool on the CPU: true where the column is an ancestor of the row,
        or the row itself.
        """
        count = len(self)
        if count == 1:
            return _ALONE
        rows = [bytearray(count)]
        rows[0][0] = 1
        for node, parent in enumerate(self.parents[1:], start=1):
            row = rows[parent][:]
            row[node] = 1
            rows.append(row)
        return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(count, count)

    def walk(self, drawn: Sequence[int]) -> list[int]:
        """The accepted nodes, root first: step to the child that carries the token drawn after each
        node.
        """
        path = [0]
        while (step := self.child(path[-1], drawn[path[-1]])) is not None:
            path.append(step)
        return path


@dataclass(frozen=True)
class Step:
    """What one verification pass added to the text.

    Attributes:
        tokens: the new tokens: the accepted draft and the one drawn after it.
        accepted: drafted tokens accepted by the verification.
        source: the draft source of the last accepted token; empty if none was accepted.
        nodes: nodes of the draft tree, the root included.
        seconds: wall time of the step, drafting included.
        leads: for each token the runner-up, and its lead over that in score; if asked for.
        choice: name of the drafter, where there are several.
        logprobs: a row for each token, see ``tswift.sampling.rule.row_type``; None if not asked
            for.
        drafted: most tokens drafted along a path, where that varies; None where it is always the
            method's depth.
        text: the characters that the tokens complete, if they were asked for; joined, those of
            all steps are the text.
    """

    tokens: tuple[int, ...]
    accepted: int
    source: str
    nodes: int
    seconds: float
    leads: tuple[tuple[int, float], ...] = ()
    choice: str = ""
    logprobs: NDArray[np.void] | None = field(default=None, compare=False)
    drafted: int | None = field(default=None, compare=False)
    text: str = field(default="", compare=False)


@dataclass
class Context:
    """A decode under way, as its draft sources see it.

    Attributes:
        text: prompt and generated tokens. The last one is the root of the next draft: known, not
            yet forwarded.
        sampler: the sampling rule, whose noise and penalty window drafting may use.
        kv: the cache, holding all of the text but the root: the full one, unless a draft is
            decoded.
        last: the last pass over the target; None if there was none.
        path: nodes of that pass that are in the text; the last one drew the root.
        logits: ``[n, V]`` of that pass; None if not computed yet, as after a prompt.
        digest: of each node of the path, what a :class:`LogitReader` keeps of its logits; None if
            that is to be asked.
        recorder: of the tokens' log-probabilities; None if nobody wants them.
        drafting, passing: seconds that the last step took to propose a tree, and from then on.
    """

    text: list[int]
    sampler: Sampler
    kv: KVBuffer
    last: Forwarded | None = None
    path: Sequence[int] = ()
    logits: Tensor | None = None
    digest: NDArray[np.float64] | None = None
    recorder: LogprobRecorder | None = None
    drafting: float = 0.0
    passing: float = 0.0

    @property
    def node(self) -> int:
        """The node of the last pass that drew the root."""
        return self.path[-1]

    @property
    def position(self) -> int:
        """The root's position."""
        return len(self.text) - 1


class Source:
    """Proposes how the text goes on. Whatever it proposes, the text does not change."""

    name = ""

    def start(self, context: Context) -> None:
        """Launch work on the device, and do what need not wait for it;
        all sources start before the first proposes.
        """

    def propose(self, tree: Any, context: Context) -> None:
        """Add candidates to a draft tree, or to the tree of candidates that is pruned to one."""
        raise NotImplementedError

    def draft_seconds(self, costs: PassCosts, context: Context) -> float:
        """Seconds that the last draft took by these costs."""
        return 0.0

    def may_pay(self, costs: PassCosts, context: Context) -> bool:
        """Whether drafts can be worth their time by these costs, here in this text."""
        return costs.saved(context.kv.length, _CHANCE) > WORTH_A_TRIAL

    def committed(self, context: Context, most: int) -> None:
        """Called when the text has grown, by prefill or by a step;
        the next step adds at most ``most`` tokens.
        """


class DeviceDraft(Protocol):
    """A draft tree that the device makes by itself, in a shape known in advance;
    used by one decode.

    Attributes:
        sizes: numbers of nodes that can be verified, rising from 1.
        sources: name of each node's draft source; empty for the root.
        target: the model whose pass drafts, perhaps a quantised copy.
    """

    sizes: Sequence[int]
    sources: Sequence[str]
    target: Target

    def sections(self) -> dict[str, int]:
        """Sizes of its sections, by name, of the block that the host sends in each step."""

    def begin(
        self, context: Context, host: dict[str, NDArray[np.generic]], device: dict[str, Tensor]
    ) -> None:
        """Start with a prefilled decode; ``host`` and ``device`` are the two copies of its
        sections.
        """

    def draft(self) -> None:
        """Program: write the candidates for the next tree into the state. It commits nothing."""

    def complete(self) -> None:
        """Program, before verification: add what came with the block."""

    def append(self, kv: KVBuffer, slots: Tensor, count: Tensor) -> None:
        """Program, after verification: the first ``count`` ``[1]`` of these slots ``[m]`` hold
        committed tokens now.
        """

    def ready(self, most: int) -> bool:
        """Whether the next draft needs nothing of the host,
        if at most so many tokens are committed before it.
        """

    def prepare(self, context: Context) -> None:
        """On the host: write the next block while the device drafts."""

    def committed(self, count: int) -> None:
        """On the host: ``count`` tokens were committed."""

    def shape(self, nodes: int) -> DraftTree:
        """A tree of that shape, without tokens."""


class TextHistory(Protocol):
    """What is known of all the text, whichever sources draft."""

    def prefilled(self, context: Context, forwarded: Forwarded) -> None:
        """Add the next chunk of the prompt."""

    def committed(self, context: Context) -> None:
        """Add what has been committed since the last call."""


@runtime_checkable
class LogitReader(Protocol):
    """A history of logits.

    On CUDA a step's program makes of them what it keeps: the host fetches no whole rows.

    Attributes:
        columns: numbers that it keeps of a row.
    """

    columns: int

    def digest(self, logits: Tensor) -> Tensor:
        """``[n, columns]`` float64 of logits ``[n, V]``, without a wait."""


@dataclass
class Drafter:
    """A method's sources, in order of precedence.

    Attributes:
        sources: none for plain decoding.
        depth: most tokens drafted along a path, by which alpha is divided.
        limit: most nodes of a draft tree, root included.
        histories: of the text, if sources use them.
        host_proposes_too: whether the host proposes some trees although there is a draft on the
            device.
        varies: whether how far it drafts along a path differs from step to step.
    """

    sources: Sequence[Source] = ()
    depth: int = 0
    limit: int = 1
    histories: Sequence[TextHistory] = ()
    varies: bool = field(default=False, kw_only=True)
    host_proposes_too = False

    def propose(self, context: Context, max_new: int) -> DraftTree:
        """The draft tree of the next step, which is to add ``max_new`` tokens at most."""
        tree = DraftTree(context.text[-1], self.limit, max_new - 1)
        self.fill(tree, context)
        return tree

    def fill(self, tree: DraftTree, context: Context) -> None:
        """Have all sources propose."""
        for source in self.sources:
            source.start(context)
        for source in self.sources:
            source.propose(tree, context)

    def draft_seconds(self, costs: PassCosts, context: Context) -> float:
        """Seconds that the last draft took by these costs."""
        return sum(source.draft_seconds(costs, context) for source in self.sources)

    def may_pay(self, costs: PassCosts, context: Context) -> bool:
        """Whether the first source's drafts can be worth their time by these costs, here in this
        text, whatever the others add; plain decoding always is.
        """
        return not self.sources or self.sources[0].may_pay(costs, context)

    def on_device(self, state: DeviceState) -> DeviceDraft | None:
        """A draft made by the device alone; None if the host proposes all trees."""
        return None

    def device_drafts(self, on: bool = False) -> bool:
        """Whether the next tree is that of the draft on the device, where there is one.

        ``on``: and the tree after that, too, however many tokens the next step adds; the device may
        then begin it without the host.
        """
        return True

    def begin_device_step(self, context: Context) -> bool:
        """Begin a step, and return :meth:`device_drafts`;
        where that is true, this is called in the place of :meth:`propose`.
        """
        return True

    def prefilled(self, context: Context, forwarded: Forwarded) -> None:
        """Called after the pass over each chunk of the prompt."""
        for history in self.histories:
            history.prefilled(context, forwarded)

    @property
    def choice(self) -> str:
        """Name of the drafter that drafted last, where there are several."""
        return ""

    def committed(self, context: Context) -> None:
        """Called after prefill and after each step."""
        self.learn(context)
        self.keep_up(context, self.depth + 1)

    def learn(self, context: Context) -> None:
        """Learn from what became of the last draft."""

    def keep_up(self, context: Context, most: int) -> None:
        """Tell every source that the text has grown; the next step adds at most ``most`` tokens."""
        for history in self.histories:
            history.committed(context)
        for source in self.sources:
            source.committed(context, most)
