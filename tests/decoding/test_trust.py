"""Steps on the device that are wrong are found out before they are used."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import tiny_llama
from tests.models.test_passes import LengthOnDevice
from tswift.decoding import device_step
from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.decoding.trust import try_steps
from tswift.models.target import Target


def tried(dtype: torch.dtype = torch.float64) -> Target:
    target = Target(tiny_llama("gqa", dtype), LengthOnDevice)
    try_steps(target, SamplingParams())
    return target


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_right_steps_are_trusted(dtype: torch.dtype) -> None:
    target = tried(dtype)
    assert target.graphs is None
    assert target.replays


def _wrong_draw(self, logits, tokens, positions, ancestors):
    drawn = torch.argmax(logits.double(), -1)
    return drawn


def _no_gather(self, dim, index, source):
    return self


class _Broken(LengthOnDevice):
    """Misses the newest key of the prefix."""

    def __init__(self, layout, prefix, nodes, ancestors) -> None:
        super().__init__(layout, prefix, nodes, ancestors)
        self._newest = int(prefix) - 1 if isinstance(prefix, torch.Tensor) else -1

    def __call__(self, query, keys, values, scale):
        if self._newest >= 0:
            values = values.clone()
            values[:, self._newest] = 0
        return super().__call__(query, keys, values, scale)


def test_a_sampler_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "draw_rows", _wrong_draw)
    assert "drew others than the rule" in tried().graphs


def test_a_penalty_table_that_stays_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "extend_rows", lambda *given: None)
    assert "drew others than the rule" in tried().graphs


def test_a_commit_without_its_gather_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DeviceStepper._verify

    def without(self, nodes):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "index_copy_", _no_gather)
            patch.setattr(LengthOnDevice, "store", staticmethod(_store))
            return right(self, nodes)

    def _store(keys, values, new_keys, new_values, length):
        end = int(length) + new_keys.shape[1]
        keys[:, int(length) : end], values[:, int(length) : end] = new_keys, new_values

    monkeypatch.setattr(DeviceStepper, "_verify", without)
    assert "other keys and values" in tried().graphs


def test_wrong_ancestors_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = device_step.ancestors_of
    monkeypatch.setattr(device_step, "ancestors_of", lambda parents, index, depth: right(parents, index, 1))
    assert tried().graphs is not None


def test_an_attention_that_misses_a_key_is_found_out() -> None:
    target = Target(tiny_llama("gqa", torch.float64), _Broken)
    try_steps(target, SamplingParams())
    assert "other keys and values" in target.graphs
    assert not target.replays


def test_what_cannot_be_done_at_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given):
        raise RuntimeError("no kernel image is available\nand more")

    monkeypatch.setattr(LengthOnDevice, "store", fails)
    assert tried().graphs == "no kernel image is available"
