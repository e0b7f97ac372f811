"""Default draft trees by device, and how many nodes a pass takes as the text grows.

A CUDA pass reads each key once for all rows of its KV head; a row is one query head at one node. Up to about 128 rows
the matrix products keep up with the memory, beyond that every row costs. So the fewer query heads share a KV head, the
larger the tree. That is an estimate: it has not been measured on a GPU. On a CPU every node costs: two more than eight
add 2% to a step's tokens and more to its time.
"""

from __future__ import annotations

import torch

from tswift.attention.layout import ROWS

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
