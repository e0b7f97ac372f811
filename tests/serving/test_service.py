"""The server's parts in this process: what is kept of runs, and who is answered what."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import read_json
from tests.rows import every_row
from tests.serving.server import TEXT
from tswift.decoding.stats import DecodeStats
from tswift.engine import generate
from tswift.files import Lock, write_whole
from tswift.jobs.config import RunConfig
from tswift.jobs.folder import FINISHED, INTERRUPTED, RUNNING, SaveFailed
from tswift.loading.model import LoadedModel, load
from tswift.serving import routes
from tswift.serving.config import ServeConfig
from tswift.serving.requests import Refused
from tswift.serving.routes import Api, Logprobs, authorize
from tswift.serving.run import QUEUED, ApiRun
from tswift.serving.service import Service

ASKED = {"prompt": TEXT, "seed": 3, "stop_at_eos": False, "method": "ar"}
LONG = {**ASKED, "max_tokens": 3000}
SHORT = {**ASKED, "max_tokens": 5}
SAID: list[str] = []


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LoadedModel:
    return load(str(checkpoint))


@pytest.fixture(scope="module")
def two_ends(checkpoint: Path, tmp_path_factory) -> LoadedModel:
    """The same model, with two end-of-text tokens."""
    folder = tmp_path_factory.mktemp("ends") / "two"
    shutil.copytree(checkpoint, folder)
    for name in ("config.json", "generation_config.json"):
        content = read_json(folder / name)
        (folder / name).write_text(json.dumps({**content, "eos_token_id": [0, 12]}))
    return load(str(folder))


@contextmanager
def serving(model: LoadedModel, folder: Path, **given) -> Iterator[Service]:
    folder.mkdir(exist_ok=True)
    service = Service(model, ServeConfig(runs=folder, **given), {}, SAID.append)
    try:
        yield service
    finally:
        service.close()
        service.thread.join()


@pytest.fixture
def service(model: LoadedModel, tmp_path) -> Iterator[Service]:
    with serving(model, tmp_path) as found:
        yield found


def done(run: ApiRun) -> ApiRun:
    """The run, when it is no longer open."""
    until = time.monotonic() + 30
    while run.open and time.monotonic() < until:
        time.sleep(0.005)
    assert not run.open
    return run


def begun(run: ApiRun) -> ApiRun:
    """The run, when it has tokens."""
    while not run.stats.tokens and run.open:
        time.sleep(0.005)
    return run


def ended(service: Service, run: ApiRun) -> ApiRun:
    """A run as the server knows it, when it is no longer open."""
    return done(service.find(done(service.find(run.id)).id))


def asked(to, method: str, path: str, body=None, leave: bool = False, **headers: str):
    """Status, headers and content of an answer, of a service or an application;
    a client may leave at once.
    """
    app = Api(to, ServeConfig(), False).app if isinstance(to, Service) else to
    sent = list[Any]()
    data = b"" if body is None else json.dumps(body).encode()
    given = {
        "host": "127.0.0.1",
        "content-length": str(len(data)),
        "content-type": "application/json",
        **headers,
    }
    scope = {
        "type": "http",
        "asgi": {"spec_version": "2.3"},
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        "method": method,
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [
            (name.replace("_", "-").encode(), text.encode()) for name, text in given.items()
        ],
    }
    incoming = [{"type": "http.request", "body": data}]

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        if not leave:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    found = {name.decode().lower(): text.decode() for name, text in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(part.get("body", b"") for part in sent[1:])


def refusal(service: Service, run: ApiRun, body: dict[str, Any]) -> tuple[int, str, str]:
    """Status, field and message with which it is refused to go on with a run."""
    status, _, content = asked(service, "POST", f"/v1/runs/{run.id}/resume", body)
    error = json.loads(content)["error"]
    return status, error["param"], error["message"]


@pytest.mark.slow
def test_any_end_of_text_token_is_no_part_of_the_text(two_ends, tmp_path):
    with serving(two_ends, tmp_path) as service:
        for ends in (0, 12):
            run = done(
                service.accept_one(
                    {"prompt": TEXT, "max_tokens": 9, "logit_bias": {str(ends): 100}}, False
                )
            )
            assert (run.end, run.tokens[-1], bytes(run.text)) == ("eos", 1, b"")
            assert bytes(service.find(run.id).text) == b""


@every_row(
    ("key", "path", "headers", "status"),
    [
        ("secret", "/v1/models", {"host": "x/health?"}, 401),
        ("secret", "/v1/models", {"authorization": "Bearer secret"}, 200),
        ("secret", "/health", {}, 200),
        (None, "/v1/models", {"host": "127.0.0.1:8000"}, 200),
        (None, "/v1/models", {"host": "[::1]:8000"}, 200),
        (None, "/v1/models", {"host": "[::1]"}, 200),
        (None, "/v1/models", {"host": "LocalHost:8000"}, 200),
        (None, "/v1/models", {"host": "evil.example"}, 403),
        *(
            (None, "/v1/models", {"host": host}, 403)
            for host in ("[127.0.0.1", "127.0.0.1]", "[127.0.0.1]:80", "")
        ),
        (None, "/v1/models", {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, 200),
        (None, "/v1/models", {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:9000"}, 403),
        (None, "/v1/models", {"origin": "https://evil.example"}, 403),
        (None, "/v1/models", {"origin": "null"}, 403),
        (None, "/v1/models", {"sec_fetch_site": "cross-site"}, 403),
        (None, "/v1/models", {"sec_fetch_site": "same-origin"}, 200),
    ],
)
def test_who_is_let_in(key, path, headers, status):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    assert asked(authorize(app, "127.0.0.1", key), "POST", path, **headers)[0] == status


def test_clients_do_not_repeat_a_run_that_failed(service, monkeypatch):
    status, headers, content = asked(service, "POST", "/v1/completions", SHORT)
    assert (status, headers["x-run-id"]) == (200, json.loads(content)["id"])
    monkeypatch.setattr("tswift.serving.service.start", lambda *words, **others: 1 / 0)
    status, headers, _ = asked(service, "POST", "/v1/completions", SHORT)
    assert (status, headers["x-should-retry"]) == (500, "false")
    assert service.find(headers["x-run-id"]).state == "failed"


def test_health_tells_whether_anything_decodes(model, tmp_path):
    with serving(model, tmp_path) as service:
        assert asked(service, "GET", "/health")[0] == 200
    assert asked(service, "GET", "/health")[0] == 503


@pytest.mark.slow
def test_only_who_made_a_run_cancels_it_by_leaving_and_only_if_that_was_asked_for(
    service,
):
    asked_for = {**ASKED, "max_tokens": 600, "stream": True}
    for cancel, stream in ((False, True), (True, True), (True, False)):
        state = ("finished", "cancelled")[cancel]
        body = {"cancel_on_disconnect": cancel, "stream": stream}
        body = {**asked_for, **body}
        _, headers, _ = asked(service, "POST", "/v1/completions", body, leave=True)
        assert ended(service, service.find(headers["x-run-id"])).state == state
    run = begun(service.accept_one({**asked_for, "cancel_on_disconnect": True}, False))
    asked(service, "GET", f"/v1/runs/{run.id}/events", leave=True)
    assert done(run).state == "finished"


def test_offsets_of_a_reader_who_comes_back_before_the_tokens(service, model):
    run = done(service.accept_one({**SHORT, "logprobs": 0}, False))
    whole: Any = Logprobs(run, model.tokenizer, 0).up_to(5)
    again = ApiRun(run.path, run.config, run.request)
    late = Logprobs(again, model.tokenizer, 3)
    assert late.up_to(5) is None
    again.ids, again.rows = run.ids, run.rows
    rest: Any = late.up_to(5)
    assert rest["text_offset"] == whole["text_offset"][3:]


def test_what_resume_refuses(two_ends, tmp_path):
    with serving(two_ends, tmp_path) as service:
        first = begun(service.accept_one(LONG, False))
        waiting = service.accept_one(LONG, False)
        assert refusal(service, first, {"max_tokens": 3001})[:2] == (409, "max_tokens")
        for run in (waiting, first):
            service.cancel(run)
            assert done(run).state == "cancelled"
        listed = {each["id"]: each["state"] for each in service.newest(9)}
        assert listed == {first.id: "cancelled", waiting.id: "cancelled"}
        for run in (first, waiting):
            for body in ({"stream": "yes"}, {"max_tokens": 4096}, {"max_tokens": 0}):
                assert refusal(service, run, body)[:2] == (400, next(iter(body)))
                assert service.find(run.id).state == "cancelled"
        for more in ({"logit_bias": {"12": 100}, "stop_at_eos": True}, {"stop": "e"}):
            run = done(service.accept_one({**LONG, **more}, False))
            assert run.state == "finished"
            assert refusal(service, run, {"max_tokens": 3001})[:2] == (409, "max_tokens")
        with Lock(run.path):
            assert refusal(service, run, {})[0] == 409  # another process is writing it
        # a run that was never begun takes the length, too
        service.resume(waiting.id, 7)
        assert ended(service, waiting).stats.tokens == 7


def test_a_length_that_waits_is_kept(model, tmp_path):
    with serving(model, tmp_path) as service:
        short, shorter = (
            done(service.accept_one(SHORT, False)),
            done(service.accept_one(SHORT, False)),
        )
        begun(service.accept_one(LONG, False))
        assert service.resume(short.id, 9).state == QUEUED
        service.cancel(service.resume(shorter.id, 9))
    with serving(model, tmp_path) as service:
        assert ended(service, short).stats.tokens == 9
        assert service.find(shorter.id).stats.tokens == 5


@pytest.mark.slow
def test_runs_of_another_model_are_left_alone(model, two_ends, tmp_path):
    with serving(model, tmp_path) as service:
        first = begun(service.accept_one({**LONG, "max_tokens": 600}, False))
        waiting = service.accept_one(SHORT, False)
    SAID.clear()
    with serving(two_ends, tmp_path) as service:
        for run in (first, waiting):
            assert ended(service, run).state == "interrupted"
            status, _, message = refusal(service, run, {"stream": False})
            assert (status, "model" in message) == (400, True)
    assert any("this run was requested for model" in line for line in SAID)
    with serving(model, tmp_path) as service:
        assert {ended(service, run).state for run in (first, waiting)} == {"finished"}


def test_files_that_are_broken_are_left_alone(model, tmp_path):
    with serving(model, tmp_path) as service:
        names = [done(service.accept_one(SHORT, False)).id for _ in range(2)]
    for name, file in zip(names, ("request.json", "run.json"), strict=True):
        (tmp_path / name / file).write_text("{}")
    SAID.clear()
    with serving(model, tmp_path) as service:
        assert [each["state"] for each in service.newest(9)] == ["broken", "broken"]
        for name in names:
            with pytest.raises(Refused, match=f"there is no run '{name}': .*json is "):
                service.find(name)
    assert len([line for line in SAID if "is left alone" in line]) == 2


@pytest.mark.parametrize(
    "name", ["text.txt", "logprobs.bin", "tokens.u32", "journal", "request.json", "run.json"]
)
def test_a_link_in_a_run_is_not_followed(model, tmp_path, name):
    """Not even to the file itself, which lies elsewhere now."""
    (tmp_path / "runs").mkdir()
    with serving(model, tmp_path / "runs") as service:
        run = done(service.accept_one({**SHORT, "logprobs": 1}, False))
        assert service.find(run.id).text == run.text
        (run.path / name).rename(tmp_path / name)
        (run.path / name).symlink_to(tmp_path / name)
        with pytest.raises(Refused, match=f"there is no run '{run.id}'"):
            service.find(run.id)
        with pytest.raises(Refused):
            service.resume(run.id, 9)


@pytest.mark.parametrize("name", ["text.txt", "logprobs.bin", "tokens.u32"])
def test_what_does_not_fit_is_not_served(service, name):
    run = done(service.accept_one({**SHORT, "logprobs": 1}, False))
    content = (run.path / name).read_bytes()
    (run.path / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(Refused, match=f"{name} (is not the text of|does not match its checksum)"):
        service.find(run.id)
    assert asked(service, "GET", f"/v1/runs/{run.id}")[0] == 404


@pytest.fixture(scope="module")
def recommending(checkpoint: Path, tmp_path_factory) -> LoadedModel:
    """The same model, whose authors recommend how to sample."""
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("recommending") / "model"))
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps(own))
    return load(str(folder))


@pytest.mark.parametrize(
    ("typed", "body", "wanted"),
    [
        ({}, {}, {"temperature": 0.6, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.1}),
        (
            {},
            {"temperature": 0.3, "min_p": 0.2},
            {"temperature": 0.3, "top_k": 20, "min_p": 0.2, "repetition_penalty": 1.1},
        ),
        (
            {"top_k": 9},
            {},
            {"temperature": 0.6, "top_k": 9, "min_p": 0.0, "repetition_penalty": 1.1},
        ),
        (
            {"sampling_from": "paper"},
            {},
            {"temperature": 1.0, "top_k": 0, "min_p": 0.1, "penalty": 1.2},
        ),
        (
            {"preset": "qwen2.5-7b"},
            {},
            {"temperature": 1.0, "top_k": 0, "min_p": 0.05, "penalty": 1.15},
        ),
    ],
    ids=str,
)
def test_sampling_that_nobody_asked_for(
    recommending,
    tmp_path,
    typed,
    body,
    wanted,
):
    """It is the model's own, also for who comes to a server that was killed before."""
    preset = {"model": recommending.name} if "preset" in typed else {}
    service = Service(recommending, ServeConfig(runs=tmp_path), {**typed, **preset}, SAID.append)
    run = done(service.accept_one({**SHORT, **body}, False))
    service.close()
    service.thread.join()
    drawn = read_json(run.path / "run.json")["sampling"]
    assert {name: drawn[name] for name in wanted} == wanted
    kept = read_json(run.path / "request.json")["typed"]
    assert kept.get("sampling_from") == (None if preset else typed.get("sampling_from", "model"))


