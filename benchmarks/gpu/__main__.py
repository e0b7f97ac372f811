"""The command: runs the sections in processes of their own, and after each writes the report and the archives."""

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import FIGURES, LEAST
from benchmarks.gpu.report import markdown

BEGAN = time.time()
MIB = 1 << 20
LARGEST = 16 * MIB  # of a file that a borrowed machine hands back
_GRACE = 15.0  # seconds beyond its time after which a section is killed
_IMPORTS = 60.0  # most seconds before a process begins its first section
_RESERVE = 10.0  # seconds at the end for the last report
# In order of value, with the most seconds that each may take.
SECTIONS = {
    "equality": 170.0,
    "probe": 120.0,
    "passes": 60.0,
    "steps": 90.0,
    "simulated": 75.0,
    "shapes": 90.0,
    "generate": 45.0,
}


@dataclass
class Session:
    """A run: where its files are, and what has become of its sections.

    Attributes:
        work: folder of all files.
        out: folder of what is handed back: the report, its data and two archives.
        dry: whether it is a dry run.
        deadline: in seconds since the epoch.
        about: what is said of the run beside its figures.
        states: of the sections that are over: done, failed, killed or left out.
    """

    work: Path
    out: Path
    dry: bool
    deadline: float
    about: dict[str, Any] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)

    def figures(self) -> list[dict[str, Any]]:
        """All figures so far; the last line may be torn."""
        figures = []
        for line in (self.work / FIGURES).read_text().splitlines():
            try:
                figures.append(json.loads(line))
            except ValueError:
                continue
        return figures

    def keep(self, caches: bool) -> None:
        """Write everything that is handed back; the caches, which are large, where they have grown."""
        content = {**self.about, "dry": self.dry, "sections": self.states, "figures": self.figures()}
        for name, text in (("gpu.json", json.dumps(content, indent=0)), ("gpu.md", markdown(content))):
            (self.work / name).write_text(text)
            shutil.copy(self.work / name, self.out / name)
        archive(self.out / "gpu.tgz", self.work, [path for path in self.work.iterdir() if path.is_file()])
        if caches:
            cached = [path for path in (self.work / "cache").rglob("*") if path.is_file()]
            archive(self.out / "cache.tgz", self.work, cached)

    def close(self, section: str, state: str) -> None:
        """Note how a section ended, and keep all that is there."""
        self.states[section] = state
        print(f"[{self.deadline - time.time():5.0f} s left] {section}: {state}", file=sys.stderr, flush=True)
        self.keep(caches=section in ("equality", "passes"))


def archive(target: Path, root: Path, files: Sequence[Path], limit: int = LARGEST) -> list[Path]:
    """Pack files, the smallest first, as long as they fit; returns those left out."""
    sizes = {path: len(zlib.compress(path.read_bytes(), 6)) + 1024 for path in files}
    kept, room = [], limit - limit // 16
    for path in sorted(files, key=lambda path: sizes[path]):
        room -= sizes[path]
        if room >= 0:
            kept.append(path)
    with tarfile.open(target.with_suffix(".new"), "w:gz", compresslevel=6) as tar:
        for path in kept:
            tar.add(path, path.relative_to(root))
    target.with_suffix(".new").replace(target)  # a run that is killed meanwhile leaves the one before
    return [path for path in files if path not in kept]


def command(session: Session, sections: dict[str, float]) -> list[str]:
    """How the first of some sections is run: the tests by pytest, the others in one process."""
    if next(iter(sections)) == "equality":
        plugin = ["-p", "benchmarks.gpu.equality", "-p", "no:cacheprovider", "-p", "no:xdist"]
        return [sys.executable, "-m", "pytest", *plugin, "-m", "gpu", "tests/test_gpu.py", "--durations=10"]
    timed = [f"{name}={seconds:.0f}" for name, seconds in sections.items() if name != "equality"]
    dry = ["--dry"] if session.dry else []
    until = ["--until", str(session.deadline - _RESERVE)]
    return [sys.executable, "-m", "benchmarks.gpu.measure", "--folder", str(session.work), *until, *dry, *timed]


