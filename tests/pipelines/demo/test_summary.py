"""What a demo says of itself: figures, sentences, what fails it, and where they are written."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from decoder.contracts.bundle import CHAMPION
from pipelines.demo.run import Run, is_clear, outcome, page_of, status_line, write
from pipelines.demo.summary import Summary, summarise
from pipelines.watch.ledger import Ledger, Phase
from tests.pipelines.watch import records
from tests.pipelines.watch.records import EVENTS, FASTER, recorded

REQUESTS = {"answered": 2, "failed": 0, "tokens": 280}


def summary_of(ledger: Ledger, **requests: int) -> Summary:
    return summarise(ledger, REQUESTS | requests, 1000.0)


def test_figures_are_of_this_run_alone_and_every_comparison_has_its_phases() -> None:
    ledger = recorded()
    ledger.add_status(records.learner_status(1121.0, EVENTS + 1000))
    found = summarise(ledger, REQUESTS, 1000.0, consumed_before=1000)
    summary = json.loads(json.dumps(found, allow_nan=False))
    assert (summary["requests_answered"], summary["requests_failed"]) == (2, 0)
    assert (summary["events_consumed"], summary["events_lost"]) == (EVENTS, 0)
    assert summary["policy_versions_applied"] == [2] and summary["worker"]["policy_version"] == 2
    for phase in summary["phases"]:
        assert phase["arm_shares"] == {"cache": 0.75, "model": 0.0, "none": 0.25}
        assert (phase["mae"], phase["events"]) == (2.0, 240)
    assert set(summary["uplift"]) == {"over_plain", "over_suffix", "over_first"}
    for one in summary["uplift"].values():
        assert one["pairs"] == 60 and one["low"] < one["ratio"] < one["high"]
        assert list(one["phases"]) == ["agentic", "conversation"]


@pytest.mark.parametrize(
    ("ledger", "failed", "kind", "word"),
    [
        (recorded(lost=3), 0, "failings", "3 events were lost"),
        (recorded(), 1, "failings", "1 requests failed"),
        (recorded(faults=2), 0, "failings", "2 faults"),
        (Ledger(records.WORKER), 0, "failings", "no events were made"),
        (recorded(version=1), 0, "notes", "Nothing that was learned"),
        (recorded(**{**FASTER, "plain": 60.0}), 0, "notes", "than plain decoding cannot be"),
        (recorded(champion=60.0), 0, "notes", "than plain decoding cannot be told"),
    ],
)
def test_a_fault_fails_a_run_and_what_time_was_too_short_to_show_does_not(
    ledger: Ledger, failed: int, kind: str, word: str
) -> None:
    summary = summary_of(ledger, failed=failed)
    assert any(word in said for said in summary[kind])
    assert summary["ok"] is (summary["failings"] == []) is (kind == "notes")


def test_a_phase_lasts_until_each_comparison_is_clear() -> None:
    ledger = recorded()
    assert is_clear(ledger) is True
    ledger.rounds = records.rounds(36, 1000.0, 2.0, {CHAMPION: 60.0, "plain": 40.0})
    assert is_clear(ledger) is False, "six pairs of this phase have no interval"
    ledger.phases.append(Phase("to come", ("chat",), 1130.0))
    assert is_clear(ledger) is False


def test_three_sentences_say_what_was_shown_and_no_more() -> None:
    speed, learning, trust = summary_of(recorded(), failed=1)["sentences"]
    assert "1.5" in speed and "plain decoding" in speed and " to " in speed
    assert "480 draft events" in learning and "after 60 seconds" in learning
    assert "the policy that ships" in learning
    assert "480 draft events none were lost" in trust and "of 3 requests 1 failed" in trust
    slower = summary_of(recorded(**{**FASTER, "plain": 90.0}, lost=1))["sentences"]
    assert "slower than plain decoding in agentic, conversation" in slower[2]
    nothing = summary_of(Ledger(records.WORKER))["sentences"]
    assert len(nothing) == 3 and "too short to say" in nothing[0]


@pytest.mark.parametrize("ledger", [recorded(), Ledger(records.WORKER)])
def test_a_run_is_written_and_shown_at_every_stage(ledger: Ledger, tmp_path: Path) -> None:
    summary = summary_of(ledger)
    run = Run(summary, page_of(ledger, summary))
    page = write(run, tmp_path)
    assert json.dumps(summary["sentences"][0]) in page.read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["ok"] is summary["ok"]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(outcome(run))
    ledger.phases.append(Phase("begins", ("chat",), 1130.0))
    console.print(status_line(ledger))
    shown = console.export_text()
    assert "over plain decoding" in shown and "requests none failed." in shown
    assert ("1.5" in shown) is bool(ledger.rounds)