def test_who_sends_nothing_is_not_penalised(service):
    """Nor who sent a temperature of 0 alone, for which OpenAI's interface knows no penalty."""
    usual = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "penalty": 1.0}
    for sent in ({}, {"temperature": 0}, {"temperature": 0, "penalty": 1.1}):
        run = done(service.accept_one({**SHORT, **sent}, False))
        drawn = read_json(run.path / "run.json")["sampling"]
        assert {name: drawn[name] for name in usual} == {**usual, **sent}
        assert (drawn["presence_penalty"], drawn["frequency_penalty"]) == (0, 0)


def test_cancel_and_resume_at_the_same_time(service, monkeypatch):
    """Whichever comes last decides what the file says."""
    threads = list[threading.Thread]()

    def slow(path, content):
        if b'"state": "cancelled"' in content and not threads:
            threads.append(threading.Thread(target=service.resume, args=(waiting.id,)))
            threads[0].start()
            threads[0].join(0.3)
        write_whole(path, content)

    begun(service.accept_one(LONG, False))
    waiting = service.accept_one(SHORT, False)
    monkeypatch.setattr("tswift.serving.run.write_whole", slow)
    service.cancel(waiting)
    threads[0].join()
    assert "state" not in read_json(waiting.path / "request.json")


def test_a_run_that_fails_on_a_full_disk_is_known_as_failed(service, monkeypatch):
    """With its tokens; and when there is room again it goes on."""

    def full(*_, **__):
        raise SaveFailed("no room")

    def unwritable(path, content):
        raise OSError(28, "No space left on device")

    for kept in (False, True):
        run = begun(service.accept_one({**ASKED, "max_tokens": 300}, False))
        service.cancel(run)
        done(run)
        made = service.find(run.id).stats.tokens
        with monkeypatch.context() as patch:
            patch.setattr("tswift.jobs.folder.RunFolder.record", full)
            if not kept:
                patch.setattr("tswift.serving.run.write_whole", unwritable)
            status, _, content = asked(service, "POST", f"/v1/runs/{run.id}/resume", {})
        message = json.loads(content)["error"]["message"]
        assert (status, made > 0) == (500, True)
        assert message.startswith("no room; ")
        assert f" has {made:,} tokens, and POST " in message
        found = service.find(run.id)
        assert (found.state, found.reason, found.stats.tokens) == ("failed", "no room", made)
        assert {each["id"]: each["state"] for each in service.newest(9)}[run.id] == "failed"
        assert done(service.resume(run.id)).state == "finished"
        assert service.find(run.id).state == "finished"


