"""Why something slower or less exact stands in for a part of a model."""

from __future__ import annotations

from collections.abc import Mapping


class Fallbacks(dict[str, str]):
    """Why something slower or less exact stands in for a part of a model, by that part.

    For the "attention" that should serve here, for its "features" (windows, soft caps, sinks), for
    kernels between the "layers"' products, for "steps" on the device (then no pass is replayed),
    for CUDA "graphs", for the "sampler"'s kernels, for "exact" passes, for "wide" ones over a text,
    for the kernels that walk "trees" and that step "states", for the "cache" of another dtype.
    """

    def __init__(self, *known: Mapping[str, str]) -> None:
        super().__init__(*known)
        self.told: set[str] = set()  # reasons that a warning has given

    def note(self, part: str, reason: str | None) -> None:
        """Keep the reason; None if nothing stands in for the part any more."""
        if reason:
            self[part] = reason
        else:
            self.pop(part, None)

    @property
    def graph_fault(self) -> str | None:
        """Why passes are not replayed as CUDA graphs although they could be;
        None if nothing went wrong.
        """
        return self.get("steps") or self.get("graphs")
