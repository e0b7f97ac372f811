"""A real ``tswift serve`` in a process of its own, on the tests' tiny model,
which has a chat template here.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.helpers import read_json
from tests.jobs.killing import Process
from tests.jobs.test_prompt import TEMPLATE

TEXT = "The ship had lain three days becalmed."
# nothing is dropped or punished, or the tiny model would repeat a line for ever; and no rounding
SAMPLING = "--sampling paper --temperature 1.3 --min-p 0 --dtype float64"


def with_template(checkpoint: Path, folder: Path) -> Path:
    """A copy of a checkpoint, with a chat template."""
    shutil.copytree(checkpoint, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**read_json(path), "chat_template": TEMPLATE}))
    return folder


SERVERS: list[Server] = []  # that were started


class Server:
    """``tswift serve`` with these words, answering when this is made.

    Its folder for runs is ``folder/runs``.
    """

    def __init__(self, folder: Path, *words):
        self.runs = folder / "runs"
        count = len(list(folder.glob("server-*.out")))
        self.process = Process(
            [f"serve --port 0 --runs {self.runs}", *words], folder / f"server-{count}.out"
        )
        SERVERS.append(self)
        found = None
        while found is None and self.process.poll() is None:
            time.sleep(0.01)
            found = re.search(r"is served on (http://\S+)/v1", self.errors())
        assert found is not None, self.errors()
        self.url = found[1]

    def errors(self) -> str:
        """What it has said on stderr."""
        return self.process.errors.read_text() if self.process.errors.exists() else ""

    def memory(self) -> int:
        """Bytes of main memory that it holds."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096

    def get(self, path: str):
        """The JSON at a path."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def wait(self, name: str, state: str = "finished") -> dict[str, Any]:
        """A run, when it has come to a state."""
        until = time.monotonic() + 60
        while True:
            run: dict[str, Any] = self.get(f"/v1/runs/{name}")
            if run["state"] == state:
                return run
            assert time.monotonic() < until, run
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        """Send it a signal, and wait for its exit code."""
        self.process.send(number)
        return self.process.wait(30)
