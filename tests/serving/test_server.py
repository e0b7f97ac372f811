"""A server process, asked by the ``openai`` client and by hand: answers, errors, runs."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from tests.jobs.killing import Process
from tests.rows import every_row
from tests.serving.server import SAMPLING, TEXT, Server, with_template
from tswift.jobs.folder import list_runs
from tswift.sampling.rule import row_type

Complete = Callable[..., Any]
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory) -> Path:
    return with_template(checkpoint, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory) -> Iterator[Server]:
    found = Server(
        tmp_path_factory.mktemp("server"),
        f"--model {model}",
        SAMPLING,
        "--exact --queue 1 --parallel 2 --demo-page",
    )
    yield found
    assert found.stop() == 128 + signal.SIGTERM
    assert "Traceback" not in found.errors()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def complete(client: openai.OpenAI, model: Path) -> Complete:
    """``client.completions.create``; what is no field of OpenAI's goes into ``own``."""

    def create(own: dict[str, Any] | None = None, **fields):
        return client.completions.create(
            **{"model": model.name, "prompt": TEXT, "extra_body": own, **fields}
        )

    return create


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def generated(folder: Path, model: Path, *words) -> str:
    """The text of ``tswift generate``."""
    words = (f"--model {model}", SAMPLING, "--prompt-text", TEXT, *words, f"--out {folder}/run")
    process = Process(["generate", *words], folder / "out")
    assert process.wait() == 0, process.errors.read_text()
    return (folder / "run" / "text.txt").read_bytes().decode()


def asked(server: Server, method: str, path: str, body=None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    kind = {} if data is None else {"Content-Type": "application/json"}
    connection.request(
        method,
        path,
        data,
        {**kind, **{name.replace("_", "-"): text for name, text in headers.items()}},
    )
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content) if content.startswith(b"{") else content


def events_of(content: bytes) -> list[Any]:
    """The objects in an answer's events, which come to their end."""
    *lines, last = [
        line.removeprefix("data: ")
        for line in content.decode().splitlines()
        if line.startswith("data: ")
    ]
    assert last == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_completion_is_the_text_of_generate(server, complete, model, tmp_path):
    whole = generated(tmp_path, model, "--len 120 --seed 7 --stop-at-eos")
    answer = complete(max_tokens=120, seed=7)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole, "length")
    usage = answer.usage
    assert (usage.completion_tokens, usage.total_tokens) == (120, 120 + usage.prompt_tokens)
    passes = server.get(f"/v1/runs/{answer.id}")["figures"]["passes"]
    assert usage.completion_tokens_details.accepted_prediction_tokens == 120 - passes
    assert usage.completion_tokens_details.rejected_prediction_tokens is not None
    for method in ("ar", "medusa"):
        own, streaming = (
            {"method": method, "figures": True},
            {"stream": True, "stream_options": {"include_usage": True}},
        )
        *chunks, last = list(complete(own, max_tokens=120, seed=7, **streaming))
        assert (
            text_of(chunks) == (server.runs / last.id / "text.txt").read_bytes().decode() == whole
        )
        assert (chunks[-1].choices[0].finish_reason, last.usage.completion_tokens) == (
            "length",
            120,
        )
        assert {chunk.id for chunk in chunks} == {last.id}
        figures = chunks[-1].figures
        assert figures["tokens"] == figures["accepted"] + figures["passes"] == 120
        assert figures["drafted"] >= figures["accepted"]
    tokens = AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"]
    for prompt in (tokens, [TEXT], [tokens]):
        assert complete(prompt=prompt, max_tokens=120, seed=7).choices[0].text == whole


def test_penalties_are_those_of_generate(complete, model, tmp_path):
    words = "--presence-penalty 0.8 --frequency-penalty 0.5 --stop-on-loop 3"
    whole = generated(tmp_path, model, words, "--len 60 --seed 7 --stop-at-eos")
    asked_for: dict[str, Any] = {
        "max_tokens": 60,
        "seed": 7,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.5,
    }
    assert complete({"stop_on_loop": 3}, **asked_for).choices[0].text == whole
    assert complete(max_tokens=60, seed=7).choices[0].text != whole


