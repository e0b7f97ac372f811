"""The tokenizer of a GGUF file, which gives a text the token ids that llama.cpp gives it.

A file has a vocabulary, perhaps merges, and the name of how text is cut into words before they are
merged (``tokenizer.ggml.pre``), but not the expression that cuts them: programs know those by name.
Here they are in one table, so that the ids do not depend on what the installed transformers knows,
and a name that is not in it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tswift.models.gguf import GGUFFile

_PREFIX = "tokenizer.ggml."
_SPACE = "\u2581"  # what SentencePiece writes for a space
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)  # types of tokens, as stored
_WHOLE = (_UNKNOWN, _CONTROL, _USER_DEFINED)  # found in a text before it is cut into words

# Expressions that cut text into words, as tokenizers were published with them; of letters in both
# cases as llama.cpp has them, for which one outside ASCII is of either case.
_ENDING = r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"  # what English appends to a word
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_NOT_WORD = r"[^\r\n\p{L}\p{N}]?"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_ENDING}|{_NOT_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}{_SPACES}"
_QWEN2 = rf"{_ENDING}|{_NOT_WORD}\p{{L}}+|\p{{N}}|{_MARKS}{_SPACES}"
_QWEN35 = (
    rf"{_ENDING}|{_NOT_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}"
)
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_CAPITALISED, _CAPITALS = f"{_NOT_WORD}{_UPPER}*{_LOWER}+", f"{_NOT_WORD}{_UPPER}+{_LOWER}*"
_SLASHED = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
_TEKKEN = rf"{_CAPITALISED}|{_CAPITALS}|\p{{N}}|{_SLASHED}"
_GPT4O = rf"{_CAPITALISED}(?:{_ENDING})?|{_CAPITALS}(?:{_ENDING})?|\p{{N}}{{1,3}}|{_SLASHED}"
_CASED = (  # letters of either case, as of one version of Unicode
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-"
    "ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-"
    "ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_HAN = "(?:(?!\\s)[一-龥\u0800-一가-\ud7ff])+"
_DIGIT = r"\p{N}"
_PHRASE = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LLAMA3_NAMES = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"
# names by expressions, each of which cuts what those before it left
_BY_NAME: dict[tuple[str, ...], str] = {
    (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
    (_LLAMA3,): f"{_LLAMA3_NAMES} dbrx smaug-bpe chatglm-bpe glm4 glm5",
    (_QWEN2,): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    (_QWEN35,): "qwen35",
    (_TEKKEN,): "tekken",
    (_GPT4O,): "gpt-4o llama4 kanana2 talkie minimax-m2",
    (_GPT2,): "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4",
    (_DIGIT, _GPT2): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        + _SPACES,
    ): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    (
        "[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        _HAN,
        _DIGIT,
    ): "deepseek-coder",
    (
        "[\r\n]",
        rf"\s?[{_CASED}]+",
        r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
        r"\s+$",
        _HAN,
        r"\p{N}+",
    ): "deepseek-llm",
    (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"): "falcon",
    (
        rf"{_ENDING}|{_NOT_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|"
        r"\s+(?!\S)|\s+",
    ): "bailingmoe bailingmoe2 llada-moe",
    (rf"{_ENDING}|{_NOT_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}",): "seed-coder",
    (
        r"\p{N}{1,3}",
        rf"{_ENDING}|{_NOT_WORD}\p{{L}}+|\p{{N}}+|{_MARKS}{_SPACES}",
    ): "minicpm5",
    (_PHRASE,): "poro-chat bloom gpt3-finnish",
    (_PHRASE, _DIGIT): "viking",
    (r"\p{N}+", r"(?=(\d{3})+(?!\d))"): "superbpe",
}
SPLITS = {name: steps for steps, names in _BY_NAME.items() for name in names.split()}
# of these a text begins with its token, unless a file says otherwise, and a word that is a token is
# not put together of its parts
_BEGUN = (*_LLAMA3_NAMES.split(), "tekken")
_WHOLE_WORDS = (*_BEGUN, "glm4", "glm5", "minicpm5")


def tokenizer_of(file: GGUFFile) -> PreTrainedTokenizerFast:
    """The tokenizer that a file describes.

    Raises:
        InputError: the file lacks a part of it, or names what is not in the tables here.
    """
    tokens = _strings(file, "tokens")
    if len({*tokens}) != len(tokens):
        raise file.refusal("has a token twice in its vocabulary")
    types = file.arrays.get(f"{_PREFIX}token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise file.refusal(f"has {len(tokens):,} tokens, and types of {len(types):,}")
    kind = file.metadata.get(f"{_PREFIX}model")
    if kind == "gpt2":
        backend = _byte_level(file, tokens)
        begun = file.metadata.get(f"{_PREFIX}pre") in _BEGUN
    elif kind == "llama":
        backend = _sentencepiece(file, tokens, types)
        begun = True
    else:
        raise file.refusal(
            f"has a tokenizer of type {kind!r:.40}, which tswift does not read; it reads gpt2 and "
            "llama"
        )
    name = str(file.metadata.get("general.name", "")).lower()
    stripped = "phi-3" in name or "phi3" in name  # llama.cpp knows these by their name, too
    backend.add_tokens(
        [
            AddedToken(
                token,
                special=kind != _USER_DEFINED,
                normalized=False,
                rstrip=stripped and token not in ("<unk>", "<s>", "<|endoftext|>"),
            )
            for token, kind in zip(tokens, types, strict=True)
            if kind in _WHOLE or (stripped and token == "</s>")
        ]
    )
    named = {f"{role}_token": tokens[number] for role, number in _numbered(file, len(tokens), kind)}
    ends = [
        (named.get("bos_token"), file.metadata.get(f"{_PREFIX}add_bos_token", begun)),
        (named.get("eos_token"), file.metadata.get(f"{_PREFIX}add_eos_token", False)),
    ]
    if any(wanted and token is None for token, wanted in ends):
        raise file.refusal("wants a token around each text, and does not say which")
    first, last = ([token] if wanted and token else [] for token, wanted in ends)
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        special_tokens=[(token, tokens.index(token)) for token in (*first, *last)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _strings(file: GGUFFile, name: str) -> list[str]:
    """An array of strings of the tokenizer."""
    found = file.arrays.get(_PREFIX + name)
    if not found or not all(isinstance(each, str) for each in found):
        raise file.refusal(f"lacks {_PREFIX}{name}, without which its tokenizer cannot be made")
    return list(map(str, found))


def _numbered(file: GGUFFile, count: int, kind: str) -> Iterator[tuple[str, int]]:
    """Special tokens by their role in transformers, with their ids."""
    usual = {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = file.metadata.get(f"{_PREFIX}{name}_token_id", usual.get(name))
        if type(number) is int and number < count:
            yield role, number


def _byte_level(file: GGUFFile, tokens: Sequence[str]) -> Tokenizer:
    """GPT-2's kind: words as bytes, put together by the file's merges."""
    pre = file.metadata.get(f"{_PREFIX}pre")
    if pre is None:
        raise file.refusal(
            f"lacks {_PREFIX}pre, by which programs know how its text is cut into words; "
            "gguf-new-metadata --pre-tokenizer NAME writes a file that has it"
        )
    if pre not in SPLITS:
        raise file.refusal(
            f"has the {_PREFIX}pre {pre!r:.40}, by which tswift knows no way to cut text into words"
        )
    pairs = (merge.partition(" ") for merge in _strings(file, "merges"))
    merges = [(first, second) for first, _, second in pairs]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(step), "isolated") for step in SPLITS[str(pre)]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GGUFFile, tokens: Sequence[str], types: Sequence[Any]) -> Tokenizer:
    """SentencePiece's kind: characters, put together to the token of the highest score."""
    scores = file.arrays.get(f"{_PREFIX}scores") or [0.0] * len(tokens)
    if len(scores) != len(tokens):
        raise file.refusal(f"has {len(tokens):,} tokens, and scores of {len(scores):,}")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    ranked = sorted(
        (-score, number)
        for number, (score, kind) in enumerate(zip(scores, types, strict=True))
        if kind in (_NORMAL, _UNUSED)
    )
    merges = [
        (token[:at], token[at:])
        for token in (tokens[number] for _, number in ranked)
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    spaced = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get(f"{_PREFIX}add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaced])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaced
    backend.decoder = decoders.Sequence(steps)
    return backend
