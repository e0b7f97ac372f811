"""The hub of models and data sets: its client kept quiet, and not kept trying where the hub cannot be reached."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from huggingface_hub import constants, get_session
from huggingface_hub.utils import logging as hub_logging

_PATIENCE = 10.0  # seconds


@contextmanager
def hub(wanted: bool = True) -> Iterator[None]:
    """While entered, files come from the hub; from its cache alone, at once, if the hub cannot be reached.

    Left to itself, its client tries a file six times within half a minute, and says so every time.

    Args:
        wanted: whether anything is to come from there; if not, nothing is done.
    """
    if not wanted:
        yield
        return
    offline, verbosity = constants.HF_HUB_OFFLINE, hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.CRITICAL)
    try:
        constants.HF_HUB_OFFLINE = offline or not _reached()
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        hub_logging.set_verbosity(verbosity)


def _reached() -> bool:
    with suppress(Exception):  # the library that speaks HTTP differs by version, and its errors with it
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE)  # any answer will do
        return True
    return False
