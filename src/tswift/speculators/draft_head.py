"""The LM head that heads draft by: rows of the model's,
as codes of 8 bits where a C function multiplies them.

It decides what is drafted, and never what is drawn: the target draws from all tokens, by its own LM
head.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from tswift.forward.hf import output_of
from tswift.forward.integers import lay_together
from tswift.forward.products import multiply
from tswift.forward.program import rounded_linear
from tswift.forward.target import Target
from tswift.models.codes import Packed

_COPIED = 1 << 24  # weights of a whole LM head that may be held once more


class DraftHead:
    """The LM head of a model for its drafts.

    Args:
        target: the model.
        ids: ``[N]`` int32, ascending: the draft vocabulary; None for all tokens.

    Attributes:
        c: the layer as products.c has it, with outputs for what is drafted alone; None if PyTorch
            computes it.
    """

    def __init__(self, target: Target, ids: Tensor | None) -> None:
        self.target = target
        self.ids = ids
        self.program = target.program
        self._places = None if ids is None else ids.to(target.device, torch.int64)
        own = None if self.program is None else self.program.lm_head_c
        self._linear: Any = None  # None to ask the model for the logits of all tokens
        if ids is not None or (
            own is not None and not own.bits and own.inputs * own.outputs <= _COPIED
        ):
            self._linear = lm_head_rows(
                target.model.get_output_embeddings(), self._places, target.dtype
            )
        self.c: Any = own if ids is None else None
        if self._linear is not None and own is not None:
            self._linear = rounded_linear(self._linear)
            lay_together(self._linear)
            self.c = self._linear.c
            self.c.scale, self.c.softcap = own.scale, own.softcap

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[..., V]`` logits of hidden states ``[..., H]``:
        minus infinity for tokens that are not drafted.
        """
        if self._linear is None:
            found = self.target.open_logits(hidden)
            drafted = found if self._places is None else found[..., self._places]
        elif self.c is not None:
            drafted = multiply(self.c, hidden.float())
        else:
            drafted = output_of(self.target.model, self._linear)(hidden)
        if self._places is None:
            return drafted
        logits = drafted.new_full((*drafted.shape[:-1], self.target.vocab_size), -inf)
        return logits.index_copy_(-1, self._places, drafted)


def lm_head_rows(lm_head: Any, ids: Tensor | None, dtype: torch.dtype) -> nn.Linear | None:
    """Rows of an LM head as a layer, ``ids`` None for all;
    None if its weights are not plain numbers.
    """
    packed, weight, bias = (getattr(lm_head, name, None) for name in ("packed", "weight", "bias"))
    if isinstance(packed, Packed):
        rows = packed.rows(torch.arange(packed.outputs) if ids is None else ids)
    elif type(weight) is nn.Parameter and weight.is_floating_point() and weight.dim() == 2:
        rows = weight.detach() if ids is None else weight.detach()[ids]
    else:
        return None
    weights = {"weight": rows}
    if bias is not None:
        weights["bias"] = bias.detach() if ids is None else bias.detach()[ids]
    linear = nn.Linear(rows.shape[1], len(rows), bias is not None, device="meta")
    linear.load_state_dict({name: each.to(dtype) for name, each in weights.items()}, assign=True)
    return linear.requires_grad_(False)
