"""What is asked of a training: the paper's defaults, and paths that hold elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tswift.errors import InputError
from tswift.training.plan import TrainPlan


def test_the_defaults_are_those_of_table_9() -> None:
    plan = TrainPlan("anywhere")
    assert (plan.heads_count, plan.seq_len, plan.batch, plan.accumulate, plan.last) == (3, 8192, 3, 10, 200)
    assert (plan.lr, plan.warmup, plan.weight_decay) == (5e-3, 50, 0.1)
    assert plan.step_tokens == 3 * 10 * 8192


def test_a_settled_plan_holds_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "books").mkdir()
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    plan = TrainPlan("books").settled()
    assert (plan.corpus, plan.model, plan.steps) == (str(tmp_path / "books"), "demo", 200)
    assert plan.settled() == plan
    assert TrainPlan("emozilla/pg19", minutes=2).settled() == TrainPlan("emozilla/pg19", minutes=2)


def test_what_changes_no_weight_may_be_another(tmp_path: Path) -> None:
    plan = TrainPlan(str(tmp_path)).settled()
    given = {"device": "cpu", "save_minutes": 1.0, "alpha_tokens": 9, "eval_every": 0, "save_every": 3}
    assert plan.resumed(given | {"lr": 5e-3, "steps": 200}, tmp_path) == replace(plan, **given)
    with pytest.raises(InputError, match=r"^--held-out: the training in .* was begun with nothing, got 2$"):
        plan.resumed({"held_out": 2}, tmp_path)
    with pytest.raises(InputError, match=r"^--lr: must be a number above 0, got -1$"):
        plan.resumed({"lr": -1}, tmp_path)
