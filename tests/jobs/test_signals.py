"""Signals to stop: raised, or noted where work must not be torn apart."""

from __future__ import annotations

import os
import signal

import pytest

from tswift.jobs.job import Signals, Stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises(number: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"stopped by {signal.Signals(number).name}") as found, Signals():
        os.kill(os.getpid(), number)
    assert found.value.code == 128 + number
    assert isinstance(found.value, KeyboardInterrupt)
    assert signal.getsignal(number) is before


def test_as_many_are_noted_as_there_is_patience() -> None:
    with Signals() as signals:
        signals.patience = 1
        assert signals.stopped is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stopped.number == signal.SIGTERM
        with pytest.raises(Stopped, match="SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.stopped is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
