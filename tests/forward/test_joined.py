"""Linear layers with the same input as one product: the same outputs, the same weights."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.architectures import ARCHITECTURES
from tests.forward.test_passes import OPTIONS, PARAMS
from tests.helpers import decode_steps, drafter_of, random_prompt, tiny_llama, tokens_of
from tests.rows import every_row
from tswift.errors import InputError
from tswift.forward.adapting import wrap_model
from tswift.forward.joined import JoinedLinear, join, separate
from tswift.models.checkpoint import weights_hash


class Block(nn.Module):
    """An attention's and an MLP's linear layers, called as transformers' models call theirs."""

    def __init__(self, dtype: torch.dtype = torch.float64, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        for name, size in {
            "q_proj": 24,
            "k_proj": 8,
            "v_proj": 8,
            "gate_proj": 40,
            "up_proj": 40,
        }.items():
            setattr(self, name, nn.Linear(16, size, bias and len(name) == 6, dtype=dtype))

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            self.q_proj(given),
            self.k_proj(given),
            self.v_proj(given),
            self.gate_proj(given),
            self.up_proj(given),
        )

    def joined(self) -> list[str]:
        return [name for name, layer in self.named_children() if isinstance(layer, JoinedLinear)]


def rows(count: int, dtype: torch.dtype = torch.float64, width: int = 16) -> torch.Tensor:
    return torch.randn(1, count, width, generator=torch.Generator().manual_seed(2)).to(dtype)


def near(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(found, wanted)


def joined_layers(network: nn.Module) -> list[JoinedLinear]:
    return [module for module in network.modules() if isinstance(module, JoinedLinear)]


def products(network: nn.Module) -> list[nn.Linear]:
    return [layer.product for layer in joined_layers(network) if layer.product is not None]


def held(network: nn.Module) -> int:
    """Bytes of all weights, those of products included; what is shared counts once."""
    weights = [
        *network.parameters(),
        *(weight for each in products(network) for weight in each.parameters()),
    ]
    return sum(
        {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in weights
        }.values()
    )


@pytest.mark.parametrize(
    ("dtype", "count", "bias"), [(torch.float64, 7, True), (torch.bfloat16, 1, False)]
)
def test_the_same_products_of_the_same_weights(dtype: torch.dtype, count: int, bias: bool) -> None:
    block = Block(dtype, bias)
    given = rows(count, dtype)
    wanted = block(given)
    before = held(block)
    state = deepcopy(block.state_dict())
    join(block)
    assert (len(block.joined()), len(products(block)), held(block)) == (5, 2, before)
    near(block(given), wanted)
    assert all(layer.handed is None for layer in joined_layers(block))
    assert list(block.state_dict()) == list(state)
    assert all(torch.equal(weight, state[name]) for name, weight in block.state_dict().items())
    changed = {name: weight * 2 for name, weight in state.items()}
    plain = Block(dtype, bias)
    for each in (block, plain):  # in place
        each.load_state_dict(changed)
    near(block(given), plain(given))


def test_layers_that_are_called_otherwise_compute_by_themselves() -> None:
    block = Block()
    given = rows(3)
    other = rows(4)
    plain = deepcopy(block)
    join(block)
    for name in ("k_proj", "v_proj", "up_proj"):  # nothing came before
        assert torch.equal(block.get_submodule(name)(given), plain.get_submodule(name)(given))
    block.q_proj(given)
    for each in (other, given.clone(), given):
        # what was handed over is for one input, and for one call
        assert torch.equal(block.k_proj(each), plain.k_proj(each))
    block(given)
    block.up_proj(given)
    block.gate_proj(given)
    separate(block)  # those that are called in another order
    assert (block.q_proj.product is None, block.gate_proj.product) == (False, None)
    assert all(layer.handed is None for layer in joined_layers(block))
    near(block(given), plain(given))


@pytest.mark.parametrize("part", ["", "q_proj", "k_proj"])
def test_weights_that_are_converted_are_no_longer_joined(part: str) -> None:
    block = Block()
    plain = deepcopy(block).float()
    join(block)
    block.get_submodule(part).float()
    assert block.q_proj.product is None
    near(block.float()(rows(3, torch.float32)), plain(rows(3, torch.float32)))


def test_a_copy_is_plain_and_goes_by_its_own_weights() -> None:
    block = Block()
    given = rows(3)
    join(block)
    wanted = block(given)
    other = deepcopy(block)
    assert [type(layer) for layer in other.children()] == [nn.Linear] * 5
    assert held(other) == held(block)
    near(other(given), wanted)
    for weight in other.parameters():
        weight.data.zero_()
    assert not any(found.any() for found in other(given))
    near(block(given), wanted)
    join(other)  # as any network
    assert len(other.joined()) == 5


class Quantised(torch.Tensor):
    pass


@every_row(
    "change",
    [
        lambda block: setattr(
            block.k_proj, "weight", nn.Parameter(block.k_proj.weight.data.as_subclass(Quantised))
        ),
        lambda block: setattr(block.v_proj, "weight", block.k_proj.weight),
        lambda block: setattr(block, "other", block.k_proj),
        lambda block: setattr(block.q_proj, "bias", None),
        lambda block: block.v_proj.float(),
        lambda block: block.q_proj.register_forward_hook(lambda *given: None),
        lambda block: block.q_proj.register_forward_pre_hook(lambda *given: None),
        lambda block: setattr(block.q_proj, "forward", block.k_proj.forward),
        lambda block: setattr(block, "q_proj", nn.Identity()),
        lambda block: nn.utils.parametrizations.weight_norm(block.q_proj),
        lambda block: delattr(block, "k_proj"),
    ],
)
def test_what_does_not_fit_is_left_alone(change) -> None:
    block = Block()
    change(block)
    join(block)
    assert block.joined() == ["gate_proj", "up_proj"]


@pytest.mark.parametrize("name", ["Qwen2.5", "Gemma 2 (windows, soft caps)", "Phi-2"])
def test_architectures_are_served_with_joined_products(name: str, tmp_path: Path) -> None:
    plain = ARCHITECTURES[name].make(97).double().eval()
    before = weights_hash(plain)
    pair = target, alone = [
        wrap_model(deepcopy(plain), name, "sdpa", joined=joined) for joined in (True, None)
    ]
    assert (bool(products(target.model)), products(alone.model), weights_hash(target.model)) == (
        True,
        [],
        before,
    )
    texts = [
        tokens_of(
            decode_steps(each, drafter_of("ar", each, OPTIONS), random_prompt(30), PARAMS, 3, 40)
        )
        for each in pair
    ]
    assert texts[0] == texts[1]
    target.model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    state = plain.state_dict()
    assert saved
    assert all(torch.equal(weight, state[name]) for name, weight in saved.items())


def test_the_comparison_of_logits_covers_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        JoinedLinear, "forward", lambda self, input: nn.functional.linear(input, self.weight * 1.1)
    )
    wrap_model(tiny_llama("gqa", torch.float64), "tiny", "sdpa")
    with pytest.raises(InputError, match="is not served exactly: logits differ"):
        wrap_model(tiny_llama("gqa", torch.float64), "tiny", "sdpa", joined=True)
