"""A learner among whatever anybody wrote onto its topics, and among any number of keys."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from decoder.contracts.settings import KafkaSettings
from learner import lease as leases
from learner.lease import CLAIM, Claim, Lease
from tests.learner.stage import WARNINGS, Stage
from tests.learner.stream import batches, produce, step_until, stop
from tests.learner.traffic import Traffic
from tests.poison import poison

pytestmark = WARNINGS
EVENTS = Traffic(seed=9).events(20)


def test_a_learner_learns_behind_poison_on_every_topic_and_after_a_restart(bare: Stage) -> None:
    half = batches(EVENTS)[:4], batches(EVENTS)[4:]
    poison(bare.kafka)
    produce(bare.kafka, half[0])
    learner = bare.learner("off")
    step_until(learner, lambda: learner.intake.events == 200)
    poison(bare.kafka)
    step_until(learner, lambda: learner.lease.known and learner.source.lag() == 0)
    skipped = learner.source.skipped
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
