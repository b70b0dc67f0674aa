"""A learner among whatever anybody wrote onto its topics, and among any number of keys."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from decoder.contracts.errors import EventRefused
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DEAD
from learner import lease as leases
from learner.dead_letters import DeadLetters
from learner.lease import CLAIM, Claim, Lease
from learner.source import Fetched
from tests.learner.conftest import Broker
from tests.learner.stage import WARNINGS, Stage
from tests.learner.stream import batches, consume, produce, step_until, stop
from tests.learner.traffic import Traffic
from tests.poison import poison

pytestmark = WARNINGS
EVENTS = Traffic(seed=9).events(20)


def test_a_learner_learns_behind_poison_on_every_topic_and_after_a_restart(bare: Stage) -> None:
    half = batches(EVENTS)[:4], batches(EVENTS)[4:]
    poison(bare.kafka)
    produce(bare.kafka, half[0])
    learner = bare.learner("off")
    step_until(learner, lambda: learner.intake.events == 200 and learner.lease.known)
    skipped = 2 * learner.source.skipped
    poison(bare.kafka)
    step_until(learner, lambda: learner.source.skipped == skipped)
    stop(learner)
    again = bare.learner("off")
    produce(bare.kafka, half[1])
    step_until(again, lambda: again.intake.events == len(EVENTS) - 200)
    assert again.source.skipped == skipped > 0 == again.faults + again.intake.repeated
    stop(again)


def record(key: str, value: bytes, offset: int = 0) -> SimpleNamespace:
    return SimpleNamespace(key=key.encode(), value=value, partition=0, offset=offset, headers=[])


def test_leases_of_any_number_of_scopes_are_held_in_bounds_and_the_live_ones_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases, "SCOPES", 50)
    lease = Lease(KafkaSettings(), "ours")
    for number in range(500):
        lease._saw(record("live", CLAIM.dump_json(Claim("other", 1, number))))
        lease._saw(record(f"made.up.{number}", CLAIM.dump_json(Claim("x", 1, 1))))
        lease._saw(record("/" * 100_000 + str(number), CLAIM.dump_json(Claim("x", 1, 1))))
    assert lease.holder_of("live") == "other" and lease.holder_of("made.up.499") == "x"
    assert lease.holder_of("made.up.7") == "" == lease.holder_of("/" * 100_000 + "499")


def test_a_dead_letter_that_is_too_large_costs_no_other(broker: Broker) -> None:
    dead, refusal = DeadLetters(broker.kafka), EventRefused("no record")
    for value in (b"x" * (1 << 20), b"small"):
        dead.send(Fetched(0, 0, 0, b"w", value), refusal)
    dead.close()
    assert dead.failed == 1 and [r.value for r in consume(broker.kafka, DEAD)] == [b"small"]
