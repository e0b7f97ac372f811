"""What steps of decoding cost on this machine: measured once for a model,
and remembered in the user's cache folder.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch

import tswift
from tswift.caches import FullKV
from tswift.decoding.drafter import Context, Drafter, DraftTree
from tswift.decoding.loop import stepper_for
from tswift.decoding.pass_costs import LEAST, NOMINAL, PassCosts
from tswift.drafting.dynamic_tree import AcceptanceEstimator, CandidateTree
from tswift.drafting.heads import WIDTH, HeadTreeSource
from tswift.errors import Object
from tswift.files import cache_folder
from tswift.forward.cpu.products import multiplies_integers
from tswift.forward.target import Target
from tswift.machine import available_bytes, gpu_name
from tswift.models.codes import read_bytes
from tswift.models.hashes import config_hash
from tswift.remembered import recalled, remember
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import NoTokenLeft, Sampler
from tswift.speculators.heads import Heads
from tswift.stages import tell

# attention takes rows in tiles: the fifth, ninth and 17th cost more than the next
NODES = (1, 2, 4, 5, 8, 9, 16, 17, 32)
_SHORT = 64  # keys
# Many keys by device, and most bytes of the cache that is read. A GPU reads few keys in no time:
# only from tens of thousands on its time grows with them as it does at 100,000
_LONG = {"cpu": (16_384, 1 << 27), "cuda": (49_152, 8 << 30)}
_FREE_FACTOR = 4  # times as much memory has to be free
_REPEATS = (5, 30)  # least and most repeats
_SECONDS = 0.7  # after which the least are enough
# most steps of which the last is timed, and seconds of them that are enough
_IN_A_ROW = 3
_WARM = 2e-3
_FORMAT = 9  # of what is measured, and how
_ACCEPTED = 3  # drafted tokens that a step accepts, in trees that have as many
# what a level of heads is called among steps, which are called by their nodes and keys
_LEVEL = (0, 0)

_here: dict[tuple[Path | None, str], PassCosts] = {}  # measured or read by this process


def costs_of(target: Target, heads: Heads | None, again: bool = False) -> PassCosts:
    """Costs of steps of a model, and of its heads if it has any, on this machine;
    ``again`` measures them anew.

    What was measured while the machine had other work serves this process and is not remembered.
    """
    place = folder()
    key = _key(target, heads)
    file = place / f"{key}.json" if place else None
    costs = None if again else _here.get((place, key)) or recalled(file, _costs)
    if costs is None:
        tell("measuring what its steps cost here")
        costs = measure(target, heads)
        if not costs.busy:
            remember(file, asdict(costs))
    _here[place, key] = costs
    return costs


def folder() -> Path | None:
    """Folder of measured costs, in the user's cache folder; None if nothing can be kept there."""
    cache = cache_folder()
    return cache and cache / "costs"


