"""What a demo says of itself: figures, sentences, what fails it, and where they are written."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from decoder.contracts.bundle import CHAMPION, frequency_policy
from pipelines.demo.run import Run, is_clear, outcome, page_of, status_line, write
from pipelines.demo.summary import Summary, summarise
from pipelines.watch.ledger import Ledger, Phase
from tests.pipelines.watch.records import (
    SCOPE,
    WORKER,
    batch,
    event,
    learner_status,
    rounds,
    worker_status,
)

FASTER = {CHAMPION: 60.0, "plain": 40.0, "suffix": 55.0, "first": 60.0}
REQUESTS = {"answered": 2, "failed": 0, "tokens": 280}
EVENTS = 480


def recorded(
    lost: int = 0, last_version: int = 2, rates: dict[str, float] | None = None, faults: int = 0
) -> Ledger:
    """Two minutes of a run; so many events were never learned from."""
    ledger = Ledger(WORKER)
    for second in range(121):
        status = {"events_made": 4 * second, "faults": faults, "policy_version": 1}
        if second >= 60:
            status |= {"policy_version": last_version, "policy_applied_at": 1060.0}
        ledger.add_status(worker_status(1000.0 + second, 30 * second, **status))
        ledger.add_status(learner_status(1000.0 + second, min(4 * second, EVENTS - lost)))
    arms = ("cache", "cache", "cache", "none")
    ledger.add_drafts(batch([event(i, 1000.0 + i / 4, arm=arms[i % 4]) for i in range(EVENTS)]))
    start = replace(frequency_policy(SCOPE), version=1)
    ledger.add_policy(999.0, SCOPE, CHAMPION, start)
    learned = replace(start, version=2, provenance={"origin": "learner"})
    ledger.add_policy(1059.0, SCOPE, CHAMPION, learned)
    for one in rounds(60, 1000.0, 2.0, rates or FASTER):
        ledger.add_round(one)
    ledger.phases = [
        Phase("agentic", ("edits", "tools"), 1000.0, 1060.0),
        Phase("conversation", ("chat", "code"), 1060.0, 1120.0),
    ]
    return ledger


def summary_of(ledger: Ledger, **requests: int) -> Summary:
    return summarise(ledger, REQUESTS | requests, 1000.0)


def test_figures_come_from_the_ledger_and_every_comparison_has_its_phases() -> None:
    summary = json.loads(json.dumps(summary_of(recorded()), allow_nan=False))
    assert (summary["requests_answered"], summary["requests_failed"]) == (2, 0)
    lost = summary["events_produced"], summary["events_consumed"], summary["events_lost"]
    assert lost == (EVENTS, EVENTS, 0)
    assert summary["policy_versions_applied"] == [2] and summary["worker"]["policy_version"] == 2
    for phase in summary["phases"]:
        assert phase["arm_shares"] == {"cache": 0.75, "model": 0.0, "none": 0.25}
        assert (phase["mae"], phase["events"]) == (2.0, 240)
    uplift = summary["uplift"]
    assert set(uplift) == {"over_plain", "over_suffix", "over_first"}
    for one in uplift.values():
        assert one["pairs"] == 60 and one["low"] < one["ratio"] < one["high"]
        assert list(one["phases"]) == ["agentic", "conversation"]
    ratios = [uplift[name]["ratio"] for name in ("over_plain", "over_first")]
    assert ratios == pytest.approx([1.5, 1.0], rel=0.03)


def test_events_that_the_learner_had_before_do_not_count() -> None:
    ledger = recorded()
    ledger.add_status(learner_status(1121.0, 1480))
    assert summarise(ledger, REQUESTS, 1000.0, consumed_before=1000)["events_lost"] == 0


@pytest.mark.parametrize(
    ("ledger", "failed", "words"),
    [
        (recorded(), 0, []),
        (recorded(lost=3), 0, ["3 events were lost"]),
        (recorded(), 1, ["1 requests failed"]),
        (recorded(faults=2), 0, ["2 faults"]),
        (Ledger(WORKER, refused=1), 0, ["1 records could not be read", "no events were made"]),
    ],
)
def test_what_fails_a_run(ledger: Ledger, failed: int, words: list[str]) -> None:
    summary = summary_of(ledger, failed=failed)
    assert summary["ok"] is not bool(words) and len(summary["failings"]) == len(words)
    assert all(w in failing for w, failing in zip(words, summary["failings"], strict=True))


@pytest.mark.parametrize(
    ("ledger", "word"),
    [
        (recorded(last_version=1), "Nothing that was learned"),
        (recorded(rates={**FASTER, "plain": 60.0}), "faster than plain decoding cannot be told"),
        (recorded(rates={CHAMPION: 60.0}), "faster than plain decoding cannot be told"),
    ],
)
def test_what_time_was_too_short_to_show_is_said_and_fails_nothing(
    ledger: Ledger, word: str
) -> None:
    summary = summary_of(ledger)
    assert any(word in note for note in summary["notes"]) and summary["failings"] == []


def test_a_phase_lasts_until_each_comparison_is_clear() -> None:
    ledger = recorded()
    assert is_clear(ledger) is True
    ledger.rounds = rounds(36, 1000.0, 2.0, {CHAMPION: 60.0, "plain": 40.0})
    assert is_clear(ledger) is False, "six pairs of this phase have no interval"
    ledger.phases.append(Phase("to come", ("chat",), 1130.0))
    assert is_clear(ledger) is False


def test_three_sentences_say_what_was_shown_and_no_more() -> None:
    speed, learning, trust = summary_of(recorded(), failed=1)["sentences"]
    assert "1.5" in speed and "plain decoding" in speed and " to " in speed
    assert "480 draft events" in learning and "after 60 seconds" in learning
    assert "the policy that ships" in learning
    assert "480 draft events none were lost" in trust and "of 3 requests 1 failed" in trust
    slower = summary_of(recorded(rates={**FASTER, "plain": 90.0}, lost=1))["sentences"]
    assert "slower than plain decoding in agentic, conversation" in slower[2]
    nothing = summary_of(Ledger(WORKER))["sentences"]
    assert len(nothing) == 3 and "too short to say" in nothing[0]


@pytest.mark.parametrize("ledger", [recorded(), Ledger(WORKER)])
def test_a_run_is_written_and_shown_at_every_stage(ledger: Ledger, tmp_path: Path) -> None:
    summary = summary_of(ledger)
    run = Run(summary, page_of(ledger, summary))
    page = write(run, tmp_path)
    assert json.dumps(summary["sentences"][0]) in page.read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["ok"] is summary["ok"]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(status_line(ledger), outcome(run))
    shown = console.export_text()
    assert "over plain decoding" in shown and "requests none failed." in shown
    assert ("1.5" in shown) is bool(ledger.rounds)
