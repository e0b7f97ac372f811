"""The hub, there and not there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants, is_offline_mode
from huggingface_hub.utils import logging as hub_logging

from tswift.errors import InputError
from tswift.models.source import hub, read_config


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as anybody has said."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens there."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Something does, and has nothing to give; what it was asked."""
    asked: list[str] = []

    class Server(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *given: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("unreachable")
def test_a_hub_that_cannot_be_reached_is_not_tried_again() -> None:
    verbosity = hub_logging.get_verbosity()
    with hub():
        assert is_offline_mode()
        assert hub_logging.get_verbosity() == logging.CRITICAL
    assert not is_offline_mode()
    assert hub_logging.get_verbosity() == verbosity


@pytest.mark.usefixtures("unreachable")
def test_a_model_of_it_is_refused_at_once_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    with pytest.raises(
        InputError, match=r"^model: nobody/nothing cannot be loaded from the hub, and is no folder"
    ) as found:
        read_config("nobody/nothing")
    assert time.monotonic() - began < 5  # its client would have tried for 23 s
    assert str(found.value).endswith("couldn't find them in the cached files.)")
    assert capfd.readouterr().err == ""


def test_a_hub_that_answers_is_used(answering: list[str]) -> None:
    with hub():
        assert not is_offline_mode()
    assert len(answering) == 1


def test_nothing_is_asked_where_nothing_is_wanted_from_it(
    answering: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(wanted=False):
        assert not is_offline_mode()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with hub():
        assert is_offline_mode()
    assert is_offline_mode()
    assert answering == []
