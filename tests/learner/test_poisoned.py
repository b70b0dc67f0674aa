"""A learner among whatever anybody wrote onto its topics, and among any number of keys."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kafka.errors import KafkaError

from decoder.contracts.errors import EventRefused
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.status import LearnerStatus, WorkerStatus
from decoder.contracts.topics import DEAD, STATUS
from learner import lease as leases
from learner.ingest import statuses
from learner.ingest.dead_letters import DeadLetters
from learner.ingest.source import Fetched
from learner.lease import CLAIM, Claim, Lease
from tests.learner.conftest import Broker
from tests.learner.stage import WARNINGS, Stage
from tests.learner.stream import SCOPE, batches, consume, produce, step_until, stop
from tests.learner.traffic import Traffic
from tests.poison import poison

pytestmark = WARNINGS
EVENTS = Traffic(seed=9).events(20)


def test_malformed_records_on_every_topic_are_skipped(bare: Stage) -> None:
    half = batches(EVENTS)[:4], batches(EVENTS)[4:]
    poison(bare.kafka)
    produce(bare.kafka, half[0])
    learner = bare.learner("off")
    step_until(learner, lambda: learner.reader.events == 200 and learner.lease.ready)
    skipped = 2 * learner.source.skipped
    poison(bare.kafka)
    step_until(learner, lambda: learner.source.skipped == skipped)
    stop(learner)
    again = bare.learner("off")
    produce(bare.kafka, half[1])
    step_until(again, lambda: again.reader.events == len(EVENTS) - 200)
    assert again.source.skipped == skipped > 0 == again.faults + again.reader.repeated
    stop(again)


def record(key: str, value: bytes, offset: int = 0) -> SimpleNamespace:
    return SimpleNamespace(key=key.encode(), value=value, partition=0, offset=offset, headers=[])


def test_leases_are_bounded_and_live_ones_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases, "MAX_SCOPES", 50)
    lease = Lease(KafkaSettings(), "ours")
    for number in range(500):
        lease._receive(record("live", CLAIM.dump_json(Claim("other", 1, number))))
        lease._receive(record(f"made.up.{number}", CLAIM.dump_json(Claim("x", 1, 1))))
        lease._receive(record("/" * 100_000 + str(number), CLAIM.dump_json(Claim("x", 1, 1))))
    assert lease.holder_of("live") == "other" and lease.holder_of("made.up.499") == "x"
    assert lease.holder_of("made.up.7") == "" == lease.holder_of("/" * 100_000 + "499")


def test_an_oversized_dead_letter_does_not_affect_others(broker: Broker) -> None:
    dead, refusal = DeadLetters(broker.kafka), EventRefused("no record")
    for value in (b"x" * (1 << 20), b"small"):
        dead.send(Fetched(0, 0, 0, b"w", value), refusal)
    dead.close()
    assert dead.failed == 1 and [r.value for r in consume(broker.kafka, DEAD)] == [b"small"]


def test_forged_statuses_neither_fill_memory_nor_reduce_sampling(bare: Stage) -> None:
    learner = bare.learner("off")
    produce(bare.kafka, batches(EVENTS[:200]))
    step_until(learner, lambda: learner.lease.holds(SCOPE))
    said = [
        LearnerStatus(process="forged", scope=scope, time=1.0, holds_lease=True, share=1e-9)
        for scope in (SCOPE, *(f"made-up-{n}" for n in range(100)))
    ]
    told = [WorkerStatus(process="w", scope="x" * 10_000, time=1.0)]
    produce(bare.kafka, [each.model_dump_json().encode() for each in (*said, *told)], STATUS)
    step_until(learner, lambda: bool(learner.statuses.sample_rates))
    learner.step()
    assert not learner.sampler and not learner.statuses.is_known("x" * 10_000)
    stop(learner)


def test_forged_scopes_cause_no_waiting_without_statuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, asked = [100.0], list[float]()

    def refused(*_: object, **options: object) -> None:
        asked.append(now[0])
        raise KafkaError

    monkeypatch.setattr("decoder.kafka.compacted.open_consumer", refused)
    monkeypatch.setattr(statuses, "time", SimpleNamespace(monotonic=lambda: now[0]))
    known = statuses.StatusReader(KafkaSettings(bootstrap_servers="127.0.0.1:1"))
    for _ in range(300):
        now[0] += 0.1
        assert not known.is_known("made-up")
    assert len(asked) <= 30.0 / statuses.RETRY_SECONDS + 1
