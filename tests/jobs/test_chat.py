"""Chat templates: what they make of a prompt, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tswift.errors import InputError
from tswift.jobs.prompt import read_prompt, render_chat

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
def tokenizer(checkpoint: Path):
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
