"""The paper's settings for its five models, by name: table 10, and the tree that it adopted (table 7).

The models are those that its authors published with their heads. Two token ids are never drawn from LLaMA3.1-8b: those
that ``main.py`` of bigai-nlco/TokenSwift hands to its sampler as ``assistant_token_id`` for this model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tswift.decoding.params import OFF
from tswift.drafting.options import DraftOptions, find_method, used
from tswift.errors import InputError, did_you_mean


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
