"""A run's folder: appended to with checkpoints, locked, never overwritten;
what may be wrong with one that is read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import read_json, refused
from tests.jobs.faults import FaultyOs
from tests.jobs.killing import write_record
from tests.rows import every_row
from tswift import files
from tswift.drafting.options import RecordedOptions
from tswift.files import Lock, in_use, open_own, write_whole
from tswift.jobs import folder as module
from tswift.jobs.config import RunConfig, fingerprint
from tswift.jobs.folder import (
    JournalLine,
    Record,
    RunFolder,
    SaveFailed,
    bytes_of,
    checksum,
    default_path,
    list_runs,
    parse_journal,
    read_record,
    read_run,
    read_saved,
    read_tokens,
)
from tswift.options import changed
from tswift.sampling.parameters import SamplingParams

PROMPT, TEXT = [5, 6, 7], [11, 12, 13, 14, 15, 2**31]


@pytest.fixture
def folder(tmp_path) -> Iterator[RunFolder]:
    folder = RunFolder.create(tmp_path / "a" / "b")
    folder.keep_prompt(PROMPT)
    yield folder
    folder.close()


# --- writing


@pytest.mark.parametrize("fault", ["full", "broken"])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, call, fault):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(files, "os", FaultyOs(call, fault))
    if fault == "full" and call > 2:  # there is room for everything but what is written
        write_whole(path, b"new and longer")
    else:
        with pytest.raises(OSError, match=r"No space|Input/output") as caught:
            write_whole(path, b"new and longer")
        assert (caught.value.filename, path.read_bytes()) == (str(path), b"old")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_checkpoint_puts_everything_on_the_disk(folder, monkeypatch):
    """Nothing before it, and all of it even if a write is cut short."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, bytes(data)[:3]))
    folder.append([1, 2**31], "é", dict)
    folder.append([3], "", dict)
    assert (folder.path / "tokens.u32").stat().st_size == 0
    folder.checkpoint({"passes": 2})
    assert folder.saved == 3
    folder.append([4], "dropped", dict)
    folder.close()
    folder.close()
    assert (folder.path / "text.txt").read_bytes() == "é".encode()
    saved = read_saved(folder.path, PROMPT)
    assert (saved.tokens, saved.checkpoints[1].counters) == ([1, 2**31, 3], {"passes": 2})
    assert saved.checkpoints[1].crc32 == crc32(bytes_of([*PROMPT, 1, 2**31, 3]))


def test_neither_512_tokens_nor_many_seconds_are_at_stake(folder, monkeypatch):
    for _ in range(1023):
        folder.append([7], "", dict)
    assert folder.saved == 512
    monkeypatch.setattr(module, "_SECONDS", 0)
    folder.append([7], "", dict)
    assert folder.saved == 1024


def test_a_record_replaces_the_one_before(folder):
    folder.record(Record(state="running"))
    folder.record(Record(state="finished", options={"out": folder.path}, choices={"ar": 1}))
    record = read_json(folder.path / "run.json")
    assert (record["schema"], record["state"], record["checksum"]) == (
        2,
        "finished",
        checksum(record),
    )
    assert read_record(folder.path) == Record(
        state="finished", options={"out": str(folder.path)}, choices={"ar": 1}
    )
    assert "figures" not in record
    assert not list(folder.path.glob("*.new"))


def test_a_folder_is_for_one_run_and_one_process(folder):
    assert in_use(folder.path)
    with refused(r"out: .* is in use by another run"):
        RunFolder.create(folder.path)
    folder.record(Record())
    with refused(r"out: .* is not empty"):
        RunFolder.create(folder.path)
    folder.close()
    assert not in_use(folder.path)
    assert not (folder.path / "lock").exists()


def test_a_run_that_was_never_begun_leaves_nothing_or_is_begun_anew(folder, tmp_path):
    folder.discard()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    RunFolder.create(tmp_path / "old").discard()
    assert list((tmp_path / "old").iterdir()) == []
    killed = RunFolder.create(tmp_path / "run")  # while its model was loading
    killed.keep_prompt([1, 2])
    killed.close()
    with refused(r"holds no run: it was stopped while the model was loading; --out begins"):
        read_record(tmp_path / "run")
    (tmp_path / "many" / "000002").mkdir(parents=True)
    (tmp_path / "many" / "000002" / "run.json").touch()
    with refused(r"many holds no run: folders in it do, such as \S+/many/000002"):
        read_record(tmp_path / "many")
    again = RunFolder.create(tmp_path / "run")
    again.append([5], "five", dict)
    again.checkpoint({})
    again.close()
    with refused(r"out: .* is not empty"):
        RunFolder.create(tmp_path / "run")
    assert (tmp_path / "run" / "text.txt").read_text() == "five"


def test_reopened_where_it_was_left(folder):
    for token, word in ((1, "one"), (2, " two")):
        folder.append([token], word, dict)
        folder.checkpoint({})
    folder.close()
    checkpoint = read_saved(folder.path, PROMPT).checkpoints[1]
    again = RunFolder.reopen(folder.path, Lock(folder.path), Record(), checkpoint, "one")
    again.append([4], " four", dict)
    again.checkpoint({})
    again.close()
    assert (read_tokens(folder.path / "tokens.u32"), (folder.path / "text.txt").read_text()) == (
        [1, 4],
        "one four",
    )
    assert read_saved(folder.path, PROMPT).tokens == [1, 4]


