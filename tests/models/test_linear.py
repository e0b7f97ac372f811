"""Linear layers by oneDNN, and with the same input as one product: the same outputs, the same weights."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

import tswift
from benchmarks.architectures import ARCHITECTURES
from tests.helpers import decode_steps, drafter_of, random_prompt, tiny_llama, tokens_of
from tests.models.test_passes import OPTIONS, PARAMS
from tests.rows import every_row
from tswift.errors import InputError
from tswift.models.adapting import wrap_model
from tswift.models.checkpoint import weights_hash
from tswift.models.linear import JoinedLinear, OneDNNLinear, copied_bytes, join, separate, use_onednn
from tswift.models.load import inspect_model

NAMES = ["Qwen2.5", "Gemma 2 (windows, soft caps)", "Phi-2"]


class Block(nn.Module):
    """An attention's and an MLP's linear layers, called as transformers' models call theirs."""

    def __init__(self, dtype: torch.dtype = torch.float64, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes = {"q_proj": 24, "k_proj": 8, "v_proj": 8, "gate_proj": 40, "up_proj": 40}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(16, size, bias and len(name) == 6, dtype=dtype))

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q_proj(given), self.k_proj(given), self.v_proj(given), self.gate_proj(given), self.up_proj(given)

    def joined(self) -> list[str]:
        return [name for name, layer in self.named_children() if isinstance(layer, JoinedLinear)]


@pytest.fixture(autouse=True)
def _silent() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def rows(count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(1, count, 16, generator=torch.Generator().manual_seed(2)).to(dtype)


def joined_layers(network: nn.Module) -> list[JoinedLinear]:
    return [module for module in network.modules() if isinstance(module, JoinedLinear)]


def products(network: nn.Module) -> int:
    return sum(layer.product is not None for layer in joined_layers(network))


def held(network: nn.Module) -> int:
    """Bytes of all weights, those of products included; what is shared counts once."""
    weights = [*network.parameters()]
    for layer in joined_layers(network):
        weights += [] if layer.product is None else layer.product.parameters()
    storages = [weight.untyped_storage() for weight in weights]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@pytest.mark.parametrize(("dtype", "count", "bias"), [(torch.float64, 7, True), (torch.bfloat16, 1, False)])
def test_the_same_products_without_a_second_copy(dtype: torch.dtype, count: int, bias: bool) -> None:
    block, given = Block(dtype, bias), rows(count, dtype)
    wanted, bytes_before, state = block(given), held(block), deepcopy(block.state_dict())
    join(block)
    assert (len(block.joined()), products(block)) == (5, 2)
    for found, each in zip(block(given), wanted, strict=True):
        torch.testing.assert_close(found, each)
    assert all(layer.handed is None for layer in joined_layers(block))
    assert held(block) == bytes_before
    assert list(block.state_dict()) == list(state)
    assert all(torch.equal(weight, state[name]) for name, weight in block.state_dict().items())


def test_layers_that_are_called_otherwise_compute_by_themselves() -> None:
    block, given, other = Block(), rows(3), rows(4)
    plain = deepcopy(block)
    join(block)
    for name in ("k_proj", "v_proj", "up_proj"):  # nothing came before
        assert torch.equal(block.get_submodule(name)(given), plain.get_submodule(name)(given))
    block.q_proj(given)
    for each in (other, given.clone(), given):  # what was handed over is for one input, and for one call
        assert torch.equal(block.k_proj(each), plain.k_proj(each))


def test_weights_that_are_changed_in_place_are_changed_in_the_product() -> None:
    block, given = Block(), rows(3)
    join(block)
    changed = {name: weight * 2 for name, weight in block.state_dict().items()}
    block.load_state_dict(changed)
    plain = Block()
    plain.load_state_dict(changed)
    for found, wanted in zip(block(given), plain(given), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("part", ["", "q_proj", "k_proj"])
def test_weights_that_are_converted_are_no_longer_joined(part: str) -> None:
    block = Block()
    plain = deepcopy(block).float()
    join(block)
    block.get_submodule(part).float()
    assert block.q_proj.product is None
    block.float()
    for found, wanted in zip(block(rows(3, torch.float32)), plain(rows(3, torch.float32)), strict=True):
        assert torch.equal(found, wanted)


def test_a_copy_is_plain_and_goes_by_its_own_weights() -> None:
    block, given = Block(), rows(3)
    join(block)
    wanted = block(given)
    other = deepcopy(block)
    assert [type(layer) for layer in other.children()] == [nn.Linear] * 5
    assert held(other) == held(block)
    for found, each in zip(other(given), wanted, strict=True):
        torch.testing.assert_close(found, each)
    for weight in other.parameters():
        weight.data.zero_()
    assert not any(found.any() for found in other(given))
    assert all(torch.equal(found, each) for found, each in zip(block(given), wanted, strict=True))
    join(other)  # as any network
    assert len(other.joined()) == 5


def quantised(block: Block) -> None:
    class Quantised(torch.Tensor):
        pass

    block.k_proj.weight = nn.Parameter(block.k_proj.weight.detach().as_subclass(Quantised))


def tied(block: Block) -> None:
    block.v_proj.weight = block.k_proj.weight


@every_row(
    "change",
    [
        quantised,
        tied,
        lambda block: setattr(block, "other", block.k_proj),
        lambda block: setattr(block.q_proj, "bias", None),
        lambda block: block.v_proj.float(),
        lambda block: block.q_proj.register_forward_hook(lambda *given: None),
        lambda block: block.q_proj.register_forward_pre_hook(lambda *given: None),
        lambda block: setattr(block.q_proj, "forward", block.k_proj.forward),
        lambda block: setattr(block, "q_proj", nn.Identity()),
        lambda block: setattr(block, "q_proj", None),
        lambda block: nn.utils.parametrizations.weight_norm(block.q_proj),
        lambda block: delattr(block, "k_proj"),
    ],
)
def test_what_does_not_fit_is_left_alone(change) -> None:
    block = Block()
    change(block)
    join(block)
    assert block.joined() == ["gate_proj", "up_proj"]


def test_layers_that_are_called_in_another_order_are_separated() -> None:
    block, given = Block(), rows(3)
    plain = deepcopy(block)
    join(block)
    block(given)
    block.up_proj(given)
    block.gate_proj(given)
    separate(block)
    assert (block.q_proj.product is None, block.gate_proj.product) == (False, None)
    assert all(layer.handed is None for layer in joined_layers(block))
    for found, wanted in zip(block(given), plain(given), strict=True):
        torch.testing.assert_close(found, wanted)


def network(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    if not ARCHITECTURES[name].there:
        pytest.skip("not in this transformers")
    return ARCHITECTURES[name].make(97).to(dtype).eval()


@pytest.mark.parametrize("name", NAMES)
def test_architectures_are_served_with_joined_products(name: str, tmp_path: Path) -> None:
    plain = network(name)
    before = weights_hash(plain)
    target = wrap_model(deepcopy(plain), name, "sdpa", joined=True)
    alone = wrap_model(plain, name, "sdpa")
    assert (products(target.model) > 0, products(alone.model)) == (True, 0)
    assert weights_hash(target.model) == before
    texts = [
        tokens_of(decode_steps(each, drafter_of("ar", each, OPTIONS), random_prompt(30), PARAMS, 3, 40))
        for each in (target, alone)
    ]
    assert texts[0] == texts[1]
    target.model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved
    state = plain.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in saved.items())


def test_the_comparison_of_logits_covers_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JoinedLinear, "forward", lambda self, input: nn.functional.linear(input, self.weight * 1.1))
    wrap_model(tiny_llama("gqa", torch.float64), "tiny", "sdpa")
    with pytest.raises(InputError, match="is not served exactly: logits differ"):
        wrap_model(tiny_llama("gqa", torch.float64), "tiny", "sdpa", joined=True)


able = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="PyTorch without oneDNN")


