"""A run's folder read back, and everything that can be wrong with it in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rows import every_row
from tswift.decoding.params import SamplingParams
from tswift.jobs.config import RunConfig, fingerprint
from tswift.jobs.folder import Checkpoint, bytes_of, checksum, parse_journal, read_run, read_saved, read_tokens


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as a run leaves it."""
    np.array([5, 6, 7], "<u4").tofile(tmp_path / "prompt.u32")
    np.array([1, 2**31], "<u4").tofile(tmp_path / "tokens.u32")
    record = {
        "schema": 2,
        "state": "interrupted",
        "options": {"seed": 2**70, "length": 9, "method": "ar", "stop_at_eos": True, "heads": None},
        "sampling": {
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "min_p": 0.0,
            "eta": 0.1,
            "penalty": 1.1,
            "window": 8,
            "banned": [0, 4],
        },
        "model": {
            "name": "x/y",
            "device": "cpu",
            "dtype": "float64",
            "attention": "sdpa",
            "heads": None,
            "eos_ids": [0],
        },
        "drafting": {},
        "prompt": {"tokens": 3, "sha256": fingerprint([5, 6, 7])},
    }
    (tmp_path / "run.json").write_text(json.dumps({**record, "checksum": checksum(record)}))
    return tmp_path


def test_reads_everything(run: Path) -> None:
    found = read_run(run)
    assert found.params == SamplingParams(0.5, 3, 0.9, 0.0, 0.1, 1.1, 8, (0, 4))
    made = RunConfig(
        length=9,
        method="ar",
        seed=2**70,
        stop_at_eos=True,
        model="x/y",
        device="cpu",
        dtype="float64",
        attention="sdpa",
    )
    assert found.config == replace(made, exact=False, kv_dtype="float64")
    assert (found.state, found.prompt, found.bits, found.eos_ids) == ("interrupted", [5, 6, 7], None, (0,))


def test_a_run_by_the_native_kernel_can_be_loaded_without_it(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    del record["checksum"]
    record["model"]["attention"] = "native"
    (run / "run.json").write_text(json.dumps({**record, "checksum": checksum(record)}))
    found = read_run(run)
    assert found.config.attention == "auto"
    assert found.record["model"]["attention"] == "native"


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_tokens_come_back(tokens: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "some.u32"
    np.array(tokens, "<u4").tofile(path)
    assert read_tokens(path) == tokens


PROMPT = [5, 6, 7]
TEXT = [11, 12, 13, 14, 15, 16]


def journaled(folder: Path, counts: list[int], tokens: list[int] = TEXT) -> Path:
    """A journal with checkpoints at these counts, and the tokens."""
    lines = [Checkpoint(n, crc32(bytes_of(PROMPT + TEXT[:n])), {"passes": n}).line() for n in counts]
    (folder / "journal").write_bytes(b"".join(lines))
    (folder / "tokens.u32").write_bytes(bytes_of(tokens))
    return folder


def test_what_was_saved(tmp_path: Path) -> None:
    saved = read_saved(journaled(tmp_path, [2, 5]), PROMPT)
    assert (saved.tokens, saved.unsure, saved.truncated, saved.damage) == (TEXT[:5], 1, False, "")
    assert [checkpoint.tokens for checkpoint in saved.checkpoints] == [0, 2, 5]
    assert saved.checkpoints[-1].end == (tmp_path / "journal").stat().st_size
    assert saved.checkpoints[-1].counters == {"passes": 5}


def test_nothing_was_saved(tmp_path: Path) -> None:
    saved = read_saved(journaled(tmp_path, []), PROMPT)
    assert (saved.tokens, saved.unsure, saved.damage, saved.checkpoints[-1].end) == ([], 6, "", 0)


@given(cut=st.integers(1, 40))
def test_a_torn_last_line_is_no_damage(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = journaled(tmp_path_factory.mktemp("torn"), [2, 5])
    lines = (folder / "journal").read_bytes()
    (folder / "journal").write_bytes(lines[:-cut])
    saved = read_saved(folder, PROMPT)
    assert (saved.tokens, saved.truncated, saved.damage) == (TEXT[:2], True, "")


@given(data=st.data())
def test_every_changed_bit_is_seen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = journaled(tmp_path_factory.mktemp("flipped"), [2, 4, 5])
    name = data.draw(st.sampled_from(["journal", "tokens.u32"]))
    content = bytearray((folder / name).read_bytes())
    vouched = 20 if name == "tokens.u32" else len(content)
    place = data.draw(st.integers(0, 8 * vouched - 1))
    content[place // 8] ^= 1 << place % 8
    (folder / name).write_bytes(content)
    saved = read_saved(folder, PROMPT)
    assert saved.tokens == TEXT[: len(saved.tokens)]  # only sound tokens are ever given
    assert saved.damage or saved.truncated
    assert len(saved.tokens) < 5


def test_too_few_tokens_are_damage(tmp_path: Path) -> None:
    saved = read_saved(journaled(tmp_path, [2, 5], TEXT[:4]), PROMPT)
    assert saved.tokens == TEXT[:2]
    assert "tokens.u32 has 16 bytes, its journal speaks of 20" in saved.damage


def test_tokens_of_another_prompt_are_damage(tmp_path: Path) -> None:
    saved = read_saved(journaled(tmp_path, [2, 5]), [5, 6, 8])
    assert saved.tokens == []
    assert "does not match its checksum between tokens 0 and 2" in saved.damage


COUNTERS = st.dictionaries(st.sampled_from(["passes", "seconds", "reused"]), st.integers(0, 9) | st.floats(0, 9))


@given(counts=st.sets(st.integers(1, 2**40), max_size=6), data=st.data())
def test_checkpoints_come_back(counts: set[int], data: st.DataObject) -> None:
    checkpoints = [Checkpoint(n, data.draw(st.integers(0, 2**32 - 1)), data.draw(COUNTERS)) for n in sorted(counts)]
    content = b"".join(checkpoint.line() for checkpoint in checkpoints)
    journal = parse_journal(content)
    assert journal.checkpoints == checkpoints
    assert (journal.truncated, journal.broken) == (False, None)
    assert [checkpoint.end for checkpoint in journal.checkpoints][-1:] == ([len(content)] if counts else [])


@given(content=st.binary(max_size=200))
def test_anything_can_be_read(content: bytes) -> None:
    journal = parse_journal(content)
    assert not journal.checkpoints
    assert journal.truncated or journal.broken or not content


@every_row("text", [b"{}", b"[1]", b"nothing", b'{"tokens":-1,"crc32":1}', b'{"tokens":"1","crc32":1}'])
def test_a_line_that_says_nothing_is_broken(text: bytes) -> None:
    line = b"%s\t%08x\n" % (text, crc32(text))
    good = Checkpoint(5, 1).line()
    assert parse_journal(line).truncated
    assert parse_journal(line + good).broken == 1
    assert parse_journal(good + line + good).broken == 2


def test_counts_that_do_not_rise_are_broken() -> None:
    lines = Checkpoint(5, 1).line() + Checkpoint(5, 2).line()
    assert parse_journal(lines + Checkpoint(9, 3).line()).broken == 2
