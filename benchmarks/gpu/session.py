"""A run of sections within a time limit. Whatever ends it, what was measured is in the folder.

``gpu.json`` and ``gpu.md`` are written anew after every section, and within some. A section that fails is noted, and
the next one runs; in a new process if the failed one has left the device unusable.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.gpu.scale import Scale
from tswift.benchmarking.roofline import Machine
from tswift.jobs.environment import now
from tswift.jobs.files import write_whole

JSON, MARKDOWN, LOG = "gpu.json", "gpu.md", "gpu.log"
DONE, FAILED, LEFT_OUT, CUT = "done", "failed", "left out", "cut short"
_NUMBERS = re.compile(r"\[[-+.e\d,\s]+\]")
_RESERVE = 10.0  # seconds at the end, for reports and plots
_GRACE = 20.0  # beyond the limit, before a process that hangs is ended


class OutOfTime(BaseException):
    """The time is up. Not an Exception: libraries that try one thing after another would swallow it."""


class Session:
    """What the sections share.

    Args:
        folder: for all files; is there.
        scale: how much is measured.
        device: where.
        content: of ``gpu.json``; its ``deadline`` is the end, in seconds since the epoch.
        markdown: makes ``gpu.md`` of the content.
    """

    def __init__(
        self,
        folder: Path,
        scale: Scale,
        device: torch.device,
        content: dict[str, Any],
        markdown: Callable[[dict[str, Any]], str],
    ) -> None:
        self.folder, self.scale, self.device, self.content = folder, scale, device, content
        self._markdown = markdown

    @property
    def left(self) -> float:
        """Seconds left for measuring."""
        return self.content["deadline"] - _RESERVE - time.time()

    @property
    def machines(self) -> dict[str, Machine]:
        """What the floors are told for: the machine as measured, and as published where it is known."""
        known = {"measured": self.content["machine"], "published": self.content["published"]}
        return {name: Machine(rates["bandwidth"], rates["flops"]) for name, rates in known.items() if rates}

    def keep(self) -> None:
        """Write what is there."""
        self.content["ended"] = now()
        text = json.dumps(self.content, indent=1)
        flat = _NUMBERS.sub(lambda found: " ".join(found.group().split()), text)  # samples of a kind on one line
        write_whole(self.folder / JSON, f"{flat}\n".encode())
        write_whole(self.folder / MARKDOWN, self._markdown(self.content).encode())

    def say(self, line: str) -> None:
        """A line on standard error and in the log."""
        print(f"[{self.left:5.0f} s left] {line}", file=sys.stderr, flush=True)
        self._log(line)

    def omit(self, what: str, why: str) -> None:
        """Note what was left out."""
        self.content["left_out"].append({"what": what, "why": why})
        self.say(f"left out: {what}: {why}")

    def close(self, section: str, state: str, seconds: float, why: str | None = None) -> None:
        """Note how a section ended."""
        self.content["sections"].append({"name": section, "state": state, "seconds": seconds, "why": why})
        self.say(f"{section}: {state}, {seconds:.1f} s" + (f" ({why})" if why else ""))
        if state in (FAILED, LEFT_OUT):
            self.content["left_out"].append({"what": section, "why": f"{state}: {why}"})
        self.keep()

    def blame(self, section: str) -> str:
        """The error at hand in one line; its traceback goes to the log."""
        error = sys.exc_info()[1]
        self._log(f"--- {section}\n{traceback.format_exc()}")
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"

    def _log(self, text: str) -> None:
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(text + "\n")


@dataclass(frozen=True)
class Section:
    """A part of the run.

    Attributes:
        name: as in ``gpu.json``.
        needs: seconds; with less left it is not begun.
        most: seconds after which it is cut.
        run: measures, and puts what it finds into the session's content. Returns why it was cut short, if it was.
    """

    name: str
    needs: float
    most: float
    run: Callable[[Session], str | None]


def run_sections(sections: Sequence[Section], session: Session, restart: Callable[[], None]) -> None:
    """Run those that have not been run.

    Args:
        sections: in order of importance.
        session: what they share.
        restart: begins a new process that goes on, and does not return.
    """
    if dead := session.content.pop("running", None):
        session.close(dead, FAILED, 0.0, "the process ended in it")
    over = {each["name"] for each in session.content["sections"]}
    with (session.folder / LOG).open("a") as log:
        faulthandler.dump_traceback_later(max(1.0, session.left + _RESERVE + _GRACE), exit=True, file=log)
        for section in sections:
            if section.name in over:
                continue
            if session.left < section.needs and session.scale.patient:
                session.close(
                    section.name, LEFT_OUT, 0.0, f"{session.left:.0f} s were left, {section.needs:.0f} wanted"
                )
                continue
            session.say(section.name)
            session.content["running"] = section.name
            session.keep()
            started = time.perf_counter()
            state, why = FAILED, None
            try:
                with _alarm(max(1.0, min(section.most, session.left))):
                    why = section.run(session)
                state = CUT if why else DONE
            except OutOfTime:
                state, why = CUT, "its time was up"
                session.blame(section.name)
            except Exception:
                why = session.blame(section.name)
            del session.content["running"]
            session.close(section.name, state, time.perf_counter() - started, why)
            if not tidy(session.device):
                session.say("the device is unusable now: going on in a new process")
                restart()
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tidy(device: torch.device) -> bool:
    """Let go of what a section held; False if the device does not answer."""
    gc.collect()
    torch.compiler.reset()  # or the next shape's layers would count as recompilations, of which there is a limit
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.ones(1, device=device).item() == 1
    except RuntimeError:  # after an illegal access every call fails
        return False


def again(argv: Sequence[str]) -> None:
    """Replace this process by one that goes on where it stands."""
    resumed = [*argv, *(["--resume"] if "--resume" not in argv else [])]
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *resumed])
