"""transformers' own generate beside ours, by ``benchmarks/peers.py``."""

from __future__ import annotations

import pytest

from benchmarks import peers
from tests.conftest import SENTENCES, make_checkpoint

PEERS = ("transformers", "prompt-lookup", "assisted")


@pytest.mark.slow
def test_greedy_peers_write_the_text_of_plain_decoding(checkpoint, tmp_path, capsys):
    small = make_checkpoint(tmp_path / "small", num_hidden_layers=1)
    (tmp_path / "prompt.txt").write_text(" ".join(SENTENCES[:4]))
    words = ["--model", str(checkpoint), "--draft-model", str(small), "--dtype", "float64"]
    words += ["--prompt", str(tmp_path / "prompt.txt"), "--prefill", "8", "--tokens", "30"]
    # with a penalty the text does not loop, and shows that both sides penalise the same
    words += ["--temperature", "0", "--penalty", "1.2", "--min-p", "0", "--repeats", "2"]
    peers.main([*words, "--methods", "reuse", "--peers", ",".join(PEERS)])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[4:-1]]
    assert [row[0].removeprefix("| ") for row in rows] == ["ar", "reuse", *PEERS]
    assert {row[-1].removesuffix(" |") for row in rows} == {"2 of 2"}
    assert [row[1] for row in (rows[0], rows[2])] == ["1.00", "1.00"]
