"""How often two models draw the same, against drawing token by token."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from recipes import demo_draft
from recipes.demo_draft import agreements
from tests.helpers import tiny_llama
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.models.target import Target
from tswift.training import tasks
from tswift.training.tasks import measure_agreement


@pytest.mark.parametrize("params", [SamplingParams(window=9), SamplingParams(penalty=1, min_p=0)])
def test_agreement_counts_tokens_that_both_draw(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_ROWS", 7)
    monkeypatch.setattr(demo_draft, "_ROWS", 7)
    large, small = tiny_llama("gqa", torch.float64), tiny_llama("gqa", torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in small.parameters():
            weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    text = torch.randint(large.config.vocab_size, (80,), generator=generator).tolist()
    all_logits = [model(torch.tensor([text])).logits[0].float() for model in (large, small)]
    target, draft = Target(large), Target(small)
    scores = agreements(target, draft, text, (0, 40), 20, params, recent=80)
    for (whole, recent), start in zip(scores, (0, 40), strict=True):
        assert recent == whole  # so many that they are the whole text
        same = 0
        for node in range(start, start + 20):
            sampler = Sampler(params, 0, large.config.vocab_size, torch.device("cpu"))
            sampler.extend(text[: node + 1])
            seen = sampler.seen(torch.tensor([text[node]]), torch.tensor([node]), torch.ones(1, 1, dtype=torch.bool))
            one, other = (sampler.draw(logits[node : node + 1], seen, [node + 1]) for logits in all_logits)
            same += one == other
        assert whole.agreement == same / 20
        goal = torch.tensor(text[start + 1 : start + 21])
        losses = [F.cross_entropy(logits[start : start + 20], goal).item() for logits in all_logits]
        assert (whole.target_loss, whole.loss) == pytest.approx(tuple(losses), abs=1e-5)
    assert 0 < sum(whole.agreement for whole, _ in scores) < 2
    assert measure_agreement(target, draft, text[:21], params) == scores[0][0]
    assert agreements(target, draft, text, (0, 40), 20, params, recent=0)[1][1].loss != pytest.approx(whole.loss, 1e-3)


def test_recent_tokens_are_read_at_their_own_positions() -> None:
    small = tiny_llama("gqa", torch.float64)
    text = torch.randint(small.config.vocab_size, (400,), generator=torch.Generator().manual_seed(5)).tolist()
    ((_, recent),) = agreements(Target(small), Target(small), text, (390,), 5, SamplingParams(), recent=16)
    positions = torch.arange(374, 395).unsqueeze(0)
    logits = tiny_llama("gqa", torch.float64)(torch.tensor([text[374:395]]), position_ids=positions).logits[0, 16:]
    assert recent.loss == pytest.approx(F.cross_entropy(logits.float(), torch.tensor(text[391:396])).item(), abs=1e-5)
