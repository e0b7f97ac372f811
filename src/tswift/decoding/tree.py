"""The draft tree: which tokens are verified together, and the walk along the ones that were drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    pass


class DraftTree:
    """A trie of at most ``limit`` tokens, the root included, and ``depth`` tokens along a path below it.

    Node 0 is the root: the text's last token, known but not yet forwarded. Parents come before their children.

    Attributes:
        tokens, parents, depths: one entry per node.
        sources: name of the draft source that proposed the node first; empty for the root.
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
        """The child of ``node`` that carries ``token``, added if missing; None if the tree is full or too deep."""
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
        count = len(self)
        rows = [bytearray(count)]
        rows[0][0] = 1
        for node, parent in enumerate(self.parents[1:], start=1):
            row = rows[parent][:]
            row[node] = 1
            rows.append(row)
        return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(count, count)

    def walk(self, drawn: Sequence[int]) -> list[int]:
        """The accepted nodes, root first: step to the child that carries the token drawn after each node."""
        path = [0]
        while (step := self.child(path[-1], drawn[path[-1]])) is not None:
            path.append(step)
        return path
