"""The one harness of checks: whether kernels compute what plain PyTorch does.

Each room has the cases beside its kernels, in a generator that yields what kernels computed and
what plain PyTorch does; here these are compared, and what passed on a card is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import distributions

import torch
from torch import Tensor

from tswift.errors import cause_of
from tswift.machine import driver_version
from tswift.remembered import Checks

Made = Tensor | Sequence[Tensor]
# What is compared, in words; what kernels made; what plain PyTorch makes; and by how much numbers
# may differ: not by a bit where nothing is said.
Compared = tuple[str, Made, Made] | tuple[str, Made, Made, Tensor | float]

_PASSED, _BEFORE = "passed", "passed before"
# what this process knows of kernels, by their name, the device, and what they were checked with
KERNELS: dict[tuple[str, ...], str] = {}


def difference(compared: Iterable[Compared]) -> str | None:
    """What kernels compute otherwise than plain PyTorch, or why nothing could be compared, in a
    line; None if they compute the same. What is compared is made meanwhile.
    """
    try:
        for what, ours, plain, *allowed in compared:
            if isinstance(ours, Tensor) and isinstance(plain, Tensor):
                ours, plain = [ours], [plain]
            for one, other in zip(ours, plain, strict=True):
                if not torch.equal(one, other):
                    apart = (one.double() - other.double()).abs()
                    alike = allowed and one.shape == other.shape
                    if not alike or not ((apart <= allowed[0]) | (one == other)).all():
                        return f"{what} differ from plain ones by up to {apart.max().item():.2g}"
    except Exception as error:  # compilers, drivers and libraries have many ways to fail
        return cause_of(error)
    return None


def kernel_fault(
    name: str, compared: Iterable[Compared], device: torch.device, *asked: object
) -> str | None:
    """Why kernels are not to be used on a device; None if they passed their check, now, earlier in
    this process, or in another one with such a card.

    Args:
        name: of the kernels.
        compared: as for :func:`difference`; it is begun only if the check has to be made.
        asked: the sizes and dtypes that they are checked with.
    """
    what = (name, *map(str, (device, *asked)))
    if what not in KERNELS:
        checks = Checks(*_card(device))
        KERNELS[what] = checks.found(repr(what)) or difference(compared) or _PASSED
        if KERNELS[what] == _PASSED:
            checks.keep(repr(what), _BEFORE)
    said = KERNELS[what]
    return None if said in (_PASSED, _BEFORE) else said


def _card(device: torch.device) -> tuple[object, ...]:
    """A card, its driver, and what compiles for it; nothing of another device."""
    if device.type != "cuda":
        return ()
    about = torch.cuda.get_device_properties(device)
    kind = about.name, about.major, about.minor, about.multi_processor_count
    compilers = [each.version for each in distributions(name="triton")]
    return (*kind, torch.version.cuda, driver_version(), compilers)
