"""What is asked for becomes a job, or is refused by the name of its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers import refused
from tests.rows import every_row
from tswift.cli import main
from tswift.jobs.config import PRESETS
from tswift.options import options_of
from tswift.sampling.parameters import SamplingParams
from tswift.serving.config import ServeConfig
from tswift.serving.requests import ApiRequest, Refused, parse, parse_body
from tswift.serving.routes import listen

USER = {"role": "user", "content": "Hello"}


def understood(body: dict[str, Any], chat: bool = False, **typed) -> ApiRequest:
    text = {"messages": [USER]} if chat else {"prompt": "Hello"}
    return parse({**text, **body}, chat, typed, "demo")


def test_fields_become_options():
    sampling = {
        each.name: getattr(SamplingParams(), each.name) for each, _ in options_of(SamplingParams)
    }
    others = {
        "max_tokens": 7,
        "seed": -5,
        "method": "ar",
        "user": "somebody",
        "cancel_on_disconnect": True,
    }
    request = understood({"model": "demo", **sampling, **others})
    assert request.config.recorded()["sampling"] == sampling
    assert (request.config.text.length, request.config.text.seed, request.config.method) == (
        7,
        -5,
        "ar",
    )
    assert request.config.stop_at_eos
    assert (request.limit, request.wants) == ("max_tokens", {"cancel_on_disconnect"})
    request = understood(
        {"stream": True, "stream_options": {"include_usage": True}, "figures": False}, chat=True
    )
    assert (request.limit, request.wants) == (None, {"stream", "include_usage", "chat"})


def test_what_is_not_said_is_as_it_was_typed_and_null_is_not_said():
    request = understood(
        {"temperature": None, "n": None, "tools": None}, temperature=0.5, length=9, nodes=4, seed=3
    )
    assert request.config.recorded()["sampling"] == {"temperature": 0.5}
    assert request.config.recorded()["drafting"] == {"nodes": 4}
    assert (request.config.text.length, request.config.text.seed, request.limit) == (9, 3, None)
    assert understood({"stop": ""}).config.stop == understood({"stop": []}).config.stop == ()
    assert understood({"stop": "."}).config.stop == (".",)
    assert understood({"max_completion_tokens": 4}, chat=True).config.text.length == 4
    # another method than the server's has options of its own
    assert (
        understood({"method": "ar"}, nodes=4, draft_model="x").config.recorded()["drafting"] == {}
    )


def test_a_preset_has_a_method_of_its_own():
    typed = {"preset": next(iter(PRESETS)), "ngrams": 7}
    assert understood({"method": "tokenswift"}, **typed).config.drafting.ngrams == 7
    assert (
        understood({"seed": 1}, **typed).config
        == understood({"method": "tokenswift", "seed": 1}, **typed).config
    )
    assert understood({"method": "auto"}, **typed).config.method == "auto"


def test_without_a_seed_one_is_drawn_and_kept():
    requests = [understood({}) for _ in range(4)]
    assert len({request.config.text.seed for request in requests}) == 4
    assert parse(requests[0].body, False, {}, "demo").config == requests[0].config


# by field, of a completion and of a chat: bodies that are refused by its name
COMPLETIONS: dict[str, list[dict[str, Any]]] = {
    "n": [{"n": 17}, {"n": 0}, {"n": True}],
    "best_of": [{"best_of": 2}],
    "echo": [{"echo": 1}, {"echo": True, "logprobs": 0}],
    "repetition_penalty": [{"repetition_penalty": 0}, {"repetition_penalty": "much"}],
    "min_tokens": [{"min_tokens": -1}],
    "stop_token_ids": [{"stop_token_ids": 5}, {"stop_token_ids": [-1]}, {"stop_token_ids": ["a"]}],
    "ignore_eos": [{"ignore_eos": 1}, {"ignore_eos": True, "stop_at_eos": True}],
    "skip_special_tokens": [{"skip_special_tokens": "no"}],
    "include_stop_str_in_output": [{"include_stop_str_in_output": 1}],
    "frequency_penalty": [{"frequency_penalty": 2.5}, {"frequency_penalty": "some"}],
    "temprature": [{"temprature": 1}],
    "messages": [{"messages": []}],
    "temperature": [{"temperature": -1}, {"temperature": "hot"}],
    "top_p": [{"top_p": 0}],
    "max_tokens": [{"max_tokens": 0}, {"max_tokens": 1.5}],
    "seed": [{"seed": "x"}],
    "method": [{"method": "magic"}, {"method": "ar-reference"}, {"method": 3}],
    "stream": [{"stream": "yes"}],
    "stream_options": [
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": 3},
    ],
    "stream_options.other": [{"stream": True, "stream_options": {"other": True}}],
    "stream_options.include_usage": [{"stream": True, "stream_options": {"include_usage": 3}}],
    "user": [{"user": 3}, {"user": "x" * 1000}],
    "stop": [{"stop": 3}, {"stop": ["a", 3]}, {"stop": ["x" * 2000]}],
    "logit_bias": [{"logit_bias": [1]}],
    "logprobs": [{"logprobs": True}, {"logprobs": 21}],
    "top_logprobs": [{"top_logprobs": 2}],
    "prompt": [{"prompt": each} for each in ("", ["one", "two"], [1, -0.5], None)],
}
IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
CHATS: dict[str, list[dict[str, Any]]] = {
    "tools": [{"tools": [{}]}],
    "echo": [{"echo": True}],
    "response_format": [{"response_format": {"type": "json_object"}}],
    "max_completion_tokens": [
        {"max_completion_tokens": -1},
        *({"max_tokens": most, "max_completion_tokens": 2} for most in (1, "x", True)),
    ],
    "logprobs": [{"logprobs": 2}],
    "top_logprobs": [{"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}],
    "messages": [{"messages": []}],
    "messages[0]": [{"messages": [3]}],
    "messages[0].role": [{"messages": [{"role": "tool", "content": "x"}]}],
    "messages[1].content": [{"messages": [USER, {"role": "user", "content": 3}]}],
    "messages[0].name": [{"messages": [{**USER, "name": "Ann"}]}],
    "messages[0].content[0].type": [{"messages": [IMAGE]}],
    "messages[0].content[0].text": [
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]}
    ],
}


@every_row(
    ("param", "body", "chat"),
    [
        (param, body, chat)
        for chat, table in ((False, COMPLETIONS), (True, CHATS))
        for param, bodies in table.items()
        for body in bodies
    ],
)
def test_refused_by_name(param, body, chat):
    with pytest.raises(Refused) as error:
        understood(body, chat)
    assert (error.value.status, error.value.param) == (400, param)
    assert param.partition("[")[0].partition(".")[0] in error.value.message


@pytest.mark.parametrize(
    ("body", "chat", "told"),
    [
        ({"stop": 3}, False, "stop: must be a list, got 3"),
        ({"messages": [{**USER, "content": None}]}, True, "content: must be a text, or a list"),
    ],
)
def test_in_the_words_of_json(body, chat, told):
    with pytest.raises(Refused, match=told):
        understood(body, chat)


def test_another_model_is_not_found():
    with pytest.raises(Refused, match="gpt-4o") as error:
        understood({"model": "gpt-4o"})
    assert (error.value.status, error.value.param, error.value.code) == (
        404,
        "model",
        "model_not_found",
    )


def test_parts_of_a_message_are_joined_and_an_answer_may_come_back():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    answer = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": []}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        answer,
    ]
    system, answered = (
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "Hi"},
    )
    assert understood({"messages": messages}, chat=True).prompt == (system, USER, answered)


DEEP = b"[" * 100_000


@every_row(
    "data",
    [b"", b"[]", b"{", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff", b'{"prompt": "\\ud800"}', DEEP],
)
def test_bodies_that_are_none(data):
    with pytest.raises(Refused) as error:
        parse_body(data)
    assert error.value.status == 400
    json.dumps(error.value.message, ensure_ascii=False).encode()


def test_only_a_key_opens_the_server_to_others_and_one_port_is_for_one():
    for host in ("0.0.0.0", "::"):
        with refused(r"host: .* api_key"):
            listen(ServeConfig(host=host, port=0))
    listen(ServeConfig(host="0.0.0.0", port=0, api_key="secret")).close()
    with listen(ServeConfig(port=0)) as first, refused(r"port: .* cannot be listened on \(Add"):
        listen(ServeConfig(port=first.getsockname()[1]))


@every_row("values", [{"api_key": ""}, {"api_key": "ä"}, {"port": -1}, {"queue": -1}])
def test_bad_options(values):
    with refused(next(iter(values))):
        ServeConfig(**values)


def test_what_it_takes_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("tswift.cli.serve.find_spec", lambda name: None)
    assert main(["serve", "--port", "0"]) == 2
    error = "tswift serve needs starlette, uvicorn, pydantic: pip install 'tswift[serve]'"
    assert capsys.readouterr().err == f"tswift: error: {error}\n"


def test_clients_do_not_learn_where_the_model_lies(tmp_path):
    (tmp_path / "mine").mkdir()
    for given, model, known in (
        (None, str(tmp_path / "mine"), "mine"),
        (None, "Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("writer", str(tmp_path / "mine"), "writer"),
    ):
        assert ServeConfig(served_model_name=given).model_id(model) == known
    for wrong in ("", "a\nb"):
        with refused() as error:
            ServeConfig(served_model_name=wrong)
        assert error.value.field == "served_model_name"
