"""A run, or a text with the options that made it, prepared for the audit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tswift.decoding.audit import Audit, audit
from tswift.drafting.options import DraftOptions
from tswift.errors import InputError, Object
from tswift.forward.text import OnProgress
from tswift.jobs.config import AuditConfig
from tswift.jobs.folder import TOKENS, RunRecord, check_ids, read_tokens
from tswift.jobs.resuming import load_exact_or_not, refuse_other_model, refuse_other_text
from tswift.loading.model import LoadedModel, load_model
from tswift.memory import Demand, check
from tswift.models.codes import holds_codes
from tswift.models.config import NO_HEADS, ModelConfig, refuse_shape
from tswift.models.devices import find_device
from tswift.models.hashes import config_hash
from tswift.options import Values, changed, given_options
from tswift.sampling.parameters import SamplingParams, apply_eos_policy


@dataclass(frozen=True)
class AuditInput:
    """A text to audit."""

    model: LoadedModel
    prompt: list[int]
    tokens: list[int]
    params: SamplingParams  # what they were drawn with, banned ids included
    seed: int
    source: Path  # the folder or file that the tokens come from
    note: str | None = None  # why an exact run is not judged exactly
    text_fault: str = ""  # what is wrong with the run's ``text.txt``; empty if nothing is

    def audit(self, on_progress: OnProgress | None = None) -> Audit:
        """Run the audit; see :func:`tswift.decoding.audit.audit`."""
        return audit(
            self.model.target, self.prompt, self.tokens, self.params, self.seed, on_progress
        )

    def report(self, audit: Audit) -> Object:
        """Everything about an audit, ready for JSON."""
        about = {"source": str(self.source), "seed": self.seed, "prompt_tokens": len(self.prompt)}
        about |= {
            "model": self.model.about(),
            "note": self.note,
            "text_fault": self.text_fault or None,
        }
        return {**about, **audit.as_dict(), "ok": audit.ok and not self.text_fault}


def run_input(run: RunRecord, asked: AuditConfig | None = None) -> AuditInput:
    """A run, with its own model as it was loaded then,
    where what is ``asked`` of the model does not say else.
    """
    config = run.config.model
    typed = {} if asked is None else given_options(asked.model, asked.given)
    exact = typed.get("exact")
    if exact and not config.exact:
        raise InputError(
            f"{run.path} was made without it, so it can only be judged within rounding", "exact"
        )
    alone = replace(config, heads=NO_HEADS, draft_model=None, drafter=None)
    if config.attention == "triton":  # which another machine may lack; a run of it may be judged
        alone = replace(alone, attention="auto")
    if "model" in typed:
        alone = replace(alone, weights=None)
    wanted = changed(alone, {"kv_dtype": _kv_dtype(config, typed), **typed})
    refuse_shape(wanted.model)
    _tokens(run)  # better now than after a model was loaded
    model = load_exact_or_not(wanted, bool(exact))
    _refuse_other_model(run, model)
    audited = with_model(run, model)
    if exact and audited.note:
        raise InputError(f"cannot be had here: {audited.note}", "exact")
    return replace(audited, note=None) if exact is False else audited


def _refuse_other_model(run: RunRecord, model: LoadedModel) -> None:
    """Refuse a model that did not make the run, as far as hashes tell:
    weights in another type have other ones.
    """
    known = run.record.model
    about = model.about()
    if about["quantization"] != known.get("quantization"):
        return
    hashes = {"config": config_hash(model.target.model)}
    if about["dtype"] == known["dtype"] and (
        about["quantization"] is None or holds_codes(model.target.model)
    ):
        hashes["weights"] = model.weights_hash
    refuse_other_model(run, model, hashes)


def _kv_dtype(config: ModelConfig, asked: Values) -> str:
    """The KV cache's dtype: part of what was decoded,
    so the run's wherever the model can have it.
    """
    if asked.get("model") is not None:
        return "auto"
    kept, dtype = config.kv_dtype, asked.get("dtype", config.dtype)
    on_cpu = find_device(asked.get("device", config.device)).type == "cpu"
    there = on_cpu or (kept == "int8" and dtype in ("bfloat16", "float16"))
    return kept if there and kept != config.dtype else dtype


def with_model(run: RunRecord, model: LoadedModel) -> AuditInput:
    """A run and a loaded model, whose passes are exact no longer if the run's arithmetic was
    another.

    Raises:
        InputError: it has another tokenizer.
    """
    refuse_other_text(run, model)
    note = None
    if run.config.model.exact and (model.exact is None or model.exact != run.bits):
        note = (
            "the run was exact, but the arithmetic here differs from that of the run: judged "
            "within rounding"
        )
    if model.exact is not None and (note or not run.config.model.exact):
        model.target.set_fixed_rows(None)
        model = replace(model, exact=None)
    fault = run.text_fault(model.tokenizer)
    audited = AuditInput(
        model, run.prompt, _tokens(run), run.params, run.config.text.seed, run.path, note, fault
    )
    return _checked(audited, None)


def text_input(path: Path, tokens: list[int], config: AuditConfig, text: str) -> AuditInput:
    """The token ids of a file, their prompt's ``text``,
    and the options that are said to have made them.

    Nobody knows whether a text without a run was made by exact passes here, so they are not exact
    unless ``exact`` is set.
    """
    loaded = load_model(replace(config.model, exact=bool(config.model.exact)))
    prompt = config.text.first(loaded.encode(text))
    params, _ = apply_eos_policy(config.sampling, loaded.eos_ids, config.stop_at_eos)
    kv_dtype = loaded.about().get("kv_dtype")
    note = None
    if kv_dtype is not None:
        note = f"the KV cache is in {kv_dtype}; a text made with another needs its --kv-dtype"
    return _checked(
        AuditInput(loaded, prompt, tokens, params, config.text.seed, path, note), "tokens"
    )


def _tokens(run: RunRecord) -> list[int]:
    # a run that was killed may have left a part of one
    return read_tokens(run.path / TOKENS, whole=False)


def _checked(audited: AuditInput, option: str | None) -> AuditInput:
    target = audited.model.target
    source = str(audited.source)
    if not audited.prompt:
        raise InputError("has no tokens", "prompt")
    check_ids(audited.prompt, target.vocab_size, f"the prompt of {source}", option)
    check_ids(audited.tokens, target.vocab_size, source, option)
    params = audited.params
    check_ids(params.banned, target.vocab_size, f"the banned ids of {source}", option)
    name = "logit_bias" if option else None
    check_ids([*params.logit_bias], target.vocab_size, f"the logit bias of {source}", name)
    check(target, Demand(len(audited.prompt), len(audited.tokens), "ar", DraftOptions()), option)
    return audited