def test_bodies_are_parsed_beside_the_event_loop(service, monkeypatch):
    def parse(data):
        raise Refused(418, threading.current_thread().name)

    monkeypatch.setattr(routes, "parse_body", parse)
    for path in ("/v1/completions", "/v1/runs/x/resume"):
        status, _, content = asked(service, "POST", path, {})
        assert (
            status,
            threading.current_thread().name in json.loads(content)["error"]["message"],
        ) == (418, False)


# --- a run's text


@pytest.mark.parametrize(
    ("last", "pieces", "state", "end", "text"),
    [
        # what is held back is sent when the text ends, and not when it is interrupted
        (3, ("Caf", "", "\ufffd"), INTERRUPTED, "length", "Caf"),
        (3, ("Caf", "", "\ufffd"), FINISHED, "length", "Caf\ufffd"),
        (7, ("One", "", ""), FINISHED, "eos", "One"),
        (7, ("One", "!", ""), FINISHED, "eos", "One!"),
    ],
)
def test_what_is_shown_of_a_text(last, pieces, state, end, text):
    run = ApiRun(Path("run"), RunConfig())
    job: Any = SimpleNamespace(
        config=RunConfig(),
        stats=DecodeStats(0),
        generation=SimpleNamespace(before=""),
        tokens=[],
        state=RUNNING,
    )
    job.end = lambda: {"reason": end}
    job.rows = b""
    show = run.follow(job)
    job.tokens += [3]
    show(pieces[0], DecodeStats(0, tokens=1))
    job.tokens += [last]
    show(pieces[1], DecodeStats(0, tokens=2))
    job.state = run.state = state
    show(pieces[2], DecodeStats(0, tokens=2))
    assert (bytes(run.text).decode(), run.tokens[-1]) == (text, 2)
    assert run.finish_reason == (
        None if state != FINISHED else "length" if end == "length" else "stop"
    )


