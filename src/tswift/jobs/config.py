"""What a user asks of a job, and its prompt, read and encoded.

Nothing here imports torch: what is cheap to check is refused at once.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tswift.decoding.text import TextRules, check_stop
from tswift.drafting.options import (
    LOADED,
    METHODS,
    DraftOptions,
    RecordedOptions,
    find_method,
    refuse_unused,
)
from tswift.errors import (
    InputError,
    Object,
    check_text,
    find_path,
    no_such,
    read_file,
    read_stream,
    reason_of,
)
from tswift.models.config import DEMO, DEMO_DRAFT, ModelConfig, refuse_shape
from tswift.options import (
    Values,
    changed,
    check_options,
    fields_of,
    given_names,
    given_options,
    of_json,
    option,
    options_of,
    part,
    switch,
)
from tswift.sampling.generation_config import PAPERS, SOURCES
from tswift.sampling.parameters import MAX_TOP, OFF, SamplingParams, Untyped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tswift.loading.model import LoadedModel

# options that are done with once a run has its prompt, and its sampling
_OF_THE_PROMPT = ("prompt", "prompt_text", "prefill", "chat", "system", "preset", "out")
_RECORDED = ("heads", "length", "method", "seed", "stop_at_eos")  # by all versions
# options of a text alone, which a server takes by request
OF_A_TEXT = (
    "stop_at_eos",
    "ignore_eos",
    "stop",
    "stop_on_loop",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
# fields of a request, or of a line of prompts, by the options that they become
FIELDS = {
    name: name
    for name in ("seed", *OF_A_TEXT, *(each.name for each, _ in options_of(SamplingParams)))
} | dict.fromkeys(("max_completion_tokens", "max_tokens"), "length")
BUNDLED = "long-novel.txt"
BUNDLED_PREFILL = 1024  # tokens of the bundled prompt that are used if nothing is said
# of a prompt: some ten million tokens, which take a minute and gigabytes to be found
MAX_BYTES = 32_000_000


def read_prompt(source: str | None, option: str = "prompt") -> str:
    """The text of a prompt: of a file, of standard input (``-``), or of the bundled novel (None).

    InputError, naming ``option``, if it is more than ``MAX_BYTES``, or not text in UTF-8.
    """
    name = "standard input" if source == "-" else str(source)
    try:
        if source == "-":
            if sys.stdin is None:
                raise InputError("there is no standard input", option)
            data = read_stream(sys.stdin.buffer, MAX_BYTES, name, option)
        elif source == "":
            raise InputError("names no file", option)
        else:
            path = bundled_prompts() / BUNDLED if source is None else find_path(source, option)
            data = read_file(path, MAX_BYTES, option)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text (byte {error.start:,})", option) from None
    except OSError as error:  # a closed descriptor
        raise InputError(f"{name} cannot be read ({error.strerror})", option) from None
    return check_prompt(text, option, name)


def read_message(source: str, option: str) -> str:
    """As :func:`read_prompt`, what somebody says in a chat: the end of a file's last line is no
    part of it.
    """
    return read_prompt(source, option).removesuffix("\n").removesuffix("\r")


def bundled_prompts() -> Path:
    """The folder of the bundled prompts: inside the package in a wheel,
    beside ``src/`` in a source tree.
    """
    package = Path(__file__).parents[1]
    inside = package / "prompts"
    return inside if inside.is_dir() else package.parents[1] / "prompts"


def check_prompt(text: str, option: str, name: str = "the text") -> str:
    """A prompt, checked to be text; ``name`` is what an error calls it."""
    if not check_text(text, option, name).strip():
        problem = "has nothing but white space" if text else "is empty"
        raise InputError(f"{name} {problem}", option)
    return text


def fingerprint(tokens: list[int]) -> str:
    """SHA-256 of token ids, taken as little-endian uint32."""
    return sha256(np.asarray(tokens, dtype="<u4").tobytes()).hexdigest()


def render_chat(
    tokenizer: PreTrainedTokenizerBase, model: str, messages: Sequence[Mapping[str, str]]
) -> str:
    """The template of a chat filled in, up to where the model is to answer;
    to be encoded without special tokens added.

    ``messages`` have a ``role`` and a ``content``. Templates may shorten those of the assistant,
    and no others.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"the tokenizer of {model} has no chat template", "chat")
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates are programs, and have their own ways to refuse
        option = "system" if any(message["role"] == "system" for message in messages) else "chat"
        raise InputError(
            f"the chat template of {model} does not take it ({reason_of(error)})", option
        ) from None
    for message in messages:
        held = message["content"].strip() in rendered
        if message["role"] == "system" and not held:
            raise InputError(f"the chat template of {model} drops system prompts", "system")
        if message["role"] == "user" and not held:
            raise InputError(
                f"the chat template of {model} does not hold the prompt as it is", "chat"
            )
    return str(rendered)


