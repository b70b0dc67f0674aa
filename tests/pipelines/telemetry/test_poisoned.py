"""Every reader of every topic, where somebody wrote what they liked before and between."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from decoder.admission import Admission
from decoder.contracts.bundle import Policy
from decoder.contracts.settings import KafkaSettings
from decoder.contracts.topics import DRAFTS
from decoder.feed import PolicyFeed
from pipelines.cli import app
from pipelines.telemetry.export import export
from pipelines.watch.ledger import Ledger, Observer
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


def test_a_worker_hears_of_its_policy_and_who_looks_on_sees_on(poisoned: KafkaSettings) -> None:
    applied: list[Policy] = []
    feed = PolicyFeed(poisoned, "scope", Admission("scope", applied.append))
    feed.start()
    until(lambda: applied)
    feed.close()
    for since_s in (3_600.0, math.inf):
        ledger = Ledger()
        with Observer(poisoned, ledger, since_s):
            until(lambda seen=ledger: seen.statuses and seen.published)


def test_it_is_exported(poisoned: KafkaSettings, tmp_path: Path) -> None:
    found = export(poisoned, tmp_path / "events", lambda *_: None)
    assert found.rows >= 100 and found.counts["unreadable"] >= len(WORST)
    again = export(poisoned, tmp_path / "events", lambda *_: None)
    assert (again.rows, again.counts) == (found.rows, found.counts)


def test_a_tenant_is_forgotten(poisoned: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_KAFKA_BOOTSTRAP_SERVERS", poisoned.bootstrap_servers)
    monkeypatch.setenv("HVD_WORKER_ID_KEY", "of these tests, long enough")

    def asked(*arguments: str) -> Any:
        command = ["telemetry", "forget", "--tenant", EVENT.tenant, *arguments]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, (done.output, done.exception)
        return done

    told = asked()
    assert DRAFTS.name in told.stdout and "cannot be unpacked" in told.stderr
    assert "Deleted" in asked("--delete-records", "--yes").stderr
    left = json.loads(asked("--json").stdout)
    assert not left["held"] and left["unreadable"], "what nobody could look into"
