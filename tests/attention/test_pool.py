"""Threads that share work: all of it is done once, whoever helps."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch

from tswift.attention.backends import why_not
from tswift.attention.native import parallel_region

REASON = why_not("native", torch.float32, torch.device("cpu"))
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
REGION = ctypes.CFUNCTYPE(None, WORK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def share(tasks: int, threads: int) -> tuple[list[int], set[int]]:
    """Which tasks were done, in order, and by which threads."""
    left, done, who = list(range(tasks))[::-1], list[int](), set[int]()

    @WORK
    def work(given: object) -> None:
        while True:
            try:
                task = left.pop()  # one thread at a time holds Python's lock
            except IndexError:
                return
            who.add(threading.get_native_id())
            done.append(task)

    REGION(parallel_region())(work, None, threads, 0)
    return sorted(done), who


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_everything_is_done_once(threads: int) -> None:
    for tasks in (0, 1, 3, 50):
        for _ in range(100):
            done, who = share(tasks, threads)
            assert done == list(range(tasks))
            assert len(who) <= threads


def test_whoever_calls_does_all_where_nobody_helps() -> None:
    done, who = share(20, 1)
    assert (done, who) == (list(range(20)), {threading.get_native_id()})


def test_several_callers_at_a_time() -> None:
    found: list[list[int]] = []
    callers = [threading.Thread(target=lambda: found.extend(share(30, 3)[0] for _ in range(50))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [list(range(30))] * 200


def test_after_a_fork() -> None:
    share(10, 3)
    child = os.fork()
    if child == 0:
        os._exit(int(share(10, 3)[0] != list(range(10))))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
