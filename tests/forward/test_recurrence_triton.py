"""The kernel of recurrent layers, interpreted on the CPU: the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from benchmarks.architectures import ARCHITECTURES
from tests.helpers import CPU, needs_triton, random_prompt, random_tree, seeded
from tests.lossless.models import network
from tswift import checking
from tswift.attention.sdpa import BatchInvariantAttention
from tswift.caches import FullKV
from tswift.checking import difference
from tswift.forward import recurrent
from tswift.forward.passes import Nodes
from tswift.forward.recurrence import Rows
from tswift.forward.recurrent import step_states
from tswift.forward.target import Target
from tswift.forward.text import prefill

check = pytest.importorskip(
    "tswift.forward.cuda.recurrence_check", reason="triton is not installed"
)
kernels = pytest.importorskip(
    "tswift.forward.cuda.recurrence_triton", reason="triton is not installed"
)
pytestmark = needs_triton
# heads of keys, heads, keys, values, and whether what is known is corrected
SIZES = [(2, 4, 24, 80, True), (1, 3, 16, 8, False), (1, 1, 1, 1, True), (1, 2, 128, 128, True)]


@pytest.fixture
def on_a_device(monkeypatch) -> Iterator[None]:
    """Have the kernel step states here, which is tried on few."""
    monkeypatch.setattr(recurrent, "recurrence_library", lambda: None)
    monkeypatch.setattr(recurrent, "_KERNEL", ("cpu",))
    monkeypatch.setattr(check, "_TRIED", ((1, 2, 8, 8, True),))
    monkeypatch.setattr(checking, "KERNELS", {})
    check.fault.cache_clear()
    yield
    check.fault.cache_clear()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("nodes", [1, 7])
def test_it_does_what_operators_do(sizes, nodes):
    tried = 1 if sizes[2] * sizes[3] > 1000 else 3  # the interpreter is slow
    compared = (check.stepped(nodes, sizes, Random(seed), CPU) for seed in range(tried))
    assert difference(compared) is None


def test_a_tree_a_path_and_single_steps_have_the_same_bits(on_a_device):
    """The state may be stepped in place."""
    source = seeded(3)
    parents = [-1, 0, 0, 1, 3, 2, -1]
    count = len(parents)
    queries, keys = torch.rand(2, count, 2, 24, generator=source) - 0.5
    contents = torch.rand(count, 4, 80, generator=source) - 0.5
    decays, rates = torch.rand(2, count, 4, generator=source)
    rows = Rows(queries, keys, contents, decays, rates)
    state = torch.randn(4, 24, 80, generator=source)
    tree = step_states(rows, state, range(count), parents)
    for path in ([0, 1, 3, 4], [0, 2, 5], [6]):
        chain, single = state.clone(), state.clone()
        found = step_states(rows, chain, path, range(-1, len(path) - 1), chain)
        singly = [step_states(rows, single, [node], [-1], single) for node in path]
        assert torch.equal(found, tree[path])
        assert torch.equal(found, torch.cat(singly))
        assert torch.equal(chain, single)
        assert not torch.equal(chain, state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen3.5 to 3.8 (gated delta nets)", "Bamba (Mamba2)"])
def test_a_models_text_has_the_same_bits_by_the_kernel(on_a_device, kind):
    """Prompt, a tree, and what is replayed of it."""
    if not ARCHITECTURES[kind].there:
        pytest.skip("this transformers has no such model")
    tree = random_tree(7, Random(2))
    path = [6]
    while path[0]:
        path.insert(0, tree.parents[path[0]])
    found = []
    for devices in (("cpu",), ()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recurrent, "_KERNEL", devices)
            target = Target(network(kind, torch.float32), BatchInvariantAttention)
            kv = FullKV(target.kv_shape, 40)
            prefill(target, random_prompt(20), kv)
            nodes = torch.tensor(tree.tokens), torch.tensor(tree.depths) + 20
            hidden = target.forward(Nodes(*nodes, kv, tree.ancestors())).hidden
            kv.commit(path)
            assert kv.states is not None
            found.append((hidden, kv.states.matrices.clone()))
    assert check.fault.cache_info().currsize == 1  # it was tried, and used
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_only_what_it_was_tried_on_is_captured(on_a_device):
    assert recurrent.device_kernel(CPU, torch.float32) is kernels
    assert recurrent.device_kernel(CPU, torch.float64) is None
    assert recurrent.device_kernel(torch.device("meta"), torch.float32) is None


def test_a_kernel_that_lies_is_not_used(on_a_device, monkeypatch):
    right = kernels.step_states

    def wrong(rows, state, nodes, parents, after=None):
        return right(rows, state, nodes, parents, after) + (len(nodes) > 1) * 1e-6

    monkeypatch.setattr(check, "step_states", wrong)
    assert recurrent.kernel_fault(CPU).startswith("states differ from plain ones by up to ")
    assert recurrent.device_kernel(CPU, torch.float32) is None  # so no pass is captured
    used = []
    monkeypatch.setattr(kernels, "step_states", lambda *given: used.append(given))
    ones = torch.ones(1, 1, 8)
    step_states(Rows(ones, ones, ones, *torch.ones(2, 1, 1)), torch.ones(1, 8, 8), [0], [-1])
    assert not used
