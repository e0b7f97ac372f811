"""What a prompt is read from, which of its tokens are used, and what chat templates make of it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.helpers import refused
from tswift.jobs import config as module
from tswift.jobs.config import TextConfig, read_prompt, render_chat


def test_take():
    tokens = list(range(5000))
    assert TextConfig(prompt="p").first(tokens) == tokens
    assert TextConfig().first(tokens) == tokens[:1024]
    assert TextConfig(prefill=4096).first(tokens) == tokens[:4096]
    with refused("prefill: asks for 5,001 tokens, the prompt has 5,000"):
        TextConfig(prompt="p", prefill=5001).first(tokens)


def test_a_prompt_as_large_as_it_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    path = tmp_path / "prompt.txt"
    path.write_text("0123456789")
    assert read_prompt(str(path)) == "0123456789"
    path.write_text("0123456789a")
    with refused(r"system: .*prompt.txt is too large, more than 10 bytes are not read"):
        read_prompt(str(path), "system")


def test_standard_input_is_read_no_further_than_a_prompt_may_be_long():
    code = (
        "from tswift.jobs.config import read_prompt; import tswift.jobs.config as p; p.MAX_BYTES "
        "= 1000\n"
    )
    code += "try: read_prompt('-')\nexcept ValueError as error: print(error)"
    with open("/dev/zero", "rb") as endless:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=endless, capture_output=True, text=True, timeout=60
        )
    assert (
        done.stdout == "prompt: standard input is too large, more than 1,000 bytes are not read\n"
    ), done.stderr


def test_what_a_shell_pipes_in_by_name():
    reading, writing = os.pipe()  # as for <(command)
    os.write(writing, b"\xef\xbb\xbfThe ship")  # a byte order mark is no text
    os.close(writing)
    assert read_prompt(f"/dev/fd/{reading}") == "The ship"
    os.close(reading)


# the special token of the tests' tokenizer, as templates begin with their model's first token
TEMPLATE = (
    "<|endoftext|>{% for message in messages %}[{{ message.role }}]{{ message.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ messages[-1].content }}"
)


@pytest.mark.parametrize(
    ("template", "system", "found"),
    [
        (TEMPLATE, None, "<|endoftext|>[user]Hello!\n[assistant]"),
        (TEMPLATE, "Be brief.\n", "<|endoftext|>[system]Be brief.\n\n[user]Hello!\n[assistant]"),
        (None, None, "chat: the tokenizer of some/model has no chat template"),
        (
            NO_SYSTEM,
            "Be brief.",
            "system: the chat template of some/model does not take it (System role not supported",
        ),
        (
            "{{ nothing.at.all }}",
            None,
            "chat: the chat template of some/model does not take it ('nothing' is undefin",
        ),
        ("{% if %}", None, "chat: the chat template of some/model does not take it"),
        (
            "{{ messages[-1].content }}",
            "Be brief.",
            "system: the chat template of some/model drops system prompts",
        ),
        (
            "{{ messages[0].role }}",
            None,
            "chat: the chat template of some/model does not hold the prompt",
        ),
    ],
)
def test_a_chat_by_its_template(checkpoint, template, system, found):
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = template
    said = {"system": system, "user": "Hello!"}
    messages = [{"role": role, "content": text} for role, text in said.items() if text]
    if template == TEMPLATE:
        assert render_chat(tokenizer, "some/model", messages) == found
    else:
        with refused() as error:
            render_chat(tokenizer, "some/model", messages)
        assert str(error.value).startswith(found)
        assert "\n" not in str(error.value)
