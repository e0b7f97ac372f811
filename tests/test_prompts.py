"""The bundled prompts are as long as their README says, and long enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROMPTS = Path(__file__).parents[1] / "prompts"
ROWS = re.findall(
    r"^\| `(.+?)` \| .+? \| (\d+) \| (\d+) \| ([\d,]+) \|$",
    (PROMPTS / "README.md").read_text(),
    re.M,
)


def test_every_prompt_has_a_row_and_one_is_long_enough_for_a_prefill_of_8192_tokens():
    assert {row[0] for row in ROWS} == {path.name for path in PROMPTS.glob("*.txt")}
    assert len(ROWS) >= 5
    assert max(int(row[3].replace(",", "")) for row in ROWS) >= 8192


@pytest.mark.parametrize(("name", "words", "characters", "tokens"), ROWS)
def test_the_row_is_true(name, words, characters, tokens):
    from tokenizers import Tokenizer

    import tswift

    text = (PROMPTS / name).read_text()
    folder = Path(tswift.__file__).parent / "models" / "demo"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len(text.split()) == int(words)
    assert len(text) == int(characters)
    assert len(tokenizer.encode(text).ids) == int(tokens.replace(",", ""))
