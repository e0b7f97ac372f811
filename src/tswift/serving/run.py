"""A request as a run, and its text, which any number of readers follow while it grows."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from tswift.decoding.stats import DecodeStats
from tswift.decoding.text import text_of
from tswift.errors import Object
from tswift.files import write_whole
from tswift.jobs.config import RunConfig
from tswift.jobs.folder import FINISHED, LOGPROBS, REQUEST, RUNNING, read_own
from tswift.jobs.job import Job
from tswift.models.config import ModelConfig
from tswift.serving.requests import ApiRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUEUED, CANCELLED, IN_USE = "queued", "cancelled", "in use"
MODEL_OPTIONS = frozenset(each.name for each in fields(ModelConfig))
_MAX_TEXT = 1 << 15  # bytes of a text that are read at a time


class RunStopped(KeyboardInterrupt):
    """A run is to be stopped between two steps. Jobs take it as they take Ctrl-C."""


@dataclass(eq=False)
class ApiRun:
    """A request, or a run's folder, and its text so far.

    The text only grows, ``ends`` says how many of its bytes each step completed, and ``tokens`` how
    many tokens there were then; so readers need no lock, and one that is slow or gone costs
    nothing.
    """

    path: Path
    config: RunConfig  # with the length that it is to come to
    request: ApiRequest | None = None  # as it was understood; None for a run of ``tswift generate``
    created: int = 0  # Unix time
    prompt: Sequence[int] | None = None  # token ids, until they are in its folder
    prompt_tokens: int = 0
    copied: int = 0  # tokens of the text so far that were not forwarded again
    state: str = QUEUED  # or cancelled, in use (by another process), or what a list of runs says
    reason: str = ""  # why it failed
    refusal: bool = False  # it failed for what was asked
    stopping: str = ""  # the state in which it is to stop
    # how a finished text ended: length, eos (which is no part of the text) or stop
    end: str | None = None
    stats: DecodeStats = field(default_factory=lambda: DecodeStats(0))
    text: bytearray = field(default_factory=bytearray)
    tokens: array[int] = field(default_factory=lambda: array("Q"))
    ends: array[int] = field(default_factory=lambda: array("Q"))
    # the tokens, where log-probabilities are asked for
    ids: array[int] = field(default_factory=lambda: array("I"))
    rows: bytearray = field(default_factory=bytearray)  # and those, as in ``logprobs.bin``

    @property
    def id(self) -> str:
        """Its folder's name."""
        return self.path.name

    def wants(self, what: str) -> bool:
        """Whether it is a request with this switch on."""
        return self.request is not None and what in self.request.wants

    @property
    def open(self) -> bool:
        """Whether its text may still grow."""
        return self.state in (QUEUED, RUNNING)

    def read(self, tokens: int, start: int) -> tuple[str, int, int] | None:
        """For a reader who has ``tokens`` and ``start`` bytes: the text after them,
        and how many of both that makes.
        """
        last = len(self.ends) - 1
        if last < 0 or self.ends[last] <= start:
            return None
        end = self.ends[last]
        if end - start > _MAX_TEXT:
            end = start + _MAX_TEXT
            while self.text[end] & 0xC0 == 0x80:  # within a character
                end -= 1
            last = bisect_right(self.ends, end) - 1
        made = max(tokens, self.tokens[last]) if last >= 0 else tokens
        return self.text[start:end].decode(errors="replace"), made, end

    def grow(self, text: str, tokens: int) -> None:
        """Add text. Readers look at ``ends`` first, so that is written last."""
        self.text += text.encode()
        self.tokens.append(tokens)
        self.ends.append(len(self.text))

    def brief(self) -> Object:
        """What a list says of it."""
        return {
            "id": self.id,
            "object": "run",
            "state": self.state,
            "tokens": self.stats.tokens,
            "max_tokens": self.config.text.length,
            "method": self.config.method,
            "tokens_per_second": self.stats.tokens_per_second or None,
        }

    def figures(self) -> dict[str, float]:
        """What was counted and measured so far."""
        stats = self.stats
        return {
            "tokens": stats.tokens,
            "passes": stats.passes,
            "drafted": max(0, stats.nodes - stats.passes),
            "accepted": sum(count * steps for count, steps in stats.accepted.items()),
            "tokens_per_pass": round(stats.tokens_per_step, 3),
            "alpha": round(stats.alpha, 4),
            "seconds": round(stats.seconds, 3),
            "tokens_per_second": round(stats.tokens_per_second, 2),
        }

    def echo(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The prompt, if it is to stand before the text."""
        if self.request is None or not self.wants("echo"):
            return ""
        prompt = self.request.prompt
        return prompt if isinstance(prompt, str) else text_of(tokenizer, prompt)

    @property
    def finish_reason(self) -> str | None:
        """In OpenAI's format; None while it is not finished."""
        return None if self.state != FINISHED else "length" if self.end == "length" else "stop"

    def follow(self, job: Job) -> Callable[[str, DecodeStats], None]:
        """What a job is to call after every step."""
        self.stats = job.stats.copy()
        wanted = job.config.logprobs is not None
        if wanted and job.tokens:
            self.rows += read_own(self.path / LOGPROBS)
            self.ids.extend(job.tokens)
        self.grow(job.generation.before, job.stats.tokens)

        def show(piece: str, stats: DecodeStats) -> None:
            if job.state == FINISHED:
                self.end = job.end()["reason"]
            elif job.state != RUNNING:
                # a character or a stop string that was begun may be another when it goes on
                piece = ""
            if wanted and len(self.ids) < len(job.tokens):
                self.rows += job.rows
                self.ids.extend(job.tokens[len(self.ids) :])
            self.grow(piece, stats.tokens)
            self.stats = stats.copy()
            if self.stopping and job.state == RUNNING:
                raise RunStopped

        return show

    def show_prefill(self, done: int, total: int) -> None:
        """What a job is to call while it reads the text so far."""
        if self.stopping:
            raise RunStopped

    def store(self, state: str = "") -> None:
        """Write what was asked to its folder; with a ``state``, it is not to go on by itself.

        OSError if it fails.
        """
        if (request := self.request) is not None:
            content = {
                "chat": "chat" in request.wants,
                "created": self.created,
                "model": request.model,
                "length": self.config.text.length,
                "typed": {
                    name: value
                    for name, value in request.typed.items()
                    if name not in MODEL_OPTIONS
                },
                **({"state": state, "reason": self.reason} if state else {}),
                "body": request.body,
            }
            write_whole(self.path / REQUEST, json.dumps(content, indent=1).encode() + b"\n")
