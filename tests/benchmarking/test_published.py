"""The paper's rows, as transcribed."""

from __future__ import annotations

from collections import Counter

from tswift.benchmarking.published import published_rows


def test_all_rows_are_there() -> None:
    rows = published_rows()
    # table 3: 3 methods, 2 models, 3 prefills, 5 lengths; table 4: 3 models, 5 lengths
    assert Counter((row.table, row.method) for row in rows) == {
        (3, "medusa"): 30,
        (3, "triforce"): 30,
        (3, "tokenswift"): 30,
        (4, "tokenswift"): 15,
    }


def test_a_row_of_each_table() -> None:
    rows = {(row.published_method, row.model, row.prefill, row.length): row for row in published_rows()}
    row = rows["TokenSwift", "LLaMA3.1-8b", 4096, 100_000]
    assert (row.alpha, row.alpha_std, row.speedup, row.speedup_std, row.seconds) == (0.84, 0.05, 3.27, 0.19, None)
    assert rows["Medusa*", "LLaMA3.1-8b", 2048, 20_000].speedup_std is None
    row = rows["TokenSwift", "Qwen2.5-14B", 4096, 100_000]
    assert (row.ar_seconds, row.seconds) == (474.6 * 60, 142.2 * 60)
    assert row.source == "paper: Qwen2.5-14B, NVIDIA A100 80G"
