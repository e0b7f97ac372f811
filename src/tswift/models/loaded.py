"""A model ready to decode, and what goes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tswift.errors import InputError
from tswift.models.adapting import EAGER, running
from tswift.models.devices import dtype_name
from tswift.models.heads import Heads
from tswift.models.ranks import ALONE, Ranks
from tswift.models.source import in_one_line, silence
from tswift.models.target import Target


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to decode.

    Attributes:
        name: as the user named it.
        tokenizer: the transformers tokenizer; a stand-in where the weights are random.
        target: the model, adapted.
        heads: heads that draft for it, if it has any.
        eos_ids: token ids that end a text.
        attention: the backend in use.
        prepared: ``eager`` or ``compiled``, and why what should be in use is not, when the model was loaded.
        simulated: its weights are random, so that times mean something and texts do not.
        exact: hash of the bits that passes of a fixed width have here (``target.width``); None without a fixed width.
        inexact: why there is none although there should be; None if nothing is amiss.
        quantization: what its weights were quantised by; None if they were not. Plain decoding is this model's own.
        ranks: those that hold it together.
        weights: hash of all weights, where that took all of the ranks; None where it can be had at any time.
        draft: a smaller model that drafts for it, if one was asked for. Every rank holds the whole of it.
        draft_name: as the user named that.
        drafting: the model itself with weights of fewer bits, for its drafting passes; None where those run on it.
        draft_weights: its kind: ``int8``, ``fp8`` or ``int4``.
        draft_prepared: of ``drafting``, as ``prepared``.
    """

    name: str
    tokenizer: Any
    target: Target
    heads: Heads | None
    eos_ids: tuple[int, ...]
    attention: str = "sdpa"
    prepared: str = EAGER
    simulated: bool = False
    exact: str | None = None
    inexact: str | None = None
    quantization: str | None = None
    ranks: Ranks = ALONE
    weights: str | None = None
    draft: Target | None = None
    draft_name: str | None = None
    drafting: Target | None = None
    draft_weights: str | None = None
    draft_prepared: str = EAGER

    @property
    def layers(self) -> str:
        """``eager`` or ``compiled``, and why what should be in use is not, by all passes so far."""
        return running(self.target, self.prepared)

    def encode(self, text: str, bare: bool = False) -> list[int]:
        """The token ids of a prompt, with the first token the model wants before any text, if it wants one.

        Args:
            text: the prompt.
            bare: add no token; the text has all that the model wants.

        Raises:
            InputError: the tokenizer cannot do it, or is not the model's: it knows tokens that the model does not.
        """
        with silence(), in_one_line(self.name, "its tokenizer: "):
            ids = list(self.tokenizer(text, **({"add_special_tokens": False} if bare else {}))["input_ids"])
        if ids and max(ids) >= self.target.vocab_size:
            message = (
                f"has token id {max(ids):,} by the tokenizer of {self.name}, the model has {self.target.vocab_size:,}"
            )
            raise InputError(message, "--prompt")
        return ids

    def about(self) -> dict[str, Any]:
        """What was loaded and how, for records."""
        return {
            "name": self.name,
            "device": str(self.target.device) if self.ranks.count == 1 else self.target.device.type,
            "dtype": dtype_name(self.target.dtype),
            "attention": self.attention,
            "layers": self.layers,
            "exact": None if self.exact is None else {"width": self.target.width, "bits": self.exact},
            **({} if self.inexact is None else {"inexact": self.inexact}),
            "heads": None if self.heads is None else f"{self.heads.kind}, {self.heads.count}",
            "eos_ids": list(self.eos_ids),
            "simulated": self.simulated,
            "quantization": self.quantization,
            "ranks": self.ranks.count,
            **({} if self.draft is None else {"draft": {"name": self.draft_name}}),
            **self._about_drafting(),
        }

    def _about_drafting(self) -> dict[str, Any]:
        if self.drafting is None:
            return {}
        return {"draft_weights": self.draft_weights, "draft_layers": running(self.drafting, self.draft_prepared)}

    def besides(self) -> str:
        """What is out of the ordinary, to be said after the rest."""
        exact = "" if self.exact is None else f", exact in passes of {self.target.width} rows"
        exact += "" if self.inexact is None else f", not exact, as {self.inexact}"
        quantized = f", weights quantised ({self.quantization})" if self.quantization else ""
        drafts = "" if self.drafting is None else f", drafting passes in {self.draft_weights}"
        return exact + quantized + drafts + (f", split over {self.ranks.count} ranks" if self.ranks.count > 1 else "")
