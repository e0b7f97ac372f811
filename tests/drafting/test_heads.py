"""Drafting from heads: which candidates are ranked how, at which positions, with which noise."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import (
    CPU,
    PLAIN,
    VOCAB,
    context_of,
    decode,
    decode_method,
    decode_steps,
    drafter_of,
    first,
    random_prompt,
    seeded,
    tiny_heads,
    tiny_target,
)
from tswift.caches import FullKV
from tswift.decoding.drafter import Context, DraftTree
from tswift.drafting.dynamic_tree import AcceptanceEstimator, CandidateTree, TreeBudget
from tswift.drafting.heads import HeadSource, HeadTreeSource
from tswift.drafting.methods import make_drafter
from tswift.drafting.options import DraftOptions
from tswift.forward.passes import Forwarded
from tswift.forward.text import prefill
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import Sampler
from tswift.speculators.heads import HEAD_TYPES, DraftHead


def random_states(count: int) -> torch.Tensor:
    return torch.randn(count, 32, generator=seeded(4), dtype=torch.float64)


def from_states(widths, shared_noise: bool) -> HeadSource:
    """A source whose states are given."""
    states = random_states(len(widths))

    def levels(hidden, lm_head, first, count):
        assert first is None
        assert torch.equal(hidden, states[0])
        return lm_head(states[:count])

    whole = DraftHead(tiny_target(), None)
    heads = SimpleNamespace(
        conditioned=False, pre_norm=False, levels=levels, draft_head=lambda target: whole
    )
    source = HeadSource(tiny_target(), heads, None, widths, shared_noise)
    source.read = lambda context: (Forwarded(states, []), 0)
    return source


def proposed(source: HeadSource, context: Context, limit: int = 128) -> DraftTree:
    tree = DraftTree(context.text[-1], limit)
    source.start(context)
    source.propose(tree, context)
    return tree


@pytest.mark.parametrize("shared_noise", [True, False])
def test_every_level_holds_its_best_candidates_and_all_their_combinations(
    shared_noise,
):
    params = SamplingParams(temperature=0.8, min_p=0, penalty=1.3, window=4)
    text = random_prompt(9)
    widths = (2, 3, 1)
    tree = proposed(from_states(widths, shared_noise), context_of(text, params))
    logits = tiny_target().logits(random_states(3)) / 0.8
    for token in set(text[-4:]):
        column = logits[:, token]
        logits[:, token] = torch.where(column > 0, column / 1.3, column * 1.3)
    if shared_noise:  # of the positions that the levels' tokens will have
        logits += Sampler(params, 3, VOCAB, CPU).noise([9, 10, 11])
    best = [
        set(row.topk(width).indices.tolist()) for row, width in zip(logits, widths, strict=True)
    ]
    assert len(tree) == 1 + 2 + 6 + 6
    assert all(tree.tokens[node] in best[tree.depths[node] - 1] for node in range(1, len(tree)))


def test_a_limited_tree_takes_the_likely_combinations_first():
    tree = proposed(from_states((3, 3, 3), False), context_of([1], PLAIN), 4)
    assert tree.tokens[1:] == tiny_target().logits(random_states(3)).argmax(-1).tolist()
    assert tree.depths == [0, 1, 2, 3]
    # early side steps come before late ones, which are reached only if all before was right
    assert [parent for parent, _, _ in from_states((2, 2, 2), False).nodes[:5]] == [0, 1, 2, 0, 4]


def test_dropped_tokens_are_not_drafted_and_no_more_than_there_are():
    few = SamplingParams(top_k=2, min_p=0, penalty=1)
    assert len(proposed(from_states((3, 3), True), context_of([1], few))) == 1 + 2 + 4
    tree = proposed(from_states((VOCAB + 30, 2), False), context_of([1], PLAIN), 999)
    best = random_states(2)
    assert tree.depths.count(1) == VOCAB
    likeliest = tiny_target().logits(best)[1].topk(2).indices.tolist()
    assert {tree.tokens[node] for node in range(len(tree)) if tree.depths[node] == 2} == {
        *likeliest
    }


@pytest.mark.parametrize("limit", [3, 5, 128])
def test_conditioned_heads_start_where_the_root_was_drawn_and_are_told_the_best_candidate_before(
    limit,
):
    target = tiny_target()
    heads = tiny_heads(kind="conditioned")
    context = context_of([7, 8, 9], PLAIN)
    source = HeadSource(target, heads, None, (2, 1, 3), True)
    assert len(proposed(source, context)) == 1  # there has been no pass
    context.last = prefill(target, [7, 8], FullKV(target.kv_shape, 8))
    context.path = [1]
    assert source.read(context) == (context.last, 1)
    tree = proposed(source, context, limit)
    state = context.last.hidden[1]
    token = 9
    spine = []
    others = []
    for level, width in enumerate((2, 1, 3)):
        state, out = heads.step(level, state, target.model.get_input_embeddings().weight[token])
        best = (
            context.sampler.scores(target.logits(out)[None], None, [3 + level])
            .topk(width)
            .indices[0]
            .tolist()
        )
        token = best[0]
        others += [[*spine, other] for other in best[1:]]
        spine.append(token)
    wanted = DraftTree(9, limit)
    for path in [
        spine,
        *sorted(others, key=lambda path: (len(path) == 3 and path[-1] == best[2], len(path))),
    ]:
        wanted.add(path, "heads")
    assert (tree.tokens, tree.parents) == (wanted.tokens, wanted.parents)
    assert len(tree) == min(limit, 1 + 3 + 3)


def test_levels_that_did_not_pay_of_late_are_left_out_but_for_now_and_then():
    target = tiny_target()
    heads = tiny_heads(kind="conditioned")
    context = context_of([7], PLAIN)
    context.text += [8, 9]
    context.last = prefill(target, [7, 8], FullKV(target.kv_shape, 8))
    context.path = [1]
    drafted = {}
    for least in (0.0, 0.95):
        source = HeadTreeSource(target, heads, None, (2, 2, 2), True)
        source.budget = TreeBudget()
        source.budget.pays_off = lambda tokens, seconds, least=least: tokens > least
        levels = []
        for _ in range(80):
            tree = CandidateTree(9, 8, AcceptanceEstimator())
            source.start(context)
            source.propose(tree, context)
            assert max(tree.depths) == source.levels
            levels.append(source.levels)
        drafted[least] = levels
    assert set(drafted[0.0]) == {3}
    assert drafted[0.95][0] == 3  # nothing is known yet
    assert drafted[0.95][40:].count(1) >= 38
    assert 1 <= drafted[0.95][40:].count(3) <= 2


@pytest.mark.parametrize("budget", [64, 4096])
def test_a_drafting_pass_over_all_of_the_text_is_the_targets_own(budget):
    """While the partial cache holds everything, the first level guesses every draw:
    at most a step per two tokens.
    """
    target = tiny_target(layers=2)
    params = SamplingParams(min_p=0, penalty=1.2, window=16)
    options = DraftOptions(tree=(1, 1), nodes=3, budget=budget, ngrams=0)
    steps = decode_steps(
        target, drafter_of("tokenswift", target, options), random_prompt(10), params, 6, 40
    )
    assert all(step.accepted >= 1 for step in steps)


@pytest.mark.parametrize("kind", first(1, [*HEAD_TYPES]))
@pytest.mark.parametrize("method", first(1, ["medusa", "tokenswift"]))
def test_only_tokens_of_the_draft_vocabulary_are_drafted_and_none_is_lost(kind, method):
    target = tiny_target()
    params = SamplingParams(min_p=0, penalty=1.1)
    prompt = random_prompt(10)
    heads = copy.deepcopy(tiny_heads(kind=kind))
    heads.draft_ids = torch.arange(1, VOCAB, 7, dtype=torch.int32)
    wanted = decode_method("ar", target, prompt, params, 6, 200)
    options = DraftOptions(ngrams=0) if method == "tokenswift" else DraftOptions()
    drafter = make_drafter(method, target, heads, options, None)
    drafted: set[int] = set()
    propose = drafter.propose

    def watched(context, most):
        tree = propose(context, most)
        drafted.update(
            tree.tokens[node] for node in range(1, len(tree)) if tree.sources[node] == "heads"
        )
        return tree

    drafter.propose = watched
    assert decode(target, drafter, prompt, params, 6, 200) == wanted
    ids = set(heads.draft_ids.tolist())
    assert drafted <= ids
    assert drafted
    assert not set(wanted) <= ids
