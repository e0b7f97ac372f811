"""Draft trees that pay, by the kind of device.

On a GPU a pass over a hundred nodes costs little more than one over a single node, so the paper's tree stands. On a CPU
every node costs: two more than eight add 2% to a step's tokens and more to its time.
"""

from __future__ import annotations

import torch

_TREES: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {"medusa": (3, 3, 3), "tokenswift": (1, 3, 3, 3)},
    "cpu": {"medusa": (2, 2, 2, 2), "tokenswift": (1, 2, 2, 2, 2)},
}
_NODES = {"cuda": 128, "cpu": 8}


def usual_tree(method: str, device: torch.device, levels: int) -> tuple[int, ...]:
    """Candidates per level of a method's tree, if nothing else is said: at most ``levels``."""
    return _TREES[_kind(device)][method][:levels]


def usual_nodes(device: torch.device) -> int:
    """Most nodes of such a tree, root included."""
    return _NODES[_kind(device)]


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "cuda"
