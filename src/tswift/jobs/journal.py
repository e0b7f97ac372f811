"""The journal of a run: a line for every checkpoint, with what vouches for the tokens up to there and the counters.

A line is a JSON object, a tab, the CRC-32 of the object's bytes, and a newline. The object holds ``tokens`` (how many),
``crc32`` (of the prompt's and these tokens' bytes) and the counters of the steps. Checksums of tokens run on from line
to line, so each line vouches for everything before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a run at one place of its text.

    Attributes:
        tokens: how many there were.
        crc32: of the bytes of the prompt and of these tokens.
        counters: of the steps that made them; see :meth:`tswift.decoding.stats.DecodeStats.counters`.
    """

    tokens: int
    crc32: int
    counters: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> bytes:
        """The journal's line."""
        about = {"tokens": self.tokens, "crc32": self.crc32, **self.counters}
        text = json.dumps(about, separators=(",", ":")).encode()
        return b"%s\t%08x\n" % (text, crc32(text))


@dataclass(frozen=True)
class Journal:
    """A journal that was read.

    Attributes:
        checkpoints: of the whole lines before the first broken one.
        size: bytes of those lines.
        torn: the last line is broken or has no end: writing it was cut short.
        broken: number of a line, from 1, that is broken although others follow; None if there is none.
    """

    checkpoints: list[Checkpoint]
    size: int
    torn: bool
    broken: int | None


def parse_journal(content: bytes) -> Journal:
    """Read a journal; nothing in it is too broken for that."""
    lines = content.split(b"\n")
    unended = lines.pop()
    found: list[Checkpoint] = []
    size = 0
    for number, line in enumerate(lines, 1):
        checkpoint = _parse(line)
        if checkpoint is None or (found and checkpoint.tokens <= found[-1].tokens):
            last = number == len(lines) and not unended
            return Journal(found, size, torn=last, broken=None if last else number)
        found.append(checkpoint)
        size += len(line) + 1
    return Journal(found, size, torn=bool(unended), broken=None)


def _parse(line: bytes) -> Checkpoint | None:
    text, _, checksum = line.rpartition(b"\t")
    if checksum != b"%08x" % crc32(text):
        return None
    try:
        about = json.loads(text)
        tokens, crc = about.pop("tokens"), about.pop("crc32")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    counted = isinstance(tokens, int) and isinstance(crc, int) and tokens >= 0
    return Checkpoint(tokens, crc, about) if counted else None
