"""A run, or a text with the options that made it, put before the audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tswift.decoding.audit import Audit, audit
from tswift.decoding.params import SamplingParams
from tswift.drafting.options import DraftOptions
from tswift.engine import check, ending
from tswift.errors import InputError
from tswift.jobs.config import AuditConfig
from tswift.jobs.folder import TOKENS, RunRecord, check_ids, read_tokens
from tswift.jobs.prompt import take
from tswift.models.config import refuse_shape
from tswift.models.load import LoadedModel, load
from tswift.models.target import Show


@dataclass(frozen=True)
class AuditInput:
    """What is to be verified.

    Attributes:
        model: the model, loaded.
        prompt: the prompt's token ids.
        tokens: the generated token ids.
        params: what they were drawn with, banned ids included.
        seed: what they were drawn with.
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


def subject_of_run(
    run: RunRecord,
    model: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    exact: bool | None = None,
) -> AuditInput:
    """A run, with its own model as it was loaded then, unless another is asked for.

    Raises:
        InputError: the model cannot be loaded, or the run does not fit it, or was not exact and is to be now.
    """
    made = run.config
    if exact and not made.exact:
        raise InputError(f"{run.path} was made without it, so it can only be judged within rounding", "exact")
    name = made.model if model is None else model
    refuse_shape(name)
    _tokens(run)  # better now than after a model was loaded
    how: dict[str, Any] = {
        "device": made.device if device is None else device,
        "dtype": made.dtype if dtype is None else dtype,
        "attention": made.attention,
        "quantize": made.quantize if model is None and quantize is None else quantize,
    }
    try:
        loaded = load(name, **how, exact=made.exact if exact is None else exact)
    except InputError as error:
        if error.field != "exact" or exact:
            raise
        loaded = load(name, **how, exact=False)
    subject = with_model(run, loaded)
    if exact and subject.note:
        raise InputError(f"cannot be had here: {subject.note}", "exact")
    return replace(subject, note=None) if exact is False else subject


def with_model(run: RunRecord, model: LoadedModel) -> AuditInput:
    """A run and the model that is there already; passes of that are exact no longer if the run's bits were others.

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


def subject_of_text(
    path: Path, config: AuditConfig, params: SamplingParams, model: Mapping[str, Any], words: str
) -> AuditInput:
    """A text and the options that are said to have made it.

    Args:
        path: file of token ids.
        config: prompt, seed and end.
        params: what it was drawn with.
        model: arguments of :func:`tswift.load`. Nobody knows whether a text without a run was made by exact passes
            here, so they are not exact unless ``exact`` is set.
        words: the prompt.

    Raises:
        InputError: something given cannot be used, or does not fit together.
    """
    tokens = read_tokens(path, "tokens")
    loaded = load(**{**model, "exact": bool(model.get("exact"))})
    prompt = take(loaded.encode(words), config.prefill, bundled=config.bundled)
    params, _ = ending(params, loaded.eos_ids, config.stop_at_eos)
    return _checked(AuditInput(loaded, prompt, tokens, params, config.seed, path), "tokens")


def report(subject: AuditInput, found: Audit) -> dict[str, Any]:
    """Everything about an audit, ready for JSON."""
    about = {"source": str(subject.source), "seed": subject.seed, "prompt_tokens": len(subject.prompt)}
    return {**about, "model": subject.model.about(), "note": subject.note, **found.as_dict()}


def _tokens(run: RunRecord) -> list[int]:
    return read_tokens(run.path / TOKENS, whole=False)  # a run that was killed may have left a part of one


def _checked(subject: AuditInput, option: str | None) -> AuditInput:
    target, source = subject.model.target, str(subject.source)
    if not subject.prompt:
        raise InputError("has no tokens", "prompt")
    check_ids(subject.prompt, target.vocab_size, f"the prompt of {source}", option)
    check_ids(subject.tokens, target.vocab_size, source, option)
    banned = [token for token in subject.params.banned if token >= target.vocab_size]
    if banned:
        raise InputError(f"{source} bans token id {banned[0]:,}, outside the model's vocabulary", option)
    check(target, len(subject.prompt), len(subject.tokens), "ar", DraftOptions(), option)
    return subject
