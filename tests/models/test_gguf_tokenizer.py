"""The tokenizer of a GGUF file gives llama.cpp's token ids.

``llama_words.json`` holds where llama.cpp cut texts, by the name in ``tokenizer.ggml.pre``; it is
written by ``benchmarks/pretokenizers.py``, which compares random texts, too.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
from gguf import TokenType as Type
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers import refused
from tswift.errors import Notice, notice
from tswift.loading.model import LoadedModel
from tswift.models.gguf import read_gguf
from tswift.models.gguf_tokenizer import SPLITS, tokenizer_of

WORDS = json.loads(Path(__file__).with_name("llama_words.json").read_text())
BYTES = [  # GPT-2's letters for them
    *map(chr, (*range(33, 127), *range(161, 173), *range(174, 256))),
    *map(chr, range(256, 324)),
]
SPACE = "\u0120"
USER = "<\uff5cUser\uff5c>"  # letters that no byte has


def vocabulary(
    path: Path,
    tokens: dict[str, Type],
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    pre: str | None = "gpt-2",
    kind: str = "gpt2",
    **more,
) -> Path:
    """A file of a tokenizer alone; ``more`` are calls of the writer, by name."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens])
    writer.add_token_types([*tokens.values()])
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(path: Path, pre: str | None, **more) -> Path:
    """All bytes, a few words, a control token with letters that no byte has, and one with spaces
    that a user defined.
    """
    words = dict.fromkeys([*BYTES, f"{SPACE}a", "12", "123"], Type.NORMAL)
    own = {USER: Type.CONTROL, "    ": Type.USER_DEFINED, "<unused>": Type.UNUSED}
    merges = [f"{SPACE} a", "1 2", "12 3"]
    return vocabulary(path, {**words, **own}, **{"merges": merges, "pre": pre, **more})


def ids(tokenizer: PreTrainedTokenizerBase, text: str, bare: bool = True) -> list[str]:
    """The tokens of a text."""
    found = tokenizer(text, add_special_tokens=not bare)["input_ids"]
    return [tokenizer.convert_ids_to_tokens(number) for number in found]


def whole(tokenizer: PreTrainedTokenizerBase, written: list[int]) -> str:
    """The text of tokens, special ones included."""
    return str(tokenizer.backend_tokenizer.decode(written, skip_special_tokens=False))


@pytest.mark.parametrize("pre", SPLITS)
def test_words_are_cut_where_llama_cpp_cuts_them(pre, tmp_path):
    path = byte_level(tmp_path / "x.gguf", pre, add_bos_token=False)
    cutter = tokenizer_of(read_gguf(path)).backend_tokenizer.pre_tokenizer
    for text, by_words in WORDS.items():
        (wanted,) = [found for found, names in by_words.items() if pre in names]
        assert "|".join(text[a:b] for _, (a, b) in cutter.pre_tokenize_str(text)) == wanted


def test_what_stays_whole(tmp_path):
    """Control tokens do, whatever letters they have, and those that a user defined, spaces too;
    unused ones are text. The tokens are llama.cpp's.
    """
    tokenizer = tokenizer_of(read_gguf(byte_level(tmp_path / "x.gguf", "gpt-2")))
    assert ids(tokenizer, f"{USER}123 a     a<unused>") == [
        *(USER, "123", f"{SPACE}a", "    ", f"{SPACE}a", *"<unused>")
    ]
    written = tokenizer(f"{USER}é     a")["input_ids"]
    assert whole(tokenizer, written) == f"{USER}é     a"


def test_a_word_that_is_a_token_needs_no_merge(tmp_path):
    """Of Llama 3's kind; others put it together of its parts."""
    for pre, wanted in (("llama-bpe", ["123"]), ("dbrx", ["12", "3"])):
        path = byte_level(tmp_path / f"{pre}.gguf", pre, merges=["1 2"], add_bos_token=False)
        assert ids(tokenizer_of(read_gguf(path)), "123") == wanted


@pytest.mark.parametrize(
    ("pre", "said", "wanted"),
    [
        ("llama-bpe", {}, [USER, "a"]),
        ("llama-bpe", {"add_bos_token": False}, ["a"]),
        ("qwen2", {}, ["a"]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [USER, "a", "<unused>"]),
    ],
)
def test_what_stands_around_a_text(pre, said, wanted, tmp_path):
    path = byte_level(tmp_path / "x.gguf", pre, bos_token_id=259, eos_token_id=261, **said)
    tokenizer = tokenizer_of(read_gguf(path))
    assert ids(tokenizer, "a", bare=False) == wanted
    tokenizer.save_pretrained(tmp_path / "saved")  # as recipes.draft does
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert ids(again, "a", bare=False) == wanted


