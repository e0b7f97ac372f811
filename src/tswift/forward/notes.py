"""How a model runs, in words: what makes its layers, and what something slower stands in for."""

from __future__ import annotations

import warnings

from tswift.errors import NoFault, SlowWarning
from tswift.forward.cuda.fused_layers import is_fused
from tswift.forward.target import Target

EAGER = "eager"
FUSED = "fused"
PROGRAM = "one C program"
_STAND_INS = {  # what is said of a part that something else stands in for, before the reason
    "sampler": "sampler by PyTorch:",
    "trees": "trees walked by PyTorch:",
    "states": "states stepped by PyTorch:",
    "cache": "the model",
    "wide": "texts are forwarded in narrow passes:",
}


def execution_note(target: Target) -> str:
    """How layers run: ``fused``, ``one C program``, or ``eager``;
    and why what should be in use is not.
    """
    words = _how_layers_run(target)
    if target.fallbacks.graph_fault is not None:
        words += f"; no CUDA graphs: {target.fallbacks.graph_fault}"
    for part, said in _STAND_INS.items():
        if part in target.fallbacks:
            words += f"; {said} {target.fallbacks[part]}"
    return words


# What stands in for a part, and how much longer that took where it was measured (results/h100):
# what is slow enough for a warning.
_SLOW_STAND_INS = {
    "attention": "attention and layers by stock operators",
    "features": "attention and layers by stock operators",
    "layers": "layers by stock operators",
    "states": "states stepped by PyTorch",
    "steps": "no CUDA graphs",
    "graphs": "no CUDA graphs",
    "sampler": "the sampler by PyTorch (0.1 to 0.8 ms a step more on an H100)",
    "trees": "trees walked by PyTorch",
}
_SLOW_FACTORS = {  # by what the device is
    ("attention", "cuda"): " (up to 77 times as long on an H100)",
    ("attention", "cpu"): " (several times as long)",
    ("layers", "cpu"): " (several times as long)",
}


def warn_of_fallbacks(target: Target, model: str = "decoding") -> None:
    """Warn in one line of what is slower than it could be, since something has failed;
    of each reason once.

    Whether a part of :class:`~tswift.forward.fallbacks.Fallbacks` is told of is decided here.
    """
    told = target.fallbacks.told
    new = [
        (f"{words}{_SLOW_FACTORS.get((part, target.device.type), '')}", reason)
        for part, words in _SLOW_STAND_INS.items()
        if (reason := target.fallbacks.get(part)) and not isinstance(reason, NoFault)
        if reason not in told
    ]
    told.update(reason for _, reason in new)
    if new:
        faults = "; ".join(f"{words}, as {reason}" for words, reason in new)
        warnings.warn(f"{model} is slower than it could be: {faults}", SlowWarning, stacklevel=2)


def _how_layers_run(target: Target) -> str:
    if target.runner.program is not None:
        return PROGRAM
    if is_fused(target.model):
        return FUSED
    reasons = [
        target.fallbacks[part]
        for part in ("attention", "features", "layers")
        if part in target.fallbacks
    ]
    if not reasons and target.attention_features and target.on_cuda:
        reasons = [f"they have {target.attention_features}"]
    return f"{EAGER}, as {reasons[0]}" if reasons else EAGER