def test_reading_by_pieces_gives_the_text_however_it_is_cut(
    monkeypatch,
):
    monkeypatch.setattr("tswift.serving.run._MAX_TEXT", 5)
    run = ApiRun(Path("run"), RunConfig())
    words = ["Café ", "größer", "", " 夜が明けた", "."]
    assert run.read(0, 0) is None
    for number, word in enumerate(words, 1):
        run.grow(word, number)
    for have in (0, 6, len("Café größer".encode())):
        text = ""
        tokens = 0
        start = have
        while (piece := run.read(tokens, start)) is not None:
            assert piece[1] >= tokens
            assert start < piece[2] <= start + 5
            text = text + piece[0]
            tokens = piece[1]
            start = piece[2]
        assert text.encode() == "".join(words).encode()[have:]
        assert tokens == 5
    # one who was told more by a server that was killed waits, and is told no less later
    assert run.read(9, 1000) is None
    assert run.read(9, 0)[1] == 9


def test_a_pipe_in_a_runs_folder_is_not_waited_for(model, tmp_path):
    """In the place of each file, of runs that a server that starts again is to go on with."""
    with serving(model, tmp_path) as service:
        run = begun(service.accept_one(LONG, chat=False))
    files = ("run.json", "request.json", "prompt.u32", "tokens.u32", "text.txt", "journal", "lock")
    for name in files:
        path = shutil.copytree(run.path, tmp_path / name) / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    shutil.rmtree(run.path)
    SAID.clear()
    with serving(model, tmp_path) as service:
        until = time.monotonic() + 30
        while service._runs and time.monotonic() < until:
            time.sleep(0.005)
        told = {
            name: [line for line in SAID if f"/{name}/{name} cannot be used (it is a named" in line]
            for name in files
        }
    assert all(told.values()), SAID


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> LoadedModel:
    """The model in passes that texts share."""
    return load(str(checkpoint), exact=True)


