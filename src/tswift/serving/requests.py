"""What a client of the OpenAI interface asks for, as the job of ``tswift generate`` that it is.

Every field is served, or has the value that changes nothing, or is refused by its name. Nothing
here imports torch.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits
from typing import Any

from tswift.drafting.options import LOADED, DraftOptions, find_method
from tswift.errors import InputError, did_you_mean
from tswift.jobs.config import RunConfig, check_prompt
from tswift.options import Values, check_options, option, options_of
from tswift.sampling.parameters import SamplingParams

_PANEL = "Server"
_LONGEST_NAME = 512  # characters of ``user``


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Where ``tswift serve`` listens, and what it keeps."""

    host: str = option(
        "127.0.0.1",
        "Address to listen on; one that other machines can reach wants --api-key.",
        panel=_PANEL,
    )
    port: int = option(
        8000, "Port to listen on; 0 takes any that is free.", panel=_PANEL, least=0, most=65_535
    )
    api_key: str | None = option(
        None,
        "What clients have to send as Authorization: Bearer KEY.",
        panel=_PANEL,
        shown="TSWIFT_API_KEY, or none",
    )
    queue: int = option(
        8,
        "Requests that may wait; beyond it the answer is 429.",
        panel=_PANEL,
        least=0,
        most=10_000,
    )
    runs: Path = option(
        Path("runs"), "Folder in which every request has a run's folder.", panel=_PANEL
    )
    served_model_name: str | None = option(
        None,
        "The model's id, as clients know it.",
        panel=_PANEL,
        shown="its hub id, or the last name of its folder",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.api_key is not None and not (
            self.api_key.isascii() and self.api_key.isprintable() and self.api_key
        ):
            raise InputError("must be printable ASCII, at least one character", "api_key")
        name = self.served_model_name
        if name is not None and not (name and name.isprintable()):
            raise InputError("must be printable text, at least one character", "served_model_name")

    def model_id(self, model: str) -> str:
        """The id under which clients know a model;
        where it lies on this machine's disk is not theirs to know.
        """
        path = Path(model)
        return self.served_model_name or (path.resolve().name if path.exists() else model)


class Refused(Exception):
    """A request that is answered with an error in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        wait: int = 0,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {"Retry-After": str(wait)} if wait else {}


def _wrong(param: str, problem: str, code: str | None = None) -> Refused:
    return Refused(400, f"{param} {problem}", param, code)


@dataclass(frozen=True)
class Request:
    """A request that was understood."""

    wants: frozenset[str]  # what is on of ``chat``, ``include_usage`` and ``_SWITCHES``
    config: RunConfig  # the job; its length is the most there may be where ``limit`` is None
    limit: str | None  # the field that says how many tokens
    prompt: Any  # a text, token ids, or a chat's messages
    body: Values  # as it came, with the seed that was drawn for it if it had none
    typed: Values  # the server's options, and its model, when it came
    model: str


# fields that become options of the job, by what they are called there
_OPTIONS = {"max_tokens": "length", "max_completion_tokens": "length"} | {
    name: name
    for name in (
        "seed",
        "method",
        "stop_at_eos",
        "stop",
        "stop_on_loop",
        *(each.name for each, _ in options_of(SamplingParams)),
    )
}
_SWITCHES = ("stream", "figures", "cancel_on_disconnect")
_KNOWN = (*_OPTIONS, *_SWITCHES, "model", "stream_options", "user", "logprobs")
# fields that are not served, and the values, besides null, with which they ask for nothing
_NOT_SERVED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("echo", "store"), (False,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(
        ("parallel_tool_calls", "audio", "prediction", "reasoning_effort", "verbosity"), ()
    ),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
}


def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object in a request's body; no name may stand twice in an object,
    and texts must be Unicode.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name stands twice in an object")
        return found

    def no_number(name: str) -> None:
        raise ValueError(f"{name} is no number")

    try:
        body = json.loads(data.decode(), object_pairs_hook=once, parse_constant=no_number)
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeError:
        raise Refused(400, "the body is not UTF-8 text, or has incomplete characters") from None
    except (ValueError, RecursionError) as error:
        raise Refused(
            400, f"the body is not JSON: {str(error)[:200] or 'nested too deeply'}"
        ) from None
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return body


def parse(body: Values, chat: bool, typed: Values, model: str) -> Request:
    """What a request asks for. :class:`Refused`, by its name, for a field not known, not served or
    out of range.

    Args:
        body: the JSON object that came.
        chat: whether it came to ``/v1/chat/completions``.
        typed: options that were typed when the server was started, by the names that
            :meth:`RunConfig.of` takes: the defaults of requests.
        model: the name of the model that is served.
    """
    prompt_field, count_field = ("messages", "top_logprobs") if chat else ("prompt", "logprobs")
    given = _served(body, (*_KNOWN, prompt_field, count_field))
    if given.get("model", model) != model:
        message = f"the model {given['model']!r:.80} is not served here; {model} is"
        raise Refused(404, message, "model", "model_not_found")
    user = given.get("user", "")
    if not isinstance(user, str) or len(user) > _LONGEST_NAME:
        raise _wrong("user", f"must be a text of at most {_LONGEST_NAME} characters")
    limits = {
        name: given[name] for name in ("max_tokens", "max_completion_tokens") if name in given
    }
    if len(limits) == 2 and (
        len({*map(str, limits.values())}) == 2 or type(limits["max_tokens"]) is not int
    ):
        raise _wrong(
            "max_completion_tokens", "and max_tokens must be the same integer where both are given"
        )
    if prompt_field not in given:
        raise _wrong(prompt_field, "is missing")
    wants = {name for name in _SWITCHES if _switch(given, name)}
    wants |= {"chat"} if chat else set()
    wants |= _stream_options(given.get("stream_options", {}), "stream" in wants)
    prompt = _messages(given["messages"]) if chat else _prompt(given["prompt"])
    names = {option: name for name, option in _OPTIONS.items() if name in given}
    asked = {option: given[name] for option, name in names.items()}
    if "stop" in asked:  # "" and [] stop nowhere
        stop = asked["stop"]
        asked["stop"] = tuple(stop) if isinstance(stop, list) else (stop,) if stop != "" else ()
    if chat and not _switch(given, "logprobs"):
        if "top_logprobs" in given:
            raise _wrong("top_logprobs", "goes with logprobs")
    elif chat or "logprobs" in given:
        asked["logprobs"] = given.get(count_field, 0)
        names["logprobs"] = count_field
    asked["seed"] = asked.get("seed", typed.get("seed", randbits(31)))
    try:
        config = job(typed, {"stop_at_eos": True, **asked}, prompt, chat)
    except InputError as error:
        raise refused(error, names, prompt_field) from None
    kept = {**body, "seed": asked["seed"]}
    return Request(frozenset(wants), config, next(iter(limits), None), prompt, kept, typed, model)


def _served(body: Mapping[str, object], known: Sequence[str]) -> dict[str, object]:
    """The fields that ask for something, all of them known and served."""
    for name, value in body.items():
        nothing = _NOT_SERVED.get(name)
        if nothing is None and name not in known:
            raise Refused(
                400,
                f"there is no field {name!r:.60}{did_you_mean(name, known)}",
                name[:60],
                "unknown_field",
            )
        asks_nothing = value is None or any(
            value == none and type(value) is type(none) for none in nothing or ()
        )
        if nothing is not None and not asks_nothing:
            raise _wrong(name, "is not served by tswift", "unsupported_field")
    return {name: value for name, value in body.items() if value is not None}


def job(typed: Values, asked: Values, prompt: object, chat: bool) -> RunConfig:
    """The job's configuration: what is asked for, then what was typed,
    then the defaults of ``tswift generate``.

    Where a request asks for another method than the server's own, drafting options that were typed
    for that one are left out, and so is what the model was loaded with that the other method does
    not use.
    """
    values = {**typed, **asked}
    own = typed.get("method", "tokenswift" if typed.get("preset") is not None else RunConfig.method)
    method = values.get("method", own)
    if not isinstance(method, str) or find_method(method).reference:
        raise InputError(
            "must be a method that is served; ar-reference is for measurements", "method"
        )
    if method != own:
        others = {*DraftOptions.__dataclass_fields__, *LOADED} - find_method(method).loads
        values = {name: value for name, value in values.items() if name not in others}
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
    return RunConfig.of(**values, prompt_text=text, chat=chat)


def refused(error: InputError, names: Mapping[str, str], prompt_field: str) -> Refused:
    """A job's refusal in the words of the request: ``names`` are its fields,
    by the options that they became.
    """
    named = {
        **names,
        "prompt_text": prompt_field,
        "prompt": prompt_field,
        "chat": "messages",
        "system": "messages",
    }
    param = None if error.field is None else named.get(error.field, error.field)
    message = error.message.replace("`", "")
    return Refused(400, message if param is None else f"{param}: {message}", param, "invalid_value")


def _switch(given: Mapping[str, object], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise _wrong(name, "must be true or false")
    return value


def _stream_options(options: object, stream: bool) -> set[str]:
    """Of the options of a stream, those that are on."""
    if not isinstance(options, dict):
        raise _wrong("stream_options", "must be an object")
    if options and not stream:
        raise _wrong("stream_options", "goes with stream")
    for name in options:
        if name != "include_usage":
            raise _wrong(f"stream_options.{name[:60]}", "is no field; include_usage is")
    return {name for name in options if options[name] is not None and _switch(options, name)}


def _prompt(prompt: object) -> str | tuple[int, ...]:
    """A completion's prompt: one text, or one list of token ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str):
        try:
            return check_prompt(prompt, "prompt", "it")
        except InputError as error:
            raise refused(error, {}, "prompt") from None
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise _wrong(
        "prompt", "must be one text, or one list of token ids: one sequence is written at a time"
    )


def _messages(messages: object) -> tuple[dict[str, str], ...]:
    """A chat's messages, each with a role and a text."""
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "must be a list of messages, at least one")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _message(message: object, place: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _wrong(place, "must be an object")
    for name, value in message.items():
        if name not in ("role", "content") and value not in (None, [], ""):
            raise _wrong(f"{place}.{name[:60]}", "is not served", "unsupported_field")
    role = message.get("role")
    content = message.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise _wrong(f"{place}.role", "must be system, developer, user or assistant")
    if isinstance(content, list):
        content = "".join(
            _part(part, f"{place}.content[{index}]") for index, part in enumerate(content)
        )
    if not isinstance(content, str):
        raise _wrong(f"{place}.content", "must be a text")
    return {"role": "system" if role == "developer" else role, "content": content}


def _part(part: Any, place: str) -> str:
    """The text of a part of a message."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise _wrong(f"{place}.type", f"{kind!r:.40} is not served; text is", "unsupported_field")
    if not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
        raise _wrong(place, "must have a type and a text")
    return str(part["text"])


def listen(config: ServeConfig) -> socket.socket:
    """A socket that listens where it is asked for;
    refused where others can reach it and no key is asked for.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"{config.host!r:.80} is no address ({getattr(error, 'strerror', error)})", "host"
        ) from None
    if (
        config.api_key is None
        and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    ):
        raise InputError(
            f"{config.host} can be reached by other machines: `api_key` has to be given", "host"
        )
    dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(address, family=family, backlog=128, dualstack_ipv6=dual)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise InputError(
            f"{config.host} port {config.port} cannot be listened on ({reason})", "port"
        ) from None
