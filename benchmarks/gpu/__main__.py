"""The command: sections in order of importance, then the plot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from benchmarks.gpu import BEGAN, loop, passes, peer, report, texts
from benchmarks.gpu.scale import DRY, FULL, tiny_shapes
from benchmarks.gpu.session import FAILED, JSON, Section, Session, again, run_sections
from tswift.benchmarking import look
from tswift.benchmarking.machine import measured
from tswift.benchmarking.roofline import MACHINES
from tswift.jobs.environment import environment, now
from tswift.jobs.files import write_whole
from tswift.models.shapes import SHAPES

_SCHEMA = 1
_NAMES = {"H200": "h200", "H100": "h100-sxm", "A100": "a100-80g"}  # of a device, and what roofline calls it


def sections(scale: Any) -> list[Section]:
    """All of them, the most important first, with the seconds that each needs at least and takes at most."""
    main, *others = scale.shapes
    return [
        Section(f"passes {main}", 30, 120, partial(passes.measure, name=main)),
        Section("loop", 30, 90, loop.measure),
        *(Section(f"passes {name}", 25, 90, partial(passes.measure, name=name)) for name in others),
        Section("demo", 60, 180, texts.bundled),
        Section("peer", 60, 150, peer.measure),
        Section("simulated", 35, 600, texts.simulated),
    ]


def new_content(args: argparse.Namespace, device: torch.device, scale: Any, command: Sequence[str]) -> dict[str, Any]:
    """What ``gpu.json`` holds before anything but the machine is measured."""
    about = environment(device) | {name: _version(name) for name in ("triton", "matplotlib")}
    about["git_commit"] = about["git_commit"] or args.commit
    known = args.published or next((key for word, key in _NAMES.items() if word in (about["gpu"] or "")), None)
    return {
        "schema": _SCHEMA,
        "kind": "gpu",
        "dry": args.dry,
        "started": now(),
        "ended": now(),
        "deadline": BEGAN + args.seconds,
        "command": list(command),
        "environment": about,
        "machine": asdict(measured(device, torch.bfloat16)),
        "published": {"name": known, **asdict(MACHINES[known])} if known else None,
        "scale": asdict(scale),
        "tests": report.test_results(args.out),
        "passes": {},
        "loop": None,
        "peer": None,
        "texts": {},
        "sections": [],
        "left_out": [],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def draw(session: Session) -> None:
    """The plot, if it can be drawn."""
    if not look.available():
        session.omit("plots", "matplotlib is not installed")
        return
    try:
        image = report.floor_plot(session.content)
    except Exception:
        session.omit(report.PLOT, session.blame("plot"))
        return
    if image:
        write_whole(session.folder / report.PLOT, image)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, measure, write; 1 if a section failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description="Measure this GPU; see benchmarks/gpu.")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of all files")
    parser.add_argument("--seconds", type=float, default=480, help="no measuring after that")
    parser.add_argument("--only", help="sections, such as 'loop,peer' (default: all)")
    parser.add_argument("--dry", action="store_true", help="tiny shapes: does it run at all?")
    parser.add_argument("--device", help="default: cuda; cpu for --dry")
    parser.add_argument("--published", choices=MACHINES, help="default: told by the device's name")
    parser.add_argument("--commit", help="the commit, where there is no git repository")
    parser.add_argument("--resume", action="store_true", help="go on with what is in --out")
    args = parser.parse_args(argv)
    device = torch.device(args.device or ("cpu" if args.dry else "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --dry does without")
    scale = DRY if args.dry else FULL
    SHAPES.update(tiny_shapes() if args.dry else {})
    chosen = sections(scale)
    if args.only:
        wanted = [name.strip() for name in args.only.split(",")]
        if unknown := sorted(set(wanted) - {section.name for section in chosen}):
            parser.error(f"no section {', '.join(unknown)}; there are {', '.join(each.name for each in chosen)}")
        chosen = [section for section in chosen if section.name in wanted]
    transformers_logging.set_verbosity_error()
    args.out.mkdir(parents=True, exist_ok=True)
    words = list(sys.argv[1:] if argv is None else argv)
    if args.resume:
        content = json.loads((args.out / JSON).read_text())
    else:
        content = new_content(args, device, scale, ["python", "-m", "benchmarks.gpu", *words])
    session = Session(args.out, scale, device, content, report.markdown)
    session.keep()
    run_sections(chosen, session, partial(again, words))
    draw(session)
    session.keep()
    print(report.markdown(content))
    return 1 if any(each["state"] == FAILED for each in content["sections"]) else 0


if __name__ == "__main__":
    sys.exit(main())
