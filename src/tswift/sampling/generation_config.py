"""Where sampling comes from that nobody typed: the paper, a model's authors, or llama.cpp.

And sampling as transformers' ``GenerationConfig`` asks for it, of a call to ``generate`` or of a
model's own file.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tswift.errors import InputError
from tswift.sampling.parameters import SamplingParams, Untyped

if TYPE_CHECKING:
    from transformers import GenerationConfig

# there, by ours
NAMES = {"eta": "eta_cutoff", "banned": "suppress_tokens", "min_tokens": "min_new_tokens"}
_NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "eta": 0.0,
    "repetition_penalty": 1.0,
}
_ORDER = "top_k,top_p,min_p,eta"  # of transformers
PAPERS, MODELS_OWN, LLAMA_CPPS = "paper", "model", "llama.cpp"
SOURCES = {
    PAPERS: "the paper's",
    MODELS_OWN: "the model's own",
    LLAMA_CPPS: "llama.cpp's",
}
LLAMA_CPPS_VALUES: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_LLAMA_CPPS = SamplingParams(**LLAMA_CPPS_VALUES, penalty=1.0)


def usual_source(config: GenerationConfig) -> str:
    """Where the sampling of chats and of a server comes from, if nobody says."""
    return MODELS_OWN if _recommends(config) else LLAMA_CPPS


def params_of(source: str, config: GenerationConfig, model: str) -> SamplingParams:
    """The sampling of a source.

    Args:
        source: one of :data:`SOURCES`.
        config: the model's own.
        model: its name, for an error.

    Raises:
        InputError: the model's authors recommend what cannot be had.
    """
    if source == MODELS_OWN:
        return _own_params(config, model)
    return SamplingParams() if source == PAPERS else _LLAMA_CPPS


def sampling_params(config: GenerationConfig) -> SamplingParams:
    """The sampling parameters by which a row's distribution is that of transformers.

    Raises:
        InputError: a value that cannot be had.
    """
    asked = {ours: getattr(config, NAMES.get(ours, ours)) for ours in _NEUTRAL}
    if not config.do_sample:
        asked = {"temperature": 0.0, "repetition_penalty": asked["repetition_penalty"]}
    elif asked["temperature"] == 0:
        raise InputError(
            "must be above 0 with do_sample; without it the most likely token is taken",
            "temperature",
        )
    values: dict[str, Any] = {
        **_NEUTRAL,
        **{name: value for name, value in asked.items() if value is not None},
    }
    params = SamplingParams(**values, penalty=1.0, banned=tuple(config.suppress_tokens or ()))
    on = {*params.filters}
    # elsewhere the order makes no difference: min-p and top-k take what they take whatever the
    # other leaves
    matters = {"eta", "top_k"} <= on or ("top_p" in on and bool(on & {"min_p", "eta"}))
    return replace(params, order=_ORDER) if matters else params


def _recommends(config: GenerationConfig) -> bool:
    """Whether a model's ``generation_config.json`` says anything of how tokens are drawn."""
    named = (
        getattr(config, NAMES.get(ours, ours)) not in (None, value)
        for ours, value in _NEUTRAL.items()
    )
    return bool(config.do_sample) or any(named)


def _own_params(config: GenerationConfig, model: str) -> SamplingParams:
    """The sampling that a model's authors recommend, as its ``generation_config.json`` has it.

    As vLLM reads it: where the file names no value, the model's distribution is left as it is, and
    what does not say ``do_sample`` samples.

    Raises:
        InputError: a value that cannot be had.
    """
    asked = copy(config)
    asked.do_sample = config.do_sample is not False and config.temperature != 0
    try:
        own = sampling_params(asked)
        return replace(own, repetition_penalty=Untyped(own.repetition_penalty))
    except InputError as error:
        name = NAMES.get(str(error.field), error.field)
        reason = (
            f"{model} asks in its generation_config.json for what cannot be had ({name} "
            f"{error.message})"
        )
        raise InputError(f"{reason}", "sampling_from") from None
