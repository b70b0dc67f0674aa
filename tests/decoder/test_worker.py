"""A worker with a real broker: what it made is on the topics, and all of it accounted for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from decoder.contracts.bundle import frequency_policy
from decoder.contracts.identity import Pseudonyms, is_pseudonym
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import TRIALS
from decoder.contracts.trials import decode_round
from decoder.core.router import RequestOptions
from decoder.experiment.interleaver import MAX_PENDING_ROUNDS
from decoder.settings import WorkerSettings
from decoder.worker import Worker, make_worker
from learner.release.publisher import PolicyPublisher
from tests.conftest import random_policy, swept, until
from tests.decoder.simulated import decode_all
from tests.decoder.telemetry.broker import batches, consumed
from tests.events import events_of

NAMES = Pseudonyms(b"of these tests")


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Sockets left behind are collected here, not in somebody else's test."""
    yield
    swept()


def decode(worker: Worker, name: str, secret: str = "") -> None:
    options = RequestOptions(
        60, 4096, opaque=NAMES.of("request", name), tenant=secret, session=secret, workload="loops"
    )
    text = [1, 2, 3] * 15 + list(range(4, 19))
    decode_all(worker.router, name, [1, 2, 3], text, options)


def test_every_cycle_is_on_the_topic_and_accounted_for(
    kafka: KafkaSettings, token_classes: np.ndarray
) -> None:
    settings = WorkerSettings(name="w", metrics=False, floor=False, holdout=0.0)
    worker = make_worker(settings, kafka, "scope", token_classes, has_model=False)
    decode(worker, "first", secret="a client's own word")
    publisher = PolicyPublisher(kafka)
    champion = replace(random_policy(version=7), threshold=0.0)
    champion = publisher.publish(champion, term=1)
    until(lambda: worker.status().policy_version == 7)
    publisher.close()
    decode(worker, "second")
    worker.close()
    status = worker.status()
    assert status.events_unaccounted == status.queue_depth == 0
    assert status.events_made == status.events_sent == sum(status.cycles.values()) > 0
    assert (status.publication, status.policy_role) == (champion.publication, "champion")
    found = batches(kafka)
    assert [b.sequence for b in found] == list(range(len(found)))
    assert {b.origin.life for b in found} == {status.life}
    events = [e for b in found for e in events_of(b)]
    assert sorted(e.number for e in events) == list(range(status.events_made))
    assert {e.request for e in events} == {NAMES.of("request", n) for n in ("first", "second")}
    assert all(is_pseudonym(e.tenant) for e in events if e.publication == 0)
    drafts = [e for e in events if e.draft_len]
    assert len(drafts) == status.drafts_labelled and 0 < len(drafts) < len(events)
    assert {(e.policy_version, e.publication, e.role, e.parameter_name) for e in events} == {
        (0, 0, "first", "rate"), (7, champion.publication, "champion", "threshold"),
    }  # fmt: skip
    assert all(e.verified_len <= e.drafted_len <= e.draft_len for e in drafts if e.arm == "cache")


def test_where_nothing_is_sent_nothing_is_kept_and_nothing_missed(
    token_classes: np.ndarray,
) -> None:
    settings = WorkerSettings(
        name="w", metrics=False, telemetry=False, queue_size=8, floor=False, holdout=0.5
    )
    worker = make_worker(settings, KafkaSettings(), "scope", token_classes, has_model=False)
    for number in range(2 * MAX_PENDING_ROUNDS):
        decode(worker, f"request {number}")
        if worker.interleaver.rounds_dropped:
            break
    worker.close()
    status = worker.status()
    assert sum(status.cycles.values()) > 100
    assert status.events_made == status.queue_depth == status.events_dropped == 0
    assert status.rounds_made > status.rounds_dropped == 0


def test_rounds_are_on_their_topic_and_add_up_to_the_status(
    kafka: KafkaSettings, token_classes: np.ndarray
) -> None:
    settings = WorkerSettings(
        name="w",
        metrics=False,
        holdout=0.6,
        variants=("plain", "suffix", "model"),
        start="counting",
    )
    worker = make_worker(settings, kafka, "scope", token_classes, has_model=False)
    publisher = PolicyPublisher(kafka)
    trial = replace(frequency_policy("scope"), version=7, role="trial", share=0.3)
    publisher.publish(trial, term=1, role="trial")
    until(lambda: worker.status().trial_version == 7)
    for number in range(40):
        decode(worker, f"r{number}")
    status = worker.status()
    assert status.trial_share == 0.3 and status.policy_kind == "frequency"
    until(lambda: worker.status().rounds_sent == worker.status().rounds_made)
    worker.close()
    publisher.close()
    status = worker.status()
    rounds = [decode_round(value) for value in consumed(kafka, TRIALS.name)]
    assert [r.number for r in rounds] == list(range(status.rounds_made)) != []
    assert {(r.scope, r.worker, r.life) for r in rounds} == {("scope", "w", status.life)}
    assert set(status.sides) == {"outside", "champion", "plain", "suffix", "trial"}, "no drafter"
    for name in ("champion", "plain", "suffix", "trial"):
        blocks = [block for r in rounds if (block := r.block(name)) is not None]
        assert status.sides[name].tokens == pytest.approx(sum(b.tokens for b in blocks))
        assert status.sides[name].steps == sum(b.steps for b in blocks)
        assert {b.version for b in blocks} == {7 if name == "trial" else 0}
    assert status.rounds_dropped == 0 and not status.sides_failed
    sides = {e.side for b in batches(kafka) for e in events_of(b)}
    assert sides - {""} == {"champion", "plain", "suffix", "trial"}
