"""Settings of a training, and the progress that it reports.

Each field carries its range and its help; the command line is made from these classes.

Nothing here imports torch, so that ``--help`` and mistyped options need not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tswift.errors import InputError
from tswift.models.config import refuse_shape

TEXT, DISTILL = OBJECTIVES = ("text", "distill")
DEMO = "demo"  # the bundled model

# Published shapes of draft models; vocabulary and special tokens are the large model's.
SHAPES: dict[str, dict[str, Any]] = {
    # The paper's table 11. It says nothing of layers and embeddings; two layers and an LM head of its own, as the
    # model of 68M parameters has that TriForce drafts with, make 205.9 x 2^20 parameters with LLaMA3.1's vocabulary.
    "205m": {
        "vocab_size": 128_256,
        "hidden_size": 768,
        "hidden_act": "silu",
        "intermediate_size": 3072,
        "max_position_embeddings": 2048,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
    },
    # the bundled one's, half a million parameters with a vocabulary of 2,048
    "demo": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 512,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
    },
}


def setting(
    default: Any, text: str, shown: str | None = None, *, panel: str = "Schedule", free: bool = False, **bounds: Any
) -> Any:
    """A field of a configuration, with its help and the bounds that :func:`_check` takes.

    ``shown`` is how the help says the default, ``panel`` where ``--help`` lists the field. ``--resume`` may change what
    is ``free``: it changes no weight, or only by rounding.
    """
    if shown is None and default not in (None, MISSING):
        shown = f"{default:g}" if isinstance(default, float) else str(default)
    text = f"{text} (default: {shown})" if shown else text
    return field(default=default, metadata={"help": text, "panel": panel, "free": free, "bounds": bounds})


_text = partial(setting, panel="Text")
_model = partial(setting, panel="Model")
_output = partial(setting, panel="Output", free=True)
_heads = partial(setting, panel="Heads")
_draft = partial(setting, panel="Draft model")
_seq_len = partial(_text, text="Tokens of a row; only longer documents are used.", least=2)
_batch = partial(setting, text="Rows forwarded together.", least=1, most=1 << 20)
_accumulate = partial(setting, text="Batches of a step, for each process.", least=1, most=1 << 20)

_CORPUS = "Folder of .parquet or .txt files, one such file, or a hub id: emozilla/pg19."
_DTYPES = ("auto", "float32", "float64", "bfloat16")
_ALPHA_TOKENS = "Tokens decoded after each held-out text for alpha, before and after; 0 is none."
_SHAPE_REACH = "the shape's; 131072 for demo, 2048 for 205m"

Config = TypeVar("Config", bound="TrainConfig")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of any training: text, schedule, model, output. The defaults are those of the paper's table 9.

    Raises:
        InputError: a value is outside its range.
    """

    corpus: str = _text(MISSING, _CORPUS, free=True)
    seq_len: int = _seq_len(8192)
    documents: int | None = _text(None, "Look at so many documents, evenly spread.", "all", least=2)
    held_out: int | None = _text(None, "Documents never trained on.", "4, a tenth at most", least=1)
    steps: int | None = setting(None, "Optimizer steps.", "200", least=1)
    minutes: float | None = setting(None, "Training time, instead of --steps.", above=0)
    batch: int = _batch(3)
    accumulate: int = _accumulate(10)
    lr: float = setting(5e-3, "Highest learning rate.", above=0)
    warmup: int = setting(50, "Steps of its rise, a quarter of all at most.", least=0)
    weight_decay: float = setting(0.1, "AdamW's.", least=0)
    seed: int = setting(0, "Of first weights and rows.", least=0, most=2**63 - 1)
    model: str = _model(DEMO, "demo, a folder or a hub id.", free=True)
    device: str = _model("auto", "auto, cpu, cuda, cuda:1 ...", free=True)
    dtype: str = _model("auto", "bfloat16, float32 or float64.", "bfloat16 on CUDA, float32 on CPU", choices=_DTYPES)
    attention: str = _model("auto", "auto, native, triton, flash or sdpa.", free=True)
    eval_every: int = _output(50, "Steps between scorings of the held-out text; 0 is none.", least=0)
    save_every: int | None = _output(None, "Steps between checkpoints.", "by time alone", least=1)
    save_minutes: float = _output(10.0, "Most minutes between checkpoints.", above=0)

    COMMAND: ClassVar[str]  # subcommand, and kind of its records
    PANEL: ClassVar[str]  # title of the fields that other trainings do not have

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each.name, getattr(self, each.name), **each.metadata["bounds"])
        if self.steps is not None and self.minutes is not None:
            raise InputError("cannot be given together with --steps", "--minutes")
        if self.model.startswith("shape:"):
            refuse_shape(self.model)

    @property
    def last_step(self) -> int:
        """Number of steps, unless ``minutes`` ends the training."""
        return self.steps or 200  # of table 9

    @property
    def step_tokens(self) -> int:
        """Tokens that a process sees in a step."""
        return self.seq_len * self.batch * self.accumulate

    def resolved(self: Config) -> Config:
        """The same settings with absolute paths and an explicit number of steps, to hold in any working directory."""
        model = self.model if self.model == DEMO else _absolute(self.model)
        steps = None if self.minutes is not None else self.last_step
        return replace(self, model=model, corpus=_absolute(self.corpus), steps=steps)

    def resumed(self: Config, changes: Mapping[str, Any], folder: Path) -> Config:
        """These settings with the changes asked for when the training in a folder is resumed.

        Raises:
            InputError: a change would lead to other weights.
        """
        asked = replace(self, **{"steps": None, "minutes": None, **changes}).resolved() if changes else self
        free = {each.name for each in fields(self) if each.metadata["free"]}
        for name in changes:
            ours, theirs = getattr(self, name), getattr(asked, name)
            if name not in free and ours != theirs:
                began = "nothing" if ours is None else ours
                raise InputError(f"the training in {folder} was begun with {began}, got {theirs}", option(name))
        return replace(self, **{name: getattr(asked, name) for name in changes if name in free})


