"""Floors against the paper's table 2, against sums taken one pass at a time, and against cases worked by hand."""

from __future__ import annotations

import csv
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tswift.benchmarking.roofline import (
    MACHINES,
    Drafting,
    Machine,
    computing_seconds,
    decode_seconds,
    find_machine,
    loading_seconds,
    pass_seconds,
)
from tswift.errors import InputError
from tswift.models.shapes import Shape, shape_config, shape_of, skeleton

# reads 200 B and 16 B a token; computes 200 FLOP and 32 a token
SMALL = Shape(120, 100, hidden_size=4, layers=2, query_heads=2, kv_heads=1, head_dim=2, itemsize=2, lm_head=20)
MACHINE = Machine(bandwidth=100.0, flops=1000.0)


def test_the_small_shape_is_as_said() -> None:
    assert (SMALL.weight_bytes, SMALL.kv_bytes, SMALL.flops(0), SMALL.flops(1)) == (200, 16, 200, 232)


def test_the_papers_table_2() -> None:
    text = (files("tswift.benchmarking") / "paper" / "table2_roofline.csv").read_text(encoding="utf-8")
    paper = {line["quantity"]: float(line["value"]) for line in csv.DictReader(text.splitlines())}
    machine, shape = MACHINES["a100-80g"], shape_of(skeleton(shape_config("shape:llama3.1-8b")), 2)
    assert machine == Machine(paper["memory bandwidth"], paper["bf16 peak"])
    assert round(shape.weight_bytes / 1e9, 1) == paper["model weights"]
    assert shape.flops(131_072) / 1e9 == pytest.approx(paper["max operations (128K context)"], rel=0.01)
    assert round(1e3 * loading_seconds(shape, machine, 0), 1) == paper["loading time"]
    assert round(1e3 * computing_seconds(shape, machine, 131_072, 1), 1) == paper["max computing time"]


def test_a_pass_takes_the_longer_of_loading_and_computing() -> None:
    assert loading_seconds(SMALL, MACHINE, 10) == (200 + 160) / 100
    assert loading_seconds(SMALL, MACHINE, 10, extra_bytes=40) == 4.0
    assert computing_seconds(SMALL, MACHINE, 10, 5) == 5 * 520 / 1000
    assert pass_seconds(SMALL, MACHINE, 10, 5) == 3.6
    assert pass_seconds(SMALL, MACHINE, 10, 50) == 26.0
    assert pass_seconds(SMALL, MACHINE, np.array([10, 0]), 5).tolist() == [3.6, 2.0]


@given(st.integers(0, 50), st.integers(1, 60))
def test_plain_decoding_is_the_sum_over_its_passes(context: int, length: int) -> None:
    one_by_one = sum(pass_seconds(SMALL, MACHINE, context + token, 1) for token in range(length))
    assert decode_seconds(SMALL, MACHINE, context, length, length, length) == pytest.approx(one_by_one)


def test_a_step_drafts_and_verifies() -> None:
    # four steps of three tokens from 6 on, 20 nodes each; drafting sees 8 tokens at most
    contexts = [6, 9, 12, 15]
    verified = [max((200 + 16 * c) / 100, 20 * (200 + 32 * c) / 1000) for c in contexts]
    drafted = [max((200 + 30 + 16 * min(c, 8)) / 100, (200 + 32 * min(c, 8)) / 1000) for c in contexts]
    arguments = (SMALL, MACHINE, 6, 12, 4, 80)
    assert decode_seconds(*arguments) == pytest.approx(sum(verified))
    assert decode_seconds(*arguments, Drafting(8, 30)) == pytest.approx(sum(verified) + sum(drafted))
    again = [each - 0.3 for each in drafted]  # a second drafting pass reads the heads no more
    assert decode_seconds(*arguments, Drafting(8, 30, 2)) == pytest.approx(sum(verified) + sum(drafted) + sum(again))
    assert decode_seconds(*arguments, Drafting(None, 30)) == pytest.approx(sum(verified) + 4 * 0.3)


def test_a_draft_of_fewer_bits_reads_less() -> None:
    """Of 200 B of weights 40 are the LM head's; at 4 bits the rest are 40 B, at 8 bits 80 B."""
    verified = decode_seconds(SMALL, MACHINE, 5, 6, 3, 9)
    read = [min(5 + 2 * i, 8) * 16 for i in range(3)]
    for bits, weights in ((4, 80), (8, 120), (16, 200)):
        once = sum((weights + 30 + kv) / 100 for kv in read)
        again = sum((weights + kv) / 100 for kv in read)
        assert decode_seconds(SMALL, MACHINE, 5, 6, 3, 9, Drafting(8, 30, bits=bits)) == pytest.approx(verified + once)
        both = decode_seconds(SMALL, MACHINE, 5, 6, 3, 9, Drafting(8, 30, 2, bits))
        assert both == pytest.approx(verified + once + again)


def test_no_pass_takes_no_time() -> None:
    assert decode_seconds(SMALL, MACHINE, 5, 0, 0, 0, Drafting(8, 30)) == 0.0


def test_machines_by_name() -> None:
    assert find_machine("h200", "bfloat16") == find_machine("h200", "float16") == MACHINES["h200"]
    with pytest.raises(InputError, match=r"^--device: no device 'abacus'; there are here, cpu, cuda, a100-80g, "):
        find_machine("abacus", "bfloat16")
    with pytest.raises(InputError, match=r"^--dtype: h200 is known by its rate in bfloat16 and float16, not "):
        find_machine("h200", "float32")
