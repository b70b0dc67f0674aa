"""A bundle is in force after every check or not at all; what was in force stays."""

from __future__ import annotations

import threading
import time

import pytest

from decoder.admission import Admission
from decoder.contracts.bundle import Policy
from decoder.contracts.settings import KafkaSettings
from decoder.feed import POLL_S, PolicyFeed
from decoder.policy.probes import to_bytes
from tests.conftest import random_policy


def test_good_bundles_are_applied_and_the_previous_is_kept() -> None:
    applied: list[Policy] = []
    gate = Admission("scope", applied.append)
    for version in (1, 2, 1):  # a rollback is a swap like any other
        assert gate.offer(to_bytes(random_policy(version, version=version)))
    assert [p.version for p in applied] == [1, 2, 1]
    assert gate.previous is not None and gate.previous.version == 2
    assert gate.swaps == 3 and gate.swap_ms_max > 0 and gate.applied_at > 0


def test_bad_bundles_are_counted_by_reason_and_change_nothing() -> None:
    applied: list[Policy] = []
    gate = Admission("scope", applied.append)
    good = to_bytes(random_policy())
    gate.offer(good)
    for bad in (b"", b"junk" * 100, good[:-5], to_bytes(random_policy(scope="elsewhere"))):
        assert not gate.offer(bad)
    assert len(applied) == 1 and gate.current is applied[0]
    assert gate.refusals == {"malformed": 3, "scope": 1}


def test_a_feed_that_finds_nothing_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker may answer an empty fetch at once; a reader that asked again would never sleep."""

    class Empty:
        def __init__(self) -> None:
            self.polls: list[int] = []
            self.thrice = threading.Event()

        def poll(self, timeout_ms: int) -> dict[object, list[object]]:
            self.polls.append(timeout_ms)
            if len(self.polls) == 3:
                self.thrice.set()
            return {}

        def close(self) -> None:
            pass

    consumer = Empty()
    monkeypatch.setattr(PolicyFeed, "_connect", lambda _: consumer)
    feed = PolicyFeed(KafkaSettings.load(), "scope", Admission("scope", lambda _: None))
    began = time.monotonic()
    feed.start()
    try:
        assert consumer.thrice.wait(30)
    finally:
        feed.close()
    most = (time.monotonic() - began) / POLL_S + 1
    assert set(consumer.polls) == {0} and 3 <= len(consumer.polls) <= most