def layers_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(256, 600), nn.SiLU(), nn.Linear(600, 300, bias=False), nn.Linear(300, 30)).to(dtype)


@able
@pytest.mark.parametrize("rows", [1, 2, 10, 200])
def test_the_same_products(rows: int) -> None:
    layers, given = layers_of(), torch.randn(1, rows, 256, generator=torch.Generator().manual_seed(2))
    exact = layers_of().double()(given.double())
    use_onednn(layers)
    assert [type(layer) for layer in layers] == [OneDNNLinear, nn.SiLU, OneDNNLinear, nn.Linear]
    with torch.inference_mode():
        found = layers(given)
    assert found.shape == (1, rows, 30)
    assert (found.double() - exact).abs().max() < 2e-6


@able
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_converted_once_where_the_processor_would_do_it_in_every_call(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr("tswift.models.linear._has_float16", lambda: False)
    layers, given = layers_of(dtype), torch.randn(1, 8, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    exact = deepcopy(layers).double()(given.double())
    use_onednn(layers)
    assert type(layers[0]) is OneDNNLinear
    with torch.inference_mode():
        found, again = layers(given), deepcopy(layers)(given)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() < 8 * torch.finfo(dtype).eps
    assert type(deepcopy(layers)[0]) is nn.Linear  # with the layer's weights, whatever becomes of them
    assert (again.double() - exact).abs().max() < 8 * torch.finfo(dtype).eps


@able
def test_gradients_flow_through_frozen_layers() -> None:
    layers, given = layers_of().requires_grad_(False), torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    use_onednn(layers)
    found, wanted = given.clone().requires_grad_(), given.double().requires_grad_()
    layers(found).square().sum().backward()
    layers_of().double()(wanted).square().sum().backward()
    torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-4, atol=1e-5)


@able
def test_weights_are_held_twice_in_small_networks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_of()
    use_onednn(layers)
    assert layers[0].ordered is not None
    assert "0.ordered" not in layers.state_dict()
    monkeypatch.setattr("tswift.models.linear._MAX_COPIED", layers[0].weight.nbytes)
    large, given = layers_of(), torch.randn(8, 256, generator=torch.Generator().manual_seed(2))
    use_onednn(large)
    assert large[0].ordered is None
    with torch.inference_mode():
        torch.testing.assert_close(large(given), layers(given))


@able
def test_a_copy_of_a_network_goes_by_its_own_weights() -> None:
    layers, given = layers_of(), torch.randn(8, 256, generator=torch.Generator().manual_seed(2))
    use_onednn(layers)
    other = deepcopy(layers)
    for parameter in other.parameters():
        parameter.data.zero_()
    with torch.inference_mode():
        assert not other[0](given).any()  # not the last layer, which is small and has no second copy
        assert layers[0](given).any()


@able
def test_what_will_be_copied_is_foreseen() -> None:
    model, cpu = tswift.load(device="cpu").target.model, torch.device("cpu")
    layers = [layer for layer in model.modules() if isinstance(layer, OneDNNLinear)]
    held = 4 * sum(layer.weight.numel() for layer in layers if layer.ordered is not None)
    skeleton = tswift.load(device="cpu", dtype="float64").target.model
    assert copied_bytes(skeleton, torch.float32, cpu) == held > 0
    assert (
        copied_bytes(skeleton, torch.float64, cpu) == copied_bytes(skeleton, torch.float32, torch.device("meta")) == 0
    )
    weights = sum(weight.numel() for weight in model.parameters())
    assert inspect_model("demo", device="cpu").weight_bytes == 4 * weights + 2 * held  # and once more for the C program
