"""Drafting from heads: which candidates are ranked how, at which positions, with which noise."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import (
    PLAIN,
    VOCAB,
    decode_method,
    decode_steps,
    drafter_of,
    random_prompt,
    tiny_heads,
    tiny_target,
)
from tswift.decoding.drafter import Context, DraftTree
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.drafting.heads import HeadSource
from tswift.drafting.options import DraftOptions
from tswift.kv import FullKV
from tswift.models.passes import Forwarded


def states_source(states, tree, shared_noise: bool) -> HeadSource:
    """A source whose states are given."""

    class GivenHeads:
        conditioned = pre_norm = False

        def levels(self, hidden, lm_head, first, most):
            assert first is None
            assert torch.equal(hidden, states[0])
            return lm_head(states[:most])

    source = HeadSource(tiny_target(), GivenHeads(), None, tree, shared_noise)
    source.read = lambda context: (Forwarded(states, []), 0)
    return source


def context_of(text: list[int], params: SamplingParams, seed: int = 3) -> Context:
    sampler = Sampler(params, seed, VOCAB, torch.device("cpu"))
    sampler.extend(text)
    return Context(text, sampler, FullKV(tiny_target().kv_shape, 1))


def random_states(count: int) -> torch.Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def propose(source: HeadSource, tree: DraftTree, context: Context) -> None:
    source.start(context)
    source.propose(tree, context)


@pytest.mark.parametrize("shared_noise", [True, False])
def test_every_level_holds_its_best_candidates_and_all_their_combinations(shared_noise: bool) -> None:
    params = SamplingParams(temperature=0.8, min_p=0, penalty=1.3, window=4)
    text, widths, states = random_prompt(9), (2, 3, 1), random_states(3)
    context, tree = context_of(text, params), DraftTree(text[-1], 128)
    propose(states_source(states, widths, shared_noise), tree, context)
    logits = tiny_target().logits(states) / 0.8
    for token in set(text[-4:]):
        column = logits[:, token]
        logits[:, token] = torch.where(column > 0, column / 1.3, column * 1.3)
    if shared_noise:  # of the positions that the levels' tokens will have
        logits += Sampler(params, 3, VOCAB, torch.device("cpu")).noise([9, 10, 11])
    best = [set(row.topk(width).indices.tolist()) for row, width in zip(logits, widths, strict=True)]
    assert len(tree) == 1 + 2 + 6 + 6
    for node in range(1, len(tree)):
        assert tree.tokens[node] in best[tree.depths[node] - 1]


def test_a_limited_tree_takes_the_likely_combinations_first() -> None:
    context, tree = context_of([1], PLAIN), DraftTree(1, 4)
    source = states_source(random_states(3), (3, 3, 3), False)
    propose(source, tree, context)
    assert tree.tokens[1:] == tiny_target().logits(random_states(3)).argmax(-1).tolist()
    assert tree.depths == [0, 1, 2, 3]


def test_dropped_tokens_are_not_drafted() -> None:
    tree = DraftTree(1, 64)
    params = SamplingParams(top_k=2, min_p=0, penalty=1)
    propose(states_source(random_states(2), (3, 3), True), tree, context_of([1], params))
    assert len(tree) == 1 + 2 + 4


def test_a_level_wider_than_the_vocabulary() -> None:
    target, params = tiny_target(), SamplingParams(temperature=0.5, min_p=0)
    options = DraftOptions(tree=(VOCAB + 30,), nodes=128)
    steps = decode_steps(target, drafter_of("tokenswift", target, options), [1, 2], params, 1, 6)
    assert [t for step in steps for t in step.tokens] == decode_method("ar", target, [1, 2], params, 1, 6)
    assert all(step.accepted >= 1 for step in steps[:-1])  # every token is drafted


def test_the_last_pass_gives_the_state_of_the_node_that_drew_the_root() -> None:
    target = tiny_target()
    context = context_of([1, 2, 3], PLAIN)
    source = HeadSource(target, tiny_heads(), None, (1,), True)
    assert source.read(context) is None
    kv = FullKV(target.kv_shape, 8)
    context.last, context.path = target.prefill([1, 2], kv), [1]
    assert source.read(context) == (context.last, 1)


@pytest.mark.parametrize("limit", [3, 5, 128])
def test_conditioned_heads_are_told_the_best_candidate_before(limit: int) -> None:
    target, heads = tiny_target(), tiny_heads(kind="conditioned")
    context = context_of([7, 8, 9], PLAIN)
    context.last, context.path = target.prefill([7, 8], FullKV(target.kv_shape, 8)), [1]
    tree = DraftTree(9, limit)
    propose(HeadSource(target, heads, None, (2, 1, 3), True), tree, context)
    state, token, spine, others = context.last.hidden[1], 9, [], []
    for level, width in enumerate((2, 1, 3)):
        state, out = heads.step(level, state, target.model.get_input_embeddings().weight[token])
        best = context.sampler.scores(target.logits(out)[None], None, [3 + level]).topk(width).indices[0].tolist()
        token = best[0]
        others += [[*spine, other] for other in best[1:]]
        spine.append(token)
    wanted = DraftTree(9, limit)
    for path in [spine, *sorted(others, key=lambda path: (len(path) == 3 and path[-1] == best[2], len(path)))]:
        wanted.add(path, "heads")
    assert tree.tokens == wanted.tokens
    assert tree.parents == wanted.parents
    assert len(tree) == min(limit, 1 + 3 + 3)


@pytest.mark.parametrize("budget", [64, 4096])
def test_a_drafting_pass_over_all_of_the_text_is_the_targets_own(budget: int) -> None:
    """While the partial cache holds everything, the first level guesses every draw: at most a step per two tokens."""
    target, params = tiny_target(), SamplingParams(min_p=0, penalty=1.2, window=16)
    options = DraftOptions(tree=(1, 1), nodes=3, budget=budget, ngrams=0)
    steps = decode_steps(target, drafter_of("tokenswift", target, options), random_prompt(10), params, 6, 40)
    assert all(step.accepted >= 1 for step in steps)