@pytest.mark.parametrize(
    ("kind", "bare", "told"),
    [
        (Type.NORMAL, True, "m has <|user|> as words, and no tokens of a text"),
        (Type.CONTROL, True, None),
        (Type.NORMAL, False, None),
        # the text has it, and so has the tokenizer
        (Type.CONTROL, False, "the prompt begins with <|user|>, and m adds another before it"),
    ],
)
def test_what_a_prompt_may_not_mean_is_told_once(kind, bare, told, tmp_path):
    own = dict.fromkeys([*BYTES, "ab"], Type.NORMAL) | {"<|user|>": kind, "<eos>": Type.CONTROL}
    begun = {"bos_token_id": len(own) - 2, "add_bos_token": True} if told and not bare else {}
    path = vocabulary(tmp_path / "x.gguf", own, merges=["a b"], eos_token_id=len(own) - 1, **begun)
    tokenizer = tokenizer_of(read_gguf(path))
    model = LoadedModel("m", tokenizer, SimpleNamespace(vocab_size=len(own)), None, ())
    notice.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model.encode("<|user|>a <|unknown|> <|x", bare)
    assert [str(each.message) for each in said if each.category is Notice] == [told] * bool(told)


SCORED = {"▁": 1, "a": 2, "b": 3, "ab": 9, "ba": 7, "▁a": 8, "aab": 4, "▁b": 6, "\u4f60": 5}


@pytest.mark.parametrize(
    ("prefix", "text", "wanted"),
    [
        (True, "aab b", "▁a ab ▁b"),
        (True, "  baé", "▁ ▁ ▁ ba <0xC3> <0xA9>"),
        (True, "a<s>a\n你", "▁a <s> ▁a <0x0A> 你"),
        (False, "aab b", "aab ▁b"),
        (False, "ba</s> a", "ba </s> ▁a"),
    ],
)
def test_sentencepiece(prefix, text, wanted, tmp_path):
    """The token of the highest score is put together first; the tokens are llama.cpp's."""
    tokens = {"<unk>": Type.UNKNOWN, "<s>": Type.CONTROL, "</s>": Type.CONTROL}
    tokens |= {f"<0x{byte:02X}>": Type.BYTE for byte in range(256)}
    scores = [0.0] * len(tokens) + [float(score) for score in SCORED.values()]
    tokens |= dict.fromkeys(SCORED, Type.NORMAL)
    path = vocabulary(
        tmp_path / "x.gguf", tokens, scores=scores, kind="llama", add_space_prefix=prefix
    )
    tokenizer = tokenizer_of(read_gguf(path))
    assert ids(tokenizer, text) == wanted.split()
    assert ids(tokenizer, text, bare=False) == ["<s>", *wanted.split()]
    assert (
        whole(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"]).replace(
            "<s> ", "<s>"
        )
        == text
    )


@pytest.mark.parametrize(
    ("pre", "changes", "says"),
    [
        ("never-heard-of", {}, "has the tokenizer.ggml.pre 'never-heard-of', by which tswift"),
        ("gemma4", {}, "has the tokenizer.ggml.pre 'gemma4', by which tswift knows no way"),
        (None, {}, "lacks tokenizer.ggml.pre, by which .*; gguf-new-metadata --pre-tokenizer NAME"),
        ("gpt-2", {"merges": None}, "lacks tokenizer.ggml.merges, without which its tokenizer"),
        ("gpt-2", {"kind": "t5"}, "has a tokenizer of type 't5', which tswift does not read"),
        ("llama-bpe", {}, "wants a token around each text, and does not say which"),
    ],
)
def test_what_cannot_be_had_is_refused(pre, changes, says, tmp_path):
    path = byte_level(tmp_path / "x.gguf", pre, **changes)
    with refused(says) as caught:
        tokenizer_of(read_gguf(path))
    assert caught.value.field == "model"
    assert "\n" not in str(caught.value)


def test_a_token_twice_is_refused(tmp_path):
    path = byte_level(tmp_path / "x.gguf", "gpt-2")
    length = (2).to_bytes(8, "little")
    path.write_bytes(path.read_bytes().replace(length + b"12", length + "é".encode(), 1))
    with refused("has a token twice in its vocabulary"):
        tokenizer_of(read_gguf(path))
