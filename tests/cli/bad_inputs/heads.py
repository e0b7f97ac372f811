"""Heads files: damaged, made for something else, or no heads at all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.cli.bad_inputs.case import Case, World, words_of
from tests.cli.bad_inputs.models import MARKER, Bomb, Change, content, header
from tswift.speculators.heads import ChainedHeads

FILE = "heads.safetensors"


def about(**values) -> Change:
    """Other values in the heads' metadata."""

    def change(metadata: dict[str, Any]):
        told = json.loads(metadata["__metadata__"]["tswift"])
        metadata["__metadata__"]["tswift"] = json.dumps({**told, **values})

    return header(FILE, change)


def metadata(text: str | None) -> Change:
    """Another text for metadata; None for no metadata."""

    def change(content: dict[str, Any]):
        content.pop("__metadata__")
        if text is not None:
            content["__metadata__"] = {"tswift": text}

    return header(FILE, change)


def _tensors(change: Callable[[dict[str, Any]], object]) -> Change:
    """Other tensors, the metadata as it was."""

    def edit(folder: Path):
        with safe_open(folder / FILE, framework="pt") as file:
            told = file.metadata()
        weights = load_file(folder / FILE)
        change(weights)
        save_file(weights, folder / FILE, metadata=told)

    return edit


def _none(folder: Path):
    (folder / FILE).unlink()


_FIRST = "heads.0.linear.weight"

CHANGES: dict[str, Change] = {
    "missing": _none,
    "empty": content(FILE, b""),
    "a pipe": lambda folder: [_none(folder), os.mkfifo(folder / FILE)],
    "a pickle": lambda folder: (folder / FILE).write_bytes(
        pickle.dumps(Bomb(folder.parent / MARKER))
    ),
    "another hidden size": lambda folder: ChainedHeads(48, 3).save(folder / FILE),
    "no metadata": metadata(None),
    "count 4": about(count=4),
    "a tensor missing": _tensors(lambda weights: weights.pop(_FIRST)),
    "a tensor of another shape": _tensors(
        lambda weights: weights.update({_FIRST: weights[_FIRST][:5].clone()})
    ),
    "weights of NaN": _tensors(lambda weights: weights[_FIRST].fill_(float("nan"))),
}


def _case(command: str, name: str, beside: bool = False) -> Case:
    def words(world: World) -> list[object]:
        folder = world.here / "model"
        shutil.copytree(world.model, folder)
        CHANGES[name](folder)
        if command == "heads inspect":
            return ["heads", "inspect", folder / FILE]
        return words_of(
            world, command, *(["--model", folder] if beside else ["--heads", folder / FILE])
        )

    where = "beside the model" if beside else "named"
    said = "FILE: " if command == "heads inspect" else "--heads"
    return Case(f"{command}, heads {where}: {name}", words, said)


HEADS: tuple[Case, ...] = (
    *(_case("generate", name) for name in CHANGES),
    *(
        _case("generate", name, beside=True)
        for name in ("empty", "another hidden size", "a pickle")
    ),
    _case("compare", "no metadata"),
    *(_case("heads inspect", name) for name in ("empty", "count 4")),
)
