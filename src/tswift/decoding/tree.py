"""The draft tree: candidate continuations of the text in one trie, so that a shared prefix is verified once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor


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
