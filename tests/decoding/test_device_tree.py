"""Trees on the device: kernels, interpreted on the CPU,
leave the integers that PyTorch's operators leave.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.decoding.test_device_step import PARAMS, ROOMY, drafter
from tests.forward.test_fused_layers import Operators
from tests.forward.test_passes import static_target
from tests.fuzzing import few
from tests.helpers import CPU, decode_steps, needs_triton, random_prompt, tokens_of
from tswift import checking
from tswift.checking import difference
from tswift.decoding import device_step, device_tree
from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.loop import Decoding
from tswift.sampling.rule import Sampler

check = pytest.importorskip("tswift.decoding.device_tree_check", reason="triton is not installed")
kernels = pytest.importorskip(
    "tswift.decoding.device_tree_triton", reason="triton is not installed"
)
pytestmark = needs_triton


def test_larger_trees_are_left_to_pytorch():
    assert difference([check.walked(kernels.MOST_NODES + 3, 5, Random(0), CPU)]) is None


def test_random_trees_have_accepted_paths():
    """Else the comparison says little."""
    lengths = []
    sampler = Sampler(PARAMS, 0, 50, CPU)
    for seed in range(60):
        state, drawn, control = check.random_state(32, 4, Random(seed), CPU)
        path = device_tree.Path(5, torch.zeros(12, dtype=torch.int64))
        device_tree.walk(state, device_tree.lay_out(state, 32, 4), drawn, control, sampler, path)
        lengths.append(path.count.item())
    assert {*lengths} == {0, 1, 2, 3, 4, 5}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ar", "tokenswift"])
def test_a_decode_with_kernels_is_the_one_without(monkeypatch, method):
    found = []
    for operators in (device_tree, kernels):
        monkeypatch.setattr(device_step, "_tree_operators", lambda target, own=operators: own)
        target = static_target()
        steps = decode_steps(
            target, drafter(method, target, ROOMY), random_prompt(90), PARAMS, 3, 30
        )
        found.append((tokens_of(steps), [(step.accepted, step.source) for step in steps]))
    assert found[0] == found[1]


@pytest.mark.slow
def test_kernels_that_lie_are_not_used(monkeypatch):
    right = kernels.walk

    def wrong(state, tree, drawn, control, sampler, path):
        right(state, tree, drawn, control, sampler, path)
        path.slots[-1] += len(drawn) == 32

    monkeypatch.setattr(check, "_REPEATS", 1)  # the interpreter is slow
    monkeypatch.setattr(kernels, "walk", wrong)
    monkeypatch.setattr(checking, "KERNELS", {})
    said = "walks of 32-node trees differ from plain ones by up to 1"
    assert check.fault(CPU) == said
    monkeypatch.setattr(kernels, "walk", right)
    assert check.fault(CPU) == said  # it is not tried again
    checking.KERNELS.clear()
    assert check.fault(CPU) is None


@few
@given(st.integers(1, 128), st.integers(1, 31), st.randoms(use_true_random=False))
def test_kernels_do_what_operators_do(nodes, depth, random):
    compared = check.walked(nodes, depth if nodes > 1 else 0, random, CPU)
    assert difference([compared]) is None


@pytest.mark.parametrize(("method", "most"), [("ar", 5), ("tokenswift", 16)])
def test_a_verification_is_few_operators_beside_its_pass(monkeypatch, method, most):
    """Each takes a GPU 1.8 us, whatever it does;
    a commit and the two kernels here count as one each.
    """
    operators = Operators()
    monkeypatch.setattr(device_step, "_tree_operators", lambda target: kernels)
    for name in ("lay_out", "walk"):
        monkeypatch.setattr(kernels, name, operators.counting(name, getattr(kernels, name)))
    target = static_target()
    for place, name in (
        (target.backend, "append"),
        (target, "compute_static"),
        (target, "logits"),
        (Sampler, "draw_rows"),
    ):
        monkeypatch.setattr(place, name, operators.counting(name, getattr(place, name)))
    decoding = Decoding(target, random_prompt(90), PARAMS, 3, drafter(method, target, ROOMY), 60)
    verify = DeviceStepper._verify

    def counted(*given):
        operators.on = True
        out = verify(*given)
        operators.on = False
        return out

    monkeypatch.setattr(DeviceStepper, "_verify", counted)
    decoding.prefill()
    with operators:
        # the last one: none is launched ahead of the host
        decoding._stepper.step(1 if method == "ar" else 60)
    assert sum(operators.seen.values()) - 3 <= most
