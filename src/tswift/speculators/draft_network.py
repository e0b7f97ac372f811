"""What all published drafters have in common: the target, and what is remembered of its text."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tswift.caches import KVBuffer, WindowKV
from tswift.forward.target import Target
from tswift.speculators.drafter_layers import Rotary
from tswift.speculators.spec import SpeculatorSpec

# logit of a token outside a draft vocabulary: never among the best, and finite in every dtype
EXCLUDED = -1e4
# A round under way: ``[n or 1, V]`` logits after drafted tokens ``[n]`` (int64) at a level, one
# level after another. Given are how many tokens were drafted before, each one's parent among those
# of the level before (``[n]``; None at the root), and the tokens.
DrafterRound = Callable[[int, "Tensor | None", Tensor], Tensor]


class DraftNetwork(nn.Module):
    """What all drafters have: the target, and what is remembered of its text.

    Args:
        spec: sizes.
        target: whose embeddings and LM head are shared; its passes give the taps.
    """

    d2t: Tensor  # from an id of a smaller draft vocabulary to what is to be added to it

    def __init__(self, spec: SpeculatorSpec, target: Target | None) -> None:
        super().__init__()
        self.spec = spec
        self._targets = (target,)  # no submodule
        if spec.rope:
            self.rotary = Rotary(spec)

    @property
    def target(self) -> Target:
        """The model that it drafts for."""
        (target,) = self._targets
        assert target is not None
        return target

    def remember(
        self,
        taps: Tensor,
        following: Tensor,
        places: Tensor,
        slots: Tensor,
        kv: WindowKV,
        text: KVBuffer,
    ) -> Tensor:
        """Put committed tokens into the cache: nothing is waited for.

        Args:
            taps: ``[n, M * H]`` of the passes that forwarded them.
            following: ``[n]``, the token after each.
            places: ``[n]``, where in the text they are.
            slots: ``[n]``, where their keys and values go; the cache holds them already.
            kv: the cache.
            text: the target's own, of the whole text.

        Returns:
            ``[n, ...]``: what :meth:`begin` wants of the last one.
        """
        raise NotImplementedError

    def begin(
        self, state: Tensor, root: Tensor, position: Tensor, kv: WindowKV, seen: Tensor
    ) -> DrafterRound:
        """Begin a round.

        Args:
            state: ``[1, ...]``, what :meth:`remember` returned for the token before the root.
            root: ``[1]``, the text's last token.
            position: ``[1]``, its position.
            kv: the cache; scratch slots are written.
            seen: ``[slots]`` bool, those of committed tokens.
        """
        raise NotImplementedError


def behind(position: Tensor, window: int, kv: WindowKV) -> Tensor:
    """``[slots]`` int64: how far before a position the token of each is, from 1; more than a
    window has where it is none of that.
    """
    far = 1 + torch.arange(min(window, kv.budget), device=position.device)
    places = position - far
    around = kv.sinks + (places - kv.sinks) % (kv.budget - kv.sinks)
    slots = torch.where(places < kv.budget, places, around).clamp(min=0)
    found = torch.full((kv.capacity,), window + 1, device=position.device)
    return found.scatter_reduce(0, slots, torch.where(places < 0, window + 1, far), "amin")


def near(position: Tensor, window: int, kv: WindowKV) -> Tensor:
    """``[slots]`` bool: where the newest tokens before a position are, as many as a window has."""
    return behind(position, window, kv) <= window


def to_full_vocabulary(logits: Tensor, network: DraftNetwork) -> Tensor:
    """``[n, V]`` logits of those of a drafter's own vocabulary,
    where that is smaller than the target's.
    """
    count = network.spec.vocab_size
    own = logits.shape[1]
    if own in (count, network.target.vocab_size):
        return logits
    full = logits.new_full((len(logits), count), EXCLUDED)
    return full.index_copy_(1, network.d2t + torch.arange(own, device=logits.device), logits)
