"""The states before a model's final norm, which some heads start from and transformers does not return."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tswift.models.layers import Unserved

_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


class Tap:
    """Catches what goes into a decoder's final norm.

    Args:
        decoder: as ``get_decoder()`` gives it.

    Attributes:
        norm: the final norm.

    Raises:
        Unserved: it has no final norm that is known of.
    """

    def __init__(self, decoder: nn.Module) -> None:
        norm = next((found for name in _NORMS if (found := getattr(decoder, name, None)) is not None), None)
        if norm is None:
            raise Unserved("no final norm that tswift knows of")
        self.norm: nn.Module = norm
        self._caught: Tensor | None = None
        self.norm.register_forward_pre_hook(self._catch)

    def take(self) -> Tensor:
        """``[n, H]`` of the last pass."""
        assert self._caught is not None
        caught, self._caught = self._caught[0], None
        return caught

    def _catch(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        self._caught = given[0]
