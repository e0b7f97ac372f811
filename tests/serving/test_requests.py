"""What is asked for becomes a job, or is refused by the name of its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tswift.cli import main
from tswift.decoding.params import SamplingParams
from tswift.errors import InputError
from tswift.jobs.config import PRESETS
from tswift.options import options_of
from tswift.serving.requests import Refused, Request, ServeConfig, listen, parse, parse_body

USER = {"role": "user", "content": "Hello"}


def understood(body: dict[str, Any], chat: bool = False, **typed: Any) -> Request:
    text = {"messages": [USER]} if chat else {"prompt": "Hello"}
    return parse({**text, **body}, chat, typed, "demo")


def test_fields_become_options() -> None:
    sampling = {each.name: getattr(SamplingParams(), each.name) for each, _ in options_of(SamplingParams)}
    others = {"max_tokens": 7, "seed": -5, "method": "ar", "user": "somebody", "cancel_on_disconnect": True}
    request = understood({"model": "demo", **sampling, **others})
    assert dict(request.config.sampling) == sampling
    assert (request.config.length, request.config.seed, request.config.method) == (7, -5, "ar")
    assert request.config.stop_at_eos
    assert (request.limit, request.wants) == ("max_tokens", {"cancel_on_disconnect"})


def test_what_is_not_said_is_as_it_was_typed_and_null_is_not_said() -> None:
    request = understood({"temperature": None, "n": None, "tools": None}, temperature=0.5, length=9, nodes=4, seed=3)
    assert dict(request.config.sampling) == {"temperature": 0.5}
    assert dict(request.config.drafting) == {"nodes": 4}
    assert (request.config.length, request.config.seed, request.limit) == (9, 3, None)
    assert understood({"stop": ""}).config.stop == understood({"stop": []}).config.stop == ()
    assert understood({"stop": "."}).config.stop == (".",)
    assert understood({"max_completion_tokens": 4}, chat=True).config.length == 4
    # another method than the server's has options of its own
    assert dict(understood({"method": "ar"}, nodes=4, draft_model="x").config.drafting) == {}


def test_a_preset_has_a_method_of_its_own() -> None:
    typed = {"preset": next(iter(PRESETS)), "ngrams": 7}
    assert dict(understood({"method": "tokenswift"}, **typed).config.drafting)["ngrams"] == 7
    assert understood({"seed": 1}, **typed).config == understood({"method": "tokenswift", "seed": 1}, **typed).config
    assert understood({"method": "auto"}, **typed).config.method == "auto"


def test_without_a_seed_one_is_drawn_and_kept() -> None:
    seeds = {understood({}).config.seed for _ in range(4)}
    assert len(seeds) == 4
    request = understood({})
    assert parse(request.body, False, {}, "demo").config == request.config


@pytest.mark.parametrize(
    ("body", "chat", "param"),
    [
        ({"n": 2}, False, "n"),
        ({"n": True}, False, "n"),
        ({"best_of": 2}, False, "best_of"),
        ({"echo": True}, False, "echo"),
        ({"tools": [{}]}, True, "tools"),
        ({"response_format": {"type": "json_object"}}, True, "response_format"),
        ({"frequency_penalty": 0.5}, False, "frequency_penalty"),
        ({"temprature": 1}, False, "temprature"),
        ({"messages": []}, False, "messages"),
        ({"temperature": -1}, False, "temperature"),
        ({"temperature": "hot"}, False, "temperature"),
        ({"top_p": 0}, False, "top_p"),
        ({"max_tokens": 0}, False, "max_tokens"),
        ({"max_tokens": 1.5}, False, "max_tokens"),
        ({"max_completion_tokens": -1}, True, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, True, "max_completion_tokens"),
        ({"max_tokens": "x", "max_completion_tokens": 2}, True, "max_completion_tokens"),
        ({"seed": "x"}, False, "seed"),
        ({"method": "magic"}, False, "method"),
        ({"method": "ar-reference"}, False, "method"),
        ({"method": 3}, False, "method"),
        ({"stream": "yes"}, False, "stream"),
        ({"stream_options": {"include_usage": True}}, False, "stream_options"),
        ({"stream": True, "stream_options": {"other": True}}, False, "stream_options.other"),
        ({"stream": True, "stream_options": 3}, False, "stream_options"),
        ({"user": 3}, False, "user"),
        ({"stop": 3}, False, "stop"),
        ({"stop": ["a", 3]}, False, "stop"),
        ({"stop": ["x" * 2000]}, False, "stop"),
        ({"logit_bias": [1]}, False, "logit_bias"),
        ({"logprobs": True}, False, "logprobs"),
        ({"logprobs": 21}, False, "logprobs"),
        ({"top_logprobs": 2}, False, "top_logprobs"),
        ({"logprobs": 2}, True, "logprobs"),
        ({"top_logprobs": 2}, True, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, True, "top_logprobs"),
        ({"prompt": ""}, False, "prompt"),
        ({"prompt": ["one", "two"]}, False, "prompt"),
        ({"prompt": [1, -0.5]}, False, "prompt"),
        ({"prompt": None}, False, "prompt"),
        ({"messages": []}, True, "messages"),
        ({"messages": [3]}, True, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, True, "messages[0].role"),
        ({"messages": [USER, {"role": "user", "content": 3}]}, True, "messages[1].content"),
        ({"messages": [{**USER, "name": "Ann"}]}, True, "messages[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, True, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, True, "messages[0].content[0]"),
    ],
)
def test_refused_by_name(body: dict[str, Any], chat: bool, param: str) -> None:
    with pytest.raises(Refused) as error:
        understood(body, chat)
    assert (error.value.status, error.value.param) == (400, param)
    assert param.partition("[")[0].partition(".")[0] in error.value.message


def test_another_model_is_not_found() -> None:
    with pytest.raises(Refused, match="gpt-4o") as error:
        understood({"model": "gpt-4o"})
    assert (error.value.status, error.value.param, error.value.code) == (404, "model", "model_not_found")


def test_parts_of_a_message_are_joined_and_an_answer_may_come_back() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    answer = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": []}
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}, answer, USER]
    assert understood({"messages": messages}, chat=True).prompt == (
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Hi"},
        USER,
    )


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff", b'{"prompt": "\\ud800"}', b"[" * 100_000],
    ids=["empty", "list", "open", "nan", "twice", "bytes", "surrogate", "deep"],
)
def test_bodies_that_are_none(data: bytes) -> None:
    with pytest.raises(Refused) as error:
        parse_body(data)
    assert error.value.status == 400
    json.dumps(error.value.message, ensure_ascii=False).encode()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_only_a_key_opens_the_server_to_others(host: str) -> None:
    with pytest.raises(InputError, match=r"host: .* api_key"):
        listen(ServeConfig(host=host, port=0))
    listen(ServeConfig(host="127.0.0.1", port=0)).close()
    listen(ServeConfig(host="0.0.0.0", port=0, api_key="secret")).close()


def test_a_port_that_is_taken() -> None:
    with listen(ServeConfig(port=0)) as first, pytest.raises(InputError, match=r"port: .* cannot be listened on"):
        listen(ServeConfig(port=first.getsockname()[1]))


@pytest.mark.parametrize("values", [{"api_key": ""}, {"api_key": "ä"}, {"port": -1}, {"queue": -1}])
def test_bad_options(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(values))):
        ServeConfig(**values)


def test_what_it_takes_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tswift.cli.tools.find_spec", lambda name: None)
    assert main(["serve", "--port", "0"]) == 2
    error = "tswift: error: tswift serve needs starlette and uvicorn: pip install 'tswift[serve]'\n"
    assert capsys.readouterr().err == error
