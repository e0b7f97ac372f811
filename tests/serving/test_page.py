"""The page in a real browser: it writes a text, shows figures,
and finds its run again after the server was killed.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.server import SAMPLING, Server

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
ARGUMENTS = (
    *(
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
    ),
    *("disable-component-update", "disable-sync", "window-size=1100,1000"),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="there is no chromium with its chromedriver"
    ),
]


class Browser:
    """A browser of its own, driven over WebDriver."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        self._base = f"http://127.0.0.1:{port}/session"
        self._driver = subprocess.Popen([str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL)
        arguments = [
            f"--{argument}" for argument in (*ARGUMENTS, f"user-data-dir={folder / 'profile'}")
        ]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
        }
        wanted["goog:loggingPrefs"] = {"browser": "ALL"}
        for _ in range(100):
            try:
                found = self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})
                break
            except OSError:
                time.sleep(0.1)
        self._base += f"/{found['sessionId']}"

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()[:500]) from None

    def go(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def until(self, script: str, seconds: float = 60) -> Any:
        """Wait until a script returns something true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, (script, self.run("return document.body.innerText"))
            time.sleep(0.05)
        return found

    def complaints(self) -> list[str]:
        """What it wrote to its console, but for connections that broke when there was no server."""
        log = self._ask("POST", "/se/log", {"type": "browser"})
        return [line["message"] for line in log if "net::ERR_" not in line["message"]]

    def close(self) -> None:
        self._ask("DELETE", "")
        self._driver.terminate()
        self._driver.wait(10)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    found = Browser(tmp_path)
    yield found
    found.close()


def set_value(name: str, value: object) -> str:
    return f"document.getElementById('{name}').value = {json.dumps(value)};"


def text_of(name: str) -> str:
    return f"return document.getElementById('{name}').textContent"


def test_the_page_writes_a_text(browser: Browser, checkpoint: Path, tmp_path: Path) -> None:
    words = ("--model", checkpoint, *SAMPLING, "--demo-page")
    server = Server(tmp_path, *words)
    browser.go(server.url)
    browser.until(f"{text_of('model')} !== ''")
    browser.run(set_value("length", 1500) + set_value("seed", 4) + set_value("method", "medusa"))
    browser.run("document.getElementById('write').click()")
    browser.until("return +document.getElementById('tokens').textContent.replace(',', '') > 100")
    browser.until("return document.getElementById('per_pass').textContent !== '-'")
    name = browser.run("return run.id")
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    browser.until("return document.getElementById('state').className === 'bad'")
    server = Server(tmp_path, *words, "--port", int(server.url.rpartition(":")[2]))
    browser.until("return run.done")
    stored = server.wait(name)
    prompt = browser.run("return document.getElementById('prompt').value")
    assert browser.run(text_of("text")) == prompt + stored["text"]
    assert browser.run(text_of("tokens")) == "1,500"
    figures = stored["figures"]
    assert browser.run(text_of("per_pass")) == f"{figures['tokens_per_pass']:.2f}"
    assert float(browser.run(text_of("alpha"))) > 0
    assert browser.run("return bars.length && bars.every(bar => bar.accepted <= bar.drafted)")
    painted = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data].some(x => x)"
    assert browser.run(f"const c = at('chart'); return [...{painted}")
    assert browser.complaints() == []


def test_the_page_asks_for_a_key(browser: Browser, checkpoint: Path, tmp_path: Path) -> None:
    server = Server(
        tmp_path, "--model", checkpoint, *SAMPLING, "--demo-page", "--api-key", "secret"
    )
    browser.go(server.url)
    browser.until("return !document.getElementById('locked').hidden")
    browser.run(set_value("key", "secret") + set_value("length", 30))
    browser.run("document.getElementById('write').click()")
    browser.until("return run.done")
    assert browser.run(text_of("tokens")) == "30"
