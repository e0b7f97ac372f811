"""The journal: what was written comes back, and nothing else does."""

from __future__ import annotations

from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from tests.rows import every_row
from tswift.jobs.folder import Checkpoint, parse_journal

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
