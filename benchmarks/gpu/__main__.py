"""The command: runs the sections in processes of their own,
and after each writes the report and the archives.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any
from xml.etree import ElementTree

from benchmarks import tables
from benchmarks.gpu import FIGURES, FIRST, GRACE, LEAST, PROBES, SECTIONS, SPOILED, figures, note

BEGAN = time.time()
LARGEST = 16 << 20  # bytes of a file that a borrowed machine hands back
_RESERVE = 10.0  # seconds at the end for the last report
_SPOILED = "a capture failed"  # the outcome of a probe
_SAID = "first_contact.txt"  # what the probes of first contact print, tracebacks in full


CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # of compiled kernels


@dataclass
class Session:
    """A run: its files, those it hands back, when it has to be over, and what is said of it."""

    work: Path
    out: Path
    dry: bool
    deadline: float  # seconds since the epoch
    about: dict[str, Any]

    def left(self) -> float:
        """Seconds until the last report has to be written."""
        return self.deadline - _RESERVE - time.time()

    def figures(self) -> list[dict[str, Any]]:
        """All figures so far."""
        return figures(self.work)

    def states(self) -> dict[str, str]:
        """How the sections ended that have."""
        return {
            figure["section"]: figure["state"]
            for figure in self.figures()
            if figure["table"] == "ended"
        }

    def end(self, section: str, state: str) -> None:
        """Note how a section ended."""
        note(self.work, section, "ended", state=state)
        self.report()

    def report(self) -> None:
        """Say how far it has come, and write everything that is handed back."""
        states = self.states()
        print(f"[{self.deadline - time.time():5.0f} s left] {states}", file=sys.stderr, flush=True)
        content = {**self.about, "dry": self.dry, "sections": states, "figures": self.figures()}
        if (self.work / _SAID).exists():
            shutil.copy(self.work / _SAID, self.out / _SAID)
        for name, text in (
            ("gpu.json", json.dumps(content, indent=0)),
            ("gpu.md", markdown(content)),
        ):
            (self.work / name).write_text(text)
            shutil.copy(self.work / name, self.out / name)
        archive(self.out / "gpu.tgz", self.work, self.work.iterdir())
        with suppress(FileNotFoundError):
            # files come and go while a process works; the last report has them all
            archive(self.out / "cache.tgz", self.work, (self.work / "cache").rglob("*"))


def archive(target: Path, root: Path, paths: Any) -> None:
    """Pack the files among some paths, the smallest first, as long as they fit."""
    new = target.with_suffix(".new")
    room = LARGEST - LARGEST // 16
    files = [(path.stat().st_size, path) for path in paths if path.is_file()]
    with tarfile.open(new, "w:gz", compresslevel=6) as tar:
        for _, path in sorted(files):
            room -= len(zlib.compress(path.read_bytes(), 6)) + 1024
            if room < 0:
                break
            tar.add(path, path.relative_to(root))
    new.replace(target)  # a run that is killed meanwhile leaves the one before


def markdown(content: Mapping[str, Any]) -> str:
    """The report of a run: targets, then every table of figures, as they were written."""
    parts = [
        "# tswift on a GPU"
        + (" (dry run: tiny shapes on a CPU, which say nothing)" if content["dry"] else "")
    ]
    parts.append(f"```sh\n{content['command']}\n```")
    groups: dict[str, list[dict[str, Any]]] = {
        "Sections": [
            {"section": name, "state": state} for name, state in content["sections"].items()
        ],
        "Targets": targets(content["figures"]),
    }
    for figure in content["figures"]:
        section, table = figure["section"], figure["table"]
        row = {name: value for name, value in figure.items() if name not in ("section", "table")}
        if table == "environment":
            groups[table] = [{"what": name, "value": value} for name, value in row.items()]
        elif table not in ("begun", "ended"):
            groups.setdefault(f"{section}: {table}", []).append(row)
    parts += [f"## {title}\n\n{tables.markdown(rows)}" for title, rows in groups.items() if rows]
    return "\n\n".join(parts) + "\n"


def targets(figures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The project's targets beside the worst that was measured of each,
    on the first shape that was.
    """
    passes = [row for row in figures if (row["section"], row["table"]) == ("passes", "passes")]
    texts = [
        row["seconds"]
        for row in figures
        if row["table"] == "integrated from steps" and row["method"] == "tokenswift"
    ]
    prompts = [
        row["seconds"]
        for row in figures
        if row["table"] == "prompt" and row["exact"] and not row["written"]
    ]
    measured = [
        (
            "plain pass / its floor",
            1.25,
            [row["x"] for row in passes if row["kind"] == "verify" and row["nodes"] == 1],
        ),
        ("100,000 tokens at alpha 0.9, integrated, s", 230, texts[:1]),
        ("a prompt of 4,096 tokens, s", 0.2, prompts),
    ]
    return [
        {
            "target": name,
            "at most": limit,
            "measured, worst": max(values, default="not measured"),
            "verdict": ("met" if max(values) <= limit else "MISSED") if values else "",
        }
        for name, limit, values in measured
    ]


