"""A prompt as a chat model wants it: one message of a user, after a system prompt, in the model's own template."""

from __future__ import annotations

from typing import Any

from tswift.errors import InputError, renamed
from tswift.jobs.prompt import read_prompt

CHAT, SYSTEM = "--chat", "--system"


def render(tokenizer: Any, model: str, text: str, system: str | None = None) -> str:
    """The template filled in, up to where the model is to answer.

    Args:
        tokenizer: the model's.
        model: its name, for errors.
        text: what the user says.
        system: the system prompt; None for the template's own, if it has one.

    Returns:
        Text with the special tokens that the template wants, the first of a text included: it is to be encoded without
        any being added, or there would be two of those.

    Raises:
        InputError: there is no template, or it does not take such messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"the tokenizer of {model} has no chat template", CHAT)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs, and have their own ways to refuse
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        option = CHAT if system is None else SYSTEM
        raise InputError(f"the chat template of {model} does not take it ({reason})", option) from None
    if system is not None and system.strip() not in rendered:
        raise InputError(f"the chat template of {model} drops system prompts", SYSTEM)
    if text.strip() not in rendered:
        raise InputError(f"the chat template of {model} does not hold the prompt as it is", CHAT)
    return str(rendered)


def read_system(source: str) -> str:
    """The system prompt in a file; ``-`` is standard input.

    Raises:
        InputError: nothing there, or no text in it.
    """
    try:
        return read_prompt(source)
    except InputError as error:
        raise renamed(error, {"--prompt": SYSTEM}) from None


def refuse_with_chat(chat: bool, prompt: str | None, prefill: int | None, system: str | None) -> None:
    """Refuse options that do not go together.

    Raises:
        InputError: a system prompt without a chat; a chat without a prompt, or with a part of one.
    """
    if system is not None and not chat:
        raise InputError("goes with --chat", SYSTEM)
    if chat and prompt is None:
        raise InputError("wants a --prompt: it is what the user says", CHAT)
    if chat and prompt == system == "-":
        raise InputError("cannot be standard input, which is the prompt", SYSTEM)
    if chat and prefill is not None:
        raise InputError("cannot be given together with --chat, whose template has an end", "--prefill")
