"""What a user asks of a job. Nothing here imports torch: what is cheap to check is refused at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tswift.decoding.params import OFF, SamplingParams
from tswift.drafting.options import METHODS, DraftOptions, find_method, refuse_unused, used
from tswift.errors import InputError, did_you_mean
from tswift.jobs.prompt import check_prompt, read_prompt
from tswift.models.config import DEMO, DEMO_DRAFT, UNQUANTISED, ModelConfig, refuse_shape
from tswift.options import check_options, option, options_of


@dataclass(frozen=True)
class Preset:
    """What the paper chose for a model.

    Attributes:
        model: hub id.
        temperature, top_p, min_p, penalty, window: as in ``SamplingParams``.
        ngrams, tree: as in ``DraftOptions``; the tree is tokenswift's.
        banned: what is never drawn: token ids, and the texts that they must stand for.
    """

    model: str
    penalty: float
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    window: int = 1024
    ngrams: int = 20
    tree: tuple[int, ...] = (1, 3, 3, 3)
    banned: Mapping[int, str] = field(default_factory=dict)

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of ``SamplingParams``, all but the banned ids; a filter that the paper does not name is off."""
        return {
            **OFF,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "penalty": self.penalty,
            "window": self.window,
        }

    def drafting(self, method: str) -> dict[str, Any]:
        """Fields of ``DraftOptions`` that a method uses.

        Raises:
            InputError: there is no such method.
        """
        kind = find_method(method)
        # where the LM head drafts no level, the tree begins with the first head's
        found = {"ngrams": self.ngrams, "tree": self.tree[1 - kind.by_lm_head :]}
        return {name: value for name, value in found.items() if name in kind.uses}


PRESETS: dict[str, Preset] = {
    "llama3.1-8b": Preset(
        "TokenSwift/TokenSwift-Llama-3.1-8B", min_p=0.1, penalty=1.2, banned={18_328: " assistant", 78_191: "assistant"}
    ),
    "yarn-llama2-7b-128k": Preset("TokenSwift/TokenSwift-Yarn-Llama-2-7b-128k", top_p=0.9, penalty=1.15),
    "qwen2.5-1.5b": Preset("TokenSwift/TokenSwift-Qwen2.5-1.5B", top_p=0.9, penalty=1.15),
    "qwen2.5-7b": Preset("TokenSwift/TokenSwift-Qwen2.5-7B", min_p=0.05, penalty=1.15),
    "qwen2.5-14b": Preset("TokenSwift/TokenSwift-Qwen2.5-14B", min_p=0.05, penalty=1.13),
}


@dataclass(frozen=True)
class Chosen:
    """A preset and what was typed, put together.

    Attributes:
        model: a preset's, or the one that was typed.
        sampling, drafting: fields of ``SamplingParams`` and ``DraftOptions``.
        instead: fields of the preset that were typed otherwise.
    """

    model: str
    sampling: Mapping[str, Any]
    drafting: Mapping[str, Any]
    instead: Sequence[str]


def find_preset(name: str) -> Preset:
    """The preset of a name.

    Raises:
        InputError: there is none.
    """
    if name not in PRESETS:
        raise InputError(
            f"no preset {name!r:.40}; there are {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}", "preset"
        )
    return PRESETS[name]


def choose(
    name: str,
    method: str,
    sampling: Mapping[str, Any],
    drafting: Mapping[str, Any],
    *,
    model: str | None = None,
) -> Chosen:
    """A preset's settings; what was typed wins over them.

    Args:
        name: the preset's.
        method: of decoding.
        sampling, drafting: fields that were typed.
        model: the one that was typed; None for the preset's.

    Raises:
        InputError: there is no such preset, or no such method.
    """
    preset = find_preset(name)
    drafted = preset.drafting(method)
    if "gamma" in drafting:  # it stands in for a tree
        drafted.pop("tree", None)
    looked_at = used(method, DraftOptions(tree=drafting.get("tree"), recall=drafting.get("recall")))
    # a tree that pays may reuse no n-grams
    drafted = {name: value for name, value in drafted.items() if name in looked_at}
    own = {"model": preset.model, **preset.sampling, **drafted}
    typed = {**({} if model is None else {"model": model}), **sampling, **drafting}
    instead = tuple(name for name, value in own.items() if name in typed and typed[name] != value)
    return Chosen(
        preset.model if model is None else model, {**preset.sampling, **sampling}, {**drafted, **drafting}, instead
    )


def banned_ids(name: str, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """The ids that are never drawn by a preset; none where the tokenizer means something else by one of them."""
    preset = find_preset(name)
    for token, text in preset.banned.items():
        if token >= vocab_size or tokenizer.decode([token]) != text:
            return ()
    return tuple(preset.banned)


def remark(name: str, instead: Collection[str], banned: Collection[int]) -> str:
    """What is to be said of a preset that is in use, in a line.

    Args:
        name: of it.
        instead: fields that were typed otherwise.
        banned: ids that are never drawn.
    """
    preset = find_preset(name)
    words = [f"preset {name}"]
    if instead:
        words.append(f"but for {', '.join('--' + each.replace('_', '-') for each in instead)}")
    if banned:
        words.append(f"never drawn: {', '.join(map(str, sorted(banned)))}")
    elif preset.banned:
        words.append("its banned ids mean something else to this tokenizer, and are left out")
    return "; ".join(words)


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