def environment(session: Session) -> dict[str, str]:
    """Of all processes: offline, caches within the folder, kernels interpreted in a dry run."""
    cache = session.work.resolve() / "cache"
    own = {
        "HF_HUB_OFFLINE": "1",
        "GPU_FOLDER": str(session.work.resolve()),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
    dry = {"GPU_DRY": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if session.dry else {}
    return {**os.environ, **own, **dry}


def run_sections(session: Session, sections: dict[str, float]) -> None:
    """Run all sections, each within its time; one that ends its process is noted, and the next one runs."""
    with (session.work / "gpu.log").open("wb") as log:
        while waiting := {name: seconds for name, seconds in sections.items() if name not in session.states}:
            left = session.deadline - _RESERVE - time.time()
            if left < LEAST:
                for name in waiting:
                    session.close(name, "left out: no time")
                return
            name, seconds = next(iter(waiting.items()))
            if name == "equality":
                waiting = {name: min(seconds, left)}
            # a group of its own, to be killed with all that it starts; no session of its own, which would outlive us
            own: dict[str, Any] = {"env": environment(session), "preexec_fn": os.setpgrp}
            process = subprocess.Popen(command(session, waiting), stdout=log, stderr=log, **own)
            try:
                _watch(session, process, waiting)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def _watch(session: Session, process: subprocess.Popen[bytes], sections: dict[str, float]) -> None:
    """Close sections as a process ends them; kill it if one takes too long, or at the deadline."""
    current, seconds = next(iter(sections.items()))
    tests = current == "equality"
    until = time.time() + seconds + (-_GRACE if tests else _IMPORTS)
    while True:
        code = process.poll()
        for figure in session.figures():
            name = figure["section"]
            if name not in sections or name in session.states:
                continue
            if figure["table"] == "begun":
                current, until = name, figure["until"]
            elif figure["table"] == "ended":
                session.close(name, f"failed: {figure['why']}" if figure["why"] else "done")
        if code is not None:
            break
        late = time.time() - min(until, session.deadline - _RESERVE)
        if tests and late > 0:  # pytest ends by itself when it is interrupted
            os.killpg(process.pid, signal.SIGINT)
            tests, until = False, time.time()
        elif late > _GRACE:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        time.sleep(0.1)
    if current == "equality":
        passed = any(figure.get("outcome") == "passed" for figure in session.figures())
        ends = {0: "done" if passed else "failed: no test has passed", 2: "cut short"}
        words = ends.get(code, f"failed: pytest ended with {code}")
        session.close(current, words)
    elif current not in session.states:
        session.close(current, f"killed: the process ended with {code}")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, report; 1 if a section failed."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description="Test and measure this GPU; see benchmarks/gpu."
    )
    parser.add_argument("--work", type=Path, default=Path("runs/gpu"), help="folder of all files, caches included")
    parser.add_argument("--out", type=Path, help="folder of what is handed back (default: out in --work)")
    parser.add_argument("--seconds", type=float, default=530, help="all that may be taken")
    parser.add_argument("--only", help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU: does it run at all?")
    parser.add_argument("--commit", default="", help="the commit, where there is no git repository")
    parser.add_argument("--cache", type=Path, help="cache.tgz of an earlier run")
    args = parser.parse_args(argv)
    names = args.only.split(",") if args.only else list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"--only: no section {unknown[0]}; there are {', '.join(SECTIONS)}")
    session = Session(args.work, args.out or args.work / "out", args.dry, BEGAN + args.seconds)
    for folder in (session.work / "cache", session.out):
        folder.mkdir(parents=True, exist_ok=True)
    if args.cache:
        with tarfile.open(args.cache) as tar:
            tar.extractall(session.work, filter="data")
    (session.work / FIGURES).write_text("")
    words = shlex.join(["python", "-m", "benchmarks.gpu", *(sys.argv[1:] if argv is None else argv)])
    session.about = {"command": words, "commit": args.commit, "cache": str(args.cache or "")}
    run_sections(session, {name: SECTIONS[name] for name in SECTIONS if name in names})
    session.keep(caches=True)
    print((session.out / "gpu.md").read_text())
    return 1 if any(state.startswith(("failed", "killed")) for state in session.states.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