def options_from(given: Values, fields: Mapping[str, str]) -> tuple[Object, dict[str, str]]:
    """What fields of JSON ask for, by the options that ``fields`` make of them, and the field of
    each. None asks for nothing.

    InputError, naming the first, where two fields of an option differ.
    """
    asked, names = Object(), dict[str, str]()
    for field, name in fields.items():
        if (value := given.get(field)) is not None:
            first = names.setdefault(name, field)
            if repr(asked.setdefault(name, value)) != repr(value):
                raise InputError(f"and {field} are both given, and differ", first)
    if isinstance(stop := asked.get("stop"), str):
        asked["stop"] = [stop] if stop else []  # "" stops nowhere
    return of_json(asked), names


@dataclass(frozen=True)
class Text:
    """A prompt before it is encoded."""

    name: str  # a file's, ``pg19:0`` and so on, or ``bundled``; or what a line is called
    text: str  # of a chat, what was said last
    kind: str | None = None  # of a workload's
    messages: tuple[Mapping[str, str], ...] = ()  # of a chat; empty where there is but a text

    def encode(
        self, model: LoadedModel, chat: bool = False, system: str | None = None
    ) -> list[int]:
        """Its token ids, in a chat those of the model's template filled in.

        Raises:
            InputError: it is a chat, and ``chat`` is false; or the template does not take it.
        """
        if not chat:
            if self.messages:
                raise InputError(
                    f"{self.name} has messages, which only --chat puts into a template", "chat"
                )
            return model.encode(self.text)
        said = self.messages or ({"role": "user", "content": self.text},)
        if system is not None and said[0]["role"] != "system":
            said = ({"role": "system", "content": system}, *said)
        return model.encode(render_chat(model.tokenizer, model.name, said), bare=True)


_PAPER = {**OFF, "temperature": 1.0, "window": 1024}  # a filter that the paper does not name is off
_TREE = (1, 3, 3, 3)  # tokenswift's, of table 7
# table 10: the models that the authors published with their heads, and their sampling
PRESETS: dict[str, Object] = {
    "llama3.1-8b": {"model": "TokenSwift/TokenSwift-Llama-3.1-8B", "min_p": 0.1, "penalty": 1.2},
    "yarn-llama2-7b-128k": {
        "model": "TokenSwift/TokenSwift-Yarn-Llama-2-7b-128k",
        "top_p": 0.9,
        "penalty": 1.15,
    },
    "qwen2.5-1.5b": {"model": "TokenSwift/TokenSwift-Qwen2.5-1.5B", "top_p": 0.9, "penalty": 1.15},
    "qwen2.5-7b": {"model": "TokenSwift/TokenSwift-Qwen2.5-7B", "min_p": 0.05, "penalty": 1.15},
    "qwen2.5-14b": {"model": "TokenSwift/TokenSwift-Qwen2.5-14B", "min_p": 0.05, "penalty": 1.13},
}
# ids that main.py of bigai-nlco/TokenSwift hands to its sampler as assistant_token_id, and the
# texts they stand for
_NEVER_DRAWN = {"llama3.1-8b": {18_328: " assistant", 78_191: "assistant"}}


def preset_options(name: str, method: str, typed: Values) -> Object:
    """A preset's model, sampling and drafting options by name;
    of the last those that the method uses.

    That may depend on the options that were ``typed``. InputError if there is no such preset, or no
    such method.
    """
    if name not in PRESETS:
        raise no_such("preset", name, PRESETS, "preset")
    kind = find_method(method)
    preset = {"model": PRESETS[name]["model"], **_PAPER, **PRESETS[name]}
    preset["penalty"] = Untyped(preset["penalty"])
    # --gamma stands in for a tree; published drafters choose their own
    if "tree" in kind.uses and "gamma" not in typed and not kind.speculator_kinds:
        # where the LM head drafts no level, it begins with the first head's
        preset["tree"] = _TREE[1 - kind.by_lm_head :]
    return preset


