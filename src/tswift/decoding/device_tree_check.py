"""Whether the kernels that walk trees do what PyTorch's operators do."""

from __future__ import annotations

from dataclasses import fields
from functools import cache, partial
from random import Random

import torch
from torch import Tensor

from tswift.decoding import device_tree
from tswift.decoding.device_tree import Path, TreeState
from tswift.decoding.device_tree_triton import lay_out, walk
from tswift.remembered import kernel_fault
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
    tokens = [random.randrange(_WORDS)]
    parents = [0]
    depths = [0]
    drawn = [-1 if random.random() < 0.3 else random.randrange(_WORDS) for _ in range(nodes)]
    for _ in range(1, nodes):
        parent = (
            max(0, len(tokens) - random.randint(1, 3))
            if random.random() < 0.6
            else random.randrange(len(tokens))
        )
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
    nodes_of, above, position, last = (
        torch.tensor(each, device=device) for each in (tokens, parents, [held], [0])
    )
    length = torch.tensor(held, dtype=torch.int32, device=device)
    state = TreeState(nodes_of, above, position, length, last)
    return state, torch.tensor(drawn, device=device), torch.tensor([wanted, forced], device=device)


def differ(nodes: int, depth: int, random: Random, device: torch.device) -> bool:
    """Whether kernels and operators leave something else after a walk down a random tree."""
    given, drawn, control = random_state(nodes, depth, random, device)
    left = []
    longest = min(depth + 1, nodes)
    for ours in (device_tree.lay_out, device_tree.walk), (lay_out, walk):
        state = TreeState(*(getattr(given, field.name).clone() for field in fields(given)))
        path = Path(longest, torch.zeros(2 + 2 * longest, dtype=torch.int64, device=device))
        tree = ours[0](state, nodes, depth)
        sampler = Sampler(SamplingParams(window=24), 0, _WORDS, device)
        ours[1](state, tree, drawn, control, sampler, path)
        moved = state.tokens, state.position, state.length, state.last
        left.append([*moved, *tree, sampler.newest, path.result, path.places, path.slots])
    return not all(torch.equal(one, other) for one, other in zip(*left, strict=True))


@cache
def fault(device: torch.device) -> str | None:
    """Why the kernels are not to be used on a device; None if they are. They are tried once."""
    return kernel_fault("trees", partial(_wrong, device), device)


def _wrong(device: torch.device) -> str | None:
    random = Random(0)
    for nodes, depth in _TRIED:
        if any(differ(nodes, depth, random, device) for _ in range(_REPEATS)):
            return f"kernels walk trees of {nodes} nodes otherwise than PyTorch"
    return None
