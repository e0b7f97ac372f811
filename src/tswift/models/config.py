"""How a model is to be loaded, as options; nothing here imports torch."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tswift.errors import InputError, close_name, did_you_mean, find_path
from tswift.options import DRAFTING, check_options, option

DEMO = "demo"  # the bundled model
DEMO_DRAFT = "demo-draft"  # the one that drafts for it
SHAPE_PREFIX = "shape:"  # before a published model's name: random weights
# published models: what their configurations say, by name
PUBLISHED: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("shapes.toml").read_text()
)
SHAPES = (*PUBLISHED,)
DTYPES = ("float32", "float64", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int16", "int8")
HEAD_KINDS = ("chained", "conditioned")
NO_HEADS = "none"  # of those that could be found for a model
ATTENTIONS = ("auto", "sdpa", "native", "triton", "flash")
BITS = {"int4": 4, "int8": 8}  # of a code, by the value of ``--weights``

_PANEL = "Model"
_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "fp64": "float64",
}


def parse_dtype_name(name: str, kinds: tuple[str, ...] = DTYPES, field: str = "dtype") -> str:
    """A dtype's own name, from that or a common one: ``bf16``, ``fp16``, ``half``, ``fp32``,
    ``torch.bfloat16``.

    Raises:
        InputError: there is no such dtype.
    """
    own = _ALIASES.get(str(name).removeprefix("torch."), str(name).removeprefix("torch."))
    if own not in ("auto", *kinds):
        near = did_you_mean(own, ("auto", *kinds, *_ALIASES))
        raise InputError(
            f"no dtype {name!r:.40}; there are {', '.join(('auto', *kinds))}{near}", field
        )
    return own


def refuse_shape(model: str) -> None:
    """Refuse ``shape:NAME`` where a text is wanted.

    Raises:
        InputError: it is one.
    """
    if model.startswith(SHAPE_PREFIX):
        reason = (
            "has random weights: its text says nothing; tswift bench times it, tswift roofline "
            "counts it"
        )
        raise InputError(f"{model} {reason}", "model")


def refuse_missing_heads(heads: str | None) -> None:
    """Refuse a file of heads that is not there.

    Raises:
        InputError: there is no such file.
    """
    if heads is None or heads in (*HEAD_KINDS, NO_HEADS):
        return
    path = find_path(heads, "heads")
    if not path.exists():
        raise InputError(f"there is no file {heads}{close_name(path, '*', HEAD_KINDS)}", "heads")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """How a model is to be loaded; the fields are parameters of :func:`tswift.load`, which explains
    them.

    Raises:
        InputError: a value outside its choices, or of another type.
    """

    heads: str | None = option(
        None,
        "chained, conditioned, a file, or none.",
        panel=DRAFTING,
        shown="those by the model, or installed for it",
    )
    draft_model: str | None = option(
        None,
        "Smaller model with the same vocabulary, for methods that draft with one (standalone, "
        "triforce).",
        panel=DRAFTING,
        shown="demo-draft for demo",
    )
    drafter: str | None = option(
        None,
        "Published drafter of the model, a folder or a hub id: DSpark or DFlash (block), EAGLE-3 "
        "(eagle).",
        panel=DRAFTING,
        shown="none",
    )
    model: str = option(
        DEMO,
        "demo (the bundled model), a folder, a hub id, a GGUF file, or REPO:FILE.gguf of the hub.",
        panel=_PANEL,
    )
    weights: str | None = option(
        None,
        "int8 or int4: round the weights to integers of so many bits when they are loaded.",
        panel=_PANEL,
        shown="as they are",
        choices=("int8", "int4"),
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:1 ...", panel=_PANEL)
    dtype: str = option(
        "auto", "auto, float32, float64, bfloat16 or float16.", panel=_PANEL, parse=parse_dtype_name
    )
    kv_dtype: str = option(
        "auto",
        "Dtype of the KV cache: auto, float32, bfloat16, float16, int16 or int8 on a CPU; on CUDA "
        "the model's own, or int8.",
        panel=_PANEL,
        rare=True,
        shown="the model's own; int16 for demo in float32",
        parse=partial(parse_dtype_name, kinds=KV_DTYPES, field="kv_dtype"),
    )
    attention: str = option(
        "auto",
        "auto (triton on CUDA, native on the CPU, sdpa where these cannot be had), native, "
        "triton, flash or sdpa.",
        panel=_PANEL,
        rare=True,
    )
    yarn: float | None = option(
        None,
        "Serve so many times the positions that the model was made for, by YaRN.",
        panel=_PANEL,
        rare=True,
        shown="as it was made",
        above=1,
        most=1024,
    )
    exact: bool | None = option(
        None,
        "Batch-invariant passes: all methods give bit-identical tokens.",
        rare=True,
        panel=_PANEL,
        shown="in 16 bits, on CUDA, and where whole passes are one C program",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.attention not in ATTENTIONS:
            message = f"no attention {self.attention!r:.40}; there are {', '.join(ATTENTIONS)}"
            raise InputError(message + did_you_mean(self.attention, ATTENTIONS), "attention")

    @property
    def heads_wanted(self) -> str | None:
        """Heads that were asked for."""
        return None if self.heads == NO_HEADS else self.heads
