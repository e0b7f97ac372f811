"""The floor of what was run."""

from __future__ import annotations

import dataclasses

import pytest

from tests.benchmarking.helpers import MACHINE
from tswift.benchmarking.floor import Floor, floor_of
from tswift.benchmarking.lineup import Entry, line_up
from tswift.benchmarking.roofline import Drafting, decode_seconds
from tswift.decoding.stats import DecodeStats
from tswift.models.shapes import Shape

SHAPE = Shape(120, 100, hidden_size=4, layers=2, query_heads=2, kv_heads=1, head_dim=2, itemsize=2)


def mark(tokens: int, passes: int, nodes: int) -> DecodeStats:
    return DecodeStats(4, passes=passes, tokens=tokens, nodes=nodes)


def test_a_floor_is_the_sum_of_its_stretches() -> None:
    drafting = Drafting(8, 30)
    floor = Floor(SHAPE, MACHINE, {"tokenswift": drafting})
    marks = [mark(20, 10, 100), mark(50, 20, 300)]
    first = decode_seconds(SHAPE, MACHINE, 7, 20, 10, 100, drafting)
    second = decode_seconds(SHAPE, MACHINE, 27, 30, 10, 200, drafting)
    assert floor.seconds("tokenswift", 7, marks) == pytest.approx([first, first + second])
    assert floor.seconds("ar", 7, [mark(20, 20, 20)]) == [decode_seconds(SHAPE, MACHINE, 7, 20, 20, 20)]
    assert floor.seconds("ar", 7, []) == []


def test_what_each_method_reads_while_drafting(checkpoint) -> None:  # type: ignore[no-untyped-def]
    entry = Entry(("ar", "medusa", "tokenswift", "reuse", "magicdec"), drafting={"budget": 128}, model=str(checkpoint))
    lineup = line_up(entry)
    floor = floor_of(lineup, MACHINE)
    assert floor is not None
    heads = lineup.model.heads
    assert heads is not None
    read = sum(weight.nbytes for weight in heads.parameters())
    assert floor.drafting == {
        "ar": Drafting(),
        "medusa": Drafting(None, read),
        "tokenswift": Drafting(128, read),
        "reuse": Drafting(),
        "magicdec": Drafting(128, 0, 4),
    }
    whole = line_up(Entry(("ar", "tokenswift"), drafting={"kv": "full"}, model=str(checkpoint)))
    assert floor_of(whole, MACHINE).drafting["tokenswift"].budget > 10**9
    network = lineup.model.target.model
    embeddings = network.get_input_embeddings().weight.nbytes
    assert floor.shape.weight_bytes == sum(weight.nbytes for weight in network.parameters()) - embeddings


def test_experts_have_no_floor(checkpoint, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    lineup = line_up(Entry(("ar",), model=str(checkpoint)))
    monkeypatch.setattr(lineup.model.target.model.config, "num_experts", 8, raising=False)
    assert floor_of(dataclasses.replace(lineup), MACHINE) is None
