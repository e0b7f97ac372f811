"""A run, or a text with the options that made it, prepared for the audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tswift.decoding.audit import Audit, audit
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.engine import check, ending
from tswift.errors import InputError
from tswift.jobs.config import AuditConfig, RunConfig
from tswift.jobs.folder import TOKENS, RunRecord, check_ids, read_tokens
from tswift.jobs.prompt import take
from tswift.models.config import refuse_shape
from tswift.models.devices import find_device
from tswift.models.load import LoadedModel, load
from tswift.models.target import Show


@dataclass(frozen=True)
class AuditInput:
    """A text to audit.

    Attributes:
        model: the model, loaded.
        prompt, tokens: token ids of the prompt, and those generated.
        params, seed: what they were drawn with, banned ids included.
        source: the folder or file the tokens come from.
        note: why an exact run is not judged exactly; None if it is, or the run was none.
    """

    model: LoadedModel
    prompt: list[int]
    tokens: list[int]
    params: SamplingParams
    seed: int
    source: Path
    note: str | None = None

    def audit(self, show: Show | None = None) -> Audit:
        """Run the audit; see :func:`tswift.decoding.audit.audit`."""
        return audit(self.model.target, self.prompt, self.tokens, self.params, self.seed, show)

    def report(self, audit: Audit) -> dict[str, Any]:
        """Everything about an audit, ready for JSON."""
        about = {"source": str(self.source), "seed": self.seed, "prompt_tokens": len(self.prompt)}
        return {**about, "model": self.model.about(), "note": self.note, **audit.as_dict()}


def run_input(
    run: RunRecord,
    model: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    quantize: str | None = None,
    exact: bool | None = None,
) -> AuditInput:
    """A run, with its own model as it was loaded then, unless another is asked for.

    Raises:
        InputError: the model cannot be loaded, or the run does not fit it, or was not exact and is to be now.
    """
    config = run.config
    if exact and not config.exact:
        raise InputError(f"{run.path} was made without it, so it can only be judged within rounding", "exact")
    refuse_shape(model or config.model)
    _tokens(run)  # better now than after a model was loaded
    load_model = partial(
        load,
        config.model if model is None else model,
        device=config.device if device is None else device,
        dtype=config.dtype if dtype is None else dtype,
        kv_dtype=_kv_dtype(config, model, device, dtype) if kv_dtype is None else kv_dtype,
        attention=config.attention,
        quantize=config.quantize if model is None and quantize is None else quantize,
    )
    try:
        loaded = load_model(exact=config.exact if exact is None else exact)
    except InputError as error:
        if error.field != "exact" or exact:
            raise
        loaded = load_model(exact=False)
    audited = with_model(run, loaded)
    if exact and audited.note:
        raise InputError(f"cannot be had here: {audited.note}", "exact")
    return replace(audited, note=None) if exact is False else audited


def _kv_dtype(config: RunConfig, model: str | None, device: str | None, dtype: str | None) -> str:
    """The KV cache's dtype: part of what was decoded, so the run's wherever the model can have it."""
    on_cpu = find_device(device or config.device).type == "cpu"
    if model is None and on_cpu and config.kv_dtype != config.dtype:
        return config.kv_dtype
    own = config.dtype if dtype is None else dtype
    return "auto" if model is not None or own == "auto" else own


def with_model(run: RunRecord, model: LoadedModel) -> AuditInput:
    """A run and a loaded model, whose passes are exact no longer if the run's arithmetic was another.

    Raises:
        InputError: the run does not fit it.
    """
    note = None
    if run.config.exact and (model.exact is None or model.exact != run.bits):
        note = "the run was exact, but the arithmetic here differs from that of the run: judged within rounding"
    if model.exact is not None and (note or not run.config.exact):
        model.target.width = None
        model = replace(model, exact=None)
    return _checked(AuditInput(model, run.prompt, _tokens(run), run.params, run.config.seed, run.path, note), None)


def text_input(
    path: Path, config: AuditConfig, params: SamplingParams, model: Mapping[str, Any], text: str
) -> AuditInput:
    """A file of token ids and the options that are said to have made it.

    Args:
        path: the file.
        config, params: prompt, seed and end; what it was drawn with.
        model: arguments of :func:`tswift.load`. Nobody knows whether a text without a run was made by exact passes
            here, so they are not exact unless ``exact`` is set.
        text: the prompt.

    Raises:
        InputError: something cannot be used, or does not fit together.
    """
    tokens = read_tokens(path, "tokens")
    loaded = load(**{**model, "exact": bool(model.get("exact"))})
    prompt = take(loaded.encode(text), config.prefill, bundled=config.bundled)
    params, _ = ending(params, loaded.eos_ids, config.stop_at_eos)
    kv_dtype, note = loaded.about().get("kv_dtype"), None
    if kv_dtype is not None:
        note = f"the KV cache is in {kv_dtype}; a text made with another needs its --kv-dtype"
    return _checked(AuditInput(loaded, prompt, tokens, params, config.seed, path, note), "tokens")


def _tokens(run: RunRecord) -> list[int]:
    return read_tokens(run.path / TOKENS, whole=False)  # a run that was killed may have left a part of one


def _checked(audited: AuditInput, option: str | None) -> AuditInput:
    target, source = audited.model.target, str(audited.source)
    if not audited.prompt:
        raise InputError("has no tokens", "prompt")
    check_ids(audited.prompt, target.vocab_size, f"the prompt of {source}", option)
    check_ids(audited.tokens, target.vocab_size, source, option)
    params = audited.params
    check_ids(params.banned, target.vocab_size, f"the banned ids of {source}", option)
    name = "logit_bias" if option else None
    check_ids([*params.logit_bias], target.vocab_size, f"the logit bias of {source}", name)
    check(target, len(audited.prompt), len(audited.tokens), "ar", DraftOptions(), option)
    return audited
