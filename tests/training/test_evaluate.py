"""How often two models draw the same, against drawing token by token."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.helpers import tiny_llama
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.models.target import Target
from tswift.training import evaluate
from tswift.training.evaluate import agreements


@pytest.mark.parametrize("params", [SamplingParams(window=9), SamplingParams(penalty=1, min_p=0)])
def test_it_is_how_often_both_draw_the_same(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_ROWS", 7)
    large, small = tiny_llama("gqa", torch.float64), tiny_llama("gqa", torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in small.parameters():
            weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    vocab = large.config.vocab_size
    text = torch.randint(vocab, (80,), generator=generator).tolist()
    logits = [model(torch.tensor([text])).logits[0].float() for model in (large, small)]
    found, near, none = agreements(
        Target(large), Target(small), text, (0, 40), 20, params, seed=3, recents=(None, 80, 0)
    )
    assert near == found  # so many that they are the whole text
    assert none[1].loss != pytest.approx(found[1].loss, abs=1e-3)
    device = torch.device("cpu")
    for each, start in zip(found, (0, 40), strict=True):
        nodes, same = range(start, start + 20), 0
        for node in nodes:
            sampler = Sampler(params, 3, vocab, device)
            sampler.extend(text[: node + 1])
            own = torch.tensor([text[node]]), torch.tensor([node]), torch.ones(1, 1, dtype=torch.bool)
            seen = sampler.seen(*own)
            one, other = (sampler.draw(rows[node : node + 1], seen, [node + 1]) for rows in logits)
            same += one == other
        assert each.agreement == same / 20
        goal = torch.tensor(text[start + 1 : start + 21])
        wanted = [F.cross_entropy(rows[start : start + 20], goal).item() for rows in logits]
        assert (each.target_loss, each.loss) == pytest.approx(tuple(wanted), abs=1e-5)
    assert 0 < sum(each.agreement for each in found) < 2


def test_what_is_read_alone_is_at_its_own_positions() -> None:
    small = tiny_llama("gqa", torch.float64)
    text = torch.randint(small.config.vocab_size, (400,), generator=torch.Generator().manual_seed(5)).tolist()
    params = SamplingParams()
    ((found,),) = agreements(Target(small), Target(small), text, (390,), 5, params, recents=(16,))
    positions = torch.arange(374, 395).unsqueeze(0)
    logits = tiny_llama("gqa", torch.float64)(torch.tensor([text[374:395]]), position_ids=positions).logits[0, 16:]
    assert found.loss == pytest.approx(F.cross_entropy(logits.float(), torch.tensor(text[391:396])).item(), abs=1e-5)
