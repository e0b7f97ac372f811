"""A wrong method shows, rounding is explained, equal texts are equal."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tswift.benchmarking.comparison import compare, first_difference
from tswift.benchmarking.lineup import Entry, Lineup, line_up, parse_methods
from tswift.errors import InputError

LENGTH = 120


def run(lineup: Lineup, length: int = LENGTH):
    return compare(lineup, lineup.model.encode("The ship had lain"), length, 5, lambda lane: None, lambda *_: None)


def patched_lanes(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Let the lane of medusa be changed before it runs."""
    lanes = Lineup.lanes

    def made(self, *arguments):
        found = lanes(self, *arguments)
        change(next(lane for lane in found if lane.name == "medusa"))
        return found

    monkeypatch.setattr(Lineup, "lanes", made)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "min_p": 0.0}])
def test_all_methods_write_the_same_text(checkpoint, sampling):
    entry = Entry(("ar", "medusa", "tokenswift", "reuse", "ar-reference"), sampling, model=str(checkpoint))
    comparison = run(line_up(entry))
    assert comparison.ok
    assert not comparison.audits
    assert [each.method for each in comparison.outcomes] == ["ar", "medusa", "tokenswift", "reuse", "ar-reference"]
    assert [each.first_difference for each in comparison.outcomes] == [None] * 5
    plain, reference = comparison.outcomes[0], comparison.outcomes[-1]
    assert plain.speedup == 1.0
    assert reference.speedup_over_reference == 1.0
    assert plain.speedup_over_reference == pytest.approx(1 / reference.speedup)
    assert plain.passes == plain.tokens == LENGTH
    assert all(each.passes < each.tokens for each in comparison.outcomes[1:3])


def test_a_wrong_method_is_found(checkpoint, monkeypatch):
    def skip_the_penalty(lane):
        decoding = lane.generation.decoding
        decoding._context.sampler.params = dataclasses.replace(decoding._context.sampler.params, penalty=1.0)

    patched_lanes(monkeypatch, skip_the_penalty)
    comparison = run(line_up(Entry(("ar", "medusa"), model=str(checkpoint))))
    assert not comparison.ok
    assert comparison.outcomes[0].explained is True
    wrong = comparison.outcomes[1]
    assert wrong.first_difference is not None
    assert wrong.explained is False
    assert comparison.audits["ar"].ok
    assert comparison.audits["medusa"].violations[0].index >= wrong.first_difference


def test_one_unit_in_the_last_place_is_rounding(checkpoint, monkeypatch):
    lineup = line_up(Entry(("ar", "medusa"), {"temperature": 0.0, "penalty": 1.0}, model=str(checkpoint)))
    target = lineup.model.target
    half = target.vocab_size // 2
    weight = target.model.get_output_embeddings().weight
    weight[half : 2 * half] = weight[:half]  # every token has a twin that is exactly as likely

    class Nudged:
        """The same target, but for the twins' last bit."""

        def __getattr__(self, name):
            return getattr(target, name)

        def logits(self, hidden):
            logits = target.logits(hidden).clone()
            logits[..., half:] = torch.nextafter(logits[..., half:], torch.tensor(torch.inf))
            return logits

    def nudge(lane):
        lane.generation.decoding._target = Nudged()

    patched_lanes(monkeypatch, nudge)
    comparison = run(lineup, 60)
    nudged = comparison.outcomes[1]
    assert nudged.first_difference is not None
    assert nudged.explained is True
    assert nudged.margin is not None
    assert nudged.margin <= comparison.audits["medusa"].bound
    assert comparison.ok


def test_ctrl_c_leaves_the_outcomes_so_far(checkpoint):
    lineup = line_up(Entry(("ar", "medusa"), model=str(checkpoint)))

    def press(lane):
        if lane.stats.tokens > 40:
            raise KeyboardInterrupt

    comparison = compare(lineup, [1, 2, 3], LENGTH, 5, press, lambda *_: None)
    assert comparison.interrupted
    assert comparison.ok
    assert all(30 < each.tokens < 60 for each in comparison.outcomes)

    def press_at_once(lane):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(lineup, [1, 2, 3], LENGTH, 5, press_at_once, lambda *_: None)


