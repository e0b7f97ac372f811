"""What a prompt is read from, which of its tokens are used, and what chat templates make of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tswift.errors import InputError
from tswift.jobs import config as module
from tswift.jobs.config import read_prompt, render_chat, take


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
    code = "from tswift.jobs.config import read_prompt; import tswift.jobs.config as p; p.MOST_BYTES = 1000\n"
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


@pytest.fixture
def tokenizer(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


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
