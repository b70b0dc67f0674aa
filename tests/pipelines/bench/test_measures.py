"""The bench of the learner feeds it what a worker would, and says what it asked for."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from decoder.contracts.events import decode_batch
from pipelines.bench.learner import RECORD, records
from pipelines.cli import app


def test_records_are_of_many_requests_and_moments() -> None:
    read = [decode_batch(record.value) for record in records(6, scopes=2)]
    assert [(b.origin.scope, b.sequence) for b in read] == [
        ("scope0", 0), ("scope1", 0), ("scope0", 1), ("scope1", 1), ("scope0", 2), ("scope1", 2),
    ]  # fmt: skip
    assert all(len(batch) == RECORD for batch in read)
    assert len({name for batch in read for name in batch.names["request"]}) == 6 * RECORD // 32
    times = [float(batch.numbers["time"][0]) for batch in read]
    assert times == sorted(set(times)) and {b.origin.life for b in read} == {"0" * 8, "0" * 7 + "1"}


def test_the_command_prints_what_it_measured() -> None:
    done = CliRunner().invoke(app, ["bench", "learner", "--events", "20000", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    for run in (found, found["ten_scopes"]):
        assert run["events"] == -(-20_000 // RECORD) * RECORD and run["events_per_s"] > 0
        assert run["rss_mb"] >= run["rss_mb_after_1m"] > 0 and run["rss_mb_after_10m"] is None
    assert (found["scopes"], found["ten_scopes"]["scopes"]) == (1, 10)


def test_a_decision_is_timed_for_every_kind_of_policy() -> None:
    command = ["bench", "decide", "--rounds", "100"]
    done, shown = (CliRunner().invoke(app, [*command, *more]) for more in (["--json"], []))
    assert done.exit_code == shown.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found) == ["survival", "payoff", "frequency"]
    for kind, timing in found.items():
        assert timing["kind"] == kind and all(v > 0 for k, v in timing.items() if k != "kind")
    assert "survival p50 us batch1" in shown.output
