"""Attention with exact rows: the same bits in every pass, and right against a dense computation in float64."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.oracle import NOTHING, case, chain, dense
from tswift.attention.sdpa import MOST_WIDTH, AttentionSpec, ChunkedAttention, Layout

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BORDERS = [0, *(border + MOST_WIDTH for border in (0, 256, 512, 768, 1024, 2048, 4096))]


@dataclass
class Text:
    """Queries, keys and values of a text, ``[heads, length, d]``; its end is drafted in some passes."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    wants: AttentionSpec = NOTHING

    @classmethod
    def random(cls, kv_heads: int, groups: int, width: int, dtype: torch.dtype, length: int, wants=NOTHING) -> Text:
        made = torch.Generator().manual_seed(length)
        shapes = ((kv_heads * groups, length, width), *[(kv_heads, length, width)] * 2)
        return cls(*(torch.randn(shape, generator=made).to(dtype) for shape in shapes), wants)

    def attend(self, query, keys, values, ancestors) -> torch.Tensor:
        layout = Layout(len(keys), len(query) // len(keys), query.dtype, query.device)
        nodes = query.shape[1]
        attention = ChunkedAttention(layout, keys.shape[1] - nodes, nodes, ancestors)
        return attention(query, keys, values, query.shape[2] ** -0.5, self.wants)

    def plainly(self, start: int) -> torch.Tensor:
        """Rows from ``start`` on, each in a pass of its own, as plain decoding has them."""
        slots = range(start, self.query.shape[1])
        cut = [self.attend(self.query[:, at : at + 1], *self._held(at + 1), None) for at in slots]
        return torch.cat(cut, dim=1)

    def drafted(self, start: int, nodes: int, random: Random) -> torch.Tensor:
        """Rows from ``start`` on, as a path in a tree; all that no node of it may read is NaN."""
        length = self.query.shape[1]
        count = length - start
        path = [0, *sorted(random.sample(range(1, nodes), count - 1))]
        ancestors = torch.eye(nodes, dtype=torch.bool)
        for node in range(1, nodes):
            ancestors[node] |= ancestors[path[path.index(node) - 1] if node in path else random.randrange(node)]
        # the cache is a view of a larger one
        both = torch.full((2, len(self.keys), length + nodes + 9, self.keys.shape[2]), torch.nan).to(self.keys.dtype)
        both[0, :, :start], both[1, :, :start] = self._held(start)
        if self.wants.window is not None:
            both[:, :, : max(0, start - self.wants.window + 1)] = torch.nan
        slots = start + torch.tensor(path)
        both[0, :, slots], both[1, :, slots] = self.keys[:, start:], self.values[:, start:]
        query = torch.full((len(self.query), nodes, self.query.shape[2]), torch.nan).to(self.query.dtype)
        query[:, path] = self.query[:, start:]
        return self.attend(query, *both[:, :, : start + nodes], ancestors)[:, path]

    def _held(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[:, :length], self.values[:, :length]


def differ(text: Text, start: int, trees: int = 3) -> bool:
    """Whether rows from ``start`` on have other bits in trees, or a chain, than in passes of their own."""
    length = text.query.shape[1]
    plain, random = text.plainly(start), Random(start)
    assert plain.isfinite().all()
    for _ in range(trees):
        at = random.randrange(start, length)
        found = text.drafted(at, random.randint(length - at, MOST_WIDTH), random)
        if not torch.equal(found, plain[:, at - start :]):
            return True
    found = text.attend(text.query[:, start:], text.keys, text.values, None)
    return not torch.equal(found, plain)


lengths = st.builds(lambda border, by: max(0, border + by), st.sampled_from(BORDERS), st.integers(-40, 40))
windows = st.one_of(st.none(), st.integers(1, 200), st.sampled_from([255, 256, 320, 321, 1000, 2047, 2048, 4000]))


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([16, 24, 64, 80]),
    st.sampled_from(DTYPES),
    lengths,
    st.sampled_from([1, 2, 7, 30, 64]),
    windows,
    st.sampled_from([None, 2.0]),
    st.booleans(),
)
def test_rows_have_the_same_bits_in_every_pass(
    kv_heads, groups, width, dtype, start, count, window, softcap, sinks
) -> None:
    wants = AttentionSpec(window, softcap, torch.linspace(-1, 2, kv_heads * groups) if sinks else None)
    assert not differ(Text.random(kv_heads, groups, width, dtype, start + count, wants), start)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_path_of_the_greatest_depth_across_each_border(dtype: torch.dtype) -> None:
    for border in BORDERS:
        start = max(0, border - 30)
        assert not differ(Text.random(2, 3, 16, dtype, start + MOST_WIDTH), start, trees=1), border


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_heads", "groups"), [(torch.bfloat16, 1, 1), (torch.float32, 2, 3)])
def test_two_threads(dtype: torch.dtype, kv_heads: int, groups: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert not differ(Text.random(kv_heads, groups, 64, dtype, 2116), 2112, trees=1)
    finally:
        torch.set_num_threads(before)


def test_sharp_rows_have_the_same_bits() -> None:
    """The highest score rises along the text, and weights vanish beside it."""
    text = Text.random(1, 2, 16, torch.float32, 700)
    text.keys = text.keys * torch.linspace(1, 100, 700).unsqueeze(-1)
    assert not differ(text, 660)


def test_a_long_chain_is_cut_into_passes() -> None:
    text = Text.random(2, 2, 16, torch.float32, 500, AttentionSpec(100, 3.0))
    found = text.attend(text.query[:, 300:], text.keys, text.values, None)
    assert torch.equal(found, text.plainly(300))


def test_a_wide_tree_is_refused() -> None:
    with pytest.raises(ValueError, match="65 nodes"):
        ChunkedAttention(Layout(1, 1, torch.float32, CPU), 9, 65, chain(65))


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([16, 24, 64, 80]),
    st.sampled_from(DTYPES),
    lengths,
    st.integers(1, MOST_WIDTH),
    windows,
    st.sampled_from([None, 2.0]),
    st.booleans(),
    st.sampled_from([0.1, 1.0, 3.0]),
)
def test_against_a_dense_computation(
    kv_heads, groups, width, dtype, prefix, nodes, window, softcap, sinks, sharp
) -> None:
    query, keys, values, ancestors, scale = case(kv_heads, groups, width, prefix, nodes, dtype, prefix, sharp)
    wants = AttentionSpec(window, softcap, torch.linspace(-1, 2, kv_heads * groups) if sinks else None)
    attention = ChunkedAttention(Layout(kv_heads, groups, dtype, CPU), prefix, nodes, ancestors)
    found = attention(query, keys, values, scale, wants)
    wanted = dense(query, keys, values, ancestors, scale, wants)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("size", [1e4, -1e4, 3e37])
def test_huge_scores(size: float) -> None:
    """They rise and fall along the text, so that what was added up before has to shrink to nothing and to stay."""
    query, keys, values, ancestors, _ = case(1, 1, 16, 1000, 9, torch.float32)
    query, keys = torch.zeros_like(query), torch.zeros_like(keys)
    query[..., 0] = 1
    keys[..., 0] = torch.sin(torch.arange(keys.shape[1]) / 50) * size
    out = ChunkedAttention(Layout(1, 1, torch.float32, CPU), 1000, 9, ancestors)(query, keys, values, 1.0)
    wanted = dense(query, keys, values, ancestors, 1.0)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-3)
