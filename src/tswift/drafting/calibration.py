"""How likely a drafted token is to be the one drawn, learned while decoding from what was."""

from __future__ import annotations

from collections.abc import Hashable

_WEIGHT = 8.0  # observations that the chance given at first counts for
_MEMORY = 2048.0  # observations after which older ones count for half: texts change


class Calibration:
    """Chances of offers by their kind, which is whatever their source knows of them beforehand.

    A source guesses a chance; what is learned replaces it as observations of the kind come in.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, list[float]] = {}  # of a kind: how many came true, and how many there were

    def chance(self, kind: Hashable, guess: float) -> float:
        """The chance of an offer, above 0 and below 1.

        Args:
            kind: of the offer.
            guess: what its source thinks, between 0 and 1; it counts as long as little is known of the kind.
        """
        true, count = self._seen.get(kind, (0.0, 0.0))
        chance = (true + _WEIGHT * guess) / (count + _WEIGHT)
        return min(max(chance, 1e-6), 1 - 1e-6)

    def learn(self, kind: Hashable, came_true: bool) -> None:
        """An offer of the kind was put to the test."""
        seen = self._seen.setdefault(kind, [0.0, 0.0])
        seen[0] += came_true
        seen[1] += 1
        if seen[1] >= _MEMORY:
            seen[0] /= 2
            seen[1] /= 2
