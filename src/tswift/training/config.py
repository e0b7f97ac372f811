"""Settings of a training, and the progress that it reports.

The command line is made from the fields; nothing here imports torch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from tswift.errors import InputError, Object, find_path
from tswift.models.config import DEMO, HEAD_KINDS, parse_dtype_name, refuse_shape
from tswift.options import Values, check_options, option, options_of, refuse_changes

TEXT, DISTILL = OBJECTIVES = ("text", "distill")


_text = partial(option, panel="Text")
_schedule = partial(option, panel="Schedule")
_model = partial(option, panel="Model")
_output = partial(option, panel="Output", free=True)
_heads = partial(option, panel="Heads")

_CORPUS = (
    "Required, but for --resume: a folder of .parquet or .txt files, one such file, or a hub id "
    "such as emozilla/pg19."
)
_DTYPES = ("auto", "float32", "float64", "bfloat16")

# of decoding the same number of tokens, with what was trained and without
TIMES = ("seconds", "plain_seconds")


@dataclass(frozen=True)
class HeadsConfig:
    """Settings of a training of heads, which draft for a model whose weights stay as they are.

    The defaults are the paper's, in table 9, for GPUs.
    """

    corpus: str = option(MISSING, _CORPUS, panel="Options", free=True)
    seq_len: int = _text(
        8192,
        "Tokens of a row; only longer documents are used.",
        shown="8,192; 1,024 on a CPU",
        least=2,
    )
    documents: int | None = _text(
        None, "Use so many documents, evenly spread.", shown="all", least=2
    )
    held_out: int | None = _text(
        None, "Documents never trained on.", shown="4, a tenth at most", least=1
    )
    steps: int | None = _schedule(
        None, "Optimizer steps.", shown="200; 5 minutes on a CPU", least=1
    )
    minutes: float | None = _schedule(
        None,
        "Training time, evaluation of the held-out text included, instead of --steps.",
        above=0,
    )
    batch: int = _schedule(
        3, "Rows forwarded together.", shown="3; 2 on a CPU", least=1, most=1 << 20
    )
    accumulate: int = _schedule(
        10,
        "Batches of a step, for each process.",
        shown="10; 1 on a CPU",
        least=1,
        most=1 << 20,
    )
    lr: float = _schedule(5e-3, "Highest learning rate.", above=0)
    warmup: int = _schedule(50, "Linear warm-up steps, at most a quarter of all.", least=0)
    weight_decay: float = _schedule(0.1, "Weight decay (AdamW).", least=0)
    seed: int = _schedule(0, "Seed of initial weights and batches.", least=0, most=2**63 - 1)
    model: str = _model(DEMO, "demo, a folder or a hub id.", free=True)
    device: str = _model("auto", "auto, cpu, cuda, cuda:1 ...", free=True)
    dtype: str = _model(
        "auto",
        "bfloat16, float32 or float64.",
        shown="bfloat16 on CUDA, float32 on CPU",
        choices=_DTYPES,
        parse=parse_dtype_name,
    )
    attention: str = _model("auto", "auto, native, triton, flash or sdpa.", free=True)
    eval_every: int = _output(
        50, "Steps between evaluations of the held-out text; 0 is none.", least=0
    )
    save_every: int | None = _output(
        None, "Steps between checkpoints.", shown="by time alone", least=1
    )
    save_minutes: float = _output(10.0, "Most minutes between checkpoints.", above=0)
    kind: str = _heads("conditioned", "conditioned or chained.", choices=HEAD_KINDS)
    heads_count: int = _heads(3, "Number of heads.", least=1, most=64)
    objective: str = _heads(
        TEXT, "text, or distill: the model's own distribution there.", choices=OBJECTIVES
    )
    draft_vocabulary: int = _heads(
        8192, "Tokens that they may draft: the corpus's most frequent; 0 is all.", least=0
    )
    keep_tokens: int = _schedule(
        0,
        "Tokens of which the model's states are kept, to be learnt from again.",
        shown="0; 1,000,000 on a CPU",
        least=0,
    )
    alpha_tokens: int = _output(
        256,
        "Tokens decoded after each held-out text for alpha, before and after; 0 is none.",
        least=0,
    )
    install: bool = _output(
        False, "Put the heads where --model finds them, in the cache folder.", shown=""
    )

    ON_CPU: ClassVar[Values] = {
        "seq_len": 1024,
        "batch": 2,
        "accumulate": 1,
        "minutes": 5.0,
        "keep_tokens": 1_000_000,
    }

    def __post_init__(self) -> None:
        check_options(self)
        if self.steps is not None and self.minutes is not None:
            raise InputError("cannot be given together with --steps", "minutes")
        least = self.heads_count + 2  # every head has a token to predict
        if self.seq_len < least:
            raise InputError(f"must be at least {least}, got {self.seq_len}", "seq_len")
        refuse_shape(self.model)

    @classmethod
    def cpu_defaults(cls, values: Values) -> Object:
        """Defaults of what is not among some values on a CPU,
        which would take days for the paper's.
        """
        typed = {*values} | ({"minutes"} if "steps" in values else set())  # steps end it, too
        return {name: value for name, value in cls.ON_CPU.items() if name not in typed}

    @property
    def last_step(self) -> int:
        """Number of steps, unless ``minutes`` ends the training."""
        return self.steps or 200  # of table 9

    @property
    def step_tokens(self) -> int:
        """Tokens that a process sees in a step."""
        return self.seq_len * self.batch * self.accumulate

    @property
    def kept_rows(self) -> int:
        """Rows of which the model's states are kept, by each process:
        no more than there are in all steps.
        """
        kept = self.keep_tokens // self.seq_len
        return (
            kept
            if self.minutes is not None
            else min(kept, self.last_step * self.accumulate * self.batch)
        )

    def resolved(self) -> HeadsConfig:
        """The same settings with absolute paths and an explicit number of steps,
        to hold in any working directory.
        """
        model = self.model if self.model == DEMO else _absolute(self.model)
        steps = None if self.minutes is not None else self.last_step
        return replace(self, model=model, corpus=_absolute(self.corpus), steps=steps)

    def resumed(self, changes: Values, folder: Path) -> HeadsConfig:
        """These settings with the changes asked for when the training in a folder is resumed."""
        changed = (
            replace(self, **{"steps": None, "minutes": None, **changes}).resolved()
            if changes
            else self
        )
        free = {item.name for item, carried in options_of(self) if carried.free}
        asked = {name: getattr(changed, name) for name in changes}
        refuse_changes(f"the training in {folder}", asked, vars(self), free=free)
        return replace(self, **asked)


def _absolute(name: str) -> str:
    with suppress(InputError):  # a hub id may have any name
        path = find_path(name)
        return str(path.resolve()) if path.exists() else name
    return name


def corpus_files(corpus: str) -> list[str]:
    """The files that a path names; empty if it may be a hub id."""
    if not corpus.strip():
        raise InputError("is empty", "corpus")
    path = find_path(corpus, "corpus")
    try:
        exists = path.exists()
        folder = path.is_dir()
        files = (
            sorted(file for file in path.iterdir() if file.is_file())
            if folder
            else [path] * path.is_file()
        )
    except OSError as error:
        raise InputError(f"{corpus} cannot be read ({error.strerror})", "corpus") from None
    for suffix in (".parquet", ".txt"):
        named = [str(file) for file in files if file.suffix == suffix]
        if named:
            return named
    if exists:
        problem = (
            "holds no .parquet or .txt files"
            if folder
            else "is no folder, and no .parquet or .txt file"
        )
        raise InputError(f"{corpus} {problem}", "corpus")
    if path.is_absolute() or corpus.startswith((".", "~")) or not corpus.isprintable():  # no hub id
        raise InputError(f"there is no file or folder {corpus}", "corpus")
    return []
