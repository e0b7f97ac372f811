"""Whether the kernels that walk trees do what PyTorch's operators do."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from types import ModuleType

import torch
from torch import Tensor

from tswift.checking import Compared, kernel_fault
from tswift.decoding import device_tree, device_tree_triton
from tswift.decoding.device_tree import Path, TreeState
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import Sampler

_TRIED = ((1, 0), (7, 3), (32, 4), (128, 31))  # nodes and depths of trees
_REPEATS = 8
_WORDS = 50  # of a vocabulary


def random_state(
    nodes: int, depth: int, random: Random, device: torch.device
) -> tuple[TreeState, Tensor, Tensor]:
    """A random tree in a text, what is drawn after its nodes, and what a walk is to do;
    paths are often accepted.
    """
    tokens, parents, depths = [random.randrange(_WORDS)], [0], [0]
    drawn = [-1 if random.random() < 0.3 else random.randrange(_WORDS) for _ in range(nodes)]
    for node in range(1, nodes):
        near = random.random() < 0.6
        parent = max(0, node - random.randint(1, 3)) if near else random.randrange(node)
        while depths[parent] >= depth:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1)
        tokens.append(random.choice((drawn[parent], drawn[parent], random.randrange(-1, _WORDS))))
    forced = random.randrange(nodes) if random.random() < 0.2 else -1
    wanted = random.choice((0, 1, 2, depth + 1))
    if forced >= 0:
        wanted = depths[forced] + 1
    held = random.randrange(200_000)
    made = [
        torch.tensor(each, device=device)
        for each in (tokens, parents, [held], held, [0], drawn, [wanted, forced])
    ]
    made[3] = made[3].int()
    return TreeState(*made[:5]), made[5], made[6]


def walked(nodes: int, depth: int, random: Random, device: torch.device) -> Compared:
    """What kernels and operators leave after a walk down a random tree."""
    given, drawn, control = random_state(nodes, depth, random, device)
    longest = min(depth + 1, nodes)

    def left(by: ModuleType) -> list[Tensor]:
        state = deepcopy(given)
        path = Path(longest, torch.zeros(2 + 2 * longest, dtype=torch.int64, device=device))
        tree = by.lay_out(state, nodes, depth)
        sampler = Sampler(SamplingParams(window=24), 0, _WORDS, device)
        by.walk(state, tree, drawn, control, sampler, path)
        return [*vars(state).values(), *tree, sampler.newest, path.result, path.places, path.slots]

    return f"walks of {nodes}-node trees", left(device_tree_triton), left(device_tree)


def fault(device: torch.device) -> str | None:
    """Why the kernels are not to be used on a device; None if they are. They are tried once."""
    random = Random(0)
    tried = (walked(*size, random, device) for size in _TRIED for _ in range(_REPEATS))
    return kernel_fault("trees", tried, device)
