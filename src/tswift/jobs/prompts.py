"""Files of prompts, JSON Lines or parquet: one a line,
by the names that data sets have for a prompt.

A prompt is a text (``prompt``, ``question``, ``query``, ``instruction`` and others), what a user
says first (``turns``, as Spec-Bench and SPEED-Bench have it), or a chat (``messages``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tswift.errors import InputError, Object, check_text, parse_object, read_file, reason_of
from tswift.jobs.config import MAX_BYTES, Text, check_prompt
from tswift.options import Values

# of a line, the first of these names that it has
_TEXT = ("prompt", "problem", "question", "question_content", "query", "instruction", "text")
_ID = ("id", "name", "task_id", "question_id", "slug")
_KIND = ("kind", "category")
SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Line:
    """A line of a file: its number from 1, its fields by their names in lower case,
    and where that is, for errors.
    """

    number: int
    fields: Values
    where: str
    fault: str = ""  # why it has no fields

    def text(self, stem: str, kind: str | None, option: str) -> Text:
        """The prompt, called ``stem`` and the line's id, or its number; its kind is the line's,
        else ``kind``.

        Raises:
            InputError: there is none, or something is of another type.
        """
        if self.fault:
            raise InputError(f"{self.where} {self.fault}", option)
        messages = self._messages(option)
        name = next(map(self.fields.get, self._given(_ID)), self.number)
        kind = next(map(self.fields.get, self._given(_KIND)), kind)
        if not isinstance(kind, str | None) or not isinstance(name, str | int):
            raise InputError(f"{self.where}: its kind or id is no text", option)
        text = check_prompt(
            messages[-1]["content"] if messages else self._text(option), option, self.where
        )
        return Text(f"{stem}/{name}", text, kind, messages)

    def unread(self, others: Iterable[str]) -> list[str]:
        """The fields that are no part of its text, no name of that, and none of ``others``."""
        asks = self._given(("messages", "turns", *_TEXT))[:1]
        known = {*asks, *_ID, *_KIND, *others, *(["input"] * (asks == ["instruction"]))}
        return [name for name in self._given(self.fields) if name not in known]

    def _given(self, names: Iterable[str]) -> list[str]:
        """Those of some fields that it has."""
        return [name for name in names if self.fields.get(name) is not None]

    def _text(self, option: str) -> str:
        turns = self.fields.get("turns")
        if turns is not None:
            if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
                raise InputError(f"{self.where}: its turns are no texts", option)
            return turns[0]
        names = self._given(_TEXT)
        text = self.fields[names[0]] if names else None
        if not isinstance(text, str):
            raise InputError(
                f"{self.where} has no messages, turns, or text called {', '.join(_TEXT)}", option
            )
        more = self.fields.get("input") if names[0] == "instruction" else None
        return f"{text}\n\n{more}" if isinstance(more, str) and more else text

    def _messages(self, option: str) -> tuple[Mapping[str, str], ...]:
        """A chat up to what its user says last; empty for none."""
        given = self.fields.get("messages")
        if given is None:
            return ()
        parts = given if isinstance(given, list) else []
        said: list[Object] = [
            {name: each.get(name) for name in ("role", "content")}
            for each in parts
            if isinstance(each, dict)
        ]
        while said and said[-1]["role"] != "user":
            del said[-1]
        if not said or not all(isinstance(value, str) for each in said for value in each.values()):
            raise InputError(
                f"{self.where}: its messages are no roles and contents, with one of a user", option
            )
        check_text("".join(each["content"] for each in said), option, self.where)
        return tuple(said)


def read_lines(path: Path, option: str) -> Iterator[Line]:
    """The lines of a file, one by one.

    Raises:
        InputError: it cannot be read. A line that is no object of JSON says so when it is asked for
            its text.
    """
    if path.suffix == ".parquet":
        for number, fields in enumerate(_rows(path, option), 1):
            yield Line(number, _lower(fields), f"row {number} of {path.name}")
        return
    for number, line in enumerate(read_file(path, MAX_BYTES, option).splitlines(), 1):
        if line.strip():
            yield _line(number, line, f"line {number} of {path.name}")


def _lower(fields: Values) -> Object:
    return {name.lower(): value for name, value in fields.items()}


def _line(number: int, line: bytes, where: str) -> Line:
    try:
        return Line(number, _lower(parse_object(line)), where)
    except ValueError as error:
        return Line(number, {}, where, str(error))


def _rows(path: Path, option: str) -> list[Object]:
    from pyarrow import parquet

    try:
        rows: list[Object] = parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow has errors of its own
        raise InputError(f"{path} cannot be read ({reason_of(error)})", option) from None
    return rows
