"""A job: a decode whose tokens and text go to a run's folder as they are made, and that can be resumed.

Signals (Ctrl-C, ``kill``, a terminal that is closed) stop it between two steps.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from tswift.decoding.stats import DecodeStats, distinct
from tswift.decoding.text import TextStream
from tswift.engine import Generation
from tswift.errors import Fault
from tswift.jobs.environment import now, peak_bytes
from tswift.jobs.folder import FAILED, FINISHED, INTERRUPTED, RUNNING, RunFolder, SaveFailed
from tswift.models.devices import gigabytes, ran_out
from tswift.models.load import LoadedModel

_STOPPING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Stopped(KeyboardInterrupt):
    """A signal, by its number, asked this process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def code(self) -> int:
        """The exit code that shells know for it."""
        return 128 + self.number


class Signals:
    """While entered, signals to stop raise :class:`Stopped`; or are noted, where work must not be interrupted.

    A signal that the process was told to ignore (``nohup``) stays ignored. Outside the main thread nothing is done.
    """

    def __init__(self) -> None:
        self.patience = 0  # how many signals are noted before one raises
        self._noted: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def number(self) -> int:
        """The first signal that was noted; 0 if there was none."""
        return self._noted[0] if self._noted else 0

    @property
    def stopped(self) -> Stopped | None:
        """The error of the first signal that was noted; None if there was none."""
        return Stopped(self.number) if self._noted else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)
        if len(self._noted) > self.patience:
            raise Stopped(number)


_NOTHING_STOPS = 1 << 20
END, BY_STRING = "end", "stop"  # in a record: how a finished text ended
Show = Callable[[str, DecodeStats], None]
ShowPrefill = Callable[[int, int], None]


@dataclass
class Job:
    """A decode and the folder it fills."""

    model: LoadedModel
    generation: Generation
    folder: RunFolder
    about: dict[str, Any]  # what ``run.json`` says of the command, its options, the prompt and the machine
    prompt: Sequence[int]  # token ids
    text: TextStream  # turns tokens into the text
    stats: DecodeStats  # figures so far
    tokens: list[int] = field(default_factory=list)  # token ids so far
    resumed: list[dict[str, Any]] = field(default_factory=list)  # each time that the run was resumed, this one last
    notes: Sequence[str] = ()  # lines for people
    before: str = ""  # the text of the tokens that were made before this session
    rows: bytes = b""  # log-probabilities of the last step's tokens, as in ``logprobs.bin``
    state: str = RUNNING  # or finished, interrupted, failed
    reason: str = ""  # why it failed

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
        except (KeyboardInterrupt, OSError) as error:
            signals.patience, self.state = _NOTHING_STOPS, INTERRUPTED
            rest = self._end()
            if isinstance(error, KeyboardInterrupt):
                with suppress(OSError):  # a terminal that was closed
                    show(rest, self.stats)
            raise
        except BaseException as error:
            signals.patience, self.state = _NOTHING_STOPS, FAILED
            if ran_out(error):
                device, made = self.model.target.device.type, self.stats.tokens
                self.reason = f"{device} has no memory left after {made:,} tokens; "
                self.reason += "a lower --nodes or --budget needs less"
            elif isinstance(error, Fault):
                self.reason = str(error)
            else:
                self.reason = repr(error)
                self._end()
                raise
            if isinstance(error, SaveFailed):
                # What was not synced is not tried again: a second sync can succeed although the first lost something.
                self.folder.close()
                with suppress(SaveFailed):
                    self.folder.record(self._record())
            else:
                with suppress(Fault):  # the first fault is the one to tell of
                    self._end()
            raise Fault(f"{self.reason}; {self.saved()}") from error
        signals.patience, self.state = _NOTHING_STOPS, FINISHED
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
            self.rows = b"" if step.logprobs is None else step.logprobs.tobytes()
            self.folder.append(step.tokens, piece, self.stats.counters, self.rows)
            show(piece, self.stats)
            if signals.stopped:
                raise signals.stopped

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

    def saved(self) -> str:
        """How much is on the disk, and how to go on; for people."""
        path, made = self.folder.path, len(self.tokens)
        if not path.is_dir():
            return f"{made:,} tokens could not be saved"
        saved = f"{self.folder.saved:,} of {made:,} tokens are" if self.folder.saved < made else f"{made:,} tokens are"
        return f"{saved} saved in {path}, and tswift generate --resume {path} goes on from there"

    def end(self) -> dict[str, str]:
        """How a finished text ended: ``stop`` (and at which ``string``), ``eos`` or ``length``."""
        if self.text.stopped is not None:
            return {"reason": BY_STRING, "string": self.text.stopped}
        return {"reason": "eos" if self.tokens[-1:] and self.tokens[-1] in self.generation.stop else "length"}

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
            **({END: self.end()} if self.state == FINISHED else {}),
            **self.about,
            "resumed": self.resumed,
            "process": {"pid": os.getpid(), "host": socket.gethostname()},
            **({} if running else {"ended": now(), "figures": self.figures()}),
            **{name: counted[name] for name in ("accepted", "sizes", "choices") if counted[name] or name != "choices"},
        }
