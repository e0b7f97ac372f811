"""How many positions a model serves, by what its configuration says of rotary embeddings and their scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST = 1 << 24  # beyond what any model was made for


def max_positions(config: Any) -> int:
    """Most tokens, prompt included, that a model's position encoding was made for.

    It is ``max_position_embeddings``, except where rotary embeddings are scaled and that was left at what the model was
    trained with, as transformers asks for. A factor of x then serves x times as many positions:

    - ``linear``: of ``max_position_embeddings``, which is not to be raised to the new maximum;
    - ``yarn``: of ``original_max_position_embeddings``, where that gives more. Qwen2.5 says 32,768 for both and a
      factor of 4, to serve 131,072; others name 131,072 in the first place;
    - ``llama3``: of the same, but only where the maximum was not raised. Llama 3.2's factor of 32 would give 262,144,
      and it was made for the 131,072 that it says.

    Where each type of layer has its own rotary embeddings (Gemma 3), the maximum is that of the scaled ones already.

    Args:
        config: of transformers.
    """
    text = config.get_text_config()
    said: int = text.max_position_embeddings
    rope = getattr(text, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type"), _number(rope, "factor", 1)
    original = _number(rope, "original_max_position_embeddings", said)
    if kind == "linear":
        served = said * factor
    elif kind == "yarn":
        served = max(said, original * factor)
    elif kind == "llama3" and said <= original:
        served = original * factor
    else:
        served = said
    return int(min(served, _MOST))


def _number(rope: Mapping[str, Any], name: str, otherwise: float) -> float:
    value = rope.get(name)
    return value if isinstance(value, int | float) and value >= 1 else otherwise