@pytest.mark.parametrize(
    ("ours", "theirs", "index"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2], [1, 2, 3], None),
        ([1, 4, 3], [1, 2, 3], 1),
        ([], [1], None),
        ([0], [1], 0),
    ],
)
def test_first_difference(ours, theirs, index):
    assert first_difference(ours, theirs) == index


def test_methods_begin_with_plain_decoding():
    assert parse_methods("tokenswift") == ("ar", "tokenswift")
    assert parse_methods("medusa, ar,reuse") == ("ar", "medusa", "reuse")
    for words, message in {"a": "no method", "": "no method", "medusa,medusa": "twice"}.items():
        with pytest.raises(InputError, match=f"--methods.*{message}"):
            parse_methods(words)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Entry(("ar",), drafting={"budget": 100}), "--budget: ar does not use it"),
        (Entry(("ar", "medusa"), drafting={"ngrams": 3}), "--ngrams: none of ar, medusa uses it"),
        (Entry(("ar", "reuse"), trees={"": (2, 2)}), "--tree: none of ar, reuse uses it"),
        (Entry(("ar", "medusa"), trees={"tokenswift": (2, 2)}), "--tree: is given for tokenswift"),
        (Entry(("ar", "tokenswift"), drafting={"ngrams": 20}, trees={"": "auto"}), "--ngrams: none of .* with --tree"),
        (Entry(("ar", "tokenswift"), drafting={"ngrams": 20}, trees={"tokenswift": "auto"}), "--ngrams: none of ar, "),
        (Entry(("ar", "reuse"), heads="chained"), "--heads: none of ar, reuse uses it"),
        (Entry(("ar", "medusa"), sampling={"min_p": 3.0}), "--min-p must be between"),
    ],
)
def test_no_option_is_ignored(entry, message):
    with pytest.raises(InputError, match=message):
        line_up(entry)


def test_a_tree_goes_to_its_method(checkpoint):
    trees = {"tokenswift": (1, 3), "medusa": (3,)}
    lineup = line_up(Entry(("ar", "medusa", "tokenswift"), trees=trees, model=str(checkpoint)))
    assert {each.label: each.options.tree for each in lineup.variants} == {"ar": None, **trees}
    mixed = {"tokenswift": (1, 3), "medusa": "auto"}
    lineup = line_up(Entry(("ar", *mixed), drafting={"ngrams": 20}, trees=mixed, model=str(checkpoint)))
    assert "ngrams" in lineup.drafting()["tokenswift"]
    lineup = line_up(
        Entry(("ar", "medusa", "reuse"), drafting={"ngrams": 7}, trees={"": (2, 2)}, model=str(checkpoint))
    )
    assert lineup.drafting()["ar"] == {}
    assert lineup.drafting()["medusa"]["tree"] == (2, 2)
    assert lineup.drafting()["reuse"]["ngrams"] == 7


def test_what_cannot_fit_is_refused_before_the_model_is_loaded(checkpoint, monkeypatch):
    import tswift.benchmarking.lineup as module

    monkeypatch.setattr(module, "load", lambda *given, **how: pytest.fail("it was loaded"))
    entry = Entry(("ar", "reuse"), model=str(checkpoint))
    with pytest.raises(
        InputError, match=r"^--lens: at least 100 prompt tokens and 4,000 new ones need 4,100 positions"
    ):
        line_up(entry, 100, 4000, "--lens")


def test_what_does_not_fit_together_is_refused(checkpoint, monkeypatch):
    import tswift.benchmarking.lineup as module

    lineup = line_up(Entry(("ar", "reuse"), model=str(checkpoint)))
    need = sum(lane.generation.need.kv_bytes for lane in lineup.lanes([1, 2, 3], 50, 0))
    monkeypatch.setattr(module, "available_bytes", lambda device: need)
    lineup.lanes([1, 2, 3], 50, 0)
    monkeypatch.setattr(module, "available_bytes", lambda device: need - 1)
    with pytest.raises(InputError, match="--methods: 2 methods side by side need"):
        lineup.lanes([1, 2, 3], 50, 0)
