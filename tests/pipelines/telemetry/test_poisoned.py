"""Every reader of every topic, where somebody wrote what they liked before and between."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from decoder.admission import Admission
from decoder.contracts.bundle import Policy
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS, TRIALS
from decoder.feed import PolicyFeed
from learner.dead_letters import DeadLetters
from learner.intake import Intake
from learner.lease import Lease
from learner.players import Players
from learner.published import Published
from learner.source import EventSource
from pipelines.cli import app
from pipelines.telemetry import rows
from pipelines.telemetry.export import export
from pipelines.telemetry.tail import follow
from pipelines.watch.ledger import Ledger
from pipelines.watch.observer import Observer
from tests.conftest import until
from tests.contracts.test_events import EVENT
from tests.learner.stage import WARNINGS
from tests.pipelines.telemetry.conftest import of_learner, of_worker
from tests.poison import WORST, poison

pytestmark = WARNINGS


@pytest.fixture(scope="module")
def poisoned(empty: KafkaSettings) -> KafkaSettings:
    """A broker with a service's records of every topic, and poison before and behind them."""
    poison(empty)
    of_worker(empty)
    of_learner(empty)
    poison(empty)
    return empty


def test_a_learner_reads_its_drafts(poisoned: KafkaSettings) -> None:
    source, dead = EventSource(poisoned, {}), DeadLetters(poisoned)
    assert source.connect(threading.Event())
    intake, events = Intake(dead), 0

    def ended() -> bool:
        nonlocal events
        records = source.poll(0.05)
        events += sum(a.events for r in records if (a := intake.admit(r)) is not None)
        source.done(records)
        return source.caught_up and source.lag() == 0

    until(ended)
    assert events == 100 and source.skipped >= len(WORST) and source.read_at > 0
    source.close()
    dead.close()


def test_a_learner_reads_its_rounds(poisoned: KafkaSettings) -> None:
    source = EventSource(poisoned, {}, topic=TRIALS)
    assert source.connect(threading.Event())
    values: list[bytes] = []

    def ended() -> bool:
        records = source.poll(0.05)
        values.extend(record.value for record in records)
        source.done(records)
        return source.caught_up and source.lag() == 0

    until(ended)
    assert any(b"hvd.trials.v2" in value for value in values)
    source.close()


def test_a_learner_reads_leases_and_policies(poisoned: KafkaSettings) -> None:
    lease, published = Lease(poisoned, "another"), Published(poisoned)
    until(lambda: lease.turn({"scope": 0}) or lease.holds("scope"))  # type: ignore[func-returns-value]
    assert lease.term("scope") > 1, "it has read of the one before"
    until(lambda: published.read(1.0))
    assert published.last("scope") is not None
    lease.close()
    published.close()


def test_a_learner_hears_who_could_play(poisoned: KafkaSettings) -> None:
    players, scopes = Players(poisoned), set()  # type: ignore[var-annotated]
    players.read()
    poison(poisoned)
    of_worker(poisoned)

    def heard() -> bool:
        players._read_at = 0.0
        scopes.update(players.read())
        return "scope" in scopes

    until(heard)
    players.close()


def test_a_worker_hears_of_its_policy(poisoned: KafkaSettings) -> None:
    applied: list[Policy] = []
    feed = PolicyFeed(poisoned, "scope", Admission("scope", applied.append))
    feed.start()
    until(lambda: applied)
    feed.close()


@pytest.mark.parametrize("patient", [False, True])
def test_who_looks_on_sees_on(poisoned: KafkaSettings, patient: bool) -> None:
    ledger = Ledger()
    observer = Observer(poisoned, ledger, since_s=3_600.0, patient=patient)
    observer.start()
    until(lambda: ledger.statuses and ledger.published)
    observer.check()
    observer.close()


def asked(kafka: KafkaSettings, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", kafka.bootstrap_servers)
    done = CliRunner().invoke(app, ["telemetry", *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def test_what_lies_there_is_described(
    poisoned: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = json.loads(asked(poisoned, monkeypatch, "describe", "--json").stdout)
    assert told["counts"]["rows"] == 100 and told["counts"]["unreadable"] >= len(WORST)
    assert all(topic["unreadable"] >= len(WORST) for topic in told["topics"])
    assert "cannot be unpacked" in asked(poisoned, monkeypatch, "describe").stdout


def test_it_is_exported_and_followed(poisoned: KafkaSettings, tmp_path: Path) -> None:
    found = export(poisoned, tmp_path / "events", lambda *_: None)
    assert found.written == 100 and found.counts.unreadable >= len(WORST)
    again = export(poisoned, tmp_path / "events", lambda *_: None)
    assert (again.written, again.counts.unreadable) == (100, found.counts.unreadable)
    intake = rows.Intake()
    following = follow(poisoned, intake, {}, began=1.0)
    for _ in range(100):
        next(following)
    following.close()
    assert intake.counts.unreadable


def test_a_tenant_is_forgotten(poisoned: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_WORKER_ID_KEY", "of these tests, long enough")
    tenant = EVENT.tenant
    told = asked(poisoned, monkeypatch, "forget", "--tenant", tenant)
    assert DRAFTS.name in told.stdout and "cannot be unpacked" in told.stderr
    done = asked(poisoned, monkeypatch, "forget", "--tenant", tenant, "--delete-records", "--yes")
    assert "Deleted" in done.stderr
    left = json.loads(asked(poisoned, monkeypatch, "forget", "--tenant", tenant, "--json").stdout)
    assert not left["held"] and left["unreadable"], "what nobody could look into"
