"""Where in a pass numbers stop being numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def first_broken(model: PreTrainedModel, nodes: int, run: Callable[[], object]) -> tuple[str, int] | None:
    """Watch a pass for the first output with NaN or infinity, of embeddings, layers, final norm and LM head.

    Args:
        model: a causal language model.
        nodes: how many the pass has.
        run: runs it, LM head included.

    Returns:
        The name of the module whose output it is, and the first node where; None if all are finite.
    """
    names = {module: name for name, module in model.named_modules()}
    found: list[tuple[str, int]] = []

    def look(module: nn.Module, given: object, out: Any) -> None:
        first = out[0] if isinstance(out, tuple) else out
        broken = (~first.reshape(nodes, -1).isfinite().all(-1)).nonzero()
        if len(broken):
            found.append((names[module], int(broken[0])))

    parts = [model.get_output_embeddings()]
    for part in model.get_decoder().children():
        parts += part if isinstance(part, nn.ModuleList) else [part]
    hooks = [part.register_forward_hook(look) for part in parts]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None
