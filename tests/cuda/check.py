"""Prints what the simulated device does not see, though it should:
``python -m tests.cuda.check`` prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.cuda.devsim import CUDA, Simulator  # isort: skip  # before the package
import torch

from tests.cuda.capture import LOG
from tswift.forward.cuda.graphs import Graphs
from tswift.models.codes import quantize


def _counts(run: Callable[[], object]) -> tuple[int, int, int, int, int]:
    LOG.clear()
    LOG.on = True
    try:
        run()
    finally:
        LOG.on = False
    sums = (sum(each.values()) for each in (LOG.waits, LOG.sent, LOG.fetched))
    return (*sums, LOG.kernels, LOG.launches)


def _fails(run: Callable[[], object], words: str) -> bool:
    try:
        run()
    except RuntimeError as error:
        return words in str(error)
    return False


def _race(device: torch.Tensor):
    """Writes to page-locked memory whose copy nothing has waited for."""
    block = torch.zeros(3, pin_memory=True)
    device.copy_(block, non_blocking=True)
    block += 1
    torch.cuda.synchronize()


def _answers(device: torch.Tensor) -> tuple[bool, bool]:
    """Whether a copy to page-locked memory is there before and after a wait."""
    answer = torch.zeros(3, pin_memory=True)
    answer.copy_(device, non_blocking=True)
    before = answer.tolist()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    event.synchronize()
    return before == device.elem.tolist(), answer.tolist() == device.elem.tolist()


def main():
    """Print what does not show."""
    with Simulator(), torch.no_grad():
        here, there = torch.ones(3), torch.ones(3, device=CUDA)
        graphs = Graphs(CUDA)
        replay = graphs.capture(lambda: (there * 2).exp().add_(1))
        replay()
        for what, run, wanted in (
            ("a kernel", lambda: there + 1, (0, 0, 0, 1, 0)),
            ("a view", lambda: there[1:], (0, 0, 0, 0, 0)),
            ("tolist", lambda: there.tolist(), (1, 0, 1, 0, 0)),
            ("item", lambda: there[0].item(), (1, 0, 1, 0, 0)),
            ("cpu", lambda: there.cpu(), (1, 0, 1, 0, 0)),
            ("if", lambda: bool(there[0] > 0), (1, 0, 1, 1, 0)),
            ("a list as index", lambda: there[[0, 2]], (1, 0, 0, 1, 0)),
            ("a mask as index", lambda: there[there > 0], (1, 0, 0, 2, 0)),
            ("nonzero", lambda: there.nonzero(), (1, 0, 0, 1, 0)),
            ("tensor", lambda: torch.tensor([1], device=CUDA), (1, 1, 0, 0, 0)),
            ("to", lambda: here.to(CUDA), (1, 1, 0, 0, 0)),
            ("to without a wait", lambda: here.to(CUDA, non_blocking=True), (0, 1, 0, 0, 0)),
            ("copy_", lambda: there.copy_(here), (1, 1, 0, 0, 0)),
            ("copy_ back", lambda: here.copy_(there), (1, 0, 1, 0, 0)),
            ("copy_ on the device", lambda: there.copy_(there * 1), (0, 0, 0, 2, 0)),
            ("an element that is set", lambda: there.__setitem__(1, 2.0), (1, 1, 0, 2, 0)),
            ("a slice that is set", lambda: there.__setitem__(slice(1, 2), 2.0), (0, 0, 0, 2, 0)),
            ("an event", lambda: torch.cuda.Event().synchronize(), (1, 0, 0, 0, 0)),
            ("a stream", lambda: torch.cuda.current_stream().synchronize(), (1, 0, 0, 0, 0)),
            ("a replay", replay, (0, 0, 0, 0, 1)),
        ):
            if (counts := _counts(run)) != wanted:
                print(f"{what}: {counts}, not {wanted}")
        if not _fails(lambda: here + there, "cuda and cpu"):
            print("a mix of devices")
        if not _fails(lambda: _race(there), "page-locked memory was written"):
            print("a race for page-locked memory")
        if not _fails(lambda: torch.cuda.Event().record(), "current device"):
            print("an event of another device")
        numbers = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0))
        if torch.equal((numbers.to(CUDA) / 15).elem, numbers / 15):
            print("a quotient by the host's number")
        codes = (quantize(each, 4) for each in (numbers, numbers.to(CUDA)))
        host, ours = ((each.codes, each.scale, each.minimum) for each in codes)
        if not all(torch.equal(one, other.elem) for one, other in zip(host, ours, strict=True)):
            print("codes of weights that are others on a device")
        if _answers(there) != (False, True):
            print("an answer that is read too early")
        for what, run, words, spoiled in (
            ("a wait", lambda: there.tolist(), "called a synchronizing CUDA operation", False),
            (
                "an element that is set",
                lambda: there.__setitem__(1, 2.0),
                "called a synchronizing",
                False,
            ),
            (
                "a copy",
                lambda: here.to(CUDA, non_blocking=True),
                "not permitted when stream is capturing",
                True,
            ),
        ):
            graphs.failure = ""
            graphs.spoiled = False
            graphs.capture(run)
            if words not in graphs.failure or graphs.spoiled != spoiled:
                print(f"{what} while a graph is captured: {graphs.failure}")


if __name__ == "__main__":
    main()
