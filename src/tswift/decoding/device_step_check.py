"""Whether a model's steps on the device draw what the host draws,
and leave the same in its cache.
"""

from __future__ import annotations

import weakref
from functools import partial
from random import Random

import torch

from tswift.caches import FullKV
from tswift.decoding.device_step import DeviceStepper
from tswift.decoding.drafter import Context, Drafter, DraftTree, Source
from tswift.forward.target import Target
from tswift.forward.text import prefill
from tswift.models.codes import Packed
from tswift.models.hashes import config_hash
from tswift.remembered import kernel_fault
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
        kinds = sorted({type(module).__name__ for module in target.model.modules()})
        dtypes = target.dtype, target.kv_shape.dtype
        held = [each for each in target.model.modules() if isinstance(each, Packed)]
        codes = sorted({(each.bits, each.block, len(list(each.buffers()))) for each in held})
        asked = (
            config_hash(target.model),
            *dtypes,
            target.attention,
            target.fixed_rows,
            kinds,
            codes,
        )
        check = partial(_difference, target)
        target.fallbacks.note("steps", kernel_fault("steps", check, target.device, *asked))
    sampler = Sampler(params, 0, target.vocab_size, target.device)
    use_kernels(sampler, target.dtype)
    target.fallbacks.note("sampler", sampler.fault)


def _difference(target: Target) -> str | None:
    """What is wrong with device steps, in one line; None if nothing is."""
    for seed, (length, nodes) in enumerate(_TRIED):
        nodes = min(nodes, target.fixed_rows or nodes)
        random = Random(seed)
        prompt = [random.randrange(target.vocab_size) for _ in range(length)]
        known = [*prompt]
        for drafter in (
            Drafter(),
            Drafter([_Guesses(known, random, target.vocab_size)], _DEPTH, nodes),
        ):
            found = _steps(target, prompt, drafter, seed)
            if isinstance(found, str):
                return found
            known += found[len(known) :]
    return None


def _steps(target: Target, prompt: list[int], drafter: Drafter, seed: int) -> list[int] | str:
    """Take some device steps and check each; returns prompt and text, or what is wrong."""
    params = SamplingParams(window=20)
    sampler, twin = (Sampler(params, seed, target.vocab_size, target.device) for _ in range(2))
    kv = FullKV(target.kv_shape, len(prompt) + _STEPS * (_DEPTH + 1) + drafter.limit)
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
        places = torch.tensor(tree.depths, device=target.device) + held
        assert context.logits is not None
        nodes = (
            torch.tensor(tree.tokens, device=target.device),
            places,
            tree.ancestors().to(target.device),
        )
        drawn, _ = twin.draw_nodes(context.logits[: len(tree)], nodes)
        path = tree.walk(drawn)
        if list(new) != [*(tree.tokens[node] for node in path[1:]), drawn[path[-1]]]:
            return f"a step on the device over {held:,} tokens drew others than the rule"
        twin.extend(new)
    fresh = FullKV(target.kv_shape, kv.length)
    wide, target.chunked_text = target.chunked_text, False  # it is tried by a text that needs it
    try:
        prefill(target, context.text[:-1], fresh, len(prompt) - 1)
    finally:
        target.chunked_text = wide
    for ours, theirs in zip(kv.buffers, fresh.buffers, strict=True):
        exact = theirs[:, :, : kv.length].float()
        apart = (ours[:, :, : kv.length].float() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(
            min=1e-6
        )
        worst = apart.mean((0, 1)).amax().item() if kv.length else 0.0
        if not worst <= target.kv_shape.rounding:
            return f"steps on the device leave other keys and values ({worst:.2g} of their norm)"
        if target.fixed_rows is not None and not torch.equal(
            ours[:, :, : kv.length], theirs[:, :, : kv.length]
        ):
            return "steps on the device leave keys and values with other bits than a prefill"
    return context.text
