"""Which class of transformers holds a configuration's language model,
and that class without all but the text's part.

Many models are published as one that reads images, too: around an ordinary decoder there are a
vision tower and what joins the two. A text needs the decoder and its LM head; of the rest no
weights are read, and no memory is taken.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from tswift.errors import InputError


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of a configuration's language model; of a larger model,
    the part of it that reads and writes text.

    Raises:
        InputError: transformers has none that makes text from the left to the right, or it has an
            encoder, too.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"a model with an encoder ({config.model_type}) is not served: only decoders are",
            "model",
        )
    kind = type(config)
    alone = config.get_text_config() is config
    mappings = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING] * (not alone) + [MODEL_FOR_CAUSAL_LM_MAPPING]
    for mapping in mappings:
        if kind in mapping:
            found: Any = mapping[kind]
            return found if alone else _text_part(found)
    raise InputError(
        f"transformers has no causal language model of the type {config.model_type}", "model"
    )


@cache
def _text_part(whole: type[PreTrainedModel]) -> type[PreTrainedModel]:
    def make(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)
        _keep_only(self, {self.get_decoder(), self.get_output_embeddings()})

    # under its own name, by which transformers finds how the names of its weights have changed
    return type(whole.__name__, (whole,), {"__init__": make, "__module__": whole.__module__})


def _keep_only(module: nn.Module, wanted: Collection[object]) -> None:
    """Take away every module that is none of those wanted, nor holds one."""
    for name, child in list(module.named_children()):
        if child in wanted:
            continue
        if any(inner in wanted for inner in child.modules()):
            _keep_only(child, wanted)
        else:
            setattr(module, name, None)
