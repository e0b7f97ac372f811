"""``tswift compare`` from the outside."""

from __future__ import annotations

import json

THREE = ("--methods", "medusa,tokenswift")


def test_table_and_exit_code(tswift, checkpoint, prompt):
    result = tswift("compare", "--len", 40, "--model", checkpoint, "--prompt", prompt, "--with-reference-ar", *THREE)
    assert result.code == 0
    lines = result.out.decode().splitlines()
    assert "40 tokens" in lines[0]
    assert [line.split("  ")[0] for line in lines[2:6]] == ["AR", "medusa", "tokenswift", "AR, reference style"]
    assert "yes" in lines[3]
    assert "x over reference style" in lines[1]


def test_json(tswift, checkpoint, prompt, tmp_path):
    path = tmp_path / "compare.json"
    words = ("compare", "--len", 30, "--model", checkpoint, "--prompt", prompt, "--methods", "reuse", "--quiet")
    result = tswift(*words, "--json", path)
    assert result.code == 0
    assert result.err == ""
    record = json.loads(path.read_text())
    assert record["ok"] is True
    assert [outcome["method"] for outcome in record["outcomes"]] == ["ar", "reuse"]
    assert record["drafting"]["reuse"]["ngrams"] == 20
    assert record["command"][:2] == ["tswift", "compare"]
    assert record["sampling"]["banned"] == [0]
    on_stdout = tswift(*words, "--json", "-")
    assert json.loads(on_stdout.out)["outcomes"][0]["passes"] == 30


def test_a_wrong_method_exits_with_one(tswift, checkpoint, prompt, monkeypatch):
    from tswift.decoding.drafter import DraftTree

    walk = DraftTree.walk

    def greedy_walk(self, drawn):
        """Accept the first child whatever was drawn."""
        path = walk(self, drawn)
        children = [node for node in range(len(self)) if self.parents[node] == path[-1]]
        return [*path, children[0]] if children else path

    monkeypatch.setattr(DraftTree, "walk", greedy_walk)
    result = tswift("compare", "--len", 40, "--model", checkpoint, "--prompt", prompt, "--methods", "medusa")
    assert result.code == 1
    assert "NOT rounding" in result.out.decode()
