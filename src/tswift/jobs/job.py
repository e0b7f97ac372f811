"""A job: a decode whose tokens and text go to a run's folder as they are made, and that can be gone on with."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tswift.decoding.stats import DecodeStats, distinct
from tswift.engine import Generation
from tswift.errors import Fault, InputError
from tswift.jobs.environment import now, peak_bytes
from tswift.jobs.folder import FolderGone, RunFolder, SaveFailed
from tswift.jobs.signals import Signals
from tswift.jobs.text import TextStream
from tswift.models.devices import gigabytes, ran_out
from tswift.models.loaded import LoadedModel

RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"
_NOTHING_STOPS = 1 << 20
Show = Callable[[str, DecodeStats], None]
ShowPrefill = Callable[[int, int], None]


@dataclass
class Job:
    """A decode and the folder it fills.

    Attributes:
        model: the model.
        generation: the decode.
        folder: where its tokens, text and figures go.
        about: what ``run.json`` says of the command, its options, the prompt and the machine.
        prompt: the prompt's token ids.
        text: the text so far; whole characters.
        stats: figures so far.
        tokens: token ids so far.
        resumed: what ``run.json`` says of each time that the run was gone on with, this one last.
        notes: lines for people, about what was found.
        state: ``running``, ``finished``, ``interrupted`` or ``failed``.
        reason: why it failed.
    """

    model: LoadedModel
    generation: Generation
    folder: RunFolder
    about: dict[str, Any]
    prompt: Sequence[int]
    text: TextStream
    stats: DecodeStats
    tokens: list[int] = field(default_factory=list)
    resumed: list[dict[str, Any]] = field(default_factory=list)
    notes: Sequence[str] = ()
    state: str = RUNNING
    reason: str = ""

    @property
    def length(self) -> int:
        """Tokens asked for, those made before included."""
        return int(self.about["options"]["length"])

    def run(self, show: Show, show_prefill: ShowPrefill | None = None, signals: Signals | None = None) -> None:
        """Run to the end, or until something stops it. Whatever does, what was made until then is saved.

        Args:
            show: called after the prefill (with no text) and after every step, with the new text and the figures so
                far. Whatever it raises ends the job as interrupted.
            show_prefill: called with the tokens prefilled so far and their number.
            signals: entered by the caller. The first to stop lets the step under way be finished.

        Raises:
            Stopped: a signal stopped it.
            Fault: something broke: the disk is full, the folder was removed, memory ran out, logits are no numbers.
        """
        signals = signals or Signals()
        self.folder.record(self._record())
        try:
            self._decode(show, show_prefill, signals)
        except BaseException as error:
            signals.patience = _NOTHING_STOPS
            self.state = INTERRUPTED if isinstance(error, (KeyboardInterrupt, OSError)) else FAILED
            fault = self._fault(error)
            if fault is None:
                self.reason = repr(error) if self.state == FAILED else ""
                rest = self._end()
                if isinstance(error, KeyboardInterrupt):
                    with suppress(OSError):  # a terminal that was closed
                        show(rest, self.stats)
                raise
            self.reason = str(fault)
            self._save_after(fault)
            raise Fault(f"{fault}; {self.saved()}") from error
        signals.patience = _NOTHING_STOPS
        self.state = FINISHED
        show(self._end(), self.stats)

    def _decode(self, show: Show, show_prefill: ShowPrefill | None, signals: Signals) -> None:
        session = self.resumed[-1] if self.resumed else self.about
        session["prefill_seconds"] = self.generation.decoding.prefill(show_prefill)
        self.folder.record(self._record())
        show("", self.stats)
        signals.patience = 1
        for step in self.generation.steps():
            piece = self.text.add(step.tokens)
            self.tokens += step.tokens
            self.stats.add(step)
            self.folder.append(step.tokens, piece, self.stats.counters)
            show(piece, self.stats)
            if signals.stopped:
                raise signals.stopped

    def _fault(self, error: BaseException) -> Fault | None:
        """What is to be said of an error; None if it is none of a kind that was to be expected."""
        if ran_out(error):
            device, made = self.model.target.device.type, self.stats.tokens
            return Fault(f"{device} has no memory left after {made:,} tokens; a lower --nodes or --budget needs less")
        return error if isinstance(error, Fault) else None

    def _end(self) -> str:
        """Save everything and close the folder; returns the text that was held back."""
        rest = self.text.finish()
        try:
            self.folder.append((), rest, self.stats.counters)
            self.folder.checkpoint(self.stats.counters(), last=True)
            self.folder.record(self._record())
        except SaveFailed as error:
            self.state, self.reason = FAILED, str(error)
            raise Fault(f"{error}; {self.saved()}") from error
        finally:
            self.folder.close()
        return rest

    def _save_after(self, fault: Fault) -> None:
        if not isinstance(fault, SaveFailed):
            with suppress(Fault):  # the first fault is the one to tell of
                self._end()
            return
        # What was not synced is not tried again: a second sync can succeed although the first lost something.
        self.folder.close()
        if isinstance(fault, FolderGone):
            with suppress(InputError, SaveFailed):
                self._write_anew()
        with suppress(SaveFailed):
            self.folder.record(self._record())

    def _write_anew(self) -> None:
        """Write the folder once more, from memory."""
        whole = TextStream(self.model.tokenizer)
        self.folder = RunFolder.create(self.folder.path)
        self.folder.keep_prompt(self.prompt)
        self.folder.append(self.tokens, whole.add(self.tokens) + whole.finish(), self.stats.counters)
        self.folder.checkpoint(self.stats.counters(), last=True)
        self.folder.close()

    def saved(self) -> str:
        """How much is on the disk, and how to go on; for people."""
        path, made = self.folder.path, len(self.tokens)
        if not path.is_dir():
            return f"{made:,} tokens could not be saved"
        saved = f"{self.folder.saved:,} of {made:,} tokens are" if self.folder.saved < made else f"{made:,} tokens are"
        return f"{saved} saved in {path}, and tswift generate --resume {path} goes on from there"

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
        made = f" and {len(self.tokens):,} made before" if self.tokens else ""
        return [
            "model {name}, {device}, {dtype}, attention {attention}".format(**about["model"]) + self.model.besides(),
            ", ".join(how),
            f"prompt {len(self.prompt):,} tokens{made}, {self.length - len(self.tokens):,} to generate, "
            f"KV memory {gigabytes(need.full_bytes)}{partial}",
            *self.notes,
            f"run folder {self.folder.path}",
        ]

    def figures(self) -> dict[str, Any]:
        """What was measured, over all of the run: times in seconds, memory in bytes."""
        stats = self.stats
        return {
            "tokens": stats.tokens,
            "prefill_tokens": len(self.prompt),
            "prefill_seconds": sum(part.get("prefill_seconds", 0.0) for part in (self.about, *self.resumed)),
            "decode_seconds": stats.seconds,
            "tokens_per_second": stats.tokens_per_second,
            "target_passes": stats.passes,
            "tree_nodes": stats.nodes,
            "drafted_per_path": stats.depth,
            "tokens_per_step": stats.tokens_per_step,
            "alpha": stats.alpha,
            "beta": stats.beta,
            "distinct": {str(n): distinct(self.tokens, n) for n in (1, 2, 3, 4)},
            "kv_bytes": self.generation.need.kv_bytes,
            "peak_bytes": peak_bytes(self.model.target.device),
        }

    def _record(self) -> dict[str, Any]:
        running, counted = self.state == RUNNING, self.stats.counters()
        return {
            "state": self.state,
            **({"reason": self.reason} if self.reason else {}),
            **self.about,
            "resumed": self.resumed,
            "process": {"pid": os.getpid(), "host": socket.gethostname()},
            **({} if running else {"ended": now(), "figures": self.figures()}),
            **{name: counted[name] for name in ("accepted", "sizes", "choices") if counted[name] or name != "choices"},
        }
