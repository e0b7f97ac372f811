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
_CONTEXT.set_forkserver_preload(
    ["transformers.models.llama.modeling_llama", "tswift.cli.app", "tswift.training.run"]
)


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int  # its exit code; negative for a signal
    found: Any  # what the function returned; if it raised, the error
    out: bytes  # what it wrote
    err: str


def on_ranks(
    folder: Path, count: int, function: Callable[..., Any], *given, seconds: float = 60
) -> list[Ended]:
    """What every rank finds when it calls a function of a test module; those that hang are killed,
    and say -9.
    """
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        # wherever the test has gone
        multiprocessing.forkserver.ensure_running()
    # torchrun keeps one, too
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "test",
    }
    started = []
    for rank in range(count):
        file = folder / f"rank{rank}"
        receive, send = _CONTEXT.Pipe(duplex=False)
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = _CONTEXT.Process(
            target=_work, args=(send, file, environment, function, given), daemon=True
        )
        process.start()
        send.close()
        started.append((process, receive, file))
    ended = []
    for process, pipe, file in started:
        found = None
        if pipe.poll(seconds):
            with suppress(EOFError):  # it was killed
                found = pipe.recv()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
        out = file.with_suffix(".out").read_bytes()
        ended.append(Ended(process.exitcode, found, out, file.with_suffix(".err").read_text()))
    return ended


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
