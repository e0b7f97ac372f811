"""What a pass costs on this device, against the least time that it can take."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.session import Session
from benchmarks.gpu.timing import interleaved
from benchmarks.passes import grown
from tswift.benchmarking.roofline import pass_seconds
from tswift.drafting.options import DraftOptions
from tswift.drafting.resolving import resolve
from tswift.kv.buffer import KVBuffer
from tswift.kv.full import FullKV
from tswift.kv.partial import PartialKV
from tswift.models.loading import load
from tswift.models.memory import available_bytes
from tswift.models.shapes import PREFIX, Shape, shape_of
from tswift.models.target import Target

LOADED, COMPILED = "as loaded", "compiled"
_ROOM = 4e9  # bytes left free beside the caches: logits, graphs, kernels' scratch


def measure(session: Session, name: str) -> str | None:
    """Time the passes of one shape; what was found goes to ``passes`` under its name."""
    scale, device = session.scale, session.device
    started = time.perf_counter()
    model = load(PREFIX + name, device=str(device))
    target = model.target
    # the sizes for which passes are prepared are those of a user's decode, so a tree is filled up as there
    limit = max(*scale.nodes, resolve("tokenswift", target, model.heads, DraftOptions()).nodes or 1)
    partial = PartialKV(target.kv_shape, scale.budget)
    contexts, slots = _fitting(session, name, target, limit)
    full = FullKV(target.kv_shape, slots)
    for buffer in (full, partial):
        buffer.keys.normal_()
        buffer.values.normal_()
    partial.length = scale.budget
    shape = shape_of(target.model, target.dtype.itemsize)
    found: dict[str, Any] = {
        **model.about(),
        "shape": asdict(shape),
        "limit": limit,
        "load_seconds": time.perf_counter() - started,
        "prepare_seconds": {},
        "compile_seconds": None,
        "compile_refused": None,
        "cells": [],
    }
    session.content["passes"][name] = found
    _time(session, found, LOADED, target, shape, full, partial, contexts)
    if name in scale.compiled and not target._compiled:
        started = time.perf_counter()
        found["compile_refused"] = target.compile(scale.backend)
        found["compile_seconds"] = time.perf_counter() - started
        if found["compile_refused"]:
            session.omit(f"{name} with compiled layers", found["compile_refused"])
        else:
            # the same memory, but caches of their own as far as prepared passes are concerned
            _time(session, found, COMPILED, target, shape, copy(full), copy(partial), contexts)
    return None


def _fitting(session: Session, name: str, target: Target, limit: int) -> tuple[list[int], int]:
    """The contexts for whose cache there is memory, and the slots of the longest."""
    free = available_bytes(target.device)
    known = [context for context in session.scale.contexts if context + limit <= target.max_positions]
    held = target.kv_shape.bytes_per_token
    room = _ROOM if session.device.type == "cuda" else 0.0
    fitting = [context for context in known if free is None or (context + limit) * held + room <= free]
    for context in session.scale.contexts:
        if context not in fitting:
            session.omit(f"{name} at {context:,} tokens", "too little memory for its cache, or too few positions")
    if not fitting:
        raise RuntimeError("no context fits")
    return fitting, max(fitting) + limit


def _time(
    session: Session,
    found: dict[str, Any],
    mode: str,
    target: Target,
    shape: Shape,
    full: FullKV,
    partial: PartialKV,
    contexts: list[int],
) -> None:
    scale, device = session.scale, session.device
    started = time.perf_counter()
    target.prepare(full, found["limit"])
    target.prepare(partial, 1)
    target.synchronize()
    found["prepare_seconds"][mode] = time.perf_counter() - started
    runs: dict[tuple[str, int, int], Callable[[], Tensor]] = {
        ("verify", context, nodes): one_pass(target, full, nodes, context, context)
        for context in contexts
        for nodes in scale.nodes
    }
    runs["draft", scale.budget, 1] = one_pass(target, partial, 1, scale.budget, max(contexts))
    for (kind, context, nodes), seconds in interleaved(runs, scale.rounds, scale.warmups, device).items():
        floors = {by: float(pass_seconds(shape, machine, context, nodes)) for by, machine in session.machines.items()}
        cell = {"mode": mode, "pass": kind, "context": context, "nodes": nodes, "median": median(seconds)}
        found["cells"].append({**cell, "floors": floors, "seconds": seconds})
    session.keep()


def one_pass(target: Target, kv: KVBuffer, nodes: int, length: int, position: int) -> Callable[[], Tensor]:
    """A pass of so many nodes over the first ``length`` tokens of a cache, and its logits; ready to be queued."""
    tree = grown(nodes)
    tokens = torch.tensor(tree.tokens, device=target.device)
    positions = torch.tensor(tree.depths, device=target.device) + position
    ancestors = tree.ancestors().to(target.device)

    def run() -> Tensor:
        kv.length = length
        return target.logits(target.forward(tokens, positions, kv, ancestors).hidden)

    return run