@dataclass(frozen=True)
class HeadsConfig(TrainConfig):
    """Settings of a training of heads, which draft for a model whose weights stay as they are."""

    kind: str = _heads("conditioned", "conditioned or chained.", choices=("chained", "conditioned"))
    heads_count: int = _heads(3, "How many.", least=1, most=64)
    objective: str = _heads(TEXT, "text, or distill: the model's own distribution there.", choices=OBJECTIVES)
    alpha_tokens: int = _output(256, _ALPHA_TOKENS, least=0)

    COMMAND: ClassVar[str] = "train"
    PANEL: ClassVar[str] = "Heads"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("seq_len", self.seq_len, least=self.heads_count + 2)  # every head has a token to predict


@dataclass(frozen=True)
class DraftConfig(TrainConfig):
    """Settings of a training of a small model, from random weights, that drafts for a large one."""

    seq_len: int = _seq_len(512)
    batch: int = _batch(16)
    accumulate: int = _accumulate(1)
    lr: float = setting(0.02, "Muon's highest learning rate; 0.15 of it is AdamW's.", above=0)
    weight_decay: float = setting(0.01, "Muon's.", least=0)
    shape: str = _draft("demo", "demo (as the bundled one), or 205m (the paper's table 11).", choices=(*SHAPES,))
    reach: int | None = _draft(
        None, "Positions it is made for; rows jump up to there.", _SHAPE_REACH, least=2, most=1 << 24
    )
    objective: str = _draft(TEXT, "text, or distill: the large model's distribution.", choices=OBJECTIVES)

    COMMAND: ClassVar[str] = "train-draft"
    PANEL: ClassVar[str] = "Draft model"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq_len > self.positions:
            message = f"is {self.seq_len:,}, the draft model is to have {self.positions:,} positions"
            raise InputError(message, "--seq-len")

    @property
    def positions(self) -> int:
        """Positions that the draft model is made for."""
        return int(self.reach or SHAPES[self.shape]["max_position_embeddings"])


class Progress:
    """Is told how a training goes on, and shows nothing of it; subclasses do."""

    def say(self, message: str) -> None:
        """Show a line."""

    def update(self, name: str, done: int, total: int, figures: str = "") -> None:
        """Show how far a piece of work has come."""


def option(name: str) -> str:
    """A field's name on the command line."""
    return f"--{name.replace('_', '-')}"


def _check(
    name: str,
    value: Any,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> None:
    """Refuse a value outside the bounds of its field; None is in any bounds."""
    if value is None:
        return
    at_least = f"must be a number >= {least}" if isinstance(value, float) else f"must be at least {least}"
    for wrong, message in (
        (choices and value not in choices, f"is one of {', '.join(choices)}"),
        (most is not None and value > most, f"must be at most {most}"),
        (above is not None and not above < value < math.inf, f"must be a number above {above}"),
        (least is not None and not least <= value < math.inf, at_least),
    ):
        if wrong:
            raise InputError(f"{message}, got {value!r}", option(name))


def _absolute(place: str) -> str:
    try:
        path = Path(place).expanduser()
        return str(path.resolve()) if path.exists() else place
    except (OSError, RuntimeError, ValueError):
        return place
