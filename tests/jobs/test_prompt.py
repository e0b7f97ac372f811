"""What a prompt is read from, which of its tokens are used, and what chat templates make of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.rows import every_row
from tswift.errors import InputError
from tswift.jobs import prompt as module
from tswift.jobs.prompt import read_prompt, render_chat, special_tokens_in, take
from tswift.models.shapes import StandInTokenizer


def test_take() -> None:
    tokens = list(range(5000))
    assert take(tokens, None, bundled=False) == tokens
    assert take(tokens, None, bundled=True) == tokens[:1024]
    assert take(tokens, 4096, bundled=True) == tokens[:4096]
    with pytest.raises(InputError, match="prefill: asks for 5,001 tokens, the prompt has 5,000"):
        take(tokens, 5001, bundled=False)


def test_a_prompt_as_large_as_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    path = tmp_path / "prompt.txt"
    path.write_text("0123456789")
    assert read_prompt(str(path)) == "0123456789"
    path.write_text("0123456789a")
    with pytest.raises(InputError, match=r"prompt: .*prompt.txt is too large, more than 10 bytes are not read"):
        read_prompt(str(path))


def test_standard_input_is_read_no_further_than_a_prompt_may_be_long() -> None:
    code = "from tswift.jobs.prompt import read_prompt; import tswift.jobs.prompt as p; p.MOST_BYTES = 1000\n"
    code += "try: read_prompt('-')\nexcept ValueError as error: print(error)"
    with open("/dev/zero", "rb") as endless:
        done = subprocess.run([sys.executable, "-c", code], stdin=endless, capture_output=True, text=True, timeout=60)
    assert done.stdout == "prompt: standard input is too large, more than 1,000 bytes are not read\n", done.stderr


def test_what_a_shell_pipes_in_by_name() -> None:
    reading, writing = os.pipe()  # as for <(command)
    os.write(writing, b"The ship")
    os.close(writing)
    assert read_prompt(f"/dev/fd/{reading}") == "The ship"
    os.close(reading)


@pytest.fixture
def tokenizer(checkpoint: Path) -> Any:
    """One that puts <s> before a text, and knows a tool's token that is not special."""
    loaded = AutoTokenizer.from_pretrained(checkpoint)
    loaded.add_special_tokens({"additional_special_tokens": ["<s>", "</s>"]})
    loaded.add_tokens([AddedToken("<tool>", special=False)])
    first = loaded.convert_tokens_to_ids("<s>")
    loaded.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    assert loaded("The ship")["input_ids"][0] == first
    return loaded


@every_row(
    ("text", "spelled"),
    [
        ("The ship", ()),
        ("The <ship> </S> s> < /s>", ()),
        ("a <tool> b", ()),
        ("a </s> b", ("</s>",)),
        ("<s>a", ("<s>",)),
        ("x<|endoftext|>y</s></s>z<|endoftext|>", ("<|endoftext|>", "</s>")),
    ],
)
def test_special_tokens_that_a_text_spells_out(tokenizer: Any, text: str, spelled: tuple[str, ...]) -> None:
    assert special_tokens_in(tokenizer, text) == spelled


def test_special_tokens_behind_what_is_used(tokenizer: Any) -> None:
    ids = tokenizer("The ship</s>")["input_ids"]
    assert special_tokens_in(tokenizer, "The ship</s>", len(ids)) == ("</s>",)
    assert special_tokens_in(tokenizer, "The ship</s>", len(ids) - 1) == ()


def test_special_tokens_that_are_taken_literally(tokenizer: Any) -> None:
    tokenizer.split_special_tokens = True
    assert special_tokens_in(tokenizer, "a </s> b") == ()


def test_a_stand_in_has_no_special_tokens() -> None:
    assert special_tokens_in(StandInTokenizer(), "a </s> b") == ()


# the special token of the tests' tokenizer, as templates begin with their model's first token
TEMPLATE = (
    "<|endoftext|>{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ messages[-1].content }}"
)


def render(tokenizer, model: str, text: str, system: str | None = None) -> str:
    said = {"system": system, "user": text}
    return render_chat(tokenizer, model, [{"role": role, "content": each} for role, each in said.items() if each])


def test_the_prompt_is_one_message_of_the_user(tokenizer) -> None:
    tokenizer.chat_template = TEMPLATE
    assert render(tokenizer, "m", "Hello!") == "<|endoftext|>[user]Hello!\n[assistant]"
    with_system = render(tokenizer, "m", "Hello!", "Be brief.\n")
    assert with_system == "<|endoftext|>[system]Be brief.\n\n[user]Hello!\n[assistant]"


def test_no_template(tokenizer) -> None:
    with pytest.raises(InputError, match="chat: the tokenizer of some/model has no chat template"):
        render(tokenizer, "some/model", "Hello!")
    with pytest.raises(InputError, match="chat"):
        render(object(), "shape:x", "Hello!")


@pytest.mark.parametrize(
    ("template", "system", "match"),
    [
        (NO_SYSTEM, "Be brief.", r"system: .* does not take it \(System role not supported\)"),
        ("{{ nothing.at.all }}", None, r"chat: .* does not take it \('nothing' is undefined\)"),
        ("{% if %}", None, r"chat: .* does not take it"),
        ("{{ messages[-1].content }}", "Be brief.", "system: .* drops system prompts"),
        ("{{ messages[0].role }}", None, "chat: .* does not hold the prompt"),
    ],
)
def test_what_templates_do_not_take(tokenizer, template: str, system: str | None, match: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=match) as error:
        render(tokenizer, "some/model", "Hello!", system)
    assert "\n" not in str(error.value)


def test_a_system_prompt_is_read_as_prompts_are(tmp_path: Path) -> None:
    path = tmp_path / "system.txt"
    path.write_text("Be brief.\n")
    assert read_prompt(str(path), "system") == "Be brief.\n"
    path.write_bytes(b"\xff")
    for source in (path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"^system: "):
            read_prompt(str(source), "system")