def environment(session: Session) -> dict[str, str]:
    """Of all processes: offline, caches within the folder, kernels interpreted in a dry run."""
    folder = session.work.resolve()
    own = {"HF_HUB_OFFLINE": "1", "GPU_FOLDER": str(folder), "TSWIFT_TRACEBACK": "1"}
    own |= {name: str(folder / "cache" / name.partition("_")[0].lower()) for name in CACHES}
    dry = (
        {"GPU_DRY": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if session.dry else {}
    )
    return {**os.environ, **own, **dry}


def run_tests(session: Session, log: IO[bytes]) -> None:
    """Run the tests of equality, and note their outcomes;
    when their time is up they are interrupted as by Ctrl-C.
    """
    found = session.work / "equality.xml"
    found.unlink(missing_ok=True)
    seconds = min(SECTIONS["equality"], session.left()) - GRACE
    tests = [
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-v",
        "-m",
        "gpu",
        "tests/test_gpu.py",
    ]
    limit = ["timeout", "--signal=INT", f"--kill-after={GRACE}", f"{seconds:.0f}"]
    line = [*limit, sys.executable, "-m", *tests, f"--junitxml={found}"]
    code = subprocess.run(
        line, stdout=log, stderr=log, env=environment(session), check=False
    ).returncode
    passed = False
    for case in ElementTree.parse(found).iter("testcase") if found.exists() else ():
        wrong = next(
            (child for child in case if child.tag in ("failure", "error", "skipped")), None
        )
        outcome, why = (
            ("passed", "") if wrong is None else (wrong.tag, wrong.get("message", "")[:200])
        )
        about = {
            "test": case.get("name"),
            "outcome": outcome,
            "seconds": float(case.get("time", 0)),
            "why": why,
        }
        note(session.work, "equality", "tests", **about)
        passed |= outcome == "passed"
    ends = {0: "done" if passed else "failed: no test has passed", 2: "cut short", 124: "cut short"}
    session.end("equality", ends.get(code, f"failed: pytest ended with {code}"))


def run_probes(session: Session) -> str:
    """Run every probe of first contact in processes of its own, and report after each;
    returns how the section ended.

    A failed capture may spoil a process: then another asks the rest.
    """
    until = time.time() + min(SECTIONS[FIRST], session.left())
    failed = []
    for name, (seconds, processes) in PROBES.items():
        left = min(2, processes) if session.dry else processes
        while left:
            limit = min(seconds, until - time.time())
            if limit < 1:
                return f"cut short before {name}"
            outcome = _run_probe(session, name, limit, empty=processes > 1)
            left -= outcome != _SPOILED
            if outcome not in ("done", _SPOILED):
                failed.append(f"{name} {outcome}")
            session.report()
    return f"failed: {'; '.join(failed)}" if failed else "done"


def asking(session: Session, probe: str) -> list[str]:
    """The process that asks a probe."""
    line = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.gpu.first_contact",
        "--folder",
        str(session.work),
    ]
    return [*line, *(["--dry"] if session.dry else []), probe]


