"""Whether a model's steps on the device draw what the host draws,
and leave the same in its cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from random import Random

import torch

from tswift.caches import FullKV
from tswift.checking import Compared, kernel_fault
from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.drafter import Context, Drafter, DraftTree, Source
from tswift.forward.target import Target
from tswift.forward.text import prefill
from tswift.models.codes import Packed
from tswift.models.hashes import config_hash
from tswift.sampling.kernels import use_kernels
from tswift.sampling.parameters import SamplingParams
from tswift.sampling.rule import NoTokenLeft, Sampler

# tokens of the prompt, none a round number, and nodes of the trees
_TRIED = ((1, 3), (37, 8), (130, 32))
_STEPS = 12
_DEPTH = 6


class _Guesses(Source):
    """Draft source of the check: the known continuation among random tokens, or a random tree."""

    def __init__(self, known: list[int], random: Random, vocab_size: int) -> None:
        self._known = known
        self._random = random
        self._vocab_size = vocab_size
        self.tree = DraftTree(0)

    def propose(self, tree: DraftTree, context: Context) -> None:
        """Fill the tree."""
        self.tree = tree
        start = len(context.text)
        right = self._known[start : start + self._random.randint(0, _DEPTH)]
        for _ in range(self._random.randrange(10)):
            path = right[: self._random.randint(0, _DEPTH)]
            tree.add([*path, self._random.randrange(self._vocab_size)], "guesses")
        tree.add(right, "guesses")


# whose steps have been compared with the host's
_CHECKED: weakref.WeakSet[Target] = weakref.WeakSet()


@torch.inference_mode()
def try_steps(target: Target, params: SamplingParams) -> None:
    """Check a model's device steps, and stop using them if they differ from the host's.

    Steps are tried once for models of one configuration, in a second or so. Why a decode with
    ``params`` will draw without the sampler's kernels is left in ``target.fallbacks``.
    """
    if not target.replays:
        return
    if target not in _CHECKED:
        _CHECKED.add(target)
        modules = [*target.model.modules()]
        packed = (each for each in modules if isinstance(each, Packed))
        asked = (
            config_hash(target.model),
            target.dtype,
            target.kv_shape.dtype,
            target.attention,
            target.fixed_rows,
            sorted({type(module).__name__ for module in modules}),
            sorted({(each.bits, each.block, len(list(each.buffers()))) for each in packed}),
        )
        fault = kernel_fault("steps", _compared(target), target.device, *asked)
        target.fallbacks.note("steps", fault)
    sampler = Sampler(params, 0, target.vocab_size, target.device)
    use_kernels(sampler, target.dtype)
    target.fallbacks.note("sampler", sampler.fault)


def _compared(target: Target) -> Iterator[Compared]:
    """What steps on the device draw and leave, and what the host's do."""
    for seed, (length, nodes) in enumerate(_TRIED):
        random = Random(seed)
        prompt = [random.randrange(target.vocab_size) for _ in range(length)]
        known = [*prompt]
        guesses = _Guesses(known, random, target.vocab_size)
        nodes = min(nodes, target.fixed_rows or nodes)
        for drafter in (Drafter(), Drafter([guesses], _DEPTH, nodes)):
            known[:] = yield from _steps(target, prompt, drafter, seed)


def _steps(
    target: Target, prompt: list[int], drafter: Drafter, seed: int
) -> Generator[Compared, None, list[int]]:
    """Take some device steps, and compare each; returns prompt and text."""
    device, shape = target.device, target.kv_shape
    sampler, twin = (
        Sampler(SamplingParams(window=20), seed, target.vocab_size, device) for _ in range(2)
    )
    kv = FullKV(shape, len(prompt) + _STEPS * (_DEPTH + 1) + drafter.limit)
    prefill(target, prompt[:-1], kv)
    context = Context([*prompt], sampler, kv)
    for each in (sampler, twin):
        each.extend(prompt)
    stepper = DeviceStepper(target, context, drafter)
    for _ in range(_STEPS):
        held = kv.length
        try:
            new = stepper.step(_DEPTH + 1).tokens
        except NoTokenLeft:
            break  # random weights may give nothing to draw from; the host would say so, too
        tree = drafter.sources[0].tree if drafter.sources else DraftTree(context.text[held])  # type: ignore[attr-defined]
        assert context.logits is not None
        nodes = (
            torch.tensor(tree.tokens, device=device),
            torch.tensor(tree.depths, device=device) + held,
            tree.ancestors().to(device),
        )
        drawn, _ = twin.draw_nodes(context.logits[: len(tree)], nodes)
        path = tree.walk(drawn)
        wanted = [*(tree.tokens[node] for node in path[1:]), drawn[path[-1]]]
        yield f"tokens of a step from slot {held:,} on", torch.tensor(new), torch.tensor(wanted)
        twin.extend(new)
    fresh = FullKV(shape, kv.length)
    wide, target.chunked_text = target.chunked_text, False  # it is tried by a text that needs it
    try:
        prefill(target, context.text[:-1], fresh, len(prompt) - 1)
    finally:
        target.chunked_text = wide
    for ours, theirs in zip(kv.buffers, fresh.buffers, strict=True):
        ours, theirs = (each[:, :, : kv.length] for each in (ours, theirs))
        exact = theirs.float()
        apart = (ours.float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-6)
        apart = apart.mean((0, 1))
        yield "keys and values of steps", apart, torch.zeros_like(apart), shape.rounding
        if target.fixed_rows is not None:
            yield "bits of steps' keys and values", ours, theirs
    return context.text