def test_names_that_clients_send(server, complete, model, tmp_path):
    """By OpenAI's own client, whose extra_body has those of vLLM."""
    asked: dict[str, Any] = {"max_tokens": 60, "seed": 7, "logit_bias": {"0": 4}}
    plain = complete(**asked).choices[0]
    assert plain.finish_reason == "stop"
    whole = complete({"ignore_eos": True}, **asked).choices[0]
    assert (whole.finish_reason, whole.text.startswith(plain.text)) == ("length", True)
    own = {"ignore_eos": True, "skip_special_tokens": False}
    special = complete(own, **asked).choices[0].text
    assert special.replace("<|endoftext|>", "") == whole.text != special
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert complete(shown, **asked).choices[0].text == plain.text + "<|endoftext|>"
    late = complete({"min_tokens": 25}, **asked)
    assert late.usage.completion_tokens > 25 > complete(**asked).usage.completion_tokens
    middle = whole.text[12:15]
    shown = {"ignore_eos": True, "include_stop_str_in_output": True}
    answer = complete(shown, **asked, stop=[middle]).choices[0]
    before = whole.text[: whole.text.index(middle)]
    assert (answer.text, answer.finish_reason) == (before + middle, "stop")
    words = "--repetition-penalty 1.4 --min-tokens 9 --len 60 --seed 7"
    repeated = generated(tmp_path, model, words, "--stop-at-eos --logit-bias 0=4")
    own = {"repetition_penalty": 1.4, "min_tokens": 9}
    assert complete(own, **asked).choices[0].text == repeated
    ids = [*range(1, 300, 2)]
    stopped = complete({"ignore_eos": True, "stop_token_ids": ids}, **asked)
    assert stopped.choices[0].finish_reason == "stop"
    assert whole.text.startswith(stopped.choices[0].text)
    assert complete(**asked, echo=True).choices[0].text == TEXT + plain.text
    chunks = list(complete(**asked, echo=True, stream=True))
    assert text_of(chunks) == TEXT + plain.text


def test_several_texts_of_a_request(server, complete):
    """One after the other, with seeds that follow each other: each is a run of its own."""
    alone = [complete(max_tokens=30, seed=seed) for seed in (5, 6, 7)]
    answer = complete(max_tokens=30, seed=5, n=3)
    assert [each.text for each in answer.choices] == [each.choices[0].text for each in alone]
    assert [each.index for each in answer.choices] == [0, 1, 2]
    own = alone[0].usage
    assert answer.usage.prompt_tokens == own.prompt_tokens
    assert answer.usage.completion_tokens == sum(each.usage.completion_tokens for each in alone)
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = list(complete(max_tokens=30, seed=5, n=3, **streaming))
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [each.text for each in answer.choices]
    assert last.usage.completion_tokens == answer.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {last.id}
    assert server.get(f"/v1/runs/{last.id}")["seed"] == 5


