"""What passes over a model cost on this machine: measured once, and remembered in the user's cache folder."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import torch

import tswift
from tswift.attention.native import cache_folder
from tswift.decoding.params import SamplingParams
from tswift.decoding.sampling import Sampler
from tswift.kv import FullKV
from tswift.models.checkpoint import config_hash
from tswift.models.heads import Heads
from tswift.models.passes import PassCosts
from tswift.models.target import Target

NODES = (1, 4, 5, 8, 9, 16, 17, 32)  # attention takes rows in tiles: the fifth, ninth and 17th cost more than the next
_SHORT, _LONG = 64, 16_384  # keys
_MOST_BYTES = 1 << 29  # of the cache that is read
_TIMES = 7
_FORMAT = 5  # of what is measured, and how
_ROWS = 3  # that a level of heads is asked for at once
_DRAWN = 4  # nodes after which a token is drawn: those of the accepted path

_here: dict[tuple[Path | None, str], PassCosts] = {}  # measured or read by this process


def costs_of(target: Target, heads: Heads | None, again: bool = False) -> PassCosts:
    """Costs of passes over a model, and of its heads if it has any, on this machine; ``again`` measures them anew."""
    place, key = folder(), _key(target, heads)
    file = place / f"{key}.json" if place else None
    costs = None if again else _here.get((place, key)) or (_read(file) if file else None)
    if costs is None:
        costs = measure(target, heads)
        if file:
            _write(file, costs)
    _here[place, key] = costs
    return costs


def folder() -> Path | None:
    """Folder of measured costs, in the user's cache folder; None if nothing can be kept there."""
    cache = cache_folder()
    return cache and cache / "costs"


@torch.inference_mode()
def measure(target: Target, heads: Heads | None) -> PassCosts:
    """Time passes of several sizes over few keys and over many, and a level of heads: the best of some times each.

    It takes about a second for the bundled model on a CPU, and at most half a GB of memory.
    """
    most = min(target.most_nodes or NODES[-1], target.width or NODES[-1])
    sizes = tuple(size for size in NODES if size <= most)
    room = max(_MOST_BYTES // target.kv_shape.bytes_per_token - NODES[-1], 4 * _SHORT)
    long = max(2, min(_LONG, room, target.max_positions - NODES[-1]))
    kv = FullKV(target.kv_shape, long + NODES[-1])
    kv.keys.zero_()
    kv.values.zero_()
    target.prepare(kv, sizes[-1])
    lengths = (min(_SHORT, long // 2), long)
    runs: dict[object, Callable[[], object]] = {
        (size, length): _pass(target, kv, size, length) for length in lengths for size in sizes
    }
    if heads is not None:
        runs["level"] = _level(target, heads)
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(_TIMES):  # they take turns
        for name, run in runs.items():
            target.synchronize()
            started = time.perf_counter()
            run()
            target.synchronize()
            best[name] = min(best[name], time.perf_counter() - started)
    base, per_key = [], []
    for size in sizes:
        short, far = best[size, lengths[0]], best[size, lengths[1]]
        slope = max(far - short, 0.0) / (lengths[1] - lengths[0])
        per_key.append(slope)
        base.append(max(short - slope * lengths[0], 1e-9))
    # more nodes cost no less, whatever a busy machine says
    return PassCosts(sizes, tuple(accumulate(base, max)), tuple(accumulate(per_key, max)), best.get("level", 0.0))


def _pass(target: Target, kv: FullKV, size: int, length: int) -> Callable[[], object]:
    tokens = torch.zeros(size, dtype=torch.int64, device=target.device)
    positions = torch.full_like(tokens, length)
    alone = torch.eye(size, dtype=torch.bool, device=target.device)
    sampler = Sampler(SamplingParams(), 0, target.vocab_size, target.device)
    path = tokens[:_DRAWN], positions[:_DRAWN], alone[:_DRAWN, :_DRAWN]

    def run() -> object:
        kv.length = length
        logits = target.logits(target.forward(tokens, positions, kv, alone).hidden)
        return sampler.draw(logits[:_DRAWN], sampler.seen(*path), [0] * len(path[0]))

    return run


def _level(target: Target, heads: Heads) -> Callable[[], object]:
    """A level of heads, and the ranking of its candidates."""
    width = heads.hidden_size
    states = torch.zeros(_ROWS, width, dtype=target.model.dtype, device=target.device)
    tokens = torch.zeros(_ROWS, dtype=torch.int64, device=target.device)
    sampler = Sampler(SamplingParams(), 0, target.vocab_size, target.device)
    alone = torch.eye(_ROWS, dtype=torch.bool, device=target.device)

    def run() -> object:
        out = states
        if heads.conditioned:
            _, out = heads.step(0, states, target.embed(tokens))
        return sampler.draw_with_runner_up(target.open_logits(out), sampler.seen(tokens, tokens, alone), [0] * _ROWS)

    return run


def _key(target: Target, heads: Heads | None) -> str:
    """A hash of all that the costs depend on."""
    device = target.device
    about = [
        _FORMAT,
        tswift.__version__,
        platform.node(),
        torch.backends.cpu.get_cpu_capability(),
        torch.__version__,
        config_hash(target.model),
        str(target.dtype),
        str(target.kv_shape.dtype),
        target.attention,
        target.program is not None,
        target.width,
        heads and heads.about(),
        torch.cuda.get_device_name(device) if device.type == "cuda" else torch.get_num_threads(),
        # quantised ones have other names
        str(sorted({type(module).__name__ for module in target.model.modules()})),
        str(sorted({type(weight).__name__ for weight in target.model.parameters()})),
    ]
    return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _read(file: Path) -> PassCosts | None:
    try:
        known = json.loads(file.read_text())
        costs = PassCosts(tuple(known["nodes"]), tuple(known["base"]), tuple(known["per_key"]), known["level"])
        return costs if costs.sound else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # measured anew


def _write(file: Path, costs: PassCosts) -> None:
    new = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(asdict(costs)))
        new.replace(file)
    except OSError:
        pass  # it is measured anew the next time, then
