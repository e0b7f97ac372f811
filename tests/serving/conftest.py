"""No server outlives the tests of its module."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.serving.server import SERVERS


@pytest.fixture(scope="module", autouse=True)
def no_server_is_left() -> Iterator[None]:
    yield
    for server in SERVERS:
        server.stop(signal.SIGKILL)
    SERVERS.clear()