def test_what_vllms_benchmark_sends(server, model):
    """Both kinds of requests, with all fields that `vllm bench serve` gives them."""
    usual = {
        "model": model.name,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    completion = {"prompt": TEXT, "max_tokens": 40, "logprobs": None}
    said = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
    chat = {"messages": said, "max_completion_tokens": 40}
    for path, own in (("completions", completion), ("chat/completions", chat)):
        code, content = asked(server, "POST", f"/v1/{path}", {**usual, **own})
        assert code == 200, content
        events = events_of(content)
        assert events[-1]["usage"]["completion_tokens"] == 40
        assert events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_a_chat_is_the_text_of_generate_chat(client, model, tmp_path):
    (tmp_path / "system.txt").write_text("Be brief.")
    words = f"--chat --system {tmp_path}/system.txt --len 60 --seed 2 --stop-at-eos"
    whole = generated(tmp_path, model, words)
    asked_for: dict[str, Any] = {
        "model": model.name,
        "messages": MESSAGES,
        "max_completion_tokens": 60,
        "seed": 2,
    }
    message = client.chat.completions.create(**asked_for).choices[0].message
    assert (message.role, message.content) == ("assistant", whole)
    chunks = list(client.chat.completions.create(**asked_for, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "length"


def test_an_end_of_text_token_ends_the_text_and_is_no_part_of_it(server, complete):
    asked_for: dict[str, Any] = {"max_tokens": 300, "seed": 1, "logit_bias": {"0": 4}}
    answer = complete(**asked_for)
    text = answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"
    assert 5 < answer.usage.completion_tokens < 300
    assert (server.runs / answer.id / "text.txt").read_bytes().decode() == text
    run = server.get(f"/v1/runs/{answer.id}")
    assert (run["text"], run["finish_reason"]) == (text, "stop")
    _, events = asked(server, "GET", f"/v1/runs/{answer.id}/events")
    assert f"id: {answer.usage.completion_tokens}:{len(text.encode())}\n".encode() in events
    _, again = asked(server, "POST", f"/v1/runs/{answer.id}/resume")
    assert again["choices"][0]["text"] == text
    (choice,) = complete({"stop_at_eos": False}, **asked_for).choices
    assert (choice.finish_reason, choice.text.startswith(text)) == ("length", True)


@pytest.mark.slow
def test_stop_strings_and_biases_are_those_of_generate(server, complete, model, tmp_path):
    asked_for: dict[str, Any] = {"max_tokens": 120, "seed": 9, "logit_bias": {"40": 5, "41": -100}}
    whole = complete(**asked_for).choices[0].text
    middle = whole[len(whole) // 2 :][:3]  # wherever tokens begin and end
    before = whole[: whole.index(middle)]
    words = "--len 120 --seed 9 --stop-at-eos --logit-bias 40=5,41=-100"
    assert generated(tmp_path, model, words, "--stop", middle) == before
    for method in ("auto", "medusa"):
        own = {"method": method}
        answer = complete(own, **asked_for, stop=["nowhere", middle])
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (before, "stop")
        chunks = list(complete(own, **asked_for, stop=middle, stream=True))
        assert (text_of(chunks), chunks[-1].choices[0].finish_reason) == (before, "stop")
    assert server.get(f"/v1/runs/{answer.id}")["text"] == before
    for wrong in ({"1000000": 1}, {"x": 1}, {"1": 1000}):
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            complete(**{**asked_for, "logit_bias": wrong})


def test_logprobs_of_a_completion(server, complete, model):
    """They are what the run's file holds, streamed or not;
    and the tokens that they speak of are the text's.
    """
    # by one method, whose passes are the same each time: others round otherwise
    own, asked_for = (
        {"stop_at_eos": False, "method": "ar"},
        {"max_tokens": 40, "seed": 4, "logprobs": 2},
    )
    answer = complete(own, **asked_for)
    rows = np.fromfile(server.runs / answer.id / "logprobs.bin", row_type(2))
    ids = np.fromfile(server.runs / answer.id / "tokens.u32", "<u4").tolist()
    found: Any = answer.choices[0].logprobs
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert found.tokens == [tokenizer.decode([token]) for token in ids]
    assert (found.token_logprobs, found.drawn_logprobs) == (
        rows["raw"].tolist(),
        rows["warped"].tolist(),
    )
    assert [max(near.values()) for near in found.top_logprobs] == rows["raw_top"].max(1).tolist()
    assert all(
        list(near.values()) == sorted(near.values(), reverse=True) for near in found.top_logprobs
    )
    assert all(token in near for token, near in zip(found.tokens, found.top_logprobs, strict=True))
    assert any(len(near) == 3 for near in found.top_logprobs)
    assert found.text_offset[0] == 0
    assert found.text_offset == sorted(found.text_offset)
    streamed = [chunk.choices[0].logprobs for chunk in complete(own, **asked_for, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in streamed if part for each in getattr(part, name)] == getattr(
            found, name
        )
    # after the run they come from its file, from a token on
    _, events = asked(server, "GET", f"/v1/runs/{answer.id}/events", Last_Event_ID="10:0")
    parts = [chunk["choices"][0]["logprobs"] or {"tokens": []} for chunk in events_of(events)]
    assert [token for part in parts for token in part["tokens"]] == found.tokens[10:]


def test_logprobs_of_a_chat(server, client, model):
    asked_for: dict[str, Any] = {
        "model": model.name,
        "messages": MESSAGES,
        "max_tokens": 40,
        "seed": 4,
    }
    asked_for |= {"extra_body": {"stop_at_eos": False, "method": "ar"}, "logprobs": True}
    chat = client.chat.completions.create(**asked_for, top_logprobs=3)
    content: Any = chat.choices[0].logprobs.content
    rows = np.fromfile(server.runs / chat.id / "logprobs.bin", row_type(3))
    assert [each.logprob for each in content] == rows["raw"].tolist()
    assert [[near.logprob for near in each.top_logprobs] for each in content] == rows[
        "raw_top"
    ].tolist()
    assert [each.drawn_logprob for each in content] == rows["warped"].tolist()
    # of parts of characters, too
    ids = np.fromfile(server.runs / chat.id / "tokens.u32", "<u4")
    whole = AutoTokenizer.from_pretrained(model).decode(ids, skip_special_tokens=False)
    assert b"".join(bytes(each.bytes) for each in content).decode(errors="replace") == whole
    assert any("\N{REPLACEMENT CHARACTER}" in each.token for each in content)
    near = [near for each in content for near in each.top_logprobs]
    assert all(bytes(each.bytes).decode(errors="replace") == each.token for each in near)
    plain: Any = client.chat.completions.create(**asked_for).choices[0].logprobs
    assert [each.logprob for each in plain.content] == [each.logprob for each in content]


@every_row(
    ("fields", "param", "code"),
    [
        ({"model": "gpt-4o"}, "model", "model_not_found"),
        ({"best_of": 2}, "best_of", "unsupported_field"),
        ({"max_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
        ({"prompt": [10**6]}, "prompt", "invalid_value"),
        ({"own": {"method": "block"}}, "drafter", "invalid_value"),
    ],
)
def test_errors_are_those_of_the_interface(complete, fields, param, code):
    with pytest.raises(
        openai.NotFoundError if param == "model" else openai.BadRequestError
    ) as found:
        complete(**fields)
    assert (found.value.param, found.value.code, found.value.type) == (
        param,
        code,
        "invalid_request_error",
    )


@every_row(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "completions", b"{}", {"Content-Type": "text/plain"}, 415),
        ("POST", "completions", b"{}", {"Content-Encoding": "gzip"}, 415),
        ("POST", "completions", b"{", {}, 400),
        ("POST", "completions", b" " * 50_000_000, {}, 413),
        ("POST", "completions", {"prompt": TEXT}, {"Last-Event-ID": "1:1"}, 400),
        ("GET", "completions", None, {}, 405),
        ("GET", "nothing", None, {}, 404),
        ("GET", "models/gpt-4o", None, {}, 404),
        ("GET", "runs?limit=0", None, {}, 400),
        *(
            ("GET", f"runs/{name}", None, {}, 404)
            for name in ("nothing", "..", "%2e%2e", "a%00b", "..%5c..%5cetc")
        ),
        ("GET", "runs/%2e%2e%2f%2e%2e%2fetc%2fpasswd", None, {}, 404),
        ("POST", "runs/%2e%2e/resume", None, {}, 404),
        ("POST", "runs/../resume", None, {}, 404),
        ("POST", "runs/nothing/cancel", None, {}, 404),
        ("GET", "runs/nothing/events", None, {}, 404),
        ("GET", "runs/nothing/events", None, {"Last-Event-ID": "x"}, 400),
        ("GET", "models", None, {"Host": "evil.example"}, 403),
    ],
)
def test_refusals(server, method, path, body, headers, status):
    before = len(list(server.runs.iterdir()))
    found, answer = asked(server, method, f"/v1/{path}", body, **headers)
    assert (found, bool(answer["error"]["message"])) == (status, True)
    assert len(list(server.runs.iterdir())) == before


def test_a_body_that_is_too_large_is_answered_while_it_comes(server):
    host, port = server.url.removeprefix("http://").split(":")
    lines = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": "50000000"}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode())
        for _ in range(50):
            client.sendall(b" " * 1_000_000)
            time.sleep(0.002)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        found = answer.status, json.loads(answer.read())["error"]["code"]
    assert found == (413, "body_too_large")


def test_what_is_no_http_is_answered(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(b"nothing of the kind\r\n\r\n")
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert answer.status == 400


def test_a_link_is_no_run(server, complete):
    (server.runs / "link").symlink_to(complete(max_tokens=5).id)
    assert asked(server, "GET", "/v1/runs/link")[0] == 404
    assert "link" not in [run["id"] for run in server.get("/v1/runs")["data"]]


def test_the_queue_is_bounded_and_a_run_can_be_cancelled(server, complete):
    long: dict[str, Any] = {
        "own": {"method": "ar", "stop_at_eos": False},
        "max_tokens": 4000,
        "stream": True,
    }
    streams = [complete(**long) for _ in range(3)]  # two are decoded, one waits
    first = next(iter(streams[0])).id
    next(iter(streams[1]))
    with pytest.raises(openai.RateLimitError) as full:
        complete()
    assert int(full.value.response.headers["Retry-After"]) >= 1
    assert full.value.code == "queue_full"
    states = {run["id"]: run["state"] for run in server.get("/v1/runs")["data"]}
    waiting = [name for name, state in states.items() if state == "queued"]
    assert (states[first], len(waiting)) == ("running", 1)
    for name in [*waiting, *(name for name, state in states.items() if state == "running")]:
        assert asked(server, "POST", f"/v1/runs/{name}/cancel")[1]["state"] == "cancelled"
    for stream in streams:
        with pytest.raises(openai.APIError, match="cancelled"):
            list(stream)
    (entry,) = list_runs(server.runs / first)
    assert (entry.state, entry.tokens < 4000) == ("interrupted", True)
    # and goes on if somebody asks for it
    longer = {"max_tokens": entry.tokens + 50, "stream": False}
    status, answer = asked(server, "POST", f"/v1/runs/{first}/resume", longer)
    assert (status, answer["usage"]["completion_tokens"]) == (200, entry.tokens + 50)
    assert {server.get(f"/v1/runs/{name}")["state"] for name in waiting} == {"cancelled"}


@pytest.mark.slow
def test_who_comes_back_gets_the_rest(server, complete):
    whole = complete({"stop_at_eos": False}, max_tokens=200, seed=5)
    text = whole.choices[0].text
    path = f"/v1/runs/{whole.id}"
    for have in ("0:0", f"10:{len(text[:20].encode())}", f"200:{len(text.encode())}"):
        for method, where in (("GET", f"{path}/events"), ("POST", f"{path}/resume")):
            _, events = asked(server, method, where, Last_Event_ID=have)
            rest = "".join(chunk["choices"][0]["text"] for chunk in events_of(events))
            assert rest.encode() == text.encode()[int(have.partition(":")[2]) :]
    # a finished run can be made longer
    _, longer = asked(server, "POST", f"{path}/resume", {"max_tokens": 260})
    assert longer["usage"]["completion_tokens"] == 260
    # a character that was begun
    assert longer["choices"][0]["text"].startswith(text.rstrip("\ufffd"))


def test_the_demo_page(server):
    status, content = asked(server, "GET", "/")
    assert (status, b"<script" in content) == (200, True)


def test_runs_of_generate_are_runs_too(server, model):
    text = generated(server.runs, model, "--len 30")
    run = server.get("/v1/runs/run")
    assert (run["text"], run["state"], run["usage"]["completion_tokens"]) == (text, "finished", 30)
    _, longer = asked(server, "POST", "/v1/runs/run/resume", {"max_tokens": 40})
    assert longer["choices"][0]["text"].startswith(run["text"])


def test_another_server_on_the_same_folder_is_refused(server, model, tmp_path):
    process = Process([f"serve --port 0 --runs {server.runs} --model {model}"], tmp_path / "out")
    assert process.wait() == 2
    assert "another tswift serve writes to" in process.errors.read_text()


def test_a_key(model, tmp_path):
    server = Server(tmp_path, f"--model {model} --api-key secret --host 0.0.0.0")
    server.url = server.url.replace("0.0.0.0", "127.0.0.1")
    assert server.get("/health")["status"] == "ok"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
        assert asked(server, "GET", "/v1/models", **headers)[0] == 401
    assert (
        asked(server, "GET", "/v1/models", Authorization="Bearer secret", Host="any.example")[0]
        == 200
    )
    begun = time.monotonic()
    assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
    assert time.monotonic() - begun < 3
    assert "secret" not in server.errors()
