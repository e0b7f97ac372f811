"""What a method makes of the options, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import tiny_heads, tiny_target
from tswift.drafting.methods import METHODS, resolve, resolve_for
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError


def resolved(method: str, **options) -> DraftOptions:
    return resolve(method, tiny_target(), tiny_heads(), DraftOptions(**options))


def test_trees_deeper_than_the_heads_are_refused() -> None:
    for method, tree in (("medusa", (1, 1, 1, 1)), ("tokenswift", (1,) * 5)):
        with pytest.raises(InputError, match="tree"):
            resolved(method, tree=tree)


def test_missing_heads_are_refused() -> None:
    for name, method in METHODS.items():
        if name in ("medusa", "tokenswift", "cascade", "auto"):
            with pytest.raises(InputError, match=r"method: .*heads"):
                resolve(name, tiny_target(), None, DraftOptions())
        else:
            assert not method.with_heads
            resolve(name, tiny_target(), None, DraftOptions())


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("standalone", {"kv": "snapkv"}, r"kv: standalone can read streaming, full, not snapkv"),
        ("magicdec", {"gamma": 0}, r"gamma: must be at least 1 for magicdec"),
        ("medusa", {"gamma": 0}, r"gamma: must be between 1 and 3 for medusa, got 0"),
        ("tokenswift", {"gamma": 4}, r"gamma: must be between 0 and 3 for tokenswift, got 4"),
        ("medusa", {"gamma": 4, "tree": "auto"}, r"gamma: must be between 1 and 3 for medusa, got 4"),
        ("tokenswift", {"gamma": 4, "tree": "auto"}, r"gamma: must be between 0 and 3 for tokenswift, got 4"),
    ],
)
def test_what_a_method_cannot_do(method: str, options, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(method, **options)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("method", ["medusa", "tokenswift"])
def test_a_tree_that_pays_is_as_deep_as_the_heads_go(method: str, device: str) -> None:
    """However deep the usual tree is."""

    def gamma(heads: int, tree: str | None, asked: int) -> int | None:
        options = DraftOptions(gamma=asked, tree=tree)
        return resolve_for(method, torch.device(device), 4, None, heads, options).gamma

    for heads in (2, 7):
        assert gamma(heads, "auto", heads) == heads
        with pytest.raises(InputError, match=rf"gamma: must be between \d and {heads} for {method}"):
            gamma(heads, "auto", heads + 1)
    with pytest.raises(InputError, match=rf"gamma: must be between \d and [34] for {method}, got 7"):
        gamma(7, None, 7)


def test_a_chain_that_the_attention_cannot_do() -> None:
    with pytest.raises(InputError, match=r"gamma: must be below 16 with this attention, got 16"):
        resolve_for("triforce", torch.device("cpu"), 4, 16, 3, DraftOptions(inner_gamma=16))


def test_a_gpus_nodes_by_head_layout() -> None:
    def on_cuda(groups: int, **options) -> int | None:
        return resolve_for("tokenswift", torch.device("cuda"), groups, 128, 3, DraftOptions(**options)).nodes

    assert (on_cuda(4), on_cuda(1), on_cuda(4, nodes=128)) == (32, 128, 128)