@torch.inference_mode()
def measure(target: Target, heads: Heads | None) -> PassCosts:
    """Time steps of decoding over few keys and over many, with trees of several sizes,
    and a draft by the heads.

    Every figure is the best of some repeats. It takes about a second for the bundled model on a
    CPU, and at most 128 MiB of memory for keys and values there.
    """
    most = min(target.most_nodes or NODES[-1], target.fixed_rows or NODES[-1])
    sizes = tuple(size for size in NODES if size <= most)
    keys, most_bytes = _LONG.get(target.device.type, _LONG["cpu"])
    free = available_bytes(target.device)
    if free is not None:
        most_bytes = min(most_bytes, free // _FREE_FACTOR)
    room = max(most_bytes // target.kv_shape.bytes_per_token - NODES[-1], 4 * _SHORT)
    long = max(2, min(keys, room, target.max_positions - NODES[-1]))
    lengths = (min(_SHORT, long // 2), long)
    try:
        trial = _Trial(target, lengths, sizes[-1])
        runs = {
            (size, length): partial(trial.step_s, size, length)
            for length in lengths
            for size in sizes
        }
        if heads is not None:
            runs[_LEVEL] = partial(trial.level_s, heads)
        times: dict[tuple[int, int], list[float]] = {name: [] for name in runs}
        started = time.perf_counter()
        for turn in range(_REPEATS[1]):
            if turn >= _REPEATS[0] and time.perf_counter() - started > _SECONDS:
                break
            for name, run in runs.items():
                times[name].append(run())
    except NoTokenLeft:  # the model is broken, as its own decode will tell
        return NOMINAL
    best = {name: min(each) for name, each in times.items()}
    base = []
    per_key = []
    for size in sizes:
        short = best[size, lengths[0]]
        far = best[size, lengths[1]]
        slope = max(far - short, 0.0) / (lengths[1] - lengths[0])
        per_key.append(slope)
        base.append(max(short - slope * lengths[0], LEAST))
    spread = median(median(each) / min(each) for each in times.values())
    # more nodes cost no less, whatever a busy machine says
    rising = tuple(accumulate(base, max)), tuple(accumulate(per_key, max))
    return PassCosts(sizes, *rising, best.get(_LEVEL, 0.0), spread)


@dataclass
class _Draft(Drafter):
    """Drafts the text as it goes on, then other tokens: a tree of the size that is timed.

    It is no part of the trial, whose stepper holds it: a cycle would keep the cache.
    """

    vocab_size: int = 0
    nodes: int = 1
    right: dict[int, list[int]] = field(
        default_factory=dict
    )  # by the text's length, how it goes on

    def propose(self, context: Context, wanted: int) -> DraftTree:
        """As :meth:`Drafter.propose`."""
        tree = DraftTree(context.text[-1], self.nodes)
        tree.add(self.right.get(context.kv.length, ()), "")
        for token in range(self.vocab_size):
            tree.grow(0, token, "")
            if tree.full:
                break
        return tree


class _Trial:
    """A decode that takes the same steps again and again,
    with draft trees of as many nodes as are wanted.
    """

    def __init__(self, target: Target, lengths: Sequence[int], most: int) -> None:
        self._target = target
        self._draft = _Draft(depth=_ACCEPTED, limit=most, vocab_size=target.vocab_size)
        self._kv = FullKV(target.kv_shape, max(lengths) + NODES[-1])
        for buffer in self._kv.buffers:
            buffer.zero_()
        self._empty = self._kv.mark()
        self._samplers: dict[int, Sampler] = {}
        for length in lengths:
            self._samplers[length] = Sampler(SamplingParams(), 0, target.vocab_size, target.device)
            self._samplers[length].extend([0] * (length + 1))
        self._context = Context([0], self._samplers[lengths[0]].copy(), self._kv)
        self._stepper = stepper_for(target, self._context, self._draft)
        for length in lengths:
            self._begin(length)
            for _ in range(_ACCEPTED):
                self._stepper.step(1)
            self._draft.right[length] = self._context.text[length + 1 :]

    def step_s(self, nodes: int, length: int) -> float:
        """Seconds of a step over so many nodes, after a text of that length.

        Quick steps are taken some times: in a text, too, each finds the processor's caches as one
        like it left them.
        """
        self._draft.nodes = nodes
        spent = 0.0
        for _ in range(_IN_A_ROW):
            self._begin(length)
            step = self._stepper.step(nodes)
            spent += step.seconds
            if spent > _WARM:
                break
        return step.seconds

    def level_s(self, heads: Heads) -> float:
        """Seconds of a level of heads, drafted after the last step."""
        source = HeadTreeSource(
            self._target, heads, None, (WIDTH,) * heads.count, shared_noise=True
        )
        tree = CandidateTree(self._context.text[-1], heads.count, AcceptanceEstimator())
        started = time.perf_counter()
        source.start(self._context)
        source.propose(tree, self._context)
        return (time.perf_counter() - started) / heads.count

    def _begin(self, length: int) -> None:
        """Go back to where the text had that length, whatever has been written since."""
        for buffer in self._kv.buffers:
            for start in self._samplers:
                buffer[:, :, start : start + NODES[-1]].zero_()
        self._kv.rewind(self._empty._replace(length=length))
        self._stepper.restart([0] * (length + 1), self._samplers[length].copy())


def _key(target: Target, heads: Heads | None) -> str:
    """A hash of all that the costs depend on."""
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
        target.runner.program is not None,
        multiplies_integers(target.model),
        read_bytes(target.model),
        target.fixed_rows,
        heads and heads.about(),
        gpu_name(target.device) or torch.get_num_threads(),
        # quantised ones have other names
        str(sorted({type(module).__name__ for module in target.model.modules()})),
        str(sorted({type(weight).__name__ for weight in target.model.parameters()})),
    ]
    return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _costs(known: Object) -> PassCosts | None:
    nodes, base, per_key = (tuple(known[name]) for name in ("nodes", "base", "per_key"))
    costs = PassCosts(nodes, base, per_key, known["level"])
    return costs if costs.sound else None
