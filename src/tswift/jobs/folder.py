"""A run's folder: ``prompt.u32``, ``text.txt``, ``tokens.u32`` and ``run.json``.

Text and tokens are appended while the job runs, so whatever ends it, what was made is there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from tswift.errors import InputError

SCHEMA = 1
TEXT, TOKENS, RECORD, PROMPT, AUDIT = "text.txt", "tokens.u32", "run.json", "prompt.u32", "verify.json"
_FLUSH_SECONDS = 2.0


def default_path(method: str) -> Path:
    """``runs/<UTC time>-<method>`` in the working directory."""
    return Path("runs") / f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%fZ}-{method}"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_bytes(content)
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def new_folder(path: Path) -> list[Path]:
    """Make a folder, or take one that is empty.

    Returns:
        The folders that were made, the innermost first.

    Raises:
        InputError: it holds something, or cannot be made.
    """
    try:
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise InputError(f"{path} is not empty; a run needs a folder of its own", "--out")
    except OSError as error:
        raise InputError(f"{path} cannot be written to ({error.strerror})", "--out") from None
    return made


class RunFolder:
    """A new run's folder, open for appending.

    Args:
        path: a folder that does not exist yet, or is empty.

    Raises:
        InputError: it holds something, or cannot be made or written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._made = new_folder(path)
            self._tokens = (path / TOKENS).open("xb")
            self._text = (path / TEXT).open("xb")
        except OSError as error:
            raise InputError(f"{path} cannot be written to ({error.strerror})", "--out") from None
        self._flushed = time.monotonic()

    def keep_prompt(self, tokens: Sequence[int]) -> None:
        """Write ``prompt.u32``: the prompt need not be there any more when the run is verified.

        Raises:
            InputError: it cannot be written.
        """
        try:
            (self.path / PROMPT).write_bytes(np.asarray(tokens, dtype="<u4").tobytes())
        except OSError as error:
            raise InputError(f"{self.path} cannot be written to ({error.strerror})", "--out") from None

    def append(self, tokens: Sequence[int], text: str) -> None:
        """Add generated tokens and the text that they complete; flushed if the last flush is two seconds ago."""
        self._tokens.write(np.asarray(tokens, dtype="<u4").tobytes())
        self._text.write(text.encode())
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Hand to the system what was appended."""
        self._tokens.flush()
        self._text.flush()
        self._flushed = time.monotonic()

    def record(self, record: Mapping[str, Any]) -> None:
        """Write ``run.json``, whole or not at all."""
        final = self.path / RECORD
        new = final.with_name(f"{RECORD}.new")
        text = json.dumps({"schema": SCHEMA, **record}, indent=2, ensure_ascii=False, default=str)  # paths
        new.write_text(f"{text}\n", encoding="utf-8")
        os.replace(new, final)

    def close(self) -> None:
        """Close the files."""
        self._tokens.close()
        self._text.close()

    def discard(self) -> None:
        """Take back a folder in which no run was started."""
        self.close()
        for name in (TOKENS, TEXT, PROMPT):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # somebody else has put something there meanwhile
            for folder in self._made:
                folder.rmdir()
