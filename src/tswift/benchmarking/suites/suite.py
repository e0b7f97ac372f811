"""A suite: one of the paper's tables or figures as data. What runs, what is shown of it, what it is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PAPER_LENS = (20_000, 40_000, 60_000, 80_000, 100_000)

# what the paper orders, and so what is held against it
AXIS, LENGTH, PREFILL = "axis", "length", "prefill"


@dataclass(frozen=True)
class Setting:
    """How texts are drawn. Texts of different settings differ, so each has a plain decode of its own.

    Attributes:
        label: its place on the suite's axis; empty if there is only one.
        sampling: fields of ``SamplingParams``.
    """

    label: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """A method and how it drafts. All choices write the same text, side by side.

    Attributes:
        label: its place on the suite's axis; empty if there is only one.
        method: one of ``METHODS``.
        drafting: fields of ``DraftOptions``.
    """

    label: str
    method: str
    drafting: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Paper:
    """Where the published rows are.

    Attributes:
        file: a CSV in the package.
        axis: its columns that, joined by spaces, say where on the axis a row is.
        names: our label for that, where it is another one.
        figures: its column by our figure's name. Columns called minutes are told in seconds.
    """

    file: str
    axis: tuple[str, ...]
    figures: Mapping[str, str]
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """One of the paper's tables or figures.

    Attributes:
        name: as in ``--suite``.
        title: what it shows.
        axis: what is varied, as the head of a column.
        choices: what runs side by side, plain decoding apart.
        columns: figures shown, by name.
        judged: those of them whose order is held against the paper's.
        along: what the paper orders: the axis, generated lengths or prefills.
        contrasts: the pairs on the axis that are held against the paper's; all if there are none.
        settings: how texts are drawn.
        paper: the published rows; None where no figures were transcribed.
        wide: the axis runs across the table, as in the paper, and not down.
        plot: ``lines`` over length, ``axis`` over the axis, ``bars`` or ``time``.
        plotted: figures drawn.
        prefills, lens: where nothing else is asked for; the paper's.
        fixes: options that are set here without being varied.
        plain: plain decoding has a place on the axis, too.
        texts: keep the texts, and show them.
        note: what has to be known to read it.
    """

    name: str
    title: str
    axis: str
    choices: tuple[Choice, ...]
    columns: tuple[str, ...]
    judged: tuple[str, ...]
    along: str = AXIS
    contrasts: tuple[tuple[str, str], ...] = ()
    settings: tuple[Setting, ...] = (Setting(),)
    paper: Paper | None = None
    wide: bool = False
    plot: str = "lines"
    plotted: tuple[str, ...] = ("alpha", "speedup")
    prefills: tuple[int, ...] = (4096,)
    lens: tuple[int, ...] = PAPER_LENS
    fixes: tuple[str, ...] = ()
    plain: bool = False
    texts: bool = False
    note: str = ""

    @property
    def own(self) -> frozenset[str]:
        """The options that it varies or fixes, which nobody else can set; by parameter name."""
        sampling = {name for setting in self.settings for name in setting.sampling}
        drafting = {name for choice in self.choices for name in choice.drafting}
        return frozenset(
            {"methods", *sampling, *drafting, *self.fixes, *(["prefill"] if self.along == PREFILL else [])}
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """The places on its axis; none where the model or the prefill is varied."""
        choices, settings = ([each.label for each in self.choices], [each.label for each in self.settings])
        return tuple(label for label in (*choices, *settings) if label)

    @property
    def methods(self) -> tuple[str, ...]:
        """Its methods, each once."""
        return tuple(dict.fromkeys(choice.method for choice in self.choices))
