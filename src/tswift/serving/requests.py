"""What a client of the OpenAI interface asks for, as the job of ``tswift generate`` that it is.

Every field is served, or has the value that changes nothing, or is refused by its name. Nothing
here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from secrets import randbits
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tswift.errors import InputError, Object, did_you_mean, parse_object
from tswift.jobs.config import FIELDS, RunConfig, check_prompt, options_from
from tswift.options import Values
from tswift.serving.config import job


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
class ApiRequest:
    """A request that was understood."""

    wants: frozenset[str]  # ``chat``, ``include_usage`` and those of ``_SWITCHES`` that are on
    config: RunConfig  # the job; its length is the most there may be where ``limit`` is None
    count: int  # texts, one after the other, with seeds that follow each other
    limit: str | None  # the field that says how many tokens
    prompt: Any  # a text, token ids, or a chat's messages
    body: Values  # as it came, with the seed that was drawn for it if it had none
    typed: Values  # the server's options, and its model, when it came
    model: str


_MOST_TEXTS = 16
_SWITCHES = ("stream", "figures", "cancel_on_disconnect", "echo")
_OPTIONS = {**FIELDS, "method": "method"}
_KNOWN = (*_OPTIONS, *_SWITCHES[:3], "model", "n", "stream_options", "user", "logprobs")
# fields that are not served, and the values, besides null, with which they ask for nothing
_NOT_SERVED: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    **dict.fromkeys(("echo", "store", "use_beam_search"), (False,)),
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


def parse_body(data: bytes) -> Object:
    """The JSON object in a request's body; see :func:`parse_object`."""
    try:
        return parse_object(data)
    except ValueError as error:
        raise Refused(400, f"the body {error}") from None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Part(_Strict):
    type: Literal["text"]
    text: str


def _filled(message: object) -> object:
    """A message without the fields that say nothing."""
    if not isinstance(message, dict):
        return message
    own = ("role", "content")
    return {
        name: each for name, each in message.items() if name in own or each not in (None, [], "")
    }


def _parts(content: object) -> object:
    """A content as parts, which a text is one of."""
    if not isinstance(content, str | list):
        raise ValueError("must be a text, or a list of parts with texts")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[_Part], BeforeValidator(_parts)]


class _StreamOptions(_Strict):
    include_usage: bool | None = None


class _Switches(_Strict):
    """Fields of a body that are no options of the job."""

    stream: bool = False
    figures: bool = False
    cancel_on_disconnect: bool = False
    echo: bool = False
    n: int = Field(1, ge=1, le=_MOST_TEXTS)
    stream_options: _StreamOptions | None = None
    user: str = Field("", max_length=512)
    messages: list[Annotated[_Message, BeforeValidator(_filled)]] = Field([], min_length=1)


def _checked(given: Values) -> _Switches:
    """Of a body's fields those that are no options, checked."""
    try:
        return _Switches(**{name: given[name] for name in _Switches.model_fields if name in given})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        names = [f"[{step}]" if isinstance(step, int) else f".{step:.60}" for step in first["loc"]]
        param = "".join(names).removeprefix(".")
        unserved = first["type"] in ("extra_forbidden", "literal_error")
        code = "unsupported_field" if unserved else None
        told = first["msg"].removeprefix("Value error, ")
        raise Refused(400, f"{param}: {told}", param, code) from None


def parse(body: Values, chat: bool, typed: Values, model: str) -> ApiRequest:
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
    own_fields = (prompt_field, count_field, *(() if chat else ("echo",)))
    given = _served(body, (*_KNOWN, *own_fields))
    if given.get("model", model) != model:
        message = f"the model {given['model']!r:.80} is not served here; {model} is"
        raise Refused(404, message, "model", "model_not_found")
    if prompt_field not in given:
        raise _wrong(prompt_field, "is missing")
    checked = _checked(given)
    wants = {name for name in _SWITCHES if getattr(checked, name)}
    wants |= {"chat"} if chat else set()
    if checked.stream_options is not None:
        if not checked.stream:
            raise _wrong("stream_options", "goes with stream")
        wants |= {"include_usage"} if checked.stream_options.include_usage else set()
    prompt = _said(checked.messages) if chat else _prompt(given["prompt"])
    names: dict[str, str] = {}
    try:
        asked, names = options_from(given, _OPTIONS)
        if chat and given.get("logprobs", False) not in (True, False):
            raise _wrong("logprobs", "must be true or false")
        if chat and not given.get("logprobs"):
            if "top_logprobs" in given:
                raise _wrong("top_logprobs", "goes with logprobs")
        elif "logprobs" in given:
            asked["logprobs"] = given.get(count_field, 0)
            names["logprobs"] = count_field
        if "logprobs" in asked and checked.echo:
            raise _wrong("echo", "goes without logprobs")
        asked["seed"] = asked.get("seed", typed.get("seed", randbits(31)))
        usual = {"stop_at_eos": not asked.get("ignore_eos"), "include_stop_str_in_output": False}
        config = job(typed, {**usual, **asked}, prompt, chat)
    except InputError as error:
        raise refused(error, names, prompt_field) from None
    limit = names.get("length")
    kept = {**body, "seed": asked["seed"]}
    return ApiRequest(frozenset(wants), config, checked.n, limit, prompt, kept, typed, model)


def each_alone(request: ApiRequest) -> list[Values]:
    """The bodies that ask for a request's texts one by one."""
    rest = {name: value for name, value in request.body.items() if name != "n"}
    return [{**rest, "seed": rest["seed"] + index} for index in range(request.count)]


def _said(messages: Sequence[_Message]) -> tuple[dict[str, str], ...]:
    """A chat's messages, each with a role and a text."""
    return tuple(
        {
            "role": "system" if each.role == "developer" else each.role,
            "content": "".join(part.text for part in each.content),
        }
        for each in messages
    )


def _served(body: Values, known: Sequence[str]) -> Object:
    """The fields that ask for something, all of them known and served."""
    for name, value in body.items():
        if name in known:
            continue
        if name not in _NOT_SERVED:
            raise Refused(
                400,
                f"there is no field {name!r:.60}{did_you_mean(name, known)}",
                name[:60],
                "unknown_field",
            )
        nothing = None, *_NOT_SERVED[name]
        if not any(value == none and type(value) is type(none) for none in nothing):
            raise _wrong(name, "is not served by tswift", "unsupported_field")
    return {name: value for name, value in body.items() if value is not None}


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