@pytest.mark.parametrize("name", ["tokens.u32", "journal"])
def test_a_link_is_not_written_through(folder, tmp_path, name):
    folder.append([1, 2], "one two", dict)
    folder.checkpoint({})
    folder.close()
    checkpoint = read_saved(folder.path, PROMPT).checkpoints[-1]
    (folder.path / name).rename(tmp_path / "precious")
    (folder.path / name).symlink_to(tmp_path / "precious")
    before = (tmp_path / "precious").read_bytes()
    with Lock(folder.path) as lock, refused(rf"/{name} cannot be used \(it is a link\)$"):
        RunFolder.reopen(folder.path, lock, Record(), checkpoint, "")
    assert (tmp_path / "precious").read_bytes() == before


def test_a_pipe_that_has_come_since_it_was_looked_at_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "some.new")
    with refused(r"/some\.new cannot be used \(it is a named pipe\)$"):
        write_whole(tmp_path / "some", b"")
    monkeypatch.setattr(files, "status_of_regular_file", lambda path, option: None)
    with pytest.raises(OSError, match="No such device"):
        open_own(tmp_path / "some.new", os.O_WRONLY)


@pytest.mark.parametrize("goes", [shutil.rmtree, lambda path: path.rename(path.with_name("moved"))])
def test_a_folder_that_goes_is_noticed(folder, goes):
    folder.append([1, 2], "one two", dict)
    goes(folder.path)
    with pytest.raises(SaveFailed, match="was removed or moved"):
        folder.checkpoint({})


def test_a_clock_that_was_set_back_takes_no_name_twice(tmp_path, monkeypatch):
    class Stopped(module.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2020, 1, 1, tzinfo=tz)

    monkeypatch.setattr(module, "datetime", Stopped)
    first = default_path("ar", tmp_path)
    first.mkdir()
    assert default_path("ar", tmp_path) == first.with_name(f"{first.name}-2")


# --- the journal

COUNTERS = st.dictionaries(
    st.sampled_from(["passes", "seconds", "reused"]), st.integers(0, 9) | st.floats(0, 9)
)


@given(counts=st.sets(st.integers(1, 2**40), max_size=6), data=st.data())
def test_checkpoints_come_back(counts, data):
    checkpoints = [
        JournalLine(n, data.draw(st.integers(0, 2**32 - 1)), data.draw(COUNTERS))
        for n in sorted(counts)
    ]
    content = b"".join(checkpoint.line() for checkpoint in checkpoints)
    journal = parse_journal(content)
    assert journal == (checkpoints, False, None)
    assert [checkpoint.end for checkpoint in journal.checkpoints][-1:] == (
        [len(content)] if counts else []
    )


@given(content=st.binary(max_size=200))
def test_anything_can_be_read(content):
    journal = parse_journal(content)
    assert not journal.checkpoints
    assert journal.truncated or journal.broken or not content


@every_row(
    "text",
    [
        *(b"{}", b"[1]", b"nothing", b'{"tokens":-1,"crc32":1}', b'{"tokens":"6","crc32":1}'),
        *(b'{"tokens":5,"crc32":2}', b'{"tokens":5.5,"crc32":2}', b'{"tokens":6,"crc32":null}'),
    ],
)
def test_a_line_that_says_nothing_or_does_not_rise_is_broken(text):
    line = b"%s\t%08x\n" % (text, crc32(text))
    good = JournalLine(5, 1).line()
    assert parse_journal(good + line).truncated
    assert parse_journal(good + line + JournalLine(9, 3).line()).broken == 2


def journaled(folder: Path, counts: list[int], tokens: list[int] = TEXT) -> Path:
    """A journal with checkpoints at these counts, and the tokens."""
    lines = [
        JournalLine(n, crc32(bytes_of(PROMPT + TEXT[:n])), {"passes": n}).line() for n in counts
    ]
    (folder / "journal").write_bytes(b"".join(lines))
    (folder / "tokens.u32").write_bytes(bytes_of(tokens))
    return folder


def test_what_was_saved(tmp_path):
    saved = read_saved(journaled(tmp_path, []), PROMPT)
    assert (saved.tokens, saved.unsure, saved.damage, saved.checkpoints[-1].end) == ([], 6, "", 0)
    saved = read_saved(journaled(tmp_path, [2, 5]), PROMPT)
    assert (saved.tokens, saved.unsure, saved.truncated, saved.damage) == (TEXT[:5], 1, False, "")
    assert [checkpoint.tokens for checkpoint in saved.checkpoints] == [0, 2, 5]
    assert saved.checkpoints[-1].end == (tmp_path / "journal").stat().st_size
    saved = read_saved(journaled(tmp_path, [2, 5], TEXT[:4]), PROMPT)
    assert saved.tokens == TEXT[:2]
    assert "tokens.u32 has 16 bytes, its journal speaks of 20" in saved.damage
    saved = read_saved(tmp_path, [5, 6, 8])  # another prompt
    assert saved.tokens == []
    assert "does not match its checksum between tokens 0 and 2" in saved.damage


