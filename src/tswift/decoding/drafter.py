"""What drafting and verification share: the draft tree, the decode under way, its steps, and the draft sources.

A method is a list of sources; plain decoding has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tswift.decoding.sampling import Sampler
from tswift.kv.cache import KVBuffer
from tswift.models.passes import Forwarded, PassCosts

if TYPE_CHECKING:
    from tswift.decoding.device_step import DeviceState
    from tswift.models.target import Target


AcceptFn = Callable[["DraftTree", Sequence[int]], list[int]]  # as DraftTree.walk
REUSE = "reuse"  # the source of reused n-grams, whose accepted tokens are counted apart


class DraftTree:
    """A trie of drafted tokens below the last token of the text.

    Node 0 is the root: the text's last token, known but not yet forwarded. Parents come before their children.

    Args:
        root: the text's last token.
        limit: most nodes the tree takes, the root included.
        depth: most tokens along a path below the root.

    Attributes:
        tokens, parents, depths: one entry per node.
        sources: which draft source proposed the node first, by name; empty for the root.
        depth: most tokens along a path below the root.
    """

    def __init__(self, root: int, limit: int = 128, depth: int = 128) -> None:
        self.tokens, self.parents, self.depths, self.sources = [root], [-1], [0], [""]
        self._children: dict[tuple[int, int], int] = {}
        self._limit, self.depth = limit, depth

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def full(self) -> bool:
        """Whether no node can be added any more."""
        return len(self) >= self._limit

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that carries ``token``, if there is one."""
        return self._children.get((node, token))

    def grow(self, node: int, token: int, source: str) -> int | None:
        """The child of ``node`` that carries ``token``, made if need be; None if the tree is full or too deep."""
        known = self.child(node, token)
        if known is not None:
            return known
        if self.full or self.depths[node] >= self.depth:
            return None
        self.tokens.append(token)
        self.parents.append(node)
        self.depths.append(self.depths[node] + 1)
        self.sources.append(source)
        self._children[node, token] = len(self) - 1
        return len(self) - 1

    def add(self, path: Iterable[int], source: str) -> None:
        """Add a path of tokens below the root, as far as the limit allows."""
        node = 0
        for token in path:
            grown = self.grow(node, token, source)
            if grown is None:
                return
            node = grown

    def ancestors(self) -> Tensor:
        """``[n, n]`` bool on the CPU: true where the column is an ancestor of the row, or the row itself."""
        lines = [1]  # of each node: the node and its ancestors, as bits
        for node, parent in enumerate(self.parents[1:], start=1):
            lines.append(lines[parent] | 1 << node)
        count = len(self)
        size = -(-count // 8)  # bytes
        lined = np.frombuffer(b"".join(line.to_bytes(size, "little") for line in lines), np.uint8)
        bits = np.unpackbits(lined.reshape(count, size), axis=1, count=count, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def walk(self, drawn: Sequence[int]) -> list[int]:
        """The nodes that verification accepts, root first: step to the child that carries each node's drawn token.

        Args:
            drawn: for each node, the token the sampling rule drew after it.
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
        leads: for each token the runner-up, and its lead over that in score; where they were asked for.
        choice: which of several drafters drafted; empty where there is but one.
    """

    tokens: tuple[int, ...]
    accepted: int
    source: str
    nodes: int
    seconds: float
    leads: tuple[tuple[int, float], ...] = ()
    choice: str = ""


@dataclass
class Context:
    """A decode under way, as its draft sources see it.

    Attributes:
        text: prompt and generated tokens. The last one is the root of the next draft: known, not yet forwarded.
        sampler: the sampling rule, whose noise and penalty window drafting may use.
        kv: the cache, holding all of the text but the root: the full one, unless it is a draft that is being decoded.
        last: the last pass over the target; None if there was none.
        path: which nodes of that pass are in the text; the last one drew the root.
        logits: ``[n, V]`` of that pass; None if nobody has asked for them yet, as after a prompt.
    """

    text: list[int]
    sampler: Sampler
    kv: KVBuffer
    last: Forwarded | None = None
    path: Sequence[int] = ()
    logits: Tensor | None = None

    def aside(self, kv: KVBuffer) -> Context:
        """The same decode gone on with over another cache; its draws leave no trace, but the text is the same list."""
        return replace(self, sampler=self.sampler.copy(), kv=kv)

    @property
    def node(self) -> int:
        """Which node of the last pass drew the root."""
        return self.path[-1]

    @property
    def position(self) -> int:
        """The root's position."""
        return len(self.text) - 1


class Draft(Protocol):
    """What sources add to: a draft tree, or a sketch of one."""

    @property
    def tokens(self) -> Sequence[int]:
        """Of the nodes; the root is the first."""

    @property
    def depths(self) -> Sequence[int]:
        """Of the nodes."""

    @property
    def depth(self) -> int:
        """Most tokens along a path below the root."""

    def add(self, path: Iterable[int], source: str) -> None:
        """Add a path of tokens below the root."""


class Source(Protocol):
    """Something that proposes how the text goes on. Whatever it proposes, the text does not change."""

    def start(self, context: Context) -> None:
        """Give the device what it can work on already, and do what need not wait for it.

        All sources are started before the first is asked to propose, so what a host does here hides behind the device.
        """

    def propose(self, tree: DraftTree, context: Context) -> None:
        """Add candidate paths below the root."""

    def price(self, costs: PassCosts, context: Context) -> float:
        """Seconds that a draft takes by these costs."""

    def committed(self, context: Context, most: int) -> None:
        """Take notice of the text having grown, by prefill or by a step; the next step commits at most ``most``."""


class DeviceDraft(Protocol):
    """A draft tree that the device makes by itself, in a shape known in advance; used by one decode.

    Attributes:
        sizes: the numbers of nodes, rising, that a verification can be asked for; the first is 1.
        sources: of each node the draft source, by name; empty for the root.
        target: the model whose pass drafts, perhaps a quantised copy; where its graphs fail, others' need not.
    """

    sizes: Sequence[int]
    sources: Sequence[str]
    target: Target

    def sections(self) -> dict[str, int]:
        """How many integers it wants of the block that the host sends in each step, by name."""

    def begin(self, context: Context, host: dict[str, NDArray[Any]], device: dict[str, Tensor]) -> None:
        """Start with a prefilled decode; ``host`` and ``device`` are the two ends of its sections."""

    def draft(self) -> None:
        """Program: write the candidates for the next tree into the state. It commits nothing."""

    def complete(self) -> None:
        """Program, before verification: add what came with the block."""

    def append(self, kv: KVBuffer, slots: Tensor, count: Tensor) -> None:
        """Program, after verification: the first ``count`` ``[1]`` of these slots ``[m]`` hold committed tokens now."""

    def prepare(self, context: Context) -> None:
        """On the host: write the next block while the device drafts."""

    def committed(self, count: int) -> None:
        """On the host: so many tokens were committed."""

    def nodes(self, length: int) -> int:
        """How many nodes to verify with ``length`` tokens in the cache; one of ``sizes``."""

    def shape(self, nodes: int) -> DraftTree:
        """The tree's shape; its tokens mean nothing."""


class TextMemory(Protocol):
    """What sources know of a text, and share."""

    def prefilled(self, hidden: Tensor, sampler: Sampler) -> None:
        """Take in the next chunk of the prompt's last hidden states ``[n, H]``."""

    def committed(self, context: Context) -> None:
        """Take in what has been committed since the last call."""


@dataclass
class Drafter:
    """A method's sources, in order of precedence.

    Attributes:
        sources: none for plain decoding.
        depth: most tokens drafted along a path, by which alpha is divided.
        limit: most nodes of a draft tree, root included.
        memory: of the text, if one of the sources recalls it.
    """

    sources: Sequence[Source] = ()
    depth: int = 0
    limit: int = 1
    memory: TextMemory | None = None

    def propose(self, context: Context, wanted: int) -> DraftTree:
        """The draft tree of the next step, which is to add ``wanted`` tokens at most."""
        tree = DraftTree(context.text[-1], self.limit, wanted - 1)
        for source in self.sources:
            source.start(context)
        for source in self.sources:
            source.propose(tree, context)
        return tree

    def draft_cost(self, costs: PassCosts, context: Context) -> float:
        """Seconds that a draft takes by these costs."""
        return sum(source.price(costs, context) for source in self.sources)

    def on_device(self, state: DeviceState) -> DeviceDraft | None:
        """How the device drafts by itself with this state; None if the host has to propose trees."""
        return None

    def prefilled(self, context: Context, forwarded: Forwarded) -> None:
        """Take notice of the pass over the next chunk of a prompt."""
        if self.memory is not None:
            self.memory.prefilled(forwarded.hidden, context.sampler)

    @property
    def choice(self) -> str:
        """Which of several drafters drafted last; empty where there is but one."""
        return ""

    def committed(self, context: Context) -> None:
        """Take notice of a step."""
        self.learn(context)
        self.keep_up(context, self.depth + 1)

    def learn(self, context: Context) -> None:
        """See what became of the last draft."""

    def keep_up(self, context: Context, most: int) -> None:
        """Tell every source that the text has grown, and will by ``most`` tokens at most in the next step."""
        if self.memory is not None:
            self.memory.committed(context)
        for source in self.sources:
            source.committed(context, most)
