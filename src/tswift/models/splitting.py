"""Models split over ranks, by the plans that transformers has for them."""

from __future__ import annotations

from typing import Any

from transformers.distributed import DistributedConfig

from tswift.errors import InputError
from tswift.models.ranks import OPTION, Ranks
from tswift.models.shapes import skeleton


def plan(config: Any, model: str, ranks: Ranks) -> dict[str, Any]:
    """What ``from_pretrained`` has to be told so that every rank reads its part.

    Args:
        config: the model's.
        model: as the user named it.
        ranks: those that are to hold it.

    Raises:
        InputError: transformers does not know how to split it, or its heads cannot be dealt out.
    """
    rules = skeleton(config).tp_plan or {}
    if not any("*" in name for name in rules):  # it may have one for the LM head alone
        raise InputError(f"transformers has no plan to split {model} ({config.model_type}) over ranks", "--model")
    text = config.get_text_config()
    # some plans leave attention whole: every rank has all heads then
    if any(name.endswith(("k_proj", "qkv_proj", "query_key_value")) and rules[name] == "colwise" for name in rules):
        queries = text.num_attention_heads
        for name, heads in (("KV", getattr(text, "num_key_value_heads", None) or queries), ("query", queries)):
            if heads % ranks.count:
                counted = f"{heads} {name} head{'s' if heads > 1 else ''}"
                raise InputError(f"{model} has {counted}, which {ranks.count} ranks cannot share evenly", OPTION)
    return {"distributed_config": DistributedConfig(tp_size=ranks.count)}
