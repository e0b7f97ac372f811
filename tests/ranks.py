"""Ranks as torchrun starts them, without its seconds:
forked from a server that has imported everything once.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed import TCPStore

_CONTEXT = multiprocessing.get_context("forkserver")
_MODELS = "transformers.models.{0}.modeling_{0}"
_CONTEXT.set_forkserver_preload(
    [
        *(
            "torch.distributed.tensor",
            _MODELS.format("llama"),
            _MODELS.format("qwen2"),
            "benchmarks.architectures",
        ),
        *("tswift.cli.app", "tswift.cli.output", "tswift.engine", "tswift.jobs.job"),
    ]
)


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int  # its exit code; negative for a signal
    found: Any  # what the function returned; if it raised, the error
    out: bytes  # what it wrote
    err: str


class Started:
    """Ranks at work."""

    def __init__(self, folder: Path, count: int, function: Callable[..., Any], *given):
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            # wherever the test has gone
            multiprocessing.forkserver.ensure_running()
        # torchrun keeps one, too
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "test",
        }
        self._pipes, self.processes = [], []
        self._files = [folder / f"rank{rank}" for rank in range(count)]
        for rank, file in enumerate(self._files):
            receive, send = _CONTEXT.Pipe(duplex=False)
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = _CONTEXT.Process(
                target=_work, args=(send, file, environment, function, given), daemon=True
            )
            process.start()
            send.close()
            self._pipes.append(receive)
            self.processes.append(process)

    def end(self, seconds: float = 60) -> list[Ended]:
        """Wait for all of them; those that hang are killed, and say -9."""
        ended = []
        for process, pipe, file in zip(self.processes, self._pipes, self._files, strict=True):
            found = None
            if pipe.poll(seconds):
                with suppress(EOFError):  # it was killed
                    found = pipe.recv()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            out = file.with_suffix(".out").read_bytes()
            err = file.with_suffix(".err").read_text()
            ended.append(Ended(process.exitcode, found, out, err))
        return ended


def on_ranks(folder: Path, count: int, function: Callable[..., Any], *given) -> list[Ended]:
    """What every rank finds when it calls a function of a test module."""
    return Started(folder, count, function, *given).end()


def _work(send, file: Path, environment: dict[str, str], function, given):
    os.environ.update(environment)
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(file.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    try:
        found = function(*given)
    except BaseException as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}"
    sys.stdout.flush()
    sys.stderr.flush()
    send.send(found)
