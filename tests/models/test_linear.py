"""Linear layers by oneDNN: the same products."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

import tswift
from tswift.models.linear import OneDNNLinear, copied, use_onednn
from tswift.models.prospect import inspect_model

able = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="PyTorch without oneDNN")


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(256, 600), nn.SiLU(), nn.Linear(600, 300, bias=False), nn.Linear(300, 30)).to(dtype)


@able
@pytest.mark.parametrize("rows", [1, 2, 10, 200])
def test_the_same_products(rows: int) -> None:
    layers, given = network(), torch.randn(1, rows, 256, generator=torch.Generator().manual_seed(2))
    exact = network().double()(given.double())
    use_onednn(layers)
    assert [type(layer) for layer in layers] == [OneDNNLinear, nn.SiLU, OneDNNLinear, nn.Linear]
    with torch.inference_mode():
        found = layers(given)
    assert found.shape == (1, rows, 30)
    assert (found.double() - exact).abs().max() < 2e-6


def test_float64_is_left_alone() -> None:
    layers = network(torch.float64)
    use_onednn(layers)
    assert [type(layer) for layer in layers[::2]] == [nn.Linear, nn.Linear]


@able
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_converted_once_where_the_processor_would_do_it_in_every_call(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr("tswift.models.linear._has_float16", lambda: False)
    layers, given = network(dtype), torch.randn(1, 8, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    exact = deepcopy(layers).double()(given.double())
    use_onednn(layers)
    assert type(layers[0]) is OneDNNLinear
    with torch.inference_mode():
        found, again = layers(given), deepcopy(layers)(given)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() < 8 * torch.finfo(dtype).eps
    assert type(deepcopy(layers)[0]) is nn.Linear  # with the layer's weights, whatever becomes of them
    assert (again.double() - exact).abs().max() < 8 * torch.finfo(dtype).eps


def test_16_bits_are_left_alone_where_the_processor_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    layers = network(torch.bfloat16)
    use_onednn(layers)
    assert type(layers[0]) is nn.Linear


@able
def test_the_bundled_model_has_them() -> None:
    model = tswift.load(device="cpu")
    kinds = {type(module) for module in [*model.target.model.modules(), *model.heads.modules()]}
    assert OneDNNLinear in kinds
    kinds = {type(module) for module in tswift.load(device="cpu", dtype="float64").target.model.modules()}
    assert OneDNNLinear not in kinds


@able
def test_gradients_flow_through_frozen_layers() -> None:
    layers, given = network().requires_grad_(False), torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    use_onednn(layers)
    found, wanted = given.clone().requires_grad_(), given.double().requires_grad_()
    layers(found).square().sum().backward()
    network().double()(wanted).square().sum().backward()
    torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-4, atol=1e-5)


@able
def test_weights_are_held_twice_in_small_networks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = network()
    use_onednn(layers)
    assert layers[0].ordered is not None
    assert "0.ordered" not in layers.state_dict()
    monkeypatch.setattr("tswift.models.linear._MOST_COPIED", layers[0].weight.nbytes)
    large, given = network(), torch.randn(8, 256, generator=torch.Generator().manual_seed(2))
    use_onednn(large)
    assert large[0].ordered is None
    with torch.inference_mode():
        torch.testing.assert_close(large(given), layers(given))


@able
def test_a_copy_of_a_network_goes_by_its_own_weights() -> None:
    layers, given = network(), torch.randn(8, 256, generator=torch.Generator().manual_seed(2))
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
    assert copied(skeleton, torch.float32, cpu) == held > 0
    assert copied(skeleton, torch.float64, cpu) == copied(skeleton, torch.float32, torch.device("meta")) == 0
    weights = sum(weight.numel() for weight in model.parameters())
    assert inspect_model("demo", device="cpu").weight_bytes == 4 * weights + held