def alone(service: Service, asked_for: dict[str, Any]) -> bytes:
    """The text that a request has by itself."""
    length, seed = asked_for["max_tokens"], asked_for["seed"]
    steps = generate(service.model, TEXT, length, method="ar", seed=seed, params=service.sampling)
    return "".join(step.text for step in steps).encode()


def test_texts_are_made_side_by_side(exact, tmp_path):
    """A short one does not wait for a long one; who leaves does not disturb the others."""
    with serving(exact, tmp_path) as service:
        long = [
            begun(service.accept_one({**LONG, "max_tokens": 250, "seed": seed}, False))
            for seed in (1, 2)
        ]
        short = done(service.accept_one({**SHORT, "seed": 4}, False))
        assert [run.open for run in long] == [True, True]
        service.cancel(long[0])
        assert done(long[0]).state == "cancelled"
        several = service.accept({**SHORT, "n": 3}, False)
        texts = [bytes(done(run).text) for run in several]
        assert long[1].open
        made = bytes(done(long[1]).text)
    assert bytes(short.text) == alone(service, {**SHORT, "seed": 4})
    assert texts == [alone(service, {**SHORT, "seed": seed}) for seed in (3, 4, 5)]
    assert made == alone(service, {**LONG, "max_tokens": 250, "seed": 2})