def banned_ids(preset: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[int, ...]:
    """The ids that are never drawn by a preset;
    none where the tokenizer means something else by one of them.
    """
    banned = _NEVER_DRAWN.get(preset, {})
    same = all(
        token < vocab_size and tokenizer.decode([token]) == text for token, text in banned.items()
    )
    return tuple(banned) if same else ()


def preset_note(preset: str, banned: Collection[int]) -> str:
    """A line for people about a preset in use, and the ids that are never drawn."""
    if banned:
        return f"preset {preset}; never drawn: {', '.join(map(str, sorted(banned)))}"
    foreign = "; its banned ids mean something else to this tokenizer, and are left out"
    return f"preset {preset}{foreign if preset in _NEVER_DRAWN else ''}"


def to_load(config: ModelConfig, methods: Sequence[str]) -> ModelConfig:
    """What is loaded for methods: a draft model, too, where one of them needs the bundled one.

    InputError where none of the methods uses what was asked for, or where one needs what was not.
    """
    wanted = vars(config) | {"heads": config.heads_wanted}
    for name in LOADED:
        users = [user for user, method in METHODS.items() if name in method.loads]
        if wanted[name] is not None and not {*methods} & {*users}:
            none = f"{methods[0]} does not use it"
            if len(methods) > 1:
                none = f"none of {', '.join(methods)} uses it"
            raise InputError(f"{none}; {', '.join(users)} do", name)
    for method in methods:
        kind = find_method(method)
        if "drafter" in kind.needs and config.drafter is None:
            kinds = " or ".join(kind.speculator_kinds)
            raise InputError(f"is required: {method} drafts with a drafter ({kinds})", "drafter")
        if "draft_model" in kind.needs and config.draft_model is None:
            if config.model != DEMO:
                message = (
                    f"is required: {method} drafts with a smaller model that has the tokens of "
                    f"{config.model}"
                )
                raise InputError(message, "draft_model")
            config = replace(config, draft_model=DEMO_DRAFT)
    return config


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Which text is to be written, by whatever method: its prompt, its length and its seed."""

    length: int = option(
        100_000,
        "Tokens to generate, exactly.",
        flag="--len",
        also=("--max-tokens", "-n"),
        least=1,
        most=1 << 40,
    )
    prompt: str | None = option(
        None,
        "File to continue, - for stdin.",
        shown="the first 1,024 tokens of the bundled novel, with the bundled model",
    )
    prompt_text: str | None = option(None, "Text to continue, instead of a file.")
    prefill: int | None = option(
        None, "Use the prompt's first N tokens only.", metavar="N", least=1, most=1 << 40
    )
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

    @property
    def least(self) -> int:
        """Tokens of the prompt, as far as is known without it."""
        return self.prefill or (BUNDLED_PREFILL if self.bundled else 1)

    @property
    def larger(self) -> str:
        """The option that asks for most tokens."""
        return "prefill" if (self.prefill or 0) > self.length else "length"

    def first(self, tokens: list[int]) -> list[int]:
        """Of a prompt's tokens those that are used: all, if nothing is said, but the first 1,024 of
        the bundled one.
        """
        if (self.prefill or 0) > len(tokens):
            raise InputError(
                f"asks for {self.prefill:,} tokens, the prompt has {len(tokens):,}", "prefill"
            )
        return tokens[: self.least] if self.prefill or self.bundled else tokens

    def read(self, model: str) -> str:
        """The prompt's text; only the bundled model has one of its own."""
        if self.bundled and model != DEMO:
            reason = "(only the bundled model has a default text); or use --prompt-text"
            raise InputError(f"required for {model} {reason}", "prompt")
        return (
            read_prompt(self.prompt)
            if self.prompt_text is None
            else check_prompt(self.prompt_text, "prompt_text")
        )


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """What ``tswift verify`` judges: how a text was made, and with which model."""

    model: ModelConfig = part(ModelConfig)
    text: TextConfig = part(TextConfig)
    sampling: SamplingParams = part(SamplingParams)
    stop_at_eos: bool = switch("End-of-text tokens could be drawn.")
    given: frozenset[str] = given_names()


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A job as asked for, checked: the options of ``tswift generate``."""

    model: ModelConfig = part(ModelConfig)
    text: TextConfig = part(TextConfig)
    method: str = option("auto", f"One of {', '.join(METHODS)}.")
    stop_at_eos: bool | None = option(
        None,
        "Stop at an end-of-text token instead of never drawing one.",
        shown="yes with --chat, else no",
    )
    ignore_eos: bool = switch(
        "Draw end-of-text tokens like any other, and go on after them.", rare=True
    )
    stop: tuple[str, ...] = option(
        (),
        "Text that ends the text, which ends before it; repeatable.",
        shown="",
        metavar="TEXT",
        repeat=True,
    )
    stop_on_loop: int | None = option(
        None,
        "End the text when its last 3 N tokens are a loop of at most N.",
        shown="",
        rare=True,
        metavar="N",
        least=1,
        most=10_000,
    )
    include_stop_str_in_output: bool | None = option(
        None,
        "Show what ends the text: the stop string, or the token.",
        panel="Output",
        flag="--include-stop-str-in-output",
        shown="no, but for a token that --keep-special-tokens keeps",
        rare=True,
    )
    skip_special_tokens: bool = option(
        True,
        "Show no special tokens in the text, or keep them.",
        panel="Output",
        flag="--skip-special-tokens/--keep-special-tokens",
        shown="skipped",
        rare=True,
    )
    logprobs: int | None = option(
        None,
        "Write log-probabilities of each token and of the N likeliest.",
        panel="Output",
        shown="",
        rare=True,
        metavar="N",
        least=0,
        most=MAX_TOP,
    )
    chat: bool = switch("The prompt is what a user says: put it into the model's chat template.")
    system: str | None = option(None, "With --chat: file with a system prompt.", metavar="FILE")
    preset: str | None = option(
        None,
        f"The paper's settings, where nothing else is typed: {', '.join(PRESETS)}.",
        metavar="NAME",
        rare=True,
    )
    out: Path | None = option(
        None, "Folder for the run.", panel="Output", shown="./runs/<UTC time>-<method>"
    )
    sampling_from: str | None = option(
        None,
        "Where sampling comes from that is not typed: paper, model (its own recommendation), "
        "llama.cpp.",
        panel="Sampling",
        shown="with --chat the model's, or llama.cpp's where it has none; else paper",
        flag="--sampling",
        rare=True,
        choices=tuple(SOURCES),
    )
    sampling: SamplingParams = part(SamplingParams)
    drafting: DraftOptions = part(DraftOptions)
    given: frozenset[str] = given_names()  # typed, or the preset's
    least_loop: int = 1  # tokens of the shortest loop that ends the text

    def __post_init__(self) -> None:
        check_options(self)
        method = find_method(self.method)
        refuse_with_chat(self.text, self.chat, self.system)
        if self.preset is not None and self.sampling_from is not None:
            raise InputError(
                "cannot be given together with --preset, which sets the sampling", "sampling_from"
            )
        check_stop(self.stop)
        if self.ignore_eos and self.stop_at_eos:
            raise InputError("cannot be given together with --stop-at-eos", "ignore_eos")
        refuse_shape(self.model.model)
        refuse_unused([self.method], given_options(self.drafting, self.given))
        self.to_load()
        if self.model.exact and method.reference:
            raise InputError(
                f"cannot be had with {self.method}, which sums as reference implementations do",
                "exact",
            )

    @classmethod
    def of(cls, **values: Any) -> RunConfig:
        """A job of options by name, those of its parts among them;
        a preset fills in what is not given.
        """
        if values.get("preset") is not None:
            values = {"method": "tokenswift", **values}  # the paper's
            values = {**preset_options(values["preset"], values["method"], values), **values}
        return changed(cls(), values)

    @classmethod
    def from_record(cls, options: Values, loaded: Values, drafting: Values) -> RunConfig:
        """The configuration of a recorded run: its ``options``, but its model as it was ``loaded``,
        and its drafting options as they were resolved.

        Attention is ``auto`` where that was ``native``, which another machine may lack.
        AttributeError, KeyError, TypeError or ValueError if the record is broken.
        """
        DraftOptions(**of_json(drafting))  # a name that none has is refused
        attention = loaded["attention"]
        names = (*_RECORDED, *options)
        draft, drafter = (loaded.get(name) or {"name": None} for name in ("draft", "drafter"))
        recorded = {
            # of runs that know nothing of them
            "skip_special_tokens": False,
            "sampling_from": PAPERS,
            **{name: options[name] for name in names if name not in _OF_THE_PROMPT},
            "model": loaded["name"],
            "device": loaded["device"],
            "dtype": loaded["dtype"],
            "kv_dtype": loaded.get("kv_dtype", loaded["dtype"]),
            "attention": "auto" if attention == "native" else attention,
            "draft_model": draft["name"],
            "drafter": drafter["name"],
            "exact": loaded.get("exact") is not None,
            **drafting,
        }
        # older runs end at loops of exactly so many tokens
        least_loop = options.get("least_loop", options.get("stop_on_loop") or 1)
        usual = cls(drafting=RecordedOptions(), least_loop=least_loop)
        return changed(usual, of_json(recorded))

    def recorded(self) -> Object:
        """What ``run.json`` keeps as the run's options:
        of sampling and drafting those that were given.
        """
        own = {each.name: getattr(self, each.name) for each, _ in options_of(self)}
        given = {
            name: given_options(getattr(self, name), self.given)
            for name in ("sampling", "drafting")
        }
        own |= {
            "stop_at_eos": self.ends_at_eos,
            "sampling_from": self.sampling_from or PAPERS,
            "least_loop": self.least_loop,
        }
        return {**asdict(self.model), **asdict(self.text), **own, **given}

    def read(self) -> tuple[str, str | None]:
        """The prompt's text, or what a user says, and the system prompt."""
        system = None if self.system is None else read_message(self.system, "system")
        if self.chat and self.text.prompt is not None:
            return read_message(self.text.prompt, "prompt"), system
        return self.text.read(self.model.model), system

    @property
    def ends_at_eos(self) -> bool:
        """Whether an end-of-text token ends the text."""
        usual = self.chat and not self.ignore_eos
        return usual if self.stop_at_eos is None else self.stop_at_eos

    @property
    def text_rules(self) -> TextRules:
        """What ends the text, but for tokens, and what is shown of it."""
        include = self.include_stop_str_in_output
        return TextRules(
            self.stop,
            self.stop_on_loop,
            self.least_loop,
            skip_special=self.skip_special_tokens,
            include_stop=bool(include),
            include_end=not self.skip_special_tokens if include is None else include,
        )

    def sampling_with(self, usual: SamplingParams) -> SamplingParams:
        """The job's sampling, where what is not given is as usual."""
        typed = fields_of(SamplingParams, vars(self.sampling))
        return replace(
            usual, **{name: value for name, value in typed.items() if name in self.given}
        )

    def idle(self, params: SamplingParams) -> list[str]:
        """A line about the options that were given and change nothing, if there are some, as
        tokens are drawn by these parameters.
        """
        ends = self.ends_at_eos or self.stop or params.stop_token_ids
        idle = [
            *(OFF if params.greedy else ()),
            *(() if params.penalises else ("window",)),
            *(() if ends else ("min_tokens", "include_stop_str_in_output")),
        ]
        named = [f"--{name.replace('_', '-')}" for name in idle if name in self.given]
        return [f"without effect here: {', '.join(named)}"] if named else []

    def to_load(self) -> ModelConfig:
        """What is loaded for the job: how it is asked for, and what the method needs besides."""
        loaded = to_load(self.model, [self.method])
        return replace(loaded, exact=False) if find_method(self.method).reference else loaded


def refuse_with_chat(text: TextConfig, chat: bool, system: str | None = None) -> None:
    """Refuse what does not go together with a chat, or needs one."""
    if system is not None and not chat:
        raise InputError("goes with --chat", "system")
    if chat and text.bundled:
        raise InputError("needs --prompt or --prompt-text, the user's message", "chat")
    if chat and text.prompt == system == "-":
        raise InputError("cannot be standard input, which is the prompt", "system")
    if chat and text.prefill is not None:
        raise InputError(
            "cannot be given together with --chat, whose template has an end", "prefill"
        )
