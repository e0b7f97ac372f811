"""A job: a decode whose tokens and text go to a run's folder as they are made."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from tswift.decoding.generation import Generation
from tswift.decoding.stats import DecodeStats, distinct
from tswift.jobs.environment import environment, now, peak_bytes
from tswift.jobs.folder import RunFolder
from tswift.jobs.text import TextStream
from tswift.models.loading import LoadedModel
from tswift.models.memory import gigabytes

RUNNING, FINISHED, INTERRUPTED = "running", "finished", "interrupted"
Show = Callable[[str, DecodeStats], None]


@dataclass
class Job:
    """A decode and the folder it fills.

    Attributes:
        model: the model.
        generation: the decode.
        folder: where its tokens, text and figures go.
        about: what ``run.json`` says of the command, its options and the prompt.
        stats: figures so far.
        state: ``running``, ``finished`` or ``interrupted``.
        prefill_seconds: wall time of the prefill; 0 before it is done.
    """

    model: LoadedModel
    generation: Generation
    folder: RunFolder
    about: dict[str, Any]
    stats: DecodeStats = field(init=False)
    state: str = RUNNING
    prefill_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.stats = DecodeStats(self.generation.depth)
        self._tokens: list[int] = []
        self._environment = environment(self.model.target.device)
        self._started = now()

    def run(self, show: Show) -> None:
        """Run to the end, or to the first Ctrl-C, which lets the step under way be finished.

        Args:
            show: called after the prefill (with no text) and after every step, with the new text and the figures so
                far. Whatever it raises ends the job as interrupted, everything made until then kept.
        """
        text = TextStream(self.model.tokenizer)
        self.folder.record(self._record())
        self.state = INTERRUPTED
        try:
            self.prefill_seconds = self.generation.decoding.prefill()
            show("", self.stats)
            with _ctrl_c() as pressed:
                for step in self.generation.steps():
                    piece = text.add(step.tokens)
                    self._tokens += step.tokens
                    self.folder.append(step.tokens, piece)
                    self.stats.add(step)
                    show(piece, self.stats)
                    if pressed:
                        break
                else:
                    self.state = FINISHED
        except KeyboardInterrupt:
            pass
        finally:
            rest = text.finish()
            try:
                self.folder.append((), rest)
                self.folder.close()
            finally:
                self.folder.record(self._record())
        show(rest, self.stats)

    def statement(self) -> list[str]:
        """What is about to be done, in lines for people."""
        about, need = self.about, self.generation.need
        how = [about["options"]["method"]]
        for name, value in about["drafting"].items():
            if name == "tree":
                value = ",".join(map(str, value))
            elif isinstance(value, bool):
                value = "yes" if value else "no"
            how.append(f"{name.replace('_', ' ')} {value}")
        partial = f" + {gigabytes(need.partial_bytes)} partial" if need.partial_bytes else ""
        return [
            "model {name}, {device}, {dtype}, attention {attention}".format(**about["model"]),
            ", ".join(how),
            f"prompt {about['prompt']['tokens']:,} tokens, {about['options']['length']:,} to generate, "
            f"KV memory {gigabytes(need.full_bytes)}{partial}",
            f"run folder {self.folder.path}",
        ]

    def figures(self) -> dict[str, Any]:
        """What was measured: times in seconds, memory in bytes."""
        stats = self.stats
        return {
            "tokens": stats.tokens,
            "prefill_tokens": self.about["prompt"]["tokens"],
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": stats.seconds,
            "tokens_per_second": stats.tokens_per_second,
            "target_passes": stats.passes,
            "tree_nodes": stats.nodes,
            "drafted_per_path": stats.depth,
            "tokens_per_step": stats.tokens_per_step,
            "alpha": stats.alpha,
            "beta": stats.beta,
            "distinct": {str(n): distinct(self._tokens, n) for n in (1, 2, 3, 4)},
            "kv_bytes": self.generation.need.kv_bytes,
            "peak_bytes": peak_bytes(self.model.target.device),
        }

    def _record(self) -> dict[str, Any]:
        ended = {} if self.state == RUNNING else {"ended": now(), "figures": self.figures()}
        histogram = {str(accepted): self.stats.accepted[accepted] for accepted in sorted(self.stats.accepted)}
        return {
            "state": self.state,
            "started": self._started,
            **self.about,
            "environment": self._environment,
            **ended,
            "accepted": histogram,
        }


@contextmanager
def _ctrl_c() -> Iterator[list[float]]:
    """A list that is empty until Ctrl-C is pressed; pressed once more, it raises as usual."""
    pressed: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(time.monotonic())
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
