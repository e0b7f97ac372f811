"""The command: says what is missing, runs the processes, and writes the report."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import tables
from benchmarks.gpu import EQUALITY, FIGURES, HELD, MEASURED, SECONDS, figures, note

NEEDED = (
    *("torch", "triton", "transformers", "numpy", "typer", "rich", "safetensors"),
    *("huggingface_hub", "filelock", "pytest"),
)
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # of compiled kernels
_DRAFTERS = ("dspark", "eagle3")  # a model has one at a time
_TOGETHER = 8  # processes: the first of them take 90 GB


@dataclass
class Session:
    """A run: where its figures go, where what need not be handed back lies, and when it and its
    halves are over.
    """

    out: Path
    work: Path
    dry: bool
    deadline: float  # seconds since the epoch
    paths: Sequence[Path] = ()  # of more modules
    ends: dict[str, float] = field(default_factory=dict)  # of halves that have begun

    def environment(self) -> dict[str, str]:
        """Of all processes: offline, and what was compiled is kept in the folder of work."""
        own = {
            "HF_HUB_OFFLINE": "1",
            "TSWIFT_TRACEBACK": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join(
                [*map(str, self.paths), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        own |= {name: str(self.work / name.partition("_")[0].lower()) for name in _CACHES}
        if self.dry:
            own |= {"GPU_DRY": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        return {**os.environ, **own}

    def run(self, section: str, name: str, words: Sequence[str], fresh: bool = False) -> None:
        """Run a process until it ends or its time is up, and note how it ended.

        What it prints is in a file of its name; ``fresh`` gives it empty caches of kernels.
        """
        started = time.time()
        end = self.ends.setdefault(section, started + SECONDS[section])
        limit = min(end, self.deadline) - started
        env = self.environment()
        if fresh:
            env |= {each: str(self.work / f"{name} {os.getpid()}" / each) for each in _CACHES}
        with (self.out / f"{name.replace(' ', '-')}.txt").open("w") as said:
            try:
                if limit < 1:
                    raise subprocess.TimeoutExpired(list(words), 0)
                code = subprocess.run(
                    [sys.executable, *words],
                    **{"stdout": said, "stderr": said, "env": env},
                    timeout=limit,
                    check=False,
                ).returncode
                state = "done" if code == 0 else f"failed: it ended with {code}"
            except subprocess.TimeoutExpired:
                state = "cut short"
        note(self.out, section, "ended", process=name, state=state, seconds=time.time() - started)
        print(f"[{self.deadline - time.time():4.0f} s left] {name}: {state}", file=sys.stderr)


def processes(session: Session, model: str | None) -> dict[str, list[str]]:
    """Those that compare texts and bits, in order of value: by name, their words for Python."""
    own = ["-m", "benchmarks.gpu.texts", "--folder", str(session.out)]
    own += ["--dry"] if session.dry else []
    found = dict[str, list[str]]()
    for how in () if session.dry else HELD:  # a CPU has other products of codes
        words = [word for name, kind in how.items() for word in (f"--{name}", kind)]
        found[f"8B with {' '.join(words).replace('--', '')}"] = [*own, *words, "llama3.1-8b"]
    # its 8B shape is here already
    tests = "not 8b" if session.dry else "not 8b and not float32"
    found["tests"] = ["-m", "pytest", "-p", "no:cacheprovider", "-v", "-m", "gpu", "-k", tests]
    found["tests"] += ["tests/test_gpu.py", f"--junitxml={session.out / 'tests.xml'}"]
    found |= {f"8B with {kind}": [*own, "--drafter", kind, "llama3.1-8b"] for kind in _DRAFTERS}
    found["bundled model"] = [*own, "demo"]
    if model is not None:
        found["given model"] = [*own, model]
    found |= {f"bits {index}": [*own, "--bits", "qwen3-4b"] for index in (1, 2)}
    return found


def compare_texts(session: Session, model: str | None) -> None:
    """Run what compares texts and bits, side by side; in a dry run two at a time."""
    with ThreadPoolExecutor(2 if session.dry else _TOGETHER) as pool:
        for name, words in processes(session, model).items():
            pool.submit(session.run, EQUALITY, name, words, name.startswith("bits"))
    found = session.out / "tests.xml"
    for case in ElementTree.parse(found).iter("testcase") if found.exists() else ():
        wrong = next(
            (child for child in case if child.tag in ("failure", "error", "skipped")), None
        )
        about = {"test": case.get("name"), "seconds": float(case.get("time", 0))}
        about["outcome"] = "passed" if wrong is None else wrong.tag
        about["why"] = "" if wrong is None else wrong.get("message", "")[:200]
        note(session.out, EQUALITY, "tests", **about)
    bits = {row["bits"] for row in figures(session.out) if row["table"] == "bits"}
    if len(bits) > 1:
        note(session.out, EQUALITY, "ended", process="bits", state=f"failed: they are {bits}")


def markdown(rows: Sequence[Mapping[str, Any]], command: str, dry: bool) -> str:
    """The report: targets, then every table of figures, as they were written."""
    groups: dict[str, list[dict[str, Any]]] = {"Targets": [] if dry else targets(rows)}
    for row in rows:
        content = {name: value for name, value in row.items() if name not in ("section", "table")}
        if row["table"] == "environment":
            content_rows = [{"what": name, "value": value} for name, value in content.items()]
            groups.setdefault("environment", []).extend(content_rows)
        else:
            groups.setdefault(f"{row['section']}: {row['table']}", []).append(content)
    parts = ["# tswift on a GPU" + (" (dry run: tiny shapes on a CPU, which say nothing)" * dry)]
    parts.append(f"```sh\n{command}\n```")
    parts += [f"## {title}\n\n{tables.markdown(each)}" for title, each in groups.items() if each]
    return "\n\n".join(parts) + "\n"


def targets(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The project's targets beside the worst that was measured of each."""
    held = {name for how in HELD for name in how}
    coded = [row for row in rows if row.keys() & held]
    rows = [row for row in rows if not row.keys() & held]
    passes = [row for row in rows if row["table"] == "passes" and row["kind"] == "verify"]
    by_size = {(row["context"], row["nodes"]): row["ms"] for row in passes}
    texts = [
        row["seconds"]
        for row in rows
        if (row["table"], row.get("method"), row.get("nodes")) == ("integrated", "tokenswift", None)
    ]
    prompts = [row["seconds"] for row in rows if row["table"] == "prompt" and not row["written"]]
    plain = {
        context: [
            row["ms"]
            for row in rows
            if row["table"] == "steps" and row["method"] == "ar" and row["exact"]
            if row["context"] == context
        ]
        for context in (4096, 100_000)
    }
    measured = [
        ("a plain step after 4,096 tokens, ms", 6.15, plain[4096]),
        ("a plain step after 100,000 tokens, ms", 10.3, plain[100_000]),
        (
            "a pass of 32 nodes / of one",
            1.06,
            [ms / by_size[held, 1] for (held, nodes), ms in by_size.items() if nodes == 32],
        ),
        ("100,000 tokens by tokenswift at a simulated alpha of 0.9, s", 300, texts),
        ("a prompt of 4,096 tokens, s", 0.25, prompts),
        *(
            (f"a plain step in {kind} after 4,096 tokens, ms", limit, _plain(coded, kind))
            for kind, limit in (("int4", 3.2), ("int8", 4.4))
        ),
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


def _plain(rows: Sequence[Mapping[str, Any]], kind: str) -> list[float]:
    """Milliseconds of plain steps after 4,096 tokens by weights of a kind."""
    wanted = {"table": "steps", "method": "ar", "context": 4096, "weights": kind}
    return [row["ms"] for row in rows if wanted.items() <= row.items() and "kv_dtype" not in row]


def unpacked(site: Path, work: Path) -> list[Path]:
    """What is to be put on the path for a folder of wheels: itself, and where they were unpacked;
    those that are built for this machine cannot be imported as they are.
    """
    folder = work / "site"
    for wheel in sorted(site.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return [folder.resolve(), site.resolve()]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, report; 1 if something failed, 2 if something is missing."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description="Test and measure this GPU; see benchmarks/gpu."
    )
    runs = Path("runs/gpu")
    parser.add_argument("--out", type=Path, default=runs, help="folder of what is handed back")
    parser.add_argument("--work", type=Path, default=runs, help="folder of compiled kernels")
    parser.add_argument("--seconds", type=float, default=520, help="the most that all of it takes")
    parser.add_argument("--site", type=Path, help="folder of modules or wheels to put on the path")
    parser.add_argument("--model", help="another model that every method writes a text of")
    parser.add_argument("--only", choices=[*SECONDS], help="the one or the other half")
    parser.add_argument("--commit", default="", help="the commit, for the report")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on the CPU")
    args = parser.parse_args(argv)
    deadline = time.time() + args.seconds
    paths = [] if args.site is None else unpacked(args.site, args.work)
    sys.path[:0] = map(str, paths)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"{', '.join(missing)}: not installed here; a folder of wheels that have it does: "
            "make gpu SITE=FOLDER",
            file=sys.stderr,
        )
        return 2
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    session = Session(args.out.resolve(), args.work.resolve(), args.dry, deadline, paths)
    (session.out / FIGURES).write_text("")
    note(session.out, "about", "command", commit=args.commit, words=sys.argv[1:])
    if args.only != MEASURED:
        compare_texts(session, args.model)
    if args.only != EQUALITY:
        words = ["-m", "benchmarks.gpu.measure", "--folder", str(session.out)]
        words += ["--until", str(min(deadline, time.time() + SECONDS[MEASURED]) - 5)]
        words += ["--dry"] if args.dry else []
        session.run(MEASURED, "measure", words)
    rows = figures(session.out)
    command = " ".join(["python -m benchmarks.gpu", *(sys.argv[1:] if argv is None else argv)])
    report = markdown(rows, command, args.dry)
    (session.out / "gpu.md").write_text(report)
    print(report)
    return int(any(str(row.get("state", "")).startswith("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
