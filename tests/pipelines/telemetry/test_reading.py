"""What is asked for of a topic comes to an end, whatever workers go on sending."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from decoder.contracts.errors import BrokerError
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from pipelines.telemetry import reading
from tests.pipelines.telemetry.records import ONE, produce, record, spread


def test_records_that_were_not_asked_for_are_no_sign_of_those_that_were(
    empty: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing lies on the second partition, and the first one never rests."""
    monkeypatch.setattr(reading, "PATIENCE_S", 1.0)
    spread(empty)
    produce(empty, [(0, record(ONE, 0, 0))])
    quiet, came = threading.Event(), []

    def workers() -> None:
        for sequence in range(1, 60):
            if not quiet.wait(0.1):
                produce(empty, [(0, record(ONE, sequence, 10 * sequence))])

    with ThreadPoolExecutor(1) as threads, reading.reading(empty, "test") as consumer:
        writing = threads.submit(workers)
        try:
            with pytest.raises(BrokerError, match="do not come any more"):
                for fetched in reading.records(consumer, DRAFTS, {0: range(1), 1: range(1)}):
                    came += fetched
            assert writing.running(), "given up only once the workers rested"
        finally:
            quiet.set()
    assert [(r.partition, r.offset) for r in came] == [(0, 0)]
