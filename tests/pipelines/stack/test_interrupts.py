from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from pipelines.stack.processes import SIGNALS, first_only, held


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """As in a terminal: what started the tests may ignore a signal, as nohup does."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_interrupts_and_what_stops_things_is_left_in_peace(number) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    stopped = False
    with pytest.raises(KeyboardInterrupt), first_only():
        try:
            signal.raise_signal(number)
        finally:
            for each in SIGNALS:
                signal.raise_signal(each)
            stopped = True
    assert stopped
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with first_only():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_waits_until_a_child_is_in_its_list() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), first_only():
        with held():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("started")
            done.append("listed")
        done.append("never")
    assert done == ["started", "listed"]


def test_a_signal_that_falls_into_a_finalizer_is_raised_again() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)
            reached.append("never")

    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), first_only():
        Finalized()
        time.sleep(60.0)
        reached.append("never")
    assert not reached
