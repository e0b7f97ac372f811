"""What a model says of rows of text: against its logits; kept for later epochs,
and when a training is killed.
"""

from __future__ import annotations

import os
from errno import ENOSPC
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import VOCAB, seeded, tiny_llama, tiny_target
from tswift.errors import DecodeError
from tswift.training import teacher
from tswift.training.teacher import Lessons, Taught, draft_logits, teach

IDS = torch.randint(VOCAB, (2, 19), generator=seeded(4))
DRAFT_IDS = torch.tensor([0, 3, 4, 10, 50, 96], dtype=torch.int32)
LENGTH, HIDDEN, COUNT = 7, 5, 3


def test_the_model_says_what_its_logits_say():
    out = tiny_llama("gqa", torch.float64).requires_grad_(False)(IDS, output_hidden_states=True)
    shares = out.logits.softmax(-1)
    for ids, count in ((None, 9), (DRAFT_IDS, 4), (DRAFT_IDS, 64)):
        taught = teach(tiny_target(), IDS, ids, count=count)
        drafted = shares if ids is None else shares[..., ids]
        wanted = drafted.topk(min(count, drafted.shape[-1]))
        torch.testing.assert_close(taught.hidden, out.hidden_states[-1])
        torch.testing.assert_close(taught.shares, wanted.values)
        assert torch.equal(taught.likeliest, wanted.indices)
    assert teach(tiny_target(), IDS, count=0).shares.shape == (*IDS.shape, 0)


@pytest.mark.parametrize("ids", [None, DRAFT_IDS])
def test_logits_of_the_draft_vocabulary_are_the_models(ids):
    target = tiny_target()
    states = torch.randn(4, target.hidden_size, dtype=torch.float64, requires_grad=True)
    wanted = target.open_logits(states)
    wanted = wanted if ids is None else wanted[:, ids]
    found = draft_logits(target, ids)(states)
    torch.testing.assert_close(found, wanted)
    slopes = (torch.autograd.grad(logits.square().sum(), states)[0] for logits in (found, wanted))
    torch.testing.assert_close(*slopes)


class Reader:
    """Makes rows that tell their numbers, and remembers for which it was asked."""

    def __init__(self):
        self.asked: list[int] = []

    def __call__(self, number: int) -> Taught:
        self.asked.append(number)
        ids = torch.full((1, LENGTH), number)
        hidden = torch.full((1, LENGTH, HIDDEN), 0.1 * number)
        shares = torch.full((1, LENGTH, COUNT), 1 / (1 + number))
        return Taught(ids, hidden, ids.unsqueeze(-1).expand(-1, -1, COUNT), shares)


def opened(path: Path, reader: Reader, room: int = 6) -> Lessons:
    return Lessons(path, reader, room, (LENGTH, HIDDEN, COUNT), seed=1)


def numbers(taught: Taught) -> list[int]:
    """Those of rows, if all of what is said of each goes together."""
    for ids, hidden, likeliest, shares in zip(*taught, strict=True):
        number = int(ids[0])
        torch.testing.assert_close(
            hidden.float(), torch.full_like(hidden, 0.1 * number).float(), rtol=4e-3, atol=0
        )
        torch.testing.assert_close(
            shares.float(), torch.full_like(shares, 1 / (1 + number)), rtol=1e-3, atol=0
        )
        assert (ids == number).all()
        assert (likeliest == number).all()
    return taught.ids[:, 0].tolist()


def test_every_row_passes_the_model_once_and_comes_back_in_every_epoch(tmp_path):
    reader = Reader()
    lessons = opened(tmp_path / "file", reader)
    epochs = [
        numbers(lessons.take(first, 2, True)) + numbers(lessons.take(first + 2, 4, True))
        for first in (0, 6, 12)
    ]
    assert reader.asked == epochs[0] == [*range(6)]
    assert sorted(epochs[1]) == sorted(epochs[2]) == epochs[0]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert (tmp_path / "file").stat().st_size == lessons.bytes == 6 * (7 * (4 + 5 * 2 + 3 * 6) + 1)


def test_the_first_epoch_ends_when_it_is_told_to_and_a_file_is_gone_on_with(tmp_path):
    whole, first, second = (Reader() for _ in range(3))
    lessons = opened(tmp_path / "whole", whole)
    wanted = [numbers(lessons.take(number, 1, number < 4))[0] for number in range(14)]
    assert whole.asked == [0, 1, 2, 3]
    opened(tmp_path / "file", first).take(0, 3, True)
    again = opened(tmp_path / "file", second)
    assert [numbers(again.take(number, 1, number < 4))[0] for number in range(14)] == wanted
    assert (first.asked, second.asked) == ([0, 1, 2], [3])


def test_a_row_that_was_not_written_whole_is_made_again(tmp_path, monkeypatch):
    reader = Reader()
    lessons = opened(tmp_path / "file", reader)
    lessons.take(0, 1, True)
    with monkeypatch.context() as broken:
        broken.delattr(np.memmap, "flush")
        with pytest.raises(AttributeError):
            lessons.take(1, 1, True)
    assert numbers(opened(tmp_path / "file", reader).take(0, 3, True)) == [0, 1, 2]
    assert reader.asked == [0, 1, 1, 2]


def test_without_a_file_every_row_is_new(tmp_path):
    reader = Reader()
    lessons = opened(tmp_path / "file", reader, room=0)
    assert (
        [numbers(lessons.take(number, 1, False))[0] for number in (0, 1, 9)]
        == reader.asked
        == [0, 1, 9]
    )
    assert [*tmp_path.iterdir()] == []


def test_a_full_disk_is_told_in_a_line(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(teacher.os, "posix_fallocate", full)
    with pytest.raises(
        DecodeError, match=r"^.*file cannot be written \(No space left on device\)$"
    ):
        opened(tmp_path / "file", Reader()).take(0, 1, True)
