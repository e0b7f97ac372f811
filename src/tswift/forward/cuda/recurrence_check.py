"""Whether the kernel of the recurrence leaves what plain PyTorch leaves, in random trees."""

from __future__ import annotations

from functools import cache, partial
from random import Random

import torch
from torch import Tensor

from tswift.forward.cuda.recurrence_triton import (
    path_plan,
    step_path,
    step_states,
    step_tree,
    tree_plan,
)
from tswift.forward.recurrence import Rows, step_plainly
from tswift.remembered import kernel_fault

# heads of keys, heads, keys, values, and whether what is known is corrected: as in Qwen3.5, Mamba2
_TRIED = ((16, 32, 128, 128, True), (1, 24, 128, 64, False))
_NODES = 9


def differ(
    nodes: int, sizes: tuple[int, int, int, int, bool], random: Random, device: torch.device
) -> bool:
    """Whether kernel and operators leave something else after random rows in a random tree."""
    key_heads, heads, keys, values, corrects = sizes
    source = torch.Generator().manual_seed(random.getrandbits(63))

    def drawn(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=source) - 0.5).to(device)

    queries, known = drawn(2, nodes, key_heads, keys)
    decays, rates = drawn(2, nodes, heads)
    rows = Rows(queries, known, drawn(nodes, heads, values), decays, rates, corrects)
    state = drawn(heads, keys, values)
    order = random.sample(range(nodes), nodes)
    parents = [
        max(-1, node - random.randint(1, 3))
        if random.random() < 0.6
        else random.randrange(-1, node)
        for node in range(nodes)
    ]
    left = []
    for step in (step_states, step_plainly):
        after = torch.empty_like(state)
        left.append([step(rows, state, order, parents, after), after])
    # the same by plans that the device makes, and a path of which some nodes are accepted
    accepted = random.randint(0, nodes)
    left[0].append(step_tree(rows, state, tree_plan(torch.tensor(parents, device=device))))
    left[1].append(step_plainly(rows, state, range(nodes), parents))
    for kept, plain in zip(left, (False, True), strict=True):
        kept.append(state.clone())
        if not plain:
            plan = path_plan(torch.tensor(order, device=device))
            step_path(rows, kept[-1], plan, torch.tensor([accepted], device=device))
        elif accepted:
            step_plainly(rows, state, order[:accepted], range(-1, accepted - 1), kept[-1])
    return not all(torch.equal(one, other) for one, other in zip(*left, strict=True))


@cache
def fault(device: torch.device) -> str | None:
    """Why the kernel is not to be used on a device; None if it is. It is tried once."""
    return kernel_fault("states", partial(_wrong, device), device)


def _wrong(device: torch.device) -> str | None:
    random = Random(0)
    wrong = any(differ(_NODES, sizes, random, device) for sizes in _TRIED)
    return "a kernel steps states otherwise than PyTorch" if wrong else None