def test_a_text_waits_until_memory_has_room(exact, tmp_path, monkeypatch):
    """For what others still take, too; alone it is refused."""
    needed = exact.target.kv_shape.bytes_per_token * 400
    room = [10 * needed]
    monkeypatch.setattr("tswift.memory.available_bytes", lambda device: room[0])
    with serving(exact, tmp_path) as service:
        first = begun(service.accept_one({**LONG, "max_tokens": 150}, False))
        room[0] = needed
        second = service.accept_one({**LONG, "max_tokens": 300, "seed": 4}, False)
        third = service.accept_one({**SHORT, "seed": 5}, False)
        assert done(first).state == FINISHED
        assert third.open  # it overtakes nobody
        assert done(second).state == done(third).state == FINISHED
        until = time.monotonic() + 30
        while [*exact.target.caches]:  # of texts that have ended
            assert time.monotonic() < until
            time.sleep(0.005)
        assert bytes(second.text) == alone(service, {**LONG, "max_tokens": 300, "seed": 4})
        room[0] = 1000
        assert "cpu has" in done(service.accept_one(LONG, False)).reason


def test_a_prompt_whose_beginning_was_seen_is_not_forwarded_again(checkpoint, tmp_path):
    exact = load(str(checkpoint), dtype="bfloat16")
    prompt = [7 * token % 90 for token in range(150)]
    asked = {**ASKED, "prompt": prompt, "max_tokens": 9}
    texts = []
    for most in (None, 0.0):
        with serving(exact, tmp_path / str(most), keep_caches=most) as service:
            first = done(service.accept(asked, chat=False)[0])
            longer = {**asked, "prompt": [*prompt, 3, 4, 5]}
            runs = [first, *(done(service.accept(longer, chat=False)[0]) for _ in range(2))]
            counts = [0, 150, 151] if most is None else [0, 0, 0]
            details = [routes._usage([run])["prompt_tokens_details"] for run in runs]
            assert details == [{"cached_tokens": count} for count in counts]
            # and its folder says so
            assert [service._read(run.path).copied for run in runs] == counts
            texts.append([bytes(run.text) for run in runs])
            assert bool(service._kept.nbytes) == (most is None)
            # a run that is stopped and resumed is the same, too
            stopped = service.accept({**asked, "max_tokens": 3000}, chat=False)[0]
            while not stopped.stats.tokens:
                time.sleep(0.001)
            service.cancel(stopped)
            assert done(stopped).state == "cancelled"
            again = done(service.resume(stopped.id, stopped.stats.tokens + 20))
            assert again.state == FINISHED
            assert (again.copied > 140) == (most is None)
    assert texts[0] == texts[1]
