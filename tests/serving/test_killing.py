"""Servers that are killed, and clients that behave badly: the text is what it would have been."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import time

import pytest

from tests.jobs.killing import Process
from tests.serving.server import SAMPLING, TEXT, Server
from tswift.jobs import folder

ASKED = {"prompt": TEXT, "seed": 11, "stream": True, "method": "medusa", "stop_at_eos": False}


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Stream:
    """A text as it comes by server-sent events; ``last`` is the id of the last one."""

    def __init__(self, url: str, method: str, path: str, body=None, last: str = ""):
        self.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        headers = {"Content-Type": "application/json", **({"Last-Event-ID": last} if last else {})}
        self.connection.request(method, path, None if body is None else json.dumps(body), headers)
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200, self.answer.read()
        self.id = str(self.answer.headers["X-Run-Id"])
        self.text = ""
        self.last = last
        self.done = False

    def read(self, characters: int = 1 << 40) -> str:
        """Read until there are so many characters, or it ends."""
        while len(self.text) < characters and not self.done:
            line = self.answer.readline().decode().rstrip("\n")
            if line.startswith("id: "):
                self.last = line.removeprefix("id: ")
            elif line == "data: [DONE]":
                self.done = True
            elif line.startswith("data: "):
                self.text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return self.text


@pytest.mark.slow
def test_a_server_killed_in_a_stream(checkpoint, tmp_path, monkeypatch):
    """Of three requests one is being written and two wait;
    another server makes all of them what they were to be.
    """
    monkeypatch.setattr(folder, "_TOKENS", 32)  # the servers are forked from this process
    words = (f"--model {checkpoint}", SAMPLING, "--queue 2")
    server = Server(tmp_path, *words)
    undisturbed = [
        Stream(server.url, "POST", "/v1/completions", {**ASKED, "max_tokens": 300}).read()
    ]
    undisturbed.append(
        Stream(server.url, "POST", "/v1/completions", {**ASKED, "max_tokens": 30, "seed": 2}).read()
    )
    first = Stream(server.url, "POST", "/v1/completions", {**ASKED, "max_tokens": 300})
    second = Stream(server.url, "POST", "/v1/completions", {**ASKED, "max_tokens": 30, "seed": 2})
    third = Stream(server.url, "POST", "/v1/completions", {**ASKED, "max_tokens": 300})
    begun = first.read(100)
    assert server.get(f"/v1/runs/{third.id}")["state"] == "queued"
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    assert not first.done
    for name in ("tokens.u32", "text.txt", "journal", "lock"):  # as if it had been about to begin
        (server.runs / third.id / name).touch()
    # defaults of the second server are others: what was accepted keeps its own
    server = Server(tmp_path, *words, "--top-k 2")
    rest = Stream(server.url, "GET", f"/v1/runs/{first.id}/events", last=first.last)
    assert begun + rest.read() == undisturbed[0]
    assert rest.done
    assert Stream(server.url, "POST", f"/v1/runs/{second.id}/resume").read() == undisturbed[1]
    assert server.wait(third.id)["text"] == undisturbed[0]
    assert server.stop() == 128 + signal.SIGTERM
    assert "Traceback" not in server.errors()


@pytest.mark.slow
def test_a_server_asked_to_stop_tells_its_readers(checkpoint, tmp_path):
    server = Server(tmp_path, f"--model {checkpoint} {SAMPLING}")
    stream = Stream(
        server.url, "POST", "/v1/completions", {**ASKED, "max_tokens": 3000, "method": "ar"}
    )
    stream.read(100)
    server.process.send(signal.SIGTERM)
    with pytest.raises(KeyError, match="choices"):  # an error, which has none
        stream.read()
    assert server.process.wait(30) == 128 + signal.SIGTERM
    assert "what is unfinished goes on" in server.errors()
    server = Server(tmp_path, f"--model {checkpoint} {SAMPLING}")
    rest = Stream(server.url, "GET", f"/v1/runs/{stream.id}/events", last=stream.last)
    rest.read(100)
    # a reader that does not listen does not keep it
    begun = time.monotonic()
    assert server.stop() == 128 + signal.SIGTERM
    assert time.monotonic() - begun < 10


def test_nobody_reads_what_the_server_says(checkpoint, tmp_path):
    os.mkfifo(tmp_path / "server.err")
    words = (f"--port 0 --model {checkpoint} --runs {tmp_path}/runs", SAMPLING)
    process = Process(["serve", *words], tmp_path / "server.out")
    try:
        with (tmp_path / "server.err").open() as lines:
            url = next(
                found[1] for line in lines if (found := re.search(r"is served on (\S+)/v1", line))
            )
        for _ in range(2):  # what is said of the first goes nowhere
            assert Stream(url, "POST", "/v1/completions", {**ASKED, "max_tokens": 5}).read()
    finally:
        process.send(signal.SIGKILL)
        process.wait(30)


def _slow(address: tuple[str, int]) -> socket.socket:
    """A client that asks for the text and reads none of it."""
    found = socket.create_connection(address)
    body = json.dumps({**ASKED, "max_tokens": 50}).encode()
    found.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return found


BAD = [
    b"",
    b"GET /v1/models HTTP/1.1\r\nHost: loc",
    HEAD + b"Content-Length: 5000\r\n\r\n{",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"\r\n" * 1000,
]


@pytest.mark.slow
def test_fifty_bad_clients_while_a_job_runs(checkpoint, tmp_path):
    server = Server(tmp_path, f"--model {checkpoint} {SAMPLING} --queue 1")
    job = {**ASKED, "max_tokens": 3000, "method": "ar"}
    whole = Stream(server.url, "POST", "/v1/completions", job).read()
    host, port = server.url.removeprefix("http://").split(":")
    address = (host, int(port))
    clients = list[socket.socket]()
    choice = random.Random(0)
    before = server.memory()
    main = Stream(server.url, "POST", "/v1/completions", job)
    main.read(10)
    followed = f"GET /v1/runs/{main.id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    slow = _slow(address)  # the one that may wait
    peak = 0
    for number in range(50):
        client = socket.create_connection(address)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.sendall(followed if number % 3 == 0 else choice.choice(BAD))
        if number % 5 == 4:  # some go at once
            client.close()
        clients.append(client)
        peak = max(peak, server.memory())
    assert main.read() == whole
    peak = max(peak, server.memory())
    assert peak - before < 50_000_000
    for client in [*clients, slow]:
        client.close()
    short = Stream(server.url, "POST", "/v1/completions", {**job, "max_tokens": 50}).read()
    assert short
    assert whole.startswith(short.rstrip("\ufffd"))  # it may end within a character
    assert server.stop() == 128 + signal.SIGTERM
    assert "Traceback" not in server.errors(), server.errors()
