"""Whether the kernel of the recurrence leaves what plain PyTorch leaves, in random trees."""

from __future__ import annotations

from functools import cache
from random import Random

import torch
from torch import Tensor

from tswift.checking import Compared, kernel_fault
from tswift.forward.cuda.recurrence_triton import (
    path_plan,
    step_path,
    step_states,
    step_tree,
    tree_plan,
)
from tswift.forward.recurrence import Rows, step_plainly

# heads of keys, heads, keys, values, and whether what is known is corrected: as in Qwen3.5, Mamba2
_TRIED = ((16, 32, 128, 128, True), (1, 24, 128, 64, False))
_NODES = 9


def stepped(
    nodes: int, sizes: tuple[int, int, int, int, bool], random: Random, device: torch.device
) -> Compared:
    """What kernel and operators make of random rows in a random tree: by the host's plan, by plans
    that the device makes, and along a path of which some nodes are accepted.
    """
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
    accepted = random.randint(0, nodes)
    above, path, count = (
        torch.tensor(each, device=device) for each in (parents, order, [accepted])
    )
    after, moved, plain_after, plain_moved = state.repeat(4, 1, 1, 1)
    outs = step_states(rows, state, order, parents, after)
    ours = [outs, after, step_tree(rows, state, tree_plan(above)), moved]
    step_path(rows, moved, path_plan(path), count)
    outs = step_plainly(rows, state, order, parents, plain_after)
    plain = [outs, plain_after, step_plainly(rows, state, range(nodes), parents), plain_moved]
    if accepted:
        step_plainly(rows, plain_moved, order[:accepted], range(-1, accepted - 1), plain_moved)
    return "states", ours, plain


@cache
def fault(device: torch.device) -> str | None:
    """Why the kernel is not to be used on a device; None if it is. It is tried once."""
    random = Random(0)
    tried = (stepped(_NODES, sizes, random, device) for sizes in _TRIED)
    return kernel_fault("states", tried, device)