@given(cut=st.integers(1, 40))
def test_a_torn_last_line_is_no_damage(tmp_path_factory, cut):
    folder = journaled(tmp_path_factory.mktemp("torn"), [2, 5])
    lines = (folder / "journal").read_bytes()
    (folder / "journal").write_bytes(lines[:-cut])
    saved = read_saved(folder, PROMPT)
    assert (saved.tokens, saved.truncated, saved.damage) == (TEXT[:2], True, "")


@given(data=st.data())
def test_every_changed_bit_is_seen(tmp_path_factory, data):
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


# --- the record


def test_reads_everything(tmp_path):
    (tmp_path / "prompt.u32").write_bytes(bytes_of(PROMPT))
    sampling = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.0,
        "eta": 0.1,
        "penalty": 1.1,
        "window": 8,
    }
    model = {
        "name": "x/y",
        "device": "cpu",
        "dtype": "float64",
        "attention": "native",
        "heads": None,
        "eos_ids": [0],
    }
    record = {
        "schema": 2,
        "state": "interrupted",
        "options": {"seed": 2**70, "length": 9, "method": "ar", "stop_at_eos": True, "heads": None},
        "sampling": {**sampling, "banned": [0, 4]},
        "model": model,
        "drafting": {},
        "prompt": {"tokens": 3, "sha256": fingerprint(PROMPT)},
    }
    write_record(tmp_path, record)
    found = read_run(tmp_path)
    assert found.params == SamplingParams(**sampling, banned=(0, 4))
    asked = {"length": 9, "method": "ar", "seed": 2**70, "stop_at_eos": True}
    made = RunConfig.of(**asked, model="x/y", device="cpu", dtype="float64", kv_dtype="float64")
    # the native kernel may be missing elsewhere
    before = {"exact": False, "sampling_from": "paper", "skip_special_tokens": False}
    assert found.config == replace(changed(made, before), drafting=RecordedOptions())
    assert (found.record.state, found.prompt, found.bits, found.eos_ids) == (
        "interrupted",
        PROMPT,
        None,
        (0,),
    )


@every_row(
    ("data", "message"),
    [(b"1234567", "is not a file of uint32: it has 7 bytes"), (b"", "holds no tokens")],
)
def test_what_is_no_file_of_tokens(tmp_path, data, message):
    (tmp_path / "some.u32").write_bytes(data)
    with refused(f"^tokens: .*some.u32 {message}"):
        read_tokens(tmp_path / "some.u32", "tokens")


# --- a list of runs


def made(path: Path, state: str, started: str, **more) -> RunFolder:
    folder = RunFolder.create(path)
    folder.keep_prompt([1])
    options = {"length": 100, "method": "ar"}
    folder.record(
        Record(state=state, options=options, model={"name": "m"}, started=started, **more)
    )
    return folder


def test_a_list_says_every_state(tmp_path):
    running = made(tmp_path / "d", "running", "2026-01-04")
    running.append([1, 2, 3], "", dict)
    running.checkpoint({"seconds": 1.5})
    made(tmp_path / "a", "finished", "2026-01-01").close()
    made(tmp_path / "b", "failed", "2026-01-02", reason="no room").close()
    made(tmp_path / "c", "running", "2026-01-03").close()
    loading = RunFolder.create(tmp_path / "y")
    made(tmp_path / "z", "finished", "2026-01-05").close()
    (tmp_path / "z" / "run.json").write_text("{")
    another = RunFolder.create(tmp_path / "x")
    another.record(Record(state="finished"))
    another.close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "bench.json").write_text("{}")
    entries = {entry.path.name: entry for entry in list_runs(tmp_path)}
    states = {"x": "broken", "y": "running", "z": "broken"}  # what has no time first
    states |= {"a": "finished", "b": "failed", "c": "killed", "d": "running"}
    assert [*{name: entry.state for name, entry in entries.items()}.items()] == [*states.items()]
    assert entries["b"].reason == "no room"
    assert "is not JSON" in entries["z"].reason
    assert "is broken" in entries["x"].reason
    found = entries["d"]
    assert (found.tokens, found.length, found.method, found.model) == (3, 100, "ar", "m")
    assert found.tokens_per_second == 2.0
    assert [entry.path for entry in list_runs(tmp_path / "d")] == [tmp_path / "d"]
    running.close()
    loading.close()


def test_a_list_of_nothing_and_of_a_journal_that_would_never_end(tmp_path):
    assert list_runs(tmp_path) == []
    with refused("there is no folder"):
        list_runs(tmp_path / "none")
    for name in ("pipe", "device"):
        made(tmp_path / name, "finished", "2026-01-01").close()
        (tmp_path / name / "journal").unlink()
    os.mkfifo(tmp_path / "pipe" / "journal")
    (tmp_path / "device" / "journal").symlink_to("/dev/zero")
    assert [(entry.state, entry.tokens) for entry in list_runs(tmp_path)] == [("finished", 0)] * 2
