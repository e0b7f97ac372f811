"""What a user asks of a job. Nothing here imports torch: what is cheap to check is refused at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tswift.decoding.params import SamplingParams
from tswift.drafting.options import METHODS, DraftOptions, find_method, refuse_unused
from tswift.errors import InputError
from tswift.jobs.presets import PRESETS, choose
from tswift.jobs.prompt import check_prompt, read_prompt
from tswift.models.config import DEMO, DEMO_DRAFT, UNQUANTISED, ModelConfig, refuse_shape
from tswift.options import check_options, option, options_of


def draft_for(methods: Sequence[str], model: str, asked: str | None) -> str | None:
    """The draft model to load for methods; None if none of them needs one.

    Args:
        methods: names.
        model: the large model's name.
        asked: what was typed, or None: that is the bundled draft model for the bundled model.

    Raises:
        InputError: no such method, one was typed and none needs it, or none was typed and one is needed.
    """
    needing = [method for method in methods if find_method(method).draft]
    if asked is not None and not needing:
        message = f"{methods[0]} does not use it" if len(methods) == 1 else f"none of {', '.join(methods)} uses it"
        users = [name for name, method in METHODS.items() if method.draft]
        raise InputError(f"{message}; {' and '.join(users)} do", "draft_model")
    if not needing or asked is not None:
        return asked
    if model != DEMO:
        raise InputError(f"names a smaller model with the tokens of {model}, which {needing[0]} needs", "draft_model")
    return DEMO_DRAFT


def weights_for(methods: Sequence[str], asked: str | None) -> str | None:
    """What the model's own drafting passes are to be quantised by; None for nothing.

    Args:
        methods: names.
        asked: what was typed, ``none`` for nothing; or None.

    Raises:
        InputError: no such method, or one was typed and none of the methods drafts with the model itself.
    """
    if asked is not None and not any(find_method(method).partial for method in methods):
        one = f"{methods[0]} does not draft with the model itself"
        message = one if len(methods) == 1 else f"none of {', '.join(methods)} drafts with the model itself"
        raise InputError(message, "draft_weights")
    return None if asked == UNQUANTISED else asked


def loading(config: ModelConfig, methods: Sequence[str]) -> dict[str, Any]:
    """Arguments of :func:`tswift.load` for methods; the model's name, ``exact`` and ``quantize`` apart.

    Raises:
        InputError: as :func:`draft_for` and :func:`weights_for`.
    """
    return {
        "draft_model": draft_for(methods, config.model, config.draft_model),
        "draft_weights": weights_for(methods, config.draft_weights),
        "device": config.device,
        "dtype": config.dtype,
        "attention": config.attention,
        "heads": config.heads,
    }


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Which text is to be written, by whatever method: its prompt, its length and its seed."""

    length: int = option(100_000, "Tokens to generate, exactly.", flag="--len", least=1, most=1 << 40)
    prompt: str | None = option(
        None,
        "File to continue, - for stdin.",
        shown="the first 1,024 tokens of the bundled novel, with the bundled model",
    )
    prompt_text: str | None = option(None, "Text to continue, instead of a file.")
    prefill: int | None = option(None, "Use the prompt's first N tokens only.", metavar="N", least=1, most=1 << 40)
    seed: int = option(0, "Any integer; with the prompt and the sampling it fixes the text.")

    def __post_init__(self) -> None:
        check_options(self)
        if self.prompt is not None and self.prompt_text is not None:
            raise InputError("cannot be given together with --prompt", "prompt_text")

    @property
    def bundled(self) -> bool:
        """Whether the prompt is the bundled novel."""
        return self.prompt is None and self.prompt_text is None

    @property
    def source(self) -> str:
        """For records: where the prompt comes from."""
        return "bundled" if self.bundled else self.prompt or "prompt_text"

    def read(self, model: str) -> str:
        """The prompt's text.

        Args:
            model: the model's name: only the bundled one has a prompt of its own.

        Raises:
            InputError: there is none, or it cannot be read.
        """
        if self.bundled and model != DEMO:
            raise InputError(f"names a text for {model} to continue, or --prompt-text has it", "prompt")
        return read_prompt(self.prompt) if self.prompt_text is None else check_prompt(self.prompt_text, "prompt_text")


