"""How llama.cpp, tswift and transformers cut text into words, by ``tokenizer.ggml.pre``.

Each gets a GGUF file of a vocabulary alone, in which every part of every text is a token, and any
two neighbours are merged: so ids say where a text was cut. llama.cpp runs in a process of its own,
by the interpreter of an environment that has ``llama-cpp-python``.

    python -m benchmarks.pretokenizers --python /tmp/llama/bin/python --random 300

prints the table of docs/models-and-heads.md. ``--write`` keeps llama.cpp's words of the fixed texts
for the tests.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import gguf
import transformers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from tswift.models.gguf import read_gguf
from tswift.models.gguf_tokenizer import SPLITS, tokenizer_of

KEPT = Path("tests/models/llama_words.json")
TEXTS = (
    "in 1234567 or 3.14, x2 42nd",
    "end.\n\nNew\r\n\n  line\n",
    "it's IT'S we'll I'VE 'tis",
    "a  b   c\t\td    ",
    "你好，世界 1234年",
    "日本語のテキスト 한국어",
    "Été ÀÉ élan naïve-È",
    "foo_bar(x)==[1,2]; // a/b\n",
    "x = 'don't' + \"$5\"!!\n\n\n",
    "\u0645\u0631\u062d\u0628\u0627 हिन्दी e\u0301",
    "HTTPServer iPhone McDonald's",
    "¿qué?…“no” €20 ½ ²",
)
# what random texts are made of
PIECES = (
    *[
        "ab",
        "AZ",
        "19",
        "'",
        "s",
        "S",
        "t",
        "re",
        "LL",
        ".,!?/-_$+=<>^~|`(",
        ")",
        "é",
        "É",
        "ß",
        "ж",
        "Ж",
        "ǅ",
        "ʰ",
        "你",
        "好",
        "の",
        "カ",
        "한",
        "，。",
        "½",
        "²",
        "٣",
        "123",
        "'s",
    ],
    *(" ", " ", "  ", "\u3000", "\u00a0", "\u0301", "\u200d", "\u0e01", "\u0627", "\x01"),
    *("\n", "\n", "\r", "\t"),
)
_LLAMA = """
import json, sys
import llama_cpp
from llama_cpp import Llama
answers = []
for name, texts in json.load(sys.stdin):
    model = Llama(name, vocab_only=True, verbose=False)
    answers.append(
        [model.tokenize(text.encode(), add_bos=False, special=False) for text in texts]
    )
print(llama_cpp.__version__)
print(json.dumps(answers))
"""


def write_vocabulary(path: Path, texts: Iterable[str], pre: str) -> list[str]:
    """A file whose tokens are all parts of texts, which merge in any way; returns the tokens."""
    letters = transformers.convert_slow_tokenizer.bytes_to_unicode()
    tokens = dict.fromkeys(letters.values())
    merges: dict[str, None] = {}
    for text in texts:
        spelled = "".join(letters[byte] for byte in text.encode())
        for size in range(2, len(spelled) + 1):
            for start in range(len(spelled) - size + 1):
                part = spelled[start : start + size]
                if part not in tokens:
                    tokens[part] = None
                    merges.update(
                        dict.fromkeys(f"{part[:at]} {part[at:]}" for at in range(1, size))
                    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_add_bos_token(False)
    writer.add_token_list([*tokens])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([*merges])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return [*tokens]


def words(ids: Sequence[int], tokens: Sequence[str]) -> list[str]:
    """The parts of a text that are tokens."""
    back = {letter: byte for byte, letter in _letters().items()}
    return [
        bytes(back[letter] for letter in tokens[number]).decode(errors="replace") for number in ids
    ]


def _letters() -> dict[int, str]:
    return dict(transformers.convert_slow_tokenizer.bytes_to_unicode())


def ours(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """tswift's ids."""
    tokenizer = tokenizer_of(read_gguf(path))
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def theirs(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """The ids of transformers' own reader."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="an interpreter with llama-cpp-python")
    parser.add_argument("--random", type=int, default=300, help="random texts of each type")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write {KEPT}")
    asked = parser.parse_args()
    logging.set_verbosity_error()
    draw = random.Random(asked.seed)
    drawn = ["".join(draw.choices(PIECES, k=draw.randint(1, 7))) for _ in range(asked.random)]
    with tempfile.TemporaryDirectory() as folder:
        texts = {}
        paths = {}
        tokens = {}
        for name, steps in SPLITS.items():
            first = next(each for each, own in SPLITS.items() if own == steps)
            texts[name] = [*TEXTS, *(drawn if name == first else ())]
            paths[name] = Path(folder, name, "vocabulary.gguf")
            paths[name].parent.mkdir()
            tokens[name] = write_vocabulary(paths[name], texts[name], name)
        question = json.dumps([[str(paths[name]), texts[name]] for name in SPLITS])
        answer = subprocess.run(
            [asked.python, "-c", _LLAMA],
            input=question,
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode:
            raise SystemExit(answer.stderr[-2000:])
        version, line = answer.stdout.splitlines()[-2:]
        print(f"llama-cpp-python {version}, transformers {transformers.__version__}")
        print("\n| type | texts | tswift | transformers |\n| --- | ---: | ---: | ---: |")
        llama = dict(zip(SPLITS, json.loads(line), strict=True))
        for name, path in paths.items():
            here = ours(path, texts[name])
            equal = [
                sum(a == b for a, b in zip(got, llama[name], strict=True))
                for got in (here, theirs(path, texts[name]))
            ]
            print(f"| {name} | {len(texts[name])} | {equal[0]} | {equal[1]} |", flush=True)
            wrong = [
                (text, words(a, tokens[name]), words(b, tokens[name]))
                for text, a, b in zip(texts[name], here, llama[name], strict=True)
                if a != b
            ]
            for case in wrong[:4]:
                print("   ", *map(repr, case), sep="\n      ")
    if asked.write:
        kept: dict[str, dict[str, list[str]]] = {}  # types by the words that they make
        for index, text in enumerate(TEXTS):
            for name in SPLITS:
                found = "|".join(words(llama[name][index], tokens[name]))
                kept.setdefault(text, {}).setdefault(found, []).append(name)
        KEPT.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