def _run_probe(session: Session, name: str, limit: float, empty: bool) -> str:
    """Run one probe, perhaps with empty caches of compiled kernels;
    what it says is in a file at once.
    """
    started = time.time()
    with (session.work / _SAID).open("a") as file, TemporaryDirectory() as folder:
        print(f"== {name}", file=file, flush=True)
        own = dict.fromkeys(CACHES, folder) if empty else {}
        env = {**environment(session), **own}
        try:
            code = subprocess.run(
                asking(session, name), stdout=file, stderr=file, env=env, timeout=limit, check=False
            ).returncode
            outcome = {0: "done", SPOILED: _SPOILED}.get(code, f"ended with {code}")
        except subprocess.TimeoutExpired:
            outcome = f"had no end after {limit:.0f} s"
        print(f"-- {outcome}, {time.time() - started:.0f} s", file=file, flush=True)
    note(session.work, FIRST, "probes", probe=name, outcome=outcome, seconds=time.time() - started)
    return outcome


def command(session: Session, sections: Sequence[str]) -> list[str]:
    """The process that measures some sections."""
    until = ["--until", str(session.deadline - _RESERVE), *(["--dry"] if session.dry else [])]
    return [
        sys.executable,
        "-m",
        "benchmarks.gpu.measure",
        "--folder",
        str(session.work),
        *until,
        *sections,
    ]


def run_process(session: Session, sections: Sequence[str], log: IO[bytes]) -> None:
    """Measure some sections in one process, until it ends or the deadline comes;
    report whenever one of them ends.
    """
    # a group of its own, to be killed with all that it starts; no session of its own, which would
    # outlive us
    own: dict[str, Any] = {"env": environment(session), "preexec_fn": os.setpgrp}
    process = subprocess.Popen(command(session, sections), stdout=log, stderr=log, **own)
    ended = len(session.states())
    try:
        while process.poll() is None and session.left() > -GRACE:
            time.sleep(0.1)
            if ended < len(session.states()):
                ended = len(session.states())
                session.report()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    waiting = [name for name in sections if name not in session.states()]
    begun = {figure["section"] for figure in session.figures() if figure["table"] == "begun"}
    code = process.wait()
    if waiting and waiting[0] in begun | {sections[0]}:
        note(session.work, waiting[0], "ended", state=f"killed: the process ended with {code}")
    session.report()


def run_sections(session: Session, sections: Sequence[str]) -> None:
    """Run sections, each within its time; one that ends its process is noted,
    and the next one runs.
    """
    with (session.work / "gpu.log").open("wb") as log:
        while waiting := [name for name in sections if name not in session.states()]:
            if session.left() < LEAST + GRACE:
                session.end(waiting[0], "left out: no time")
            elif waiting[0] == FIRST:
                session.end(FIRST, run_probes(session))
            elif waiting[0] == "equality":
                run_tests(session, log)
            else:
                run_process(session, waiting, log)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, report; 1 if a section failed."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description="Test and measure this GPU; see benchmarks/gpu."
    )
    parser.add_argument(
        "--work", type=Path, default=Path("runs/gpu"), help="folder of all files, caches included"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of what is handed back (default: out in --work)"
    )
    parser.add_argument("--seconds", type=float, default=530, help="all that may be taken")
    parser.add_argument("--only", help=f"some of {','.join(SECTIONS)}")
    parser.add_argument(
        "--dry", action="store_true", help="tiny shapes on the CPU: does it run at all?"
    )
    parser.add_argument("--commit", default="", help="the commit, where there is no git repository")
    parser.add_argument("--cache", type=Path, help="cache.tgz of an earlier run")
    args = parser.parse_args(argv)
    names = args.only.split(",") if args.only else list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--only: no section {unknown[0]}; there are {', '.join(SECTIONS)}")
    words = shlex.join(
        ["python", "-m", "benchmarks.gpu", *(sys.argv[1:] if argv is None else argv)]
    )
    about = {"command": words, "commit": args.commit, "cache": str(args.cache or "")}
    session = Session(
        args.work, args.out or args.work / "out", args.dry, BEGAN + args.seconds, about
    )
    for folder in (session.work / "cache", session.out):
        folder.mkdir(parents=True, exist_ok=True)
    if args.cache:
        with tarfile.open(args.cache) as tar:
            tar.extractall(session.work, filter="data")
    (session.work / FIGURES).write_text("")
    (session.work / _SAID).unlink(missing_ok=True)
    run_sections(session, [name for name in SECTIONS if name in names])
    print((session.out / "gpu.md").read_text())
    return (
        1
        if any(state.startswith(("failed", "killed")) for state in session.states().values())
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