@dataclass(frozen=True, kw_only=True)
class AuditConfig(TextConfig):
    """How the text was made that ``tswift verify --tokens`` judges."""

    stop_at_eos: bool = option(False, "End-of-text tokens could be drawn.", flag="--stop-at-eos", shown="")


@dataclass(frozen=True, kw_only=True)
class RunConfig(TextConfig, ModelConfig):
    """A job as asked for; the options of ``tswift generate``.

    Attributes:
        sampling: fields of :class:`SamplingParams` that were given.
        drafting: fields of :class:`DraftOptions` that were given. One that the method does not use is refused.

    Raises:
        InputError: a value outside its range, or values that do not go together.
    """

    method: str = option(
        "tokenswift",
        f"One of {', '.join(METHODS)}.",
    )
    stop_at_eos: bool = option(
        False, "Stop at an end-of-text token instead of never drawing one.", flag="--stop-at-eos", shown=""
    )
    chat: bool = option(
        False, "The prompt is what a user says: put it into the model's chat template.", flag="--chat", shown=""
    )
    system: str | None = option(None, "With --chat: file with a system prompt.", metavar="FILE")
    preset: str | None = option(
        None,
        f"The paper's settings, where nothing else is typed: {', '.join(PRESETS)}.",
        metavar="NAME",
    )
    out: Path | None = option(None, "Folder for the run.", panel="Output", shown="./runs/<UTC time>-<method>")
    sampling: Mapping[str, Any] = field(default_factory=dict)
    drafting: Mapping[str, Any] = field(default_factory=dict)
    overridden: tuple[str, ...] = ()  # what of the preset was typed otherwise

    def __post_init__(self) -> None:
        TextConfig.__post_init__(self)
        ModelConfig.__post_init__(self)
        method = find_method(self.method)
        refuse_with_chat(self)
        refuse_shape(self.model)
        heads = {} if self.heads is None else {"heads": self.heads}
        refuse_unused([self.method], {**self.drafting, **heads})
        self.loading()
        if self.exact and method.reference:
            raise InputError(f"cannot be had with {self.method}, which sums as reference implementations do", "exact")
        self.params()
        self.options()

    @classmethod
    def of(cls, **values: Any) -> RunConfig:
        """A job of options by name: those of this class, ModelConfig, SamplingParams and DraftOptions.

        Raises:
            InputError: a value is outside its range, or values do not go together.
        """
        own, sampling, drafting = (fields_of(kind, values) for kind in (cls, SamplingParams, DraftOptions))
        overridden: tuple[str, ...] = ()
        if own.get("preset") is not None:
            preset = choose(own["preset"], own.get("method", cls.method), sampling, drafting, model=own.get("model"))
            own["model"], sampling, drafting = preset.model, dict(preset.sampling), dict(preset.drafting)
            overridden = tuple(preset.instead)
        return cls(**own, sampling=sampling, drafting=drafting, overridden=overridden)

    def loading(self) -> dict[str, Any]:
        """Arguments of :func:`tswift.load`; ``exact`` and ``quantize`` apart."""
        return loading(self, [self.method])

    def params(self) -> SamplingParams:
        """The sampling parameters."""
        return SamplingParams(**self.sampling)

    def options(self) -> DraftOptions:
        """The drafting options."""
        return DraftOptions(**self.drafting)

    def as_dict(self) -> dict[str, Any]:
        """For ``run.json``: everything by the options' names."""
        own = asdict(self)
        del own["overridden"]
        return own


def fields_of(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Of some values by name, those of a dataclass's options."""
    return {each.name: values[each.name] for each, _ in options_of(kind) if each.name in values}


def refuse_with_chat(config: RunConfig) -> None:
    """Refuse options that do not go together with a chat, or need one.

    Raises:
        InputError: a system prompt without a chat; a chat without a prompt, or with a part of one.
    """
    if config.system is not None and not config.chat:
        raise InputError("goes with --chat", "system")
    if config.chat and config.bundled:
        raise InputError("wants a --prompt: it is what the user says", "chat")
    if config.chat and config.prompt == config.system == "-":
        raise InputError("cannot be standard input, which is the prompt", "system")
    if config.chat and config.prefill is not None:
        raise InputError("cannot be given together with --chat, whose template has an end", "prefill")
